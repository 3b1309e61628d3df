//! The validation loss.

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
    let _no_grad = tch::no_grad_guard();
    let device = model.device();
    let (mut sum, mut tokens) = (0.0, 0);
    for batch in batches {
        let batch = batch?;
        let loss = precision.autocast(device, || batch.loss(model))??;
        sum += f64::try_from(loss.sum)?;
        tokens += loss.tokens;
    }
    Ok(sum / tokens.max(1) as f64)
}
