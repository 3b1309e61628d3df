//! Training of the small model.

use anyhow::{Result, anyhow};
use overdrive::attention::PackedLengths;
use overdrive::optim::{AdamW, AdamWConfig, ClipOptions, Optimizer, ParamGroup, clip_grad_norm};
use overdrive::precision::{GradScaler, Precision};
use overdrive::transformer::{CausalLm, ForwardInput, LabelShift};
use tch::Tensor;

/// Returns the error of a benchmark's function as one of this program.
pub(crate) fn of_step<T>(result: overdrive_benches::StepResult<T>) -> Result<T> {
    result.map_err(|error| anyhow!("{error}"))
}

/// Returns the mean loss of a batch in a precision.
pub(crate) fn loss(model: &CausalLm, ids: &Tensor, precision: Precision) -> Result<Tensor> {
    let size = ids.size();
    // Each row has one label less than tokens.
    let count = usize::try_from(size[0] * (size[1] - 1))?;
    let _autocast = precision.autocast(ids.device())?;
    let input = ForwardInput::new(ids).with_label_count(count);
    let output = model.loss_of(input, ids, LabelShift::HuggingFace)?;
    Ok(output.mean()?)
}

/// Returns the mean loss of sequences of these lengths in the one row of `ids`. Their bounds are made here, as in a loop
/// of training.
pub(crate) fn packed_loss(
    model: &CausalLm,
    ids: &Tensor,
    lengths: &[i64],
    precision: Precision,
) -> Result<Tensor> {
    let count = usize::try_from(ids.size()[1] - 1)?;
    let sequences = PackedLengths::from_lengths(lengths, ids.device())?;
    let _autocast = precision.autocast(ids.device())?;
    let input = ForwardInput::new(ids)
        .with_label_count(count)
        .with_sequences(&sequences);
    let output = model.loss_of(input, ids, LabelShift::HuggingFace)?;
    Ok(output.mean()?)
}

/// A model's parameters in training.
pub(crate) struct Trainer {
    pub(crate) optimizer: AdamW,
    pub(crate) scaler: Option<GradScaler>,
    precision: Precision,
}

impl Trainer {
    pub(crate) fn new(parameters: Vec<(String, Tensor)>, precision: Precision) -> Result<Self> {
        let config = AdamWConfig {
            learning_rate: 3e-3,
            ..AdamWConfig::default()
        };
        Ok(Self {
            optimizer: AdamW::new(vec![ParamGroup::new("all", parameters)], config)?,
            scaler: precision.new_scaler()?,
            precision,
        })
    }

    /// Runs a step and returns its loss, which is still on the device.
    pub(crate) fn step(&mut self, model: &CausalLm, ids: &Tensor) -> Result<Tensor> {
        self.step_with(loss(model, ids, self.precision)?)
    }

    /// Runs a step with this loss and returns it, still on the device.
    pub(crate) fn step_with(&mut self, loss: Tensor) -> Result<Tensor> {
        match &mut self.scaler {
            None => {
                loss.f_backward()?;
                let _norm =
                    clip_grad_norm(&self.optimizer.parameters(), 1.0, ClipOptions::default())?;
                self.optimizer.step()?;
            }
            Some(scaler) => {
                scaler.scale(&loss)?.f_backward()?;
                scaler.unscale_(&self.optimizer)?;
                let _norm =
                    clip_grad_norm(&self.optimizer.parameters(), 1.0, ClipOptions::default())?;
                scaler.step(&mut self.optimizer)?;
                scaler.update()?;
            }
        }
        self.optimizer.zero_grad()?;
        Ok(loss.f_detach()?)
    }

    /// Runs steps on one batch and returns the first and the last loss.
    pub(crate) fn fit(
        &mut self,
        model: &CausalLm,
        ids: &Tensor,
        steps: usize,
    ) -> Result<(f64, f64)> {
        let mut losses = Vec::new();
        for _ in 0..steps {
            losses.push(self.step(model, ids)?);
        }
        let read = |loss: Option<&Tensor>| -> Result<f64> {
            Ok(loss
                .ok_or_else(|| anyhow!("no step"))?
                .f_double_value(&[])?)
        };
        Ok((read(losses.first())?, read(losses.last())?))
    }
}
