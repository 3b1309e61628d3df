//! Linear layers: dense layers, and each kind of quantized layer with the operator that reads it.

use overdrive_nn::LinearWeight;
use overdrive_quantization::{QuantizedWeight, Scheme};
use tch::Tensor;

use crate::graph::{Attribute, Graph, MICROSOFT, Value};
use crate::initializer::Element;
use crate::model_weights::{LinearSource, Source};
use crate::quantized_layouts::{self, Blocks, Groups};
use crate::{Activations, Error, ExportOptions, Result};

/// Writes the linear layer `name` of the model, `x (…, I)` to `(…, O)`.
pub(crate) fn linear(
    graph: &mut Graph,
    source: &Source,
    options: &ExportOptions,
    name: &str,
    x: &str,
) -> Result<Value> {
    let layer = source.linear(name)?;
    let product = match &layer.weight {
        LinearWeight::Dense { weight, transposed } => dense(graph, name, x, weight, *transposed),
        LinearWeight::Quantized(weight) => quantized(graph, options, name, x, weight)?,
    };
    Ok(with_bias(graph, name, layer, &product))
}

fn with_bias(graph: &mut Graph, name: &str, layer: &LinearSource, product: &str) -> Value {
    let Some(bias) = &layer.bias else {
        return product.to_owned();
    };
    let bias = vector(graph, &format!("{name}.bias"), bias);
    graph.op("Add", &[product, &bias], &[])
}

/// Adds a parameter in the dtype of activations.
pub(crate) fn vector(graph: &mut Graph, name: &str, tensor: &Tensor) -> Value {
    let (float, shape) = (graph.float, tensor.size());
    let tensor = tensor.shallow_clone();
    graph.weight(name, &shape, float, move || {
        Ok(tensor.f_detach()?.f_to_kind(float.kind())?)
    })
}

/// Writes a dense layer. The weight is stored as `(I, O)`, the layout of `MatMul`.
fn dense(graph: &mut Graph, name: &str, x: &str, weight: &Tensor, transposed: bool) -> Value {
    let float = graph.float;
    let mut shape = weight.size();
    if !transposed {
        shape.reverse();
    }
    let weight = weight.shallow_clone();
    let weight = graph.weight(format!("{name}.weight"), &shape, float, move || {
        let weight = weight.f_detach()?;
        let weight = if transposed { weight } else { weight.f_tr()? };
        Ok(weight.f_to_kind(float.kind())?)
    });
    graph.op("MatMul", &[x, &weight], &[])
}

fn quantized(
    graph: &mut Graph,
    options: &ExportOptions,
    name: &str,
    x: &str,
    weight: &QuantizedWeight,
) -> Result<Value> {
    match weight.scheme() {
        Scheme::Int8Dynamic if options.activations != Activations::Float => {
            bytes_by_bytes(graph, name, x, weight)
        }
        Scheme::Int8WeightOnly | Scheme::LlmInt8 { .. }
            if options.activations == Activations::Int8 =>
        {
            bytes_by_bytes(graph, name, x, weight)
        }
        Scheme::Int8Dynamic | Scheme::Int8WeightOnly | Scheme::LlmInt8 { .. } => {
            rows(graph, name, x, weight, Element::I8)
        }
        Scheme::Fp8 => {
            // `DequantizeLinear` takes float8 from opset 19 on.
            if graph.opset < 19 {
                return Err(Error::unsupported(
                    format!("`{name}.weight`"),
                    "of 8-bit floats with opset 18",
                    "set `opset` to 19 or more",
                ));
            }
            rows(graph, name, x, weight, Element::F8)
        }
        Scheme::Grouped(_) => match quantized_layouts::groups(weight, name) {
            Ok(groups) => Ok(groups_by_groups(graph, options, name, x, weight, &groups)),
            Err(_) if options.dense_fallback => Ok(dequantized(graph, name, x, weight)),
            Err(error) => Err(error),
        },
        Scheme::Nf4(_) | Scheme::Fp4(_) => blocks(graph, name, x, weight),
        other => Err(Error::unsupported(
            format!("`{name}.weight`"),
            format!("quantized by {other}"),
            "dequantize the model first (`CausalLm::dequantize`)",
        )),
    }
}

/// Writes a layer with its dequantized weight.
fn dequantized(graph: &mut Graph, name: &str, x: &str, weight: &QuantizedWeight) -> Value {
    let (float, [outputs, inputs]) = (graph.float, weight.size());
    let weight = weight.shallow_clone();
    let full = graph.weight(
        format!("{name}.weight"),
        &[inputs, outputs],
        float,
        move || Ok(weight.dequantize(float.kind())?.f_tr()?),
    );
    graph.op("MatMul", &[x, &full], &[])
}

/// Writes a layer with codes `(I, O)` and one scale for each output, dequantized before the matmul: ONNX Runtime
/// fuses the two nodes.
fn rows(
    graph: &mut Graph,
    name: &str,
    x: &str,
    weight: &QuantizedWeight,
    element: Element,
) -> Result<Value> {
    let codes = codes(graph, name, weight, element);
    let scales = scales(graph, name, weight);
    // The outputs are the columns of `(I, O)`.
    let axis = [("axis", Attribute::Int(1))];
    let full = graph.op("DequantizeLinear", &[&codes, &scales], &axis);
    Ok(graph.op("MatMul", &[x, &full], &[]))
}

/// Adds codes with one scale for each row, transposed to `(I, O)`.
fn codes(graph: &mut Graph, name: &str, weight: &QuantizedWeight, element: Element) -> Value {
    let [outputs, inputs] = weight.size();
    let weight = weight.shallow_clone();
    graph.weight(
        format!("{name}.weight_quantized"),
        &[inputs, outputs],
        element,
        move || Ok(quantized_layouts::rows(&weight)?.codes.f_tr()?),
    )
}

/// Adds one scale for each output, in the dtype of activations.
fn scales(graph: &mut Graph, name: &str, weight: &QuantizedWeight) -> Value {
    let (float, [outputs, _]) = (graph.float, weight.size());
    let weight = weight.shallow_clone();
    graph.weight(
        format!("{name}.weight_scale"),
        &[outputs],
        float,
        move || {
            Ok(quantized_layouts::rows(&weight)?
                .scales
                .f_to_kind(float.kind())?)
        },
    )
}

/// Writes a layer that quantizes activations to 8 bits token by token, `x ≈ (code − 128) · max / 127`, and
/// multiplies integers: the arithmetic of [`overdrive_quantization::linear`]. The codes are unsigned because CPUs
/// have faster instructions for them.
fn bytes_by_bytes(
    graph: &mut Graph,
    name: &str,
    x: &str,
    weight: &QuantizedWeight,
) -> Result<Value> {
    let codes = codes(graph, name, weight, Element::I8);
    let [outputs, _] = weight.size();
    let scale_weight = weight.shallow_clone();
    // The scales are fp32 in every precision: a sum of integers may exceed fp16's range.
    let scales = graph.weight(
        format!("{name}.weight_scale"),
        &[outputs],
        Element::F32,
        move || Ok(quantized_layouts::rows(&scale_weight)?.scales),
    );
    // `MatMulInteger` subtracts the zero point of the activations itself.
    let (xs, scale) = token_codes(graph, x);
    let middle = graph.bytes(&[128], &[]);
    let sums = graph.op("MatMulInteger", &[&xs, &codes, &middle], &[]);
    let sums = graph.cast(&sums, crate::proto::data_type::FLOAT);
    let by_token = graph.op("Mul", &[&sums, &scale], &[]);
    let y = graph.op("Mul", &[&by_token, &scales], &[]);
    Ok(graph.narrowed(&y))
}

/// Writes the codes of `x` and the scale of each token, once for all layers with the input `x`.
fn token_codes(graph: &mut Graph, x: &str) -> (Value, Value) {
    // Query, key and value share their input, and so do gate and up.
    if let Some((codes, scale)) = graph.quantized.get(x) {
        return (codes.clone(), scale.clone());
    }
    let wide = graph.widened(x);
    let magnitudes = graph.op("Abs", &[&wide], &[]);
    let axes = graph.ints(&[-1]);
    let keep = [("keepdims", Attribute::Int(1))];
    let most = graph.op("ReduceMax", &[&magnitudes, &axes], &keep);
    let span = graph.f32(127.0);
    let scale = graph.op("Div", &[&most, &span], &[]);
    // Prevents a division by zero for a token of zeros; its codes are zeros with any scale.
    let least = graph.f32(f32::MIN_POSITIVE);
    let scale = graph.op("Max", &[&scale, &least], &[]);
    let steps = graph.op("Div", &[&wide, &scale], &[]);
    // `QuantizeLinear` cannot take one scale for each token, so a node before it divides.
    let (one, middle) = (graph.f32(1.0), graph.bytes(&[128], &[]));
    let codes = graph.op("QuantizeLinear", &[&steps, &one, &middle], &[]);
    let made = (codes.clone(), scale.clone());
    graph.quantized.insert(x.to_owned(), made);
    (codes, scale)
}

/// The constants of a weight in groups.
#[derive(Debug)]
pub(crate) struct GroupValues {
    pub(crate) bits: u8,
    /// The number of groups in a row, and of inputs in a group.
    pub(crate) count: i64,
    pub(crate) size: i64,
    /// The codes, u8 `(O, G, S·bits/8)`.
    pub(crate) codes: Value,
    /// The scales `(O, G)`.
    pub(crate) scales: Value,
    /// The zero points, u8 `(O, ⌈G·bits/8⌉)`.
    pub(crate) zeros: Option<Value>,
}

pub(crate) fn group_values(
    graph: &mut Graph,
    name: &str,
    weight: &QuantizedWeight,
    groups: &Groups,
) -> GroupValues {
    let (float, [outputs, inputs]) = (graph.float, weight.size());
    let size = groups.group_size as i64;
    let count = inputs / size;
    let of = |part: &str| format!("{name}.weight_{part}");
    let shape = [outputs, count, size * i64::from(groups.bits) / 8];
    let own = weight.shallow_clone();
    let codes = graph.weight(of("quantized"), &shape, Element::U8, move || {
        Ok(quantized_layouts::group_codes(&own)?.f_view(shape)?)
    });
    let own = weight.shallow_clone();
    let scales = graph.weight(of("scale"), &[outputs, count], float, move || {
        Ok(quantized_layouts::group_scales(&own)?.f_to_kind(float.kind())?)
    });
    let zeros = groups.zeros.as_ref().map(|zeros| {
        let (shape, zeros) = (zeros.size(), zeros.shallow_clone());
        graph.weight(of("zero_point"), &shape, Element::U8, move || {
            Ok(zeros.shallow_clone())
        })
    });
    GroupValues {
        bits: groups.bits,
        count,
        size,
        codes,
        scales,
        zeros,
    }
}

/// Writes a layer quantized in groups, with ONNX Runtime's `MatMulNBits`.
fn groups_by_groups(
    graph: &mut Graph,
    options: &ExportOptions,
    name: &str,
    x: &str,
    weight: &QuantizedWeight,
    groups: &Groups,
) -> Value {
    let [outputs, inputs] = weight.size();
    let values = group_values(graph, name, weight, groups);
    let mut attributes = vec![
        ("K", Attribute::Int(inputs)),
        ("N", Attribute::Int(outputs)),
        ("bits", Attribute::Int(i64::from(values.bits))),
        ("block_size", Attribute::Int(values.size)),
    ];
    let integers = match options.activations {
        Activations::Float => false,
        Activations::Scheme => values.bits == 8,
        Activations::Int8 => true,
    };
    if integers {
        // ONNX Runtime's code for 8-bit activations.
        attributes.push(("accuracy_level", Attribute::Int(4)));
    }
    let mut inputs = vec![x, &values.codes, &values.scales];
    inputs.extend(values.zeros.as_deref());
    let [y] = graph.ops(MICROSOFT, "MatMulNBits", &inputs, &attributes);
    y
}

/// The constants of a weight with a code book.
#[derive(Debug)]
pub(crate) struct BlockValues {
    /// The number of elements of a block.
    pub(crate) size: i64,
    /// The 16 values of NF4 or FP4.
    pub(crate) book: Vec<f32>,
    /// If `true`, the code book is NF4's, else FP4's.
    normal: bool,
    /// The codes, u8 `(⌈O·I/2⌉,)`.
    pub(crate) codes: Value,
    /// The largest magnitudes `(blocks,)`.
    pub(crate) magnitudes: Value,
}

pub(crate) fn block_values(
    graph: &mut Graph,
    name: &str,
    weight: &QuantizedWeight,
) -> Result<BlockValues> {
    let float = graph.float;
    let Blocks {
        normal,
        block_size,
        book,
        codes,
        magnitudes,
    } = quantized_layouts::blocks(weight)?;
    let of = |part: &str| format!("{name}.weight_{part}");
    let codes = graph.weight(of("quantized"), &codes.size(), Element::U8, move || {
        Ok(codes.shallow_clone())
    });
    let magnitudes = graph.weight(of("absmax"), &magnitudes.size(), float, move || {
        Ok(magnitudes.f_to_kind(float.kind())?)
    });
    Ok(BlockValues {
        size: block_size as i64,
        book,
        normal,
        codes,
        magnitudes,
    })
}

/// Writes a layer quantized in blocks, with ONNX Runtime's `MatMulBnb4`, which has bitsandbytes' layout.
fn blocks(graph: &mut Graph, name: &str, x: &str, weight: &QuantizedWeight) -> Result<Value> {
    let [outputs, inputs] = weight.size();
    let values = block_values(graph, name, weight)?;
    let attributes = [
        ("K", Attribute::Int(inputs)),
        ("N", Attribute::Int(outputs)),
        ("block_size", Attribute::Int(values.size)),
        // 0 means FP4, 1 means NF4.
        ("quant_type", Attribute::Int(i64::from(values.normal))),
    ];
    let inputs = [x, &values.codes, &values.magnitudes];
    let [y] = graph.ops(MICROSOFT, "MatMulBnb4", &inputs, &attributes);
    Ok(y)
}
