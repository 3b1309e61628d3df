use serde::{Deserialize, Serialize};

use crate::{Error, QuantizedWeight, Result};

/// In what activations are multiplied with a quantized weight.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum Activations {
    /// As the scheme says; a weight of 4 bits takes activations in 8 bits, quantized by group, for the
    /// few rows of decoding where nothing is differentiated, as they are everywhere else.
    #[default]
    Auto,
    /// As they are.
    Float,
    /// In 8 bits wherever there is a kernel for it, also under gradient recording (the gradient is that of
    /// the product without rounding).
    Int8,
    /// In 8-bit floats with a scale for each row, for weights of 8-bit floats: on a GPU of compute
    /// capability 8.9 or more whose libtorch multiplies them, elsewhere as they are. What the `FP8-dynamic`
    /// checkpoints of compressed-tensors ask for. Activations lose all but four binary digits.
    Float8,
}

impl QuantizedWeight {
    /// The same weight, multiplied with activations of this form.
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
    /// [`Error::BadOption`] for [`Activations::Int8`] with a scheme of 8-bit floats, for which there are
    /// no products in integers, and for [`Activations::Float8`] with another.
    pub fn with_activations(mut self, activations: Activations) -> Result<QuantizedWeight> {
        if activations == Activations::Int8 && matches!(self.scheme, crate::Scheme::Fp8) {
            return Err(Error::BadOption {
                option: "activations",
                found: "int8 with a weight in 8-bit floats".to_owned(),
                expected: "auto or float".to_owned(),
            });
        }
        if activations == Activations::Float8 && !matches!(self.scheme, crate::Scheme::Fp8) {
            return Err(Error::BadOption {
                option: "activations",
                found: format!("float8 with a weight in {}", self.scheme),
                expected: "auto, float or int8".to_owned(),
            });
        }
        self.activations = activations;
        Ok(self)
    }

    /// In what activations are multiplied with this weight.
    pub fn activations(&self) -> Activations {
        self.activations
    }
}
