use overdrive_quantization::QuantizedWeight;
use tch::{Device, Kind, Tensor};

use crate::Result;

/// The weight of a [`Linear`](crate::Linear) layer.
#[derive(Debug)]
pub enum LinearWeight {
    /// Elements of a floating-point dtype.
    Dense {
        /// `(O, I)`, or `(I, O)` if `transposed`.
        weight: Tensor,
        /// If `true`, the layout is that of GPT-2's `Conv1D` (PEFT's `fan_in_fan_out`).
        transposed: bool,
    },
    /// A quantized weight; it is frozen.
    Quantized(QuantizedWeight),
}

impl LinearWeight {
    /// Returns `[O, I]`, the numbers of outputs and inputs.
    pub fn size(&self) -> [i64; 2] {
        match self {
            LinearWeight::Dense { weight, transposed } => {
                match (weight.size().as_slice(), transposed) {
                    (&[outputs, inputs], false) | (&[inputs, outputs], true) => [outputs, inputs],
                    // Cannot happen in a layer, whose constructor checks the dimensions.
                    _ => [0, 0],
                }
            }
            LinearWeight::Quantized(weight) => weight.size(),
        }
    }

    /// Returns the device of the weight.
    pub fn device(&self) -> Device {
        match self {
            LinearWeight::Dense { weight, .. } => weight.device(),
            LinearWeight::Quantized(weight) => weight.device(),
        }
    }

    /// Returns the dtype of the elements, or `None` for a quantized weight.
    pub fn kind(&self) -> Option<Kind> {
        match self {
            LinearWeight::Dense { weight, .. } => Some(weight.kind()),
            LinearWeight::Quantized(_) => None,
        }
    }

    /// Returns the size of the weight in bytes.
    pub fn bytes(&self) -> usize {
        match self {
            LinearWeight::Dense { weight, .. } => bytes(weight),
            LinearWeight::Quantized(weight) => weight.bytes(),
        }
    }

    /// Returns another handle to the same memory.
    pub fn shallow_clone(&self) -> LinearWeight {
        match self {
            LinearWeight::Dense { weight, transposed } => LinearWeight::Dense {
                weight: weight.shallow_clone(),
                transposed: *transposed,
            },
            LinearWeight::Quantized(weight) => LinearWeight::Quantized(weight.shallow_clone()),
        }
    }

    /// Returns the elements `(O, I)` in the dtype `kind`: a detached view of the weight if it is dense and has
    /// that dtype, else a copy.
    ///
    /// # Errors
    /// An error of libtorch if memory runs out.
    pub fn to_dense(&self, kind: Kind) -> Result<Tensor> {
        Ok(match self {
            LinearWeight::Dense { weight, transposed } => {
                // Callers read the elements or write to them in place, and autograd must record neither.
                let weight = weight.f_detach()?;
                let weight = if *transposed { weight.f_tr()? } else { weight };
                weight.f_to_kind(kind)?
            }
            LinearWeight::Quantized(weight) => weight.dequantize(kind)?,
        })
    }

    /// Computes `x · Wᵀ + bias`, `(…, O)`, for `x (…, I)` and `bias (O,)`.
    ///
    /// If `fused` is true, a dense weight is multiplied by overdrive-fused, else by libtorch's operator; the two
    /// differ in speed only. A quantized weight is always multiplied by [`overdrive_quantization::linear`].
    ///
    /// # Errors
    /// Shapes that do not fit, and errors of libtorch.
    pub fn forward(&self, x: &Tensor, bias: Option<&Tensor>, fused: bool) -> Result<Tensor> {
        Ok(match self {
            // A matmul reads a transposed weight through its strides: the view costs nothing.
            LinearWeight::Dense {
                weight,
                transposed: true,
            } => x.f_linear(&weight.f_tr()?, bias)?,
            LinearWeight::Dense { weight, .. } if fused => {
                overdrive_fused::linear(x, weight, bias)?
            }
            LinearWeight::Dense { weight, .. } => x.f_linear(weight, bias)?,
            LinearWeight::Quantized(weight) => overdrive_quantization::linear(x, weight, bias)?,
        })
    }
}

/// Returns the size of a tensor's elements in bytes.
pub(crate) fn bytes(tensor: &Tensor) -> usize {
    tensor.numel() * tensor.kind().elt_size_in_bytes()
}
