use overdrive_quantization::QuantizedWeight;
use tch::Tensor;

/// The weight of a linear map that adapters stand beside.
#[derive(Debug)]
pub enum BaseWeight {
    /// Numbers of a floating kind.
    Dense {
        /// `(O, I)`, or `(I, O)` where `transposed`.
        weight: Tensor,
        /// The layout of GPT-2's `Conv1D` (PEFT's `fan_in_fan_out`).
        transposed: bool,
    },
    /// A packed weight, frozen.
    Quantized(QuantizedWeight),
}

impl BaseWeight {
    /// `[O, I]`.
    pub fn size(&self) -> [i64; 2] {
        match self {
            BaseWeight::Dense { weight, transposed } => {
                match (weight.size().as_slice(), transposed) {
                    (&[outputs, inputs], false) | (&[inputs, outputs], true) => [outputs, inputs],
                    _ => [0, 0],
                }
            }
            BaseWeight::Quantized(weight) => weight.size(),
        }
    }
}
