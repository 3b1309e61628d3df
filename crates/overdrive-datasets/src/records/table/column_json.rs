//! The rows of tables as JSON, and so the types of columns that can be read.

use std::sync::Arc;

use arrow_array::cast::AsArray;
use arrow_array::types::{
    ArrowTimestampType, TimestampMicrosecondType, TimestampMillisecondType,
    TimestampNanosecondType, TimestampSecondType,
};
use arrow_array::{Array, ArrayRef, GenericListArray, OffsetSizeTrait, RecordBatch, StructArray};
use arrow_json::LineDelimitedWriter;

/// Converts a batch of one row to a JSON object, with null for missing values.
pub(super) fn row_as_json(row: &RecordBatch) -> std::result::Result<Vec<u8>, String> {
    // Without explicit nulls a missing value would be a missing field, which serde treats differently.
    let builder = arrow_json::WriterBuilder::new().with_explicit_nulls(true);
    let mut writer: LineDelimitedWriter<Vec<u8>> = builder.build(Vec::new());
    let utc = struct_in_utc(&StructArray::from(row.clone())).map(RecordBatch::from);
    writer
        .write(utc.as_ref().unwrap_or(row))
        .and_then(|()| writer.finish())
        .map_err(|error| error.to_string())?;
    Ok(writer.into_inner())
}

/// Returns the array with the times in UTC whose zone has a name, such as `Europe/Berlin`: the writer knows only offsets.
/// `None` if there are none.
fn in_utc(array: &dyn Array) -> Option<ArrayRef> {
    times_in_utc::<TimestampMicrosecondType>(array)
        .or_else(|| times_in_utc::<TimestampNanosecondType>(array))
        .or_else(|| times_in_utc::<TimestampMillisecondType>(array))
        .or_else(|| times_in_utc::<TimestampSecondType>(array))
        .or_else(|| Some(Arc::new(struct_in_utc(array.as_struct_opt()?)?) as ArrayRef))
        .or_else(|| list_in_utc(array.as_list_opt::<i32>()?))
        .or_else(|| list_in_utc(array.as_list_opt::<i64>()?))
}

fn times_in_utc<T: ArrowTimestampType>(array: &dyn Array) -> Option<ArrayRef> {
    let times = array.as_primitive_opt::<T>()?;
    let is_named = times
        .timezone()?
        .starts_with(|first: char| first.is_alphabetic());
    is_named.then(|| Arc::new(times.clone().with_timezone("+00:00")) as ArrayRef)
}

fn struct_in_utc(array: &StructArray) -> Option<StructArray> {
    let converted: Vec<Option<ArrayRef>> = array
        .columns()
        .iter()
        .map(|column| in_utc(column))
        .collect();
    if converted.iter().all(Option::is_none) {
        return None;
    }
    let both = converted.into_iter().zip(array.columns());
    let columns: Vec<ArrayRef> = both
        .map(|(new, old)| new.unwrap_or_else(|| Arc::clone(old)))
        .collect();
    let fields = array.fields().iter().zip(&columns);
    let fields = fields.map(|(field, column)| {
        field
            .as_ref()
            .clone()
            .with_data_type(column.data_type().clone())
    });
    StructArray::try_new(fields.collect(), columns, array.nulls().cloned()).ok()
}

fn list_in_utc<O: OffsetSizeTrait>(array: &GenericListArray<O>) -> Option<ArrayRef> {
    let values = in_utc(array.values())?;
    let (field, offsets, _, nulls) = array.clone().into_parts();
    let field = field
        .as_ref()
        .clone()
        .with_data_type(values.data_type().clone());
    let list = GenericListArray::try_new(Arc::new(field), offsets, values, nulls);
    Some(Arc::new(list.ok()?) as ArrayRef)
}
