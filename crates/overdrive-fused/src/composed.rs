//! The loss by libtorch's operators, for f64 and for devices without kernels of ours.

use tch::{Kind, Reduction, Tensor};

use crate::{CrossEntropyOptions, Result};

/// Returns the sum of the losses of `logits (N, V)` under `labels (N,)`, differentiable.
pub(crate) fn loss(
    logits: &Tensor,
    labels: &Tensor,
    options: &CrossEntropyOptions,
) -> Result<Tensor> {
    let logits = widened(logits)?;
    let logits = match options.softcap {
        None => logits,
        Some(cap) => logits
            .f_mul_scalar(1.0 / cap)?
            .f_tanh()?
            .f_mul_scalar(cap)?,
    };
    let loss = logits.f_cross_entropy_loss(
        labels,
        None::<&Tensor>,
        Reduction::Sum,
        options.ignore_index,
        options.label_smoothing,
    )?;
    if options.z_loss == 0.0 || labels.numel() == 0 {
        return Ok(loss);
    }
    let ignored = labels.f_eq(options.ignore_index)?;
    let squares = logits.f_logsumexp([-1i64].as_slice(), false)?.f_square()?;
    let squares = squares.f_masked_fill(&ignored, 0.0)?;
    Ok(loss.f_add(&squares.f_sum(loss.kind())?.f_mul_scalar(options.z_loss)?)?)
}

/// Returns the sum of the losses; the logits are overwritten with the gradient of `scale ·` it.
pub(crate) fn loss_and_gradient(
    logits: &mut Tensor,
    labels: &Tensor,
    options: &CrossEntropyOptions,
    scale: f64,
) -> Result<Tensor> {
    let raw = widened(logits)?;
    let classes = raw.size()[1];
    let (x, slope) = match options.softcap {
        None => (raw, None),
        Some(cap) => {
            let ratio = raw.f_mul_scalar(1.0 / cap)?.f_tanh()?;
            let slope = ratio.f_square()?.f_neg()?.f_add_scalar(1.0)?;
            (ratio.f_mul_scalar(cap)?, Some(slope))
        }
    };
    let counts = labels.f_ne(options.ignore_index)?.f_unsqueeze(1)?;
    // Ignored labels become class 0, because `gather` refuses an index outside the classes.
    let target = labels.f_unsqueeze(1)?.f_mul(&counts)?;
    let lse = x.f_logsumexp([1i64].as_slice(), true)?;
    let hit = 1.0 - options.label_smoothing;
    let at_label = x.f_gather(1, &target, false)?;
    let mut losses = lse.f_sub(&at_label.f_mul_scalar(hit)?)?;
    if options.label_smoothing > 0.0 {
        let mean = x.f_mean_dim([1i64].as_slice(), true, None::<Kind>)?;
        losses = losses.f_sub(&mean.f_mul_scalar(options.label_smoothing)?)?;
    }
    let mut factor = lse.f_ones_like()?;
    if options.z_loss > 0.0 {
        losses = losses.f_add(&lse.f_square()?.f_mul_scalar(options.z_loss)?)?;
        factor = lse.f_mul_scalar(2.0 * options.z_loss)?.f_add_scalar(1.0)?;
    }
    let ignored = counts.f_logical_not()?;
    let sum = losses.f_masked_fill(&ignored, 0.0)?.f_sum(losses.kind())?;

    let mut gradient = x.f_sub(&lse)?.f_exp()?.f_mul(&factor)?;
    gradient = gradient.f_sub_scalar(options.label_smoothing / classes as f64)?;
    let hits = at_label.f_full_like(-hit)?;
    let _same = gradient.f_scatter_add_(1, &target, &hits)?;
    if let Some(slope) = slope {
        gradient = gradient.f_mul(&slope)?;
    }
    let gradient = gradient.f_masked_fill(&ignored, 0.0)?.f_mul_scalar(scale)?;
    logits.f_copy_(&gradient)?;
    Ok(sum)
}

/// Returns the logits in f32 at least.
fn widened(logits: &Tensor) -> Result<Tensor> {
    Ok(match logits.kind() {
        Kind::Half | Kind::BFloat16 => logits.f_to_kind(Kind::Float)?,
        _ => logits.shallow_clone(),
    })
}
