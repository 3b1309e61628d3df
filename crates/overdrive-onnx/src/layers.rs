//! Norms, activations and the logit bound.

use tch::{Kind, Tensor};

use crate::graph::{Attribute, Graph, Value};
use crate::linear::vector;
use crate::{Error, Result};

/// Writes `weight · x / sqrt(mean(x²) + eps)` over the last dimension. Statistics are fp32.
pub(crate) fn rms_norm(graph: &mut Graph, x: &str, weight: &str, eps: f64) -> Value {
    let epsilon = eps as f32;
    // `RMSNormalization` is an operator from opset 23 on, with fp32 statistics by default.
    if graph.opset >= 23 {
        let attributes = [
            ("axis", Attribute::Int(-1)),
            ("epsilon", Attribute::Float(epsilon)),
        ];
        return graph.op("RMSNormalization", &[x, weight], &attributes);
    }
    // Runtimes recognise these nodes in this order and fuse them into one kernel.
    // Widened first, as the squares of f16 activations overflow.
    let wide = graph.widened(x);
    let two = graph.f32(2.0);
    let squares = graph.op("Pow", &[&wide, &two], &[]);
    let axes = graph.ints(&[-1]);
    let keep = [("keepdims", Attribute::Int(1))];
    let mean = graph.op("ReduceMean", &[&squares, &axes], &keep);
    let epsilon = graph.f32(epsilon);
    let sum = graph.op("Add", &[&mean, &epsilon], &[]);
    let root = graph.op("Sqrt", &[&sum], &[]);
    let normal = graph.op("Div", &[&wide, &root], &[]);
    let normal = graph.narrowed(&normal);
    graph.op("Mul", &[&normal, weight], &[])
}

/// Adds the weight of a norm, plus 1 if the model adds it.
pub(crate) fn norm_weight(graph: &mut Graph, name: &str, tensor: &Tensor, add_one: bool) -> Value {
    if !add_one {
        return vector(graph, name, tensor);
    }
    let (float, shape) = (graph.float, tensor.size());
    let tensor = tensor.shallow_clone();
    graph.weight(name, &shape, float, move || {
        // Added in fp32: in 16 bits, adding 1 would lose the low bits of the weight.
        let wide = tensor.f_detach()?.f_to_kind(Kind::Float)?;
        Ok(wide.f_add_scalar(1.0)?.f_to_kind(float.kind())?)
    })
}

/// Writes an activation function by its name in transformers.
pub(crate) fn activate(graph: &mut Graph, key: &str, name: &str, x: &str) -> Result<Value> {
    match name {
        "silu" | "swish" => {
            let gate = graph.op("Sigmoid", &[x], &[]);
            Ok(graph.op("Mul", &[x, &gate], &[]))
        }
        "relu" => Ok(graph.op("Relu", &[x], &[])),
        // `Gelu` is an operator from opset 20 on.
        "gelu" if graph.opset >= 20 => Ok(graph.op("Gelu", &[x], &[])),
        "gelu" => gelu(graph, x),
        "gelu_new" | "gelu_pytorch_tanh" | "gelu_fast" if graph.opset >= 20 => {
            let tanh = [("approximate", Attribute::Text("tanh"))];
            Ok(graph.op("Gelu", &[x], &tanh))
        }
        "gelu_new" | "gelu_pytorch_tanh" | "gelu_fast" => gelu_tanh(graph, x),
        other => Err(Error::unsupported(
            format!("config key `{key}`"),
            format!("{other:?}"),
            "silu, gelu, gelu_new, gelu_pytorch_tanh, gelu_fast and relu can be",
        )),
    }
}

/// Writes `x/2 · (1 + erf(x/√2))`.
fn gelu(graph: &mut Graph, x: &str) -> Result<Value> {
    let root = graph.number(std::f64::consts::SQRT_2)?;
    let (one, half) = (graph.number(1.0)?, graph.number(0.5)?);
    let scaled = graph.op("Div", &[x, &root], &[]);
    let erf = graph.op("Erf", &[&scaled], &[]);
    let sum = graph.op("Add", &[&erf, &one], &[]);
    let product = graph.op("Mul", &[x, &sum], &[]);
    Ok(graph.op("Mul", &[&product, &half], &[]))
}

/// Writes `x/2 · (1 + tanh(√(2/π) · (x + 0.044715 x³)))`.
fn gelu_tanh(graph: &mut Graph, x: &str) -> Result<Value> {
    let three = graph.number(3.0)?;
    let cube = graph.op("Pow", &[x, &three], &[]);
    let weight = graph.number(0.044_715)?;
    let cube = graph.op("Mul", &[&cube, &weight], &[]);
    let sum = graph.op("Add", &[x, &cube], &[]);
    let root = graph.number((2.0 / std::f64::consts::PI).sqrt())?;
    let scaled = graph.op("Mul", &[&sum, &root], &[]);
    let tanh = graph.op("Tanh", &[&scaled], &[]);
    let (one, half) = (graph.number(1.0)?, graph.number(0.5)?);
    let sum = graph.op("Add", &[&tanh, &one], &[]);
    let product = graph.op("Mul", &[x, &sum], &[]);
    Ok(graph.op("Mul", &[&product, &half], &[]))
}

/// Writes `cap · tanh(x / cap)`.
pub(crate) fn bounded(graph: &mut Graph, x: &str, cap: f64) -> Result<Value> {
    let cap = graph.number(cap)?;
    let scaled = graph.op("Div", &[x, &cap], &[]);
    let tanh = graph.op("Tanh", &[&scaled], &[]);
    Ok(graph.op("Mul", &[&tanh, &cap], &[]))
}
