//! The validation loss.

use overdrive_distributed::ProcessGroup;
use overdrive_precision::Precision;
use overdrive_transformer::CausalLm;

use crate::{Result, TrainBatch};

/// The mean negative log-likelihood, in nats a token, over all labels of `batches`, without
/// gradients.
///
/// # Errors
/// When a batch cannot be read or the forward pass fails.
pub fn evaluate<B: TrainBatch>(
    model: &CausalLm,
    batches: impl Iterator<Item = overdrive_datasets::Result<B>>,
    precision: Precision,
) -> Result<f64> {
    evaluate_in(&ProcessGroup::single(), model, batches, precision)
}

/// The same over the labels of all processes: each brings its part of the batches, however many, and
/// gets the same mean.
///
/// # Errors
/// As [`evaluate`], and when a process is lost.
pub fn evaluate_in<B: TrainBatch>(
    group: &ProcessGroup,
    model: &CausalLm,
    batches: impl Iterator<Item = overdrive_datasets::Result<B>>,
    precision: Precision,
) -> Result<f64> {
    let _no_grad = tch::no_grad_guard();
    let device = model.device();
    let (mut sum, mut tokens) = (0.0, 0);
    for batch in batches {
        let batch = batch?;
        let loss = precision.autocast(device, || batch.loss(model))??;
        sum += f64::try_from(loss.sum)?;
        tokens += loss.tokens;
    }
    let [sum, tokens] = group.sums([sum, tokens as f64])?;
    Ok(sum / tokens.max(1.0))
}
