//! The framing of a `.wandb` file.
//!
//! The file begins with seven bytes of W&B, and continues as a LevelDB log: blocks of 32 KiB of chunks, each with a
//! checksum, a length and a type. A record is one chunk, or several if it crosses the end of a block. The checksum is
//! zlib's CRC-32 without LevelDB's mask
//! ([log format](https://github.com/google/leveldb/blob/main/doc/log_format.md)).

use std::fs::{self, File, OpenOptions};
use std::io::{self, ErrorKind};
use std::path::Path;

use crate::append_file::AppendFile;

/// `:W&B`, the number 0xBEE1 and the version 0.
const START: [u8; 7] = [b':', b'W', b'&', b'B', 0xe1, 0xbe, 0];
const BLOCK: usize = 32 << 10;
/// The size of the header of a chunk: checksum (4 bytes), length (2), type (1); little-endian.
const HEADER: usize = 7;

const FULL: u8 = 1;
const FIRST: u8 = 2;
const MIDDLE: u8 = 3;
const LAST: u8 = 4;

/// A `.wandb` file to which records are appended.
#[derive(Debug)]
pub(super) struct LogFile {
    file: AppendFile,
    /// The length of the file when it was opened.
    opened_at: u64,
}

impl LogFile {
    /// Creates a file that does not exist.
    pub(super) fn create(path: &Path) -> io::Result<Self> {
        let mut log = Self {
            file: AppendFile::new(File::create_new(path)?),
            opened_at: 0,
        };
        log.file.append(&START)?;
        Ok(log)
    }

    /// Opens a file to append to. Its records are kept up to the first one for which `is_kept` is false, or which is
    /// damaged or truncated.
    ///
    /// # Errors
    /// An I/O error; one of the kind `InvalidData` if it is not a `.wandb` file.
    pub(super) fn resume(path: &Path, mut is_kept: impl FnMut(&[u8]) -> bool) -> io::Result<Self> {
        let bytes = fs::read(path)?;
        if !bytes.starts_with(&START) {
            return Err(ErrorKind::InvalidData.into());
        }
        let mut end = START.len();
        while let Some((record, next)) = read_record(&bytes, end)
            && is_kept(&record)
        {
            end = next;
        }
        Self::truncate(path, end as u64)
    }

    /// Opens a file to append to, after a number of its bytes.
    pub(super) fn truncate(path: &Path, length: u64) -> io::Result<Self> {
        OpenOptions::new().write(true).open(path)?.set_len(length)?;
        Ok(Self {
            file: AppendFile::new(OpenOptions::new().append(true).open(path)?),
            opened_at: length,
        })
    }

    /// Appends a record, which waits in memory while the disk is full.
    pub(super) fn append(&mut self, record: &[u8]) -> io::Result<()> {
        let start = self.length() % BLOCK as u64;
        self.file.append(&framed(record, start as usize))
    }

    /// Writes the waiting records, and flushes the file to disk.
    pub(super) fn sync(&mut self) -> io::Result<()> {
        self.file.sync()
    }

    /// Returns the length of the file, with the records that wait.
    pub(super) fn length(&self) -> u64 {
        self.opened_at + self.file.taken()
    }
}

/// Returns a record as chunks that begin `start` bytes after the beginning of a block.
fn framed(record: &[u8], start: usize) -> Vec<u8> {
    let mut out = Vec::with_capacity(record.len() + 2 * HEADER);
    let mut rest = record;
    let mut is_first = true;
    loop {
        let left = BLOCK - (start + out.len()) % BLOCK;
        if left < HEADER {
            // A header does not cross the end of a block.
            out.resize(out.len() + left, 0);
            continue;
        }
        let (chunk, after) = rest.split_at(rest.len().min(left - HEADER));
        let kind = match (is_first, after.is_empty()) {
            (true, true) => FULL,
            (true, false) => FIRST,
            (false, false) => MIDDLE,
            (false, true) => LAST,
        };
        out.extend(checksum(kind, chunk).to_le_bytes());
        // A chunk is shorter than a block.
        out.extend((chunk.len() as u16).to_le_bytes());
        out.push(kind);
        out.extend_from_slice(chunk);
        if after.is_empty() {
            return out;
        }
        rest = after;
        is_first = false;
    }
}

/// Returns the record that begins at `start` and the position of the next one, if it is complete and undamaged.
pub(super) fn read_record(bytes: &[u8], start: usize) -> Option<(Vec<u8>, usize)> {
    let mut record = Vec::new();
    let mut at = start;
    let mut is_first = true;
    loop {
        let left = BLOCK - at % BLOCK;
        if left < HEADER {
            at += left;
        }
        let header = bytes.get(at..at + HEADER)?;
        let expected = u32::from_le_bytes(header[..4].try_into().ok()?);
        let length = usize::from(u16::from_le_bytes(header[4..6].try_into().ok()?));
        let kind = header[6];
        at += HEADER;
        let chunk = bytes.get(at..at + length)?;
        at += length;
        if checksum(kind, chunk) != expected {
            return None;
        }
        record.extend_from_slice(chunk);
        match (is_first, kind) {
            (true, FULL) | (false, LAST) => return Some((record, at)),
            (true, FIRST) | (false, MIDDLE) => is_first = false,
            _ => return None,
        }
    }
}

fn checksum(kind: u8, chunk: &[u8]) -> u32 {
    let mut hasher = crc32fast::Hasher::new();
    hasher.update(&[kind]);
    hasher.update(chunk);
    hasher.finalize()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn records(path: &Path) -> Vec<Vec<u8>> {
        let bytes = fs::read(path).expect("reads");
        assert_eq!(bytes[..7], START);
        let mut found = Vec::new();
        let mut at = START.len();
        while let Some((record, next)) = read_record(&bytes, at) {
            found.push(record);
            at = next;
        }
        assert_eq!(at, bytes.len(), "nothing is left");
        found
    }

    #[test]
    fn chunks_are_those_of_the_format() {
        // The CRC-32 of the bytes 01 61, as Python's zlib.crc32(b"\x01a").
        assert_eq!(framed(b"a", 7), [0x70, 0x72, 0x77, 0x62, 1, 0, FULL, b'a']);
        // Six bytes at the end of a block are padding.
        let padded = framed(b"a", BLOCK - 6);
        assert_eq!(padded[..6], [0; 6]);
        assert_eq!(padded[6..], framed(b"a", 0));
        // Seven are the header of an empty first chunk.
        let split = framed(b"a", BLOCK - 7);
        assert_eq!((split[4], split[5], split[6]), (0, 0, FIRST));
        assert_eq!(
            (split[11], split[12], split[13], split[14]),
            (1, 0, LAST, b'a')
        );
    }

    proptest! {
        #[test]
        fn records_of_any_size_are_read_as_they_were_written(
            sizes in prop::collection::vec(prop_oneof![0..100_usize, 32_700..32_800_usize, 0..100_000_usize], 1..12),
        ) {
            let folder = tempfile::tempdir().expect("temporary folder");
            let path = folder.path().join("run-a.wandb");
            let written: Vec<Vec<u8>> =
                sizes.iter().enumerate().map(|(index, &size)| vec![index as u8 + 1; size]).collect();
            let mut log = LogFile::create(&path).expect("creates");
            for record in &written {
                log.append(record).expect("appends");
            }
            prop_assert_eq!(log.length(), fs::metadata(&path).expect("a file").len());
            prop_assert_eq!(records(&path), written.clone());

            // A file that was cut anywhere keeps its complete records, and continues after them.
            let length = log.length() as usize;
            for cut in [length - 1, length / 2, 7] {
                let copy = folder.path().join("cut");
                fs::write(&copy, &fs::read(&path).expect("reads")[..cut]).expect("writes");
                let mut log = LogFile::resume(&copy, |_| true).expect("resumes");
                log.append(b"next").expect("appends");
                let found = records(&copy);
                let (last, kept) = found.split_last().expect("the next one");
                prop_assert_eq!(last.as_slice(), b"next");
                prop_assert_eq!(kept, &written[..kept.len()]);
            }
        }
    }

    proptest! {
        #[test]
        fn any_bytes_are_read_to_a_complete_record_or_refused(
            bytes in prop::collection::vec(any::<u8>(), 0..200),
            start in prop_oneof![0..40_usize, BLOCK - 20..BLOCK + 20],
        ) {
            let mut file = vec![0; start];
            file.extend(bytes);
            if let Some((record, next)) = read_record(&file, start.min(file.len())) {
                prop_assert!(next <= file.len() && record.len() <= file.len());
            }
        }
    }

    #[test]
    fn a_damaged_record_and_all_after_it_are_dropped() {
        let folder = tempfile::tempdir().expect("temporary folder");
        let path = folder.path().join("run-a.wandb");
        let mut log = LogFile::create(&path).expect("creates");
        for record in [b"one", b"two", b"six"] {
            log.append(record).expect("appends");
        }
        let whole = fs::read(&path).expect("reads");
        // The second record is the bytes 17 to 27: checksum, length, type, data.
        for at in 17..27 {
            let mut bytes = whole.clone();
            bytes[at] ^= 0x40;
            fs::write(&path, &bytes).expect("writes");
            LogFile::resume(&path, |_| true).expect("resumes");
            assert_eq!(records(&path), [b"one"], "byte {at}");
        }
        for bytes in [&b""[..], b":W&B\xe1", b"something else"] {
            fs::write(&path, bytes).expect("writes");
            let error = LogFile::resume(&path, |_| true).expect_err("no header");
            assert_eq!(error.kind(), ErrorKind::InvalidData);
        }
    }
}
