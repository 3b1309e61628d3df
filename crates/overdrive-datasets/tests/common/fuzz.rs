//! Mutation fuzzing of everything in this crate that reads bytes from outside (Parquet and Arrow are left to their
//! crates). The bounded run of the tests, the unbounded one (`examples/fuzz_parsers.rs`) and the coverage-guided
//! one (`fuzz/` at the root of the repository) share it.
//!
//! An input is made from a valid one by a few changes, drawn from a seed and the number of the case, so that a case
//! can be repeated. For any input, reading gives records or errors: no panic, and no more memory than the input
//! explains.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};

use overdrive_core::random::random_u64;
use overdrive_datasets::{
    AnswerKey, CsvOptions, CsvRecords, Dataset, IndexLocation, IndexOptions, InstructionRecord,
    JsonLayout, JsonOptions, JsonRecords, Result, SampleBy, TextLines, TextOptions, TokenStore,
    TokenWidth, WebDataset, find_files,
};
use serde_json::Value;

use self::inputs::{bgzip, token_store, zstd_raw};

#[path = "fuzz_inputs.rs"]
mod inputs;

/// The bytes of a fixture of this crate. The folder is relative to this file, which `fuzz/` compiles too.
macro_rules! fixture {
    ($name:literal) => {
        include_bytes!(concat!("../fixtures/", $name)).to_vec()
    };
}

/// One reader of bytes from outside.
pub(crate) struct Target {
    pub(crate) name: &'static str,
    /// The valid inputs.
    pub(crate) seeds: Vec<Vec<u8>>,
    /// The elements of the format, which mutations insert.
    words: &'static [&'static str],
    /// Reads the file at this path; the number is of the case, for options.
    pub(crate) read: fn(&Path, u64) -> Result<()>,
    pub(crate) extension: &'static str,
}

/// The outcome of a number of cases.
#[derive(Debug, Default, Clone, Copy)]
pub(crate) struct Outcome {
    pub(crate) cases: u64,
    /// The number of cases that gave an error; the others were read to their end.
    pub(crate) errors: u64,
}

pub(crate) fn targets() -> Vec<Target> {
    let text = "\u{feff}first line\r\n\n  \nsecond \u{e4}\u{1f600} line\nlast"
        .as_bytes()
        .to_vec();
    let jsonl = br#"{"id": 1, "text": "a \"b\" [{", "tags": [1, {"x": null}]}

{"id": -2.5e3, "text": "\u00e4\ud83d\ude00", "tags": []}
"#;
    let array = br#" [ {"a": [1, "]"]}, "x,y]" , null, -1.5e3 , {"b": {"c": []}} ] "#;
    let in_field = br#"{"version": {"data": [9]}, "data": [{"a": 1}, {"a": "\\\""}], "rest": 1}"#;
    let csv = b"id,text,n\n1,\"a,\n\"\"b\"\"\",2\n2,c d,3\r\n\n3,\"\",4\n";
    let instruction = br#"{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "tool_calls": [{"type": "function"}]}], "tools": []}
{"prompt": "a", "completion": "b"}
{"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}
{"instruction": "a", "input": null, "output": "b"}
{"prompt": "a", "chosen": "b", "rejected": "c"}
{"chosen": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], "rejected": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "c"}]}
{"text": "a"}"#;
    #[cfg_attr(
        not(feature = "speech"),
        allow(unused_mut, reason = "speech adds its own")
    )]
    let mut targets = vec![
        Target {
            name: "text",
            seeds: vec![text.clone(), b"a\nb\nc\n".to_vec(), Vec::new()],
            words: &["\n", "\r\n", "\n\n", "\u{feff}", "\0", " \t"],
            read: read_text,
            extension: "txt",
        },
        Target {
            name: "json_lines",
            seeds: vec![jsonl.to_vec()],
            words: &[
                "{", "}", "[", "]", "\"", "\\", "\\u", "\n", ",", ":", "1e999", "[[[[[[[[",
            ],
            read: read_json_lines,
            extension: "jsonl",
        },
        Target {
            name: "json_array",
            seeds: vec![array.to_vec(), b"[]".to_vec(), in_field.to_vec()],
            words: &[
                "{", "}", "[", "]", "\"", "\\", ",", ":", "null", "\"data\"", "[[[[[[[[",
            ],
            read: read_json_array,
            extension: "json",
        },
        Target {
            name: "csv",
            seeds: vec![csv.to_vec(), b"a\tb\n1\t2\n".to_vec()],
            words: &["\"", "\"\"", ",", "\n", "\r\n", "\t", "\u{feff}", ";"],
            read: read_csv,
            extension: "csv",
        },
        Target {
            name: "tar",
            seeds: vec![
                fixture!("shard_ustar.tar"),
                fixture!("shard_pax.tar"),
                fixture!("shard_gnu.tar"),
            ],
            words: &[
                "ustar\0",
                "0000000",
                "7777777",
                "\u{1}",
                "30 path=",
                "\0\0\0\0\0\0\0\0",
            ],
            read: read_tar,
            extension: "tar",
        },
        Target {
            name: "gzip_blocks",
            seeds: vec![
                bgzip(&text),
                bgzip(&jsonl.repeat(20)),
                fixture!("compressed/blocks.txt.gz"),
                fixture!("compressed/single_stream.txt.gz"),
            ],
            words: &["\u{1f}\u{8b}", "BC\u{2}\0", "\0\0", "\u{ff}\u{ff}"],
            read: read_text,
            extension: "txt",
        },
        Target {
            name: "zstandard_frames",
            seeds: vec![
                zstd_raw(&text),
                zstd_raw(&[text.clone(), text.repeat(30)].concat()),
                fixture!("compressed/frames.txt.zst"),
                fixture!("compressed/plain_frames.txt.zst"),
            ],
            words: &["(\u{b5}/\u{fd}", "\0\0\0", "\u{1}\0\0", "P*M\u{18}"],
            read: read_text,
            extension: "txt",
        },
        Target {
            name: "token_store",
            seeds: vec![token_store()],
            words: &["\0\0\0\0", "\u{1}\0\0\0"],
            read: read_token_store,
            extension: "tokens",
        },
        Target {
            name: "raw_tokens",
            seeds: vec![fixture!("nanogpt_u16.bin"), fixture!("raw_u32.bin")],
            words: &["\0\0"],
            read: read_raw_tokens,
            extension: "bin",
        },
        Target {
            name: "instruction_record",
            seeds: instruction
                .split(|&byte| byte == b'\n')
                .map(<[u8]>::to_vec)
                .collect(),
            words: &[
                "{",
                "}",
                "[",
                "]",
                "\"",
                ",",
                ":",
                "null",
                "\"messages\"",
                "\"role\"",
                "1",
            ],
            read: read_instruction,
            extension: "json",
        },
        Target {
            name: "index_file",
            seeds: vec![b"0".to_vec()],
            words: &["\0\0\0\0\0\0\0\0", "\u{1}", "OVDINDEX"],
            read: read_with_damaged_index,
            extension: "seed",
        },
    ];
    #[cfg(feature = "speech")]
    targets.push(Target {
        name: "sound",
        seeds: vec![
            fixture!("speech/pcm16.wav"),
            fixture!("speech/clip.flac"),
            fixture!("speech/clip.ogg"),
            fixture!("speech/clip.mp3"),
        ],
        words: &[
            "RIFF",
            "data",
            "fmt ",
            "fLaC",
            "OggS",
            "ID3",
            "\0\0\0\0",
            "\u{1}vorbis",
        ],
        read: read_sound,
        extension: "wav",
    });
    targets
}

impl Target {
    /// Reads case `number` under `seed`.
    ///
    /// # Panics
    /// When reading does; the input is kept and its path printed.
    pub(crate) fn case(&self, dir: &Path, seed: u64, number: u64) -> bool {
        let input = self.input(seed, number);
        let path = dir.join(format!("{}.{}", self.name, self.extension));
        write(&path, &input);
        let read = AssertUnwindSafe(|| (self.read)(&path, number));
        match catch_unwind(read) {
            Ok(read) => read.is_err(),
            Err(panic) => {
                let kept = std::env::temp_dir()
                    .join(format!("{}-{seed}-{number}.{}", self.name, self.extension));
                write(&kept, &input);
                println!(
                    "{}: case {number} of seed {seed} panicked; its input is {}",
                    self.name,
                    kept.display()
                );
                std::panic::resume_unwind(panic)
            }
        }
    }

    /// Runs `cases` cases from `first` on.
    pub(crate) fn run(&self, dir: &Path, seed: u64, first: u64, cases: u64) -> Outcome {
        let errors = (first..first + cases)
            .filter(|&number| self.case(dir, seed, number))
            .count();
        Outcome {
            cases,
            errors: errors as u64,
        }
    }

    /// Returns a valid input with up to eight changes.
    fn input(&self, seed: u64, number: u64) -> Vec<u8> {
        let mut draws = 0;
        let mut draw = |bound: usize| {
            draws += 1;
            (random_u64(seed, draws, number) % bound.max(1) as u64) as usize
        };
        let mut input = self.seeds[draw(self.seeds.len())].clone();
        for _ in 0..draw(9) {
            let at = draw(input.len() + 1);
            // Headers are in front: every second change is there.
            let at = if draw(2) == 0 { at } else { at.min(draw(160)) };
            let len = draw(64).min(input.len() - at);
            match draw(7) {
                0 => input.truncate(at),
                1 => drop(input.drain(at..at + len)),
                2 => {
                    let word = self.words[draw(self.words.len())].bytes();
                    input.splice(at..at, word);
                }
                3 => {
                    let part = input[at..at + len].to_vec();
                    let to = draw(input.len() + 1);
                    input.splice(to..to, part);
                }
                4 => {
                    if let Some(byte) = input.get_mut(at) {
                        *byte = [0, 0xff, 0x7f, 0x80, b'\n', b'"'][draw(6)];
                    }
                }
                5 => {
                    if let Some(byte) = input.get_mut(at) {
                        *byte ^= 1 << draw(8);
                    }
                }
                _ => {
                    if let Some(byte) = input.get_mut(at) {
                        *byte = draw(256) as u8;
                    }
                }
            }
        }
        input
    }
}

/// Reads every record and returns the first error, without stopping at it.
fn read_all<D: Dataset>(dataset: &D) -> Result<()> {
    // A short file has few records, whatever is in it.
    assert!(dataset.len() <= 1 << 20, "{} records", dataset.len());
    let mut outcome = Ok(());
    for index in 0..dataset.len() {
        if let Err(error) = dataset.get(index)
            && outcome.is_ok()
        {
            assert!(!error.to_string().is_empty());
            outcome = Err(error);
        }
    }
    assert!(dataset.get(dataset.len()).is_err());
    outcome
}

fn index(path: &Path, number: u64) -> IndexOptions {
    // What a reader unpacks; without that of the case before, since a small input may unpack to much.
    let folder = path.with_extension("unpacked");
    let _ = std::fs::remove_dir_all(&folder);
    IndexOptions {
        location: IndexLocation::Folder(folder),
        threads: Some(1 + number as usize % 2),
        ..IndexOptions::default()
    }
}

fn read_text(path: &Path, number: u64) -> Result<()> {
    let options = TextOptions {
        sample_by: [SampleBy::Line, SampleBy::Paragraph, SampleBy::Document][number as usize % 3],
        skip_blank: number.is_multiple_of(2),
        index: index(path, number),
    };
    read_all(&TextLines::open([path], &options)?)
}

fn read_json(path: &Path, number: u64, layout: JsonLayout) -> Result<()> {
    let index = index(path, number);
    read_all(&JsonRecords::<Value>::open(
        [path],
        &JsonOptions { layout, index },
    )?)
}

fn read_json_lines(path: &Path, number: u64) -> Result<()> {
    read_json(
        path,
        number,
        [JsonLayout::Lines, JsonLayout::Guess][number as usize % 2].clone(),
    )
}

fn read_json_array(path: &Path, number: u64) -> Result<()> {
    let layouts = [
        JsonLayout::Array,
        JsonLayout::Guess,
        JsonLayout::ArrayIn("data".to_owned()),
    ];
    read_json(path, number, layouts[number as usize % 3].clone())
}

fn read_csv(path: &Path, number: u64) -> Result<()> {
    let options = CsvOptions {
        delimiter: [None, Some(';'), Some('\t')][number as usize % 3],
        quote: [Some('"'), Some('"'), None, Some('\'')][number as usize % 4],
        has_header: !number.is_multiple_of(5),
        flexible: number.is_multiple_of(7),
        max_row_bytes: if number.is_multiple_of(3) {
            64
        } else {
            64 << 20
        },
        index: index(path, number),
    };
    read_all(&CsvRecords::open([path], &options)?)
}

fn read_tar(path: &Path, number: u64) -> Result<()> {
    if number.is_multiple_of(2) {
        // With right checksums, so that the fields behind them are read.
        let mut bytes = std::fs::read(path).expect("a file that was just written");
        for header in bytes.chunks_exact_mut(512) {
            header[148..156].fill(b' ');
            let sum: u32 = header.iter().map(|&byte| u32::from(byte)).sum();
            header[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
        }
        write(path, &bytes);
    }
    read_all(&WebDataset::open([path], &index(path, number))?)
}

fn read_instruction(path: &Path, _number: u64) -> Result<()> {
    let bytes = std::fs::read(path).expect("a file that was just written");
    // The problem is a message here; this error stands for it.
    let is_preference = bytes.windows(8).any(|key| key == b"\"chosen\"");
    let record = match is_preference {
        true => InstructionRecord::from_preference_json(&bytes, AnswerKey::Chosen),
        false => InstructionRecord::from_json(&bytes),
    };
    match record {
        Ok(_) => Ok(()),
        Err(problem) => {
            assert!(!problem.is_empty());
            find_files(Vec::<PathBuf>::new(), &[]).map(drop)
        }
    }
}

fn read_token_store(path: &Path, _number: u64) -> Result<()> {
    let store = TokenStore::open(path)?;
    let all = store.len();
    store.tokens(0..all).map(drop)?;
    for number in 0..store.document_count().min(1 << 16) {
        assert!(store.document(number).is_some());
    }
    store.verify()
}

fn read_raw_tokens(path: &Path, number: u64) -> Result<()> {
    let width = [TokenWidth::U16, TokenWidth::U32][number as usize % 2];
    let store = TokenStore::open_nanogpt(path, width)?;
    store.tokens(0..store.len()).map(drop)
}

/// Damages the index of valid data at the offset that the bytes give. The data has a megabyte, so that it has an
/// index file.
fn read_with_damaged_index(path: &Path, number: u64) -> Result<()> {
    let dir = path.parent().expect("a folder").join("index_file");
    std::fs::create_dir_all(&dir).expect("a folder for temporary files");
    let data = dir.join("data.txt");
    if !data.exists() {
        let lines: String = (0..60_000)
            .map(|line| format!("line {line} of the data\n"))
            .collect();
        write(&data, lines.as_bytes());
    }
    let options = TextOptions {
        index: IndexOptions {
            location: IndexLocation::Folder(dir.join("indexes")),
            ..IndexOptions::default()
        },
        ..TextOptions::default()
    };
    let open = || TextLines::open([&data], &options);
    open()?;
    let index = find_files([dir.join("indexes")], &["ovidx"])?.remove(0);
    let mut bytes = std::fs::read(&index).expect("an index");
    let draw = |n: u32, bound: usize| (random_u64(1, n, number) % bound as u64) as usize;
    match draw(0, 4) {
        0 => bytes.truncate(draw(1, bytes.len())),
        1 => bytes.extend(b"behind"),
        _ => {
            for change in 0..1 + draw(2, 4) as u32 {
                let bound = if change % 2 == 0 { 160 } else { bytes.len() };
                let at = draw(10 + change, bound);
                bytes[at] ^= 1 << draw(20 + change, 8);
            }
        }
    }
    write(&index, &bytes);
    // The damage is detected, and the index is built again.
    let lines = open()?;
    assert_eq!(lines.len(), 60_000);
    for line in [0, 29_999, 59_999] {
        assert_eq!(lines.get(line)?, format!("line {line} of the data"));
    }
    Ok(())
}

#[cfg(feature = "speech")]
fn read_sound(path: &Path, _number: u64) -> Result<()> {
    use overdrive_datasets::{SpeechDataset, SpeechOptions};
    let name = path
        .file_name()
        .and_then(|name| name.to_str())
        .expect("a name of letters");
    let manifest = path.with_extension("csv");
    write(&manifest, format!("path,text\n{name},a\n").as_bytes());
    let options = SpeechOptions {
        max_duration: Some(60.0),
        ..SpeechOptions::default()
    };
    read_all(&SpeechDataset::open([manifest], options)?)
}

fn write(path: &Path, bytes: &[u8]) {
    std::fs::write(path, bytes).expect("room in the folder for temporary files");
}

/// Returns the peak memory of this process in MiB; `None` if the system does not report it.
pub(crate) fn peak_mib() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status
        .lines()
        .find_map(|line| line.strip_prefix("VmHWM:"))?;
    line.trim()
        .strip_suffix(" kB")?
        .trim()
        .parse::<u64>()
        .ok()
        .map(|kib| kib / 1024)
}
