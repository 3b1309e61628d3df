//! Reads speech in batches: audio files with transcripts are decoded and resampled on demand into log-mel frames (as in
//! Whisper), padded to the longest clip of a batch, with the tokens of the transcripts.
//!
//! ```text
//! cargo xtask example speech --generate clips            # makes twelve clips of tones, and reads them
//! cargo xtask example speech cv/train.tsv --folder cv/clips --batch-size 16 --tokenizer openai/whisper-tiny
//! ```
//!
//! A manifest is CSV, TSV, JSON, JSON Lines or Parquet, as in Common Voice, NeMo and Hugging Face's `audiofolder`.

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Instant;

use anyhow::{Context, Result, bail, ensure};
use clap::{ArgGroup, Parser};
use overdrive::core::OutputFolder;
use overdrive::datasets::prelude::*;
use overdrive::datasets::{
    LogMel, LogMelOptions, Speech, SpeechBatch, SpeechDataset, SpeechExample, SpeechOptions,
    collate_speech,
};
use overdrive_examples::{TextTokens, print_line};

/// Reads speech with transcripts in batches of log-mel frames
#[derive(Parser)]
#[command(group = ArgGroup::new("source").args(["data", "generate"]).required(true))]
pub(crate) struct Flags {
    /// Manifests: CSV, TSV, JSON or JSON Lines (or Parquet, with the feature `parquet`)
    pub(crate) data: Vec<PathBuf>,
    /// Write twelve clips of tones and a manifest to this folder, and read them
    #[arg(long, value_name = "DIR")]
    pub(crate) generate: Option<PathBuf>,
    /// Folder of the audio files [default: the folder of the manifest]
    #[arg(long)]
    pub(crate) folder: Option<PathBuf>,
    /// Tokenizer of the transcripts: file, folder, GGUF file or name on the hub [default: the bytes of the text]
    #[arg(long, value_name = "MODEL")]
    pub(crate) tokenizer: Option<PathBuf>,
    /// Number of clips in a batch
    #[arg(long, default_value_t = 4)]
    pub(crate) batch_size: usize,
    /// Number of decoding threads
    #[arg(long, default_value_t = 2)]
    pub(crate) workers: usize,
    /// Read the clips in a random order with this seed
    #[arg(long)]
    pub(crate) seed: Option<u64>,
    /// Maximum length of a clip in seconds; longer clips are left out
    #[arg(long, allow_negative_numbers = true, value_name = "SECONDS")]
    pub(crate) max_duration: Option<f64>,
}

fn main() -> ExitCode {
    overdrive_examples::run_main(|| run(&Flags::parse(), |line| print_line(line)).map(|_| ()))
}

/// Reads one epoch, passes a line per batch to `say`, and returns the batches.
pub(crate) fn run(flags: &Flags, mut say: impl FnMut(&str)) -> Result<Vec<SpeechBatch>> {
    let data = match &flags.generate {
        Some(folder) => vec![generate(folder)?],
        None => flags.data.clone(),
    };
    let mel = LogMel::new(LogMelOptions::default())?;
    let options = SpeechOptions {
        folder: flags.folder.clone(),
        sampling_rate: mel.options().sampling_rate,
        max_duration: flags.max_duration,
        ..SpeechOptions::default()
    };
    let speech = SpeechDataset::open(&data, options)?;
    say(&format!(
        "clips       {}, {} left out",
        speech.len(),
        speech.left_out()
    ));
    if speech.is_empty() {
        let left_out = speech.left_out();
        match flags.max_duration {
            Some(seconds) if left_out > 0 => bail!(
                "no clip is left: `--max-duration` is {seconds}, and all {left_out} clips are longer; raise it"
            ),
            _ => bail!("the manifests have no clips; give others"),
        }
    }
    let clip = speech.get(0).context("the first clip")?;
    say(&format!(
        "clip 0      {:.2} s of {}, {:?}",
        clip.duration(),
        clip.path.display(),
        clip.text
    ));

    let tokens = TextTokens::open(flags.tokenizer.as_deref())?;
    let examples = speech.map(move |clip: Speech| {
        Ok(SpeechExample {
            frames: mel.frames(&clip.samples)?,
            labels: tokens.encode(&clip.text)?,
        })
    });
    let options = DataLoaderOptions {
        batch_size: flags.batch_size,
        num_workers: flags.workers,
        shuffle: flags.seed.is_some(),
        seed: flags.seed.unwrap_or(0),
        ..DataLoaderOptions::default()
    };
    let collate = |rows: Vec<SpeechExample>| collate_speech(&rows);
    let mut loader = DataLoader::with_collate(examples, collate, options)?;

    let started = Instant::now();
    let mut read = Vec::new();
    for batch in loader.epoch() {
        let batch = batch?;
        say(&format!(
            "batch {:<5} frames {:?}, lengths {:?}, {:.1}% padding, labels {:?}",
            read.len(),
            batch.input_features.size(),
            batch.lengths,
            100.0 * batch.padding(),
            batch.labels.size(),
        ));
        read.push(batch);
    }
    let frames: i64 = read.iter().flat_map(|batch| &batch.lengths).sum();
    let seconds = frames as f64 / 100.0;
    let speed = seconds / started.elapsed().as_secs_f64();
    say(&format!(
        "audio       {seconds:.1} s, read at {speed:.0} times real time"
    ));
    Ok(read)
}

/// The tones of the generated clips, with their names.
const TONES: [(&str, f32); 3] = [("low", 220.0), ("middle", 440.0), ("high", 880.0)];
/// Their sampling rate; reading resamples it.
const RATE: u32 = 8_000;

/// Writes clips of one to six tones with their names as transcripts, and returns the manifest.
fn generate(folder: &Path) -> Result<PathBuf> {
    let output = OutputFolder::check("speech", "--generate", folder, &[])?;
    output.also_writes(&["metadata.csv"])?.create()?;
    let mut manifest = "file_name,transcription\n".to_owned();
    for clip in 0..12_usize {
        let tones: Vec<_> = (0..=clip % 6)
            .map(|tone| TONES[(clip * 5 + tone * 2) % 3])
            .collect();
        let samples: Vec<i16> = tones.iter().flat_map(|&(_, hertz)| tone(hertz)).collect();
        let name = format!("{clip:02}.wav");
        let words: Vec<_> = tones.iter().map(|(word, _)| *word).collect();
        manifest += &format!("{name},{}\n", words.join(" "));
        let path = folder.join(name);
        std::fs::write(&path, wav(&samples)?).with_context(|| path.display().to_string())?;
    }
    let path = folder.join("metadata.csv");
    std::fs::write(&path, manifest).with_context(|| path.display().to_string())?;
    Ok(path)
}

/// Returns 0.3 seconds of a tone that fades in and out.
fn tone(hertz: f32) -> impl Iterator<Item = i16> {
    let samples = 3 * RATE / 10;
    (0..samples).map(move |at| {
        let at = at as f32;
        let loudness = (at / samples as f32 * std::f32::consts::PI).sin();
        let phase = at * hertz / RATE as f32 * std::f32::consts::TAU;
        (0.5 * loudness * phase.sin() * f32::from(i16::MAX)) as i16
    })
}

/// Returns a WAV file of one channel with 16 bits per sample.
fn wav(samples: &[i16]) -> Result<Vec<u8>> {
    let bytes = u32::try_from(2 * samples.len())?;
    ensure!(bytes < u32::MAX - 36, "a WAV file has at most 4 GiB");
    let mut file = Vec::with_capacity(44 + 2 * samples.len());
    file.extend(b"RIFF");
    file.extend((36 + bytes).to_le_bytes());
    file.extend(b"WAVEfmt ");
    file.extend(16_u32.to_le_bytes());
    // PCM, one channel.
    file.extend([1, 0, 1, 0]);
    file.extend(RATE.to_le_bytes());
    file.extend((2 * RATE).to_le_bytes());
    // Bytes and bits per sample.
    file.extend([2, 0, 16, 0]);
    file.extend(b"data");
    file.extend(bytes.to_le_bytes());
    file.extend(samples.iter().flat_map(|sample| sample.to_le_bytes()));
    Ok(file)
}
