//! Records of JSON: one a line, or the elements of an array.

use std::marker::PhantomData;
use std::path::{Path, PathBuf};

use serde::de::DeserializeOwned;

use super::{RecordFiles, find_files};
use crate::index::{JsonArrayScan, LineScan, Scan, read_start};
use crate::{Dataset, IndexOptions, Result};

/// How a JSON file holds its records.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum JsonLayout {
    /// By the first character of the first file: `[` says that it is an array, anything else that it
    /// is lines.
    #[default]
    Guess,
    /// One record a line; lines of nothing but white space are none.
    Lines,
    /// The file is an array, of which each element is a record.
    Array,
    /// The file is an object, one of whose values is the array (`field` of `datasets`).
    ArrayIn(String),
}

/// How JSON files are read.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct JsonOptions {
    /// How a file holds its records.
    pub layout: JsonLayout,
    /// How the files are indexed.
    pub index: IndexOptions,
}

/// Records of JSON Lines or of JSON arrays, each parsed when it is asked for.
///
/// `T` is any type that serde reads: a struct of yours, or [`serde_json::Value`] for anything.
/// Elements of arrays may be nested, hold strings with escapes, and have any white space between
/// them; the file is never parsed as a whole. Numbers keep what they say, up to 64 bits.
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
    in_array: bool,
    // Makes no claim about threads: a `T` is made anew in each `get`.
    item: PhantomData<fn() -> T>,
}

impl<T: DeserializeOwned> JsonRecords<T> {
    /// Opens files, folders (of `.jsonl`, `.ndjson` and `.json` files) and patterns (see
    /// [`find_files`]).
    ///
    /// # Errors
    /// When no file is found, or one cannot be read; when an array is no array or does not end.
    pub fn open<P: AsRef<Path>>(
        paths: impl IntoIterator<Item = P>,
        options: &JsonOptions,
    ) -> Result<Self> {
        let files = find_files(paths, &["jsonl", "ndjson", "json"])?;
        let array = |field| Box::new(JsonArrayScan { field }) as Box<dyn Scan>;
        let lines = || Box::new(LineScan { skip_blank: true }) as Box<dyn Scan>;
        let (scan, in_array) = match &options.layout {
            JsonLayout::Guess if begins_array(&files)? => (array(None), true),
            JsonLayout::Guess | JsonLayout::Lines => (lines(), false),
            JsonLayout::Array => (array(None), true),
            JsonLayout::ArrayIn(field) => (array(Some(field.clone())), true),
        };
        Ok(Self {
            records: RecordFiles::open(&files, scan.as_ref(), &options.index, 0)?,
            in_array,
            item: PhantomData,
        })
    }
}

impl<T> JsonRecords<T> {
    /// The records as bytes, and where they are. In an array, the bytes of a record end with what
    /// separates it from the next one.
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
            let bytes = match self.in_array {
                true => without_separator(bytes),
                false => bytes,
            };
            serde_json::from_slice(bytes).map_err(|error| format!("not the JSON expected: {error}"))
        };
        self.records.read(index, parse)
    }
}

/// Without white space and the comma behind an element.
fn without_separator(bytes: &[u8]) -> &[u8] {
    let bytes = bytes.trim_ascii_end();
    bytes.strip_suffix(b",").unwrap_or(bytes)
}

/// Whether the first of the files that has a character begins an array.
fn begins_array(files: &[PathBuf]) -> Result<bool> {
    // White space in front of the data is rarely more than a line end.
    const LOOK: u64 = 4096;
    for path in files {
        let start = read_start(path, LOOK)?;
        let text = start.strip_prefix(b"\xef\xbb\xbf").unwrap_or(&start);
        if let Some(first) = text.trim_ascii_start().first() {
            return Ok(*first == b'[');
        }
    }
    Ok(false)
}
