//! The data of a run: text and tokens of files, and the loaders of their batches.

mod document_rows;
mod loading;
mod mixture;
mod shard;
mod text_data;
mod text_records;
mod text_source;
mod token_files;

pub use loading::BatchFill;
pub use shard::DataShard;
pub use text_data::TextData;
pub use text_source::tokenize;

pub(crate) use loading::Loading;
