//! Datasets of the rows of Parquet and Arrow files.

mod arrow_file;
mod column_json;
mod parquet_file;

use std::marker::PhantomData;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

use arrow_array::RecordBatch;
use overdrive_core::files::FileMap;
use serde::de::DeserializeOwned;

use self::arrow_file::ArrowFile;
use self::column_json::row_as_json;
use self::parquet_file::ParquetFile;
use super::{RecordLocation, find_files};
use crate::digest::FieldHasher;
use crate::file_state::FileState;
use crate::index::read_source;
use crate::range_source::{digest_of_source, registered_source};
use crate::sampling::RecentValues;
use crate::{Dataset, Error, RecordNumber, Result, Sha256Digest};

/// The number of decoded blocks that are cached, over all files.
const CACHED_BLOCKS: usize = 8;

/// A block of rows that are decoded together.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Block {
    rows: usize,
    /// The offset of the encoded rows in the file, in bytes.
    offset: u64,
    /// The index of the row group (Parquet) or record batch (Arrow).
    group: usize,
    /// The index of the first row in the group.
    first: usize,
}

/// A file whose rows are decoded in blocks.
trait TableFile: Send + Sync + std::fmt::Debug {
    fn blocks(&self) -> &[Block];

    /// Decodes a block.
    ///
    /// # Errors
    /// [`Error::Other`] with the problem if the bytes of the block are damaged, which is an error about its rows, and other
    /// errors if they cannot be read.
    fn read(&self, block: &Block) -> Result<RecordBatch>;
}

/// The rows of Parquet files and of Arrow IPC files (the file and the stream format; `datasets` caches are
/// streams), each converted to a `T` on demand.
///
/// `T` is any type that serde can deserialize: a struct with the columns as fields, or [`serde_json::Value`].
/// Dates and times are text in ISO 8601, those of a named time zone in UTC; decimals are numbers, bytes are hexadecimal.
/// [`TableRecords::batch`] returns the columns unconverted.
///
/// Opening reads only the footers of Parquet files and the headers of Arrow batches. Rows are decoded in blocks
/// of one record batch, or of at most 4096 rows of a row group, and the last eight blocks are cached. So reading
/// rows in order costs little, and in random order a block each: shuffle Parquet once with [`crate::MapCache`],
/// or train from JSON Lines.
///
/// ```no_run
/// // Needs a Parquet file on disk.
/// use overdrive_datasets::{Dataset, TableRecords};
/// #[derive(serde::Deserialize)]
/// struct Row { text: String, id: Option<i64> }
/// let rows = TableRecords::<Row>::open(["data/train-*.parquet"])?;
/// println!("{} rows, the last: {}", rows.len(), rows.get(rows.len() - 1)?.text);
/// # Ok::<(), overdrive_datasets::Error>(())
/// ```
pub struct TableRecords<T = serde_json::Value> {
    files: Vec<OpenTable>,
    /// The file and the index in the file of each block.
    blocks: Vec<(u32, u32)>,
    /// The number of rows up to and including each block.
    ends: Vec<usize>,
    cache: RecentValues<usize, RecordBatch, CACHED_BLOCKS>,
    fingerprint: OnceLock<Sha256Digest>,
    item: PhantomData<fn() -> T>,
}

struct OpenTable {
    path: PathBuf,
    /// The state of the file before it was opened.
    state: FileState,
    table: Box<dyn TableFile>,
}

impl<T> TableRecords<T> {
    /// Opens files, folders (of `.parquet`, `.arrow`, `.feather` and `.ipc` files) and patterns (see
    /// [`find_files`]). The format of a file is recognized by its first bytes.
    ///
    /// # Errors
    /// Returns an error if no file is found, or if a file cannot be read or has neither format.
    pub fn open<P: AsRef<Path>>(paths: impl IntoIterator<Item = P>) -> Result<Self> {
        let paths = find_files(paths, &["parquet", "arrow", "feather", "ipc"])?;
        let (mut files, mut blocks, mut ends) = (Vec::new(), Vec::new(), Vec::new());
        let mut rows = 0_usize;
        for (number, path) in paths.into_iter().enumerate() {
            let state = FileState::read(&path)?;
            let table = open_file(&path)?;
            for (at, block) in table.blocks().iter().enumerate() {
                rows = rows.checked_add(block.rows).ok_or_else(|| {
                    let problem =
                        "the rows of its batches cannot be counted: its metadata are damaged";
                    Error::invalid_file(&path, problem)
                })?;
                blocks.push((number as u32, at as u32));
                ends.push(rows);
            }
            files.push(OpenTable { path, state, table });
        }
        Ok(Self {
            files,
            blocks,
            ends,
            cache: RecentValues::default(),
            fingerprint: OnceLock::new(),
            item: PhantomData,
        })
    }

    /// Returns a digest of the files' contents and their order; names and times do not matter. The first call reads all
    /// files, as [`crate::RecordFiles::fingerprint`] does.
    ///
    /// # Errors
    /// Returns an error if a file cannot be read.
    pub fn fingerprint(&self) -> Result<Sha256Digest> {
        if let Some(known) = self.fingerprint.get() {
            return Ok(*known);
        }
        let mut hasher = FieldHasher::default().field(b"table 2");
        for file in &self.files {
            let content = match registered_source(&file.path) {
                Some(source) => digest_of_source(&file.path, source.as_ref()),
                None => Sha256Digest::of_blocks(&FileMap::open(&file.path)?),
            };
            hasher.add(&content.0);
        }
        Ok(*self.fingerprint.get_or_init(|| hasher.finish()))
    }

    fn check_files(&self) -> Result<()> {
        let mut files = self.files.iter();
        files.try_for_each(|file| file.state.check(&file.path))
    }

    /// Returns the number of rows.
    fn rows(&self) -> usize {
        self.ends.last().copied().unwrap_or(0)
    }

    /// Returns the decoded block of row `index`, and the index of the row in it. A batch is cheap to clone, since
    /// its columns are shared.
    ///
    /// # Errors
    /// Returns an error if there is no such row, or if it cannot be decoded.
    pub fn batch(&self, index: usize) -> Result<(RecordBatch, usize)> {
        let (number, file, at) = self.find(index)?;
        let row = index + self.files[file].table.blocks()[at].rows - self.ends[number];
        let decode = || self.decode(file, at, index);
        let batch = self.cache.try_get_or(number, decode)?;
        Ok((RecordBatch::clone(&batch), row))
    }

    /// Returns the location of row `index`; the offset is that of the block of the row.
    ///
    /// # Errors
    /// Returns an error if there is no such row.
    pub fn location(&self, index: usize) -> Result<RecordLocation> {
        let (_, file, at) = self.find(index)?;
        let OpenTable { path, table, .. } = &self.files[file];
        Ok(RecordLocation {
            path: path.clone(),
            record: index - self.rows_before(file),
            offset: table.blocks()[at].offset,
        })
    }

    /// Returns the number of the block of row `index` over all files, its file, and its number in the file.
    fn find(&self, index: usize) -> Result<(usize, usize, usize)> {
        let number = self.ends.partition_point(|&end| end <= index);
        let &(file, at) = self.blocks.get(number).ok_or(Error::NoSuchRecord {
            index,
            len: self.rows(),
        })?;
        Ok((number, file as usize, at as usize))
    }

    fn decode(&self, file: usize, at: usize, index: usize) -> Result<RecordBatch> {
        let OpenTable { path, state, table } = &self.files[file];
        let block = &table.blocks()[at];
        // A decoder of another crate may panic on a damaged file, which becomes an error of these rows.
        let batch = catch_unwind(AssertUnwindSafe(|| table.read(block)))
            .unwrap_or_else(|_| Err(Error::other("the decoder panicked")));
        let batch = batch.and_then(|batch| match batch.num_rows() == block.rows {
            true => Ok(batch),
            false => Err(Error::other(format!(
                "{} rows instead of {}",
                batch.num_rows(),
                block.rows
            ))),
        });
        batch.map_err(|problem| match state.check(path) {
            _ if !problem.is_about_record() => problem,
            Err(error @ (Error::FileChanged { .. } | Error::Remote { .. })) => error,
            _ => Error::InvalidRecord {
                path: path.clone(),
                number: RecordNumber::Record(index - self.rows_before(file)),
                offset: block.offset,
                problem: format!("its block of the file cannot be decoded: {problem}"),
            },
        })
    }

    fn rows_before(&self, file: usize) -> usize {
        match self
            .blocks
            .partition_point(|&(other, _)| (other as usize) < file)
        {
            0 => 0,
            number => self.ends[number - 1],
        }
    }
}

impl<T: DeserializeOwned> Dataset for TableRecords<T> {
    type Item = T;

    fn len(&self) -> usize {
        self.rows()
    }

    fn get(&self, index: usize) -> Result<T> {
        let (batch, row) = self.batch(index)?;
        row_as_json(&batch.slice(row, 1))
            .and_then(|json| serde_json::from_slice(&json).map_err(|error| error.to_string()))
            .map_err(|problem| match self.location(index) {
                Ok(location) => Error::InvalidRecord {
                    path: location.path,
                    number: RecordNumber::Record(location.record),
                    offset: location.offset,
                    problem: format!("unexpected row: {problem}"),
                },
                Err(error) => error,
            })
    }

    fn check_unchanged(&self) -> Result<()> {
        self.check_files()
    }
}

impl<T> std::fmt::Debug for TableRecords<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("TableRecords")
            .field("files", &self.files.len())
            .field("rows", &self.rows())
            .finish_non_exhaustive()
    }
}

fn open_file(path: &Path) -> Result<Box<dyn TableFile>> {
    let malformed = |problem: String| Error::invalid_file(path, problem);
    if let Some(source) = registered_source(path) {
        let magic = read_source(source.as_ref(), 0..source.len().min(4))?;
        if magic != b"PAR1" {
            let problem =
                "only Parquet can be read from a server; download Arrow files and give their paths";
            return Err(malformed(problem.to_owned()));
        }
        let opened = catch_unwind(AssertUnwindSafe(|| ParquetFile::open_source(source)));
        let opened = opened.unwrap_or_else(|_| Err("its reader panicked".to_owned()));
        return Ok(Box::new(opened.map_err(malformed)?));
    }
    let map = FileMap::open(path)?;
    // As with rows, a panic of the reader on a damaged file becomes an error.
    let opened = catch_unwind(AssertUnwindSafe(
        || -> std::result::Result<Box<dyn TableFile>, String> {
            if map.starts_with(b"PAR1") {
                return Ok(Box::new(ParquetFile::open(path)?));
            }
            Ok(Box::new(ArrowFile::open(Arc::new(map))?))
        },
    ));
    opened
        .unwrap_or_else(|_| Err("its reader panicked".to_owned()))
        .map_err(malformed)
}
