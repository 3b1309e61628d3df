//! A dataset of speech and transcripts.

use std::borrow::Cow;
use std::path::{Path, PathBuf};

use rayon::prelude::*;

use super::audio::{self, Excerpt};
use super::resample::{Resampler, Resampling};
use crate::records::{find_files, has_extension};
use crate::sampling::RecentValues;
use crate::transform::SortedIndices;
use crate::{
    CsvOptions, CsvRecords, Dataset, Error, FieldRecords, FieldRow, JsonOptions, JsonRecords,
    RecordFormat, Result,
};
use overdrive_core::{check_non_negative, check_option};

/// The field names of a clip's path in Common Voice, NeMo and Hugging Face's `audiofolder`.
const AUDIO_FIELDS: [&str; 5] = ["path", "audio_filepath", "file_name", "audio", "file"];
/// The field names of its transcript.
const TEXT_FIELDS: [&str; 4] = ["sentence", "text", "transcription", "transcript"];

/// The options of [`SpeechDataset`].
#[derive(Debug, Clone, PartialEq)]
pub struct SpeechOptions {
    /// The field with the path of the audio file. `None` (the default) is the first of `path`, `audio_filepath`,
    /// `file_name`, `audio` and `file` that a row has.
    pub audio_field: Option<String>,
    /// The field with the transcript. `None` (the default) is the first of `sentence`, `text`, `transcription` and
    /// `transcript` that a row has.
    pub text_field: Option<String>,
    /// The folder that paths are relative to; Common Voice's is `clips` beside its manifests. Default: `None`, the
    /// folder of the manifest.
    pub folder: Option<PathBuf>,
    /// The sampling rate of the clips after resampling, in samples per second. Default: 16,000.
    pub sampling_rate: u32,
    /// The filter of the resampling.
    pub resampling: Resampling,
    /// The duration of the shortest clip that is kept, in seconds. Default: `None`, no bound.
    ///
    /// With a bound here or in `max_duration`, opening reads all rows and, if a row has no `duration`, the header
    /// of its audio file. Clips of unknown duration and those that cannot be read are kept: they are an error
    /// when they are read, which the error policy handles.
    pub min_duration: Option<f64>,
    /// The duration of the longest clip that is kept, in seconds; it also bounds the memory of a clip. Since the
    /// `duration` of a row may be rounded, the audio of a clip that is kept may be up to 0.1 s longer. Default: `None`,
    /// no bound.
    pub max_duration: Option<f64>,
    /// The options of manifests in CSV and TSV. Quotes are ordinary characters in a `.tsv`, as in Common Voice's,
    /// unless `delimiter` is given.
    pub csv: CsvOptions,
    /// The options of manifests in JSON and JSON Lines.
    pub json: JsonOptions,
}

impl Default for SpeechOptions {
    fn default() -> Self {
        Self {
            audio_field: None,
            text_field: None,
            folder: None,
            sampling_rate: 16_000,
            resampling: Resampling::default(),
            min_duration: None,
            max_duration: None,
            csv: CsvOptions::default(),
            json: JsonOptions::default(),
        }
    }
}

impl SpeechOptions {
    fn check(&self) -> Result<()> {
        check_option(
            (100..=1_000_000).contains(&self.sampling_rate),
            "sampling_rate",
            self.sampling_rate,
            "from 100 to 1,000,000 samples per second",
        )?;
        for (option, bound) in [
            ("min_duration", self.min_duration),
            ("max_duration", self.max_duration),
        ] {
            if let Some(seconds) = bound {
                check_non_negative(option, seconds)?;
            }
        }
        self.resampling.check()
    }
}

/// A clip and its transcript.
#[derive(Debug, Clone, PartialEq)]
pub struct Speech {
    /// The samples of one channel, from about -1 to 1.
    pub samples: Vec<f32>,
    /// The number of samples per second.
    pub sampling_rate: u32,
    /// The transcript.
    pub text: String,
    /// The path of the audio file.
    pub path: PathBuf,
}

impl Speech {
    /// Returns the duration of the clip in seconds.
    pub fn duration(&self) -> f64 {
        self.samples.len() as f64 / f64::from(self.sampling_rate.max(1))
    }

    /// Returns the samples as a tensor of shape (samples), Float, on the CPU.
    ///
    /// # Errors
    /// An error of libtorch if there is no memory for the tensor.
    #[cfg(feature = "tch")]
    pub fn to_tensor(&self) -> Result<tch::Tensor> {
        Ok(tch::Tensor::f_from_slice(&self.samples)?)
    }
}

/// The clips of speech that the rows of CSV, TSV, JSON, JSON Lines or Parquet files name, decoded (WAV, FLAC, MP3, Ogg
/// Vorbis), mixed to one channel and resampled on demand.
///
/// It opens the manifests of Common Voice, NeMo (with `offset` and `duration`: an excerpt of a file, which costs
/// the decoding of everything before it) and Hugging Face's `audiofolder`. A missing, truncated or damaged audio
/// file is an error of its row, with file, record number and byte.
///
/// ```
/// use overdrive_datasets::{Dataset, SpeechDataset, SpeechOptions};
/// # let dir = tempfile::tempdir().unwrap();
/// # let manifest = dir.path().join("train.csv");
/// # let mut wav = b"RIFF\x24\x10\0\0WAVEfmt \x10\0\0\0\x01\0\x01\0\x40\x1f\0\0\x80\x3e\0\0\x02\0\x10\0data\0\x10\0\0".to_vec();
/// # wav.extend((0..2048_i16).flat_map(|i| (i * 8).to_le_bytes()));
/// # std::fs::write(dir.path().join("a.wav"), wav).unwrap();
/// std::fs::write(&manifest, "path,sentence\na.wav,Good morning.\n").unwrap();
/// let speech = SpeechDataset::open([&manifest], SpeechOptions::default())?;
/// let clip = speech.get(0)?;
/// assert_eq!(clip.text, "Good morning.");
/// // 2048 samples at 8 kHz.
/// assert_eq!((clip.samples.len(), clip.sampling_rate), (4096, 16_000));
/// # Ok::<(), overdrive_datasets::Error>(())
/// ```
#[derive(Debug)]
pub struct SpeechDataset {
    rows: FieldRecords,
    /// The rows whose duration is within the bounds; `None` for all rows.
    kept: Option<SortedIndices>,
    options: SpeechOptions,
    /// The resamplers for the last sampling rates of files.
    resamplers: RecentValues<u32, Resampler>,
}

impl SpeechDataset {
    /// Opens manifests: files of CSV or TSV, of JSON or JSON Lines, or of Parquet or Arrow, folders of them, and patterns
    /// (see [`crate::find_files`]). Parquet and Arrow files in folders are manifests only if no others are found: they
    /// may be another copy of the data. The extension of the first file decides the format of all of them: CSV if it is
    /// unknown.
    ///
    /// # Errors
    /// Returns an error if no file is found, a file cannot be read, an option is outside its range, or a CSV, Parquet or
    /// Arrow file lacks a column that an option names. A row of JSON without the field is an error when it is read.
    pub fn open<P: AsRef<Path>>(
        paths: impl IntoIterator<Item = P>,
        options: SpeechOptions,
    ) -> Result<Self> {
        options.check()?;
        let paths = paths.into_iter().map(|path| path.as_ref().to_owned());
        let paths: Vec<PathBuf> = paths.collect();
        let files = match find_files(&paths, &["csv", "tsv", "tab", "jsonl", "ndjson", "json"]) {
            Err(Error::NoData { .. }) => {
                find_files(&paths, &["parquet", "arrow", "feather", "ipc"])?
            }
            files => files?,
        };
        // `find_files` gives at least one.
        let first = &files[0];
        let rows = match RecordFormat::of(first) {
            Some(RecordFormat::Json) => JsonRecords::open(&files, &options.json)?.into(),
            Some(RecordFormat::Table) => FieldRecords::open(&files)?,
            Some(RecordFormat::Csv) | None => {
                let plain = options.csv.delimiter.is_none() && has_extension(first, &["tsv"]);
                let csv = CsvOptions {
                    quote: options.csv.quote.filter(|_| !plain),
                    ..options.csv.clone()
                };
                CsvRecords::open(&files, &csv)?.into()
            }
        };
        for (option, field) in [
            ("audio_field", &options.audio_field),
            ("text_field", &options.text_field),
        ] {
            if let Some(field) = field {
                rows.check_column(option, field)?;
            }
        }
        let mut dataset = Self {
            rows,
            kept: None,
            options,
            resamplers: RecentValues::default(),
        };
        dataset.kept = dataset.of_allowed_length();
        Ok(dataset)
    }

    /// Returns the rows, including those that were left out for their duration.
    pub fn rows(&self) -> &FieldRecords {
        &self.rows
    }

    /// Returns the number of rows that were left out for their duration.
    pub fn left_out(&self) -> usize {
        self.rows.len() - self.len()
    }

    /// Returns the transcript of clip `index`, without reading its audio.
    ///
    /// # Errors
    /// Returns an error if there is no such clip, or if its row cannot be read.
    pub fn text(&self, index: usize) -> Result<String> {
        let row = self.rows.row(self.row_index(index)?)?;
        let text = first_text(&row, self.options.text_field.as_deref(), &TEXT_FIELDS)?;
        Ok(text.into_owned())
    }

    fn of_allowed_length(&self) -> Option<SortedIndices> {
        let (min, max) = (self.options.min_duration, self.options.max_duration);
        if min.is_none() && max.is_none() {
            return None;
        }
        let is_kept = |row_index: usize| {
            let row = self.rows.row(row_index).ok();
            let length = row.and_then(|row| self.length_s(row_index, &row));
            // A row that cannot be read is kept, so that the error policy decides when it is read.
            length.is_none_or(|length| {
                min.is_none_or(|min| length >= min) && max.is_none_or(|max| length <= max)
            })
        };
        const BLOCK: usize = 1 << 16;
        let rows = self.rows.len();
        let indices = (0..rows).step_by(BLOCK).flat_map(|start| {
            let block = start..rows.min(start + BLOCK);
            block
                .into_par_iter()
                .filter(|&row_index| is_kept(row_index))
                .collect::<Vec<_>>()
        });
        Some(SortedIndices::new(indices))
    }

    /// Returns the duration of a clip in seconds, if it is known without decoding.
    fn length_s(&self, row_index: usize, row: &FieldRow<'_>) -> Option<f64> {
        let excerpt = self.excerpt(row).ok()?;
        match excerpt.duration_s {
            Some(duration) => Some(duration),
            None => {
                let path = self.path(row_index, row).ok()?;
                let all = audio::duration_s(&path)?;
                Some((all - excerpt.offset_s).max(0.0))
            }
        }
    }

    /// Returns the index of the row of clip `index`.
    fn row_index(&self, index: usize) -> Result<usize> {
        let row_index = match &self.kept {
            Some(kept) => kept.get(index),
            None => Some(index).filter(|&index| index < self.rows.len()),
        };
        row_index.ok_or(Error::NoSuchRecord {
            index,
            len: self.len(),
        })
    }

    fn excerpt(&self, row: &FieldRow<'_>) -> Result<Excerpt> {
        Ok(Excerpt {
            offset_s: seconds(row, "offset")?.unwrap_or(0.0),
            // With an offset, the duration is the length of the excerpt; alone it is that of the file, which may be
            // rounded, and `read` then ignores it.
            duration_s: seconds(row, "duration")?,
            max_s: self.options.max_duration,
        })
    }

    fn path(&self, row_index: usize, row: &FieldRow<'_>) -> Result<PathBuf> {
        let name = first_text(row, self.options.audio_field.as_deref(), &AUDIO_FIELDS)?;
        if name.is_empty() {
            return Err(row.error("the path of its audio file is empty"));
        }
        let folder = match &self.options.folder {
            Some(folder) => folder.clone(),
            None => {
                let location = self.rows.location(row_index)?;
                location.path.parent().unwrap_or(Path::new("")).to_owned()
            }
        };
        Ok(folder.join(&*name))
    }

    fn read(&self, row_index: usize) -> Result<Speech> {
        let row = self.rows.row(row_index)?;
        let text = first_text(&row, self.options.text_field.as_deref(), &TEXT_FIELDS)?;
        let mut excerpt = self.excerpt(&row)?;
        if seconds(&row, "offset")?.is_none() {
            excerpt.duration_s = None;
        }
        let path = self.path(row_index, &row)?;
        let sound = audio::decode(&path, &excerpt).map_err(|error| match error {
            Error::Other(problem) => row.error(problem.to_string()),
            other => other,
        })?;
        let to = self.options.sampling_rate;
        let samples = match sound.rate == to {
            true => sound.samples,
            false => {
                let resampler = || Resampler::new(sound.rate, to, &self.options.resampling);
                self.resamplers
                    .get_or(sound.rate, resampler)
                    .apply(&sound.samples)
            }
        };
        Ok(Speech {
            samples,
            sampling_rate: to,
            text: text.into_owned(),
            path,
        })
    }
}

/// Returns the text of the field `name`, or of the first of `names` that has one.
fn first_text<'a>(
    row: &'a FieldRow<'_>,
    name: Option<&str>,
    names: &[&str],
) -> Result<Cow<'a, str>> {
    match name {
        Some(name) => row.required_text(name),
        None => {
            let mut texts = names.iter().filter_map(|name| row.text(name).ok()?);
            let none = || format!("none of these fields has a text: {}", names.join(", "));
            texts.next().ok_or_else(|| row.error(none()))
        }
    }
}

/// Returns the number of seconds in a field; `None` if it is missing or empty.
fn seconds(row: &FieldRow<'_>, name: &str) -> Result<Option<f64>> {
    match row.number(name)? {
        Some(seconds) if !(0.0..1e9).contains(&seconds) => Err(row.error(format!(
            "`{name}` is {seconds}, which is not a number of seconds"
        ))),
        seconds => Ok(seconds),
    }
}

impl Dataset for SpeechDataset {
    type Item = Speech;

    fn len(&self) -> usize {
        match &self.kept {
            Some(kept) => kept.len(),
            None => self.rows.len(),
        }
    }

    fn get(&self, index: usize) -> Result<Speech> {
        self.read(self.row_index(index)?)
    }

    fn prefetch(&self, indices: &[usize]) {
        let rows = indices
            .iter()
            .filter_map(|&index| self.row_index(index).ok());
        self.rows.prefetch(&rows.collect::<Vec<_>>());
    }

    fn check_unchanged(&self) -> Result<()> {
        self.rows.check_unchanged()
    }
}
