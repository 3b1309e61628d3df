use std::cell::RefCell;

use overdrive_fused::rows;
use tch::{Device, Kind, Tensor};

use crate::parameters::ParameterMap;
use crate::projections::ParameterVisitor;
use crate::{LlamaConfig, Result};

/// Root-mean-square normalisation of the last dimension (Zhang & Sennrich 2019, arXiv:1910.07467).
#[derive(Debug)]
pub(crate) struct RmsNorm {
    weight: Tensor,
    eps: f64,
    /// The gain `1 + weight` (Gemma), or `None` if the gain is the weight.
    gain: Option<Gain>,
}

impl RmsNorm {
    pub(crate) fn take(
        parameters: &mut ParameterMap,
        name: &str,
        config: &LlamaConfig,
    ) -> Result<RmsNorm> {
        Ok(RmsNorm {
            weight: parameters.take(&format!("{name}.weight"))?,
            eps: config.rms_norm_eps,
            gain: config.norm_adds_one().then(Gain::default),
        })
    }

    /// Takes the norm of `{name}.weight` whose gain is the weight.
    pub(crate) fn take_plain(
        parameters: &mut ParameterMap,
        name: &str,
        eps: f64,
    ) -> Result<RmsNorm> {
        Ok(RmsNorm {
            weight: parameters.take(&format!("{name}.weight"))?,
            eps,
            gain: None,
        })
    }

    /// Returns the dtype of the weight.
    pub(crate) fn kind(&self) -> Kind {
        self.weight.kind()
    }

    /// Lends the weight `{name}.weight`, which the visitor may replace.
    pub(crate) fn visit_parameters(
        &mut self,
        name: &str,
        visit: ParameterVisitor<'_>,
    ) -> overdrive_nn::Result<()> {
        visit(&format!("{name}.weight"), &mut self.weight)?;
        // The version of a replaced tensor may equal the cached one.
        self.gain = self.gain.take().map(|_| Gain::default());
        Ok(())
    }

    /// Normalises `x`.
    pub(crate) fn forward(&self, x: &Tensor, fused: bool) -> Result<Tensor> {
        let Some(gain) = &self.gain else {
            return normalised(x, &self.weight, self.eps, fused);
        };
        // Multiplied in fp32 and rounded after that: `1 + weight` in a low precision would lose the last
        // bits of the weight.
        let wide = match is_low(x.kind()) {
            true => x.f_to_kind(Kind::Float)?,
            false => x.shallow_clone(),
        };
        let normalised = normalised(&wide, &gain.of(&self.weight)?, self.eps, fused)?;
        Ok(normalised.f_to_kind(x.kind())?)
    }

    /// Normalises `x` for a residual stream of the dtype `stream`. If that is a low precision, the result has it too, also
    /// with a trained weight in fp32, to whose dtype [`forward`](Self::forward) would promote.
    pub(crate) fn forward_for(&self, stream: Kind, x: &Tensor, fused: bool) -> Result<Tensor> {
        match self.gain {
            None if is_low(stream) => {
                normalised(x, &self.weight.f_to_kind(stream)?, self.eps, fused)
            }
            _ => self.forward(x, fused),
        }
    }

    /// Normalises `x + delta`, where `x` is the residual stream, and returns the result and the sum.
    pub(crate) fn forward_sum(
        &self,
        x: &Tensor,
        delta: &Tensor,
        fused: bool,
    ) -> Result<(Tensor, Tensor)> {
        let low = is_low(x.kind());
        let weight = match &self.gain {
            Some(gain) if fused && !low => gain.of(&self.weight)?,
            None if fused && low => self.weight.f_to_kind(x.kind())?,
            None if fused => self.weight.shallow_clone(),
            _ => {
                let sum = x.f_add(delta)?;
                return Ok((self.forward_for(x.kind(), &sum, fused)?, sum));
            }
        };
        Ok(overdrive_fused::add_rms_norm(delta, x, &weight, self.eps)?)
    }
}

impl RmsNorm {
    /// Normalises rows of f32 as [`forward`](Self::forward) does.
    pub(crate) fn forward_rows(&self, x: &[f32], y: &mut [f32]) -> Result<()> {
        self.with_factor(|factor| Ok(rows::rms_norm(x, factor, self.eps, y)?))
    }

    /// Normalises rows of `x + delta` as [`forward_sum`](Self::forward_sum) does; the sum goes to `sum`.
    pub(crate) fn forward_sum_rows(
        &self,
        x: &[f32],
        delta: &[f32],
        sum: &mut [f32],
        y: &mut [f32],
    ) -> Result<()> {
        self.with_factor(|factor| Ok(rows::add_rms_norm(delta, x, factor, self.eps, sum, y)?))
    }

    /// Calls `run` with the number by which each channel is multiplied, contiguous in f32.
    fn with_factor(&self, run: impl FnOnce(&Tensor) -> Result<()>) -> Result<()> {
        let plain = |factor: &Tensor| factor.kind() == Kind::Float && factor.is_contiguous();
        let factor = match &self.gain {
            None if plain(&self.weight) => return run(&self.weight),
            None => self.weight.shallow_clone(),
            Some(gain) => gain.of(&self.weight)?,
        };
        run(&factor.f_to_kind(Kind::Float)?.f_contiguous()?)
    }
}

/// Returns `true` for a dtype of 16 bits.
fn is_low(kind: Kind) -> bool {
    matches!(kind, Kind::Half | Kind::BFloat16)
}

/// The cached gain `1 + weight`.
#[derive(Debug, Default)]
struct Gain(RefCell<Option<(i64, Tensor)>>);

impl Gain {
    /// Returns the gain, at least in fp32.
    fn of(&self, weight: &Tensor) -> Result<Tensor> {
        let compute = || -> Result<Tensor> {
            let wide = match weight.kind() {
                Kind::Half | Kind::BFloat16 => weight.f_to_kind(Kind::Float)?,
                _ => weight.shallow_clone(),
            };
            Ok(wide.f_add_scalar(1.0)?)
        };
        // A trained parameter gets its gradient through the sum.
        if weight.requires_grad() {
            return compute();
        }
        let Ok(version) = weight.f_internal_version() else {
            return compute(); // tensors of inference mode have no version
        };
        let mut kept = self.0.borrow_mut();
        match kept.as_ref() {
            Some((of, gain)) if *of == version => Ok(gain.shallow_clone()),
            _ => {
                let gain = compute()?;
                *kept = Some((version, gain.shallow_clone()));
                Ok(gain)
            }
        }
    }
}

/// Normalises `x` without a weight.
pub(crate) fn normalised_without_weight(x: &Tensor, eps: f64, fused: bool) -> Result<Tensor> {
    let width = x.size().last().copied().unwrap_or(0);
    // Made anew: a model may be moved to another device or dtype, and this is the size of a head.
    let ones = Tensor::f_ones([width], (x.kind(), x.device()))?;
    normalised(x, &ones, eps, fused)
}

fn normalised(x: &Tensor, weight: &Tensor, eps: f64, fused: bool) -> Result<Tensor> {
    if fused {
        return Ok(overdrive_fused::rms_norm(x, weight, eps)?);
    }
    composed(x, weight, eps)
}

/// Computes `weight · x / sqrt(mean(x²) + eps)` by libtorch's operators; the statistics of a low-precision `x`
/// are fp32.
fn composed(x: &Tensor, weight: &Tensor, eps: f64) -> Result<Tensor> {
    let width = weight.size()[0];
    // One kernel on a GPU; on a CPU, it decomposes into more passes than the code below.
    if x.device() != Device::Cpu && x.kind() == weight.kind() {
        return Ok(x.f_rms_norm([width], Some(weight), eps)?);
    }
    let wide = match x.kind() {
        Kind::Half | Kind::BFloat16 => x.f_to_kind(Kind::Float)?,
        _ => x.shallow_clone(),
    };
    // The norm is one pass forward and one backward, where a square and a mean are two passes each; a dot
    // product would be as cheap, but autocast would round it.
    let norm = wide.f_linalg_norm(2.0, [-1i64].as_slice(), true, None::<Kind>)?;
    let inverse = norm
        .f_square()?
        .f_mul_scalar(1.0 / width as f64)?
        .f_add_scalar(eps)?
        .f_rsqrt()?;
    Ok(wide.f_mul(&inverse)?.f_to_kind(x.kind())?.f_mul(weight)?)
}
