//! Parquet files, whose row groups are decoded in blocks.

use std::fs::File;
use std::path::{Path, PathBuf};

use arrow_array::RecordBatch;
use parquet::arrow::arrow_reader::{
    ArrowReaderMetadata, ArrowReaderOptions, ParquetRecordBatchReaderBuilder,
};
use parquet::file::metadata::PageIndexPolicy;

use super::{Block, TableFile};

/// The maximum number of rows that are decoded to read one row.
const BLOCK_ROWS: usize = 4096;

/// The maximum number of rows of a file. Each block has an entry in memory (2^24 entries for 2^36 rows), and the
/// number in the metadata need not match the size of the file.
const MAX_ROWS: usize = 1 << 36;

#[derive(Debug)]
pub(super) struct ParquetFile {
    path: PathBuf,
    metadata: ArrowReaderMetadata,
    blocks: Vec<Block>,
}

impl ParquetFile {
    pub(super) fn open(path: &Path) -> Result<Self, String> {
        let file = File::open(path).map_err(|error| error.to_string())?;
        // With a page index, if the file has one, a block is decoded without the rows before it.
        let options = ArrowReaderOptions::new().with_offset_index_policy(PageIndexPolicy::Optional);
        let metadata =
            ArrowReaderMetadata::load(&file, options).map_err(|error| error.to_string())?;
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
            path: path.to_owned(),
            metadata,
            blocks,
        })
    }
}

impl TableFile for ParquetFile {
    fn blocks(&self) -> &[Block] {
        &self.blocks
    }

    fn read(&self, block: &Block) -> Result<RecordBatch, String> {
        let file = File::open(&self.path).map_err(|error| error.to_string())?;
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
