//! The text column of records: lines, JSON, CSV, Parquet.

use std::path::{Path, PathBuf};

use overdrive_datasets::{
    CsvOptions, CsvRecords, CsvRow, Dataset, JsonOptions, JsonRecords, RecordFiles, RecordFormat,
    RecordLocation, RecordNumber, Sha256Digest, TextLines, TextOptions, registered_source,
};
use serde_json::{Map, Value};

use crate::arguments::{describe, nearest};
use crate::error::listed;
use crate::{Error, Result};

/// The form of the records of files.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum RecordKind {
    Lines,
    Format(RecordFormat),
}

impl RecordKind {
    /// Returns the form by the extension; `None` for plain text.
    pub(crate) fn of(path: &Path) -> Option<Self> {
        RecordFormat::of(path).map(Self::Format)
    }

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Lines => "lines of text",
            Self::Format(RecordFormat::Json) => "JSON",
            Self::Format(RecordFormat::Csv) => "CSV",
            Self::Format(RecordFormat::Table) => "Parquet or Arrow",
        }
    }
}

/// The text column of the records of files of one format.
#[derive(Debug)]
pub(crate) struct TextRecords {
    source: Source,
    files: Vec<PathBuf>,
    column: String,
}

#[derive(Debug)]
enum Source {
    Lines(TextLines),
    Json(JsonRecords<Value>),
    Csv(CsvRecords),
    #[cfg(feature = "parquet")]
    Table(overdrive_datasets::TableRecords<Value>),
}

/// A record that has been read.
enum Record {
    Line(String),
    Object(Map<String, Value>),
    Row(CsvRow),
}

impl TextRecords {
    /// Opens the files and checks that the first record has the column.
    pub(crate) fn open(files: Vec<PathBuf>, kind: RecordKind, column: &str) -> Result<Self> {
        let source = match kind {
            RecordKind::Lines => {
                let options = TextOptions {
                    skip_blank: true,
                    ..TextOptions::default()
                };
                Source::Lines(TextLines::open(&files, &options)?)
            }
            RecordKind::Format(RecordFormat::Json) => {
                Source::Json(JsonRecords::open(&files, &JsonOptions::default())?)
            }
            RecordKind::Format(RecordFormat::Csv) => {
                Source::Csv(CsvRecords::open(&files, &CsvOptions::default())?)
            }
            RecordKind::Format(RecordFormat::Table) => open_table(&files)?,
        };
        let records = Self {
            source,
            files,
            column: column.to_owned(),
        };
        if records.len() > 0 && !matches!(records.source, Source::Lines(_)) {
            records.expect_column(column, "dataset_text_field", "--text-column")?;
        }
        Ok(records)
    }

    /// Returns the number of files.
    pub(crate) fn files(&self) -> usize {
        self.files.len()
    }

    /// Returns a digest of the content of the files.
    pub(crate) fn fingerprint(&self) -> Result<Sha256Digest> {
        Ok(match &self.source {
            #[cfg(feature = "parquet")]
            Source::Table(rows) => rows.fingerprint()?,
            _ => match self.bytes() {
                Some(files) => files.fingerprint()?,
                None => Sha256Digest::of(b""),
            },
        })
    }

    /// Returns the total size of the files in bytes.
    pub(crate) fn total_bytes(&self) -> u64 {
        let size = |file: &PathBuf| match registered_source(file) {
            Some(source) => Some(source.len()),
            None => Some(file.metadata().ok()?.len()),
        };
        self.files.iter().filter_map(size).sum()
    }

    /// Returns the names of the fields of the first record.
    fn columns(&self) -> Result<Vec<String>> {
        Ok(match self.record(0)? {
            Record::Line(_) => Vec::new(),
            Record::Object(fields) => fields.into_iter().map(|(name, _)| name).collect(),
            Record::Row(row) => row.columns().names().to_vec(),
        })
    }

    /// Returns `true` if the first record has a column.
    pub(crate) fn has_column(&self, column: &str) -> Result<bool> {
        Ok(self.len() > 0 && self.columns()?.iter().any(|name| name == column))
    }

    /// Checks that the first record has a column.
    ///
    /// # Errors
    /// [`Error::NoColumn`], with the nearest one.
    pub(crate) fn expect_column(
        &self,
        column: &str,
        key: &'static str,
        flag: &'static str,
    ) -> Result<()> {
        let columns = self.columns()?;
        if columns.iter().any(|name| name == column) {
            return Ok(());
        }
        Err(Error::NoColumn {
            path: self.files.first().cloned().unwrap_or_default(),
            column: column.to_owned(),
            hint: hint(column, &columns),
            key,
            flag,
        })
    }

    fn bytes(&self) -> Option<&RecordFiles> {
        match &self.source {
            Source::Lines(lines) => Some(lines.records()),
            Source::Json(records) => Some(records.records()),
            Source::Csv(rows) => Some(rows.records()),
            #[cfg(feature = "parquet")]
            Source::Table(_) => None,
        }
    }

    fn record(&self, index: usize) -> overdrive_datasets::Result<Record> {
        let object = |value: Value| match value {
            Value::Object(fields) => Ok(Record::Object(fields)),
            other => {
                let given = describe(&other);
                Err(self.broken(
                    index,
                    format!("it is {given}, expected an object with fields"),
                ))
            }
        };
        match &self.source {
            Source::Lines(lines) => lines.get(index).map(Record::Line),
            Source::Json(records) => object(records.get(index)?),
            Source::Csv(rows) => rows.get(index).map(Record::Row),
            #[cfg(feature = "parquet")]
            Source::Table(rows) => object(rows.get(index)?),
        }
    }

    /// Returns an error about a record, with its position in the file.
    fn broken(&self, index: usize, problem: String) -> overdrive_datasets::Error {
        let place = self.bytes().and_then(|files| files.location(index).ok());
        let place = place.unwrap_or_else(|| RecordLocation {
            path: self.files.first().cloned().unwrap_or_default(),
            record: index,
            offset: 0,
        });
        overdrive_datasets::Error::InvalidRecord {
            path: place.path,
            number: RecordNumber::Record(place.record),
            offset: place.offset,
            problem,
        }
    }

    /// Returns the numbers of a column, for the records that have text.
    pub(crate) fn numbers(&self, column: &str) -> overdrive_datasets::Result<Vec<u32>> {
        let mut numbers = Vec::with_capacity(self.len());
        for index in 0..self.len() {
            let mut record = self.record(index)?;
            let number = record.number(column);
            let number = number.map_err(|problem| self.broken(index, problem))?;
            // Records without text are no documents, so they have no length either.
            let text = record.take_text(&self.column);
            if !text
                .map_err(|problem| self.broken(index, problem))?
                .is_empty()
            {
                numbers.push(number);
            }
        }
        Ok(numbers)
    }
}

impl Dataset for TextRecords {
    type Item = String;

    fn len(&self) -> usize {
        match &self.source {
            Source::Lines(lines) => lines.len(),
            Source::Json(records) => records.len(),
            Source::Csv(rows) => rows.len(),
            #[cfg(feature = "parquet")]
            Source::Table(rows) => rows.len(),
        }
    }

    fn get(&self, index: usize) -> overdrive_datasets::Result<String> {
        let text = self.record(index)?.take_text(&self.column);
        text.map_err(|problem| self.broken(index, problem))
    }

    fn prefetch(&self, indices: &[usize]) {
        if let Some(files) = self.bytes() {
            files.prefetch(indices);
        }
    }

    fn check_unchanged(&self) -> overdrive_datasets::Result<()> {
        match &self.source {
            #[cfg(feature = "parquet")]
            Source::Table(rows) => rows.check_unchanged(),
            _ => self.bytes().map_or(Ok(()), RecordFiles::check_unchanged),
        }
    }
}

impl Record {
    /// Takes the text out of the record; empty if the field is null.
    fn take_text(&mut self, column: &str) -> std::result::Result<String, String> {
        match self {
            Self::Line(line) => Ok(std::mem::take(line)),
            Self::Row(row) => match row.get(column) {
                Some(text) => Ok(text.to_owned()),
                None => Err(missing(column, row.columns().names())),
            },
            Self::Object(fields) => match fields.get_mut(column) {
                Some(Value::String(text)) => Ok(std::mem::take(text)),
                Some(Value::Null) => Ok(String::new()),
                Some(other) => Err(format!(
                    "`{column}` is {}, expected a string",
                    describe(other)
                )),
                None => {
                    let names: Vec<String> = fields.keys().cloned().collect();
                    Err(missing(column, &names))
                }
            },
        }
    }

    fn number(&self, column: &str) -> std::result::Result<u32, String> {
        let (given, number) = match self {
            Self::Line(_) => return Err(missing(column, &[])),
            Self::Row(row) => {
                let given = row.get(column).unwrap_or_default();
                (format!("{given:?}"), given.trim().parse().ok())
            }
            Self::Object(fields) => {
                let value = fields.get(column).unwrap_or(&Value::Null);
                let number = value.as_u64().and_then(|number| u32::try_from(number).ok());
                (describe(value), number)
            }
        };
        number.ok_or_else(|| format!("`{column}` is {given}, expected a non-negative integer"))
    }
}

fn missing(column: &str, columns: &[String]) -> String {
    format!("it has no `{column}`{}", hint(column, columns))
}

/// Returns a hint with the nearest name, or with all names.
fn hint(column: &str, columns: &[String]) -> String {
    match nearest(column, columns.iter().map(String::as_str)) {
        Some(name) => format!("; did you mean `{name}`?"),
        None if columns.is_empty() => "; it has no fields".to_owned(),
        None => format!("; it has {}", listed(columns)),
    }
}

#[cfg(feature = "parquet")]
fn open_table(files: &[PathBuf]) -> Result<Source> {
    Ok(Source::Table(overdrive_datasets::TableRecords::open(
        files,
    )?))
}

#[cfg(not(feature = "parquet"))]
fn open_table(files: &[PathBuf]) -> Result<Source> {
    Err(Error::NotBuilt {
        path: files.first().cloned().unwrap_or_default(),
        format: "Parquet and Arrow files",
        feature: "parquet",
    })
}
