//! The AdamW optimizer.

use tch::{Device, Kind, Tensor};

use super::bucket::{Bucket, Moments, Update};
use super::config::{AdamWConfig, Implementation};
use crate::checks::{TensorSpec, bytes, gradient_of};
use crate::parameter_states::{GroupedParameters, Parameter};
use crate::{Error, GradScaling, Optimizer, OptimizerId, ParamGroup, Result, StateDict};

/// Adam with decoupled weight decay (Loshchilov & Hutter 2019, [arXiv:1711.05101]), equal to
/// [`torch.optim.AdamW`] with `fused=True` on CPU and CUDA.
///
/// At step t, with gradient g and group learning rate η and decay λ:
///
/// ```text
/// θ ← θ (1 - η λ)
/// m ← β₁ m + (1 - β₁) g        v ← β₂ v + (1 - β₂) g²
/// θ ← θ - η / (1 - β₁ᵗ) · m / (√(v / (1 - β₂ᵗ)) + ε)
/// ```
///
/// Parameters without a gradient, and their step counts, do not change. A parameter's state (two tensors
/// of its shape, dtype and device, three with `amsgrad`) is created with its first gradient. The state of
/// bfloat16 and float16 parameters has their dtype, as in PyTorch, unless [`AdamWConfig::master_weights`]
/// requests float32 copies of both. A master is copied from the parameter before its first step and takes
/// precedence from then on: load a model's weights before that, and an optimizer's state, which contains
/// the masters, after.
///
/// One step reads parameter, gradient and both averages and writes all but the gradient: 28 bytes per float32
/// parameter, in one pass.
///
/// ```
/// use overdrive_optim::{AdamW, AdamWConfig, Optimizer, decay_groups};
/// use tch::{Device, Kind, Tensor};
///
/// let weight = Tensor::ones([4, 2], (Kind::Float, Device::Cpu)).set_requires_grad(true);
/// let groups = decay_groups([("proj.weight".to_string(), weight.shallow_clone())], 0.1);
/// let mut optimizer = AdamW::new(groups, AdamWConfig { learning_rate: 0.1, ..Default::default() })?;
///
/// weight.square().sum(Kind::Float).backward();
/// optimizer.step()?;
/// optimizer.zero_grad()?;
/// // 1 · (1 - 0.1 · 0.1) - 0.1
/// assert!((weight.double_value(&[0, 0]) - 0.89).abs() < 1e-6);
/// # Ok::<(), overdrive_optim::Error>(())
/// ```
///
/// [arXiv:1711.05101]: https://arxiv.org/abs/1711.05101
/// [`torch.optim.AdamW`]: https://docs.pytorch.org/docs/stable/generated/torch.optim.AdamW.html
#[derive(Debug)]
pub struct AdamW {
    id: OptimizerId,
    pub(super) config: AdamWConfig,
    pub(super) parameters: GroupedParameters<Moments>,
    /// The learning rate of each group as a float32 scalar on each device of its parameters, if the optimizer is
    /// capturable.
    rates: Vec<Vec<(Device, Tensor)>>,
    /// The kernel calls of the last step; valid while the same parameters have gradients.
    buckets: Vec<Bucket>,
    /// The positions of the parameters in `buckets`.
    active: Vec<usize>,
}

impl AdamW {
    /// Returns an optimizer of the parameters in `groups`, which share memory with the model.
    ///
    /// # Errors
    /// An error if an option is out of its range, a name or a group name is not unique, two parameters
    /// share memory, or a parameter is not a floating-point leaf.
    pub fn new(groups: Vec<ParamGroup>, config: AdamWConfig) -> Result<Self> {
        config.validate()?;
        let mut this = Self {
            id: OptimizerId::unique(),
            config,
            parameters: GroupedParameters::new(),
            rates: Vec::new(),
            buckets: Vec::new(),
            active: Vec::new(),
        };
        for group in groups {
            this.add_group(group)?;
        }
        Ok(this)
    }

    /// Adds a group of parameters, for example layers that were frozen before.
    ///
    /// # Errors
    /// As [`new`](Self::new); nothing is added then.
    pub fn add_group(&mut self, group: ParamGroup) -> Result<()> {
        let check = |name: &str, tensor: &Tensor| self.uses_fused(name, tensor).map(drop);
        let defaults = (self.config.learning_rate, self.config.weight_decay);
        let (group, mut added) = self.parameters.prepare(group, defaults, check)?;
        let mut rates: Vec<(Device, Tensor)> = Vec::new();
        if self.config.capturable {
            // A capture must find the tensors that it writes to: made while it runs, they would lie in the
            // graph's pool, zeroed by every replay.
            for parameter in &mut added {
                parameter.state = Some(self.new_moments(&parameter.name, &parameter.tensor)?);
                let device = parameter.tensor.device();
                if rates.iter().all(|(other, _)| *other != device) {
                    let options = (Kind::Float, device);
                    let rate = Tensor::f_full([0i64; 0], group.learning_rate, options)?;
                    rates.push((device, rate));
                }
            }
        }
        self.parameters.push((group, added));
        self.rates.push(rates);
        Ok(())
    }

    /// Writes the learning rates to the tensors that captured steps read.
    pub(super) fn write_rates(&mut self) -> Result<()> {
        for (group, rates) in self.parameters.groups.iter().zip(&mut self.rates) {
            for (_, rate) in rates {
                let _ = rate.f_fill_(group.learning_rate)?;
            }
        }
        Ok(())
    }

    /// Returns the options of this optimizer, or of the state that it loaded.
    #[must_use]
    pub fn config(&self) -> &AdamWConfig {
        &self.config
    }

    /// Returns the names of the groups, in the order of [`learning_rates`](Optimizer::learning_rates).
    pub fn group_names(&self) -> impl Iterator<Item = &str> {
        self.parameters.group_names()
    }

    /// Returns the parameters with their names, as handles that share memory.
    pub fn named_parameters(&self) -> impl Iterator<Item = (&str, Tensor)> {
        self.parameters.named()
    }

    /// Returns the bytes of running averages and masters; 0 before the first step.
    #[must_use]
    pub fn state_bytes(&self) -> u64 {
        let entries = self.parameters.entries.iter();
        let states = entries.filter_map(|parameter| parameter.state.as_ref());
        let tensors = states.flat_map(Moments::tensors);
        tensors.map(|(_, tensor)| bytes(tensor)).sum()
    }

    /// Returns `true` if the fused kernel updates this parameter.
    fn uses_fused(&self, name: &str, tensor: &Tensor) -> Result<bool> {
        let device = tensor.device();
        let has_kernel = matches!(device, Device::Cpu | Device::Cuda(_));
        let refused = |reason| Error::NoFusedKernel {
            name: name.to_owned(),
            reason,
        };
        match self.config.implementation {
            // The plain update reads the step count on the host, which a captured step cannot.
            Implementation::Plain if self.config.capturable => Err(refused(
                "`capturable` needs the fused kernel, and `implementation` is plain".to_owned(),
            )),
            Implementation::Plain => Ok(false),
            Implementation::Auto | Implementation::Fused if has_kernel => Ok(true),
            Implementation::Auto if !self.config.capturable => Ok(false),
            Implementation::Auto | Implementation::Fused => Err(refused(format!(
                "it is on {device:?}, and only Cpu and Cuda have the kernel"
            ))),
        }
    }

    /// Returns new averages of zero for a parameter.
    pub(super) fn new_moments(&self, name: &str, tensor: &Tensor) -> Result<Moments> {
        // The buckets hold these handles, which must not be part of a graph.
        let _no_grad = tch::no_grad_guard();
        let step_device = if self.uses_fused(name, tensor)? {
            tensor.device()
        } else {
            Device::Cpu
        };
        let wants_master =
            self.config.master_weights && matches!(tensor.kind(), Kind::Half | Kind::BFloat16);
        let master = wants_master
            .then(|| tensor.f_detach()?.f_to_kind(Kind::Float))
            .transpose()?;
        let updated = master.as_ref().unwrap_or(tensor);
        Ok(Moments {
            step: Tensor::f_zeros([0i64; 0], (Kind::Float, step_device))?,
            exp_avg: updated.f_zeros_like()?,
            exp_avg_sq: updated.f_zeros_like()?,
            max_exp_avg_sq: self
                .config
                .amsgrad
                .then(|| updated.f_zeros_like())
                .transpose()?,
            master,
        })
    }

    /// Discards the buckets, whose handles are stale because a state was replaced.
    pub(super) fn forget_buckets(&mut self) {
        self.buckets.clear();
        self.active.clear();
    }

    /// Returns the checked gradients; `None` for parameters without one.
    fn gradients(&self) -> Result<Vec<Option<Tensor>>> {
        let gradient = |parameter: &Parameter<Moments>| {
            let Parameter { name, tensor, .. } = parameter;
            let state = parameter.state.as_ref().map(|moments| TensorSpec {
                // With a master the dtypes of parameter and state differ.
                kind: moments
                    .master
                    .as_ref()
                    .map_or(moments.exp_avg.kind(), |_| tensor.kind()),
                ..TensorSpec::of(&moments.exp_avg)
            });
            gradient_of(name, tensor, state.as_ref())
        };
        self.parameters.entries.iter().map(gradient).collect()
    }

    /// Groups the parameters that have gradients by kernel call.
    fn plan(&mut self, active: Vec<usize>) -> Result<()> {
        self.forget_buckets();
        for &index in &active {
            let parameter = &self.parameters.entries[index];
            if parameter.state.is_none() {
                let moments = self.new_moments(&parameter.name, &parameter.tensor)?;
                self.parameters.entries[index].state = Some(moments);
            }
        }
        // A linear search is enough: there are few combinations of group, device and dtype.
        let mut buckets: Vec<Bucket> = Vec::new();
        for &index in &active {
            let parameter = &self.parameters.entries[index];
            let Some(moments) = &parameter.state else {
                continue;
            };
            let tensor = &parameter.tensor;
            let fused = self.uses_fused(&parameter.name, tensor)?;
            let position = buckets.iter().position(|b| {
                (b.group, b.device, b.kind, b.fused)
                    == (parameter.group, tensor.device(), tensor.kind(), fused)
                    && !b.is_full()
            });
            let position = position.unwrap_or_else(|| {
                buckets.push(Bucket::new(parameter.group, tensor, fused));
                buckets.len() - 1
            });
            buckets[position].push(index, tensor, moments);
        }
        self.buckets = buckets;
        self.active = active;
        Ok(())
    }

    /// Applies the gradients, which are scaled if `scaling` is given.
    fn apply(&mut self, scaling: Option<&GradScaling<'_>>) -> Result<()> {
        let _no_grad = tch::no_grad_guard();
        let mut gradients = self.gradients()?;
        let active: Vec<usize> = (0..gradients.len())
            .filter(|&index| gradients[index].is_some())
            .collect();
        // Planning clones the handles of all tensors; in most runs the same parameters have gradients in
        // each step.
        if active != self.active {
            self.plan(active)?;
        }
        for bucket in &self.buckets {
            let group = &self.parameters.groups[bucket.group];
            let update = Update {
                config: &self.config,
                learning_rate: group.learning_rate,
                rate_on_device: self.rates[bucket.group]
                    .iter()
                    .find_map(|(device, rate)| (*device == bucket.device).then_some(rate)),
                weight_decay: group.weight_decay,
            };
            let members = bucket.members.iter();
            let of_bucket = members
                .filter_map(|&index| gradients[index].take())
                .collect();
            bucket.update(update, of_bucket, scaling)?;
        }
        Ok(())
    }
}

impl Optimizer for AdamW {
    fn id(&self) -> OptimizerId {
        self.id
    }

    fn parameters(&self) -> Vec<Tensor> {
        self.parameters.named().map(|(_, tensor)| tensor).collect()
    }

    fn parameters_by_group(&self) -> Vec<Vec<Tensor>> {
        self.parameters.by_group()
    }

    fn step(&mut self) -> Result<()> {
        self.apply(None)
    }

    fn supports_step_scaled(&self) -> bool {
        let mut parameters = self.parameters.entries.iter();
        parameters.all(|p| self.uses_fused(&p.name, &p.tensor).unwrap_or(false))
    }

    fn step_scaled(&mut self, scaling: &GradScaling<'_>) -> Result<bool> {
        // The answer must depend neither on which parameters have gradients nor on their memory: ranks with different
        // answers would issue different collectives and wait forever.
        if !self.supports_step_scaled() {
            return Ok(false);
        }
        self.apply(Some(scaling))?;
        Ok(true)
    }

    fn zero_grad(&mut self) -> Result<()> {
        self.parameters.zero_grad()
    }

    fn learning_rates(&self) -> Vec<f64> {
        self.parameters.learning_rates()
    }

    fn set_learning_rates(&mut self, learning_rates: &[f64]) -> Result<()> {
        self.parameters.set_learning_rates(learning_rates)?;
        self.write_rates()
    }

    fn state_dict(&self) -> Result<StateDict> {
        self.save_state()
    }

    fn load_state_dict(&mut self, state: &StateDict) -> Result<()> {
        self.restore_state(state)
    }
}
