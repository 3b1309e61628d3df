//! The loss in libtorch's operators, for f64 and for devices without kernels of this crate.

use tch::{Kind, Reduction, Tensor};

use crate::{CrossEntropyOptions, Result};

/// Returns the differentiable sum of the losses of `logits (N, V)` under `labels (N,)`.
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

/// Returns the sum of the losses, and overwrites the logits with the gradient of `scale ·` the sum.
///
/// In addition to the logits, this takes two tensors of their shape in f32, three with a softcap
/// ([`BYTES_PER_LOGIT`]).
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
    // `x - lse`, which libtorch computes in one kernel.
    let log_p = x.f_internal_log_softmax(1, false)?;
    let hit = 1.0 - options.label_smoothing;
    let at_label = log_p.f_gather(1, &target, false)?;
    let mut losses = at_label.f_mul_scalar(-hit)?;
    if options.label_smoothing > 0.0 {
        let mean = log_p.f_mean_dim([1i64].as_slice(), true, None::<Kind>)?;
        losses = losses.f_sub(&mean.f_mul_scalar(options.label_smoothing)?)?;
    }
    let mut factor = None;
    if options.z_loss > 0.0 {
        let lse = x.f_gather(1, &target, false)?.f_sub(&at_label)?;
        losses = losses.f_add(&lse.f_square()?.f_mul_scalar(options.z_loss)?)?;
        factor = Some(lse.f_mul_scalar(2.0 * options.z_loss)?.f_add_scalar(1.0)?);
    }
    drop(x);
    let ignored = counts.f_logical_not()?;
    let sum = losses.f_masked_fill(&ignored, 0.0)?.f_sum(losses.kind())?;

    let mut gradient = log_p;
    let _same = gradient.f_exp_()?;
    if let Some(factor) = factor {
        let _same = gradient.f_mul_(&factor)?;
    }
    if options.label_smoothing > 0.0 {
        let _same = gradient.f_sub_scalar_(options.label_smoothing / classes as f64)?;
    }
    let hits = at_label.f_full_like(-hit)?;
    let _same = gradient.f_scatter_add_(1, &target, &hits)?;
    if let Some(slope) = slope {
        let _same = gradient.f_mul_(&slope)?;
    }
    // Scaled and rounded in one pass.
    let _same = gradient.f_mul_out(logits, &Tensor::from(scale))?;
    let _same = logits.f_masked_fill_(&ignored, 0.0)?;
    Ok(sum)
}

/// The number of bytes that [`loss_and_gradient`] takes for each logit, in addition to the logits.
#[doc(hidden)]
pub const BYTES_PER_LOGIT: usize = 8;

/// Returns the logits in at least f32.
fn widened(logits: &Tensor) -> Result<Tensor> {
    Ok(match logits.kind() {
        Kind::Half | Kind::BFloat16 => logits.f_to_kind(Kind::Float)?,
        _ => logits.shallow_clone(),
    })
}

#[cfg(test)]
mod tests {
    use overdrive_profiling::OperatorCounts;
    use tch::Device;

    use super::*;

    #[test]
    fn a_chunk_of_logits_is_read_and_written_few_times() {
        let (rows, classes) = (64, 4096);
        let logits = Tensor::randn([rows, classes], (Kind::Float, Device::Cpu));
        let mut logits = logits.to_kind(Kind::BFloat16);
        let labels = Tensor::randint(classes, [rows], (Kind::Int64, Device::Cpu));
        let options = CrossEntropyOptions::default();
        let counts = OperatorCounts::new();
        let _ = loss_and_gradient(&mut logits, &labels, &options, 0.5).expect("memory");
        let bytes = counts.bytes() as f64 / (rows * classes) as f64;
        // The scale is a number on the host.
        let launches = counts.launches() - counts.by_name()["aten::zeros"];
        println!("{launches} launches, {bytes:.1} B a logit");
        // Before: 20 and 72 B, without the passes inside of `logsumexp`. `scatter_add_` counts as one over all logits
        // in both, and touches one of each row.
        assert_eq!(launches, 14, "{:?}", counts.by_name());
        assert!(bytes < 45.0, "{bytes}");
    }
}
