use tch::{Device, Kind, Tensor};

use crate::Result;
use crate::parameters::ParameterMap;

/// Root-mean-square normalisation of the last dimension (Zhang & Sennrich 2019, arXiv:1910.07467).
#[derive(Debug)]
pub(crate) struct RmsNorm {
    weight: Tensor,
    eps: f64,
}

impl RmsNorm {
    pub(crate) fn take(parameters: &mut ParameterMap, name: &str, eps: f64) -> Result<RmsNorm> {
        Ok(RmsNorm {
            weight: parameters.take(&format!("{name}.weight"))?,
            eps,
        })
    }

    /// `x` normalised.
    pub(crate) fn forward(&self, x: &Tensor, fused: bool) -> Result<Tensor> {
        if fused {
            return Ok(overdrive_fused::rms_norm(x, &self.weight, self.eps)?);
        }
        composed(x, &self.weight, self.eps)
    }

    /// `x + delta` normalised, and the sum.
    pub(crate) fn forward_sum(
        &self,
        x: &Tensor,
        delta: &Tensor,
        fused: bool,
    ) -> Result<(Tensor, Tensor)> {
        if fused {
            return Ok(overdrive_fused::add_rms_norm(
                delta,
                x,
                &self.weight,
                self.eps,
            )?);
        }
        let sum = x.f_add(delta)?;
        Ok((composed(&sum, &self.weight, self.eps)?, sum))
    }
}

/// `weight · x / sqrt(mean(x²) + eps)` in libtorch's operators; the statistics are fp32 for a
/// low-precision `x`.
fn composed(x: &Tensor, weight: &Tensor, eps: f64) -> Result<Tensor> {
    let width = weight.size()[0];
    // One kernel on a GPU; on a CPU it decomposes into more passes than ours.
    if x.device() != Device::Cpu && x.kind() == weight.kind() {
        return Ok(x.f_rms_norm([width], Some(weight), eps)?);
    }
    let wide = match x.kind() {
        Kind::Half | Kind::BFloat16 => x.f_to_kind(Kind::Float)?,
        _ => x.shallow_clone(),
    };
    // The norm is one reduction forward and one product backward, where a square and a mean are two
    // passes each; a dot product would be as cheap, but autocast would round it.
    let norm = wide.f_linalg_norm(2.0, [-1i64].as_slice(), true, None::<Kind>)?;
    let inverse = norm
        .f_square()?
        .f_mul_scalar(1.0 / width as f64)?
        .f_add_scalar(eps)?
        .f_rsqrt()?;
    Ok(wide.f_mul(&inverse)?.f_to_kind(x.kind())?.f_mul(weight)?)
}
