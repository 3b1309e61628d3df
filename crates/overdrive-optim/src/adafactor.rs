//! Adafactor: averages of squared gradients, factored into rows and columns.

use overdrive_core::{check_fraction, check_non_negative, check_option};
use serde::{Deserialize, Serialize};
use tch::{Device, Kind, Tensor};

use crate::Result;
use crate::checks::{check_rates, step_count};
use crate::kernels::{FactoredUpdate, adafactor_step};
use crate::update_rule::{Job, Rule, StateTensors, optimizer};

/// The options of [`Adafactor`]. The defaults are those of transformers' `Adafactor`, except that the
/// learning rate is a number, which is used if `relative_step` is `false`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct AdafactorConfig {
    /// The learning rate of groups that set none. It is used, also by a scheduler, only if
    /// `relative_step` is `false`. Default: 1e-3.
    pub learning_rate: f64,
    /// The term added to squared gradients, and the minimum of a parameter's root mean square in
    /// `scale_parameter`. Default: (1e-30, 1e-3).
    pub eps: (f64, f64),
    /// The maximum root mean square of an update; positive. Default: 1.
    pub clip_threshold: f64,
    /// The exponent of the decay `1 - step^decay_rate` of the averages of squares; negative. Default: -0.8.
    pub decay_rate: f64,
    /// The decay rate of a running average of updates, in [0, 1); `None` (the default) uses no average
    /// and saves its memory.
    pub beta1: Option<f64>,
    /// The weight decay of groups that set none: a step subtracts `learning rate · decay` of the
    /// parameter, with the scaled learning rate. Default: 0.
    pub weight_decay: f64,
    /// If `true` (the default), the learning rate is multiplied by the parameter's root mean square.
    pub scale_parameter: bool,
    /// If `true` (the default), the learning rate is `min(1e-2, 1/√step)`.
    pub relative_step: bool,
    /// If `true`, the relative learning rate is `min(1e-6 · step, 1/√step)` instead. Default: `false`.
    pub warmup_init: bool,
}

impl Default for AdafactorConfig {
    fn default() -> Self {
        Self {
            learning_rate: 1e-3,
            eps: (1e-30, 1e-3),
            clip_threshold: 1.0,
            decay_rate: -0.8,
            beta1: None,
            weight_decay: 0.0,
            scale_parameter: true,
            relative_step: true,
            warmup_init: false,
        }
    }
}

impl AdafactorConfig {
    /// Returns options with a given learning rate, as schedulers and transformers' Trainer need it, and with
    /// `relative_step` and `scale_parameter` disabled.
    #[must_use]
    pub fn with_learning_rate(learning_rate: f64) -> Self {
        Self {
            learning_rate,
            scale_parameter: false,
            relative_step: false,
            ..Self::default()
        }
    }

    /// Checks that every option is in its range.
    ///
    /// # Errors
    /// [`Error::Common`](crate::Error::Common) with the first option out of its range.
    pub fn validate(&self) -> Result<()> {
        check_rates(self.learning_rate, self.weight_decay)?;
        check_non_negative("eps.0", self.eps.0)?;
        check_non_negative("eps.1", self.eps.1)?;
        // Infinity is allowed: it disables the clipping of updates.
        let clip = self.clip_threshold;
        check_option(clip > 0.0, "clip_threshold", clip, "positive")?;
        let rate = self.decay_rate;
        let valid = rate < 0.0 && rate.is_finite();
        check_option(valid, "decay_rate", rate, "negative and finite")?;
        if let Some(beta1) = self.beta1 {
            check_fraction("beta1", beta1)?;
        }
        let valid = !self.warmup_init || self.relative_step;
        let expected = "false if relative_step is false";
        check_option(valid, "warmup_init", self.warmup_init, expected)?;
        Ok(())
    }
}

optimizer! {
    /// Adafactor (Shazeer & Stern 2018, [arXiv:1804.04235]), equal to
    /// [`transformers.optimization.Adafactor`].
    ///
    /// The state of a matrix is the averages of the rows and columns of its squared gradients: n + m
    /// elements instead of AdamW's 2nm. Tensors of more dimensions are treated as stacks of matrices;
    /// vectors have one average per element. Updates are clipped by their root mean square, so gradient
    /// clipping is not needed.
    ///
    /// By default it computes its own learning rate (`relative_step`); the configured one, also by a
    /// scheduler, then has no effect. [`AdafactorConfig::with_learning_rate`] is the other common
    /// setting.
    ///
    /// States are float32 (float64 for float64 parameters). A kernel of this crate updates float32
    /// matrices on a CPU in three passes over the gradient; libtorch's operators update all other
    /// parameters.
    ///
    /// ```
    /// use overdrive_optim::{Adafactor, AdafactorConfig, Optimizer, ParamGroup};
    /// use tch::{Device, Kind, Tensor};
    ///
    /// let weight = Tensor::ones([100, 50], (Kind::Float, Device::Cpu)).set_requires_grad(true);
    /// let group = ParamGroup::new("all", vec![("weight".into(), weight.shallow_clone())]);
    /// let config = AdafactorConfig::with_learning_rate(0.1);
    /// let mut optimizer = Adafactor::new(vec![group], config)?;
    /// weight.square().sum(Kind::Float).backward();
    /// optimizer.step()?;
    /// assert!((weight.double_value(&[0, 0]) - 0.9).abs() < 1e-6);
    /// // 100 rows, 50 columns and one step count.
    /// assert_eq!(optimizer.state_bytes(), 4 * 151);
    /// # Ok::<(), overdrive_optim::Error>(())
    /// ```
    ///
    /// [arXiv:1804.04235]: https://arxiv.org/abs/1804.04235
    /// [`transformers.optimization.Adafactor`]:
    /// https://huggingface.co/docs/transformers/main_classes/optimizer_schedules
    Adafactor(AdafactorRule), AdafactorConfig
}

/// The rule of [`Adafactor`].
#[derive(Debug)]
pub(crate) struct AdafactorRule;

/// The state of one parameter.
#[derive(Debug)]
pub(crate) struct AdafactorState {
    /// The number of steps, a float32 scalar on the CPU.
    step: Tensor,
    exp_avg: Option<Tensor>,
    squares: Squares,
}

#[derive(Debug)]
enum Squares {
    Factored { rows: Tensor, columns: Tensor },
    Whole(Tensor),
}

impl Rule for AdafactorRule {
    const NAME: &'static str = "adafactor";
    type Config = AdafactorConfig;
    type State = AdafactorState;

    fn new(_: &AdafactorConfig) -> Self {
        Self
    }

    fn new_states(
        &mut self,
        config: &AdafactorConfig,
        parameters: &[(&str, &Tensor)],
    ) -> Result<Vec<AdafactorState>> {
        let state = |tensor: &Tensor| -> Result<AdafactorState> {
            let options = (state_kind(tensor), tensor.device());
            let size = tensor.size();
            let squares = match &size[..] {
                [.., _, _] => {
                    // Averages over the last and the last but one dimension; the others index matrices.
                    let (rows, mut columns) = (&size[..size.len() - 1], size.clone());
                    columns.remove(size.len() - 2);
                    Squares::Factored {
                        rows: Tensor::f_zeros(rows, options)?,
                        columns: Tensor::f_zeros(&columns[..], options)?,
                    }
                }
                _ => Squares::Whole(Tensor::f_zeros(&size[..], options)?),
            };
            Ok(AdafactorState {
                step: Tensor::f_zeros([0i64; 0], (Kind::Float, Device::Cpu))?,
                exp_avg: (config.beta1.is_some())
                    .then(|| Tensor::f_zeros(&size[..], options))
                    .transpose()?,
                squares,
            })
        };
        parameters.iter().map(|(_, tensor)| state(tensor)).collect()
    }

    fn state_tensors(state: &AdafactorState) -> StateTensors<'_> {
        let mut parts = vec![("step", &state.step)];
        parts.extend(state.exp_avg.iter().map(|average| ("exp_avg", average)));
        match &state.squares {
            Squares::Factored { rows, columns } => {
                parts.extend([("exp_avg_sq_row", rows), ("exp_avg_sq_col", columns)]);
            }
            Squares::Whole(squares) => parts.push(("exp_avg_sq", squares)),
        }
        parts
    }

    fn step(&mut self, config: &AdafactorConfig, jobs: Vec<Job<'_, AdafactorState>>) -> Result<()> {
        jobs.into_iter().try_for_each(|job| step_one(config, job))
    }
}

fn state_kind(tensor: &Tensor) -> Kind {
    match tensor.kind() {
        Kind::Double => Kind::Double,
        _ => Kind::Float,
    }
}

fn step_one(config: &AdafactorConfig, job: Job<'_, AdafactorState>) -> Result<()> {
    let _ = job.state.step.f_add_scalar_(1.0)?;
    let step = step_count(&job.state.step)?;
    let rate = if config.relative_step {
        let least = if config.warmup_init {
            1e-6 * step
        } else {
            1e-2
        };
        f64::min(least, 1.0 / step.sqrt())
    } else {
        job.learning_rate
    };
    // In f64, as transformers computes these scalars in Python.
    let update = FactoredUpdate {
        beta2: 1.0 - step.powf(config.decay_rate),
        eps: config.eps.0,
        clip_threshold: config.clip_threshold,
        learning_rate: rate,
        weight_decay: job.weight_decay,
        scale_floor: config.scale_parameter.then_some(config.eps.1),
    };
    let parameter = &job.parameter;
    // The kernel's conditions.
    let on_slices = parameter.device() == Device::Cpu
        && parameter.kind() == Kind::Float
        && parameter.dim() == 2
        && parameter.is_contiguous();
    match &job.state.squares {
        Squares::Factored { rows, columns } if on_slices && job.state.exp_avg.is_none() => {
            let gradient = job.gradient.f_contiguous()?;
            adafactor_step(&update, parameter, &gradient, rows, columns)
        }
        _ => by_operators(config.beta1, &update, job),
    }
}

fn by_operators(
    beta1: Option<f64>,
    numbers: &FactoredUpdate,
    job: Job<'_, AdafactorState>,
) -> Result<()> {
    let kind = state_kind(&job.parameter);
    // The means of no elements are NaN.
    if job.parameter.numel() == 0 {
        return Ok(());
    }
    let gradient = job.gradient.f_to_kind(kind)?;
    // In at least float32: half-precision squares underflow.
    let mut parameter = job.parameter.f_to_kind(kind)?;
    // A scalar on the device, so that the host does not wait for the root mean square.
    let rate = match numbers.scale_floor {
        Some(floor) => {
            let scale = root_mean_square(&parameter)?.f_clamp_min(floor)?;
            scale.f_mul_scalar(numbers.learning_rate)?
        }
        None => Tensor::f_full(
            [0i64; 0],
            numbers.learning_rate,
            (kind, job.parameter.device()),
        )?,
    };
    let squares = gradient.f_square()?.f_add_scalar(numbers.eps)?;
    let average = |average: &Tensor, value: &Tensor| -> Result<()> {
        let mut average = average.shallow_clone();
        let _ = average.f_mul_scalar_(numbers.beta2)?;
        let _ = average.f_add_(&value.f_mul_scalar(1.0 - numbers.beta2)?)?;
        Ok(())
    };
    let mut update = match &job.state.squares {
        Squares::Factored { rows, columns } => {
            let mean = |dim: i64| squares.f_mean_dim(Some([dim].as_slice()), false, kind);
            average(rows, &mean(-1)?)?;
            average(columns, &mean(-2)?)?;
            let of_rows = rows.f_mean_dim(Some([-1i64].as_slice()), true, kind)?;
            // Divided by their mean, so that the product with the columns has the scale of the squares.
            let row_factor = rows.f_div(&of_rows)?.f_rsqrt()?.f_unsqueeze(-1)?;
            let column_factor = columns.f_rsqrt()?.f_unsqueeze(-2)?;
            row_factor.f_mul(&column_factor)?.f_mul(&gradient)?
        }
        Squares::Whole(whole) => {
            average(whole, &squares)?;
            whole.f_rsqrt()?.f_mul(&gradient)?
        }
    };
    let clip = root_mean_square(&update)?.f_div_scalar(numbers.clip_threshold)?;
    // Only scaled down: a small update is not enlarged.
    let _ = update.f_div_(&clip.f_clamp_min(1.0)?)?;
    let _ = update.f_mul_(&rate)?;
    if let (Some(average), Some(beta1)) = (&mut job.state.exp_avg, beta1) {
        let _ = average.f_mul_scalar_(beta1)?;
        let _ = average.f_add_(&update.f_mul_scalar(1.0 - beta1)?)?;
        update = average.shallow_clone();
    }
    if numbers.weight_decay != 0.0 {
        let kept = rate
            .f_mul_scalar(-numbers.weight_decay)?
            .f_add_scalar(1.0)?;
        parameter = parameter.f_mul(&kept)?;
    }
    let moved = parameter.f_sub(&update)?;
    Ok(job.parameter.shallow_clone().f_copy_(&moved)?)
}

fn root_mean_square(tensor: &Tensor) -> Result<Tensor> {
    let root = (tensor.numel() as f64).sqrt();
    Ok(tensor.f_norm()?.f_div_scalar(root)?)
}
