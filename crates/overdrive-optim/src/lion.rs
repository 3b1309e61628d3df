//! Lion: updates by the sign of a momentum.

use overdrive_kernels::tensors::has_kernel;
use overdrive_kernels::with_element;
use serde::{Deserialize, Serialize};
use tch::{Kind, Tensor};

use crate::Result;
use crate::checks::{check_betas, check_rates};
use crate::kernels::{LionNumbers, lion};
use crate::update_rule::{Job, Rule, StateTensors, optimizer};

/// The options of [`Lion`]. The defaults are those of the paper, the learning rate that of its authors' code.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct LionConfig {
    /// The learning rate of groups that set none, usually a third to a tenth of that of AdamW. Default: 1e-4.
    pub learning_rate: f64,
    /// The weight of the momentum in the update, and its decay rate, each in [0, 1). Default: (0.9, 0.99).
    pub betas: (f64, f64),
    /// The decoupled weight decay of groups that set none, usually three to ten times that of AdamW
    /// because of the smaller learning rate. Default: 0.
    pub weight_decay: f64,
}

impl Default for LionConfig {
    fn default() -> Self {
        Self {
            learning_rate: 1e-4,
            betas: (0.9, 0.99),
            weight_decay: 0.0,
        }
    }
}

impl LionConfig {
    /// Checks that every option is in its range.
    ///
    /// # Errors
    /// [`Error::Common`](crate::Error::Common) with the first option out of its range.
    pub fn validate(&self) -> Result<()> {
        check_rates(self.learning_rate, self.weight_decay)?;
        check_betas(self.betas)
    }
}

optimizer! {
    /// Lion (Chen et al. 2023, [arXiv:2302.06675]): every element changes by the learning rate, with the
    /// sign of a momentum. The state is half as large as AdamW's, and a step transfers fewer bytes.
    ///
    /// ```text
    /// θ ← θ (1 - η λ) - η sign(β₁ m + (1 - β₁) g)        m ← β₂ m + (1 - β₂) g
    /// ```
    ///
    /// The momentum is float32 (float64 for float64 parameters). On a CPU a step is one pass over
    /// parameter, gradient and momentum on all cores: 20 bytes per float32 parameter.
    ///
    /// ```
    /// use overdrive_optim::{Lion, LionConfig, Optimizer, ParamGroup};
    /// use tch::{Kind, Tensor};
    ///
    /// let weight = Tensor::from_slice(&[1f32, -1.0]).set_requires_grad(true);
    /// let group = ParamGroup::new("all", vec![("weight".into(), weight.shallow_clone())]);
    /// let mut optimizer = Lion::new(vec![group], LionConfig { learning_rate: 0.25, ..Default::default() })?;
    /// weight.square().sum(Kind::Float).backward();
    /// optimizer.step()?;
    /// assert_eq!(Vec::<f32>::try_from(&weight)?, [0.75, -0.75]);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// [arXiv:2302.06675]: https://arxiv.org/abs/2302.06675
    Lion(LionRule), LionConfig
}

/// The rule of [`Lion`].
#[derive(Debug)]
pub(crate) struct LionRule;

impl Rule for LionRule {
    const NAME: &'static str = "lion";
    type Config = LionConfig;
    type State = Tensor;

    fn new(_: &LionConfig) -> Self {
        Self
    }

    fn new_states(
        &mut self,
        _: &LionConfig,
        parameters: &[(&str, &Tensor)],
    ) -> Result<Vec<Tensor>> {
        let state = |tensor: &Tensor| {
            // A half-precision momentum would lose the small updates of beta2 = 0.99.
            let kind = match tensor.kind() {
                Kind::Double => Kind::Double,
                _ => Kind::Float,
            };
            Ok(Tensor::f_zeros(tensor.size(), (kind, tensor.device()))?)
        };
        parameters.iter().map(|(_, tensor)| state(tensor)).collect()
    }

    fn state_tensors(state: &Tensor) -> StateTensors<'_> {
        vec![("exp_avg", state)]
    }

    fn step(&mut self, config: &LionConfig, jobs: Vec<Job<'_, Tensor>>) -> Result<()> {
        for job in jobs {
            let numbers = LionNumbers {
                betas: config.betas,
                learning_rate: job.learning_rate,
                decay: 1.0 - job.learning_rate * job.weight_decay,
            };
            // The kernel reads memory in order; other layouts and devices use operators.
            let dense = job.parameter.is_contiguous() && has_kernel(&job.parameter);
            let gradient = job.gradient.f_contiguous()?;
            if dense {
                with_element!(job.parameter.kind(), T => {
                    lion::<T>(&numbers, &job.parameter, &gradient, job.state)?;
                });
            } else {
                by_operators(&numbers, job)?;
            }
        }
        Ok(())
    }
}

fn by_operators(numbers: &LionNumbers, job: Job<'_, Tensor>) -> Result<()> {
    let (beta1, beta2) = numbers.betas;
    let gradient = job.gradient.f_to_kind(job.state.kind())?;
    let mut direction = job.state.f_mul_scalar(beta1)?;
    let _ = direction.f_add_(&gradient.f_mul_scalar(1.0 - beta1)?)?;
    let mut update = direction.f_sign()?;
    let _ = update.f_mul_scalar_(-numbers.learning_rate)?;
    let mut moved = job.parameter.f_to_kind(job.state.kind())?;
    moved = moved.f_mul_scalar(numbers.decay)?;
    let _ = moved.f_add_(&update)?;
    // Rounded once, at the end of the update.
    job.parameter.shallow_clone().f_copy_(&moved)?;
    let _ = job.state.f_mul_scalar_(beta2)?;
    let _ = job.state.f_add_(&gradient.f_mul_scalar(1.0 - beta2)?)?;
    Ok(())
}
