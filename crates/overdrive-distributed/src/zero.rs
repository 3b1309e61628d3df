//! An optimizer whose states are sharded over the ranks (ZeRO stage 1).

use overdrive_optim::{GradScaling, Optimizer, OptimizerId, ParamGroup, StateDict};
use overdrive_sys::storage::bump_versions;
use tch::Tensor;

use crate::{ProcessGroup, ReduceOp, Result};

/// An optimizer that keeps the states of one shard of the parameters on each rank: a rank steps its own
/// parameters and receives the others from the ranks that stepped them
/// (`torch.distributed.optim.ZeroRedundancyOptimizer`; stage 1 of Rajbhandari et al. 2020, arXiv:1910.02054).
///
/// The states of AdamW then take `1 / world_size` of the memory on each rank. Gradients must be the same on
/// all ranks, as after the backward of [`DistributedDataParallel`](crate::DistributedDataParallel). The
/// parameters are then bit for bit those of the unsharded optimizer if it updates each parameter
/// independently, as all of overdrive-optim do.
///
/// ```
/// use overdrive_distributed::{ProcessGroup, ZeroRedundancyOptimizer};
/// use overdrive_optim::{AdamW, AdamWConfig, Optimizer, ParamGroup};
/// use tch::{Device, Kind, nn};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let store = nn::VarStore::new(Device::Cpu);
/// let weight = store.root().ones("weight", &[2]);
/// let groups = vec![ParamGroup::new("all", store.variables().into_iter().collect())];
/// let config = AdamWConfig { learning_rate: 0.1, ..Default::default() };
/// let mut optimizer =
///     ZeroRedundancyOptimizer::new(&ProcessGroup::single(), groups, |own| AdamW::new(own, config))?;
/// weight.sum(Kind::Float).backward();
/// optimizer.step()?;
/// assert!(weight.double_value(&[0]) < 1.0);
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct ZeroRedundancyOptimizer<O> {
    group: ProcessGroup,
    id: OptimizerId,
    /// The optimizer of this rank's shard. It has all groups, so that it knows their learning rates; those of which this
    /// rank steps nothing are empty.
    inner: O,
    /// Every parameter with the rank that steps it, for each parameter group.
    owned: Vec<Vec<(usize, Tensor)>>,
    /// If `true`, the optimizers of all ranks support `step_scaled`. The shards of two ranks may have different
    /// optimizers, and a gradient scaler issues other collectives for one that supports it.
    supports_step_scaled: bool,
}

impl<O: Optimizer> ZeroRedundancyOptimizer<O> {
    /// Shards the parameters and builds the optimizer of this rank's shard, from groups of which some may be empty. All
    /// ranks pass the same groups; the parameters of a group may be in any order.
    ///
    /// # Errors
    /// Those of `build`.
    pub fn new(
        group: &ProcessGroup,
        groups: Vec<ParamGroup>,
        build: impl FnOnce(Vec<ParamGroup>) -> overdrive_optim::Result<O>,
    ) -> Result<Self> {
        let mut groups = groups;
        // A `VarStore` returns its variables in any order; the shards must be the same on all ranks.
        for group in &mut groups {
            group.parameters.sort_by(|(a, _), (b, _)| a.cmp(b));
        }
        let owners = assign_owners(&groups, group.world_size());
        let mut owned = Vec::new();
        let mut own_groups = Vec::new();
        for (number, mut whole) in groups.into_iter().enumerate() {
            let all = std::mem::take(&mut whole.parameters);
            let mut with_owner = Vec::new();
            for (index, (name, tensor)) in all.into_iter().enumerate() {
                let owner = owners[number][index];
                with_owner.push((owner, tensor.shallow_clone()));
                if owner == group.rank() {
                    whole.parameters.push((name, tensor));
                }
            }
            owned.push(with_owner);
            own_groups.push(whole);
        }
        let inner = build(own_groups)?;
        Ok(Self {
            group: group.clone(),
            id: OptimizerId::unique(),
            supports_step_scaled: group.all(inner.supports_step_scaled())?,
            inner,
            owned,
        })
    }

    /// Returns the optimizer of this rank's shard.
    #[must_use]
    pub fn inner(&self) -> &O {
        &self.inner
    }

    /// Returns the number of elements that this rank steps.
    #[must_use]
    pub fn own_elements(&self) -> usize {
        let all = self.owned.iter().flatten();
        all.filter(|(owner, _)| *owner == self.group.rank())
            .map(|(_, tensor)| tensor.numel())
            .sum()
    }

    /// Broadcasts each parameter from the rank that stepped it.
    fn broadcast_parameters(&self) -> Result<()> {
        // All broadcasts are started before the first wait, so that they overlap.
        let pending = self
            .owned
            .iter()
            .flatten()
            .filter(|(_, tensor)| tensor.numel() > 0)
            .map(|(owner, tensor)| self.group.broadcast_async(tensor, *owner))
            .collect::<Result<Vec<_>>>()?;
        pending.into_iter().try_for_each(crate::Pending::wait)?;
        // A broadcast counts no change of a parameter.
        Ok(bump_versions(
            self.owned.iter().flatten().map(|(_, tensor)| tensor),
        )?)
    }
}

/// Returns the owner of each parameter, for each group. The largest parameter comes first, and each goes to
/// the rank with the fewest elements so far.
fn assign_owners(groups: &[ParamGroup], ranks: usize) -> Vec<Vec<usize>> {
    let mut owners: Vec<Vec<usize>> = groups
        .iter()
        .map(|group| vec![0; group.parameters.len()])
        .collect();
    let mut largest: Vec<(usize, usize, usize)> = Vec::new();
    for (number, group) in groups.iter().enumerate() {
        for (index, (_, tensor)) in group.parameters.iter().enumerate() {
            largest.push((tensor.numel(), number, index));
        }
    }
    largest.sort_by_key(|(size, number, index)| (std::cmp::Reverse(*size), *number, *index));
    let mut load = vec![0usize; ranks];
    for (size, number, index) in largest {
        let smallest = (0..ranks)
            .min_by_key(|rank| (load[*rank], *rank))
            .unwrap_or(0);
        load[smallest] += size;
        owners[number][index] = smallest;
    }
    owners
}

/// Converts an error of the group to one of the optimizer, whose trait has no other error type.
fn as_optim(error: crate::Error) -> overdrive_optim::Error {
    match error {
        crate::Error::Optim(error) => error,
        other => overdrive_optim::Error::Tch(tch::TchError::Torch(other.to_string())),
    }
}

impl<O: Optimizer> Optimizer for ZeroRedundancyOptimizer<O> {
    fn id(&self) -> OptimizerId {
        self.id
    }

    fn parameters(&self) -> Vec<Tensor> {
        let all = self.owned.iter().flatten();
        all.map(|(_, tensor)| tensor.shallow_clone()).collect()
    }

    fn parameters_by_group(&self) -> Vec<Vec<Tensor>> {
        let groups = self.owned.iter();
        groups
            .map(|group| {
                group
                    .iter()
                    .map(|(_, tensor)| tensor.shallow_clone())
                    .collect()
            })
            .collect()
    }

    fn step(&mut self) -> overdrive_optim::Result<()> {
        self.inner.step()?;
        self.broadcast_parameters().map_err(as_optim)
    }

    fn supports_step_scaled(&self) -> bool {
        self.supports_step_scaled
    }

    /// Skips the step on all ranks if one of them would skip it.
    fn step_scaled(&mut self, scaling: &GradScaling<'_>) -> overdrive_optim::Result<bool> {
        // The same on all ranks: a rank without a shard would wait in a broadcast that the others do not begin.
        if !self.supports_step_scaled {
            return Ok(false);
        }
        // A copy, because the reduction must not change the scaler's own flag.
        let found_inf = scaling.found_inf.f_add_scalar(0.0)?;
        self.group
            .all_reduce(&found_inf, ReduceOp::Max)
            .map_err(as_optim)?;
        let agreed = GradScaling {
            grad_scale: scaling.grad_scale,
            found_inf: &found_inf,
        };
        let done = self.inner.step_scaled(&agreed)?;
        if done {
            self.broadcast_parameters().map_err(as_optim)?;
        }
        Ok(done)
    }

    /// Clears the gradients of all parameters, including those that other ranks step.
    fn zero_grad(&mut self) -> overdrive_optim::Result<()> {
        for (_, tensor) in self.owned.iter().flatten() {
            overdrive_sys::grad::clear(tensor)?;
        }
        Ok(())
    }

    fn learning_rates(&self) -> Vec<f64> {
        self.inner.learning_rates()
    }

    fn set_learning_rates(&mut self, learning_rates: &[f64]) -> overdrive_optim::Result<()> {
        self.inner.set_learning_rates(learning_rates)
    }

    /// Returns the state of this rank's shard; every rank stores its own, in a file of its own.
    fn state_dict(&self) -> overdrive_optim::Result<StateDict> {
        self.inner.state_dict()
    }

    /// Restores this rank's shard, as the same rank of a group of the same size stored it.
    fn load_state_dict(&mut self, state: &StateDict) -> overdrive_optim::Result<()> {
        self.inner.load_state_dict(state)
    }
}
