//! The file of encoded examples, which a later run reads instead of tokenizing.
//!
//! All numbers are little-endian.
//!
//! | bytes | content |
//! |---|---|
//! | 0..8 | magic |
//! | 8..16 | format version |
//! | 16..24 | number of examples |
//! | 24..32 | number of tokens |
//! | 32..64 | key: the digest of the records, the encoder and the options |
//! | 64..96 | SHA-256 of everything from byte 128 on |
//! | 96..128 | SHA-256 of bytes 0..96 |
//! | 128.. | tokens, 4 bytes each |
//! | | a bit per token: it enters the loss |
//! | | an entry of 16 bytes per example: its record, one past its last token with the highest bit for a truncated one |
//! | | the report, as JSON |

use std::io::{BufWriter, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use tempfile::NamedTempFile;

use overdrive_core::Error as CommonError;
use overdrive_core::files::{self, FileMap};

use super::dataset::InstructionReport;
use crate::store_format::{digest_at, u64_at};
use crate::{Error, IGNORE_INDEX, Result, Sha256Digest, TokenizedExample};

const MAGIC: [u8; 8] = *b"OVDEXAMP";
/// Increase this when the format changes, or when the same record gives different tokens.
pub(super) const FORMAT_VERSION: u64 = 2;
const HEADER_BYTES: usize = 128;
const CHECKED_BYTES: usize = 96;
const TOKEN_BYTES: usize = 4;
const ENTRY_BYTES: usize = 16;
/// The bit of an entry that marks a truncated example.
const TRUNCATED: u64 = 1 << 63;

/// The report of the scan with the first broken record, whose message has the path of a file.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(super) struct ScanReport {
    pub(super) report: InstructionReport,
    /// The number of the first broken record through all files, and the problem.
    pub(super) first_broken: Option<(usize, String)>,
}

/// An example in few bytes.
#[derive(Debug)]
pub(super) struct CompactExample {
    tokens: Vec<u32>,
    /// A value per token: `true` if it enters the loss.
    learned: Vec<bool>,
    truncated: bool,
}

impl CompactExample {
    pub(super) fn len(&self) -> usize {
        self.tokens.len()
    }

    pub(super) fn learned_tokens(&self) -> u64 {
        self.learned.iter().skip(1).filter(|&&is| is).count() as u64
    }

    pub(super) fn is_truncated(&self) -> bool {
        self.truncated
    }
}

/// Every label of an encoded record is the token itself, or ignored.
impl From<&TokenizedExample> for CompactExample {
    fn from(example: &TokenizedExample) -> Self {
        let tokens = example.input_ids.iter();
        Self {
            // An encoder's ids are those of a tokenizer, which are 32 bits wide.
            tokens: tokens.map(|&id| u32::try_from(id).unwrap_or(0)).collect(),
            learned: example
                .labels
                .iter()
                .map(|&label| label != IGNORE_INDEX)
                .collect(),
            truncated: example.truncated,
        }
    }
}

/// The writer of a file of examples.
pub(super) struct ExampleWriter {
    path: PathBuf,
    file: BufWriter<NamedTempFile>,
    hasher: Sha256,
    tokens: u64,
    learned: Vec<u8>,
    entries: Vec<u8>,
}

impl ExampleWriter {
    pub(super) fn create(path: &Path) -> Result<Self> {
        let file = files::unfinished(path)?;
        let mut file = BufWriter::with_capacity(1 << 20, file);
        // Zeros are not a valid header: the file becomes valid only when `finish` writes the real header.
        file.write_all(&[0; HEADER_BYTES])
            .map_err(CommonError::io("write", path))?;
        Ok(Self {
            path: path.to_owned(),
            file,
            hasher: Sha256::new(),
            tokens: 0,
            learned: Vec::new(),
            entries: Vec::new(),
        })
    }

    /// Appends the example of a record; its number must be higher than all earlier ones.
    pub(super) fn push(&mut self, record: usize, example: &CompactExample) -> Result<()> {
        let bytes: Vec<u8> = example
            .tokens
            .iter()
            .flat_map(|id| id.to_le_bytes())
            .collect();
        self.write(&bytes)?;
        for &is_learned in &example.learned {
            let bit = self.tokens % 8;
            if bit == 0 {
                self.learned.push(0);
            }
            if let (true, Some(last)) = (is_learned, self.learned.last_mut()) {
                *last |= 1 << bit;
            }
            self.tokens += 1;
        }
        let end = self.tokens | if example.truncated { TRUNCATED } else { 0 };
        self.entries.extend((record as u64).to_le_bytes());
        self.entries.extend(end.to_le_bytes());
        Ok(())
    }

    /// Completes the file, syncs it, renames it and opens it.
    pub(super) fn finish(mut self, key: Sha256Digest, report: &ScanReport) -> Result<ExampleFile> {
        let report = serde_json::to_vec(report).map_err(|error| {
            Error::invalid_file(&self.path, format!("its report cannot be written: {error}"))
        })?;
        let (learned, entries) = (
            std::mem::take(&mut self.learned),
            std::mem::take(&mut self.entries),
        );
        for part in [&learned, &entries, &report] {
            self.write(part)?;
        }
        let mut header = [0; HEADER_BYTES];
        let mut put = |at: usize, field: &[u8]| header[at..at + field.len()].copy_from_slice(field);
        put(0, &MAGIC);
        put(8, &FORMAT_VERSION.to_le_bytes());
        put(16, &((entries.len() / ENTRY_BYTES) as u64).to_le_bytes());
        put(24, &self.tokens.to_le_bytes());
        put(32, &key.0);
        put(
            64,
            &Sha256Digest::finish(std::mem::take(&mut self.hasher)).0,
        );
        let digest = Sha256Digest::of(&header[..CHECKED_BYTES]);
        header[CHECKED_BYTES..].copy_from_slice(&digest.0);
        let io = CommonError::io("write", &self.path);
        let file = self.file.seek(SeekFrom::Start(0)).and_then(|_| {
            self.file.write_all(&header)?;
            self.file
                .into_inner()
                .map_err(std::io::IntoInnerError::into_error)
        });
        files::commit(file.map_err(io)?, &self.path)?;
        match ExampleFile::open(&self.path, key)? {
            Some(file) => Ok(file),
            None => Err(Error::damaged(
                &self.path,
                "it changed while it was written; start again",
            )),
        }
    }

    fn write(&mut self, bytes: &[u8]) -> Result<()> {
        self.hasher.update(bytes);
        self.file
            .write_all(bytes)
            .map_err(CommonError::io("write", &self.path))?;
        Ok(())
    }
}

/// Encoded examples in a mapped file.
#[derive(Debug)]
pub(super) struct ExampleFile {
    path: PathBuf,
    map: FileMap,
    examples: usize,
    tokens: usize,
}

impl ExampleFile {
    /// Opens a file of examples and compares its checksums; `None` if there is no file, or if it is damaged or
    /// belongs to another key and must be built again.
    pub(super) fn open(path: &Path, key: Sha256Digest) -> Result<Option<Self>> {
        if !path.exists() {
            return Ok(None);
        }
        let map = FileMap::open(path)?;
        Ok(match Self::of_map(path, map, key) {
            Ok(file) => Some(file),
            Err(problem) => {
                tracing::warn!("{} {problem}; building it again", path.display());
                None
            }
        })
    }

    fn of_map(
        path: &Path,
        map: FileMap,
        key: Sha256Digest,
    ) -> std::result::Result<Self, &'static str> {
        let header = map.first_chunk::<HEADER_BYTES>();
        let header = header.filter(|header| header.starts_with(&MAGIC));
        let header = header.ok_or("is not a file of examples")?;
        if Sha256Digest::of(&header[..CHECKED_BYTES]) != digest_at(header, CHECKED_BYTES) {
            return Err("has a damaged header");
        }
        if u64_at(header, 8) != FORMAT_VERSION || digest_at(header, 32) != key {
            return Err("does not match its name");
        }
        // The whole file is read once: training on damaged tokens would be worse than a slower start.
        if Sha256Digest::of(&map[HEADER_BYTES..]) != digest_at(header, 64) {
            return Err("does not match the checksum in its header");
        }
        let count = |at| usize::try_from(u64_at(header, at)).map_err(|_| "is too large");
        let file = Self {
            path: path.to_owned(),
            examples: count(16)?,
            tokens: count(24)?,
            map,
        };
        // The checksums are correct, so the offsets are as they were written; they are checked nevertheless.
        let end = file.report_start().filter(|&end| end <= file.map.len());
        end.ok_or("is shorter than its header says")?;
        let mut before = 0;
        for example in 0..file.examples {
            let end = file.end(example);
            if end < before || end > file.tokens {
                return Err("has examples that overlap");
            }
            before = end;
        }
        Ok(file)
    }

    fn learned_start(&self) -> Option<usize> {
        self.tokens
            .checked_mul(TOKEN_BYTES)?
            .checked_add(HEADER_BYTES)
    }

    fn entries_start(&self) -> Option<usize> {
        self.learned_start()?.checked_add(self.tokens.div_ceil(8))
    }

    fn report_start(&self) -> Option<usize> {
        self.entries_start()?
            .checked_add(self.examples.checked_mul(ENTRY_BYTES)?)
    }

    fn entry(&self, example: usize) -> (u64, u64) {
        // `of_map` checked that all entries are within the file.
        let at = self.entries_start().unwrap_or(0) + example * ENTRY_BYTES;
        (u64_at(&self.map, at), u64_at(&self.map, at + 8))
    }

    fn end(&self, example: usize) -> usize {
        (self.entry(example).1 & !TRUNCATED) as usize
    }

    pub(super) fn len(&self) -> usize {
        self.examples
    }

    /// Returns the size of the file in bytes.
    pub(super) fn bytes(&self) -> u64 {
        self.map.len() as u64
    }

    /// Returns the record of an example.
    pub(super) fn record(&self, example: usize) -> usize {
        self.entry(example).0 as usize
    }

    /// Returns the number of tokens of an example.
    pub(super) fn length(&self, example: usize) -> usize {
        let start = example.checked_sub(1).map_or(0, |before| self.end(before));
        self.end(example) - start
    }

    pub(super) fn report(&self) -> Result<ScanReport> {
        let report = &self.map[self.report_start().unwrap_or(0)..];
        serde_json::from_slice(report).map_err(|error| {
            Error::damaged(
                &self.path,
                format!("its report cannot be read ({error}); delete the file"),
            )
        })
    }

    /// Returns the example of a record; `None` if the record has none.
    pub(super) fn of_record(&self, record: usize) -> Option<TokenizedExample> {
        // The entries are in the order of the records.
        let (mut low, mut high) = (0, self.examples);
        while low < high {
            let middle = low.midpoint(high);
            match self.record(middle) < record {
                true => low = middle + 1,
                false => high = middle,
            }
        }
        (low < self.examples && self.record(low) == record).then(|| self.example(low))
    }

    fn example(&self, example: usize) -> TokenizedExample {
        let end = self.end(example);
        let range = end - self.length(example)..end;
        let bytes =
            HEADER_BYTES + range.start * TOKEN_BYTES..HEADER_BYTES + range.end * TOKEN_BYTES;
        let tokens = self.map[bytes].chunks_exact(TOKEN_BYTES);
        let input_ids: Vec<i64> = tokens
            .map(|id| i64::from(u32::from_le_bytes([id[0], id[1], id[2], id[3]])))
            .collect();
        let learned = &self.map[self.learned_start().unwrap_or(0)..];
        let labels = range.zip(&input_ids).map(|(token, &id)| {
            let is_learned = learned[token / 8] >> (token % 8) & 1 == 1;
            if is_learned { id } else { IGNORE_INDEX }
        });
        TokenizedExample {
            labels: labels.collect(),
            input_ids,
            truncated: self.entry(example).1 & TRUNCATED != 0,
        }
    }
}
