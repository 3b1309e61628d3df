//! The form of the activations in a matmul with a quantized weight.

use crate::weight::Storage;
use crate::{Activations, QuantizedWeight, Scheme};

/// The form of the activations, which does not depend on the kernel.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Plan {
    /// Activations in 8 bits, with one scale for each row.
    Int8,
    /// The same, with columns that reach a threshold in full precision (`LLM.int8()`).
    Split(f64),
    /// Activations as integers with a scale for each group of inputs, by the kernels of 4 bits.
    ByGroup,
    /// Activations in 8-bit floats, with one scale for each row, if the device has such matmuls.
    Float8,
    /// Activations in their own dtype.
    Float,
}

/// Returns the plan for a weight. Where kernels `by_group` exist and the rows are not part of a graph, activations of
/// a weight of 4 bits are quantized because it is faster.
pub(super) fn plan(weight: &QuantizedWeight, by_group: bool, recording: bool) -> Plan {
    let int8 = match weight.activations {
        Activations::Float => return Plan::Float,
        Activations::Float8 => return Plan::Float8,
        Activations::Int8 => true,
        Activations::Auto => false,
    };
    match (&weight.storage, weight.scheme) {
        (Storage::Int8 { .. }, Scheme::LlmInt8 { threshold }) => {
            let no_outliers = threshold == 0.0;
            Plan::Split(if no_outliers {
                f64::INFINITY
            } else {
                threshold
            })
        }
        (Storage::Int8 { .. }, Scheme::Int8Dynamic) => Plan::Int8,
        (Storage::Int8 { .. }, _) if int8 => Plan::Int8,
        (Storage::Int8 { .. } | Storage::Fp8 { .. }, _) => Plan::Float,
        (Storage::Grouped { .. } | Storage::Blocks { .. }, _)
            if int8 || (by_group && !recording) =>
        {
            Plan::ByGroup
        }
        (Storage::Grouped { .. } | Storage::Tiled(_) | Storage::Blocks { .. }, _) => Plan::Float,
    }
}
