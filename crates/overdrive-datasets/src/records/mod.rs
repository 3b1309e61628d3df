//! Datasets over files that stay on disk: each record is read when it is asked for.

mod csv;
mod files;
mod json;
mod record_files;
mod text;

pub use csv::{CsvColumns, CsvOptions, CsvRecords, CsvRow};
pub use files::find_files;
pub use json::{JsonLayout, JsonOptions, JsonRecords};
pub use record_files::{Place, RecordFiles};
pub use text::{TextLines, TextOptions};
