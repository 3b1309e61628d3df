//! The records of one or several files as bytes.

use std::borrow::Cow;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use crate::digest::FieldHasher;
use crate::index::{IndexedFile, Scan};
use crate::{Error, IndexOptions, IndexReport, RecordNumber, Result, Sha256Digest};

/// The largest number of files that are mapped; of more files, each is opened for each record. Linux allows
/// 65,530 maps per process, and the program has other maps too.
const MAX_MAPPED_FILES: usize = 16_384;

/// The location of a record.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RecordLocation {
    /// The file.
    pub path: PathBuf,
    /// The index of the record in the file, counted from 0.
    pub record: usize,
    /// The offset of its start in the file, in bytes.
    pub offset: u64,
}

/// The records of one or several files as bytes, in the order of the files. The datasets over text formats are
/// built on it.
///
/// The files are memory-mapped. They must not change while they are open: changed bytes give other records, which
/// [`check_unchanged`](Self::check_unchanged) finds afterwards, and truncating a file ends the process
/// ([`FileMap`](overdrive_core::files::FileMap)).
#[derive(Debug)]
pub struct RecordFiles {
    files: Vec<IndexedFile>,
    /// The number of records at the start of each file that are skipped (a CSV header): 0 or 1.
    skip: usize,
    /// The number of records up to and including each file.
    ends: Vec<usize>,
    report: IndexReport,
    /// If `true`, a file is on a server.
    is_remote: bool,
    fingerprint: OnceLock<Sha256Digest>,
}

impl RecordFiles {
    /// Opens the files at `paths`, and finds the records of each by the scan that `scan` returns for it.
    pub(crate) fn open(
        paths: &[PathBuf],
        scan: impl Fn(&Path) -> Result<Box<dyn Scan>>,
        options: &IndexOptions,
        skip: usize,
    ) -> Result<Self> {
        let keep_mapped = paths.len() <= MAX_MAPPED_FILES;
        let mut files = Vec::with_capacity(paths.len());
        let mut ends = Vec::with_capacity(paths.len());
        let mut report = IndexReport::default();
        let mut len = 0;
        for path in paths {
            let scan = scan(path)?;
            let (file, file_report) = IndexedFile::open(path, scan.as_ref(), options, keep_mapped)?;
            len += file.len().saturating_sub(skip);
            report.add(&file_report);
            ends.push(len);
            files.push(file);
        }
        report.records = len as u64;
        let is_remote = files.iter().any(|file| file.source().is_some());
        Ok(Self {
            is_remote,
            files,
            skip,
            ends,
            report,
            fingerprint: OnceLock::new(),
        })
    }

    /// Returns the number of records.
    pub fn len(&self) -> usize {
        self.ends.last().copied().unwrap_or(0)
    }

    /// Returns `true` if there are no records.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the files, in the order of their records.
    pub fn paths(&self) -> impl Iterator<Item = &Path> {
        self.files.iter().map(|file| file.path.as_path())
    }

    /// Returns the report on opening the files.
    pub fn report(&self) -> IndexReport {
        self.report
    }

    /// Returns a digest of the files' contents, their division into records and their order; names and times do not
    /// matter. The first call reads all files, on all cores, at about the speed of the disk or of memory. A file on a server
    /// is not read: its name and its version, such as an ETag, stand for its content.
    ///
    /// # Errors
    /// Returns an error if a file cannot be read.
    pub fn fingerprint(&self) -> Result<Sha256Digest> {
        if let Some(known) = self.fingerprint.get() {
            return Ok(*known);
        }
        let mut hasher = FieldHasher::default()
            .field(b"records 2")
            .field(&(self.skip as u64).to_le_bytes());
        for file in &self.files {
            hasher.add(&file.fingerprint()?.0);
        }
        Ok(*self.fingerprint.get_or_init(|| hasher.finish()))
    }

    /// Checks that no file has changed since it was opened, by its length and its times.
    ///
    /// # Errors
    /// [`Error::FileChanged`], or another error if a file is not there any more.
    pub fn check_unchanged(&self) -> Result<()> {
        self.files.iter().try_for_each(IndexedFile::check_unchanged)
    }

    /// Returns the location of record `index`.
    ///
    /// # Errors
    /// Returns an error if there is no such record, or the index is damaged.
    pub fn location(&self, index: usize) -> Result<RecordLocation> {
        let (file, record) = self.find(index)?;
        Ok(RecordLocation {
            path: file.path.clone(),
            // Error messages count records without the header, so the header is subtracted.
            record: record - self.skip,
            offset: file.range(record)?.start,
        })
    }

    /// Returns the number of the line, counted from 1, in which record `index` starts. It reads the file up to there.
    #[cfg(feature = "tokenizers")]
    pub(crate) fn line(&self, index: usize) -> Result<u64> {
        let (file, record) = self.find(index)?;
        Ok(file.line_feeds_before(file.range(record)?.start)? + 1)
    }

    /// Returns the length of record `index` in bytes, including the separator after it. It reads the index only.
    ///
    /// # Errors
    /// Returns an error if there is no such record, or the index is damaged.
    pub fn byte_length(&self, index: usize) -> Result<u64> {
        let (file, record) = self.find(index)?;
        let range = file.range(record)?;
        Ok(range.end - range.start)
    }

    /// Returns the bytes of record `index`, including the separator after it.
    ///
    /// # Errors
    /// Returns an error if there is no such record, the index is damaged, or the file cannot be read.
    pub fn bytes(&self, index: usize) -> Result<Cow<'_, [u8]>> {
        let (file, record) = self.find(index)?;
        Ok(file.bytes(record)?.1)
    }

    /// Announces that records will be read soon ([`crate::Dataset::prefetch`]); those that do not exist are left out.
    pub fn prefetch(&self, indices: &[usize]) {
        if !self.is_remote {
            return;
        }
        // A batch has few files, which a search in a list finds as fast as a map.
        let mut of_files: Vec<(&IndexedFile, Vec<usize>)> = Vec::new();
        for &index in indices {
            let Ok((file, record)) = self.find(index) else {
                continue;
            };
            match of_files
                .iter_mut()
                .find(|(other, _)| std::ptr::eq(*other, file))
            {
                Some((_, records)) => records.push(record),
                None => of_files.push((file, vec![record])),
            }
        }
        for (file, records) in of_files {
            file.prefetch(&records);
        }
    }

    /// Returns the skipped record at the start of file `number`, or `None` when the file has no record.
    pub(crate) fn skipped(&self, number: usize) -> Result<Option<Cow<'_, [u8]>>> {
        let file = self.files.get(number).filter(|file| file.len() > 0);
        file.map(|file| Ok(file.bytes(0)?.1)).transpose()
    }

    /// Passes the bytes of record `index` to `read`, and adds the record's location to its error.
    pub(crate) fn read<T>(
        &self,
        index: usize,
        read: impl FnOnce(&[u8]) -> std::result::Result<T, String>,
    ) -> Result<T> {
        let (file, record) = self.find(index)?;
        let (offset, bytes) = file.bytes(record)?;
        read(&bytes).map_err(|problem| match file.check_unchanged() {
            // A changed file may yield half of an old record and half of a new one.
            Err(error @ (Error::FileChanged { .. } | Error::Remote { .. })) => error,
            _ => Error::InvalidRecord {
                path: file.path.clone(),
                number: RecordNumber::Record(record - self.skip),
                offset,
                problem,
            },
        })
    }

    /// Returns the file of record `index`, and the index of its offset in that file.
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

/// Returns `bytes` as text, or a message with the position of the first invalid byte.
pub(crate) fn utf8(bytes: &[u8]) -> std::result::Result<&str, String> {
    std::str::from_utf8(bytes).map_err(|error| {
        let at = error.valid_up_to();
        let byte = bytes.get(at).copied().unwrap_or(0);
        format!("not valid UTF-8: the byte 0x{byte:02x} at position {at} of the record")
    })
}

/// Returns the first line, without its line end.
pub(crate) fn first_line(bytes: &[u8]) -> &[u8] {
    let Some(feed) = memchr::memchr(b'\n', bytes) else {
        return bytes;
    };
    bytes[..feed].strip_suffix(b"\r").unwrap_or(&bytes[..feed])
}

#[cfg(all(test, feature = "tokenizers"))]
mod tests {
    use super::*;
    use crate::index::LineScan;

    #[test]
    fn the_line_of_a_record_counts_blank_lines_and_begins_anew_in_each_file() {
        let dir = tempfile::tempdir().unwrap();
        let paths = ["a", "b"].map(|name| dir.path().join(name));
        for path in &paths {
            std::fs::write(path, "{}\n\n{\"a\": 1}\n").unwrap();
        }
        let scan = |_: &Path| Ok(Box::new(LineScan { skip_blank: true }) as Box<dyn Scan>);
        let files = RecordFiles::open(&paths, scan, &IndexOptions::default(), 0).unwrap();
        let lines: Vec<u64> = (0..4).map(|index| files.line(index).unwrap()).collect();
        assert_eq!(lines, [1, 3, 1, 3]);
    }
}
