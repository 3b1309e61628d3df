//! Datasets of the lines, paragraphs or documents of text files.

use std::path::Path;

use super::record_files::{first_line, utf8};
use super::{RecordFiles, find_files};
use crate::index::{DocumentScan, LineScan, ParagraphScan, Scan};
use crate::{Dataset, IndexOptions, Result};

/// The unit of text that is a record: `sample_by` of `datasets`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SampleBy {
    /// Each line is a record. The default.
    #[default]
    Line,
    /// Each paragraph is a record: lines up to the next one of only white space, which is left out.
    Paragraph,
    /// Each file is a record.
    Document,
}

/// The options of [`TextLines`].
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct TextOptions {
    /// The unit of text that is a record. Default: a line.
    pub sample_by: SampleBy,
    /// If `true`, lines of only white space are skipped. Default: `false`, as in `datasets`.
    pub skip_blank: bool,
    /// The options of the files' indexes.
    pub index: IndexOptions,
}

/// The lines of text files, each a `String` without its line end (`\n` or `\r\n`), or their paragraphs, or whole
/// files ([`TextOptions::sample_by`]).
///
/// A byte order mark at the start of a file is skipped. A carriage return without a line feed is an ordinary
/// character.
///
/// ```
/// use overdrive_datasets::{Dataset, TextLines, TextOptions};
/// # let dir = tempfile::tempdir().unwrap();
/// # let path = dir.path().join("poem.txt");
/// std::fs::write(&path, "So much depends\r\nupon\n\na red wheel").unwrap();
/// let lines = TextLines::open([&path], &TextOptions::default())?;
/// assert_eq!(lines.len(), 4);
/// assert_eq!(lines.get(3)?, "a red wheel");
/// assert!(lines.get(4).is_err());
/// # Ok::<(), overdrive_datasets::Error>(())
/// ```
#[derive(Debug)]
pub struct TextLines {
    records: RecordFiles,
    sample_by: SampleBy,
}

impl TextLines {
    /// Opens files, folders (of `.txt`, `.text` and `.md` files) and patterns (see [`find_files`]).
    ///
    /// # Errors
    /// Returns an error if no file is found, or if a file cannot be read.
    pub fn open<P: AsRef<Path>>(
        paths: impl IntoIterator<Item = P>,
        options: &TextOptions,
    ) -> Result<Self> {
        let files = find_files(paths, &["txt", "text", "md"])?;
        let skip_blank = options.skip_blank;
        let scan = |_: &Path| -> Result<Box<dyn Scan>> {
            Ok(match options.sample_by {
                SampleBy::Line => Box::new(LineScan { skip_blank }),
                SampleBy::Paragraph => Box::new(ParagraphScan),
                SampleBy::Document => Box::new(DocumentScan),
            })
        };
        Ok(Self {
            records: RecordFiles::open(&files, scan, &options.index, 0)?,
            sample_by: options.sample_by,
        })
    }

    /// Returns the records as bytes, with their locations.
    pub fn records(&self) -> &RecordFiles {
        &self.records
    }
}

impl Dataset for TextLines {
    type Item = String;

    fn len(&self) -> usize {
        self.records.len()
    }

    fn get(&self, index: usize) -> Result<String> {
        self.records.read(index, |bytes| {
            let text = match self.sample_by {
                SampleBy::Line => first_line(bytes),
                SampleBy::Paragraph => bytes.trim_ascii_end(),
                SampleBy::Document => bytes,
            };
            utf8(text).map(str::to_owned)
        })
    }

    fn prefetch(&self, indices: &[usize]) {
        self.records.prefetch(indices);
    }

    fn check_unchanged(&self) -> Result<()> {
        self.records.check_unchanged()
    }
}
