//! Muon: updates by an orthogonalized momentum.

use overdrive_core::{check_non_negative, check_option};
use serde::{Deserialize, Serialize};
use tch::{Device, Kind, Tensor};

use crate::checks::check_rates;
use crate::update_rule::{Job, Rule, StateTensors, optimizer};
use crate::{Error, Result};

/// The limit of `torch.optim.Muon`, beyond which a number of iterations is a mistake.
const MAX_ITERATIONS: u32 = 100;

/// The scaling of Muon's learning rate by a matrix's shape (rows, columns).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum MuonRate {
    /// `√max(1, rows / columns)`, as in Keller Jordan's code. The default.
    #[default]
    Original,
    /// `0.2 √max(rows, columns)`: updates as large as AdamW's, whose learning rate and weight decay then
    /// suit both optimizers (Liu et al. 2025, [arXiv:2502.16982]).
    ///
    /// [arXiv:2502.16982]: https://arxiv.org/abs/2502.16982
    MatchRmsAdamw,
}

/// The dtype in which Muon orthogonalizes a matrix.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum MuonPrecision {
    /// bfloat16 on a GPU, float32 elsewhere, because matmuls in bfloat16 are slow on most CPUs. The default.
    #[default]
    Auto,
    /// bfloat16 on all devices, as in PyTorch.
    BFloat16,
    /// float32 on all devices.
    Float32,
}

/// The options of [`Muon`]. The defaults are those of `torch.optim.Muon`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct MuonConfig {
    /// The learning rate of groups that set none. Default: 1e-3.
    pub learning_rate: f64,
    /// The decoupled weight decay of groups that set none. Default: 0.1.
    pub weight_decay: f64,
    /// The decay rate of the running average of gradients, in [0, 1]. Default: 0.95.
    pub momentum: f64,
    /// If `true` (the default), uses Nesterov's momentum.
    pub nesterov: bool,
    /// The coefficients of the Newton–Schulz iteration. Default: (3.4445, -4.7750, 2.0315).
    pub ns_coefficients: (f64, f64, f64),
    /// The number of iterations, below 100. Default: 5.
    pub ns_steps: u32,
    /// The minimum norm by which a matrix is divided. Default: 1e-7.
    pub eps: f64,
    /// The scaling of the learning rate by a matrix's shape. Default: [`MuonRate::Original`].
    pub adjust_lr_fn: MuonRate,
    /// The dtype of the iteration. Default: [`MuonPrecision::Auto`].
    pub precision: MuonPrecision,
}

impl Default for MuonConfig {
    fn default() -> Self {
        Self {
            learning_rate: 1e-3,
            weight_decay: 0.1,
            momentum: 0.95,
            nesterov: true,
            ns_coefficients: (3.4445, -4.7750, 2.0315),
            ns_steps: 5,
            eps: 1e-7,
            adjust_lr_fn: MuonRate::Original,
            precision: MuonPrecision::Auto,
        }
    }
}

impl MuonConfig {
    /// Checks that every option is in its range.
    ///
    /// # Errors
    /// [`Error::Common`] with the first option out of its range.
    pub fn validate(&self) -> Result<()> {
        check_rates(self.learning_rate, self.weight_decay)?;
        check_non_negative("eps", self.eps)?;
        let valid = (0.0..=1.0).contains(&self.momentum);
        check_option(valid, "momentum", self.momentum, "at least 0 and at most 1")?;
        let (a, b, c) = self.ns_coefficients;
        for coefficient in [a, b, c] {
            let valid = coefficient.is_finite();
            check_option(
                valid,
                "ns_coefficients",
                coefficient,
                "three finite numbers",
            )?;
        }
        let valid = self.ns_steps < MAX_ITERATIONS;
        check_option(valid, "ns_steps", self.ns_steps, "below 100")?;
        Ok(())
    }
}

optimizer! {
    /// Muon (Jordan et al. 2024, [post]), equal to [`torch.optim.Muon`]. The update is the momentum of a
    /// matrix with all its singular values brought close to 1.
    ///
    /// ```text
    /// b ← μ b + (1 - μ) g        u ← g + μ (b - g) with nesterov, else b
    /// θ ← θ (1 - η λ) - η s(θ) NewtonSchulz(u)
    /// ```
    ///
    /// It is meant for the matrices of hidden layers, and accepts two-dimensional parameters only;
    /// embeddings, the output layer, norms and biases need an [`AdamW`](crate::AdamW) beside it. The
    /// state is one tensor per parameter. An iteration is three matmuls with the smaller dimension of the
    /// matrix.
    ///
    /// ```
    /// use overdrive_optim::{Muon, MuonConfig, Optimizer, ParamGroup};
    /// use tch::{Device, Kind, Tensor};
    ///
    /// let weight = Tensor::eye(4, (Kind::Float, Device::Cpu)).set_requires_grad(true);
    /// let group = ParamGroup::new("all", vec![("weight".into(), weight.shallow_clone())]);
    /// let config = MuonConfig { learning_rate: 0.1, weight_decay: 0.0, ..Default::default() };
    /// let mut optimizer = Muon::new(vec![group], config)?;
    /// // Gradients of very different magnitudes…
    /// let sizes = Tensor::from_slice(&[1f32, 10., 100., 1000.]);
    /// (weight.diag(0) * sizes).sum(Kind::Float).backward();
    /// optimizer.step()?;
    /// // …change the weights by about the same amount.
    /// let moved = Vec::<f32>::try_from(1.0 - weight.diag(0))?;
    /// assert!(moved[1..].iter().all(|m| (0.05..0.13).contains(m)), "{moved:?}");
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// [post]: https://kellerjordan.github.io/posts/muon/
    /// [`torch.optim.Muon`]: https://docs.pytorch.org/docs/stable/generated/torch.optim.Muon.html
    Muon(MuonRule), MuonConfig
}

/// The rule of [`Muon`].
#[derive(Debug)]
pub(crate) struct MuonRule;

impl Rule for MuonRule {
    const NAME: &'static str = "muon";
    type Config = MuonConfig;
    type State = Tensor;

    fn new(_: &MuonConfig) -> Self {
        Self
    }

    fn check_parameter(name: &str, tensor: &Tensor) -> Result<()> {
        if tensor.dim() == 2 {
            return Ok(());
        }
        Err(Error::NotAMatrix {
            name: name.to_owned(),
            size: tensor.size(),
        })
    }

    fn new_states(
        &mut self,
        _: &MuonConfig,
        parameters: &[(&str, &Tensor)],
    ) -> Result<Vec<Tensor>> {
        let zeros = |(_, tensor): &(&str, &Tensor)| Ok(tensor.f_zeros_like()?);
        parameters.iter().map(zeros).collect()
    }

    fn state_tensors(state: &Tensor) -> StateTensors<'_> {
        vec![("momentum_buffer", state)]
    }

    fn step(&mut self, config: &MuonConfig, jobs: Vec<Job<'_, Tensor>>) -> Result<()> {
        for job in jobs {
            let momentum = config.momentum;
            // A running average rather than a sum, as in torch.optim.Muon.
            let _ = job.state.f_lerp_(&job.gradient, 1.0 - momentum)?;
            let update = if config.nesterov {
                job.gradient.f_lerp(job.state, momentum)?
            } else {
                job.state.shallow_clone()
            };
            let update = orthogonalize(config, &update)?;
            let mut parameter = job.parameter;
            let _ = parameter.f_mul_scalar_(1.0 - job.learning_rate * job.weight_decay)?;
            let rate = job.learning_rate * scale(config, &parameter);
            // Decay first, as in PyTorch: the update is not decayed.
            let update = update.f_to_kind(parameter.kind())?.f_mul_scalar(-rate)?;
            let _ = parameter.f_add_(&update)?;
        }
        Ok(())
    }
}

fn scale(config: &MuonConfig, parameter: &Tensor) -> f64 {
    let (rows, columns) = match parameter.size()[..] {
        [rows, columns] => (rows as f64, columns as f64),
        _ => (1.0, 1.0),
    };
    match config.adjust_lr_fn {
        MuonRate::Original => (rows / columns).max(1.0).sqrt(),
        MuonRate::MatchRmsAdamw => 0.2 * rows.max(columns).sqrt(),
    }
}

/// Returns the matrix with its singular values brought close to 1 by a quintic Newton–Schulz iteration.
fn orthogonalize(config: &MuonConfig, matrix: &Tensor) -> Result<Tensor> {
    let kind = match (config.precision, matrix.device()) {
        (MuonPrecision::BFloat16, _) | (MuonPrecision::Auto, Device::Cuda(_)) => Kind::BFloat16,
        _ => Kind::Float,
    };
    let (a, b, c) = config.ns_coefficients;
    // Transposed if tall, so that the Gram matrix has the smaller dimension.
    let tall = matches!(matrix.size()[..], [rows, columns] if rows > columns);
    let mut x = matrix.f_to_kind(kind)?;
    if tall {
        x = x.f_tr()?;
    }
    // The iteration converges for singular values up to 1: the spectral norm is at most the Frobenius
    // norm.
    x = x.f_div(&x.f_norm()?.f_clamp_min(config.eps)?)?;
    for _ in 0..config.ns_steps {
        let gram = x.f_matmul(&x.f_tr()?)?;
        let polynomial = addmm(&gram, &gram, &gram, b, c)?;
        x = addmm(&x, &polynomial, &x, a, 1.0)?;
    }
    if tall {
        x = x.f_tr()?;
    }
    Ok(x)
}

/// Returns `beta · sum + alpha · left @ right`, in one call.
fn addmm(sum: &Tensor, left: &Tensor, right: &Tensor, beta: f64, alpha: f64) -> Result<Tensor> {
    use overdrive_sys::op::{Output, Value, call};
    let arguments = [
        Value::Tensor(sum),
        Value::Tensor(left),
        Value::Tensor(right),
        Value::Float(beta),
        Value::Float(alpha),
    ];
    let output = call("aten::addmm", "", &arguments)?.into_iter().next();
    Ok(output.unwrap_or(Output::None).into_tensor()?)
}
