//! The scan of all records at the start.

use super::encoder::InstructionEncoder;
use super::example_file::{CompactExample, ScanReport};
use super::record::{AnswerKey, InstructionRecord};
use crate::records::{RecordFiles, without_separator};
use crate::transform::SortedIndicesWriter;
use crate::{Result, Sha256Digest};

/// The result of examining one record.
pub(super) enum Outcome {
    Example(CompactExample),
    WithoutAnswer,
    Broken(String),
}

/// The results of encoding all records.
#[derive(Default)]
pub(super) struct Scanned {
    pub(super) report: ScanReport,
    pub(super) lengths: Vec<u32>,
    /// The records of the examples.
    pub(super) kept: SortedIndicesWriter,
    pub(super) content: Sha256Digest,
}

impl Scanned {
    pub(super) fn add(&mut self, record: usize, found: Outcome) {
        let report = &mut self.report.report;
        report.records += 1;
        match found {
            Outcome::Broken(problem) => {
                report.broken += 1;
                self.report.first_broken.get_or_insert((record, problem));
            }
            Outcome::WithoutAnswer => report.without_answer += 1,
            Outcome::Example(example) => {
                // The length is at most `max_seq_length`.
                let length = u32::try_from(example.len()).unwrap_or(u32::MAX);
                report.kept += 1;
                report.tokens += u64::from(length);
                report.learned_tokens += example.learned_tokens();
                report.truncated += u64::from(example.is_truncated());
                report.longest = report.longest.max(u64::from(length));
                self.lengths.push(length);
                self.kept.push(record);
            }
        }
    }
}

/// Returns the digest of a record's bytes; a record that cannot be read has a digest too.
///
/// # Errors
/// As [`examine`].
pub(super) fn digest_of(files: &RecordFiles, record: usize) -> Result<Sha256Digest> {
    match files.bytes(record) {
        Ok(bytes) => Ok(Sha256Digest::of(without_separator(&bytes))),
        Err(error) if error.is_about_record() => Ok(Sha256Digest::UNKNOWN),
        Err(error) => Err(error),
    }
}

/// Returns the digest of a record's bytes, and the result of encoding it.
///
/// # Errors
/// An error of the disk or of a server, which says nothing about the record.
pub(super) fn examine(
    files: &RecordFiles,
    record: usize,
    encoder: &InstructionEncoder,
    answer: AnswerKey,
) -> Result<(Sha256Digest, Outcome)> {
    let bytes = match files.bytes(record) {
        Ok(bytes) => bytes,
        Err(error) if error.is_about_record() => {
            return Ok((Sha256Digest::UNKNOWN, Outcome::Broken(error.to_string())));
        }
        Err(error) => return Err(error),
    };
    let bytes = without_separator(&bytes);
    let record = InstructionRecord::with_answer(bytes, answer);
    let example = record.and_then(|record| encoder.encode(&record));
    let outcome = match example {
        Err(problem) => Outcome::Broken(problem),
        Ok(example) if example.learned_tokens() == 0 => Outcome::WithoutAnswer,
        Ok(example) => Outcome::Example(CompactExample::from(&example)),
    };
    Ok((Sha256Digest::of(bytes), outcome))
}
