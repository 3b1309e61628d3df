//! The rows of tables as JSON, and so the types of columns that can be read.

use arrow_array::RecordBatch;
use arrow_json::LineDelimitedWriter;

/// Converts a batch of one row to a JSON object, with null for missing values.
pub(super) fn row_as_json(row: &RecordBatch) -> std::result::Result<Vec<u8>, String> {
    // Without explicit nulls a missing value would be a missing field, which serde treats differently.
    let builder = arrow_json::WriterBuilder::new().with_explicit_nulls(true);
    let mut writer: LineDelimitedWriter<Vec<u8>> = builder.build(Vec::new());
    writer
        .write(row)
        .and_then(|()| writer.finish())
        .map_err(|error| error.to_string())?;
    Ok(writer.into_inner())
}
