//! Tables of token embeddings. For a quantized table, the graph looks up rows of codes (the head's, if it is tied) and
//! dequantizes only these rows.

use overdrive_quantization::{QuantizedWeight, Scheme};

use crate::Result;
use crate::graph::{Attribute, Graph, Value};
use crate::initializer::Element;
use crate::linear::{BlockValues, GroupValues, block_values, group_values, vector};
use crate::model_weights::Table;
use crate::proto::data_type;
use crate::quantized_layouts;

/// The half of a byte that holds the first of its two codes.
#[derive(Debug, Clone, Copy, PartialEq)]
enum First {
    Low,
    High,
}

/// Looks up the rows `ids (B, T)` of the table `{name}.weight`, `(B, T, C)`.
pub(crate) fn embedding(
    graph: &mut Graph,
    name: &str,
    table: &Table<'_>,
    ids: &str,
) -> Result<Value> {
    let name = format!("{name}.weight");
    let (weight, module) = match table {
        Table::Quantized { weight, module } => (*weight, *module),
        Table::Dense(tensor) => {
            let table = vector(graph, &name, tensor);
            return Ok(graph.op("Gather", &[&table, ids], &[]));
        }
    };
    let width = weight.size()[1];
    let numbers = match weight.scheme() {
        Scheme::Int8Dynamic | Scheme::Int8WeightOnly | Scheme::LlmInt8 { .. } => {
            of_rows(graph, &name, weight, ids)
        }
        Scheme::Grouped(_) => match quantized_layouts::groups(weight, module) {
            Ok(groups) => {
                let values = group_values(graph, module, weight, &groups);
                of_groups(graph, &values, ids, width)
            }
            // Regardless of `dense_fallback`: a dense table costs memory but not speed.
            Err(_) => return Ok(in_full(graph, &name, weight, ids)),
        },
        // Otherwise a block would span two rows, and a row could not be looked up alone.
        Scheme::Nf4(options) | Scheme::Fp4(options) if width % (options.block_size as i64) == 0 => {
            let values = block_values(graph, module, weight)?;
            of_blocks(graph, &values, weight, ids)
        }
        _ => return Ok(in_full(graph, &name, weight, ids)),
    };
    // Dequantized in fp32 and rounded once.
    Ok(graph.narrowed(&numbers))
}

/// Looks up rows of the dequantized table, for layouts in which a block spans two rows.
fn in_full(graph: &mut Graph, name: &str, weight: &QuantizedWeight, ids: &str) -> Value {
    let (float, own) = (graph.float, weight.shallow_clone());
    let table = graph.weight(name, &weight.size(), float, move || {
        Ok(own.dequantize(float.kind())?)
    });
    graph.op("Gather", &[&table, ids], &[])
}

/// Looks up codes with one scale for each row. The head stores the codes transposed, so the graph holds them twice.
fn of_rows(graph: &mut Graph, name: &str, weight: &QuantizedWeight, ids: &str) -> Value {
    let [outputs, inputs] = weight.size();
    let own = weight.shallow_clone();
    let codes = graph.weight(
        format!("{name}_quantized"),
        &[outputs, inputs],
        Element::I8,
        move || Ok(quantized_layouts::rows(&own)?.codes),
    );
    let own = weight.shallow_clone();
    let scales = graph.weight(
        format!("{name}_scale"),
        // A column, so that the scale of a token broadcasts over its row.
        &[outputs, 1],
        Element::F32,
        move || Ok(quantized_layouts::rows(&own)?.scales.f_view([-1, 1])?),
    );
    let codes = graph.op("Gather", &[&codes, ids], &[]);
    let scales = graph.op("Gather", &[&scales, ids], &[]);
    let codes = graph.cast(&codes, data_type::FLOAT);
    graph.op("Mul", &[&codes, &scales], &[])
}

/// Computes `(code − zero) · scale` by group.
fn of_groups(graph: &mut Graph, values: &GroupValues, ids: &str, width: i64) -> Value {
    let (count, size) = (values.count, values.size);
    let mut rows = |table: &str| graph.op("Gather", &[table, ids], &[]);
    let (codes, scales) = (rows(&values.codes), rows(&values.scales));
    let zeros = values.zeros.as_ref().map(|zeros| rows(zeros));
    let four = values.bits == 4;
    let codes = match four {
        true => unpacked(graph, &codes, First::Low),
        false => codes,
    };
    let codes = graph.cast(&codes, data_type::FLOAT);
    let codes = graph.reshape(&codes, &[0, 0, count, size]);
    let zeros = match zeros {
        // Symmetric codes are stored with the middle of their range as zero.
        None => graph.f32(if four { 8.0 } else { 128.0 }),
        Some(zeros) => {
            let zeros = match four {
                true => {
                    let all = unpacked(graph, &zeros, First::Low);
                    let all = graph.reshape(&all, &[0, 0, -1]);
                    // Rows with an odd number of groups end with an unused half byte.
                    let (start, end) = (graph.ints(&[0]), graph.ints(&[count]));
                    let axis = graph.ints(&[2]);
                    graph.op("Slice", &[&all, &start, &end, &axis], &[])
                }
                false => zeros,
            };
            let zeros = graph.cast(&zeros, data_type::FLOAT);
            graph.unsqueeze(&zeros, &[-1])
        }
    };
    let steps = graph.op("Sub", &[&codes, &zeros], &[]);
    scaled(graph, &steps, &scales, width)
}

/// Computes `book[code] · magnitude` by block; a row holds whole blocks.
fn of_blocks(
    graph: &mut Graph,
    values: &BlockValues,
    weight: &QuantizedWeight,
    ids: &str,
) -> Value {
    let [outputs, width] = weight.size();
    let mut rows = |table: &str, columns: i64| {
        let table = graph.reshape(table, &[outputs, columns]);
        graph.op("Gather", &[&table, ids], &[])
    };
    let codes = rows(&values.codes, width / 2);
    let magnitudes = rows(&values.magnitudes, width / values.size);
    // bitsandbytes stores the first code in the high half of a byte.
    let codes = unpacked(graph, &codes, First::High);
    // `Gather` takes int32 and int64 indices, not bytes.
    let codes = graph.cast(&codes, data_type::INT32);
    let book = graph.f32s(&values.book);
    let numbers = graph.op("Gather", &[&book, &codes], &[]);
    let numbers = graph.reshape(&numbers, &[0, 0, width / values.size, values.size]);
    scaled(graph, &numbers, &magnitudes, width)
}

/// Multiplies `(B, T, G, S)` by `(B, T, G)` and flattens the result to `(B, T, G·S)`.
fn scaled(graph: &mut Graph, numbers: &str, scales: &str, width: i64) -> Value {
    let scales = graph.widened(scales);
    let scales = graph.unsqueeze(&scales, &[-1]);
    let numbers = graph.op("Mul", &[numbers, &scales], &[]);
    graph.reshape(&numbers, &[0, 0, width])
}

/// Splits each byte into its two codes, in a new last dimension.
fn unpacked(graph: &mut Graph, bytes: &str, first: First) -> Value {
    let (mask, shift) = (graph.bytes(&[15], &[]), graph.bytes(&[4], &[]));
    let low = graph.op("BitwiseAnd", &[bytes, &mask], &[]);
    // `BitShift` takes unsigned integers, so zeros come in from the left.
    let right = [("direction", Attribute::Text("RIGHT"))];
    let high = graph.op("BitShift", &[bytes, &shift], &right);
    let (low, high) = (graph.unsqueeze(&low, &[-1]), graph.unsqueeze(&high, &[-1]));
    match first {
        First::Low => graph.concat(&[&low, &high], -1),
        First::High => graph.concat(&[&high, &low], -1),
    }
}
