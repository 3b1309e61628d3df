//! Parquet: row groups, of which a part is decoded at a time.

use std::fs::File;
use std::path::{Path, PathBuf};

use arrow_array::RecordBatch;
use parquet::arrow::arrow_reader::{
    ArrowReaderMetadata, ArrowReaderOptions, ParquetRecordBatchReaderBuilder,
};
use parquet::file::metadata::PageIndexPolicy;

use super::{Block, TableFile};

/// At most so many rows are decoded for one of them.
const ROWS: usize = 4096;

#[derive(Debug)]
pub(super) struct ParquetFile {
    path: PathBuf,
    metadata: ArrowReaderMetadata,
    blocks: Vec<Block>,
}

impl ParquetFile {
    pub(super) fn open(path: &Path) -> Result<Self, String> {
        let file = File::open(path).map_err(|error| error.to_string())?;
        // With the index of pages, where the file has one, a block is decoded without what is before.
        let options = ArrowReaderOptions::new().with_offset_index_policy(PageIndexPolicy::Optional);
        let metadata =
            ArrowReaderMetadata::load(&file, options).map_err(|error| error.to_string())?;
        let mut blocks = Vec::new();
        for (part, group) in metadata.metadata().row_groups().iter().enumerate() {
            let rows = usize::try_from(group.num_rows())
                .map_err(|_| format!("row group {part} has {} rows", group.num_rows()))?;
            let offset = group
                .columns()
                .first()
                .map_or(0, |column| column.byte_range().0);
            let firsts = (0..rows).step_by(ROWS);
            blocks.extend(firsts.map(|first| Block {
                rows: ROWS.min(rows - first),
                offset,
                part,
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
            .with_row_groups(vec![block.part])
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
