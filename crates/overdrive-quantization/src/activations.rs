use serde::{Deserialize, Serialize};

use crate::{Error, QuantizedWeight, Result, Scheme};

/// The dtype in which activations are multiplied with a quantized weight.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum Activations {
    /// The dtype of the scheme. On CPUs with AVX2 a weight of 4 bits takes activations in 8 bits where no gradients are
    /// recorded, with a scale for each 32 to 128 inputs as the weight has them: their rounding error is a fraction of
    /// that of the weight. Training and GPUs take floating-point activations.
    #[default]
    Auto,
    /// Floating-point activations.
    Float,
    /// Activations in 8 bits wherever there is a kernel for it, also with gradients (the gradient is that of
    /// the matmul without rounding).
    Int8,
    /// 8-bit floats with a scale for each row, for weights of 8-bit floats: on a GPU of compute capability
    /// 8.9 or more whose libtorch multiplies them; elsewhere activations stay floating-point. The
    /// `FP8-dynamic` checkpoints of compressed-tensors ask for it. Activations keep only four significant
    /// bits.
    Float8,
}

impl QuantizedWeight {
    /// Returns the weight with this choice of activations.
    ///
    /// ```
    /// use overdrive_quantization::{Activations, QuantizedWeight, Scheme};
    /// use tch::{Device, Kind, Tensor};
    ///
    /// let dense = Tensor::randn([8, 64], (Kind::Float, Device::Cpu));
    /// let weight = QuantizedWeight::quantize(&dense, Scheme::Int8Dynamic)?
    ///     .with_activations(Activations::Float)?;
    /// assert_eq!(weight.activations(), Activations::Float);
    /// # Ok::<(), overdrive_quantization::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Common`] for [`Activations::Int8`] with [`Scheme::Fp8`], for which there is no integer
    /// GEMM, and for [`Activations::Float8`] with any other scheme.
    pub fn with_activations(mut self, activations: Activations) -> Result<QuantizedWeight> {
        if activations == Activations::Int8 && self.scheme == Scheme::Fp8 {
            let found = "int8 with a weight in 8-bit floats";
            return Err(Error::option("activations", found, "auto, float or float8"));
        }
        if activations == Activations::Float8 && self.scheme != Scheme::Fp8 {
            let found = format!("float8 with a weight in {}", self.scheme);
            return Err(Error::option("activations", found, "auto, float or int8"));
        }
        // The kernel is chosen in each call, so nothing else depends on it.
        self.activations = activations;
        Ok(self)
    }

    /// Returns the dtype in which activations are multiplied with this weight.
    pub fn activations(&self) -> Activations {
        self.activations
    }
}
