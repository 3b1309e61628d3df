use std::fmt;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;

use rayon::prelude::*;
use serde::{Deserialize, Serialize};

use super::encoder::{InstructionEncoder, TokenizedExample};
use super::record::InstructionRecord;
use super::record_file::RecordFile;
use crate::{Dataset, Error, Result, uniform_below};

/// The stream of random numbers that splits use (see [`crate::random::random_u64`]).
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
/// each once, on all cores, to know lengths and what is broken: resident afterwards are 20 bytes a
/// record, whatever its text. They must not change while this is in use.
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
    encoder: Arc<InstructionEncoder>,
    places: Vec<Place>,
    lengths: Vec<u32>,
    report: InstructionReport,
}

#[derive(Debug, Clone, Copy)]
struct Place {
    file: u32,
    record: u32,
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
        let mut dataset = InstructionDataset {
            files: Arc::new(files),
            encoder: Arc::new(encoder),
            places: Vec::new(),
            lengths: Vec::new(),
            report: InstructionReport::default(),
        };
        dataset.scan(options)?;
        if dataset.places.is_empty() {
            return Err(Error::NoExamples {
                searched: names.join(", "),
                report: dataset.report.to_string(),
            });
        }
        Ok(dataset)
    }

    fn scan(&mut self, options: InstructionOptions) -> Result<()> {
        let mut left = options.max_records.unwrap_or(usize::MAX);
        for number in 0..self.files.len() {
            let records = self.files[number].len().min(left);
            left -= records;
            self.scan_file(number, 0..records, options.on_bad_record)?;
        }
        Ok(())
    }

    fn scan_file(
        &mut self,
        number: usize,
        records: Range<usize>,
        on_bad: OnBadRecord,
    ) -> Result<()> {
        // In pieces, so that a long file with an early error stops early.
        const PIECE: usize = 1 << 14;
        let (files, encoder) = (Arc::clone(&self.files), Arc::clone(&self.encoder));
        let file = &files[number];
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
                        self.places.push(Place {
                            file: number as u32,
                            record: record as u32,
                        });
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
        let file = &self.files[place.file as usize];
        let record = place.record as usize;
        InstructionRecord::from_json(file.record(record))
            .map_err(|problem| file.bad_record(record, problem))
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
        let len = self.places.len();
        let held = match part > 0.0 {
            true => ((len as f64 * part) as usize).max(1),
            false => 0,
        };
        if held >= len {
            return Err(Error::TooFewDocuments { documents: len });
        }
        let order = permutation(len, seed, SPLIT_STREAM, 0);
        let take = |chosen: &[u32]| {
            let mut chosen = chosen.to_vec();
            chosen.sort_unstable();
            let pick = |index: &u32| *index as usize;
            InstructionDataset {
                places: chosen.iter().map(|i| self.places[pick(i)]).collect(),
                lengths: chosen.iter().map(|i| self.lengths[pick(i)]).collect(),
                ..self.clone()
            }
        };
        Ok((take(&order[held..]), take(&order[..held])))
    }

    /// The examples of these numbers, in this order. Its report is that of the files.
    ///
    /// # Errors
    /// [`Error::OutOfRange`] for a number that there is not.
    pub fn subset(&self, indices: &[usize]) -> Result<InstructionDataset> {
        let places: Result<Vec<Place>> = indices.iter().map(|&index| self.place(index)).collect();
        Ok(InstructionDataset {
            places: places?,
            // `place` found each of them.
            lengths: indices.iter().map(|&index| self.lengths[index]).collect(),
            ..self.clone()
        })
    }

    fn place(&self, index: usize) -> Result<Place> {
        let place = self.places.get(index).copied();
        place.ok_or(Error::OutOfRange {
            start: index,
            end: index + 1,
            tokens: self.places.len(),
        })
    }
}

impl Dataset for InstructionDataset {
    type Item = TokenizedExample;

    fn len(&self) -> usize {
        self.places.len()
    }

    fn get(&self, index: usize) -> Result<TokenizedExample> {
        let record = self.record(index)?;
        let place = self.place(index)?;
        self.encoder.encode(&record).map_err(|problem| {
            self.files[place.file as usize].bad_record(place.record as usize, problem)
        })
    }
}

fn look_at(file: &RecordFile, record: usize, encoder: &InstructionEncoder) -> Found {
    let example = InstructionRecord::from_json(file.record(record))
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

/// The numbers below `len` in an order that seed, stream and round decide (Fisher and Yates).
pub(super) fn permutation(len: usize, seed: u64, stream: u32, round: u64) -> Vec<u32> {
    let mut order: Vec<u32> = (0..u32::try_from(len).unwrap_or(u32::MAX)).collect();
    for last in (1..order.len()).rev() {
        let draw = round << 32 | last as u64;
        let other = uniform_below(last as u64 + 1, seed, stream, draw) as usize;
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
