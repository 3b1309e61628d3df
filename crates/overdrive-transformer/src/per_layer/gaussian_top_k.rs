use tch::Tensor;

use crate::Result;
use crate::rounding::rounded;

/// The sparse gates of Gemma 3n: what is not above `mean + deviation · m` of a token's gates is set to zero, and that
/// bound is subtracted from the others. `m` is the quantile of the normal distribution that leaves the wanted share.
#[derive(Debug, Clone, Copy)]
pub(crate) struct GaussianTopK {
    multiplier: f64,
}

impl GaussianTopK {
    /// Makes the function that sets a `share` of normally distributed gates to zero; `None` for no gates.
    pub(crate) fn new(share: f64) -> Result<Option<GaussianTopK>> {
        if share <= 0.0 {
            return Ok(None);
        }
        // In fp32, as in transformers.
        let quantile = Tensor::f_from_slice(&[share as f32])?
            .f_mul_scalar(2.0)?
            .f_sub_scalar(1.0)?
            .f_erfinv()?
            .f_mul_scalar(2f64.sqrt())?;
        let multiplier = f64::try_from(quantile.f_get(0)?)?;
        Ok(Some(GaussianTopK { multiplier }))
    }

    /// Computes the function of the gates in the last dimension.
    pub(crate) fn forward(self, gates: &Tensor) -> Result<Tensor> {
        let last = [-1i64];
        let mean = gates.f_mean_dim(last.as_slice(), true, gates.kind())?;
        let deviation = gates.f_std_dim(last.as_slice(), false, true)?;
        // transformers has it in the dtype of the gates, and its rounding moves the bound.
        let multiplier = rounded(self.multiplier, gates.kind())?;
        let bound = mean.f_add(&deviation.f_mul_scalar(multiplier)?)?;
        Ok(gates.f_sub(&bound)?.f_relu()?)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test may panic")]

    use tch::{Device, Kind};

    use super::*;

    /// In bf16 the quantile of 0.95 is 1.6484375, and its product with the deviation 4.625 rounds to another number than
    /// that of 1.6449.
    #[test]
    fn the_quantile_has_the_dtype_of_the_gates() {
        let gates = Tensor::arange_start_step(-8.0, 8.0, 0.125, (Kind::Float, Device::Cpu));
        let gates = gates.to_kind(Kind::BFloat16);
        let (mean, deviation) = (gates.mean(Kind::BFloat16), gates.std(false));
        let want = (&gates - (mean + deviation * 1.648_437_5)).relu();
        let top = GaussianTopK::new(0.95).unwrap().unwrap();
        assert_eq!(top.forward(&gates).unwrap(), want);
    }
}
