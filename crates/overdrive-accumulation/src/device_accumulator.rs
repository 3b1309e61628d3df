//! Gradient accumulation whose counts stay on the device.

use overdrive_optim::{ClipOptions, Optimizer, clip_grad_norm, scale_grads};
use tch::{Kind, Tensor};

use crate::accumulator::check_requires_grad;
use crate::{AccumulationConfig, Error, Result};

/// The loss of a micro-batch, with its count on the device.
#[derive(Debug)]
pub struct DeviceLoss {
    /// The sum of the losses of all tokens (or samples), a scalar.
    pub sum: Tensor,
    /// The number of tokens, a scalar of any dtype on the device of `sum`.
    pub count: Tensor,
}

/// The result of a step of a [`DeviceAccumulator`].
#[derive(Debug)]
#[non_exhaustive]
pub struct DeviceStep {
    /// The mean loss per token over all micro-batches, a scalar on the device; 0 without tokens.
    pub mean_loss: Tensor,
    /// The total norm of the gradients before clipping, a scalar on the device; `None` if clipping is off.
    pub grad_norm: Option<Tensor>,
}

/// A [`GradientAccumulator`](crate::GradientAccumulator) for steps that a CUDA graph captures: token counts are
/// tensors, so that the host reads nothing and each replay divides by the counts of its own batches.
///
/// Without tokens it still steps, with gradients of 0, because the host would have to read the count to skip the
/// step. It supports neither a gradient scaler nor several processes.
#[derive(Debug)]
pub struct DeviceAccumulator {
    config: AccumulationConfig,
    /// The sums of the losses and of the counts of the micro-batches so far.
    totals: Option<DeviceLoss>,
}

impl DeviceAccumulator {
    /// Creates an accumulator.
    ///
    /// # Errors
    /// [`crate::Error::Common`] for an option outside its range.
    pub fn new(config: AccumulationConfig) -> Result<Self> {
        config.validate()?;
        Ok(Self {
            config,
            totals: None,
        })
    }

    /// Returns the options.
    #[must_use]
    pub fn config(&self) -> &AccumulationConfig {
        &self.config
    }

    /// Adds the gradients of a micro-batch.
    ///
    /// # Errors
    /// [`Error::NoGradient`] for a sum that requires no gradient, and errors of libtorch.
    pub fn backward(&mut self, loss: &DeviceLoss) -> Result<()> {
        check_requires_grad(&loss.sum)?;
        loss.sum.f_backward()?;
        let (sum, count) = (loss.sum.f_detach()?, loss.count.f_detach()?);
        self.totals = Some(match self.totals.take() {
            None => DeviceLoss { sum, count },
            Some(totals) => DeviceLoss {
                sum: totals.sum.f_add(&sum)?,
                count: totals.count.f_add(&count)?,
            },
        });
        Ok(())
    }

    /// Divides the gradients by the count of all micro-batches, clips them, steps the optimizer, and drops them.
    ///
    /// # Errors
    /// [`Error::NothingAccumulated`] before the first [`backward`](Self::backward), and the errors of clipping and
    /// optimizer.
    pub fn step<O: Optimizer + ?Sized>(&mut self, optimizer: &mut O) -> Result<DeviceStep> {
        let totals = self.totals.take().ok_or(Error::NothingAccumulated)?;
        let parameters = optimizer.parameters();
        // At least 1: a batch without tokens has a loss of 0, not of 0/0.
        let count = totals.count.f_to_kind(Kind::Float)?;
        let weight = count.f_clamp_min(1.0)?.f_reciprocal()?;
        scale_grads(&parameters, &weight)?;
        let grad_norm = self
            .config
            .max_grad_norm
            .map(|max_norm| clip_grad_norm(&parameters, max_norm, ClipOptions::default()))
            .transpose()?;
        optimizer.step()?;
        optimizer.zero_grad()?;
        Ok(DeviceStep {
            mean_loss: totals.sum.f_mul(&weight)?,
            grad_norm,
        })
    }

    /// Drops the current window and its gradients, for example after running out of memory.
    ///
    /// # Errors
    /// [`Error::Optimizer`] with libtorch's error.
    pub fn abandon<O: Optimizer + ?Sized>(&mut self, optimizer: &mut O) -> Result<()> {
        self.totals = None;
        Ok(optimizer.zero_grad()?)
    }
}
