//! An exponential moving average of weights.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use overdrive_sys::op::{Value, call};
use serde::{Deserialize, Serialize};
use tch::{Kind, Tensor};

use crate::checks::{Place, check_distinct, check_finite_from_zero, check_option};
use crate::stored::{complain, mismatch};
use crate::{Error, Result, StateDict};

const FORMAT_VERSION: u32 = 1;

/// How the decay of an [`Ema`] rises to its final value, by the count t of updates since
/// [`EmaConfig::update_after_step`].
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum EmaWarmup {
    /// It does not: the decay is the same from the first update, which copies
    /// (`torch.optim.swa_utils.get_ema_multi_avg_fn`).
    #[default]
    None,
    /// `(1 + t) / (10 + t)`: diffusers' without `use_ema_warmup`, TensorFlow's.
    Ramp,
    /// `1 - (1 + t / inv_gamma)^-power`: diffusers' with `use_ema_warmup`. An inverse gamma of 1 and a
    /// power of 2/3 suit a million steps, 3/4 a hundred thousand.
    Power {
        /// Larger is slower; above 0.
        inv_gamma: f64,
        /// Larger is faster; above 0.
        power: f64,
    },
}

/// Options of [`Ema`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct EmaConfig {
    /// Share of the average that an update keeps, in [0, 1]. Default 0.999.
    pub decay: f64,
    /// The least decay while it warms up, in [0, 1]. Default 0.
    pub min_decay: f64,
    /// How the decay gets there. Default [`EmaWarmup::None`].
    pub warmup: EmaWarmup,
    /// Updates that copy the weights before averaging begins. Default 0.
    pub update_after_step: u64,
    /// Keeps the averages of float16 and bfloat16 weights in float32: with a decay of 0.999 a change of
    /// a thousandth is lost in their own kind. Default true.
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
    /// [`Error::InvalidOption`] naming the first option outside its range.
    pub fn validate(&self) -> Result<()> {
        for (option, decay) in [("decay", self.decay), ("min_decay", self.min_decay)] {
            let holds = (0.0..=1.0).contains(&decay);
            check_option(option, decay, holds, "a number from 0 to 1")?;
        }
        if let EmaWarmup::Power { inv_gamma, power } = self.warmup {
            for (option, value) in [("inv_gamma", inv_gamma), ("power", power)] {
                check_finite_from_zero(option, value)?;
                check_option(option, value, value > 0.0, "a number above 0")?;
            }
        }
        Ok(())
    }

    /// Share of the average that the update after `updates` others keeps; 0 copies.
    #[must_use]
    pub fn decay_at(&self, updates: u64) -> f64 {
        let Some(t) = updates.checked_sub(self.update_after_step) else {
            return 0.0;
        };
        if t == 0 {
            return 0.0;
        }
        let t = t as f64;
        let decay = match self.warmup {
            EmaWarmup::None => self.decay,
            EmaWarmup::Ramp => (1.0 + t) / (10.0 + t),
            EmaWarmup::Power { inv_gamma, power } => 1.0 - (1.0 + t / inv_gamma).powf(-power),
        };
        decay.min(self.decay).max(self.min_decay)
    }
}

/// An exponential moving average of a model's weights, which often evaluates better than the weights
/// ([Polyak & Juditsky 1992]; `torch.optim.swa_utils.AveragedModel` with `get_ema_multi_avg_fn`,
/// diffusers' `EMAModel`).
///
/// Call [`update`](Self::update) after each optimizer step, [`apply`](Self::apply) around an
/// evaluation. The first update copies the weights. The averages are as large as the weights and lie
/// on the same device; an update is one pass over both.
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
    /// Averages of `named_parameters`, which start as copies. Give what a checkpoint of the model
    /// would hold: floating-point buffers too. Handles share memory with the model's.
    ///
    /// # Errors
    /// When an option is outside its range, a name comes twice, two names share memory (list tied
    /// weights once), or a tensor holds no floating-point numbers.
    pub fn new(named_parameters: Vec<(String, Tensor)>, config: EmaConfig) -> Result<Self> {
        config.validate()?;
        check_distinct(named_parameters.iter().map(|(n, t)| (n.as_str(), t)))?;
        let _no_grad = tch::no_grad_guard();
        let (mut names, mut weights, mut averages) = (Vec::new(), Vec::new(), Vec::new());
        for (name, tensor) in named_parameters {
            let kind = tensor.f_kind()?;
            let of_average = match kind {
                Kind::Half | Kind::BFloat16 if config.float32 => Kind::Float,
                Kind::Half | Kind::BFloat16 | Kind::Float | Kind::Double => kind,
                _ => return Err(Error::UnsupportedKind { name, kind }),
            };
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

    /// Takes the present weights into the averages; returns the decay that this update had.
    ///
    /// # Errors
    /// [`Error::MovedParameter`] if a weight changed device, kind or shape since [`new`](Self::new).
    pub fn update(&mut self) -> Result<f64> {
        let _no_grad = tch::no_grad_guard();
        self.check_places()?;
        let decay = self.config.decay_at(self.updates);
        for (weights, averages) in self.alike() {
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

    /// Puts the averages into the model until the guard is dropped, which puts the weights back: for
    /// an evaluation, or to store the averaged model. Takes the memory of the weights once more.
    ///
    /// # Errors
    /// As for [`update`](Self::update); the model is as it was then.
    pub fn apply(&mut self) -> Result<EmaGuard<'_>> {
        let _no_grad = tch::no_grad_guard();
        self.check_places()?;
        let backup: Vec<Tensor> = self
            .weights
            .iter()
            .map(|weight| {
                let mut copy = weight.f_empty_like()?;
                copy.f_copy_(weight)?;
                Ok(copy)
            })
            .collect::<Result<_>>()?;
        let guard = EmaGuard { ema: self, backup };
        for (weight, average) in guard.ema.weights.iter().zip(&guard.ema.averages) {
            weight.shallow_clone().f_copy_(average)?;
        }
        Ok(guard)
    }

    /// Puts the averages into the model for good.
    ///
    /// # Errors
    /// As for [`update`](Self::update).
    pub fn copy_to_model(&self) -> Result<()> {
        let _no_grad = tch::no_grad_guard();
        self.check_places()?;
        for (weight, average) in self.weights.iter().zip(&self.averages) {
            weight.shallow_clone().f_copy_(average)?;
        }
        Ok(())
    }

    /// The averages with their names, as handles that share memory.
    pub fn averages(&self) -> impl Iterator<Item = (&str, Tensor)> {
        let averages = self.averages.iter().map(Tensor::shallow_clone);
        self.names.iter().map(String::as_str).zip(averages)
    }

    /// Updates so far.
    #[must_use]
    pub fn updates(&self) -> u64 {
        self.updates
    }

    /// The options this was made with, or loaded from a state.
    #[must_use]
    pub fn config(&self) -> &EmaConfig {
        &self.config
    }

    /// The averages and their count. The tensors share memory with the averages.
    ///
    /// # Errors
    /// Only if the options cannot be written as JSON, which they can.
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

    /// Takes over what [`state_dict`](Self::state_dict) gave. Values are copied.
    ///
    /// # Errors
    /// [`Error::StateMismatch`] naming what is missing, unexpected or misshapen; nothing is changed
    /// then.
    pub fn load_state_dict(&mut self, state: &StateDict) -> Result<()> {
        let _no_grad = tch::no_grad_guard();
        let metadata = Metadata::deserialize(&state.metadata)
            .map_err(|e| mismatch(format!("its metadata is not that of an average ({e})")))?;
        if metadata.format_version != FORMAT_VERSION {
            return Err(mismatch(format!(
                "it is format {}, expected format {FORMAT_VERSION}",
                metadata.format_version
            )));
        }
        metadata.ema.validate()?;
        let own: BTreeMap<&str, &Tensor> = self
            .names
            .iter()
            .map(String::as_str)
            .zip(&self.averages)
            .collect();
        let missing = own
            .keys()
            .filter(|name| !state.tensors.contains_key(**name));
        let unexpected: BTreeSet<&String> = state
            .tensors
            .keys()
            .filter(|name| !own.contains_key(name.as_str()))
            .collect();
        let misshapen = own.iter().filter_map(|(name, average)| {
            let stored = state.tensors.get(*name)?;
            let (found, expected) = (stored.size(), average.size());
            (found != expected).then(|| format!("{name} {found:?}, expected {expected:?}"))
        });
        complain([
            (
                "missing tensors",
                missing.map(ToString::to_string).collect(),
            ),
            (
                "unexpected tensors",
                unexpected.into_iter().cloned().collect(),
            ),
            ("misshapen tensors", misshapen.collect()),
        ])?;
        for (name, average) in own {
            average.shallow_clone().f_copy_(&state.tensors[name])?;
        }
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
    /// As for [`StateDict::save`].
    pub fn save_state(&self, path: impl AsRef<Path>) -> Result<()> {
        self.state_dict()?.save(path)
    }

    /// Loads what [`save_state`](Self::save_state) wrote.
    ///
    /// # Errors
    /// As for [`StateDict::load`] and [`load_state_dict`](Self::load_state_dict).
    pub fn load_state(&mut self, path: impl AsRef<Path>) -> Result<()> {
        self.load_state_dict(&StateDict::load(path)?)
    }

    fn check_places(&self) -> Result<()> {
        for ((name, weight), average) in self.names.iter().zip(&self.weights).zip(&self.averages) {
            let (now, kept) = (Place::of(weight), Place::of(average));
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

    /// Weights and averages that one call takes together.
    fn alike(&self) -> Vec<(Vec<Tensor>, Vec<Tensor>)> {
        let mut lists: Vec<(Vec<Tensor>, Vec<Tensor>)> = Vec::new();
        for (weight, average) in self.weights.iter().zip(&self.averages) {
            let place = |t: &Tensor| (t.kind(), t.device());
            let fits = |(weights, averages): &(Vec<Tensor>, Vec<Tensor>)| {
                weights.first().is_some_and(|w| place(w) == place(weight))
                    && averages.first().is_some_and(|a| place(a) == place(average))
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

/// While it lives, the model has the averages; dropped, also by a panic, it puts the weights back.
#[derive(Debug)]
#[must_use = "the averages are in the model while this lives"]
pub struct EmaGuard<'a> {
    ema: &'a Ema,
    backup: Vec<Tensor>,
}

impl EmaGuard<'_> {
    /// Puts the weights back, as dropping does, and tells if that fails.
    ///
    /// # Errors
    /// When libtorch refuses, as for weights that were moved meanwhile.
    pub fn restore(mut self) -> Result<()> {
        self.put_back()
    }

    fn put_back(&mut self) -> Result<()> {
        let _no_grad = tch::no_grad_guard();
        for (weight, backup) in self.ema.weights.iter().zip(self.backup.drain(..)) {
            weight.shallow_clone().f_copy_(&backup)?;
        }
        Ok(())
    }
}

impl Drop for EmaGuard<'_> {
    fn drop(&mut self) {
        // Shapes were checked by `apply`; whoever resizes a weight meanwhile uses `restore` to hear
        // of it.
        let _ = self.put_back();
    }
}
