use std::fmt;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;

use rayon::prelude::*;
use serde::{Deserialize, Serialize};

use super::encoder::InstructionEncoder;
use super::example_cache::ExampleCache;
use super::example_file::{ExampleFile, ExampleWriter, ScanReport};
use super::record::{AnswerKey, InstructionRecord};
use super::scan::{Outcome, Scanned, digest_of, examine};
use crate::cache::{Cached, cached};
use crate::digest::FieldHasher;
use crate::records::{guessed_scan, without_separator};
use crate::transform::{SortedIndices, split_indices, test_len};
use crate::{
    Dataset, Error, IndexOptions, RecordFiles, RecordNumber, Result, Sha256Digest,
    TokenizedExample, find_files,
};
use overdrive_core::check_fraction;

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
    /// The maximum number of records to read, from the first one. Default: `None`, all.
    pub max_records: Option<usize>,
    /// The answer to read from each record: that of instruction data, or one of the two of preference data
    /// ([`InstructionRecord::from_preference_json`]). Default: that of instruction data.
    pub answer: AnswerKey,
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
/// # let tokenizer = train_bpe(corpus.sample(16 << 20), &BpeOptions { vocab_size: 260, ..Default::default() })?.tokenizer;
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
    files: Arc<RecordFiles>,
    encoder: Arc<InstructionEncoder>,
    answer: AnswerKey,
    /// The records of the examples, counted through all files.
    record_indices: RecordIndices,
    lengths: Vec<u32>,
    report: InstructionReport,
    content: Sha256Digest,
    /// The encoded examples, if they are cached.
    examples: Option<Arc<ExampleFile>>,
    was_cached: bool,
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

impl InstructionDataset {
    /// Opens files, folders (of `.jsonl`, `.ndjson` and `.json` files) and patterns (see [`crate::find_files`]).
    ///
    /// # Errors
    /// [`Error::InvalidRecord`] for the first invalid record, unless they are skipped;
    /// [`Error::NoData`] if none is left; an error if a file cannot be read.
    pub fn open<P: Into<PathBuf>>(
        paths: impl IntoIterator<Item = P>,
        encoder: InstructionEncoder,
        options: InstructionOptions,
    ) -> Result<InstructionDataset> {
        let mut dataset = InstructionDataset::of_files(paths, encoder, options.answer)?;
        let scan = dataset.scan(options, None)?;
        dataset.check_unchanged()?;
        dataset.record_indices = RecordIndices::SortedIndices(scan.kept.finish());
        dataset.lengths = scan.lengths;
        dataset.content = scan.content;
        dataset.set_report(scan.report);
        dataset.checked()
    }

    /// Opens files as [`open`](Self::open) does, and keeps the tokens of all records in a file of `cache`: the first
    /// run encodes each record once and writes it, and later runs read the file instead of tokenizing. The name of
    /// the file is a hash of the bytes of the records, the tokenizer, the format and the options of the encoder, and
    /// the version of the format: if any of them changes, a new file is made, and no stale one is read. A damaged
    /// file is replaced. Several processes may call it at once: one writes and the others wait.
    ///
    /// # Errors
    /// Those of [`open`](Self::open), and an error if the file cannot be written.
    pub fn open_cached<P: Into<PathBuf>>(
        paths: impl IntoIterator<Item = P>,
        encoder: InstructionEncoder,
        options: InstructionOptions,
        cache: &ExampleCache,
    ) -> Result<InstructionDataset> {
        let mut dataset = InstructionDataset::of_files(paths, encoder, options.answer)?;
        dataset.content = dataset.read_content(options)?;
        let key = cache.key(dataset.content, &dataset.encoder, options)?;
        let path = cache.path(key);
        let build = || {
            let mut writer = ExampleWriter::create(&path)?;
            let scan = dataset.scan(options, Some(&mut writer))?;
            if scan.content != dataset.content {
                let path = PathBuf::from(dataset.names());
                return Err(Error::FileChanged { path });
            }
            writer.finish(key, &scan.report)
        };
        let (examples, was_cached) = match cached(&path, || ExampleFile::open(&path, key), build)? {
            Cached::Hit(examples) => (examples, true),
            Cached::Built(examples) => (examples, false),
        };
        dataset.was_cached = was_cached;
        let count = 0..examples.len();
        let length = |example| u32::try_from(examples.length(example)).unwrap_or(u32::MAX);
        dataset.lengths = count.clone().map(length).collect();
        let records = count.map(|example| examples.record(example));
        dataset.record_indices = RecordIndices::SortedIndices(SortedIndices::new(records));
        dataset.set_report(examples.report()?);
        dataset.examples = Some(Arc::new(examples));
        dataset.checked()
    }

    fn of_files<P: Into<PathBuf>>(
        paths: impl IntoIterator<Item = P>,
        encoder: InstructionEncoder,
        answer: AnswerKey,
    ) -> Result<InstructionDataset> {
        let paths = paths.into_iter().map(Into::into);
        let paths = find_files::<PathBuf>(paths, &["jsonl", "ndjson", "json"])?;
        let files = RecordFiles::open(&paths, guessed_scan, &IndexOptions::default(), 0)?;
        Ok(InstructionDataset {
            files: Arc::new(files),
            encoder: Arc::new(encoder),
            answer,
            record_indices: RecordIndices::Listed(Vec::new()),
            lengths: Vec::new(),
            report: InstructionReport::default(),
            content: Sha256Digest::UNKNOWN,
            examples: None,
            was_cached: false,
        })
    }

    /// Returns the names of the files for an error message.
    fn names(&self) -> String {
        let names = self.files.paths().map(|path| path.display().to_string());
        names.collect::<Vec<_>>().join(", ")
    }

    /// Returns the error of a record, with its line.
    fn bad_record(&self, number: usize, problem: String) -> Error {
        let location = self.files.location(number);
        match location.and_then(|location| Ok((location, self.files.line(number)?))) {
            Ok((location, line)) => Error::InvalidRecord {
                path: location.path,
                number: RecordNumber::Line(line),
                offset: location.offset,
                problem,
            },
            // An error of the file is more serious than that of a record, so it is returned instead.
            Err(error) => error,
        }
    }

    /// Returns the dataset, or an error if it is empty.
    fn checked(self) -> Result<InstructionDataset> {
        if self.is_empty() {
            let problem = match self.report.records {
                0 => "there are no records".to_owned(),
                _ => format!(
                    "{}; records with an answer within the length of a sequence are needed",
                    self.report
                ),
            };
            return Err(Error::NoData {
                searched: self.names(),
                problem,
            });
        }
        Ok(self)
    }

    fn set_report(&mut self, scan: ScanReport) {
        self.report = scan.report;
        // The message names the current path of the file, which may differ from the path in the run that wrote the
        // report.
        self.report.first_broken = scan
            .first_broken
            .map(|(number, problem)| self.bad_record(number, problem).to_string());
    }

    /// Returns the records that must be read, in blocks, so that an error at the beginning of a long file is returned
    /// early.
    fn blocks(&self, options: InstructionOptions) -> impl Iterator<Item = Range<usize>> + use<> {
        const BLOCK_RECORDS: usize = 1 << 12;
        let records = self
            .files
            .len()
            .min(options.max_records.unwrap_or(usize::MAX));
        let starts = (0..records).step_by(BLOCK_RECORDS);
        starts.map(move |start| start..records.min(start + BLOCK_RECORDS))
    }

    /// Returns the digest of the records' bytes, without parsing them.
    fn read_content(&self, options: InstructionOptions) -> Result<Sha256Digest> {
        let mut content = FieldHasher::default();
        for records in self.blocks(options) {
            let digests = records
                .into_par_iter()
                .map(|record| digest_of(&self.files, record))
                .collect::<Result<Vec<_>>>()?;
            digests.iter().for_each(|digest| content.add(&digest.0));
        }
        Ok(content.finish())
    }

    /// Encodes all records, and passes the examples to `writer`.
    fn scan(
        &self,
        options: InstructionOptions,
        mut writer: Option<&mut ExampleWriter>,
    ) -> Result<Scanned> {
        let mut scanned = Scanned::default();
        let mut content = FieldHasher::default();
        for records in self.blocks(options) {
            let found: Vec<(Sha256Digest, Outcome)> = records
                .clone()
                .into_par_iter()
                .map(|record| examine(&self.files, record, &self.encoder, self.answer))
                .collect::<Result<_>>()?;
            for (record, (digest, found)) in records.zip(found) {
                content.add(&digest.0);
                if let (OnBadRecord::Stop, Outcome::Broken(problem)) =
                    (options.on_bad_record, &found)
                {
                    return Err(self.bad_record(record, problem.clone()));
                }
                if let (Outcome::Example(example), Some(writer)) = (&found, &mut writer) {
                    writer.push(record, example)?;
                }
                scanned.add(record, found);
            }
        }
        scanned.content = content.finish();
        Ok(scanned)
    }

    /// Returns the number of tokens of each example, without reading any.
    pub fn lengths(&self) -> &[u32] {
        &self.lengths
    }

    /// Returns the report on the files, before splits.
    pub fn report(&self) -> &InstructionReport {
        &self.report
    }

    /// Returns a digest of the records that were read, before splits: of their bytes in order, whatever the names and
    /// modification times of the files are.
    pub fn content_digest(&self) -> Sha256Digest {
        self.content
    }

    /// Returns the size of the file with the encoded examples in bytes; `None` if they are encoded when they are read.
    pub fn cached_bytes(&self) -> Option<u64> {
        self.examples.as_ref().map(|examples| examples.bytes())
    }

    /// Returns `true` if an earlier run wrote the file with the encoded examples.
    pub fn was_cached(&self) -> bool {
        self.was_cached
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
        let number = self.record_number(index)?;
        let bytes = self.files.bytes(number)?;
        InstructionRecord::with_answer(without_separator(&bytes), self.answer)
            .map_err(|problem| self.bad_record(number, problem))
    }

    /// Splits the examples into training and validation, in this order. `fraction` of the examples (rounded to the nearest
    /// number, but at least one if it is above 0) are held out; which ones depends on the seed alone.
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
            true => test_len(len, fraction).max(1),
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
        // Sorted, so that reading goes through the files in order and the list compresses.
        let (train, held_out) = split_indices(len, held_out, seed);
        Ok((self.subset(&train)?, self.subset(&held_out)?))
    }

    /// Returns a dataset of the examples with these indices, in this order. Its report is that of the files.
    ///
    /// # Errors
    /// [`Error::NoSuchRecord`] for an index that is not below [`Dataset::len`].
    pub fn subset(&self, indices: &[usize]) -> Result<InstructionDataset> {
        let record_indices: Result<Vec<usize>> = indices
            .iter()
            .map(|&index| self.record_number(index))
            .collect();
        Ok(InstructionDataset {
            files: Arc::clone(&self.files),
            encoder: Arc::clone(&self.encoder),
            answer: self.answer,
            record_indices: RecordIndices::new(record_indices?),
            // `record_number` made sure that each index is valid.
            lengths: indices.iter().map(|&index| self.lengths[index]).collect(),
            report: self.report.clone(),
            content: self.content,
            examples: self.examples.clone(),
            was_cached: self.was_cached,
        })
    }

    /// Returns the number of an example's record, counted from 0 through all files.
    ///
    /// # Errors
    /// [`Error::NoSuchRecord`] if `index` is not below [`Dataset::len`].
    pub fn record_number(&self, index: usize) -> Result<usize> {
        self.record_indices.get(index).ok_or(Error::NoSuchRecord {
            index,
            len: self.len(),
        })
    }
}

impl Dataset for InstructionDataset {
    type Item = TokenizedExample;

    fn len(&self) -> usize {
        self.lengths.len()
    }

    fn get(&self, index: usize) -> Result<TokenizedExample> {
        if let Some(examples) = &self.examples {
            let no_such = || Error::NoSuchRecord {
                index,
                len: self.len(),
            };
            return examples
                .of_record(self.record_number(index)?)
                .ok_or_else(no_such);
        }
        let record = self.record(index)?;
        let number = self.record_number(index)?;
        self.encoder
            .encode(&record)
            .map_err(|problem| self.bad_record(number, problem))
    }

    fn prefetch(&self, indices: &[usize]) {
        // Cached examples are on this machine.
        if self.examples.is_some() {
            return;
        }
        let numbers = indices.iter();
        let numbers = numbers.filter_map(|&index| self.record_indices.get(index));
        self.files.prefetch(&numbers.collect::<Vec<_>>());
    }

    fn check_unchanged(&self) -> Result<()> {
        match self.examples {
            // With cached examples, the records are not read again.
            Some(_) => Ok(()),
            None => self.files.check_unchanged(),
        }
    }
}

impl fmt::Display for InstructionReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} of {} records, {} tokens ({} in the loss), longest {}",
            self.kept, self.records, self.tokens, self.learned_tokens, self.longest
        )?;
        for (count, what) in [
            (self.truncated, "truncated"),
            (self.without_answer, "skipped without an answer"),
            (self.broken, "skipped as invalid"),
        ] {
            if count > 0 {
                write!(f, "; {count} {what}")?;
            }
        }
        match &self.first_broken {
            Some(first) => write!(f, " (first: {first})"),
            None => Ok(()),
        }
    }
}
