//! The forward and backward pass of a micro-batch in one CUDA graph.

use std::any::{Any, TypeId};

use overdrive_sys::op::{Value, call};
use overdrive_sys::{grad, random};
use tch::{Device, Kind, Tensor};

use crate::{BareGraph, CaptureOptions, Error, Result, WorkError};

/// The forward and backward passes of micro-batches as CUDA graphs, one for each kind of micro-batch: what
/// `torch.cuda.make_graphed_callables` is for a model and its loss. Clipping and optimizer stay outside, so that any
/// optimizer works.
///
/// A replay adds the gradients of the parameters to those that they have, as a backward pass does. The gradients lie in
/// buffers of fixed addresses, which the next replay zeroes and hands to the parameters again if an optimizer has dropped
/// them. On a device without CUDA graphs, each replay runs the loss and its backward pass again, with the same tensors as
/// inputs: numbers and errors are those of the graph, without the gain.
///
/// ```
/// use overdrive_graphs::{BackwardGraphs, Error, MicroBatchKey};
/// use tch::{Device, Kind, Tensor};
///
/// # fn main() -> Result<(), Error> {
/// let device = Device::cuda_if_available();
/// let weight = Tensor::ones([3], (Kind::Float, device)).set_requires_grad(true);
/// let mut graphs = BackwardGraphs::new(vec![weight.shallow_clone()])?;
/// let loss = |x: &Tensor| (&weight * x).f_sum(Kind::Float);
/// for numbers in [[1.0f32, 2.0, 3.0], [4.0, 5.0, 6.0]] {
///     let batch = Tensor::from_slice(&numbers).to_device(device);
///     let inputs = [batch.shallow_clone()];
///     let key = MicroBatchKey::new::<Tensor>(&inputs, &[]);
///     if !graphs.contains(&key) {
///         graphs.capture(key.clone(), batch, &inputs, loss).map_err(|(error, _batch)| error)?;
///     }
///     println!("loss {}", graphs.replay(&key, &inputs, 0.5, loss)?.double_value(&[]));
/// }
/// assert_eq!(weight.grad(), Tensor::from_slice(&[2.5f32, 3.5, 4.5]).to_device(device));
/// # Ok(())
/// # }
/// ```
pub struct BackwardGraphs {
    // Fields are dropped in order: the graphs before the tensors that they write.
    passes: Vec<Pass>,
    parameters: Vec<Tensor>,
    /// The addresses of the parameters in the graphs.
    addresses: Vec<usize>,
    /// The buffer of each parameter's gradient; `None` until a captured pass reaches the parameter.
    gradients: Vec<Option<Tensor>>,
    /// The factor of the loss, an f64 scalar on the device, rounded to the dtype of the loss as a number would be.
    weight: Tensor,
    device: Device,
}

/// A captured pass.
struct Pass {
    // Dropped before what it reads.
    /// The loss, and the graph that computes it; `None` on a device without CUDA graphs.
    graph: Option<BareGraph<Tensor>>,
    key: MicroBatchKey,
    /// The tensors of `batch` that a replay reads.
    inputs: Vec<Tensor>,
    /// The micro-batch that was captured.
    batch: Box<dyn Any>,
    /// The positions of the parameters that the loss depends on.
    reached: Vec<usize>,
}

/// The properties of a micro-batch that are constants in a graph.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MicroBatchKey {
    batch: TypeId,
    inputs: Vec<(Kind, Vec<i64>)>,
    numbers: Vec<i64>,
}

impl MicroBatchKey {
    /// Returns the key of a micro-batch of type `B` from the tensors that the loss reads, and the numbers on the host that
    /// it depends on, such as a count of labels.
    pub fn new<B: 'static>(inputs: &[Tensor], numbers: &[i64]) -> Self {
        Self {
            batch: TypeId::of::<B>(),
            inputs: inputs.iter().map(layout).collect(),
            numbers: numbers.to_vec(),
        }
    }
}

impl BackwardGraphs {
    /// Creates graphs for a model with these trainable parameters, which are all on one device.
    ///
    /// # Errors
    /// [`Error::Common`] if there are no parameters, or they are on several devices.
    pub fn new(parameters: Vec<Tensor>) -> Result<Self> {
        let count = parameters.len();
        overdrive_core::check_option(count > 0, "parameters", count, "at least one")?;
        let device = parameters[0].device();
        let elsewhere = parameters.iter().find(|one| one.device() != device);
        if let Some(elsewhere) = elsewhere {
            let expected = format!("on {device:?}, since a graph uses one device");
            let name = "a parameter";
            return Err(overdrive_core::Error::device(name, elsewhere.device(), expected).into());
        }
        Ok(Self {
            passes: Vec::new(),
            addresses: addresses(&parameters),
            gradients: parameters.iter().map(|_| None).collect(),
            parameters,
            weight: Tensor::f_ones([0i64; 0], (Kind::Double, device))?,
            device,
        })
    }

    /// Returns `true` if the pass of such micro-batches is captured. Forgets all passes if a parameter's memory was
    /// replaced, since a graph would use the old memory.
    pub fn contains(&mut self, key: &MicroBatchKey) -> bool {
        let now = addresses(&self.parameters);
        if now != self.addresses {
            self.passes.clear();
            self.addresses = now;
        }
        self.position(key).is_some()
    }

    /// Returns the number of captured passes.
    pub fn len(&self) -> usize {
        self.passes.len()
    }

    /// Returns `true` if no pass is captured.
    pub fn is_empty(&self) -> bool {
        self.passes.is_empty()
    }

    /// Returns the number of bytes that the graphs' memory pools and the buffers of gradients hold.
    pub fn bytes(&self) -> u64 {
        let graphs = self.passes.iter().filter_map(|pass| pass.graph.as_ref());
        let gradients = self.gradients.iter().flatten();
        let bytes = |tensor: &Tensor| (tensor.numel() * tensor.kind().elt_size_in_bytes()) as u64;
        graphs.map(BareGraph::pool_bytes).sum::<u64>() + gradients.map(bytes).sum::<u64>()
    }

    fn position(&self, key: &MicroBatchKey) -> Option<usize> {
        self.passes.iter().position(|pass| pass.key == *key)
    }

    /// Captures the pass of `batch`, whose tensors `inputs` are those of `key`. `loss` is run several times, and nothing
    /// remains of these runs: gradients and random states are restored. It computes a loss of one element and must read
    /// nothing of the device on the host. The graph keeps the batch.
    ///
    /// # Errors
    /// [`Error::Work`] with the error of `loss`, [`Error::CannotCapture`] if it fails only in the capture. The batch is
    /// returned, so that its pass can be run without a graph.
    pub fn capture<B: 'static, E: Into<WorkError>>(
        &mut self,
        key: MicroBatchKey,
        batch: B,
        inputs: &[Tensor],
        mut loss: impl FnMut(&B) -> std::result::Result<Tensor, E>,
    ) -> std::result::Result<(), (Error, B)> {
        match self.try_capture(|| loss(&batch)) {
            Ok((graph, reached)) => {
                self.passes.push(Pass {
                    graph,
                    key,
                    inputs: inputs.iter().map(Tensor::shallow_clone).collect(),
                    batch: Box::new(batch),
                    reached,
                });
                Ok(())
            }
            Err(error) => Err((error, batch)),
        }
    }

    fn try_capture<E: Into<WorkError>>(
        &mut self,
        mut loss: impl FnMut() -> std::result::Result<Tensor, E>,
    ) -> Result<(Option<BareGraph<Tensor>>, Vec<usize>)> {
        let before = Before::take(&self.parameters, self.device)?;
        let captured = self.capture_between(&mut loss);
        // Also after a failed capture, so that the caller's own backward pass continues from the same state.
        before.restore(&self.parameters)?;
        captured
    }

    /// Captures the pass. The caller restores gradients and random states.
    fn capture_between<E: Into<WorkError>>(
        &mut self,
        loss: &mut impl FnMut() -> std::result::Result<Tensor, E>,
    ) -> Result<(Option<BareGraph<Tensor>>, Vec<usize>)> {
        // Which parameters get a gradient: an optimizer skips the others.
        self.parameters.iter().try_for_each(grad::clear)?;
        let _loss = pass(&self.weight, loss)?;
        let mut reached = Vec::new();
        for (index, parameter) in self.parameters.iter().enumerate() {
            let gradient = parameter.f_grad()?;
            if gradient.defined() {
                reached.push(index);
                let buffer = &mut self.gradients[index];
                if buffer.is_none() {
                    *buffer = Some(gradient.f_zeros_like()?);
                }
            }
        }
        if !matches!(self.device, Device::Cuda(_)) {
            return Ok((None, reached));
        }
        // In a capture, backward must add to the buffers instead of making new gradients.
        self.hand_out(&reached)?;
        // Only one graph runs at a time, so all of them share the memory of the largest.
        let pool_of = self.passes.first().and_then(|pass| pass.graph.as_ref());
        // One more run on the stream of the capture: libraries have a workspace for each stream.
        let options = CaptureOptions { warm_ups: 1 };
        let work = || pass(&self.weight, loss);
        let graph = BareGraph::capture(self.device, options, pool_of, work)?;
        Ok((Some(graph), reached))
    }

    /// Gives the parameters at `reached` their buffers as gradients, with the values that the gradients have now.
    fn hand_out(&self, reached: &[usize]) -> Result<()> {
        let _no_grad = tch::no_grad_guard();
        let mut dropped = Vec::new();
        for &index in reached {
            let (parameter, Some(buffer)) = (&self.parameters[index], &self.gradients[index])
            else {
                continue;
            };
            let gradient = parameter.f_grad()?;
            if !gradient.defined() {
                dropped.push(buffer.shallow_clone());
            } else if gradient.data_ptr() == buffer.data_ptr() {
                continue;
            } else {
                buffer.shallow_clone().f_copy_(&gradient)?;
            }
            grad::set(parameter, buffer)?;
        }
        if !dropped.is_empty() {
            call("aten::_foreach_zero_", "", &[Value::Tensors(&dropped)])?;
        }
        Ok(())
    }

    /// Copies `inputs` into the captured batch of the same key, and adds the gradients of `weight` times its loss. Returns
    /// the loss without the factor, a tensor of its own. `loss` must be the one that was captured; it runs only on a
    /// device without CUDA graphs.
    ///
    /// # Errors
    /// [`Error::Common`] if the pass is not captured, or `inputs` are not those of `key`; [`Error::Work`] with the error of
    /// `loss`, and errors of libtorch.
    pub fn replay<B: 'static, E: Into<WorkError>>(
        &mut self,
        key: &MicroBatchKey,
        inputs: &[Tensor],
        weight: f64,
        mut loss: impl FnMut(&B) -> std::result::Result<Tensor, E>,
    ) -> Result<Tensor> {
        let captured = self.position(key).map(|position| &self.passes[position]);
        let known = captured.and_then(|pass| Some((pass, pass.batch.downcast_ref::<B>()?)));
        let Some((captured, batch)) = known else {
            let expected = "that of a captured pass; capture the pass before it is replayed";
            return Err(overdrive_core::Error::option("key", format!("{key:?}"), expected).into());
        };
        if !inputs.iter().map(layout).eq(key.inputs.iter().cloned()) {
            let found: Vec<_> = inputs.iter().map(layout).collect();
            let expected = format!("{:?}, those of the key", key.inputs);
            return Err(
                overdrive_core::Error::option("inputs", format!("{found:?}"), expected).into(),
            );
        }
        self.hand_out(&captured.reached)?;
        {
            let _no_grad = tch::no_grad_guard();
            let _ = self.weight.shallow_clone().f_fill_(weight)?;
            for (to, from) in captured.inputs.iter().zip(inputs) {
                to.shallow_clone().f_copy_(from)?;
            }
        }
        let found = match &captured.graph {
            Some(graph) => graph.replay()?.shallow_clone(),
            None => pass(&self.weight, &mut || loss(batch))?,
        };
        // The next replay overwrites the graph's own.
        copied(&found)
    }
}

/// Runs a forward and backward pass with the factor `weight`, and returns the loss.
fn pass<E: Into<WorkError>>(
    weight: &Tensor,
    loss: &mut impl FnMut() -> std::result::Result<Tensor, E>,
) -> Result<Tensor> {
    let loss = loss().map_err(|source| Error::Work {
        source: source.into(),
    })?;
    if loss.numel() != 1 {
        let expected = "one element: the sum over the tokens (Reduction::Sum)";
        return Err(overdrive_core::Error::shape("loss", loss.size(), expected).into());
    }
    loss.f_mul(&weight.f_to_kind(loss.kind())?)?.f_backward()?;
    Ok(loss.f_detach()?)
}

/// The state before a capture.
struct Before {
    gradients: Vec<Option<Tensor>>,
    /// The random states of the CPU and of the device.
    random: Vec<(Device, Tensor)>,
}

impl Before {
    fn take(parameters: &[Tensor], device: Device) -> Result<Self> {
        let gradient = |parameter: &Tensor| -> Result<Option<Tensor>> {
            let gradient = parameter.f_grad()?;
            // A copy: the capture adds to the buffer that this may be.
            gradient.defined().then(|| copied(&gradient)).transpose()
        };
        let mut devices = vec![Device::Cpu];
        devices.extend((device != Device::Cpu).then_some(device));
        let state = |device: Device| Ok((device, random::state(device)?));
        Ok(Self {
            gradients: parameters.iter().map(gradient).collect::<Result<_>>()?,
            random: devices.into_iter().map(state).collect::<Result<_>>()?,
        })
    }

    fn restore(self, parameters: &[Tensor]) -> Result<()> {
        for (parameter, gradient) in parameters.iter().zip(&self.gradients) {
            match gradient {
                Some(gradient) => grad::set(parameter, gradient)?,
                None => grad::clear(parameter)?,
            }
        }
        for (device, state) in &self.random {
            random::set_state(*device, state)?;
        }
        Ok(())
    }
}

/// Returns the dtype and the shape of a tensor.
fn layout(tensor: &Tensor) -> (Kind, Vec<i64>) {
    (tensor.kind(), tensor.size())
}

fn copied(tensor: &Tensor) -> Result<Tensor> {
    let _no_grad = tch::no_grad_guard();
    let mut copy = tensor.f_empty_like()?;
    copy.f_copy_(tensor)?;
    Ok(copy)
}

fn addresses(tensors: &[Tensor]) -> Vec<usize> {
    tensors.iter().map(|one| one.data_ptr() as usize).collect()
}

impl std::fmt::Debug for BackwardGraphs {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("BackwardGraphs")
            .field("passes", &self.passes.len())
            .field("device", &self.device)
            .finish_non_exhaustive()
    }
}
