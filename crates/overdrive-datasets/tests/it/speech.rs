//! Speech is decoded and resampled as by soundfile and torchaudio (`fixtures/gen_speech.py`).

use std::path::Path;

use crate::common::{fixture, write_files};
use overdrive_datasets::{
    Dataset, Error, ErrorLog, ErrorPolicy, Resampling, SpeechDataset, SpeechOptions,
};

fn floats(name: &str) -> Vec<f32> {
    let bytes = std::fs::read(fixture(&format!("speech/expected/{name}.f32"))).unwrap();
    let floats = bytes.chunks_exact(4);
    floats
        .map(|bytes| f32::from_le_bytes(bytes.try_into().unwrap()))
        .collect()
}

/// Returns options with the folder of the fixtures' audio files.
fn options() -> SpeechOptions {
    SpeechOptions {
        folder: Some(fixture("speech")),
        ..SpeechOptions::default()
    }
}

fn open(dir: &Path, name: &str, manifest: &str, options: SpeechOptions) -> SpeechDataset {
    write_files(dir, &[(name, manifest)]);
    SpeechDataset::open([dir.join(name)], options).unwrap()
}

fn largest_difference(found: &[f32], expected: &[f32]) -> f32 {
    let differences = found.iter().zip(expected).map(|(a, b)| (a - b).abs());
    differences.fold(0.0, f32::max)
}

#[test]
fn every_format_is_decoded_mixed_and_resampled_as_by_soundfile_and_torchaudio() {
    let dir = tempfile::tempdir().unwrap();
    for (name, tolerance) in [
        ("pcm16.wav", 2e-6),
        ("pcm24.wav", 2e-6),
        ("float.wav", 2e-6),
        ("clip.flac", 2e-6),
        ("mono8k.wav", 2e-6),
        ("clip.ogg", 1e-4),
        ("clip.mp3", 1e-4),
    ] {
        let manifest = format!("path,sentence\n{name},The sound {name}.\n");
        let speech = open(dir.path(), "rows.csv", &manifest, options());
        let clip = speech.get(0).unwrap();
        assert_eq!(
            (clip.text.as_str(), clip.sampling_rate),
            (format!("The sound {name}.").as_str(), 16_000)
        );
        let expected = floats(name);
        assert_eq!(clip.samples.len(), expected.len(), "{name}");
        let difference = largest_difference(&clip.samples, &expected);
        println!("{name}: {difference:.1e}");
        assert!(difference <= tolerance, "{name}: {difference:e}");
    }
}

#[test]
fn other_rates_and_filters_are_those_of_torchaudio() {
    let dir = tempfile::tempdir().unwrap();
    for (sampling_rate, lowpass_filter_width, rolloff) in [
        (44_100, 6, 0.99),
        (8_000, 64, 0.947_593_716_739_959_6),
        (11_025, 6, 0.99),
    ] {
        let options = SpeechOptions {
            sampling_rate,
            resampling: Resampling {
                lowpass_filter_width,
                rolloff,
            },
            ..options()
        };
        let speech = open(dir.path(), "rows.csv", "path,text\npcm16.wav,\n", options);
        let clip = speech.get(0).unwrap();
        let expected = floats(&format!("{sampling_rate}_{lowpass_filter_width}"));
        let difference = largest_difference(&clip.samples[..expected.len()], &expected);
        println!("{sampling_rate}: {difference:.1e}");
        assert!(difference <= 2e-6, "{sampling_rate}: {difference:e}");
    }
}

#[test]
fn the_manifests_of_common_voice_nemo_and_audiofolder_open_as_they_are() {
    let dir = tempfile::tempdir().unwrap();
    let wav = std::fs::read(fixture("speech/mono8k.wav")).unwrap();
    write_files(
        dir.path(),
        &[
            ("clips/a.wav", wav.as_slice()),
            ("a.wav", &wav),
            (
                "validated.tsv",
                b"client_id\tpath\tsentence\tup_votes\n9\ta.wav\t\"Quite\" so.\t2\n9\ta.wav\t\"So.\t1\n",
            ),
            ("manifest.json", b"{\"audio_filepath\": \"clips/a.wav\", \"duration\": 0.27, \"text\": \"quite so\"}\n"),
            ("metadata.csv", b"file_name,transcription\nclips/a.wav,Quite so.\n"),
            ("metadata.jsonl", b"{\"file_name\": \"a.wav\", \"transcription\": \"Quite so.\"}\n"),
            ("array.json", b"[{\"audio\": \"a.wav\", \"transcript\": \"Quite so.\"}]"),
        ],
    );
    let common_voice = SpeechOptions {
        folder: Some(dir.path().join("clips")),
        ..SpeechOptions::default()
    };
    for (name, options, text) in [
        ("validated.tsv", common_voice, "\"Quite\" so."),
        ("manifest.json", SpeechOptions::default(), "quite so"),
        ("metadata.csv", SpeechOptions::default(), "Quite so."),
        ("metadata.jsonl", SpeechOptions::default(), "Quite so."),
        ("array.json", SpeechOptions::default(), "Quite so."),
    ] {
        let speech = SpeechDataset::open([dir.path().join(name)], options).unwrap();
        assert_eq!(speech.text(0).unwrap(), text, "{name}");
        let clip = speech.get(0).unwrap();
        assert_eq!(
            (clip.text.as_str(), clip.samples.len()),
            (text, floats("mono8k.wav").len()),
            "{name}"
        );
        assert_eq!(clip.duration(), clip.samples.len() as f64 / 16_000.0);
    }
}

#[test]
fn tables_in_a_folder_are_manifests_only_if_there_are_no_others() {
    let dir = tempfile::tempdir().unwrap();
    let table = std::fs::read(fixture("tables/none.parquet")).unwrap();
    let manifest = b"file_name,transcription\na.wav,One.\n";
    write_files(
        dir.path(),
        &[
            ("both/data-00000.parquet", table.as_slice()),
            ("both/metadata.csv", manifest),
            (
                "tab/metadata.tab",
                b"file_name\ttranscription\na.wav\tTwo.\n",
            ),
            ("feather/data.feather", b"no table"),
        ],
    );
    let open = |name| SpeechDataset::open([dir.path().join(name)], SpeechOptions::default());
    assert_eq!(open("both").unwrap().text(0).unwrap(), "One.");
    assert_eq!(open("tab").unwrap().text(0).unwrap(), "Two.");
    // It is found, and refused for what is in it.
    let error = open("feather").unwrap_err().to_string();
    assert!(error.contains("data.feather cannot be read"), "{error}");
}

#[test]
fn an_offset_and_a_duration_select_an_excerpt_of_the_file() {
    let dir = tempfile::tempdir().unwrap();
    let options = SpeechOptions {
        sampling_rate: 22_050,
        ..options()
    };
    let manifest = r#"{"audio_filepath": "pcm16.wav", "text": ""}
{"audio_filepath": "pcm16.wav", "offset": 0.1, "duration": 0.05, "text": ""}
{"audio_filepath": "clip.flac", "offset": 0.25, "text": ""}
{"audio_filepath": "pcm16.wav", "offset": 0.5, "duration": 0.05, "text": ""}
{"audio_filepath": "pcm16.wav", "offset": -1, "text": ""}
{"audio_filepath": "clip.flac", "text": ""}
"#;
    let speech = open(dir.path(), "rows.jsonl", manifest, options);
    let whole = speech.get(0).unwrap().samples;
    assert_eq!(whole.len(), 6615);
    assert_eq!(speech.get(1).unwrap().samples, whole[2205..2205 + 1103]);
    let flac = speech.get(5).unwrap().samples;
    assert_eq!(speech.get(2).unwrap().samples, flac[5513..]);
    let error = speech.get(3).unwrap_err().to_string();
    assert!(error.contains("there is no audio after 0.5 s"), "{error}");
    let error = speech.get(4).unwrap_err().to_string();
    assert!(
        error.contains("`offset` is -1, which is not a number of seconds"),
        "{error}"
    );
}

#[test]
fn clips_outside_the_bounds_are_left_out_by_row_or_header() {
    let dir = tempfile::tempdir().unwrap();
    // 0.3 s and 0.276 s; the third states its duration, the fourth does not exist.
    let manifest = r#"{"path": "pcm16.wav", "text": "a"}
{"path": "mono8k.wav", "text": "b"}
{"path": "pcm16.wav", "duration": 9.5, "text": "c"}
{"path": "none.wav", "text": "d"}
{"path": "clip.flac", "text": "e"}
{"path": "clip.ogg", "text": "f"}
{"path": "clip.mp3", "text": "g"}
"#;
    let kept = |min_duration, max_duration| {
        let options = SpeechOptions {
            min_duration,
            max_duration,
            ..options()
        };
        let speech = open(dir.path(), "rows.jsonl", manifest, options);
        let texts = (0..speech.len()).map(|index| speech.text(index).unwrap());
        (texts.collect::<String>(), speech.left_out())
    };
    assert_eq!(kept(None, None), ("abcdefg".to_owned(), 0));
    assert_eq!(kept(Some(0.29), None), ("acdefg".to_owned(), 1));
    assert_eq!(kept(None, Some(0.29)), ("bd".to_owned(), 5));
    assert_eq!(kept(Some(1.0), Some(10.0)), ("cd".to_owned(), 5));
}

#[test]
fn a_clip_whose_duration_was_rounded_down_to_the_bound_is_read() {
    let dir = tempfile::tempdir().unwrap();
    // Of 0.3 s.
    let manifest = |duration: f64| {
        format!("{{\"path\": \"pcm16.wav\", \"duration\": {duration}, \"text\": \"a\"}}\n")
    };
    let clip = |bound: f64| {
        let options = SpeechOptions {
            max_duration: Some(bound),
            ..options()
        };
        let speech = open(dir.path(), "rows.jsonl", &manifest(bound), options);
        assert_eq!(speech.len(), 1);
        speech.get(0).map(|clip| clip.samples.len())
    };
    assert_eq!(clip(0.25).unwrap(), 4800);
    // A bound is a bound: this row's duration is simply wrong.
    let error = clip(0.15).unwrap_err().to_string();
    assert!(
        error.contains("longer than `max_duration`, 0.15 s"),
        "{error}"
    );
}

#[test]
fn missing_or_damaged_audio_is_an_error_of_its_row() {
    let dir = tempfile::tempdir().unwrap();
    let bytes = |name: &str| std::fs::read(fixture(&format!("speech/{name}"))).unwrap();
    let (wav, flac, mp3) = (bytes("pcm16.wav"), bytes("clip.flac"), bytes("clip.mp3"));
    let mut bent = flac.clone();
    let middle = bent.len() / 2;
    bent[middle..middle + 64].fill(0x5a);
    write_files(
        dir.path(),
        &[
            ("good.wav", wav.as_slice()),
            ("cut.wav", &wav[..wav.len() / 2]),
            ("cut.flac", &flac[..flac.len() / 2]),
            ("bent.flac", &bent),
            ("cut.mp3", &mp3[..mp3.len() / 2]),
            ("text.wav", b"no sound at all"),
            ("empty.mp3", b""),
        ],
    );
    let rows = "path,sentence\ngood.wav,a\nmissing.wav,b\ncut.wav,c\ncut.flac,d\nbent.flac,e\ntext.wav,f\nempty.mp3,g\n,h\n";
    let speech = open(dir.path(), "rows.csv", rows, SpeechOptions::default());
    assert!(speech.get(0).is_ok());
    for index in 1..8 {
        let error = speech.get(index).unwrap_err();
        let offset = rows.find(speech.text(index).unwrap().as_str()).unwrap();
        assert!(error.is_about_record() && offset > 0);
        let text = error.to_string();
        println!("{text}");
        assert!(
            text.contains(&format!("rows.csv, record {index} (byte ")),
            "{text}"
        );
        let problem = if index == 7 {
            "the path of its audio file is empty"
        } else {
            "the audio file "
        };
        assert!(text.contains(problem), "{text}");
    }
    assert!(speech.get(8).is_err());
    let log = ErrorLog::default();
    assert!(ErrorPolicy::Skip.get(&speech, 1, &log).unwrap().is_none());
    let replaced = ErrorPolicy::Replace.get(&speech, 1, &log).unwrap().unwrap();
    assert_eq!((replaced.text.as_str(), log.count()), ("a", 8));
    // Half an MP3 is an MP3: its frames know nothing of those that follow.
    let speech = open(
        dir.path(),
        "rows.csv",
        "path,sentence\ncut.mp3,a\n",
        SpeechOptions::default(),
    );
    let len = speech.get(0).map(|clip| clip.samples.len());
    assert!(len.is_err() || len.is_ok_and(|len| len < 4800));
}

#[test]
#[cfg(target_os = "linux")]
fn an_error_of_the_disk_is_none_of_the_row_that_names_the_audio() {
    // Reading the first byte of the memory of a process is such an error; a folder in place of a file is none.
    let dir = tempfile::tempdir().unwrap();
    let rows = "path,text\n/proc/self/mem,a\n/proc/self,b\n";
    let speech = open(dir.path(), "rows.csv", rows, SpeechOptions::default());
    let get = |index| ErrorPolicy::Skip.get(&speech, index, &ErrorLog::default());
    let error = get(0).unwrap_err();
    assert!(
        matches!(&error, Error::Common(overdrive_core::Error::Io { path, .. }) if path == Path::new("/proc/self/mem")),
        "{error}"
    );
    assert_eq!(get(1).unwrap(), None);
}

#[test]
fn damaged_audio_gives_errors_without_panics_or_unbounded_memory() {
    let dir = tempfile::tempdir().unwrap();
    let mut errors = 0;
    for name in ["pcm16.wav", "clip.flac", "clip.ogg", "clip.mp3"] {
        let sound = std::fs::read(fixture(&format!("speech/{name}"))).unwrap();
        for round in 0..60_u64 {
            let draw = |index, bound: usize| {
                overdrive_core::random::uniform_below(bound as u64, 11, round as u32, index)
                    as usize
            };
            let mut sound = sound.clone();
            for change in 0..1 + draw(0, 8) as u64 {
                // Headers more often than the rest.
                let bound = if change % 2 == 0 { 128 } else { sound.len() };
                let place = draw(1 + 2 * change, bound);
                sound[place] = draw(2 + 2 * change, 256) as u8;
            }
            write_files(dir.path(), &[(name, sound)]);
            let options = SpeechOptions {
                max_duration: Some(60.0),
                ..SpeechOptions::default()
            };
            let speech = open(
                dir.path(),
                "rows.csv",
                &format!("path,text\n{name},\n"),
                options,
            );
            if speech.len() == 1 {
                match speech.get(0) {
                    Ok(clip) => assert!(clip.samples.len() < 70 * 16_000),
                    Err(error) => {
                        assert!(error.is_about_record(), "{error}");
                        errors += 1;
                    }
                }
            }
        }
    }
    assert!(errors > 0);
}

#[test]
fn a_row_of_json_without_the_named_field_follows_the_error_policy() {
    let dir = tempfile::tempdir().unwrap();
    let rows = "{\"path\": \"pcm16.wav\"}\n{\"path\": \"pcm16.wav\", \"sentence\": \"a\"}\n";
    let options = SpeechOptions {
        text_field: Some("sentence".to_owned()),
        ..options()
    };
    let speech = open(dir.path(), "rows.jsonl", rows, options);
    let error = speech.get(0).unwrap_err().to_string();
    assert!(
        error.contains("rows.jsonl, record 0 (byte 0): `sentence` is missing"),
        "{error}"
    );
    let log = ErrorLog::default();
    assert!(ErrorPolicy::Skip.get(&speech, 0, &log).unwrap().is_none());
    assert_eq!(speech.get(1).unwrap().text, "a");
}

#[test]
fn options_are_checked() {
    let dir = tempfile::tempdir().unwrap();
    write_files(dir.path(), &[("rows.csv", "path,text\na.wav,a\n")]);
    let open = |options| SpeechDataset::open([dir.path().join("rows.csv")], options);
    let refused = |options, expected: &str| {
        let error = open(options).unwrap_err();
        assert!(
            matches!(&error, Error::Common(overdrive_core::Error::InvalidOption { option, .. }) if option == expected),
            "{error}"
        );
    };
    let default = SpeechOptions::default;
    refused(
        SpeechOptions {
            sampling_rate: 0,
            ..default()
        },
        "sampling_rate",
    );
    refused(
        SpeechOptions {
            min_duration: Some(f64::NAN),
            ..default()
        },
        "min_duration",
    );
    refused(
        SpeechOptions {
            audio_field: Some("wav".to_owned()),
            ..default()
        },
        "audio_field",
    );
    let none = Resampling {
        lowpass_filter_width: 0,
        ..Resampling::default()
    };
    refused(
        SpeechOptions {
            resampling: none,
            ..default()
        },
        "lowpass_filter_width",
    );
    let negative = Resampling {
        rolloff: -1.0,
        ..Resampling::default()
    };
    refused(
        SpeechOptions {
            resampling: negative,
            ..default()
        },
        "rolloff",
    );
}
