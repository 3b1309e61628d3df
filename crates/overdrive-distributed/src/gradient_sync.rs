//! Data parallel training under a gradient accumulator.

use overdrive_accumulation::{GradientSync, SyncError};
use overdrive_sys::grad;
use tch::{Kind, Tensor};

use crate::{DistributedDataParallel, Error, Pending, ReduceOp, Result};

/// Lets an [`overdrive_accumulation::GradientAccumulator`] reduce its gradients over the ranks: they
/// accumulate on each rank until the last backward of the window, which reduces them while it runs. The loss
/// of a step is then the mean over the tokens of all ranks, however many tokens each rank has.
///
/// Forward passes need not run inside [`forward`](DistributedDataParallel::forward). If they do, those of
/// the micro-batches before the last (`!accumulator.sync_gradients()`) run under
/// [`no_sync`](DistributedDataParallel::no_sync). The buffers of rank 0 are broadcast at the end of each
/// window.
///
/// ```
/// use overdrive_accumulation::{AccumulationConfig, GradientAccumulator, Window};
/// use overdrive_distributed::{
///     DdpConfig, DistributedDataParallel, GroupConfig, init_process_group,
/// };
/// use overdrive_optim::{AdamW, AdamWConfig, decay_groups};
/// use tch::{Kind, Tensor, nn};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let group = init_process_group(GroupConfig::default())?;
/// let store = nn::VarStore::new(group.device());
/// let weight = store.root().ones("weight", &[1]);
/// let mut optimizer = AdamW::new(decay_groups(store.variables(), 0.0), AdamWConfig::default())?;
///
/// let ddp = DistributedDataParallel::from_var_store(&group, &store, DdpConfig::default())?;
/// let config = AccumulationConfig { gradient_accumulation_steps: 2, ..Default::default() };
/// let mut accumulator = GradientAccumulator::with_sync(config, &ddp)?;
/// accumulator.open(Window::new([3, 1]))?; // this rank's tokens in each micro-batch
/// for tokens in [3, 1] {
///     let losses = &weight * Tensor::ones([tokens], (Kind::Float, group.device()));
///     accumulator.backward(&losses.sum(Kind::Float))?;
/// }
/// let step = accumulator.step(&mut optimizer)?;
/// // `step.loss()` is this rank's; that of all:
/// let loss = group.weighted_mean(step.loss()? * step.tokens as f64, step.tokens as f64)?;
/// assert_eq!((loss, step.total_tokens), (1.0, 4));
/// # Ok(())
/// # }
/// ```
impl GradientSync for &DistributedDataParallel {
    fn world_size(&self) -> u64 {
        self.group().world_size() as u64
    }

    fn sum_count(&mut self, count: u64) -> std::result::Result<u64, SyncError> {
        // Exact in f64: no window has 2^53 tokens.
        let sum = self.group().sum(count as f64)?;
        Ok(sum as u64)
    }

    fn before_backward(&mut self, loss: &Tensor, last: bool) -> std::result::Result<(), SyncError> {
        Ok(self.arm(loss, last)?)
    }

    fn synchronize(&mut self, _parameters: &[Tensor]) -> std::result::Result<(), SyncError> {
        if !self.disarm() {
            average(self)?;
        }
        Ok(self.copy_buffers()?)
    }

    fn abandon(&mut self) {
        self.disarm();
    }
}

/// As for a reference, for an accumulator that owns the wrapper.
impl GradientSync for DistributedDataParallel {
    fn world_size(&self) -> u64 {
        (&self).world_size()
    }

    fn sum_count(&mut self, count: u64) -> std::result::Result<u64, SyncError> {
        (&*self).sum_count(count)
    }

    fn before_backward(&mut self, loss: &Tensor, last: bool) -> std::result::Result<(), SyncError> {
        (&*self).before_backward(loss, last)
    }

    fn synchronize(&mut self, parameters: &[Tensor]) -> std::result::Result<(), SyncError> {
        (&*self).synchronize(parameters)
    }

    fn abandon(&mut self) {
        (&*self).abandon();
    }
}

/// Averages gradients that no backward reduced, because the window ended before its last micro-batch.
fn average(ddp: &DistributedDataParallel) -> Result<()> {
    let group = ddp.group();
    let parameters = ddp.parameters();
    if group.world_size() == 1 || parameters.is_empty() {
        return Ok(());
    }
    let mut gradients = Vec::new();
    for (_, parameter) in parameters {
        let gradient = parameter.f_grad()?;
        gradients.push(gradient.defined().then_some(gradient));
    }
    // A rank without a gradient of a parameter takes part with zeros if another rank has one.
    let present: Vec<i64> = gradients.iter().map(|g| i64::from(g.is_some())).collect();
    let present = Tensor::f_from_slice(&present)?.f_to_device(parameters[0].1.device())?;
    group.all_reduce(&present, ReduceOp::Max)?;
    let on_any_rank = Vec::<i64>::try_from(present.f_to_kind(Kind::Int64)?)?;
    let mut pending = Vec::new();
    for (((_, parameter), gradient), on_any_rank) in
        parameters.iter().zip(gradients).zip(on_any_rank)
    {
        if on_any_rank == 0 {
            continue;
        }
        let gradient = match gradient {
            Some(gradient) => gradient,
            None => {
                let zeros = parameter.f_detach()?.f_zeros_like()?;
                grad::set(parameter, &zeros)?;
                zeros
            }
        };
        pending.push(group.all_reduce_async(&gradient, ReduceOp::Avg)?);
    }
    pending.into_iter().try_for_each(Pending::wait)
}

impl DistributedDataParallel {
    /// Prepares a backward of a window; the gradients of the `last` one are reduced.
    fn arm(&self, loss: &Tensor, last: bool) -> Result<()> {
        match (last, self.is_armed()) {
            (true, true) | (false, false) => Ok(()),
            (true, false) => self.arm_after_forward(loss),
            (false, true) => Err(Error::ReducedTooEarly {
                rank: self.group().rank(),
            }),
        }
    }
}
