//! Files of instruction records.

use std::borrow::Cow;
use std::path::Path;

use crate::index::{IndexedFile, JsonArrayScan, LineScan, Scan, begins_array};
use crate::{Error, IndexOptions, RecordNumber, Result};

/// A mapped file of records: JSON Lines, or one JSON array of objects.
#[derive(Debug)]
pub(super) struct RecordFile(IndexedFile);

impl RecordFile {
    /// Finds the records of a file, or opens the index that an earlier call made. Nothing is parsed.
    pub(super) fn open(path: &Path) -> Result<RecordFile> {
        let array = JsonArrayScan { field: None };
        let lines = LineScan { skip_blank: true };
        let scan: &dyn Scan = match begins_array(path)? {
            Some(true) => &array,
            _ => &lines,
        };
        let (file, _) = IndexedFile::open(path, scan, &IndexOptions::default(), true)?;
        Ok(RecordFile(file))
    }

    pub(super) fn len(&self) -> usize {
        self.0.len()
    }

    pub(super) fn check_unchanged(&self) -> Result<()> {
        self.0.check_unchanged()
    }

    pub(super) fn prefetch(&self, records: &[usize]) {
        self.0.prefetch(records);
    }

    /// Returns the bytes of a record, without the comma after an element of an array.
    pub(super) fn record(&self, index: usize) -> Result<Cow<'_, [u8]>> {
        let trim = |bytes: &[u8]| {
            let bytes = bytes.trim_ascii_end();
            let element = bytes.strip_suffix(b",");
            element.map_or(bytes, <[u8]>::trim_ascii_end).len()
        };
        Ok(match self.0.bytes(index)?.1 {
            Cow::Borrowed(bytes) => Cow::Borrowed(&bytes[..trim(bytes)]),
            Cow::Owned(mut bytes) => {
                bytes.truncate(trim(&bytes));
                Cow::Owned(bytes)
            }
        })
    }

    /// Returns the error of a record, with its line.
    pub(super) fn bad_record(&self, index: usize, problem: String) -> Error {
        let offset = self.0.range(index).map(|range| range.start);
        let position = offset.and_then(|offset| Ok((offset, self.0.line_feeds_before(offset)?)));
        match position {
            Ok((offset, feeds)) => Error::InvalidRecord {
                path: self.0.path.clone(),
                number: RecordNumber::Line(feeds + 1),
                offset,
                problem,
            },
            // An error of the file is more serious than that of a record, so it is returned instead.
            Err(error) => error,
        }
    }
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
            .map(|index| String::from_utf8(file.record(index).unwrap().to_vec()).unwrap())
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
