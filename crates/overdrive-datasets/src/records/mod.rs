//! Datasets over files on disk, whose records are read on demand.

mod csv;
mod field_records;
mod find_files;
mod format;
mod json;
mod record_files;
#[cfg(feature = "parquet")]
mod table;
mod tar;
mod text;

pub use csv::{CsvColumns, CsvOptions, CsvRecords, CsvRow};
pub use field_records::{FieldRecords, FieldRow};
pub use find_files::find_files;
pub(crate) use find_files::{files_in, has_extension};
pub use format::RecordFormat;
pub(crate) use json::json_problem;
pub use json::{JsonLayout, JsonOptions, JsonRecords};
#[cfg(feature = "tokenizers")]
pub(crate) use json::{guessed_scan, without_separator};
pub use record_files::{RecordFiles, RecordLocation};
#[cfg(feature = "parquet")]
pub use table::TableRecords;
pub use tar::{WebDataset, WebSample};
pub use text::{SampleBy, TextLines, TextOptions};
