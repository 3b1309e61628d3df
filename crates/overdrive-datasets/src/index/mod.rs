//! Where each record of a file starts, found in one pass and kept in a small file.
//!
//! | file | what |
//! |---|---|
//! | `offsets` | Elias-Fano pieces: about one byte a record, each found in constant time |
//! | `format` | the header of an index file, and which data it belongs to |
//! | `scan` | the search for records, on all cores |
//! | `lines`, `csv`, `json_array`, `tar` | where records start in each format |
//! | `packed` | compressed files, block by block |
//! | `open` | opening an index, or building it where there is none that fits |

mod csv;
mod format;
mod json_array;
mod lines;
mod offsets;
mod open;
mod packed;
mod scan;
mod tar;

pub use open::{IndexLocation, IndexOptions, IndexReport};

pub(crate) use csv::CsvScan;
pub(crate) use json_array::JsonArrayScan;
pub(crate) use lines::{DocumentScan, LineScan, ParagraphScan};
pub(crate) use offsets::{OffsetTable, OffsetsWriter};
pub(crate) use open::IndexedFile;
pub(crate) use packed::read_start;
pub(crate) use scan::{Scan, in_order};
pub(crate) use tar::{Members, TarScan, split_name};

#[cfg(test)]
mod tests;
