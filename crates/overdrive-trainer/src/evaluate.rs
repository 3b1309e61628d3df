//! The validation loss.

use overdrive_attention::PackedLengths;
use overdrive_datasets::Batch;
use overdrive_distributed::ProcessGroup;
use overdrive_precision::Precision;
use overdrive_transformer::{CausalLm, ForwardInput, LabelShift, LossOutput};

use crate::Result;

/// The mean negative log-likelihood, in nats a token, over all labels of `batches`, without
/// gradients.
///
/// # Errors
/// When a batch cannot be read or the forward pass fails.
pub fn evaluate(
    model: &CausalLm,
    batches: impl Iterator<Item = overdrive_datasets::Result<Batch>>,
    precision: Precision,
) -> Result<f64> {
    evaluate_in(&ProcessGroup::single(), model, batches, precision)
}

/// The same over the labels of all processes: each brings its part of the batches, however many, and
/// gets the same mean.
///
/// # Errors
/// As [`evaluate`], and when a process is lost.
pub fn evaluate_in(
    group: &ProcessGroup,
    model: &CausalLm,
    batches: impl Iterator<Item = overdrive_datasets::Result<Batch>>,
    precision: Precision,
) -> Result<f64> {
    let _no_grad = tch::no_grad_guard();
    let device = model.device();
    let (mut sum, mut tokens) = (0.0, 0);
    for batch in batches {
        let batch = batch?;
        let loss = precision.autocast(device, || loss_of(model, &batch))??;
        sum += f64::try_from(loss.sum)?;
        tokens += loss.tokens;
    }
    let [sum, tokens] = group.sums([sum, tokens as f64])?;
    Ok(sum / tokens.max(1.0))
}

/// The summed next-token loss of a batch.
///
/// Padding is on the right, where a causal model does not look, and has no labels: no mask is needed,
/// and attention keeps its fastest kernel.
pub(crate) fn loss_of(model: &CausalLm, batch: &Batch) -> Result<LossOutput> {
    let mut input = ForwardInput::new(&batch.input_ids);
    if let Some(positions) = &batch.position_ids {
        input = input.with_position_ids(positions);
    }
    let packed = match batch.sequence_lengths.as_slice() {
        [] => None,
        lengths => Some(PackedLengths::from_lengths(
            lengths,
            batch.input_ids.device(),
        )?),
    };
    if let Some(sequences) = &packed {
        input = input.with_sequences(sequences);
    }
    Ok(model.loss_of(input, &batch.labels, LabelShift::HuggingFace)?)
}
