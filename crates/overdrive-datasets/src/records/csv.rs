//! Rows of CSV and TSV files.

use std::ops::Index;
use std::path::Path;
use std::str::FromStr;
use std::sync::Arc;

use super::record_files::{utf8, without_line_ends};
use super::{RecordFiles, find_files};
use crate::index::CsvScan;
use crate::{Dataset, Error, IndexOptions, Result};

/// How CSV files are read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CsvOptions {
    /// What stands between two fields: one ASCII character. `None` (the default): a tab where the
    /// first file's name ends in `.tsv` or `.tab`, else a comma.
    pub delimiter: Option<char>,
    /// What stands around fields that hold a delimiter, a line end or a quote: one ASCII character,
    /// `"` by default. `None`: nothing does, and a quote is a character like any other.
    pub quote: Option<char>,
    /// Whether the first row of each file names the columns; the names of all files must be the
    /// same. Default: true.
    pub has_header: bool,
    /// Accepts rows with more or fewer fields than there are columns. Default: false, and such a row
    /// is an error.
    pub flexible: bool,
    /// How the files are indexed.
    pub index: IndexOptions,
}

impl Default for CsvOptions {
    fn default() -> Self {
        Self {
            delimiter: None,
            quote: Some('"'),
            has_header: true,
            flexible: false,
            index: IndexOptions::default(),
        }
    }
}

impl CsvOptions {
    fn scan(&self, first_file: &Path) -> Result<CsvScan> {
        let is_tab = first_file.extension().is_some_and(|extension| {
            ["tsv", "tab"]
                .iter()
                .any(|tab| extension.eq_ignore_ascii_case(tab))
        });
        let delimiter = self.delimiter.unwrap_or(if is_tab { '\t' } else { ',' });
        let byte = |option, character: char| match u8::try_from(character) {
            Ok(byte) if byte.is_ascii() && !matches!(byte, b'\r' | b'\n') => Ok(byte),
            _ => Err(Error::InvalidOption {
                option,
                value: format!("{character:?}"),
                expected: "one ASCII character that ends no line",
            }),
        };
        let scan = CsvScan {
            delimiter: byte("delimiter", delimiter)?,
            quote: self.quote.map(|quote| byte("quote", quote)).transpose()?,
        };
        if scan.quote == Some(scan.delimiter) {
            return Err(Error::InvalidOption {
                option: "quote",
                value: format!("{delimiter:?}"),
                expected: "another character than the delimiter",
            });
        }
        Ok(scan)
    }
}

/// The names of the columns.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CsvColumns(Vec<String>);

impl CsvColumns {
    /// The names in the order of the fields.
    pub fn names(&self) -> &[String] {
        &self.0
    }

    /// The place of a column, counted from 0; of several with one name, the first.
    pub fn place(&self, name: &str) -> Option<usize> {
        self.0.iter().position(|column| column == name)
    }
}

/// Rows of CSV files by RFC 4180: fields may be quoted, and quoted fields may hold delimiters, line
/// ends and doubled quotes.
///
/// Rows end with `\n` or `\r\n`; empty lines are no rows; a byte order mark is left out. A quote in
/// the middle of a plain field is a character like any other.
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
    /// When no file is found, or one cannot be read; when the columns of two files differ; when an
    /// option is outside its range.
    pub fn open<P: AsRef<Path>>(
        paths: impl IntoIterator<Item = P>,
        options: &CsvOptions,
    ) -> Result<Self> {
        let files = find_files(paths, &["csv", "tsv", "tab"])?;
        // `find_files` gives at least one.
        let scan = options.scan(&files[0])?;
        let skip = usize::from(options.has_header);
        let records = RecordFiles::open(&files, &scan, &options.index, skip)?;
        let columns = columns(&files, &records, &scan, options.has_header)?;
        Ok(Self {
            records,
            scan,
            columns: Arc::new(CsvColumns(columns)),
            has_header: options.has_header,
            flexible: options.flexible,
        })
    }

    /// The names of the columns. Without a header they are `0`, `1`, … for the fields of the first
    /// row.
    pub fn columns(&self) -> &CsvColumns {
        &self.columns
    }

    /// The rows as bytes, and where they are.
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
                let whence = if self.has_header { "the header" } else { "the first row" };
                return Err(format!(
                    "{} field(s), and {whence} has {columns}; set CsvOptions::flexible to accept it",
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
}

/// A row. Its fields are text; [`CsvRow::parse`] makes numbers of them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CsvRow {
    text: String,
    /// Where each field ends in `text`.
    ends: Vec<usize>,
    columns: Arc<CsvColumns>,
}

impl CsvRow {
    /// The number of fields.
    pub fn len(&self) -> usize {
        self.ends.len()
    }

    /// Whether it has no field. No row has none; an empty one has one empty field.
    pub fn is_empty(&self) -> bool {
        self.ends.is_empty()
    }

    /// The columns of its file.
    pub fn columns(&self) -> &CsvColumns {
        &self.columns
    }

    /// The field at a place, counted from 0.
    pub fn field(&self, place: usize) -> Option<&str> {
        let end = *self.ends.get(place)?;
        let start = match place {
            0 => 0,
            _ => self.ends[place - 1],
        };
        self.text.get(start..end)
    }

    /// The field of a column.
    pub fn get(&self, column: &str) -> Option<&str> {
        self.field(self.columns.place(column)?)
    }

    /// The fields in their order.
    pub fn fields(&self) -> impl Iterator<Item = &str> {
        (0..self.len()).filter_map(|place| self.field(place))
    }

    /// The field of a column as a number, or whatever else can be read from text. White space around
    /// it is ignored.
    ///
    /// # Errors
    /// When there is no such column, or its field is something else.
    pub fn parse<T: FromStr>(&self, column: &str) -> Result<T> {
        let invalid = |value: String, expected| Error::InvalidOption {
            option: "column",
            value,
            expected,
        };
        let field = self
            .get(column)
            .ok_or_else(|| invalid(column.to_owned(), "the name of a column of the file"))?;
        let value = field.trim().parse();
        value.map_err(|_| {
            let value = format!("{column} ({field:?} as {})", std::any::type_name::<T>());
            invalid(value, "a field that can be read as this type")
        })
    }
}

impl Index<usize> for CsvRow {
    type Output = str;

    /// The field at a place. As with a slice, a place that does not exist panics; use
    /// [`CsvRow::field`] where it may not.
    fn index(&self, place: usize) -> &str {
        match self.field(place) {
            Some(field) => field,
            None => panic!("field {place} of a row of {}", self.len()),
        }
    }
}

/// The names of the columns, checked to be the same in all files.
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
        let (text, ends) = split(&bytes, scan).map_err(|problem| Error::UnreadableRecord {
            path: files[number].clone(),
            record: 0,
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
        // All files are held to the first row of the first one that has any.
        let mut rows = (0..files.len()).map(fields);
        let first = rows.find_map(|row| row.transpose()).transpose()?;
        let count = first.map_or(0, |row| row.len());
        return Ok((0..count).map(|place| place.to_string()).collect());
    }
    let mut columns: Option<Vec<String>> = None;
    for (number, path) in files.iter().enumerate() {
        // A file without a byte has no header, and no rows that would need one.
        let Some(names) = fields(number)? else {
            continue;
        };
        match &columns {
            None => columns = Some(names),
            Some(first) if *first == names => {}
            Some(first) => {
                return Err(Error::UnreadableRecord {
                    path: path.clone(),
                    record: 0,
                    offset: 0,
                    problem: format!(
                        "its columns are {names:?}, and those of the files before it {first:?}; \
                         open them apart, or set CsvOptions::has_header to false"
                    ),
                });
            }
        }
    }
    Ok(columns.unwrap_or_default())
}

/// The fields of a row one behind the other, and where each ends.
fn split(bytes: &[u8], scan: &CsvScan) -> std::result::Result<(String, Vec<usize>), String> {
    let row = utf8(without_line_ends(bytes))?;
    let mut text = String::with_capacity(row.len());
    let mut ends = Vec::new();
    let delimiter = char::from(scan.delimiter);
    let mut rest = row;
    loop {
        let quote = scan.quote.map(char::from);
        if let Some(quoted) = quote.and_then(|quote| rest.strip_prefix(quote)) {
            // `quote` is one, since the prefix is.
            rest = unquote(quoted, quote.unwrap_or('"'), &mut text)?;
        }
        // A plain field, or what stands between a closing quote and the delimiter.
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

/// Adds a quoted field to `text`; gives what comes behind its closing quote.
fn unquote<'a>(
    mut rest: &'a str,
    quote: char,
    text: &mut String,
) -> std::result::Result<&'a str, String> {
    loop {
        let (part, behind) = rest.split_once(quote).ok_or_else(|| {
            format!("a quoted field does not end: a {quote} is missing, here or in a row before")
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
