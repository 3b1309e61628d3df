use std::fmt;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;

use rayon::prelude::*;
use serde::{Deserialize, Serialize};

use super::encoder::InstructionEncoder;
use super::record::InstructionRecord;
use super::record_file::RecordFile;
use crate::transform::{Rising, RisingWriter};
use crate::{Dataset, Error, Result, TokenizedExample};
use overdrive_core::random::uniform_below;

/// The stream of random numbers that splits use (see [`overdrive_core::random::random_u64`]).
const SPLIT_STREAM: u32 = 0x5117;

/// What becomes of a record that is broken.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum OnBadRecord {
    /// It is an error, with file, line and byte. The default.
    #[default]
    Stop,
    /// It is counted and left out.
    Skip,
}

/// How instruction data is opened.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct InstructionOptions {
    /// What becomes of broken records; default: an error.
    pub on_bad_record: OnBadRecord,
    /// At most so many records, the first ones; default: all.
    pub max_records: Option<usize>,
}

/// What a file of records came to. Displayed: in one line.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct InstructionReport {
    /// Records there are.
    pub records: u64,
    /// Records that are used.
    pub kept: u64,
    /// Broken records that were left out.
    pub broken: u64,
    /// The first of them, with its place.
    pub first_broken: Option<String>,
    /// Records left out because no answer was left in them: it was empty, or behind `max_seq_length`.
    pub without_answer: u64,
    /// Used records that lost their end to `max_seq_length`.
    pub truncated: u64,
    /// Tokens of the used records.
    pub tokens: u64,
    /// Those of them that are learned.
    pub learned_tokens: u64,
    /// Tokens of the longest used record.
    pub longest: u64,
}

/// Instruction data in files: JSON Lines, or JSON arrays of objects.
///
/// The files are mapped, and parsed record by record when a record is asked for. Opening them reads
/// each once, on all cores, to know lengths and what is broken. Afterwards a record takes four bytes for
/// its length and a byte or two for its number, whatever its text; where it lies is in the index of the
/// file ([`crate::IndexOptions`]), which is mapped. The files must not change while this is in use.
///
/// ```
/// use overdrive_datasets::{
///     Dataset, EncodeOptions, InstructionDataset, InstructionEncoder, InstructionOptions,
/// };
/// # use overdrive_datasets::{Corpus, CorpusOptions, BpeOptions, train_bpe};
/// # fn main() -> overdrive_datasets::Result<()> {
/// # let dir = tempfile::tempdir().unwrap();
/// # let path = dir.path().join("train.jsonl");
/// # let text = dir.path().join("text");
/// # std::fs::create_dir(&text).unwrap();
/// # std::fs::write(text.join("a.txt"), "The sum of two and two is four. ".repeat(50)).unwrap();
/// # let corpus = Corpus::from_paths([&text], &CorpusOptions::default())?;
/// # let tokenizer = train_bpe(&corpus, &BpeOptions { vocab_size: 260, ..Default::default() })?.tokenizer;
/// # let end_of_text = tokenizer.token_to_id("<|endoftext|>");
/// std::fs::write(&path, r#"{"prompt": "Two and two is", "response": " four."}"#).unwrap();
/// let encoder = InstructionEncoder::new(tokenizer, None, end_of_text, EncodeOptions::default())?;
/// let data = InstructionDataset::open([&path], encoder, InstructionOptions::default())?;
///
/// let example = data.get(0)?;
/// assert_eq!(example.labels[0], -100); // the question is not learned
/// assert_eq!(example.labels.last(), example.input_ids.last()); // the end of the answer is
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone)]
pub struct InstructionDataset {
    files: Arc<Vec<RecordFile>>,
    /// How many records there are up to and with each file.
    ends: Arc<Vec<usize>>,
    encoder: Arc<InstructionEncoder>,
    /// The records of the examples, counted through all files.
    places: Places,
    lengths: Vec<u32>,
    report: InstructionReport,
}

/// Numbers of records.
#[derive(Debug, Clone)]
enum Places {
    /// In the order of the files, a byte or two each.
    Rising(Rising),
    /// In any other order.
    Listed(Vec<usize>),
}

impl Places {
    fn new(places: Vec<usize>) -> Self {
        match places.is_sorted() {
            true => Self::Rising(Rising::new(places)),
            false => Self::Listed(places),
        }
    }

    fn get(&self, index: usize) -> Option<usize> {
        match self {
            Self::Rising(places) => places.get(index),
            Self::Listed(places) => places.get(index).copied(),
        }
    }
}

#[derive(Debug, Clone, Copy)]
struct Place {
    file: usize,
    record: usize,
}

/// What one record is, found in parallel.
enum Found {
    Example {
        length: u32,
        learned: u64,
        truncated: bool,
    },
    WithoutAnswer,
    Broken(String),
}

impl InstructionDataset {
    /// Opens files, or folders: then all `.jsonl` and `.json` files in them, in the order of their
    /// names.
    ///
    /// # Errors
    /// [`Error::BadRecord`] for the first broken record, unless they are skipped;
    /// [`Error::NoExamples`] if none is left; when a file cannot be read.
    pub fn open<P: Into<PathBuf>>(
        paths: impl IntoIterator<Item = P>,
        encoder: InstructionEncoder,
        options: InstructionOptions,
    ) -> Result<InstructionDataset> {
        let mut files = Vec::new();
        let mut names = Vec::new();
        for path in paths {
            for file in files_of(path.into())? {
                names.push(file.display().to_string());
                files.push(RecordFile::open(&file)?);
            }
        }
        let ends = files.iter().scan(0, |end, file| {
            *end += file.len();
            Some(*end)
        });
        let mut dataset = InstructionDataset {
            ends: Arc::new(ends.collect()),
            files: Arc::new(files),
            encoder: Arc::new(encoder),
            places: Places::Listed(Vec::new()),
            lengths: Vec::new(),
            report: InstructionReport::default(),
        };
        dataset.scan(options)?;
        if dataset.is_empty() {
            return Err(Error::NoExamples {
                searched: names.join(", "),
                report: dataset.report.to_string(),
            });
        }
        Ok(dataset)
    }

    fn scan(&mut self, options: InstructionOptions) -> Result<()> {
        let mut left = options.max_records.unwrap_or(usize::MAX);
        let mut places = RisingWriter::default();
        for number in 0..self.files.len() {
            let records = self.files[number].len().min(left);
            left -= records;
            self.scan_file(number, 0..records, options.on_bad_record, &mut places)?;
        }
        self.places = Places::Rising(places.finish());
        Ok(())
    }

    fn scan_file(
        &mut self,
        number: usize,
        records: Range<usize>,
        on_bad: OnBadRecord,
        places: &mut RisingWriter,
    ) -> Result<()> {
        // In pieces, so that a long file with an early error stops early.
        const PIECE: usize = 1 << 14;
        let (files, encoder) = (Arc::clone(&self.files), Arc::clone(&self.encoder));
        let file = &files[number];
        let before = self.ends[number] - file.len();
        for start in records.clone().step_by(PIECE) {
            let end = (start + PIECE).min(records.end);
            let found: Vec<Found> = (start..end)
                .into_par_iter()
                .map(|record| look_at(file, record, &encoder))
                .collect();
            for (record, found) in (start..).zip(found) {
                self.report.records += 1;
                match found {
                    Found::Broken(problem) => {
                        let error = file.bad_record(record, problem);
                        if on_bad == OnBadRecord::Stop {
                            return Err(error);
                        }
                        self.report.broken += 1;
                        let first = &mut self.report.first_broken;
                        first.get_or_insert_with(|| error.to_string());
                    }
                    Found::WithoutAnswer => self.report.without_answer += 1,
                    Found::Example {
                        length,
                        learned,
                        truncated,
                    } => {
                        self.report.kept += 1;
                        self.report.tokens += u64::from(length);
                        self.report.learned_tokens += learned;
                        self.report.truncated += u64::from(truncated);
                        self.report.longest = self.report.longest.max(u64::from(length));
                        self.lengths.push(length);
                        places.push(before + record);
                    }
                }
            }
        }
        Ok(())
    }

    /// The tokens of each example, known without reading any.
    pub fn lengths(&self) -> &[u32] {
        &self.lengths
    }

    /// What the files came to, before splits.
    pub fn report(&self) -> &InstructionReport {
        &self.report
    }

    /// What turns records into tokens.
    pub fn encoder(&self) -> &InstructionEncoder {
        &self.encoder
    }

    /// The record of an example, parsed anew.
    ///
    /// # Errors
    /// When `index` is not below [`Dataset::len`], or the file has changed.
    pub fn record(&self, index: usize) -> Result<InstructionRecord> {
        let place = self.place(index)?;
        let file = &self.files[place.file];
        InstructionRecord::from_json(&file.record(place.record)?)
            .map_err(|problem| file.bad_record(place.record, problem))
    }

    /// Two parts: one to train on, and `part` of the examples (0 to 1, rounded down, at least one if
    /// `part` is above 0) held back. Which ones depends on the seed alone.
    ///
    /// # Errors
    /// [`Error::InvalidOption`] for a part below 0 or from 1 on; [`Error::TooFewDocuments`] if nothing
    /// would be left to train on.
    pub fn split(&self, part: f64, seed: u64) -> Result<(InstructionDataset, InstructionDataset)> {
        if !(0.0..1.0).contains(&part) {
            return Err(Error::InvalidOption {
                option: "validation_fraction",
                value: part.to_string(),
                expected: "it is a part of the examples, from 0 and below 1",
            });
        }
        let len = self.len();
        let held = match part > 0.0 {
            true => ((len as f64 * part) as usize).max(1),
            false => 0,
        };
        if held >= len {
            return Err(Error::TooFewDocuments { documents: len });
        }
        let order = permutation(len, seed);
        let take = |chosen: &[u32]| {
            let mut chosen: Vec<usize> = chosen.iter().map(|&index| index as usize).collect();
            chosen.sort_unstable();
            self.subset(&chosen)
        };
        Ok((take(&order[held..])?, take(&order[..held])?))
    }

    /// The examples of these numbers, in this order. Its report is that of the files.
    ///
    /// # Errors
    /// [`Error::OutOfRange`] for a number that there is not.
    pub fn subset(&self, indices: &[usize]) -> Result<InstructionDataset> {
        let places: Result<Vec<usize>> = indices.iter().map(|&index| self.number(index)).collect();
        Ok(InstructionDataset {
            files: Arc::clone(&self.files),
            ends: Arc::clone(&self.ends),
            encoder: Arc::clone(&self.encoder),
            places: Places::new(places?),
            // `number` found each of them.
            lengths: indices.iter().map(|&index| self.lengths[index]).collect(),
            report: self.report.clone(),
        })
    }

    /// The record of an example, counted through all files.
    fn number(&self, index: usize) -> Result<usize> {
        self.places.get(index).ok_or(Error::OutOfRange {
            start: index,
            end: index + 1,
            tokens: self.len(),
        })
    }

    fn place(&self, index: usize) -> Result<Place> {
        let number = self.number(index)?;
        // Numbers are those of records that there are.
        let file = self.ends.partition_point(|&end| end <= number);
        Ok(Place {
            file,
            record: number - (self.ends[file] - self.files[file].len()),
        })
    }
}

impl Dataset for InstructionDataset {
    type Item = TokenizedExample;

    fn len(&self) -> usize {
        self.lengths.len()
    }

    fn get(&self, index: usize) -> Result<TokenizedExample> {
        let record = self.record(index)?;
        let place = self.place(index)?;
        self.encoder
            .encode(&record)
            .map_err(|problem| self.files[place.file].bad_record(place.record, problem))
    }
}

fn look_at(file: &RecordFile, record: usize, encoder: &InstructionEncoder) -> Found {
    let example = file
        .record(record)
        .map_err(|error| error.to_string())
        .and_then(|bytes| InstructionRecord::from_json(&bytes))
        .and_then(|record| encoder.encode(&record));
    match example {
        Err(problem) => Found::Broken(problem),
        Ok(example) if example.learned_tokens() == 0 => Found::WithoutAnswer,
        Ok(example) => Found::Example {
            // At most `max_seq_length`.
            length: u32::try_from(example.input_ids.len()).unwrap_or(u32::MAX),
            learned: example.learned_tokens() as u64,
            truncated: example.truncated,
        },
    }
}

fn files_of(path: PathBuf) -> Result<Vec<PathBuf>> {
    if !path.is_dir() {
        return Ok(vec![path]);
    }
    let entries = std::fs::read_dir(&path).map_err(Error::io("list", &path))?;
    let mut files = Vec::new();
    for entry in entries {
        let file = entry.map_err(Error::io("list", &path))?.path();
        let extension = file.extension().and_then(|extension| extension.to_str());
        if matches!(extension, Some("jsonl" | "json" | "ndjson")) {
            files.push(file);
        }
    }
    files.sort();
    Ok(files)
}

/// The numbers below `len` in an order that the seed decides (Fisher and Yates).
fn permutation(len: usize, seed: u64) -> Vec<u32> {
    let mut order: Vec<u32> = (0..u32::try_from(len).unwrap_or(u32::MAX)).collect();
    for last in (1..order.len()).rev() {
        let draw = last as u64;
        let other = uniform_below(draw + 1, seed, SPLIT_STREAM, draw) as usize;
        order.swap(last, other);
    }
    order
}

impl fmt::Display for InstructionReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} of {} records, {} tokens ({} learned), the longest {}",
            self.kept, self.records, self.tokens, self.learned_tokens, self.longest
        )?;
        for (count, what) in [
            (self.truncated, "cut off"),
            (self.without_answer, "without an answer left out"),
            (self.broken, "broken left out"),
        ] {
            if count > 0 {
                write!(f, "; {count} {what}")?;
            }
        }
        match &self.first_broken {
            Some(first) => write!(f, " (the first: {first})"),
            None => Ok(()),
        }
    }
}
