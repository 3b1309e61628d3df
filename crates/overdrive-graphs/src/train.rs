//! A whole training step in one CUDA graph: micro-batches, backward, clipping, optimizer.

use overdrive_accumulation::{AccumulationConfig, DeviceAccumulator, DeviceLoss, DeviceStep};
use overdrive_core::{Error as CommonError, check_at_least, check_option};
use overdrive_optim::{AdamW, Optimizer};
use overdrive_sys::storage::bump_versions;
use tch::{Device, Tensor};

use crate::error::cuda_index;
use crate::{BareGraph, CaptureOptions, Error, Result, WorkError};

/// A training step without decisions on the host: forward and backward of each micro-batch, gradients of the
/// token-weighted mean loss, clipping, AdamW. It runs on any device, captured ([`TrainGraph`]) or not.
pub struct TrainStep<F> {
    /// The input tensors of each micro-batch, at fixed addresses.
    inputs: Vec<Vec<Tensor>>,
    loss: F,
    accumulator: DeviceAccumulator,
    optimizer: AdamW,
    device: Device,
}

impl<F, E> TrainStep<F>
where
    F: FnMut(&[Tensor]) -> std::result::Result<DeviceLoss, E>,
    E: Into<WorkError>,
{
    /// Creates a step whose micro-batches are tensors of the dtypes and shapes of `example`, on the device of the
    /// optimizer's parameters. `loss` computes the loss of one micro-batch from them. The optimizer must be
    /// [capturable](overdrive_optim::AdamWConfig::capturable).
    ///
    /// # Errors
    /// [`Error::Common`] for no micro-batches, and for an optimizer that is not capturable, has no parameters or has
    /// parameters on several devices; errors of libtorch if memory runs out.
    pub fn new(
        example: &[Tensor],
        loss: F,
        optimizer: AdamW,
        config: AccumulationConfig,
    ) -> Result<Self> {
        let micro_batches = config.gradient_accumulation_steps;
        check_at_least("gradient_accumulation_steps", micro_batches, 1)?;
        let capturable = optimizer.config().capturable;
        check_option(
            capturable,
            "capturable",
            capturable,
            "true for a step that a CUDA graph captures",
        )?;
        let device = device_of(&optimizer)?;
        let zeros_like = |tensor: &Tensor| -> Result<Tensor> {
            Ok(Tensor::f_zeros(tensor.size(), (tensor.f_kind()?, device))?)
        };
        let inputs = (0..micro_batches)
            .map(|_| example.iter().map(zeros_like).collect::<Result<Vec<_>>>())
            .collect::<Result<_>>()?;
        Ok(TrainStep {
            inputs,
            loss,
            accumulator: DeviceAccumulator::new(config)?,
            optimizer,
            device,
        })
    }

    /// Copies a micro-batch to the tensors that the next step reads.
    ///
    /// # Errors
    /// [`Error::Common`] if there is no such micro-batch, or dtypes or shapes differ from the example's.
    pub fn load(&mut self, micro_batch: usize, tensors: &[Tensor]) -> Result<()> {
        let count = self.inputs.len();
        let expected = format!("below {count}, the number of micro-batches");
        check_option(micro_batch < count, "micro_batch", micro_batch, expected)?;
        let inputs = &mut self.inputs[micro_batch];
        let expected = format!("{}, the number of tensors of the example", inputs.len());
        check_option(
            inputs.len() == tensors.len(),
            "tensors",
            tensors.len(),
            expected,
        )?;
        // Checks all tensors before it copies any.
        for (index, (to, from)) in inputs.iter().zip(tensors).enumerate() {
            let name = || format!("tensor {index} of micro-batch {micro_batch}");
            if to.f_kind()? != from.f_kind()? {
                let expected = format!("{:?}, as in the example", to.f_kind()?);
                return Err(CommonError::dtype(name(), from.f_kind()?, expected).into());
            }
            if to.size() != from.size() {
                let expected = format!("{:?}, as in the example", to.size());
                return Err(CommonError::shape(name(), from.size(), expected).into());
            }
        }
        for (to, from) in inputs.iter_mut().zip(tensors) {
            to.f_copy_(from)?;
        }
        Ok(())
    }

    /// Runs the step without a graph.
    ///
    /// # Errors
    /// [`Error::Work`] with the error of the loss function, [`Error::NoGradient`], and errors of libtorch.
    pub fn run(&mut self) -> Result<DeviceStep> {
        // A step that failed halfway, or the caller's own backward, may have left gradients.
        self.accumulator.abandon(&mut self.optimizer)?;
        for tensors in &self.inputs {
            let loss = (self.loss)(tensors).map_err(|source| Error::Work {
                source: source.into(),
            })?;
            self.accumulator.backward(&loss)?;
        }
        // The optimizer would skip such a parameter, and a graph would never train it.
        for (name, parameter) in self.optimizer.named_parameters() {
            if !parameter.f_grad()?.defined() {
                return Err(Error::NoGradient {
                    parameter: name.to_owned(),
                });
            }
        }
        Ok(self.accumulator.step(&mut self.optimizer)?)
    }

    /// Returns the optimizer, for schedules and snapshots.
    pub fn optimizer(&mut self) -> &mut AdamW {
        &mut self.optimizer
    }

    /// Returns every tensor that a step changes: parameters and the optimizer's state.
    fn changed_tensors(&self) -> Result<Vec<Tensor>> {
        let mut changed = self.optimizer.parameters();
        changed.extend(self.optimizer.state_dict()?.tensors.into_values());
        Ok(changed)
    }
}

/// Returns the device of all parameters.
fn device_of(optimizer: &AdamW) -> Result<Device> {
    let parameters: Vec<(&str, Tensor)> = optimizer.named_parameters().collect();
    let count = parameters.len();
    check_option(count > 0, "parameters", count, "at least one")?;
    let device = parameters[0].1.device();
    match parameters
        .iter()
        .find(|(_, tensor)| tensor.device() != device)
    {
        None => Ok(device),
        Some((name, tensor)) => {
            let expected = format!("on {device:?}, since a captured step uses one device");
            Err(CommonError::device((*name).to_owned(), tensor.device(), expected).into())
        }
    }
}

/// A [`TrainStep`] as one CUDA graph.
pub struct TrainGraph<F> {
    // Fields are dropped in order: the graph before the tensors that it reads and writes.
    graph: BareGraph<DeviceStep>,
    /// The step that was captured, with the tensors that `loss` holds.
    step: TrainStep<F>,
}

impl<F, E> TrainGraph<F>
where
    F: FnMut(&[Tensor]) -> std::result::Result<DeviceLoss, E>,
    E: Into<WorkError>,
{
    /// Captures the step. Load the first micro-batches before: the warm-ups train on them and are then undone, by
    /// copying parameters and the optimizer's state to the host before and back afterwards.
    ///
    /// Dropout is captured with its generator, so each replay draws new random numbers.
    ///
    /// # Errors
    /// [`Error::NeedsCuda`] if the parameters are not on a CUDA device; else as for
    /// [`CudaGraph::capture`](crate::CudaGraph::capture).
    pub fn capture(mut step: TrainStep<F>, options: CaptureOptions) -> Result<Self> {
        let device = step.device;
        cuda_index(device)?;
        let changed = step.changed_tensors()?;
        // Copies to the host, so that the GPU need not hold parameters and states twice.
        let to_host = |tensor: &Tensor| -> Result<Tensor> {
            Ok(tensor
                .f_detach()?
                .f_to_device_(Device::Cpu, tensor.f_kind()?, false, true)?)
        };
        let before: Vec<Tensor> = changed.iter().map(to_host).collect::<Result<_>>()?;
        // cuBLAS makes its workspace and libtorch its kernels in the first run, which a capture cannot contain.
        let options = CaptureOptions {
            warm_ups: options.warm_ups.max(1),
        };
        let captured = BareGraph::capture(device, options, None, || step.run());
        // Undoes the warm-ups even if the capture failed, so that the caller's parameters are unchanged.
        let _no_grad = tch::no_grad_guard();
        for (tensor, before) in changed.iter().zip(&before) {
            tensor.shallow_clone().f_copy_(before)?;
        }
        Ok(TrainGraph {
            graph: captured?,
            step,
        })
    }

    /// Copies a micro-batch to the tensors that the next step reads.
    ///
    /// # Errors
    /// As for [`TrainStep::load`].
    pub fn load(&mut self, micro_batch: usize, tensors: &[Tensor]) -> Result<()> {
        self.step.load(micro_batch, tensors)
    }

    /// Replays the step. The next replay overwrites the tensors of the result.
    ///
    /// # Errors
    /// Errors of libtorch.
    pub fn step(&mut self) -> Result<&DeviceStep> {
        let step = self.graph.replay()?;
        // A replay counts no change of the parameters.
        bump_versions(&self.step.optimizer.parameters())?;
        Ok(step)
    }

    /// Returns the optimizer, for schedules and snapshots. The next replay uses its learning rates, and continues
    /// from a state that is loaded into it.
    pub fn optimizer(&mut self) -> &mut AdamW {
        &mut self.step.optimizer
    }

    /// Returns the size of the graph's memory pool in bytes: gradients, and the activations and intermediate results of
    /// the largest micro-batch.
    pub fn pool_bytes(&self) -> u64 {
        self.graph.pool_bytes()
    }
}

impl<F> std::fmt::Debug for TrainStep<F> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("TrainStep")
            .field("config", self.accumulator.config())
            .finish_non_exhaustive()
    }
}

impl<F> std::fmt::Debug for TrainGraph<F> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("TrainGraph")
            .field("graph", &self.graph)
            .field("step", &self.step)
            .finish()
    }
}
