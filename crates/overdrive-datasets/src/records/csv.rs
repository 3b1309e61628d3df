//! Datasets of the rows of CSV and TSV files.

use std::ops::Index;
use std::path::Path;
use std::str::FromStr;
use std::sync::Arc;

use super::record_files::utf8;
use super::{RecordFiles, find_files, has_extension};
use crate::index::CsvScan;
use crate::{Dataset, Error, IndexOptions, RecordNumber, Result};
use overdrive_core::{Error as CommonError, check_at_least, check_option};

/// The options of [`CsvRecords`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CsvOptions {
    /// The delimiter between two fields, an ASCII character. `None` (the default) is a tab if the first file's
    /// name ends in `.tsv` or `.tab`, compressed (`.tsv.gz`) or not, and a comma otherwise.
    pub delimiter: Option<char>,
    /// The quote around fields that contain a delimiter, a line end or a quote, an ASCII character. `None` makes
    /// quotes ordinary characters. Default: `"`.
    pub quote: Option<char>,
    /// If `true`, the first row of each file has the names of the columns, which must be the same in all files.
    /// Default: `true`.
    pub has_header: bool,
    /// If `true`, rows may have more or fewer fields than there are columns; otherwise such a row is an error.
    /// Default: `false`.
    pub flexible: bool,
    /// The maximum size of a row in bytes, at least 1. An unclosed quote turns the rest of a file into one row;
    /// beyond this limit, opening the file fails with the line of the quote. Default: 64 MiB.
    pub max_row_bytes: u64,
    /// The options of the files' indexes.
    pub index: IndexOptions,
}

impl Default for CsvOptions {
    fn default() -> Self {
        Self {
            delimiter: None,
            quote: Some('"'),
            has_header: true,
            flexible: false,
            max_row_bytes: 64 << 20,
            index: IndexOptions::default(),
        }
    }
}

impl CsvOptions {
    fn scan(&self, first_file: &Path) -> Result<CsvScan> {
        let is_tab = has_extension(first_file, &["tsv", "tab"]);
        let delimiter = self.delimiter.unwrap_or(if is_tab { '\t' } else { ',' });
        let byte = |option, character: char| match u8::try_from(character) {
            Ok(byte) if byte.is_ascii() && !matches!(byte, b'\r' | b'\n') => Ok(byte),
            _ => Err(CommonError::option(
                option,
                format!("{character:?}"),
                "one ASCII character that is not a line end",
            )),
        };
        let scan = CsvScan {
            delimiter: byte("delimiter", delimiter)?,
            quote: self.quote.map(|quote| byte("quote", quote)).transpose()?,
            max_row_bytes: self.max_row_bytes,
        };
        check_at_least("max_row_bytes", self.max_row_bytes, 1)?;
        check_option(
            scan.quote != Some(scan.delimiter),
            "quote",
            format!("{delimiter:?}"),
            "another character than the delimiter",
        )?;
        Ok(scan)
    }
}

/// The names of the columns.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CsvColumns(Vec<String>);

impl CsvColumns {
    /// Returns the names, in the order of the fields.
    pub fn names(&self) -> &[String] {
        &self.0
    }

    /// Returns the index of a column, counted from 0; the first of several with the same name.
    pub fn position(&self, name: &str) -> Option<usize> {
        self.0.iter().position(|column| column == name)
    }
}

/// The rows of CSV files (RFC 4180): fields may be quoted, and quoted fields may contain delimiters, line ends and
/// doubled quotes.
///
/// Rows end with `\n`, `\r\n` or `\r`, which a file may mix; empty lines are skipped, as is a byte order mark. A
/// quote in the middle of an unquoted field is an ordinary character.
///
/// ```
/// use overdrive_datasets::{CsvOptions, CsvRecords, Dataset};
/// # let dir = tempfile::tempdir().unwrap();
/// # let path = dir.path().join("clips.csv");
/// std::fs::write(&path, "file,text,seconds\na.wav,\"Hello,\n\"\"world\"\"\",2.5\n").unwrap();
/// let rows = CsvRecords::open([&path], &CsvOptions::default())?;
/// let row = rows.get(0)?;
/// assert_eq!(row.get("text"), Some("Hello,\n\"world\""));
/// assert_eq!(&row[0], "a.wav");
/// assert_eq!(row.parse::<f64>("seconds")?, 2.5);
/// # Ok::<(), overdrive_datasets::Error>(())
/// ```
#[derive(Debug)]
pub struct CsvRecords {
    records: RecordFiles,
    scan: CsvScan,
    columns: Arc<CsvColumns>,
    has_header: bool,
    flexible: bool,
}

impl CsvRecords {
    /// Opens files, folders (of `.csv`, `.tsv` and `.tab` files) and patterns (see [`find_files`]).
    ///
    /// # Errors
    /// Returns an error if no file is found, a file cannot be read, the columns of two files differ, a row is longer
    /// than `max_row_bytes`, or an option is outside its range.
    pub fn open<P: AsRef<Path>>(
        paths: impl IntoIterator<Item = P>,
        options: &CsvOptions,
    ) -> Result<Self> {
        let files = find_files(paths, &["csv", "tsv", "tab"])?;
        // `find_files` gives at least one.
        let scan = options.scan(&files[0])?;
        let skip = usize::from(options.has_header);
        let records = RecordFiles::open(&files, |_| Ok(Box::new(scan)), &options.index, skip)?;
        let columns = columns(&files, &records, &scan, options.has_header)?;
        Ok(Self {
            records,
            scan,
            columns: Arc::new(CsvColumns(columns)),
            has_header: options.has_header,
            flexible: options.flexible,
        })
    }

    /// Returns the names of the columns. Without a header they are `0`, `1`, … for the fields of the first row.
    pub fn columns(&self) -> &CsvColumns {
        &self.columns
    }

    /// Returns the rows as bytes, with their locations.
    pub fn records(&self) -> &RecordFiles {
        &self.records
    }
}

impl Dataset for CsvRecords {
    type Item = CsvRow;

    fn len(&self) -> usize {
        self.records.len()
    }

    fn get(&self, index: usize) -> Result<CsvRow> {
        self.records.read(index, |bytes| {
            let (text, ends) = split(bytes, &self.scan)?;
            let columns = self.columns.0.len();
            if ends.len() != columns && !self.flexible {
                let reference = if self.has_header { "the header" } else { "the first row" };
                return Err(format!(
                    "{} field(s), but {reference} has {columns}; set CsvOptions::flexible to accept it",
                    ends.len()
                ));
            }
            Ok(CsvRow {
                text,
                ends,
                columns: Arc::clone(&self.columns),
            })
        })
    }

    fn prefetch(&self, indices: &[usize]) {
        self.records.prefetch(indices);
    }

    fn check_unchanged(&self) -> Result<()> {
        self.records.check_unchanged()
    }
}

/// A row of text fields; [`CsvRow::parse`] converts them to numbers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CsvRow {
    text: String,
    /// The end of each field in `text`.
    ends: Vec<usize>,
    columns: Arc<CsvColumns>,
}

impl CsvRow {
    /// Returns the number of fields.
    pub fn len(&self) -> usize {
        self.ends.len()
    }

    /// Returns `true` if the row has no field, which never happens: an empty row has one empty field.
    pub fn is_empty(&self) -> bool {
        self.ends.is_empty()
    }

    /// Returns the columns of the row's file.
    pub fn columns(&self) -> &CsvColumns {
        &self.columns
    }

    /// Returns the field at an index, counted from 0.
    pub fn field(&self, index: usize) -> Option<&str> {
        let end = *self.ends.get(index)?;
        let start = match index {
            0 => 0,
            _ => self.ends[index - 1],
        };
        self.text.get(start..end)
    }

    /// Returns the field of a column.
    pub fn get(&self, column: &str) -> Option<&str> {
        self.field(self.columns.position(column)?)
    }

    /// Returns the fields in their order.
    pub fn fields(&self) -> impl Iterator<Item = &str> {
        (0..self.len()).filter_map(|index| self.field(index))
    }

    /// Parses the field of a column as a number or any other type that can be parsed. White space around it is
    /// ignored.
    ///
    /// # Errors
    /// Returns an error if the file has no such column, and an error about the record if the row ends before it or
    /// its field cannot be parsed.
    pub fn parse<T: FromStr>(&self, column: &str) -> Result<T> {
        let Some(position) = self.columns.position(column) else {
            let expected = format!("a column of the file: {}", self.columns.names().join(", "));
            return Err(CommonError::option("column", format!("`{column}`"), expected).into());
        };
        let Some(field) = self.field(position) else {
            let fields = self.len();
            let problem = format!("the row has {fields} field(s), so none in column `{column}`");
            return Err(Error::other(problem));
        };
        field.trim().parse().map_err(|_| {
            let wanted = std::any::type_name::<T>();
            Error::other(format!(
                "the field {field:?} of column `{column}` is not a valid {wanted}"
            ))
        })
    }
}

impl Index<usize> for CsvRow {
    type Output = str;

    /// Returns the field at an index. Like a slice, it panics for an index that does not exist; see
    /// [`CsvRow::field`].
    fn index(&self, index: usize) -> &str {
        match self.field(index) {
            Some(field) => field,
            None => panic!("field {index} of a row of {}", self.len()),
        }
    }
}

/// Returns the names of the columns, after checking that they are the same in all files.
fn columns(
    files: &[std::path::PathBuf],
    records: &RecordFiles,
    scan: &CsvScan,
    has_header: bool,
) -> Result<Vec<String>> {
    let fields = |number: usize| -> Result<Option<Vec<String>>> {
        let Some(bytes) = records.skipped(number)? else {
            return Ok(None);
        };
        let (text, ends) = split(&bytes, scan).map_err(|problem| Error::InvalidRecord {
            path: files[number].clone(),
            number: RecordNumber::Record(0),
            offset: 0,
            problem: format!("in the first row: {problem}"),
        })?;
        let mut start = 0;
        let names = ends.iter().map(|&end| {
            let name = text[start..end].to_owned();
            start = end;
            name
        });
        Ok(Some(names.collect()))
    };
    if !has_header {
        // The number of columns is that of the first row of the first file that is not empty.
        let mut rows = (0..files.len()).map(fields);
        let first = rows.find_map(|row| row.transpose()).transpose()?;
        let count = first.map_or(0, |row| row.len());
        return Ok((0..count).map(|index| index.to_string()).collect());
    }
    let mut columns: Option<Vec<String>> = None;
    for (number, path) in files.iter().enumerate() {
        // An empty file has no header, and no rows that would need one.
        let Some(names) = fields(number)? else {
            continue;
        };
        match &columns {
            None => columns = Some(names),
            Some(first) if *first == names => {}
            Some(first) => {
                return Err(Error::InvalidRecord {
                    path: path.clone(),
                    number: RecordNumber::Record(0),
                    offset: 0,
                    problem: format!(
                        "its columns are {names:?}, but the files before it have {first:?}; \
                    open them separately, or set CsvOptions::has_header to false"
                    ),
                });
            }
        }
    }
    Ok(columns.unwrap_or_default())
}

/// Returns the concatenated fields of a row, and the end of each.
fn split(bytes: &[u8], scan: &CsvScan) -> std::result::Result<(String, Vec<usize>), String> {
    // The line end of the row and the empty lines after it: outside of quotes these bytes are nothing else.
    let row = utf8(bytes)?.trim_end_matches(['\n', '\r']);
    // The fields share one allocation, since a row often has many short ones.
    let mut text = String::with_capacity(row.len());
    let mut ends = Vec::new();
    let delimiter = char::from(scan.delimiter);
    let mut rest = row;
    loop {
        let quote = scan.quote.map(char::from);
        if let Some(quoted) = quote.and_then(|quote| rest.strip_prefix(quote)) {
            // The prefix matched, so `quote` is not `None`.
            rest = unquote(quoted, quote.unwrap_or('"'), &mut text)?;
        }
        // An unquoted field, or the text between a closing quote and the delimiter.
        match rest.split_once(delimiter) {
            Some((field, behind)) => {
                text.push_str(field);
                ends.push(text.len());
                rest = behind;
            }
            None => {
                text.push_str(rest);
                ends.push(text.len());
                return Ok((text, ends));
            }
        }
    }
}

/// Appends a quoted field to `text`; returns the rest after its closing quote.
fn unquote<'a>(
    mut rest: &'a str,
    quote: char,
    text: &mut String,
) -> std::result::Result<&'a str, String> {
    loop {
        let (part, behind) = rest.split_once(quote).ok_or_else(|| {
            format!(
                "a quoted field does not end: a {quote} is missing in this row or an earlier one"
            )
        })?;
        text.push_str(part);
        match behind.strip_prefix(quote) {
            Some(more) => {
                text.push(quote);
                rest = more;
            }
            None => return Ok(behind),
        }
    }
}
