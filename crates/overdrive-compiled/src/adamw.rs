//! AdamW whose step count and learning rate are on the device.

use overdrive_optim::{AdamWConfig, ParamGroup};
use overdrive_sys::op::{Value, call};
use tch::{Device, Kind, Tensor};

use crate::{Error, Result};

/// AdamW for captured training steps: PyTorch's `AdamW(capturable=True, fused=True)`.
///
/// The count of steps and the learning rates are tensors beside the parameters, so that a replay counts
/// on and a schedule can write a new rate between replays. The update is libtorch's fused kernel; numbers
/// are those of overdrive-optim's AdamW.
#[derive(Debug)]
pub struct CapturableAdamW {
    groups: Vec<Group>,
    config: AdamWConfig,
    device: Device,
    /// Scalar, fp32: how many steps were made.
    step: Tensor,
}

#[derive(Debug)]
struct Group {
    names: Vec<String>,
    parameters: Vec<Tensor>,
    exp_avg: Vec<Tensor>,
    exp_avg_sq: Vec<Tensor>,
    learning_rate: Tensor,
    weight_decay: f64,
}

impl CapturableAdamW {
    /// Averages of zero for every parameter. `amsgrad`, `master_weights` and `implementation` of the
    /// configuration must have their defaults.
    ///
    /// # Errors
    /// For an option outside its range, an option that is not computed here, no parameters, or parameters
    /// on several devices.
    pub fn new(groups: Vec<ParamGroup>, config: AdamWConfig) -> Result<CapturableAdamW> {
        config.validate()?;
        let defaults = AdamWConfig::default();
        if config.amsgrad
            || config.master_weights
            || config.implementation != defaults.implementation
        {
            return Err(Error::BadArgument {
                what: "the configuration of a capturable AdamW".to_owned(),
                expected: "amsgrad, master_weights and implementation at their defaults".to_owned(),
                got: format!("{config:?}"),
            });
        }
        let devices: Vec<Device> = groups
            .iter()
            .flat_map(|group| group.parameters.iter().map(|(_, tensor)| tensor.device()))
            .collect();
        let device = match devices.as_slice() {
            [first, rest @ ..] if rest.iter().all(|device| device == first) => *first,
            other => {
                return Err(Error::BadArgument {
                    what: "parameters of a captured step".to_owned(),
                    expected: "at least one, all on one device".to_owned(),
                    got: format!("{} parameters on {other:?}", other.len()),
                });
            }
        };
        let made = groups
            .into_iter()
            .map(|group| Group::new(group, &config, device))
            .collect::<Result<_>>()?;
        Ok(CapturableAdamW {
            groups: made,
            config,
            device,
            step: Tensor::f_zeros([0i64; 0], (Kind::Float, device))?,
        })
    }

    /// Handles of all parameters.
    pub fn parameters(&self) -> Vec<Tensor> {
        let all = self.groups.iter().flat_map(|group| &group.parameters);
        all.map(Tensor::shallow_clone).collect()
    }

    /// Applies the gradients, which every parameter must have. Reads nothing back to the host.
    ///
    /// # Errors
    /// When a parameter has no gradient, or libtorch refuses.
    pub fn step(&mut self) -> Result<()> {
        let _no_grad = tch::no_grad_guard();
        let _same = self.step.f_add_scalar_(1.0)?;
        for group in &self.groups {
            let gradients = group.gradients()?;
            let steps: Vec<Tensor> = gradients
                .iter()
                .map(|_| self.step.shallow_clone())
                .collect();
            call(
                "aten::_fused_adamw_",
                "tensor_lr",
                &[
                    Value::Tensors(&group.parameters),
                    Value::Tensors(&gradients),
                    Value::Tensors(&group.exp_avg),
                    Value::Tensors(&group.exp_avg_sq),
                    Value::Tensors(&[]),
                    Value::Tensors(&steps),
                    Value::Tensor(&group.learning_rate),
                    Value::Float(self.config.betas.0),
                    Value::Float(self.config.betas.1),
                    Value::Float(group.weight_decay),
                    Value::Float(self.config.eps),
                    Value::Bool(false),
                    Value::Bool(self.config.maximize),
                    Value::None,
                    Value::None,
                ],
            )?;
        }
        Ok(())
    }

    /// Sets one learning rate for all groups, for the next step or replay.
    ///
    /// # Errors
    /// When it is negative or no number.
    pub fn set_learning_rate(&mut self, learning_rate: f64) -> Result<()> {
        if !(learning_rate >= 0.0 && learning_rate.is_finite()) {
            return Err(Error::BadArgument {
                what: "a learning rate".to_owned(),
                expected: "a number of at least 0".to_owned(),
                got: learning_rate.to_string(),
            });
        }
        for group in &mut self.groups {
            let _same = group.learning_rate.f_fill_(learning_rate)?;
        }
        Ok(())
    }

    /// How many steps were made. Waits for the device.
    ///
    /// # Errors
    /// What went wrong on it.
    pub fn steps(&self) -> Result<i64> {
        Ok(self.step.f_to_kind(Kind::Int64)?.f_int64_value(&[])?)
    }

    /// The state by PyTorch's names: `step`, and `exp_avg.NAME`, `exp_avg_sq.NAME` of each parameter. The
    /// tensors are those that the steps write to.
    pub fn state(&self) -> Vec<(String, Tensor)> {
        let mut state = vec![("step".to_owned(), self.step.shallow_clone())];
        for group in &self.groups {
            for (place, name) in group.names.iter().enumerate() {
                let averages = [
                    ("exp_avg", &group.exp_avg),
                    ("exp_avg_sq", &group.exp_avg_sq),
                ];
                state.extend(averages.map(|(what, tensors)| {
                    (format!("{what}.{name}"), tensors[place].shallow_clone())
                }));
            }
        }
        state
    }

    /// Copies a state that [`state`](CapturableAdamW::state) gave into this one; a captured step goes on
    /// from it.
    ///
    /// # Errors
    /// When names or shapes differ; nothing is changed then.
    pub fn load_state(&mut self, state: &[(String, Tensor)]) -> Result<()> {
        let here = self.state();
        let wrong = |got: String| Error::BadArgument {
            what: "the state of a capturable AdamW".to_owned(),
            expected: format!("{} tensors, beginning with step", here.len()),
            got,
        };
        if state.len() != here.len() {
            return Err(wrong(format!("{} tensors", state.len())));
        }
        for ((name, to), (other, from)) in here.iter().zip(state) {
            if name != other || to.size() != from.size() {
                return Err(wrong(format!(
                    "{other} of shape {:?} for {name} of shape {:?}",
                    from.size(),
                    to.size()
                )));
            }
        }
        let _no_grad = tch::no_grad_guard();
        for ((_, to), (_, from)) in here.iter().zip(state) {
            to.shallow_clone().f_copy_(from)?;
        }
        Ok(())
    }

    pub(crate) fn device(&self) -> Device {
        self.device
    }

    /// Everything that a step changes, for those who want it undone.
    pub(crate) fn changed(&self) -> Vec<Tensor> {
        let state = self.state().into_iter().map(|(_, tensor)| tensor);
        self.parameters().into_iter().chain(state).collect()
    }
}

impl Group {
    fn new(group: ParamGroup, config: &AdamWConfig, device: Device) -> Result<Group> {
        let (names, parameters): (Vec<_>, Vec<_>) = group.parameters.into_iter().unzip();
        let zeros = || -> Result<Vec<Tensor>> {
            let like = |tensor: &Tensor| Ok(tensor.f_detach()?.f_zeros_like()?);
            parameters.iter().map(like).collect()
        };
        let rate = group.learning_rate.unwrap_or(config.learning_rate);
        Ok(Group {
            exp_avg: zeros()?,
            exp_avg_sq: zeros()?,
            names,
            parameters,
            learning_rate: Tensor::f_full([0i64; 0], rate, (Kind::Float, device))?,
            weight_decay: group.weight_decay.unwrap_or(config.weight_decay),
        })
    }

    fn gradients(&self) -> Result<Vec<Tensor>> {
        let of = |(tensor, name): (&Tensor, &String)| {
            let gradient = tensor.f_grad()?;
            if !gradient.defined() {
                return Err(Error::BadArgument {
                    what: format!("the gradient of {name}"),
                    expected: "one, as every parameter of a captured step has".to_owned(),
                    got: "none: the loss does not depend on it".to_owned(),
                });
            }
            Ok(gradient)
        };
        self.parameters.iter().zip(&self.names).map(of).collect()
    }
}
