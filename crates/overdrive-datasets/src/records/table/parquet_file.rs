//! Parquet files, whose row groups are decoded in blocks.

use std::fs::File;
use std::io::{self, BufReader, Seek, SeekFrom};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use arrow_array::RecordBatch;
use bytes::Bytes;
use overdrive_core::Error as CommonError;
use parquet::arrow::arrow_reader::{
    ArrowReaderMetadata, ArrowReaderOptions, ParquetRecordBatchReaderBuilder,
};
use parquet::errors::ParquetError;
use parquet::file::metadata::PageIndexPolicy;
use parquet::file::reader::{ChunkReader, Length};

use super::{Block, TableFile};
use crate::index::read_source;
use crate::range_source::{RangeReader, read_error};
use crate::read_failure::{NotedReader, ReadFailure};
use crate::{Error, RangeSource};

/// The maximum number of rows that are decoded to read one row.
const BLOCK_ROWS: usize = 4096;

/// The maximum number of rows of a file. Each block has an entry in memory (2^24 entries for 2^36 rows), and the
/// number in the metadata need not match the size of the file.
const MAX_ROWS: usize = 1 << 36;

#[derive(Debug)]
pub(super) struct ParquetFile {
    input: Input,
    metadata: ArrowReaderMetadata,
    blocks: Vec<Block>,
}

/// The bytes of the file.
#[derive(Debug)]
enum Input {
    File(PathBuf),
    Remote(Arc<dyn RangeSource>),
}

/// An object on a server, for the reader of Parquet.
struct RemoteChunks(Arc<dyn RangeSource>);

impl Length for RemoteChunks {
    fn len(&self) -> u64 {
        self.0.len()
    }
}

impl ChunkReader for RemoteChunks {
    type T = BufReader<RangeReader>;

    fn get_read(&self, start: u64) -> parquet::errors::Result<Self::T> {
        let mut reader = RangeReader::new(Arc::clone(&self.0));
        reader.seek(SeekFrom::Start(start))?;
        Ok(BufReader::new(reader))
    }

    fn get_bytes(&self, start: u64, length: usize) -> parquet::errors::Result<Bytes> {
        let end = start.checked_add(length as u64);
        // A damaged footer may name any range.
        let end = end.filter(|&end| end <= self.0.len());
        let end =
            end.ok_or_else(|| ParquetError::EOF("a column ends after the file".to_owned()))?;
        let read = read_source(self.0.as_ref(), start..end);
        let bytes = read.map_err(|error| ParquetError::External(Box::new(error)))?;
        Ok(bytes.into())
    }
}

/// Notes the error of a file or of a server, and returns one with its text.
fn note(failure: &ReadFailure, error: ParquetError) -> ParquetError {
    let ParquetError::External(source) = error else {
        return error;
    };
    let error = source
        .downcast::<io::Error>()
        .map_or_else(io::Error::other, |error| *error);
    failure.note(error).into()
}

/// The bytes of a file whose errors are noted.
struct NotedChunks<C> {
    chunks: C,
    failure: ReadFailure,
}

impl<C: ChunkReader> Length for NotedChunks<C> {
    fn len(&self) -> u64 {
        self.chunks.len()
    }
}

impl<C: ChunkReader> ChunkReader for NotedChunks<C> {
    type T = NotedReader<C::T>;

    fn get_read(&self, start: u64) -> parquet::errors::Result<Self::T> {
        let reader = self.chunks.get_read(start);
        Ok(NotedReader {
            reader: reader.map_err(|error| note(&self.failure, error))?,
            failure: self.failure.clone(),
        })
    }

    fn get_bytes(&self, start: u64, length: usize) -> parquet::errors::Result<Bytes> {
        let bytes = self.chunks.get_bytes(start, length);
        bytes.map_err(|error| note(&self.failure, error))
    }
}

impl ParquetFile {
    pub(super) fn open(path: &Path) -> Result<Self, String> {
        let file = File::open(path).map_err(|error| error.to_string())?;
        Self::of(&file, Input::File(path.to_owned()))
    }

    /// Opens an object on a server; only its footer is read.
    pub(super) fn open_source(source: Arc<dyn RangeSource>) -> Result<Self, String> {
        let chunks = RemoteChunks(Arc::clone(&source));
        Self::of(&chunks, Input::Remote(source))
    }

    fn of(file: &impl ChunkReader, input: Input) -> Result<Self, String> {
        // With a page index, if the file has one, a block is decoded without the rows before it.
        let options = ArrowReaderOptions::new().with_offset_index_policy(PageIndexPolicy::Optional);
        let metadata =
            ArrowReaderMetadata::load(file, options).map_err(|error| error.to_string())?;
        let (mut blocks, mut all_rows) = (Vec::new(), 0_usize);
        for (index, group) in metadata.metadata().row_groups().iter().enumerate() {
            let rows = usize::try_from(group.num_rows())
                .map_err(|_| format!("row group {index} has {} rows", group.num_rows()))?;
            all_rows = all_rows.saturating_add(rows);
            if all_rows > MAX_ROWS {
                return Err(format!(
                    "its first {} row groups declare {all_rows} rows; at most {MAX_ROWS} rows are supported",
                    index + 1
                ));
            }
            let offset = group
                .columns()
                .first()
                .map_or(0, |column| column.byte_range().0);
            let firsts = (0..rows).step_by(BLOCK_ROWS);
            blocks.extend(firsts.map(|first| Block {
                rows: BLOCK_ROWS.min(rows - first),
                offset,
                group: index,
                first,
            }));
        }
        Ok(Self {
            input,
            metadata,
            blocks,
        })
    }
}

impl TableFile for ParquetFile {
    fn blocks(&self) -> &[Block] {
        &self.blocks
    }

    fn read(&self, block: &Block) -> crate::Result<RecordBatch> {
        match &self.input {
            Input::File(path) => {
                let file = File::open(path).map_err(CommonError::io("open", path))?;
                self.read_from(file, path, block)
            }
            // The errors of a source have its name.
            Input::Remote(source) => {
                self.read_from(RemoteChunks(Arc::clone(source)), Path::new(""), block)
            }
        }
    }
}

impl ParquetFile {
    fn read_from(
        &self,
        file: impl ChunkReader + 'static,
        path: &Path,
        block: &Block,
    ) -> crate::Result<RecordBatch> {
        let failure = ReadFailure::default();
        let chunks = NotedChunks {
            chunks: file,
            failure: failure.clone(),
        };
        self.decode(chunks, block)
            .map_err(|problem| match failure.take() {
                Some(failure) => read_error("read", path)(failure),
                None => Error::other(problem),
            })
    }

    fn decode(
        &self,
        file: impl ChunkReader + 'static,
        block: &Block,
    ) -> Result<RecordBatch, String> {
        let metadata = self.metadata.clone();
        let reader = ParquetRecordBatchReaderBuilder::new_with_metadata(file, metadata)
            .with_row_groups(vec![block.group])
            .with_offset(block.first)
            .with_limit(block.rows)
            .with_batch_size(block.rows)
            .build();
        let mut reader = reader.map_err(|error| error.to_string())?;
        match reader.next() {
            Some(batch) => batch.map_err(|error| error.to_string()),
            None => Err("no rows where there should be some".to_owned()),
        }
    }
}
