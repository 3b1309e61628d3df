//! Stochastic gradient descent with momentum.

use overdrive_core::{check_non_negative, check_option};
use overdrive_sys::op::{Value, call};
use serde::{Deserialize, Serialize};
use tch::{Device, Kind, Tensor};

use crate::Result;
use crate::checks::{check_rates, same_layout, step_count};
use crate::update_rule::{Job, Rule, StateTensors, optimizer};

/// The options of [`Sgd`]. The defaults are those of `torch.optim.SGD`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct SgdConfig {
    /// The learning rate of groups that set none. Default: 1e-3.
    pub learning_rate: f64,
    /// The momentum: the fraction of the previous update that is added; 0 or positive. Default: 0, which
    /// needs no state.
    pub momentum: f64,
    /// The dampening: the fraction of the gradient that is not added to the momentum. Default: 0.
    pub dampening: f64,
    /// The weight decay of groups that set none: an L2 penalty, added to the gradient. Default: 0.
    pub weight_decay: f64,
    /// If `true`, uses Nesterov's momentum, which needs a momentum above 0 and no dampening. Default:
    /// `false`.
    pub nesterov: bool,
    /// If `true`, the objective is maximized. Default: `false`.
    pub maximize: bool,
}

impl Default for SgdConfig {
    fn default() -> Self {
        Self {
            learning_rate: 1e-3,
            momentum: 0.0,
            dampening: 0.0,
            weight_decay: 0.0,
            nesterov: false,
            maximize: false,
        }
    }
}

impl SgdConfig {
    /// Checks that every option is in its range.
    ///
    /// # Errors
    /// [`Error::Common`](crate::Error::Common) with the first option out of its range.
    pub fn validate(&self) -> Result<()> {
        check_rates(self.learning_rate, self.weight_decay)?;
        check_non_negative("momentum", self.momentum)?;
        let dampening = self.dampening;
        check_option(dampening.is_finite(), "dampening", dampening, "finite")?;
        let valid = !self.nesterov || (self.momentum > 0.0 && dampening == 0.0);
        let expected = "false unless the momentum is positive and the dampening is 0";
        check_option(valid, "nesterov", self.nesterov, expected)?;
        Ok(())
    }
}

optimizer! {
    /// Stochastic gradient descent with momentum (Sutskever et al. 2013), equal to
    /// [`torch.optim.SGD`] with `fused=True` on CPU and CUDA.
    ///
    /// ```text
    /// g ← g + λ θ        b ← μ b + (1 - τ) g   (b ← g at first)
    /// θ ← θ - η b        or with nesterov θ ← θ - η (g + μ b)
    /// ```
    ///
    /// The state is one tensor per parameter, of its dtype; without momentum there is none. libtorch's
    /// fused kernel updates the parameters of a group in one pass over memory; it is not used for half precision on a
    /// CPU, where it does not write the parameters.
    ///
    /// ```
    /// use overdrive_optim::{Optimizer, ParamGroup, Sgd, SgdConfig};
    /// use tch::{Device, Kind, Tensor};
    ///
    /// let weight = Tensor::ones([2], (Kind::Float, Device::Cpu)).set_requires_grad(true);
    /// let group = ParamGroup::new("all", vec![("weight".into(), weight.shallow_clone())]);
    /// let config = SgdConfig { learning_rate: 0.1, momentum: 0.9, ..Default::default() };
    /// let mut optimizer = Sgd::new(vec![group], config)?;
    /// for _ in 0..2 {
    ///     weight.sum(Kind::Float).backward();
    ///     optimizer.step()?;
    ///     optimizer.zero_grad()?;
    /// }
    /// assert!((weight.double_value(&[0]) - (1.0 - 0.1 - 0.19)).abs() < 1e-6);
    /// # Ok::<(), overdrive_optim::Error>(())
    /// ```
    ///
    /// [`torch.optim.SGD`]: https://docs.pytorch.org/docs/stable/generated/torch.optim.SGD.html
    Sgd(SgdRule), SgdConfig
}

/// The rule of [`Sgd`].
#[derive(Debug)]
pub(crate) struct SgdRule;

/// The state of one parameter.
#[derive(Debug)]
pub(crate) struct SgdState {
    /// The number of steps, a float32 scalar on the CPU.
    step: Tensor,
    momentum_buffer: Option<Tensor>,
}

/// Parameters that one kernel call updates.
struct Batch {
    key: (u64, u64, Device, Kind, bool, bool),
    parameters: Vec<Tensor>,
    gradients: Vec<Tensor>,
    momenta: Vec<Tensor>,
}

impl Rule for SgdRule {
    const NAME: &'static str = "sgd";
    type Config = SgdConfig;
    type State = SgdState;

    fn new(_: &SgdConfig) -> Self {
        Self
    }

    fn new_states(
        &mut self,
        config: &SgdConfig,
        parameters: &[(&str, &Tensor)],
    ) -> Result<Vec<SgdState>> {
        let has_momentum = config.momentum != 0.0;
        let state = |tensor: &Tensor| {
            Ok(SgdState {
                step: Tensor::f_zeros([0i64; 0], (Kind::Float, Device::Cpu))?,
                momentum_buffer: has_momentum.then(|| tensor.f_zeros_like()).transpose()?,
            })
        };
        parameters.iter().map(|(_, tensor)| state(tensor)).collect()
    }

    fn state_tensors(state: &SgdState) -> StateTensors<'_> {
        let mut parts = vec![("step", &state.step)];
        parts.extend(state.momentum_buffer.iter().map(|b| ("momentum_buffer", b)));
        parts
    }

    fn step(&mut self, config: &SgdConfig, jobs: Vec<Job<'_, SgdState>>) -> Result<()> {
        let mut batches: Vec<Batch> = Vec::new();
        for mut job in jobs {
            // The first step initializes the momentum with the gradient instead of dampening it.
            let first = step_count(&job.state.step)? == 0.0;
            let _ = job.state.step.f_add_scalar_(1.0)?;
            let device = job.parameter.device();
            // Without momentum only the parameter's own layout matters.
            let dense = job.state.momentum_buffer.as_ref().map_or_else(
                || job.parameter.is_contiguous(),
                |b| same_layout(&job.parameter, b),
            );
            let fused = dense && has_fused_kernel(device, job.parameter.kind());
            if fused && !same_layout(&job.gradient, &job.parameter) {
                // The CPU kernel ignores strides and pairs elements by their offsets in memory.
                let mut copy = job.parameter.f_empty_like()?;
                copy.f_copy_(&job.gradient)?;
                job.gradient = copy;
            }
            // The bits, because `f64` does not implement `Eq`.
            let key = (
                job.learning_rate.to_bits(),
                job.weight_decay.to_bits(),
                device,
                job.parameter.kind(),
                first,
                fused,
            );
            let position = batches.iter().position(|batch| batch.key == key);
            let position = position.unwrap_or_else(|| {
                batches.push(Batch {
                    key,
                    parameters: Vec::new(),
                    gradients: Vec::new(),
                    momenta: Vec::new(),
                });
                batches.len() - 1
            });
            let batch = &mut batches[position];
            batch.parameters.push(job.parameter);
            batch.gradients.push(job.gradient);
            let momentum = job.state.momentum_buffer.as_ref();
            batch.momenta.extend(momentum.map(Tensor::shallow_clone));
        }
        batches.iter().try_for_each(|batch| apply(config, batch))
    }
}

fn apply(config: &SgdConfig, batch: &Batch) -> Result<()> {
    let (rate, decay, _, _, first, fused) = batch.key;
    let (rate, decay) = (f64::from_bits(rate), f64::from_bits(decay));
    if !fused {
        return apply_plain(config, batch, rate, decay, first);
    }
    call(
        "aten::_fused_sgd_",
        "",
        &[
            Value::Tensors(&batch.parameters),
            Value::Tensors(&batch.gradients),
            Value::Tensors(&batch.momenta),
            Value::Float(decay),
            Value::Float(config.momentum),
            Value::Float(rate),
            Value::Float(config.dampening),
            Value::Bool(config.nesterov),
            Value::Bool(config.maximize),
            Value::Bool(first),
            Value::None,
            Value::None,
        ],
    )?;
    Ok(())
}

fn apply_plain(
    config: &SgdConfig,
    batch: &Batch,
    rate: f64,
    decay: f64,
    first: bool,
) -> Result<()> {
    for (index, (parameter, gradient)) in batch.parameters.iter().zip(&batch.gradients).enumerate()
    {
        // As in the fused kernel, half precision is computed in fp32 and rounded once.
        let wide = wide(parameter.kind());
        let values = parameter.f_to_kind(wide)?;
        let mut gradient = gradient.f_to_kind(wide)?;
        if config.maximize {
            gradient = gradient.f_neg()?;
        }
        if decay != 0.0 {
            gradient = gradient.f_add(&values.f_mul_scalar(decay)?)?;
        }
        if let Some(stored) = batch.momenta.get(index) {
            // PyTorch initializes the momentum with the gradient, without dampening.
            let momentum = if first {
                gradient.shallow_clone()
            } else {
                let kept = stored.f_to_kind(wide)?.f_mul_scalar(config.momentum)?;
                kept.f_add(&gradient.f_mul_scalar(1.0 - config.dampening)?)?
            };
            stored.shallow_clone().f_copy_(&momentum)?;
            gradient = if config.nesterov {
                gradient.f_add(&momentum.f_mul_scalar(config.momentum)?)?
            } else {
                momentum
            };
        }
        let values = values.f_sub(&gradient.f_mul_scalar(rate)?)?;
        parameter.shallow_clone().f_copy_(&values)?;
    }
    Ok(())
}

/// Returns `true` if libtorch's fused kernel is right for parameters of a device and a dtype. Its kernel for CPUs does not
/// write parameters in half precision, and reads their momentum as fp32
/// (<https://github.com/pytorch/pytorch/issues/191763>, in 2.11 to 2.13).
fn has_fused_kernel(device: Device, kind: Kind) -> bool {
    match device {
        Device::Cpu => wide(kind) == kind,
        Device::Cuda(_) => true,
        _ => false,
    }
}

/// Returns the dtype in which parameters of a dtype are updated.
fn wide(kind: Kind) -> Kind {
    match kind {
        Kind::Half | Kind::BFloat16 => Kind::Float,
        other => other,
    }
}
