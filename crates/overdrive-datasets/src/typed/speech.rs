//! Speech and what is said in it.

use std::path::{Path, PathBuf};

use rayon::prelude::*;
use serde_json::Value;

use super::audio::{self, Part};
use super::resample::{Resampler, Resampling};
use crate::records::find_files;
use crate::sampling::LastFew;
use crate::transform::Rising;
use crate::{
    CsvOptions, CsvRecords, CsvRow, Dataset, Error, JsonOptions, JsonRecords, RecordFiles, Result,
};

/// The names that the path of a clip has: in Common Voice, NeMo and Hugging Face's `audiofolder`.
const AUDIO_FIELDS: [&str; 5] = ["path", "audio_filepath", "file_name", "audio", "file"];
/// The names that its transcript has.
const TEXT_FIELDS: [&str; 4] = ["sentence", "text", "transcription", "transcript"];

/// How speech is read.
#[derive(Debug, Clone, PartialEq)]
pub struct SpeechOptions {
    /// The field with the path of the sound. `None` (the default): the first of `path`,
    /// `audio_filepath`, `file_name`, `audio` and `file` that a row has.
    pub audio_field: Option<String>,
    /// The field with the transcript. `None` (the default): the first of `sentence`, `text`,
    /// `transcription` and `transcript`.
    pub text_field: Option<String>,
    /// The folder that paths are relative to; Common Voice's is `clips` beside its manifests. Default: that
    /// of the file that names them.
    pub folder: Option<PathBuf>,
    /// Samples a second of what is given out, whatever the files have. Default: 16,000.
    pub sampling_rate: u32,
    /// The filter of the resampling.
    pub resampling: Resampling,
    /// Leaves out shorter clips, in seconds. Default: none.
    ///
    /// With a bound here or in `max_duration`, opening reads all rows, and where a row has no `duration`,
    /// the start of its file. What does not say how long it is, or cannot be read, stays: it is an error
    /// when it is asked for, for the policy to decide.
    pub min_duration: Option<f64>,
    /// Leaves out longer clips, in seconds. Default: none. It bounds the memory of a clip too.
    pub max_duration: Option<f64>,
    /// How manifests in CSV and TSV are read. Common Voice's have no quotes: `quote: None`.
    pub csv: CsvOptions,
    /// How manifests in JSON and JSON Lines are read.
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
        let invalid = |option, value: String, expected| {
            Err(Error::InvalidOption {
                option,
                value,
                expected,
            })
        };
        if !(100..=1_000_000).contains(&self.sampling_rate) {
            let value = self.sampling_rate.to_string();
            return invalid("sampling_rate", value, "100 to 1,000,000 samples a second");
        }
        for (option, bound) in [
            ("min_duration", self.min_duration),
            ("max_duration", self.max_duration),
        ] {
            if let Some(seconds) = bound.filter(|seconds| !(0.0..f64::INFINITY).contains(seconds)) {
                return invalid(
                    option,
                    seconds.to_string(),
                    "a number of seconds, at least 0",
                );
            }
        }
        self.resampling.check()
    }
}

/// A clip and its transcript.
#[derive(Debug, Clone, PartialEq)]
pub struct Speech {
    /// The sound: one channel, about -1 to 1.
    pub samples: Vec<f32>,
    /// Samples a second.
    pub sampling_rate: u32,
    /// What is said.
    pub text: String,
    /// Where the sound is.
    pub path: PathBuf,
}

impl Speech {
    /// Its length in seconds.
    pub fn duration(&self) -> f64 {
        self.samples.len() as f64 / f64::from(self.sampling_rate.max(1))
    }

    /// The sound as a tensor of (samples), Float.
    ///
    /// # Errors
    /// When libtorch has no memory for it.
    #[cfg(feature = "tch")]
    pub fn to_tensor(&self) -> Result<tch::Tensor> {
        Ok(tch::Tensor::f_from_slice(&self.samples)?)
    }
}

/// Clips of speech named by the rows of CSV, TSV, JSON or JSON Lines files, decoded (WAV, FLAC, MP3, Ogg
/// Vorbis), mixed to one channel and resampled when they are asked for. Nothing else is read.
///
/// The manifests of Common Voice, NeMo (with `offset` and `duration`: a part of a file, which costs the
/// decoding of what is in front of it) and Hugging Face's `audiofolder` open as they are. Sound that is
/// missing, cut short or damaged is an error of its row, with file, record number and byte.
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
    rows: Rows,
    /// Which rows are long enough and not too long; `None`: all.
    kept: Option<Rising>,
    options: SpeechOptions,
    /// The weights for the last few rates of files.
    resamplers: LastFew<u32, Resampler>,
}

#[derive(Debug)]
enum Rows {
    Csv(CsvRecords),
    Json(JsonRecords<Value>),
}

/// A row, and how its fields are found.
enum Row {
    Csv(CsvRow),
    Json(Value),
}

impl SpeechDataset {
    /// Opens manifests: files of CSV or TSV, or of JSON or JSON Lines, folders of them, and patterns (see
    /// [`crate::find_files`]). All are of one of the two kinds, which the end of the first name tells.
    ///
    /// # Errors
    /// When no file is found, or one cannot be read; when an option is outside its range, or a field that
    /// it names is no column.
    pub fn open<P: AsRef<Path>>(
        paths: impl IntoIterator<Item = P>,
        options: SpeechOptions,
    ) -> Result<Self> {
        options.check()?;
        let files = find_files(paths, &["csv", "tsv", "jsonl", "ndjson", "json"])?;
        // `find_files` gives at least one.
        let name = files[0].to_string_lossy().to_lowercase();
        let is_json = [".json", ".jsonl", ".ndjson"].iter().any(|end| {
            [".gz", ".bgz", ".zst", ""]
                .iter()
                .any(|packed| name.ends_with(&format!("{end}{packed}")))
        });
        let rows = match is_json {
            true => Rows::Json(JsonRecords::open(&files, &options.json)?),
            false => Rows::Csv(CsvRecords::open(&files, &options.csv)?),
        };
        if let Rows::Csv(rows) = &rows {
            for (option, field) in [
                ("audio_field", &options.audio_field),
                ("text_field", &options.text_field),
            ] {
                if let Some(field) = field
                    .as_ref()
                    .filter(|field| rows.columns().place(field).is_none())
                {
                    return Err(Error::InvalidOption {
                        option,
                        value: format!("{field:?} (columns {:?})", rows.columns().names()),
                        expected: "the name of a column",
                    });
                }
            }
        }
        let mut dataset = Self {
            rows,
            kept: None,
            options,
            resamplers: LastFew::default(),
        };
        dataset.kept = dataset.of_allowed_length();
        Ok(dataset)
    }

    /// The rows as bytes, and where they are: all of them, those left out for their length too.
    pub fn records(&self) -> &RecordFiles {
        match &self.rows {
            Rows::Csv(rows) => rows.records(),
            Rows::Json(rows) => rows.records(),
        }
    }

    /// How many rows were left out for their length.
    pub fn left_out(&self) -> usize {
        self.records().len() - self.len()
    }

    /// The transcript of clip `index`. No sound is read.
    ///
    /// # Errors
    /// When there is no such clip, or its row cannot be read.
    pub fn text(&self, index: usize) -> Result<String> {
        let place = self.place(index)?;
        let row = self.row(place)?;
        row.text(self.options.text_field.as_deref(), &TEXT_FIELDS)
            .map_err(|problem| self.problem(place, problem))
    }

    fn of_allowed_length(&self) -> Option<Rising> {
        let (min, max) = (self.options.min_duration, self.options.max_duration);
        if min.is_none() && max.is_none() {
            return None;
        }
        let is_kept = |place: usize| {
            let length = self
                .row(place)
                .ok()
                .and_then(|row| self.length_s(place, &row));
            length.is_none_or(|length| {
                min.is_none_or(|min| length >= min) && max.is_none_or(|max| length <= max)
            })
        };
        const BLOCK: usize = 1 << 16;
        let rows = self.records().len();
        let places = (0..rows).step_by(BLOCK).flat_map(|start| {
            let block = start..rows.min(start + BLOCK);
            block
                .into_par_iter()
                .filter(|&place| is_kept(place))
                .collect::<Vec<_>>()
        });
        Some(Rising::new(places))
    }

    /// How long a clip is, in seconds, if that can be told without decoding it.
    fn length_s(&self, place: usize, row: &Row) -> Option<f64> {
        let part = self.part(row).ok()?;
        match part.duration_s {
            Some(duration) => Some(duration),
            None => {
                let path = self.path(place, row).ok()?;
                let all = audio::duration_s(&path).ok().flatten()?;
                Some((all - part.offset_s).max(0.0))
            }
        }
    }

    /// The number of the row of clip `index`.
    fn place(&self, index: usize) -> Result<usize> {
        let place = match &self.kept {
            Some(kept) => kept.get(index),
            None => Some(index).filter(|&index| index < self.records().len()),
        };
        place.ok_or(Error::NoSuchRecord {
            index,
            len: self.len(),
        })
    }

    fn row(&self, place: usize) -> Result<Row> {
        Ok(match &self.rows {
            Rows::Csv(rows) => Row::Csv(rows.get(place)?),
            Rows::Json(rows) => Row::Json(rows.get(place)?),
        })
    }

    fn part(&self, row: &Row) -> std::result::Result<Part, String> {
        let offset = row.number("offset")?;
        let duration = row.number("duration")?;
        Ok(Part {
            offset_s: offset.unwrap_or(0.0),
            // A duration beside an offset says where the part ends; alone it describes the file, which may be
            // a sample longer or shorter.
            duration_s: duration,
            max_s: self.options.max_duration,
        })
    }

    fn path(&self, place: usize, row: &Row) -> std::result::Result<PathBuf, String> {
        let name = row.text(self.options.audio_field.as_deref(), &AUDIO_FIELDS)?;
        if name.is_empty() {
            return Err("the path of its sound is empty".to_owned());
        }
        let folder = match &self.options.folder {
            Some(folder) => folder.clone(),
            None => {
                let place = self
                    .records()
                    .place(place)
                    .map_err(|error| error.to_string())?;
                place.path.parent().unwrap_or(Path::new("")).to_owned()
            }
        };
        Ok(folder.join(name))
    }

    fn read(&self, place: usize, row: &Row) -> std::result::Result<Speech, String> {
        let text = row.text(self.options.text_field.as_deref(), &TEXT_FIELDS)?;
        let mut part = self.part(row)?;
        if row.number("offset")?.is_none() {
            part.duration_s = None;
        }
        let path = self.path(place, row)?;
        let sound = audio::decode(&path, &part)
            .map_err(|problem| format!("the sound {}: {problem}", path.display()))?;
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
            text,
            path,
        })
    }

    fn problem(&self, place: usize, problem: String) -> Error {
        match self.records().place(place) {
            Ok(place) => Error::UnreadableRecord {
                path: place.path,
                record: place.record,
                offset: place.offset,
                problem,
            },
            Err(error) => error,
        }
    }
}

impl Row {
    /// The text of the field `name`, or of the first of `names` that there is.
    fn text(&self, name: Option<&str>, names: &[&str]) -> std::result::Result<String, String> {
        let field = |name: &str| match self {
            Row::Csv(row) => row.get(name).map(str::to_owned),
            Row::Json(row) => row.get(name).and_then(Value::as_str).map(str::to_owned),
        };
        match name {
            Some(name) => {
                field(name).ok_or_else(|| format!("it has no text in the field {name:?}"))
            }
            None => names
                .iter()
                .find_map(|name| field(name))
                .ok_or_else(|| format!("it has no text in any of the fields {}", names.join(", "))),
        }
    }

    /// The seconds in a field, if there is one that is not empty.
    fn number(&self, name: &str) -> std::result::Result<Option<f64>, String> {
        let number = match self {
            Row::Csv(row) => match row.get(name).map(str::trim) {
                None | Some("") => return Ok(None),
                Some(field) => field.parse().ok(),
            },
            Row::Json(row) => match row.get(name) {
                None | Some(Value::Null) => return Ok(None),
                Some(value) => value.as_f64(),
            },
        };
        match number.filter(|number| (0.0..1e9).contains(number)) {
            Some(number) => Ok(Some(number)),
            None => Err(format!("its field {name:?} is no number of seconds")),
        }
    }
}

impl Dataset for SpeechDataset {
    type Item = Speech;

    fn len(&self) -> usize {
        match &self.kept {
            Some(kept) => kept.len(),
            None => self.records().len(),
        }
    }

    fn get(&self, index: usize) -> Result<Speech> {
        let place = self.place(index)?;
        let row = self.row(place)?;
        self.read(place, &row)
            .map_err(|problem| self.problem(place, problem))
    }
}
