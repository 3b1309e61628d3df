//! The text column of records: lines, JSON, CSV, Parquet.

use std::borrow::Cow;
use std::path::{Path, PathBuf};

use overdrive_datasets::{
    Dataset, FieldRecords, FieldRow, RecordFormat, Sha256Digest, TextLines, TextOptions,
    registered_source,
};

use crate::arguments::nearest;
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
    Rows(FieldRecords),
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
            RecordKind::Format(_) => Source::Rows(FieldRecords::open(&files)?),
        };
        let records = Self {
            source,
            files,
            column: column.to_owned(),
        };
        if matches!(&records.source, Source::Rows(rows) if !rows.is_empty()) {
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
            Source::Lines(lines) => lines.records().fingerprint()?,
            Source::Rows(rows) => rows.fingerprint()?,
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
        Ok(match &self.source {
            Source::Lines(_) => Vec::new(),
            Source::Rows(rows) => rows
                .row(0)?
                .names()
                .into_iter()
                .map(str::to_owned)
                .collect(),
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

    /// Returns the numbers of a column, for the records that have text.
    pub(crate) fn numbers(&self, column: &str) -> overdrive_datasets::Result<Vec<u32>> {
        let mut numbers = Vec::with_capacity(self.len());
        let Source::Rows(rows) = &self.source else {
            return Ok(numbers);
        };
        for index in 0..rows.len() {
            let row = rows.row(index)?;
            let number = row.number(column)?;
            let number = number
                .filter(|number| number.fract() == 0.0 && (0.0..=u32::MAX.into()).contains(number));
            let number = number
                .ok_or_else(|| row.error(format!("`{column}` is not a non-negative integer")))?;
            // Records without text are no documents, so they have no length either.
            if !text_of(&row, &self.column)?.is_empty() {
                numbers.push(number as u32);
            }
        }
        Ok(numbers)
    }
}

/// Returns the text of a row; empty if the field is null.
fn text_of<'a>(row: &'a FieldRow<'_>, column: &str) -> overdrive_datasets::Result<Cow<'a, str>> {
    match row.text(column)? {
        None if row.names().contains(&column) => Ok(Cow::Borrowed("")),
        Some(text) => Ok(text),
        None => {
            let names: Vec<String> = row.names().into_iter().map(str::to_owned).collect();
            Err(row.error(format!("it has no `{column}`{}", hint(column, &names))))
        }
    }
}

impl Dataset for TextRecords {
    type Item = String;

    fn len(&self) -> usize {
        match &self.source {
            Source::Lines(lines) => lines.len(),
            Source::Rows(rows) => rows.len(),
        }
    }

    fn get(&self, index: usize) -> overdrive_datasets::Result<String> {
        match &self.source {
            Source::Lines(lines) => lines.get(index),
            Source::Rows(rows) => Ok(text_of(&rows.row(index)?, &self.column)?.into_owned()),
        }
    }

    fn prefetch(&self, indices: &[usize]) {
        match &self.source {
            Source::Lines(lines) => lines.prefetch(indices),
            Source::Rows(rows) => rows.prefetch(indices),
        }
    }

    fn check_unchanged(&self) -> overdrive_datasets::Result<()> {
        match &self.source {
            Source::Lines(lines) => lines.check_unchanged(),
            Source::Rows(rows) => rows.check_unchanged(),
        }
    }
}

/// Returns a hint with the nearest name, or with all names.
fn hint(column: &str, columns: &[String]) -> String {
    match nearest(column, columns.iter().map(String::as_str)) {
        Some(name) => format!("; did you mean `{name}`?"),
        None if columns.is_empty() => "; it has no fields".to_owned(),
        None => format!("; it has {}", listed(columns)),
    }
}
