//! The format of a file of records, by its name.

use std::path::Path;

/// The format of a file of records.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RecordFormat {
    /// JSON Lines or a JSON array: `.jsonl`, `.ndjson`, `.json`.
    Json,
    /// Columns with a delimiter: `.csv`, `.tsv`, `.tab`.
    Csv,
    /// Parquet or Arrow: `.parquet`, `.arrow`, `.feather`, `.ipc`.
    Table,
}

impl RecordFormat {
    /// Returns the format that the name of a file tells, in upper or lower case, with or without the suffix of a
    /// compression (`.gz`, `.bgz`, `.zst`); `None` for any other name, such as that of a plain text.
    ///
    /// ```
    /// use std::path::Path;
    /// use overdrive_datasets::RecordFormat;
    ///
    /// assert_eq!(RecordFormat::of(Path::new("rows.CSV")), Some(RecordFormat::Csv));
    /// assert_eq!(RecordFormat::of(Path::new("rows.jsonl.zst")), Some(RecordFormat::Json));
    /// assert_eq!(RecordFormat::of(Path::new("book.txt")), None);
    /// ```
    pub fn of(path: &Path) -> Option<Self> {
        let name = path.file_name()?.to_string_lossy().to_ascii_lowercase();
        let name = [".gz", ".bgz", ".zst"]
            .iter()
            .find_map(|packed| name.strip_suffix(packed))
            .unwrap_or(&name);
        match name.rsplit_once('.')?.1 {
            "jsonl" | "ndjson" | "json" => Some(Self::Json),
            "csv" | "tsv" | "tab" => Some(Self::Csv),
            "parquet" | "arrow" | "feather" | "ipc" => Some(Self::Table),
            _ => None,
        }
    }
}
