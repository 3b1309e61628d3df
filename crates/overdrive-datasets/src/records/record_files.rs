//! The bytes of records, out of one or many files.

use std::borrow::Cow;
use std::path::{Path, PathBuf};

use crate::digest::FieldHasher;
use crate::index::{IndexedFile, Scan};
use crate::{Error, IndexOptions, IndexReport, Result, Sha256Digest};

/// Above so many files, a file is opened for each record instead of mapped once: Linux maps 65,530
/// times a process, and the program has other maps too.
const MAX_MAPPED_FILES: usize = 16_384;

/// Where a record is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Place {
    /// The file.
    pub path: PathBuf,
    /// Which record of this file it is, counted from 0.
    pub record: usize,
    /// Where it starts in the file, in bytes.
    pub offset: u64,
}

/// Records of one or many files as bytes, one file behind the other: what the datasets over text
/// formats are made of.
///
/// The files are mapped, not read. They must not be changed while they are open: other bytes make
/// other records, and a file that is cut short ends the process (SIGBUS), as with every memory map.
#[derive(Debug)]
pub struct RecordFiles {
    files: Vec<IndexedFile>,
    /// How many records at the start of each file are none (a CSV header): 0 or 1.
    skip: usize,
    /// How many records there are up to and with each file.
    ends: Vec<usize>,
    report: IndexReport,
}

impl RecordFiles {
    /// Opens `paths`, whose records `scan` finds.
    pub(crate) fn open(
        paths: &[PathBuf],
        scan: &dyn Scan,
        options: &IndexOptions,
        skip: usize,
    ) -> Result<Self> {
        let keep_mapped = paths.len() <= MAX_MAPPED_FILES;
        let mut files = Vec::with_capacity(paths.len());
        let mut ends = Vec::with_capacity(paths.len());
        let mut report = IndexReport::default();
        let mut len = 0;
        for path in paths {
            let (file, file_report) = IndexedFile::open(path, scan, options, keep_mapped)?;
            len += file.len().saturating_sub(skip);
            report.add(&file_report);
            ends.push(len);
            files.push(file);
        }
        report.records = len as u64;
        Ok(Self {
            files,
            skip,
            ends,
            report,
        })
    }

    /// The number of records.
    pub fn len(&self) -> usize {
        self.ends.last().copied().unwrap_or(0)
    }

    /// Whether there is no record.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The files, in the order of their records.
    pub fn paths(&self) -> impl Iterator<Item = &Path> {
        self.files.iter().map(|file| file.path.as_path())
    }

    /// What opening found and did.
    pub fn report(&self) -> IndexReport {
        self.report
    }

    /// A digest that changes when a file, its cutting into records or the order of the files does.
    ///
    /// It is made of lengths, modification times and samples of the content, so that asking costs
    /// nothing; an edit that keeps length and time and misses the sample is not seen.
    pub fn fingerprint(&self) -> Sha256Digest {
        let mut hasher = FieldHasher::default().field(&(self.skip as u64).to_le_bytes());
        for file in &self.files {
            hasher.add(&file.fingerprint().0);
        }
        hasher.finish()
    }

    /// Where record `index` is.
    ///
    /// # Errors
    /// When there is no such record, or the index is damaged.
    pub fn place(&self, index: usize) -> Result<Place> {
        let (file, record) = self.find(index)?;
        Ok(Place {
            path: file.path.clone(),
            // As `read` counts: without the header.
            record: record - self.skip,
            offset: file.range(record)?.start,
        })
    }

    /// How many bytes record `index` has, with what separates it from the next one: told by the index alone.
    ///
    /// # Errors
    /// When there is no such record, or the index is damaged.
    pub fn byte_length(&self, index: usize) -> Result<u64> {
        let (file, record) = self.find(index)?;
        let range = file.range(record)?;
        Ok(range.end - range.start)
    }

    /// The bytes of record `index`, with what separates it from the next one.
    ///
    /// # Errors
    /// When there is no such record, the index is damaged, or the disk refuses.
    pub fn bytes(&self, index: usize) -> Result<Cow<'_, [u8]>> {
        let (file, record) = self.find(index)?;
        Ok(file.bytes(record)?.1)
    }

    /// The skipped record at the start of file `number`, or `None` when the file has no record.
    pub(crate) fn skipped(&self, number: usize) -> Result<Option<Cow<'_, [u8]>>> {
        let file = self.files.get(number).filter(|file| file.len() > 0);
        file.map(|file| Ok(file.bytes(0)?.1)).transpose()
    }

    /// Hands the bytes of record `index` to `read`, and says where they are if it fails.
    pub(crate) fn read<T>(
        &self,
        index: usize,
        read: impl FnOnce(&[u8]) -> std::result::Result<T, String>,
    ) -> Result<T> {
        let (file, record) = self.find(index)?;
        let (offset, bytes) = file.bytes(record)?;
        read(&bytes).map_err(|problem| Error::UnreadableRecord {
            path: file.path.clone(),
            record: record - self.skip,
            offset,
            problem,
        })
    }

    /// The file of record `index`, and which of its offsets it has.
    fn find(&self, index: usize) -> Result<(&IndexedFile, usize)> {
        let number = self.ends.partition_point(|&end| end <= index);
        let file = self.files.get(number).ok_or(Error::NoSuchRecord {
            index,
            len: self.len(),
        })?;
        let before = match number {
            0 => 0,
            _ => self.ends[number - 1],
        };
        Ok((file, index - before + self.skip))
    }
}

/// `bytes` as text, with where it goes wrong if it is none.
pub(crate) fn utf8(bytes: &[u8]) -> std::result::Result<&str, String> {
    std::str::from_utf8(bytes).map_err(|error| {
        let at = error.valid_up_to();
        let byte = bytes.get(at).copied().unwrap_or(0);
        format!("not valid UTF-8: the byte 0x{byte:02x} at place {at} of the record")
    })
}

/// The first line, without its end.
pub(crate) fn first_line(bytes: &[u8]) -> &[u8] {
    let Some(feed) = memchr::memchr(b'\n', bytes) else {
        return bytes;
    };
    bytes[..feed].strip_suffix(b"\r").unwrap_or(&bytes[..feed])
}

/// Without the line ends behind it: its own, and those of empty lines, which are no records.
pub(crate) fn without_line_ends(mut bytes: &[u8]) -> &[u8] {
    while let [line @ .., b'\n'] = bytes {
        bytes = line.strip_suffix(b"\r").unwrap_or(line);
    }
    bytes
}
