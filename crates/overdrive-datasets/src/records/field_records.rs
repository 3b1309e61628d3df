//! Rows with named fields, in every format that has them.

use std::borrow::Cow;
use std::path::Path;

use overdrive_core::check_option;
use serde_json::{Map, Value};

#[cfg(feature = "parquet")]
use super::TableRecords;
use super::{
    CsvOptions, CsvRecords, CsvRow, JsonOptions, JsonRecords, RecordFormat, RecordLocation,
    find_files,
};
use crate::{Dataset, Error, RecordNumber, Result, Sha256Digest};

/// The rows of CSV, TSV, JSON, JSON Lines, Parquet or Arrow files, whose fields are read by their names, in the same
/// way in each format.
///
/// ```
/// use overdrive_datasets::FieldRecords;
/// # let dir = tempfile::tempdir().unwrap();
/// # let (csv, json) = (dir.path().join("rows.csv"), dir.path().join("rows.jsonl"));
/// std::fs::write(&csv, "text,stars\nWell done,5\n").unwrap();
/// std::fs::write(&json, "{\"text\": \"Well done\", \"stars\": 5}\n").unwrap();
/// for path in [csv, json] {
///     let rows = FieldRecords::open([path])?;
///     let row = rows.row(0)?;
///     assert_eq!(row.required_text("text")?, "Well done");
///     assert_eq!((row.number("stars")?, row.text("title")?), (Some(5.0), None));
/// }
/// # Ok::<(), overdrive_datasets::Error>(())
/// ```
#[derive(Debug)]
pub struct FieldRecords(Rows);

#[derive(Debug)]
enum Rows {
    Json(JsonRecords<Map<String, Value>>),
    Csv(CsvRecords),
    #[cfg(feature = "parquet")]
    Table(TableRecords<Map<String, Value>>),
}

impl From<CsvRecords> for FieldRecords {
    fn from(records: CsvRecords) -> Self {
        Self(Rows::Csv(records))
    }
}

impl From<JsonRecords<Map<String, Value>>> for FieldRecords {
    fn from(records: JsonRecords<Map<String, Value>>) -> Self {
        Self(Rows::Json(records))
    }
}

impl FieldRecords {
    /// Opens files, folders (of files in these formats) and patterns (see [`find_files`]). The name of the first file
    /// tells the format of all of them ([`RecordFormat`]): JSON if it tells none. Options are the defaults; records
    /// with others are converted with [`From`].
    ///
    /// # Errors
    /// Returns an error if no file is found or a file cannot be read, and for Parquet and Arrow files without the Cargo
    /// feature `parquet`.
    pub fn open<P: AsRef<Path>>(paths: impl IntoIterator<Item = P>) -> Result<Self> {
        let extensions = [
            "jsonl", "ndjson", "json", "csv", "tsv", "tab", "parquet", "arrow", "feather", "ipc",
        ];
        let files = find_files(paths, &extensions)?;
        // `find_files` gives at least one.
        Ok(Self(match RecordFormat::of(&files[0]) {
            Some(RecordFormat::Csv) => Rows::Csv(CsvRecords::open(&files, &CsvOptions::default())?),
            #[cfg(feature = "parquet")]
            Some(RecordFormat::Table) => Rows::Table(TableRecords::open(&files)?),
            #[cfg(not(feature = "parquet"))]
            Some(RecordFormat::Table) => {
                let problem = "this program was built without Parquet and Arrow files; build it with \
                               `--features parquet`, or convert the file to JSON Lines";
                return Err(Error::invalid_file(&files[0], problem));
            }
            Some(RecordFormat::Json) | None => {
                Rows::Json(JsonRecords::open(&files, &JsonOptions::default())?)
            }
        }))
    }

    /// Returns the number of rows.
    pub fn len(&self) -> usize {
        match &self.0 {
            Rows::Json(records) => records.len(),
            Rows::Csv(records) => records.len(),
            #[cfg(feature = "parquet")]
            Rows::Table(records) => records.len(),
        }
    }

    /// Returns `true` if there are no rows.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Reads row `index`.
    ///
    /// # Errors
    /// Returns an error if there is no such row, or if it cannot be read or is not a JSON object.
    pub fn row(&self, index: usize) -> Result<FieldRow<'_>> {
        let fields = match &self.0 {
            Rows::Json(records) => Fields::Object(records.get(index)?),
            Rows::Csv(records) => Fields::Row(records.get(index)?),
            #[cfg(feature = "parquet")]
            Rows::Table(records) => Fields::Object(records.get(index)?),
        };
        Ok(FieldRow {
            records: self,
            index,
            fields,
        })
    }

    /// Returns the location of row `index`; in a Parquet or Arrow file, the offset is that of the block of the row.
    ///
    /// # Errors
    /// Returns an error if there is no such row, or the index of the file is damaged.
    pub fn location(&self, index: usize) -> Result<RecordLocation> {
        match &self.0 {
            Rows::Json(records) => records.records().location(index),
            Rows::Csv(records) => records.records().location(index),
            #[cfg(feature = "parquet")]
            Rows::Table(records) => records.location(index),
        }
    }

    /// Returns a digest of the files' contents and their order. The first call reads all files.
    ///
    /// # Errors
    /// Returns an error if a file cannot be read.
    pub fn fingerprint(&self) -> Result<Sha256Digest> {
        match &self.0 {
            Rows::Json(records) => records.records().fingerprint(),
            Rows::Csv(records) => records.records().fingerprint(),
            #[cfg(feature = "parquet")]
            Rows::Table(records) => records.fingerprint(),
        }
    }

    /// Announces that rows will be read soon ([`Dataset::prefetch`]).
    pub fn prefetch(&self, indices: &[usize]) {
        match &self.0 {
            Rows::Json(records) => records.prefetch(indices),
            Rows::Csv(records) => records.prefetch(indices),
            #[cfg(feature = "parquet")]
            Rows::Table(records) => records.prefetch(indices),
        }
    }

    /// Checks that no file has changed since it was opened ([`Dataset::check_unchanged`]).
    ///
    /// # Errors
    /// [`Error::FileChanged`], or another error if a file is not there any more.
    pub fn check_unchanged(&self) -> Result<()> {
        match &self.0 {
            Rows::Json(records) => records.check_unchanged(),
            Rows::Csv(records) => records.check_unchanged(),
            #[cfg(feature = "parquet")]
            Rows::Table(records) => records.check_unchanged(),
        }
    }

    /// Checks that the columns of the first file have the one that `option` names. The rows of JSON have no common
    /// columns: there, a row without the field is an error of that row.
    pub(crate) fn check_column(&self, option: &'static str, column: &str) -> Result<()> {
        let (names, path) = match &self.0 {
            Rows::Json(_) => return Ok(()),
            Rows::Csv(records) => {
                let path = records.records().paths().next().map(Path::to_owned);
                (records.columns().names().to_vec(), path.unwrap_or_default())
            }
            #[cfg(feature = "parquet")]
            Rows::Table(records) => {
                // The error of a damaged block is that of its rows.
                let Ok((batch, _)) = records.batch(0) else {
                    return Ok(());
                };
                let schema = batch.schema();
                let names = schema.fields().iter().map(|field| field.name().clone());
                (names.collect(), records.location(0)?.path)
            }
        };
        let expected = format!(
            "one of {}, the columns of {}",
            names.join(", "),
            path.display()
        );
        let is_known = names.iter().any(|name| name == column);
        Ok(check_option(is_known, option, column, expected)?)
    }
}

/// A row of [`FieldRecords`].
#[derive(Debug)]
pub struct FieldRow<'a> {
    records: &'a FieldRecords,
    index: usize,
    fields: Fields,
}

#[derive(Debug)]
enum Fields {
    Object(Map<String, Value>),
    Row(CsvRow),
}

impl FieldRow<'_> {
    /// Returns the names of the fields.
    pub fn names(&self) -> Vec<&str> {
        match &self.fields {
            Fields::Object(fields) => fields.keys().map(String::as_str).collect(),
            Fields::Row(row) => row.columns().names().iter().map(String::as_str).collect(),
        }
    }

    /// Returns the text of a field: a string as it is, a number or a boolean as JSON writes it; `None` if the row does
    /// not have the field, or null in it.
    ///
    /// # Errors
    /// Returns an error about the row if the field is a list or an object.
    pub fn text(&self, name: &str) -> Result<Option<Cow<'_, str>>> {
        let value = match &self.fields {
            Fields::Row(row) => return Ok(row.get(name).map(Cow::Borrowed)),
            Fields::Object(fields) => fields.get(name),
        };
        match value {
            None | Some(Value::Null) => Ok(None),
            Some(Value::String(text)) => Ok(Some(Cow::Borrowed(text))),
            Some(value @ (Value::Number(_) | Value::Bool(_))) => {
                Ok(Some(Cow::Owned(value.to_string())))
            }
            Some(Value::Array(_)) => Err(self.no_text(name, "a list")),
            Some(Value::Object(_)) => Err(self.no_text(name, "an object")),
        }
    }

    /// Returns the text of a field, as [`text`](Self::text) does.
    ///
    /// # Errors
    /// Returns an error about the row if it has no text in the field.
    pub fn required_text(&self, name: &str) -> Result<Cow<'_, str>> {
        let found = match &self.fields {
            Fields::Object(fields) if fields.contains_key(name) => "null",
            _ => "missing",
        };
        self.text(name)?.ok_or_else(|| self.no_text(name, found))
    }

    fn no_text(&self, name: &str, found: &str) -> Error {
        self.error(format!(
            "`{name}` is {found}; it must be a string, a number or a boolean"
        ))
    }

    /// Returns the number in a field; `None` if the row does not have the field, or nothing in it.
    ///
    /// # Errors
    /// Returns an error about the row if the field is no number.
    pub fn number(&self, name: &str) -> Result<Option<f64>> {
        let number = match &self.fields {
            Fields::Row(row) => match row.get(name).map(str::trim) {
                None | Some("") => return Ok(None),
                Some(field) => field.parse().ok(),
            },
            Fields::Object(fields) => match fields.get(name) {
                None | Some(Value::Null) => return Ok(None),
                Some(value) => value.as_f64(),
            },
        };
        match number {
            Some(number) => Ok(Some(number)),
            None => Err(self.error(format!("`{name}` is not a number"))),
        }
    }

    /// Returns an error about this row, with its location.
    pub fn error(&self, problem: impl Into<String>) -> Error {
        match self.records.location(self.index) {
            Ok(location) => Error::InvalidRecord {
                path: location.path,
                number: RecordNumber::Record(location.record),
                offset: location.offset,
                problem: problem.into(),
            },
            Err(error) => error,
        }
    }
}
