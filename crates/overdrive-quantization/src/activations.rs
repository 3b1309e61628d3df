use serde::{Deserialize, Serialize};

use crate::{Error, QuantizedWeight, Result, Scheme};

/// The dtype in which activations are multiplied with a quantized weight.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum Activations {
    /// The dtype of the scheme. On CPUs with AVX2, 4-bit weights and 8-bit weights in groups (`int8-g32`, the `Q8_0`,
    /// `Q6_K` and `Q5_…` of GGUF files) use 8-bit activations while gradients are disabled (`tch::no_grad`), as
    /// llama.cpp does. With 4-bit weights, each 32 to 128 inputs share a scale, as in the weight, and the rounding
    /// error is a fraction of the weight's; with 8-bit weights, each 16 or 32 do, and the error is at most about the
    /// weight's. With weights in smaller groups, activations have 13 to 16 bits. In training and on GPUs, activations
    /// are floating-point, whether or not an input needs a gradient.
    #[default]
    Auto,
    /// Floating-point activations.
    Float,
    /// 8-bit activations wherever there is a kernel for them, even with gradients (the gradient is that of the
    /// matmul without rounding).
    Int8,
    /// 8-bit floats with one scale for each row, for weights of 8-bit floats, on GPUs of compute capability 8.9
    /// or more if libtorch supports them; elsewhere activations stay floating-point. `FP8-dynamic` checkpoints of
    /// compressed-tensors request it. Activations keep only four significant
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
    /// [`Error::Common`] for [`Activations::Int8`] with [`Scheme::Fp8`] and [`Scheme::Fp8Blocks`], for which there is no
    /// integer GEMM, and for [`Activations::Float8`] with any other scheme than [`Scheme::Fp8`].
    pub fn with_activations(mut self, activations: Activations) -> Result<QuantizedWeight> {
        use Activations::{Float8, Int8};
        let (refused, allowed): (&[Activations], _) = match self.scheme {
            Scheme::Fp8 => (&[Int8], "auto, float or float8"),
            Scheme::Fp8Blocks => (&[Int8, Float8], "auto or float"),
            _ => (&[Float8], "auto, float or int8"),
        };
        if refused.contains(&activations) {
            let name = if activations == Int8 {
                "int8"
            } else {
                "float8"
            };
            let found = format!("{name} with a weight of scheme {}", self.scheme);
            return Err(Error::option("activations", found, allowed));
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
