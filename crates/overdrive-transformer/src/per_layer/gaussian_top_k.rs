use tch::Tensor;

use crate::Result;

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
        let bound = mean.f_add(&deviation.f_mul_scalar(self.multiplier)?)?;
        Ok(gates.f_sub(&bound)?.f_relu()?)
    }
}
