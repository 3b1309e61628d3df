//! Datasets over files that stay on disk: each record is read when it is asked for.

mod csv;
mod files;
mod json;
mod record_files;
#[cfg(feature = "parquet")]
mod table;
mod tar;
mod text;

pub use csv::{CsvColumns, CsvOptions, CsvRecords, CsvRow};
pub use files::find_files;
pub use json::{JsonLayout, JsonOptions, JsonRecords};
pub use record_files::{Place, RecordFiles};
#[cfg(feature = "parquet")]
pub use table::TableRecords;
pub use tar::{WebDataset, WebSample};
pub use text::{SampleBy, TextLines, TextOptions};
