//! Indexes of files: the offset of each record, found in one pass and kept in a small file.
//!
//! | file | content |
//! |---|---|
//! | `offsets` | monotone offsets in Elias-Fano coding: about one byte per record, constant access time |
//! | `format` | the header of an index file, and the identity of its data |
//! | `scan` | the interface of the searches for records, and their threads |
//! | `text`, `csv`, `json_array`, `tar` | the search for records in each format |
//! | `compressed` | compressed files, read block by block |
//! | `indexed_file` | a file with its index, which is opened or built |

mod compressed;
mod csv;
mod format;
mod indexed_file;
mod json_array;
mod offsets;
mod scan;
mod tar;
mod text;

pub use indexed_file::{IndexLocation, IndexOptions, IndexReport};

pub(crate) use csv::CsvScan;
pub(crate) use indexed_file::IndexedFile;
#[cfg(feature = "parquet")]
pub(crate) use indexed_file::read_source;
pub(crate) use json_array::{JsonArrayScan, begins_array};
pub(crate) use offsets::{OffsetTable, OffsetsWriter};
pub(crate) use scan::{PART_BYTES, Part, Scan, scan_stream, text_start};
#[cfg(feature = "tokenizers")]
pub(crate) use scan::{cores, in_order};
pub(crate) use tar::{Members, TarScan, split_name};
pub(crate) use text::{DocumentScan, LineScan, ParagraphScan};

#[cfg(test)]
mod tests;
