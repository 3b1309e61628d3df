//! Buckets: the parameters that one kernel call updates together, and the fused and the plain update.

use overdrive_sys::op::{Value, call};
use overdrive_sys::storage::bump_versions;
use tch::{Device, Kind, Tensor};

use super::config::AdamWConfig;
use crate::checks::{same_layout, step_count};
use crate::update_rule::StateTensors;
use crate::{GradScaling, Result};

/// The running averages of one parameter.
#[derive(Debug)]
pub(super) struct Moments {
    /// The number of steps, a float32 scalar as in PyTorch: on the parameter's device for the fused
    /// kernel, which uncounts skipped steps without the host, else on the CPU.
    pub(super) step: Tensor,
    pub(super) exp_avg: Tensor,
    pub(super) exp_avg_sq: Tensor,
    pub(super) max_exp_avg_sq: Option<Tensor>,
    /// The float32 copy of the parameter, if the optimizer has master weights and the parameter is not
    /// float32.
    pub(super) master: Option<Tensor>,
}

impl Moments {
    /// Returns handles that share memory.
    pub(super) fn shallow_clone(&self) -> Self {
        Self {
            step: self.step.shallow_clone(),
            exp_avg: self.exp_avg.shallow_clone(),
            exp_avg_sq: self.exp_avg_sq.shallow_clone(),
            max_exp_avg_sq: self.max_exp_avg_sq.as_ref().map(Tensor::shallow_clone),
            master: self.master.as_ref().map(Tensor::shallow_clone),
        }
    }

    /// Returns the tensors with their names in a stored state, those of PyTorch.
    pub(super) fn tensors(&self) -> StateTensors<'_> {
        let mut tensors = vec![
            ("step", &self.step),
            ("exp_avg", &self.exp_avg),
            ("exp_avg_sq", &self.exp_avg_sq),
        ];
        tensors.extend(
            self.max_exp_avg_sq
                .iter()
                .map(|largest| ("max_exp_avg_sq", largest)),
        );
        tensors.extend(self.master.iter().map(|master| ("master", master)));
        tensors
    }

    /// Sets everything in place to the state before the first step. The caller has switched gradient recording off.
    pub(super) fn reset(&mut self, parameter: &Tensor) -> Result<()> {
        let averages = [&mut self.step, &mut self.exp_avg, &mut self.exp_avg_sq];
        for tensor in averages.into_iter().chain(&mut self.max_exp_avg_sq) {
            let _ = tensor.f_zero_()?;
        }
        if let Some(master) = &mut self.master {
            master.f_copy_(parameter)?;
        }
        Ok(())
    }
}

/// The hyper-parameters of one update.
#[derive(Debug, Clone, Copy)]
pub(super) struct Update<'a> {
    pub(super) config: &'a AdamWConfig,
    pub(super) learning_rate: f64,
    /// The learning rate on the bucket's device, of a capturable optimizer.
    pub(super) rate_on_device: Option<&'a Tensor>,
    pub(super) weight_decay: f64,
}

/// Handles of parameters that share group, device, dtype and implementation. They are kept between steps,
/// so that a step clones only the handles of gradients.
#[derive(Debug)]
pub(super) struct Bucket {
    pub(super) group: usize,
    pub(super) device: Device,
    pub(super) kind: Kind,
    pub(super) fused: bool,
    /// The positions in the optimizer's list of parameters.
    pub(super) members: Vec<usize>,
    /// The tensors that are updated: the parameters, or their masters.
    parameters: Vec<Tensor>,
    /// The parameters whose masters are in `parameters`; empty without masters.
    rounded: Vec<Tensor>,
    elements: usize,
    exp_avgs: Vec<Tensor>,
    exp_avg_sqs: Vec<Tensor>,
    max_exp_avg_sqs: Vec<Tensor>,
    steps: Vec<Tensor>,
}

impl Bucket {
    pub(super) fn new(group: usize, parameter: &Tensor, fused: bool) -> Self {
        Self {
            group,
            device: parameter.device(),
            kind: parameter.kind(),
            fused,
            members: Vec::new(),
            parameters: Vec::new(),
            rounded: Vec::new(),
            elements: 0,
            exp_avgs: Vec::new(),
            exp_avg_sqs: Vec::new(),
            max_exp_avg_sqs: Vec::new(),
            steps: Vec::new(),
        }
    }

    pub(super) fn push(&mut self, index: usize, parameter: &Tensor, moments: &Moments) {
        self.members.push(index);
        self.elements += parameter.numel();
        let master = moments.master.as_ref();
        self.parameters
            .push(master.unwrap_or(parameter).shallow_clone());
        self.rounded
            .extend(master.map(|_| parameter.shallow_clone()));
        self.exp_avgs.push(moments.exp_avg.shallow_clone());
        self.exp_avg_sqs.push(moments.exp_avg_sq.shallow_clone());
        self.max_exp_avg_sqs
            .extend(moments.max_exp_avg_sq.as_ref().map(Tensor::shallow_clone));
        self.steps.push(moments.step.shallow_clone());
    }

    /// Returns `true` if the bucket is full. Gradients of parameters with masters are widened, and the
    /// copies of a bucket live at the same time, so its size is limited.
    pub(super) fn is_full(&self) -> bool {
        // 64 MiB of float32 copies.
        const MAX_WIDENED: usize = 1 << 24;
        !self.rounded.is_empty() && self.elements >= MAX_WIDENED
    }

    /// Applies `gradients`, one per parameter. The caller has disabled gradient recording.
    pub(super) fn update(
        &self,
        update: Update<'_>,
        mut gradients: Vec<Tensor>,
        scaling: Option<&GradScaling<'_>>,
    ) -> Result<()> {
        // Averages of masters are float32, and the kernel needs one dtype.
        if !self.rounded.is_empty() {
            for gradient in &mut gradients {
                *gradient = gradient.f_to_kind(Kind::Float)?;
            }
        }
        if self.fused {
            self.update_fused(update, gradients, scaling)?;
        } else {
            debug_assert!(scaling.is_none(), "only the fused kernel unscales");
            self.update_plain(update, &gradients)?;
        }
        if !self.rounded.is_empty() {
            let arguments = [
                Value::Tensors(&self.rounded),
                Value::Tensors(&self.parameters),
            ];
            call("aten::_foreach_copy_", "", &arguments)?;
        }
        Ok(())
    }

    fn update_fused(
        &self,
        update: Update<'_>,
        mut gradients: Vec<Tensor>,
        scaling: Option<&GradScaling<'_>>,
    ) -> Result<()> {
        // The CPU kernel ignores strides and pairs elements by their offsets in memory.
        let dense = self.dense_parameters()?;
        let parameters = dense.as_ref().unwrap_or(&self.parameters);
        for (gradient, parameter) in gradients.iter_mut().zip(parameters) {
            if !same_layout(gradient, parameter) {
                let mut copy = parameter.f_empty_like()?;
                copy.f_copy_(gradient)?;
                *gradient = copy;
            }
        }
        let on_device = |tensor: &Tensor| tensor.f_to_device(self.device);
        let grad_scale = scaling
            .and_then(|s| s.grad_scale)
            .map(on_device)
            .transpose()?;
        // The kernel compares with 1, but flags of several devices may have been summed.
        let found_inf = scaling
            .map(|s| -> Result<Tensor> { Ok(on_device(s.found_inf)?.f_clamp_max(1.0)?) })
            .transpose()?;

        let config = update.config;
        // A number would become a constant of a captured graph; a tensor is read by each replay.
        let (overload, learning_rate) = match update.rate_on_device {
            Some(rate) => ("tensor_lr", Value::Tensor(rate)),
            None => ("", Value::Float(update.learning_rate)),
        };
        // The kernel does not count steps itself.
        call(
            "aten::_foreach_add_",
            "Scalar",
            &[Value::Tensors(&self.steps), Value::Float(1.0)],
        )?;
        call(
            "aten::_fused_adamw_",
            overload,
            &[
                Value::Tensors(parameters),
                Value::Tensors(&gradients),
                Value::Tensors(&self.exp_avgs),
                Value::Tensors(&self.exp_avg_sqs),
                Value::Tensors(&self.max_exp_avg_sqs),
                Value::Tensors(&self.steps),
                learning_rate,
                Value::Float(config.betas.0),
                Value::Float(config.betas.1),
                Value::Float(update.weight_decay),
                Value::Float(config.eps),
                Value::Bool(config.amsgrad),
                Value::Bool(config.maximize),
                grad_scale.as_ref().map_or(Value::None, Value::Tensor),
                found_inf.as_ref().map_or(Value::None, Value::Tensor),
            ],
        )?;
        // A skipped step does not count: the count is decremented on the device.
        if let Some(found_inf) = found_inf {
            let each: Vec<Tensor> = self
                .steps
                .iter()
                .map(|_| found_inf.shallow_clone())
                .collect();
            let arguments = [
                Value::Tensors(&self.steps),
                Value::Tensors(&each),
                Value::Float(1.0),
            ];
            call("aten::_foreach_sub_", "List", &arguments)?;
        }
        if let Some(dense) = dense {
            let arguments = [Value::Tensors(&self.parameters), Value::Tensors(&dense)];
            call("aten::_foreach_copy_", "", &arguments)?;
        }
        // libtorch's fused kernels count no change.
        Ok(bump_versions(&self.parameters)?)
    }

    /// Returns the parameters in the layout of their averages, as copies where the layouts differ: for a parameter
    /// with gaps (a view), or one whose memory was replaced. `None` if all layouts agree, as in nearly every model.
    fn dense_parameters(&self) -> Result<Option<Vec<Tensor>>> {
        let is_dense = |(parameter, average): (&Tensor, &Tensor)| same_layout(parameter, average);
        let pairs = self.parameters.iter().zip(&self.exp_avgs);
        if pairs.clone().all(is_dense) {
            return Ok(None);
        }
        let dense = |(parameter, average): (&Tensor, &Tensor)| {
            if same_layout(parameter, average) {
                return Ok(parameter.shallow_clone());
            }
            let mut copy = average.f_empty_like()?;
            copy.f_copy_(parameter)?;
            Ok(copy)
        };
        pairs.map(dense).collect::<Result<_>>().map(Some)
    }

    fn update_plain(&self, update: Update<'_>, gradients: &[Tensor]) -> Result<()> {
        let Update {
            config,
            learning_rate,
            weight_decay,
            ..
        } = update;
        let (beta1, beta2) = config.betas;
        for (i, gradient) in gradients.iter().enumerate() {
            let gradient = if config.maximize {
                gradient.f_neg()?
            } else {
                gradient.shallow_clone()
            };
            let mut parameter = self.parameters[i].shallow_clone();
            let mut exp_avg = self.exp_avgs[i].shallow_clone();
            let mut exp_avg_sq = self.exp_avg_sqs[i].shallow_clone();
            let mut step = self.steps[i].shallow_clone();

            let _ = step.f_add_scalar_(1.0)?;
            let step = step_count(&step)?;
            let bias_correction1 = 1.0 - beta1.powf(step);
            let bias_correction2 = 1.0 - beta2.powf(step);

            if weight_decay != 0.0 {
                let _ = parameter.f_mul_scalar_(1.0 - learning_rate * weight_decay)?;
            }
            let _ = exp_avg.f_lerp_(&gradient, 1.0 - beta1)?;
            let _ = exp_avg_sq.f_mul_scalar_(beta2)?;
            ternary(
                "aten::addcmul_",
                &exp_avg_sq,
                &gradient,
                &gradient,
                1.0 - beta2,
            )?;
            let mut denominator = match self.max_exp_avg_sqs.get(i) {
                Some(largest) => {
                    largest
                        .shallow_clone()
                        .f_copy_(&largest.f_maximum(&exp_avg_sq)?)?;
                    largest.f_sqrt()?
                }
                None => exp_avg_sq.f_sqrt()?,
            };
            let _ = denominator.f_div_scalar_(bias_correction2.sqrt())?;
            let _ = denominator.f_add_scalar_(config.eps)?;
            // The order of operations of torch's foreach path, so that results are bit-equal.
            let step_size = learning_rate / bias_correction1;
            ternary(
                "aten::addcdiv_",
                &parameter,
                &exp_avg,
                &denominator,
                -step_size,
            )?;
        }
        Ok(())
    }
}

/// Calls `addcmul_` or `addcdiv_` with a factor, which tch does not bind.
fn ternary(name: &str, out: &Tensor, a: &Tensor, b: &Tensor, factor: f64) -> Result<()> {
    let arguments = [
        Value::Tensor(out),
        Value::Tensor(a),
        Value::Tensor(b),
        Value::Float(factor),
    ];
    call(name, "", &arguments)?;
    Ok(())
}
