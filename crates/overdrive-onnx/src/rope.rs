//! Rotary position embeddings: the cosines and sines of a forward pass, from `position_ids`.
//!
//! The graph computes the angles `position · frequency`, so it has no maximum length, and it scales them as the model
//! does.

use overdrive_transformer::RopeScaling;
use tch::{Device, Kind, Tensor};

use crate::graph::{Attribute, Graph, Value};
use crate::proto::data_type;
use crate::{Attention, Error, Result};

/// The rotation of a forward pass.
#[derive(Debug, Clone)]
pub(crate) struct Rotation {
    cos: Value,
    sin: Value,
    /// For ONNX Runtime's operator: the row of each token in the tables.
    rows: Option<Value>,
}

/// The frequencies of layers of one type.
#[derive(Debug)]
pub(crate) struct Frequencies<'a> {
    /// The inverse frequencies `(D/2,)` within the original context.
    pub(crate) short: &'a [f32],
    pub(crate) scaling: &'a RopeScaling,
    pub(crate) theta: f64,
    pub(crate) context: i64,
}

/// The name of ONNX Runtime's operator.
const MICROSOFT_OP: &str = "RotaryEmbedding";

/// Writes the cosines and sines of `position_ids (B, T)`.
pub(crate) fn rotation(
    graph: &mut Graph,
    frequencies: &Frequencies<'_>,
    attention: Attention,
) -> Result<Rotation> {
    let (inverse, scale) = inverse(graph, frequencies)?;
    // fp32 in every precision: f16 holds integers up to 2048 only.
    let positions = graph.cast("position_ids", data_type::FLOAT);
    let positions = graph.unsqueeze(&positions, &[-1]);
    let angles = graph.op("Mul", &[&positions, &inverse], &[]);
    let mut parts = ["Cos", "Sin"].map(|op| graph.op(op, &[&angles], &[]));
    for part in &mut parts {
        if scale != 1.0 {
            let scale = graph.f32(scale as f32);
            *part = graph.op("Mul", &[part, &scale], &[]);
        }
        *part = graph.narrowed(part);
        let half = frequencies.short.len() as i64;
        *part = match attention {
            // A table of two dimensions, from which the operator looks up rows.
            Attention::GroupQuery => graph.reshape(part, &[-1, half]),
            // ONNX's operator takes `(B, T, D/2)`; products need a dimension for the heads.
            _ if graph.opset >= 23 => part.clone(),
            _ => graph.unsqueeze(part, &[1]),
        };
    }
    let [cos, sin] = parts;
    let rows = (attention == Attention::GroupQuery).then(|| rows(graph));
    Ok(Rotation { cos, sin, rows })
}

/// Writes `0..B·T` as `(B, T)`: the cosines and sines have a row for each token.
fn rows(graph: &mut Graph) -> Value {
    let size = graph.op("Size", &["position_ids"], &[]);
    let (zero, one) = (graph.int(0), graph.int(1));
    let range = graph.op("Range", &[&zero, &size, &one], &[]);
    let shape = graph.op("Shape", &["position_ids"], &[]);
    graph.op("Reshape", &[&range, &shape], &[])
}

impl Rotation {
    /// Rotates heads `(B, H, T, D)`: the pair `(i, i + D/2)` by its angle.
    pub(crate) fn apply(&self, graph: &mut Graph, x: &str) -> Value {
        let (cos, sin) = (self.cos.as_str(), self.sin.as_str());
        if graph.opset >= 23 {
            return graph.op("RotaryEmbedding", &[x, cos, sin], &[]);
        }
        let halves = [
            ("axis", Attribute::Int(-1)),
            ("num_outputs", Attribute::Int(2)),
        ];
        let [first, second] = graph.ops("", "Split", &[x], &halves);
        let mut product = |a: &str, b: &str| graph.op("Mul", &[a, b], &[]);
        let (first_cos, second_sin) = (product(&first, cos), product(&second, sin));
        let (second_cos, first_sin) = (product(&second, cos), product(&first, sin));
        let first = graph.op("Sub", &[&first_cos, &second_sin], &[]);
        let second = graph.op("Add", &[&second_cos, &first_sin], &[]);
        graph.concat(&[&first, &second], -1)
    }

    /// Rotates heads side by side, `(B, T, H·D)`, by ONNX Runtime's operator.
    pub(crate) fn apply_joined(&self, graph: &mut Graph, x: &str) -> Value {
        let rows = self.rows.clone().unwrap_or_default();
        let inputs = [x, &rows, &self.cos, &self.sin];
        let [y] = graph.ops(crate::graph::MICROSOFT, MICROSOFT_OP, &inputs, &[]);
        y
    }
}

/// Writes the inverse frequencies `(D/2,)` and returns them with the factor of cosines and sines.
fn inverse(graph: &mut Graph, frequencies: &Frequencies<'_>) -> Result<(Value, f64)> {
    let short = graph.f32s(frequencies.short);
    let dim = frequencies.short.len() as i64 * 2;
    Ok(match frequencies.scaling {
        RopeScaling::Default | RopeScaling::Linear { .. } | RopeScaling::Llama3 { .. } => {
            (short, 1.0)
        }
        RopeScaling::Yarn(yarn) => (short, yarn.attention_scale()),
        RopeScaling::LongRope(long) => {
            // Computed by tensors, as in the model, whose powers are rounded to fp32.
            let powers = Tensor::f_pow_scalar(frequencies.theta, &exponents(dim)?)?;
            let factors = Tensor::f_from_slice(&long.long_factor)?.f_to_kind(Kind::Float)?;
            let beyond = Vec::<f32>::try_from(factors.f_mul(&powers)?.f_reciprocal()?)?;
            let beyond = graph.f32s(&beyond);
            let len = length(graph);
            let is_beyond = exceeds(graph, &len, long.original_max_position_embeddings);
            let chosen = graph.op("Where", &[&is_beyond, &beyond, &short], &[]);
            (chosen, long.attention_scale())
        }
        RopeScaling::Dynamic { factor } => {
            let len = length(graph);
            let beyond = dynamic(graph, frequencies, &len, *factor)?;
            let is_beyond = exceeds(graph, &len, frequencies.context);
            (graph.op("Where", &[&is_beyond, &beyond, &short], &[]), 1.0)
        }
        other => {
            return Err(Error::unsupported(
                "config key `rope_scaling`",
                format!("{other:?}"),
                "default, linear, dynamic, yarn, longrope and llama3 can be",
            ));
        }
    })
}

/// Writes the largest position of the step plus one.
fn length(graph: &mut Graph) -> Value {
    let keep = [("keepdims", Attribute::Int(0))];
    let last = graph.op("ReduceMax", &["position_ids"], &keep);
    let one = graph.int(1);
    graph.op("Add", &[&last, &one], &[])
}

/// Writes a boolean that is true if the length exceeds `context`.
fn exceeds(graph: &mut Graph, len: &str, context: i64) -> Value {
    let context = graph.int(context);
    graph.op("Greater", &[len, &context], &[])
}

/// Writes the frequencies of dynamic scaling, whose base grows with the length; each step is in fp32, as in the
/// model.
fn dynamic(
    graph: &mut Graph,
    frequencies: &Frequencies<'_>,
    len: &str,
    factor: f64,
) -> Result<Value> {
    let dim = frequencies.short.len() as i64 * 2;
    let len = graph.cast(len, data_type::FLOAT);
    let mut step = |op: &str, x: &str, number: f64| {
        let number = graph.f32(number as f32);
        graph.op(op, &[x, &number], &[])
    };
    let stretched = step("Mul", &len, factor);
    let stretched = step("Div", &stretched, frequencies.context as f64);
    let stretched = step("Sub", &stretched, factor - 1.0);
    // Within the context, where the result is not used, it may be negative.
    let stretched = step("Max", &stretched, 0.0);
    let grown = step("Pow", &stretched, dim as f64 / (dim as f64 - 2.0));
    let base = step("Mul", &grown, frequencies.theta);
    let exponents = graph.f32s(&Vec::<f32>::try_from(exponents(dim)?)?);
    let powers = graph.op("Pow", &[&base, &exponents], &[]);
    Ok(graph.op("Reciprocal", &[&powers], &[]))
}

/// Returns the exponents `2i / D`.
fn exponents(dim: i64) -> Result<Tensor> {
    let even = Tensor::f_arange_start_step(0, dim, 2, (Kind::Float, Device::Cpu))?;
    Ok(even.f_div_scalar(dim)?)
}
