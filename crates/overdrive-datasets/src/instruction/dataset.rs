use std::fmt;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;

use rayon::prelude::*;
use serde::{Deserialize, Serialize};

use overdrive_core::Error as CommonError;

use super::encoder::InstructionEncoder;
use super::record::InstructionRecord;
use super::record_file::RecordFile;
use crate::digest::FieldHasher;
use crate::transform::{SortedIndices, SortedIndicesWriter};
use crate::{Dataset, Error, Result, Sha256Digest, TokenizedExample};
use overdrive_core::check_fraction;
use overdrive_core::random::uniform_below;

/// The stream of random numbers that splits use (see [`overdrive_core::random::random_u64`]).
const SPLIT_STREAM: u32 = 0x5117;

/// The handling of invalid records.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum OnBadRecord {
    /// The record is an error, with file, line and byte. The default.
    #[default]
    Stop,
    /// The record is skipped and counted.
    Skip,
}

/// The options of [`InstructionDataset::open`].
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct InstructionOptions {
    /// The handling of invalid records. Default: an error.
    pub on_bad_record: OnBadRecord,
    /// The number of records that are read at most, from the first one on. Default: `None`, all.
    pub max_records: Option<usize>,
}

/// A report on the records of the files; it is displayed in one line.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct InstructionReport {
    /// The number of records.
    pub records: u64,
    /// The number of records that are used.
    pub kept: u64,
    /// The number of invalid records, which were skipped.
    pub broken: u64,
    /// The message of the first of them, with its position.
    pub first_broken: Option<String>,
    /// The number of records that were skipped because their answer was empty, or beyond `max_seq_length`.
    pub without_answer: u64,
    /// The number of used records that were truncated to `max_seq_length`.
    pub truncated: u64,
    /// The number of tokens of the used records.
    pub tokens: u64,
    /// The number of those tokens that enter the loss.
    pub learned_tokens: u64,
    /// The number of tokens of the longest used record.
    pub longest: u64,
}

/// A dataset of instruction data in files of JSON Lines or JSON arrays of objects.
///
/// The files are mapped, and a record is parsed on demand. Opening reads all records once, on all cores, to find
/// lengths and invalid records. Afterwards a record takes four bytes for its length and one or two for its
/// number, for a text of any length; its offset is in the mapped index of the file ([`crate::IndexOptions`]).
/// The files must not change while the dataset is in use.
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
    /// The number of records up to and including each file.
    ends: Arc<Vec<usize>>,
    encoder: Arc<InstructionEncoder>,
    /// The records of the examples, counted through all files.
    record_indices: RecordIndices,
    lengths: Vec<u32>,
    report: InstructionReport,
    content: Sha256Digest,
}

/// A list of record numbers.
#[derive(Debug, Clone)]
enum RecordIndices {
    /// Numbers in the order of the files, at one or two bytes each.
    SortedIndices(SortedIndices),
    /// Numbers in any other order.
    Listed(Vec<usize>),
}

impl RecordIndices {
    fn new(record_indices: Vec<usize>) -> Self {
        match record_indices.is_sorted() {
            true => Self::SortedIndices(SortedIndices::new(record_indices)),
            false => Self::Listed(record_indices),
        }
    }

    fn get(&self, index: usize) -> Option<usize> {
        match self {
            Self::SortedIndices(record_indices) => record_indices.get(index),
            Self::Listed(record_indices) => record_indices.get(index).copied(),
        }
    }
}

/// The file and the number in the file of a record.
#[derive(Debug, Clone, Copy)]
struct RecordPosition {
    file: usize,
    record: usize,
}

/// The result of examining one record.
enum Outcome {
    Example {
        length: u32,
        learned: u64,
        truncated: bool,
    },
    WithoutAnswer,
    Broken(String),
}

impl InstructionDataset {
    /// Opens files and folders; of a folder, all `.jsonl`, `.ndjson` and `.json` files in the order of their names.
    ///
    /// # Errors
    /// [`Error::InvalidRecord`] for the first invalid record, unless they are skipped;
    /// [`Error::NoData`] if none is left; an error if a file cannot be read.
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
            record_indices: RecordIndices::Listed(Vec::new()),
            lengths: Vec::new(),
            report: InstructionReport::default(),
            content: Sha256Digest::UNKNOWN,
        };
        dataset.scan(options)?;
        if dataset.is_empty() {
            return Err(Error::NoData {
                searched: names.join(", "),
                problem: format!("{}; records with an answer are needed", dataset.report),
            });
        }
        Ok(dataset)
    }

    fn scan(&mut self, options: InstructionOptions) -> Result<()> {
        let mut left = options.max_records.unwrap_or(usize::MAX);
        let mut record_indices = SortedIndicesWriter::default();
        let mut content = FieldHasher::default();
        for number in 0..self.files.len() {
            let records = self.files[number].len().min(left);
            left -= records;
            self.scan_file(
                number,
                0..records,
                options.on_bad_record,
                &mut record_indices,
                &mut content,
            )?;
        }
        self.content = content.finish();
        self.record_indices = RecordIndices::SortedIndices(record_indices.finish());
        Ok(())
    }

    fn scan_file(
        &mut self,
        number: usize,
        records: Range<usize>,
        on_bad: OnBadRecord,
        record_indices: &mut SortedIndicesWriter,
        content: &mut FieldHasher,
    ) -> Result<()> {
        // In blocks, so that an early error in a long file is returned early.
        const BLOCK_RECORDS: usize = 1 << 14;
        let (files, encoder) = (Arc::clone(&self.files), Arc::clone(&self.encoder));
        let file = &files[number];
        let before = self.ends[number] - file.len();
        for start in records.clone().step_by(BLOCK_RECORDS) {
            let end = (start + BLOCK_RECORDS).min(records.end);
            let found: Vec<(Sha256Digest, Outcome)> = (start..end)
                .into_par_iter()
                .map(|record| examine(file, record, &encoder))
                .collect();
            for (record, (digest, found)) in (start..).zip(found) {
                content.add(&digest.0);
                self.report.records += 1;
                match found {
                    Outcome::Broken(problem) => {
                        let error = file.bad_record(record, problem);
                        if on_bad == OnBadRecord::Stop {
                            return Err(error);
                        }
                        self.report.broken += 1;
                        let first = &mut self.report.first_broken;
                        first.get_or_insert_with(|| error.to_string());
                    }
                    Outcome::WithoutAnswer => self.report.without_answer += 1,
                    Outcome::Example {
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
                        record_indices.push(before + record);
                    }
                }
            }
        }
        Ok(())
    }

    /// Returns the number of tokens of each example, without reading any.
    pub fn lengths(&self) -> &[u32] {
        &self.lengths
    }

    /// Returns the report on the files, before splits.
    pub fn report(&self) -> &InstructionReport {
        &self.report
    }

    /// Returns a digest of the records that were read, before splits: of their bytes in their order, whatever the
    /// names and the times of the files are.
    pub fn content_digest(&self) -> Sha256Digest {
        self.content
    }

    /// Returns the encoder of the records.
    pub fn encoder(&self) -> &InstructionEncoder {
        &self.encoder
    }

    /// Reads the record of an example.
    ///
    /// # Errors
    /// Returns an error if `index` is not below [`Dataset::len`], or if the file has changed.
    pub fn record(&self, index: usize) -> Result<InstructionRecord> {
        let position = self.position(index)?;
        let file = &self.files[position.file];
        InstructionRecord::from_json(&file.record(position.record)?)
            .map_err(|problem| file.bad_record(position.record, problem))
    }

    /// Splits the examples into training and validation, in this order. `fraction` of the examples (rounded down,
    /// but at least one if it is above 0) are held out; which ones depends on the seed alone.
    ///
    /// # Errors
    /// [`Error::Common`] for a fraction outside `[0, 1)`; [`Error::TooFew`] if no example would be left to train
    /// on.
    pub fn split(
        &self,
        fraction: f64,
        seed: u64,
    ) -> Result<(InstructionDataset, InstructionDataset)> {
        check_fraction("validation_fraction", fraction)?;
        let len = self.len();
        let held_out = match fraction > 0.0 {
            true => ((len as f64 * fraction) as usize).max(1),
            false => 0,
        };
        if held_out >= len {
            return Err(Error::TooFew {
                unit: "examples",
                count: len,
                needed: held_out + 1,
                remedy: "give more records or a smaller validation_fraction",
            });
        }
        let order = permutation(len, seed);
        let take = |chosen: &[u32]| {
            let mut chosen: Vec<usize> = chosen.iter().map(|&index| index as usize).collect();
            // Sorted, so that reading goes through the files in order and the list compresses.
            chosen.sort_unstable();
            self.subset(&chosen)
        };
        Ok((take(&order[held_out..])?, take(&order[..held_out])?))
    }

    /// Returns a dataset of the examples with these indices, in this order. Its report is that of the files.
    ///
    /// # Errors
    /// [`Error::NoSuchRecord`] for an index that is not below [`Dataset::len`].
    pub fn subset(&self, indices: &[usize]) -> Result<InstructionDataset> {
        let record_indices: Result<Vec<usize>> =
            indices.iter().map(|&index| self.number(index)).collect();
        Ok(InstructionDataset {
            files: Arc::clone(&self.files),
            ends: Arc::clone(&self.ends),
            encoder: Arc::clone(&self.encoder),
            record_indices: RecordIndices::new(record_indices?),
            // `number` made sure that each index is valid.
            lengths: indices.iter().map(|&index| self.lengths[index]).collect(),
            report: self.report.clone(),
            content: self.content,
        })
    }

    /// Returns the number of an example's record, counted through all files.
    fn number(&self, index: usize) -> Result<usize> {
        self.record_indices.get(index).ok_or(Error::NoSuchRecord {
            index,
            len: self.len(),
        })
    }

    fn position(&self, index: usize) -> Result<RecordPosition> {
        let number = self.number(index)?;
        // Only numbers of existing records are listed, so there is a file.
        let file = self.ends.partition_point(|&end| end <= number);
        Ok(RecordPosition {
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
        let position = self.position(index)?;
        self.encoder
            .encode(&record)
            .map_err(|problem| self.files[position.file].bad_record(position.record, problem))
    }
}

/// Returns the digest of a record's bytes, and the result of encoding it.
fn examine(
    file: &RecordFile,
    record: usize,
    encoder: &InstructionEncoder,
) -> (Sha256Digest, Outcome) {
    let bytes = match file.record(record) {
        Ok(bytes) => bytes,
        Err(error) => return (Sha256Digest::UNKNOWN, Outcome::Broken(error.to_string())),
    };
    let example = InstructionRecord::from_json(&bytes).and_then(|record| encoder.encode(&record));
    let outcome = match example {
        Err(problem) => Outcome::Broken(problem),
        Ok(example) if example.learned_tokens() == 0 => Outcome::WithoutAnswer,
        Ok(example) => Outcome::Example {
            // The length is at most `max_seq_length`.
            length: u32::try_from(example.input_ids.len()).unwrap_or(u32::MAX),
            learned: example.learned_tokens() as u64,
            truncated: example.truncated,
        },
    };
    (Sha256Digest::of(&bytes), outcome)
}

fn files_of(path: PathBuf) -> Result<Vec<PathBuf>> {
    if !path.is_dir() {
        return Ok(vec![path]);
    }
    let entries = std::fs::read_dir(&path).map_err(CommonError::io("list", &path))?;
    let mut files = Vec::new();
    for entry in entries {
        let file = entry.map_err(CommonError::io("list", &path))?.path();
        let extension = file.extension().and_then(|extension| extension.to_str());
        if matches!(extension, Some("jsonl" | "json" | "ndjson")) {
            files.push(file);
        }
    }
    files.sort();
    Ok(files)
}

/// Returns the numbers below `len` in a random order under `seed` (the shuffle of Fisher and Yates).
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
