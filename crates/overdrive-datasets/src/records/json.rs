//! Datasets of JSON records: JSON Lines, or the elements of an array.

use std::marker::PhantomData;
use std::path::Path;

use overdrive_core::text::in_one_line;
use serde::de::DeserializeOwned;

use super::{RecordFiles, find_files};
use crate::index::{JsonArrayScan, LineScan, Scan, begins_array};
use crate::{Dataset, IndexOptions, Result};

/// The layout of the records in a JSON file.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum JsonLayout {
    /// The layout is guessed by the first character of each file: [`JsonLayout::Array`] for `[`, and
    /// [`JsonLayout::Lines`] otherwise. The default.
    #[default]
    Guess,
    /// Each line is a record; lines of only white space are skipped.
    Lines,
    /// The file is an array, and each element is a record.
    Array,
    /// The file is an object with the array in this field (`field` of `datasets`).
    ArrayIn(String),
}

/// The options of [`JsonRecords`].
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct JsonOptions {
    /// The layout of the records.
    pub layout: JsonLayout,
    /// The options of the files' indexes.
    pub index: IndexOptions,
}

/// The records of JSON Lines files or of JSON arrays, each parsed on demand.
///
/// `T` is any type that serde can deserialize: a struct, or [`serde_json::Value`] for any JSON. Elements of
/// arrays may be nested, contain strings with escapes, and have any white space between them; the file is
/// never parsed as a whole. Integers are exact up to 64 bits.
///
/// ```
/// use overdrive_datasets::{Dataset, JsonOptions, JsonRecords};
/// #[derive(serde::Deserialize)]
/// struct Pair { prompt: String, response: String }
/// # let dir = tempfile::tempdir().unwrap();
/// # let path = dir.path().join("pairs.json");
/// std::fs::write(&path, r#"[ {"prompt": "2+2?", "response": "4"},
///     {"prompt": "[\"}", "response": "odd"} ]"#).unwrap();
/// let pairs = JsonRecords::<Pair>::open([&path], &JsonOptions::default())?;
/// assert_eq!(pairs.len(), 2);
/// assert_eq!(pairs.get(1)?.prompt, "[\"}");
/// # Ok::<(), overdrive_datasets::Error>(())
/// ```
pub struct JsonRecords<T = serde_json::Value> {
    records: RecordFiles,
    // `fn() -> T` is Send and Sync for any `T`, which is right: each `get` makes a new `T`.
    item: PhantomData<fn() -> T>,
}

impl<T: DeserializeOwned> JsonRecords<T> {
    /// Opens files, folders (of `.jsonl`, `.ndjson` and `.json` files) and patterns (see
    /// [`find_files`]).
    ///
    /// # Errors
    /// Returns an error if no file is found, a file cannot be read, or an array is missing or incomplete.
    pub fn open<P: AsRef<Path>>(
        paths: impl IntoIterator<Item = P>,
        options: &JsonOptions,
    ) -> Result<Self> {
        let files = find_files(paths, &["jsonl", "ndjson", "json"])?;
        let scan = |path: &Path| -> Result<Box<dyn Scan>> {
            Ok(match &options.layout {
                JsonLayout::Guess => return guessed_scan(path),
                JsonLayout::Lines => Box::new(LineScan { skip_blank: true }),
                JsonLayout::Array => Box::new(JsonArrayScan { field: None }),
                JsonLayout::ArrayIn(field) => Box::new(JsonArrayScan {
                    field: Some(field.clone()),
                }),
            })
        };
        Ok(Self {
            records: RecordFiles::open(&files, scan, &options.index, 0)?,
            item: PhantomData,
        })
    }
}

impl<T> JsonRecords<T> {
    /// Returns the records as bytes, with their locations. In an array, the bytes of a record include the separator
    /// after it.
    pub fn records(&self) -> &RecordFiles {
        &self.records
    }
}

impl<T> std::fmt::Debug for JsonRecords<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("JsonRecords")
            .field("records", &self.records)
            .finish_non_exhaustive()
    }
}

impl<T: DeserializeOwned> Dataset for JsonRecords<T> {
    type Item = T;

    fn len(&self) -> usize {
        self.records.len()
    }

    fn get(&self, index: usize) -> Result<T> {
        let parse = |bytes: &[u8]| {
            serde_json::from_slice(without_separator(bytes)).map_err(|error| json_problem(&error))
        };
        self.records.read(index, parse)
    }

    fn prefetch(&self, indices: &[usize]) {
        self.records.prefetch(indices);
    }

    fn check_unchanged(&self) -> Result<()> {
        self.records.check_unchanged()
    }
}

/// Returns the problem of a record that serde cannot read.
pub(crate) fn json_problem(error: &serde_json::Error) -> String {
    let text = in_one_line(&error.to_string());
    match error.is_syntax() {
        true => format!(
            "not JSON ({text}); the file must be JSON Lines, or one JSON array: convert other formats first"
        ),
        false => format!("unexpected JSON: {text}"),
    }
}

/// Removes the comma after an element, and white space.
pub(crate) fn without_separator(bytes: &[u8]) -> &[u8] {
    let bytes = bytes.trim_ascii_end();
    bytes
        .strip_suffix(b",")
        .map_or(bytes, <[u8]>::trim_ascii_end)
}

/// Returns the scan of a file by its first character: elements if it begins an array, lines otherwise.
pub(crate) fn guessed_scan(path: &Path) -> Result<Box<dyn Scan>> {
    Ok(match begins_array(path)? {
        Some(true) => Box::new(JsonArrayScan { field: None }),
        _ => Box::new(LineScan { skip_blank: true }),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn records(texts: &[&str]) -> Vec<String> {
        let dir = tempfile::tempdir().unwrap();
        let write = |(number, text): (usize, &&str)| {
            let path = dir.path().join(format!("{number}.json"));
            std::fs::write(&path, text).unwrap();
            path
        };
        let paths = texts.iter().enumerate().map(write).collect::<Vec<_>>();
        let data = JsonRecords::<serde_json::Value>::open(paths, &JsonOptions::default()).unwrap();
        let record = |index| {
            let bytes = data.records().bytes(index).unwrap();
            data.get(index).unwrap();
            String::from_utf8(without_separator(&bytes).to_vec()).unwrap()
        };
        (0..data.len()).map(record).collect()
    }

    #[test]
    fn lines_and_array_elements_are_the_same_records() {
        let each = [
            r#"{"a": "x, ] }\" "}"#,
            r#"{"b": [1, {"c": 2}]}"#,
            r#"{"d": []}"#,
        ];
        let lines = each.join("\n");
        let spaced_lines = format!("\n{}\r\n\n", each.join("\r\n  \r\n"));
        let array = format!("[{}]", each.join(","));
        let spaced_array = format!(" [\n  {}\n]\n", each.join(" ,\n  "));
        for text in [&lines, &spaced_lines, &array, &spaced_array] {
            assert_eq!(records(&[text]), each, "{text}");
        }
        // The layout is that of each file.
        assert_eq!(records(&["", &lines, &spaced_array]), [each, each].concat());
        assert!(records(&["", " [ ] ", "\n\n"]).is_empty());
    }
}
