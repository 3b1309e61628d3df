//! A whole training step, captured: micro-batches, backward, clipping, optimizer.

use overdrive_optim::{ClipOptions, clip_grad_norm};
use overdrive_sys::op::{Value, call};
use tch::{Kind, Tensor};

use crate::{CapturableAdamW, CaptureOptions, CudaGraph, Error, Result, WorkError};

/// What one micro-batch adds to the loss, both as scalars on the device: their quotient over all
/// micro-batches is the mean.
#[derive(Debug)]
pub struct WeightedLoss {
    /// The sum of the losses of all tokens (or samples).
    pub sum: Tensor,
    /// How many there are.
    pub weight: Tensor,
}

impl WeightedLoss {
    /// The summed cross-entropy of `logits (B, T, V)` against `targets (B, T)`, the token that comes after
    /// each, with the number of those that are not [`IGNORE_INDEX`](overdrive_transformer::IGNORE_INDEX).
    /// Unlike `CausalLm::loss` it reads nothing back to the host.
    ///
    /// # Errors
    /// When shapes do not fit.
    pub fn cross_entropy(logits: &Tensor, targets: &Tensor) -> Result<WeightedLoss> {
        let ignore = overdrive_transformer::IGNORE_INDEX;
        let classes = logits.size().last().copied().unwrap_or_default();
        let flat = logits.f_reshape([-1, classes])?.f_to_kind(Kind::Float)?;
        let targets = targets.f_reshape([-1])?;
        let weight = targets.f_ne(ignore)?.f_sum(Kind::Float)?;
        let none = None::<&Tensor>;
        let sum = flat.f_cross_entropy_loss(&targets, none, tch::Reduction::Sum, ignore, 0.0)?;
        Ok(WeightedLoss { sum, weight })
    }
}

/// How a [`TrainStep`] works.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct TrainStepConfig {
    /// Micro-batches of a step. Default 1.
    pub micro_batches: usize,
    /// The norm that gradients are clipped to; default `None`: they are not.
    pub max_grad_norm: Option<f64>,
}

impl Default for TrainStepConfig {
    fn default() -> Self {
        TrainStepConfig {
            micro_batches: 1,
            max_grad_norm: None,
        }
    }
}

/// What a step returns, on the device.
#[derive(Debug)]
#[non_exhaustive]
pub struct StepOutput {
    /// The mean loss over all micro-batches, a scalar.
    pub loss: Tensor,
    /// The norm of the gradients before they were clipped; `None` where they are not.
    pub grad_norm: Option<Tensor>,
}

/// A training step that the host decides nothing in: forward and backward of each micro-batch, gradients
/// of their token-weighted mean, clipping, AdamW. It runs on any device, captured ([`TrainGraph`]) or not.
pub struct TrainStep<F> {
    /// Of each micro-batch the tensors that `loss` reads, which never move.
    inputs: Vec<Vec<Tensor>>,
    loss: F,
    optimizer: CapturableAdamW,
    config: TrainStepConfig,
}

impl<F, E> TrainStep<F>
where
    F: FnMut(&[Tensor]) -> std::result::Result<WeightedLoss, E>,
    E: Into<WorkError>,
{
    /// A step whose micro-batches are tensors of the kinds and shapes of `example`, on the device of the
    /// optimizer's parameters. `loss` computes the loss of one from them.
    ///
    /// # Errors
    /// For no micro-batches, or where memory runs out.
    pub fn new(
        example: &[Tensor],
        loss: F,
        optimizer: CapturableAdamW,
        config: TrainStepConfig,
    ) -> Result<Self> {
        if config.micro_batches == 0 {
            return Err(Error::BadArgument {
                what: "micro_batches".to_owned(),
                expected: "at least 1".to_owned(),
                got: "0".to_owned(),
            });
        }
        let device = optimizer.device();
        let place = |tensor: &Tensor| -> Result<Tensor> {
            Ok(Tensor::f_zeros(tensor.size(), (tensor.f_kind()?, device))?)
        };
        let inputs = (0..config.micro_batches)
            .map(|_| example.iter().map(place).collect::<Result<Vec<_>>>())
            .collect::<Result<_>>()?;
        Ok(TrainStep {
            inputs,
            loss,
            optimizer,
            config,
        })
    }

    /// Copies a micro-batch to where the next step reads it.
    ///
    /// # Errors
    /// When there is no such micro-batch, or kinds or shapes differ from the example's.
    pub fn load(&mut self, micro_batch: usize, tensors: &[Tensor]) -> Result<()> {
        load(&mut self.inputs, micro_batch, tensors)
    }

    /// The step, without a graph.
    ///
    /// # Errors
    /// [`Error::Work`] for those of the loss; else libtorch's own.
    pub fn run(&mut self) -> Result<StepOutput> {
        let parameters = self.optimizer.parameters();
        zero_gradients(&parameters)?;
        let (mut sum, mut weight): (Option<Tensor>, Option<Tensor>) = (None, None);
        for tensors in &self.inputs {
            let part = (self.loss)(tensors).map_err(|source| Error::Work {
                source: source.into(),
            })?;
            part.sum.f_backward()?;
            sum = Some(added(sum, &part.sum.f_detach()?)?);
            weight = Some(added(weight, &part.weight.f_detach()?)?);
        }
        let (Some(sum), Some(weight)) = (sum, weight) else {
            // `new` saw to one micro-batch at least.
            return Err(Error::BadArgument {
                what: "micro_batches".to_owned(),
                expected: "at least 1".to_owned(),
                got: "0".to_owned(),
            });
        };
        // A batch in which nothing counts has a loss of 0, not of 0/0.
        let scale = weight.f_clamp_min(1.0)?.f_reciprocal()?;
        scale_gradients(&parameters, &scale)?;
        let grad_norm = self
            .config
            .max_grad_norm
            .map(|bound| clip_grad_norm(&parameters, bound, ClipOptions::default()))
            .transpose()?;
        self.optimizer.step()?;
        Ok(StepOutput {
            loss: sum.f_mul(&scale)?,
            grad_norm,
        })
    }

    /// The optimizer.
    pub fn optimizer(&mut self) -> &mut CapturableAdamW {
        &mut self.optimizer
    }
}

/// A [`TrainStep`] as one CUDA graph.
pub struct TrainGraph<F> {
    // Before what it reads and writes.
    graph: CudaGraph<'static, StepOutput>,
    /// The step that was captured, with the tensors that `loss` holds.
    step: TrainStep<F>,
}

impl<F, E> TrainGraph<F>
where
    F: FnMut(&[Tensor]) -> std::result::Result<WeightedLoss, E>,
    E: Into<WorkError>,
{
    /// Captures the step. The first micro-batches must have been loaded; the warm-ups train on them, and
    /// are undone: parameters and the optimizer's state are copied to the host before and back after.
    ///
    /// Dropout is captured with its generator: each replay draws anew.
    ///
    /// # Errors
    /// [`Error::NeedsCuda`] where the parameters are not on a CUDA device; as [`CudaGraph::capture`].
    pub fn capture(mut step: TrainStep<F>, options: CaptureOptions) -> Result<Self> {
        let device = step.optimizer.device();
        crate::error::cuda_index(device)?;
        let changed = step.optimizer.changed();
        let to_host = |tensor: &Tensor| -> Result<Tensor> {
            Ok(tensor
                .f_detach()?
                .f_to_device_(tch::Device::Cpu, tensor.f_kind()?, false, true)?)
        };
        let before: Vec<Tensor> = changed.iter().map(to_host).collect::<Result<_>>()?;
        // Gradients must be there, at addresses that stay, before they are captured.
        let options = CaptureOptions {
            warm_ups: options.warm_ups.max(1),
        };
        let captured = CudaGraph::capture_borrowed(device, options, || step.run());
        let _no_grad = tch::no_grad_guard();
        for (tensor, before) in changed.iter().zip(&before) {
            tensor.shallow_clone().f_copy_(before)?;
        }
        Ok(TrainGraph {
            graph: captured?,
            step,
        })
    }

    /// Copies a micro-batch to where the next step reads it.
    ///
    /// # Errors
    /// As [`TrainStep::load`].
    pub fn load(&mut self, micro_batch: usize, tensors: &[Tensor]) -> Result<()> {
        self.step.load(micro_batch, tensors)
    }

    /// The step. Its output is overwritten by the next.
    ///
    /// # Errors
    /// libtorch's own.
    pub fn step(&mut self) -> Result<&StepOutput> {
        self.graph.replay()
    }

    /// The optimizer, for schedules and snapshots.
    pub fn optimizer(&mut self) -> &mut CapturableAdamW {
        &mut self.step.optimizer
    }

    /// Bytes of the graph's pool: activations and intermediate results of the largest micro-batch.
    pub fn pool_bytes(&self) -> u64 {
        self.graph.pool_bytes()
    }
}

impl<F> std::fmt::Debug for TrainStep<F> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("TrainStep")
            .field("config", &self.config)
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

fn load(inputs: &mut [Vec<Tensor>], micro_batch: usize, tensors: &[Tensor]) -> Result<()> {
    let count = inputs.len();
    let wrong = |expected: String, got: String| Error::BadArgument {
        what: format!("micro-batch {micro_batch}"),
        expected,
        got,
    };
    let Some(places) = inputs.get_mut(micro_batch) else {
        return Err(wrong(format!("one of {count}"), micro_batch.to_string()));
    };
    let form = |tensors: &[Tensor]| -> Vec<String> {
        let one = |tensor: &Tensor| format!("{:?} {:?}", tensor.kind(), tensor.size());
        tensors.iter().map(one).collect()
    };
    if form(places) != form(tensors) {
        return Err(wrong(form(places).join(", "), form(tensors).join(", ")));
    }
    for (to, from) in places.iter_mut().zip(tensors) {
        to.f_copy_(from)?;
    }
    Ok(())
}

/// Gradients that are there become 0 where they lie.
fn zero_gradients(parameters: &[Tensor]) -> Result<()> {
    let gradients = gradients(parameters)?;
    if !gradients.is_empty() {
        let _no_grad = tch::no_grad_guard();
        call("aten::_foreach_zero_", "", &[Value::Tensors(&gradients)])?;
    }
    Ok(())
}

fn scale_gradients(parameters: &[Tensor], scale: &Tensor) -> Result<()> {
    let gradients = gradients(parameters)?;
    let _no_grad = tch::no_grad_guard();
    let arguments = [Value::Tensors(&gradients), Value::Tensor(scale)];
    call("aten::_foreach_mul_", "Tensor", &arguments)?;
    Ok(())
}

fn gradients(parameters: &[Tensor]) -> Result<Vec<Tensor>> {
    let all = parameters.iter().map(Tensor::f_grad);
    let all: Vec<Tensor> = all.collect::<std::result::Result<_, _>>()?;
    Ok(all.into_iter().filter(Tensor::defined).collect())
}

fn added(sum: Option<Tensor>, part: &Tensor) -> Result<Tensor> {
    Ok(match sum {
        None => part.shallow_clone(),
        Some(sum) => sum.f_add(part)?,
    })
}
