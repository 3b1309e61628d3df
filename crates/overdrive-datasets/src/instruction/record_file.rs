//! Where the records of a file lie.

use std::path::{Path, PathBuf};

use memmap2::Mmap;

use crate::mmap::map_file;
use crate::{Error, Result};

/// A file of records, mapped: JSON Lines, or one JSON array of objects. In memory are the places of the
/// records alone, 8 bytes each.
#[derive(Debug)]
pub(super) struct RecordFile {
    path: PathBuf,
    /// `None` for an empty file, which cannot be mapped.
    map: Option<Mmap>,
    /// Where each record begins; it ends where the next one begins, or the file.
    starts: Vec<u64>,
    /// Where the last record ends.
    end: u64,
}

impl RecordFile {
    /// Finds the records of a file; nothing is parsed yet.
    pub(super) fn open(path: &Path) -> Result<RecordFile> {
        let length = std::fs::metadata(path)
            .map_err(Error::io("open", path))?
            .len();
        let map = (length > 0).then(|| map_file(path)).transpose()?;
        let bytes = map.as_deref().unwrap_or_default();
        let first = bytes.iter().position(|byte| !byte.is_ascii_whitespace());
        let (starts, end) = match first {
            Some(first) if bytes[first] == b'[' => elements(bytes, first),
            _ => (lines(bytes), length),
        };
        Ok(RecordFile {
            path: path.to_owned(),
            map,
            starts,
            end,
        })
    }

    pub(super) fn len(&self) -> usize {
        self.starts.len()
    }

    /// The bytes of a record.
    pub(super) fn record(&self, index: usize) -> &[u8] {
        let bytes = self.map.as_deref().unwrap_or_default();
        let place = |index: usize| self.starts.get(index).map(|&start| start as usize);
        let end = (self.end as usize).min(bytes.len());
        let start = place(index).unwrap_or(end);
        let record = bytes[start..place(index + 1).unwrap_or(end)].trim_ascii();
        // That behind an element of an array.
        record
            .strip_suffix(b",")
            .map_or(record, <[u8]>::trim_ascii_end)
    }

    /// An error about a record, with its line.
    pub(super) fn bad_record(&self, index: usize, problem: String) -> Error {
        let bytes = self.map.as_deref().unwrap_or_default();
        let offset = self.starts.get(index).copied().unwrap_or(0);
        let before = &bytes[..(offset as usize).min(bytes.len())];
        let line = before.iter().filter(|&&byte| byte == b'\n').count() as u64 + 1;
        Error::BadRecord {
            path: self.path.clone(),
            line,
            offset,
            problem,
        }
    }
}

/// Where the lines that are not blank begin.
fn lines(bytes: &[u8]) -> Vec<u64> {
    let mut starts = Vec::new();
    let mut start = 0;
    for line in bytes.split_inclusive(|&byte| byte == b'\n') {
        if !line.trim_ascii().is_empty() {
            starts.push(start as u64);
        }
        start += line.len();
    }
    starts
}

/// Where the elements of the array begin that begins at `open`, and where the last one ends. What is no
/// JSON is cut somewhere, and is an error when it is read.
fn elements(bytes: &[u8], open: usize) -> (Vec<u64>, u64) {
    let mut starts = Vec::new();
    let (mut depth, mut in_text, mut escaped) = (0_u64, false, false);
    let mut between = false;
    for (at, &byte) in bytes.iter().enumerate().skip(open) {
        if in_text {
            match byte {
                _ if escaped => escaped = false,
                b'\\' => escaped = true,
                b'"' => in_text = false,
                _ => {}
            }
            continue;
        }
        if between && !byte.is_ascii_whitespace() && byte != b']' {
            starts.push(at as u64);
            between = false;
        }
        match byte {
            b'"' => in_text = true,
            b'[' | b'{' => {
                depth += 1;
                between |= depth == 1;
            }
            b']' if depth == 1 => return (starts, at as u64),
            b']' | b'}' => depth = depth.saturating_sub(1),
            b',' if depth == 1 => between = true,
            _ => {}
        }
    }
    (starts, bytes.len() as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn records(text: &str) -> Vec<String> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("data");
        std::fs::write(&path, text).unwrap();
        let file = RecordFile::open(&path).unwrap();
        (0..file.len())
            .map(|index| String::from_utf8(file.record(index).to_vec()).unwrap())
            .collect()
    }

    #[test]
    fn lines_and_array_elements_are_the_same_records() {
        let each = [
            r#"{"a": "x, ] }\" "}"#,
            r#"{"b": [1, {"c": 2}]}"#,
            r#"{"d": []}"#,
        ];
        assert_eq!(records(&each.join("\n")), each);
        assert_eq!(
            records(&format!("\n{}\r\n\n", each.join("\r\n  \r\n"))),
            each
        );
        assert_eq!(records(&format!("[{}]", each.join(","))), each);
        assert_eq!(
            records(&format!(" [\n  {}\n]\n", each.join(" ,\n  "))),
            each
        );
        assert!(
            records("").is_empty() && records(" [ ] ").is_empty() && records("\n\n").is_empty()
        );
    }

    #[test]
    fn an_error_has_the_line_and_the_byte() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("data.jsonl");
        std::fs::write(&path, "{}\n\n{\"a\": 1}\n").unwrap();
        let file = RecordFile::open(&path).unwrap();
        let error = file.bad_record(1, "is wrong".to_owned()).to_string();
        assert!(
            error.ends_with("data.jsonl, line 3 (byte 4): is wrong"),
            "{error}"
        );
    }
}
