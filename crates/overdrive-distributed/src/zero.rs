//! Optimizer states shared out between the ranks (ZeRO stage 1).

use overdrive_optim::{GradScaling, Optimizer, OptimizerId, ParamGroup, StateDict};
use tch::Tensor;

use crate::{ProcessGroup, ReduceOp, Result};

/// An optimizer each rank of which keeps the states of its own part of the parameters, steps those, and
/// gets the others from the ranks that stepped them (`torch.distributed.optim.ZeroRedundancyOptimizer`;
/// stage 1 of Rajbhandari et al. 2020, arXiv:1910.02054).
///
/// AdamW's states then take `1 / world_size` of their memory. Gradients must be the same on all ranks, as
/// after [`DistributedDataParallel`](crate::DistributedDataParallel)'s backward; the parameters are then
/// bit for bit those of the unsharded optimizer, if it treats each parameter by itself (all of
/// overdrive-optim do).
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
    /// Nothing where this rank has no parameter.
    inner: Option<O>,
    /// Every parameter with the rank that steps it, group by group.
    owned: Vec<Vec<(usize, Tensor)>>,
    /// For each group its place in `inner`, if this rank has a part of it.
    places: Vec<Option<usize>>,
    learning_rates: Vec<f64>,
}

impl<O: Optimizer> ZeroRedundancyOptimizer<O> {
    /// Shares the parameters out and builds the optimizer of this rank's part. All ranks pass the same
    /// groups; within each, parameters may come in any order.
    ///
    /// # Errors
    /// Those of `build`.
    pub fn new(
        group: &ProcessGroup,
        groups: Vec<ParamGroup>,
        build: impl FnOnce(Vec<ParamGroup>) -> overdrive_optim::Result<O>,
    ) -> Result<Self> {
        let mut groups = groups;
        for group in &mut groups {
            group.parameters.sort_by(|(a, _), (b, _)| a.cmp(b));
        }
        let owners = share_out(&groups, group.world_size());
        let mut owned = Vec::new();
        let mut own_groups = Vec::new();
        let mut places = Vec::new();
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
            places.push((!whole.parameters.is_empty()).then_some(own_groups.len()));
            if !whole.parameters.is_empty() {
                own_groups.push(whole);
            }
        }
        let inner = if own_groups.is_empty() {
            None
        } else {
            Some(build(own_groups)?)
        };
        let mut optimizer = Self {
            group: group.clone(),
            id: OptimizerId::unique(),
            inner,
            learning_rates: vec![0.0; owned.len()],
            owned,
            places,
        };
        optimizer.agree_on_learning_rates()?;
        Ok(optimizer)
    }

    /// The optimizer of this rank's part; none where there are fewer parameters than ranks.
    #[must_use]
    pub fn inner(&self) -> Option<&O> {
        self.inner.as_ref()
    }

    /// How many elements this rank steps.
    #[must_use]
    pub fn own_elements(&self) -> usize {
        let all = self.owned.iter().flatten();
        all.filter(|(owner, _)| *owner == self.group.rank())
            .map(|(_, tensor)| tensor.numel())
            .sum()
    }

    /// A rank without a part of a group does not know its learning rate.
    fn agree_on_learning_rates(&mut self) -> Result<()> {
        let own = self.inner.as_ref().map(Optimizer::learning_rates);
        for (number, place) in self.places.iter().enumerate() {
            let known = place.and_then(|place| own.as_ref()?.get(place).copied());
            self.learning_rates[number] = known.unwrap_or(f64::NEG_INFINITY);
        }
        let rates = Tensor::f_from_slice(&self.learning_rates)?.f_to_device(self.device())?;
        self.group.all_reduce(&rates, ReduceOp::Max)?;
        self.learning_rates = Vec::<f64>::try_from(rates)?;
        Ok(())
    }

    fn device(&self) -> tch::Device {
        let first = self.owned.iter().flatten().next();
        first.map_or(tch::Device::Cpu, |(_, tensor)| tensor.device())
    }

    /// Each parameter from the rank that stepped it.
    fn spread(&self) -> Result<()> {
        let pending = self
            .owned
            .iter()
            .flatten()
            .filter(|(_, tensor)| tensor.numel() > 0)
            .map(|(owner, tensor)| self.group.broadcast_async(tensor, *owner))
            .collect::<Result<Vec<_>>>()?;
        pending.into_iter().try_for_each(crate::Pending::wait)
    }
}

/// The owner of each parameter, group by group: the largest first, each to the rank that has least.
fn share_out(groups: &[ParamGroup], ranks: usize) -> Vec<Vec<usize>> {
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
        let least = (0..ranks)
            .min_by_key(|rank| (load[*rank], *rank))
            .unwrap_or(0);
        load[least] += size;
        owners[number][index] = least;
    }
    owners
}

/// An error of the group as one of the optimizer, whose trait knows no other.
fn as_optim(error: crate::Error) -> overdrive_optim::Error {
    match error {
        crate::Error::Optim(error) => error,
        other => overdrive_optim::Error::Torch(tch::TchError::Torch(other.to_string())),
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
        if let Some(inner) = &mut self.inner {
            inner.step()?;
        }
        self.spread().map_err(as_optim)
    }

    fn supports_step_scaled(&self) -> bool {
        // A rank without a part steps nothing, whatever the scale.
        self.inner
            .as_ref()
            .is_none_or(Optimizer::supports_step_scaled)
    }

    /// Skips on all ranks what one of them would skip.
    fn step_scaled(&mut self, scaling: &GradScaling<'_>) -> overdrive_optim::Result<bool> {
        let found_inf = scaling.found_inf.f_add_scalar(0.0)?;
        self.group
            .all_reduce(&found_inf, ReduceOp::Max)
            .map_err(as_optim)?;
        let agreed = GradScaling {
            grad_scale: scaling.grad_scale,
            found_inf: &found_inf,
        };
        let done = match &mut self.inner {
            Some(inner) => inner.step_scaled(&agreed)?,
            None => true,
        };
        if done {
            self.spread().map_err(as_optim)?;
        }
        Ok(done)
    }

    /// Of all parameters, also those that other ranks step.
    fn zero_grad(&mut self) -> overdrive_optim::Result<()> {
        for (_, tensor) in self.owned.iter().flatten() {
            overdrive_sys::grad::clear(tensor)?;
        }
        Ok(())
    }

    fn learning_rates(&self) -> Vec<f64> {
        self.learning_rates.clone()
    }

    fn set_learning_rates(&mut self, learning_rates: &[f64]) -> overdrive_optim::Result<()> {
        if learning_rates.len() != self.places.len() {
            return Err(overdrive_optim::Error::LearningRateCount {
                given: learning_rates.len(),
                groups: self.places.len(),
            });
        }
        let mut own = Vec::new();
        for (rate, place) in learning_rates.iter().zip(&self.places) {
            if place.is_some() {
                own.push(*rate);
            }
        }
        if let Some(inner) = &mut self.inner {
            inner.set_learning_rates(&own)?;
        }
        self.learning_rates = learning_rates.to_vec();
        Ok(())
    }

    /// This rank's part: stored by every rank, in a file of its own.
    fn state_dict(&self) -> overdrive_optim::Result<StateDict> {
        match &self.inner {
            Some(inner) => inner.state_dict(),
            None => Ok(StateDict {
                tensors: std::collections::BTreeMap::new(),
                metadata: serde_json::Value::Null,
            }),
        }
    }

    /// This rank's part, as the same rank of a group of the same size stored it.
    fn load_state_dict(&mut self, state: &StateDict) -> overdrive_optim::Result<()> {
        match &mut self.inner {
            Some(inner) => {
                inner.load_state_dict(state)?;
                for (number, place) in self.places.iter().enumerate() {
                    let rates = inner.learning_rates();
                    if let Some(rate) = place.and_then(|place| rates.get(place)) {
                        self.learning_rates[number] = *rate;
                    }
                }
                Ok(())
            }
            None => Ok(()),
        }
    }
}
