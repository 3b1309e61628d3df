//! An exponential moving average of weights.

use std::path::Path;

use overdrive_core::{check_option, check_positive};
use overdrive_sys::op::{Value, call};
use serde::{Deserialize, Serialize};
use tch::{Kind, Tensor};

use crate::checks::{TensorSpec, check_distinct, check_writable, unsupported_kind};
use crate::state_metadata::{copy, mismatch, paired};
use crate::{Error, Result, StateDict};

const FORMAT_VERSION: u32 = 1;

/// The warm-up of the decay of an [`Ema`], as a function of the number t of updates since
/// [`EmaConfig::update_after_step`].
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum EmaWarmup {
    /// No warm-up: the decay is constant after the first update, which copies the weights
    /// (`torch.optim.swa_utils.get_ema_multi_avg_fn`).
    #[default]
    None,
    /// `(1 + t) / (10 + t)`, as diffusers without `use_ema_warmup`, and TensorFlow.
    Ramp,
    /// `1 - (1 + t / inv_gamma)^-power`, as diffusers with `use_ema_warmup`. With an inverse gamma of 1,
    /// a power of 2/3 suits a million steps, and 3/4 a hundred thousand.
    Power {
        /// The time scale; positive. A larger value warms up more slowly.
        inv_gamma: f64,
        /// The exponent; positive. A larger value warms up faster.
        power: f64,
    },
}

/// The options of [`Ema`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct EmaConfig {
    /// The fraction of the average that an update keeps, in [0, 1]. Default: 0.999.
    pub decay: f64,
    /// The minimum of the decay during the warm-up, in [0, 1]. Default: 0.
    pub min_decay: f64,
    /// The warm-up of the decay. Default: [`EmaWarmup::None`].
    pub warmup: EmaWarmup,
    /// The number of updates that copy the weights before averaging begins. Default: 0.
    pub update_after_step: u64,
    /// If `true` (the default), the averages of float16 and bfloat16 weights are float32: with a decay of
    /// 0.999 the change of an update, a thousandth, is lost in their own dtype.
    pub float32: bool,
}

impl Default for EmaConfig {
    fn default() -> Self {
        Self {
            decay: 0.999,
            min_decay: 0.0,
            warmup: EmaWarmup::None,
            update_after_step: 0,
            float32: true,
        }
    }
}

impl EmaConfig {
    /// Checks every option against its range.
    ///
    /// # Errors
    /// [`Error::Common`] with the first option out of its range.
    pub fn validate(&self) -> Result<()> {
        for (option, decay) in [("decay", self.decay), ("min_decay", self.min_decay)] {
            let valid = (0.0..=1.0).contains(&decay);
            check_option(valid, option, decay, "at least 0 and at most 1")?;
        }
        if let EmaWarmup::Power { inv_gamma, power } = self.warmup {
            check_positive("inv_gamma", inv_gamma)?;
            check_positive("power", power)?;
        }
        Ok(())
    }

    /// Returns the fraction of the average that the update after `updates` others keeps; 0 copies the
    /// weights.
    #[must_use]
    pub fn decay_at(&self, updates: u64) -> f64 {
        let Some(t) = updates.checked_sub(self.update_after_step) else {
            return 0.0;
        };
        // The first update copies: an average that starts elsewhere would be biased towards its start.
        if t == 0 {
            return 0.0;
        }
        let t = t as f64;
        let decay = match self.warmup {
            EmaWarmup::None => self.decay,
            EmaWarmup::Ramp => (1.0 + t) / (10.0 + t),
            EmaWarmup::Power { inv_gamma, power } => 1.0 - (1.0 + t / inv_gamma).powf(-power),
        };
        // As in diffusers: the minimum takes precedence over the final decay.
        decay.min(self.decay).max(self.min_decay)
    }
}

/// An exponential moving average of a model's weights, which often has a lower loss than the weights
/// ([Polyak & Juditsky 1992]; `torch.optim.swa_utils.AveragedModel` with `get_ema_multi_avg_fn`,
/// diffusers' `EMAModel`).
///
/// Call [`update`](Self::update) after each optimizer step, and [`apply`](Self::apply) around an
/// evaluation. The first update copies the weights. The averages are as large as the weights and on the
/// same device; an update is one pass over both.
///
/// ```
/// use overdrive_optim::{Ema, EmaConfig};
/// use tch::{Device, Kind, Tensor};
///
/// let mut weight = Tensor::zeros([2], (Kind::Float, Device::Cpu)).set_requires_grad(true);
/// let config = EmaConfig { decay: 0.75, ..Default::default() };
/// let mut ema = Ema::new(vec![("weight".into(), weight.shallow_clone())], config)?;
/// ema.update()?;
/// tch::no_grad(|| weight.fill_(1.0));
/// ema.update()?;
/// {
///     let _averaged = ema.apply()?;
///     assert_eq!(Vec::<f32>::try_from(&weight)?, [0.25, 0.25]);
/// }
/// assert_eq!(Vec::<f32>::try_from(&weight)?, [1.0, 1.0]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// [Polyak & Juditsky 1992]: https://doi.org/10.1137/0330046
#[derive(Debug)]
pub struct Ema {
    config: EmaConfig,
    updates: u64,
    names: Vec<String>,
    weights: Vec<Tensor>,
    averages: Vec<Tensor>,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Metadata {
    format_version: u32,
    ema: EmaConfig,
    updates: u64,
}

impl Ema {
    /// Returns averages of `named_parameters`, initialized with copies. Pass all tensors of a checkpoint
    /// of the model, including floating-point buffers. The handles share memory with the model.
    ///
    /// # Errors
    /// An error if an option is out of its range, a name is not unique, two tensors share memory (list
    /// tied weights once), or a tensor is not floating-point.
    pub fn new(named_parameters: Vec<(String, Tensor)>, config: EmaConfig) -> Result<Self> {
        config.validate()?;
        for (name, tensor) in &named_parameters {
            check_writable(name, tensor)?;
        }
        check_distinct(named_parameters.iter().map(|(n, t)| (n.as_str(), t)))?;
        let _no_grad = tch::no_grad_guard();
        let (mut names, mut weights, mut averages) = (Vec::new(), Vec::new(), Vec::new());
        for (name, tensor) in named_parameters {
            let kind = tensor.f_kind()?;
            let of_average = match kind {
                Kind::Half | Kind::BFloat16 if config.float32 => Kind::Float,
                Kind::Half | Kind::BFloat16 | Kind::Float | Kind::Double => kind,
                _ => return Err(unsupported_kind(&name, kind)),
            };
            // `empty_like` keeps the strides, so that an update pairs elements without copies.
            let mut average = tensor.f_empty_like()?.f_to_kind(of_average)?;
            average.f_copy_(&tensor)?;
            names.push(name);
            averages.push(average);
            weights.push(tensor);
        }
        Ok(Self {
            config,
            updates: 0,
            names,
            weights,
            averages,
        })
    }

    /// Updates the averages with the current weights, and returns the decay of this update.
    ///
    /// # Errors
    /// [`Error::MovedParameter`] if a weight changed its device or shape since [`new`](Self::new).
    pub fn update(&mut self) -> Result<f64> {
        let _no_grad = tch::no_grad_guard();
        self.check_unmoved()?;
        let decay = self.config.decay_at(self.updates);
        for (weights, averages) in self.batches() {
            // `lerp` needs one dtype; weights that already have it are not copied.
            let weights: Vec<Tensor> = weights
                .iter()
                .zip(&averages)
                .map(|(weight, average)| Ok(weight.f_to_kind(average.kind())?))
                .collect::<Result<_>>()?;
            call(
                "aten::_foreach_lerp_",
                "Scalar",
                &[
                    Value::Tensors(&averages),
                    Value::Tensors(&weights),
                    Value::Float(1.0 - decay),
                ],
            )?;
        }
        self.updates += 1;
        Ok(decay)
    }

    /// Copies the averages into the model until the guard is dropped, which restores the weights: for an
    /// evaluation, or for storing the averaged model. The backup needs the memory of the weights once
    /// more.
    ///
    /// # Errors
    /// As [`update`](Self::update); the model is unchanged then.
    pub fn apply(&mut self) -> Result<EmaGuard<'_>> {
        let _no_grad = tch::no_grad_guard();
        self.check_unmoved()?;
        let backup: Vec<Tensor> = self
            .weights
            .iter()
            .map(|weight| {
                let mut copy = weight.f_empty_like()?;
                copy.f_copy_(weight)?;
                Ok(copy)
            })
            .collect::<Result<_>>()?;
        // Created before the first copy, so that an error below restores the weights.
        let guard = EmaGuard { ema: self, backup };
        for (weight, average) in guard.ema.weights.iter().zip(&guard.ema.averages) {
            weight.shallow_clone().f_copy_(average)?;
        }
        Ok(guard)
    }

    /// Copies the averages into the model permanently.
    ///
    /// # Errors
    /// As [`update`](Self::update).
    pub fn copy_to_model(&self) -> Result<()> {
        let _no_grad = tch::no_grad_guard();
        self.check_unmoved()?;
        for (weight, average) in self.weights.iter().zip(&self.averages) {
            weight.shallow_clone().f_copy_(average)?;
        }
        Ok(())
    }

    /// Returns the averages with their names, as handles that share memory.
    pub fn averages(&self) -> impl Iterator<Item = (&str, Tensor)> {
        let averages = self.averages.iter().map(Tensor::shallow_clone);
        self.names.iter().map(String::as_str).zip(averages)
    }

    /// Returns the number of updates.
    #[must_use]
    pub fn updates(&self) -> u64 {
        self.updates
    }

    /// Returns the options, or those of the state that was loaded.
    #[must_use]
    pub fn config(&self) -> &EmaConfig {
        &self.config
    }

    /// Sets the decay of the next updates, such as that of a run that resumes with another one.
    ///
    /// # Errors
    /// [`Error::Common`] if it is not in [0, 1]; the decay is unchanged then.
    pub fn set_decay(&mut self, decay: f64) -> Result<()> {
        let config = EmaConfig {
            decay,
            ..self.config.clone()
        };
        config.validate()?;
        self.config = config;
        Ok(())
    }

    /// Returns the averages and the number of updates. The tensors share memory with the averages.
    ///
    /// # Errors
    /// [`Error::StateMismatch`] if the options cannot be represented in JSON.
    pub fn state_dict(&self) -> Result<StateDict> {
        let metadata = Metadata {
            format_version: FORMAT_VERSION,
            ema: self.config.clone(),
            updates: self.updates,
        };
        Ok(StateDict {
            tensors: self
                .averages()
                .map(|(name, tensor)| (name.to_owned(), tensor))
                .collect(),
            metadata: serde_json::to_value(metadata).map_err(|e| mismatch(e.to_string()))?,
        })
    }

    /// Loads a state that [`state_dict`](Self::state_dict) returned, by copying it.
    ///
    /// # Errors
    /// [`Error::StateMismatch`] with the missing, unexpected or misshapen tensors; nothing is changed then.
    pub fn load_state_dict(&mut self, state: &StateDict) -> Result<()> {
        let _no_grad = tch::no_grad_guard();
        let metadata = Metadata::deserialize(&state.metadata)
            .map_err(|e| mismatch(format!("its metadata is not that of an average ({e})")))?;
        if metadata.format_version != FORMAT_VERSION {
            return Err(mismatch(format!(
                "it has format {}; it must have format {FORMAT_VERSION}",
                metadata.format_version
            )));
        }
        metadata.ema.validate()?;
        let own = self.names.iter().cloned().zip(&self.averages);
        copy(paired(own, &state.tensors)?)?;
        // The dtype of the averages was fixed when they were created.
        self.config = EmaConfig {
            float32: self.config.float32,
            ..metadata.ema
        };
        self.updates = metadata.updates;
        Ok(())
    }

    /// Writes [`state_dict`](Self::state_dict) to a safetensors file, as [`StateDict::save`].
    ///
    /// # Errors
    /// As [`StateDict::save`].
    pub fn save_state(&self, path: impl AsRef<Path>) -> Result<()> {
        self.state_dict()?.save(path)
    }

    /// Loads a state that [`save_state`](Self::save_state) wrote.
    ///
    /// # Errors
    /// As [`StateDict::load`] and [`load_state_dict`](Self::load_state_dict).
    pub fn load_state(&mut self, path: impl AsRef<Path>) -> Result<()> {
        self.load_state_dict(&StateDict::load(path)?)
    }

    fn check_unmoved(&self) -> Result<()> {
        for ((name, weight), average) in self.names.iter().zip(&self.weights).zip(&self.averages) {
            let (now, kept) = (TensorSpec::of(weight), TensorSpec::of(average));
            if now.device != kept.device || now.size != kept.size {
                return Err(Error::MovedParameter {
                    name: name.clone(),
                    now: format!("{:?} on {:?}", now.size, now.device),
                    state: format!("{:?} on {:?}", kept.size, kept.device),
                });
            }
        }
        Ok(())
    }

    /// Returns the weights and averages grouped by device and dtypes, as one foreach call needs them.
    fn batches(&self) -> Vec<(Vec<Tensor>, Vec<Tensor>)> {
        let mut lists: Vec<(Vec<Tensor>, Vec<Tensor>)> = Vec::new();
        for (weight, average) in self.weights.iter().zip(&self.averages) {
            let spec = |t: &Tensor| (t.kind(), t.device());
            let fits = |(weights, averages): &(Vec<Tensor>, Vec<Tensor>)| {
                weights.first().is_some_and(|w| spec(w) == spec(weight))
                    && averages.first().is_some_and(|a| spec(a) == spec(average))
            };
            let pair = (weight.shallow_clone(), average.shallow_clone());
            match lists.iter().position(fits) {
                Some(index) => {
                    lists[index].0.push(pair.0);
                    lists[index].1.push(pair.1);
                }
                None => lists.push((vec![pair.0], vec![pair.1])),
            }
        }
        lists
    }
}

/// A guard during whose life the model has the averages. It restores the weights when it is dropped, also
/// by a panic.
#[derive(Debug)]
#[must_use = "the averages are in the model while this lives"]
pub struct EmaGuard<'a> {
    ema: &'a Ema,
    backup: Vec<Tensor>,
}

impl EmaGuard<'_> {
    /// Restores the weights, as dropping does, and returns an error if that fails.
    ///
    /// # Errors
    /// libtorch's errors, such as for weights that were resized meanwhile.
    pub fn restore(mut self) -> Result<()> {
        self.put_back()
    }

    fn put_back(&mut self) -> Result<()> {
        let _no_grad = tch::no_grad_guard();
        let mut result = Ok(());
        // All of them, whatever becomes of one: training would go on from the averages.
        for (weight, backup) in self.ema.weights.iter().zip(self.backup.drain(..)) {
            let copied = weight.shallow_clone().f_copy_(&backup);
            result = result.and(copied.map(drop));
        }
        Ok(result?)
    }
}

impl Drop for EmaGuard<'_> {
    fn drop(&mut self) {
        // `apply` has checked the shapes. A destructor cannot report that a weight was resized meanwhile;
        // `restore` does.
        let _ = self.put_back();
    }
}
