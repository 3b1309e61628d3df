use overdrive_core::Error;
use overdrive_fused::{CrossEntropyOptions, LinearCrossEntropyOptions, linear_cross_entropy};
use tch::{Kind, Reduction, Tensor};

use crate::Result;

pub use overdrive_core::IGNORE_INDEX;

/// The alignment of labels with tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LabelShift {
    /// `labels[t]` is the target of position `t`, the token at `t + 1`, as data loaders produce that cut `(x, y)`
    /// windows. All positions count.
    Shifted,
    /// `labels[t]` is the token at `t` itself, predicted from position `t - 1`: transformers' convention, where
    /// labels are a copy of the input ids. The first label is not used.
    HuggingFace,
}

/// A loss that can be accumulated over micro-batches of different sizes.
#[derive(Debug)]
#[non_exhaustive]
pub struct LossOutput {
    /// The sum of the negative log-likelihoods (nats) of the counted tokens: a scalar, fp32 or wider.
    pub sum: Tensor,
    /// The number of counted tokens, whose label is not [`IGNORE_INDEX`]: an i64 scalar on the device of the
    /// labels.
    pub count: Tensor,
    /// The load-balancing loss of a mixture of experts, transformers' `aux_loss`, if the configuration has
    /// `output_router_logits`: a scalar. It is already included in `sum`, times `router_aux_loss_coef` and the count.
    pub aux_loss: Option<Tensor>,
}

impl LossOutput {
    /// Returns the number of counted tokens. Synchronizes with the device; a data loader knows the number too.
    ///
    /// # Errors
    /// An error of libtorch.
    pub fn tokens(&self) -> Result<i64> {
        Ok(self.count.f_int64_value(&[])?)
    }

    /// Adds the balancing loss, so that the mean is that of the tokens plus `coefficient` times it.
    pub(crate) fn with_aux_loss(self, aux_loss: Tensor, coefficient: f64) -> Result<LossOutput> {
        let weighted = aux_loss.f_mul_scalar(coefficient)?.f_mul(&self.count)?;
        Ok(LossOutput {
            sum: self.sum.f_add(&weighted)?,
            count: self.count,
            aux_loss: Some(aux_loss),
        })
    }

    /// Returns the mean over the counted tokens, which is transformers' loss; 0 if none was counted (where PyTorch's
    /// mean is NaN, so that one empty batch would ruin a run).
    ///
    /// # Errors
    /// An error of libtorch.
    pub fn mean(&self) -> Result<Tensor> {
        Ok(self.sum.f_div(&self.count.f_clamp_min(1i64)?)?)
    }
}

/// Computes the summed cross-entropy of `logits (B, T, V)` against `labels (B, T)` (i64).
///
/// Low-precision logits are cast to fp32 first, as in transformers. The host reads nothing, so that a CUDA graph can
/// capture the loss.
///
/// # Errors
/// [`Error::Common`](crate::Error::Common) if the shapes do not fit, and libtorch's error if a label is outside
/// `0..V` and not [`IGNORE_INDEX`], on a GPU when the device reports it.
pub fn causal_lm_loss(logits: &Tensor, labels: &Tensor, shift: LabelShift) -> Result<LossOutput> {
    let size = logits.size();
    let &[batch, tokens, classes] = size.as_slice() else {
        return Err(Error::shape("logits", size, "(B, T, V)").into());
    };
    let targets = shifted(labels, &[batch, tokens], shift)?.f_reshape([-1])?;
    let count = targets.f_ne(IGNORE_INDEX)?.f_sum(Kind::Int64)?;
    let flat = logits.f_reshape([-1, classes])?;
    let flat = match flat.kind() {
        Kind::Half | Kind::BFloat16 => flat.f_to_kind(Kind::Float)?,
        _ => flat,
    };
    let sum =
        flat.f_cross_entropy_loss(&targets, None::<&Tensor>, Reduction::Sum, IGNORE_INDEX, 0.0)?;
    Ok(LossOutput {
        sum,
        count,
        aux_loss: None,
    })
}

/// Computes the summed cross-entropy of `hidden (B, T, C)` with the dense `head (V, C)` without holding all logits.
/// `targets` are [`shifted`]; `label_count` is the number of those that count, if it is known.
pub(crate) fn fused_loss(
    hidden: &Tensor,
    head: &Tensor,
    bias: Option<&Tensor>,
    targets: &Tensor,
    label_count: Option<i64>,
) -> Result<LossOutput> {
    let options = LinearCrossEntropyOptions {
        loss: CrossEntropyOptions {
            ignore_index: IGNORE_INDEX,
            reduction: overdrive_fused::Reduction::Sum,
            label_count,
            ..CrossEntropyOptions::default()
        },
        bias,
        ..LinearCrossEntropyOptions::default()
    };
    let output = linear_cross_entropy(hidden, head, targets, &options)?;
    Ok(LossOutput {
        sum: output.loss,
        count: output.count,
        aux_loss: None,
    })
}

/// Returns the target of each position `(B, T)`; `size` is that of the tokens.
pub(crate) fn shifted(labels: &Tensor, size: &[i64], shift: LabelShift) -> Result<Tensor> {
    if labels.size() != size {
        let expected = format!("{size:?}, the shape of the tokens");
        return Err(Error::shape("labels", labels.size(), expected).into());
    }
    if labels.kind() != Kind::Int64 {
        return Err(Error::dtype("labels", labels.kind(), "Int64").into());
    }
    Ok(match shift {
        LabelShift::Shifted => labels.shallow_clone(),
        // Shifting the labels copies T integers a row; slicing the logits would copy T · V values.
        LabelShift::HuggingFace => {
            let ignored = labels.f_narrow(1, 0, 1)?.f_full_like(IGNORE_INDEX)?;
            Tensor::f_cat(&[labels.f_narrow(1, 1, size[1] - 1)?, ignored], 1)?
        }
    })
}
