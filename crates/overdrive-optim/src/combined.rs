//! Several optimizers that step together.

use std::collections::BTreeMap;

use overdrive_core::check_non_negative;
use tch::Tensor;

use crate::state_metadata::mismatch;
use crate::{Error, GradScaling, Optimizer, OptimizerId, Result, StateDict};

/// Several optimizers that step together, each with its own parameters, such as [`Muon`](crate::Muon) for
/// the matrices of the hidden layers and [`AdamW`](crate::AdamW) for all other parameters.
///
/// Groups, learning rates and parameters are those of the first optimizer, then those of the second, and so on. The
/// state contains each optimizer under its name. Loading a state first copies the current states of all optimizers
/// but the last, so that an error leaves all of them unchanged.
///
/// ```
/// use overdrive_optim::{
///     AdamW, AdamWConfig, CombinedOptimizer, Muon, MuonConfig, Optimizer, ParamGroup,
/// };
/// use tch::{Device, Kind, Tensor};
///
/// let weight = |size: &[i64]| Tensor::ones(size, (Kind::Float, Device::Cpu)).set_requires_grad(true);
/// let (matrix, bias) = (weight(&[4, 4]), weight(&[4]));
/// let group = |name: &str, tensor: &Tensor| {
///     vec![ParamGroup::new(name, vec![(name.to_owned(), tensor.shallow_clone())])]
/// };
/// let muon = Muon::new(group("matrix", &matrix), MuonConfig::default())?;
/// let adamw = AdamW::new(group("bias", &bias), AdamWConfig::default())?;
/// let mut optimizer = CombinedOptimizer::new([
///     ("muon".to_owned(), Box::new(muon) as Box<dyn Optimizer>),
///     ("adamw".to_owned(), Box::new(adamw)),
/// ])?;
/// (matrix.matmul(&bias)).sum(Kind::Float).backward();
/// optimizer.step()?;
/// assert_eq!(optimizer.learning_rates().len(), 2);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct CombinedOptimizer {
    id: OptimizerId,
    optimizers: Vec<(String, Box<dyn Optimizer>)>,
}

impl CombinedOptimizer {
    /// Combines optimizers under names of letters, digits and underscores.
    ///
    /// # Errors
    /// [`Error::Common`] for a name that is empty, is not unique or has other characters.
    pub fn new(optimizers: impl IntoIterator<Item = (String, Box<dyn Optimizer>)>) -> Result<Self> {
        let optimizers: Vec<_> = optimizers.into_iter().collect();
        for (index, (name, _)) in optimizers.iter().enumerate() {
            let plain = |c: char| c.is_ascii_alphanumeric() || c == '_';
            let twice = optimizers[..index].iter().any(|(other, _)| other == name);
            if name.is_empty() || !name.chars().all(plain) || twice {
                // The state separates the name from a tensor's by a slash.
                let expected = "letters, digits and underscores, and unique";
                return Err(
                    overdrive_core::Error::option("name", format!("`{name}`"), expected).into(),
                );
            }
        }
        Ok(Self {
            id: OptimizerId::unique(),
            optimizers,
        })
    }

    fn each(&self) -> impl Iterator<Item = &dyn Optimizer> {
        self.optimizers
            .iter()
            .map(|(_, optimizer)| optimizer.as_ref())
    }
}

impl Optimizer for CombinedOptimizer {
    fn id(&self) -> OptimizerId {
        self.id
    }

    fn parameters(&self) -> Vec<Tensor> {
        self.each().flat_map(Optimizer::parameters).collect()
    }

    fn parameters_by_group(&self) -> Vec<Vec<Tensor>> {
        self.each()
            .flat_map(Optimizer::parameters_by_group)
            .collect()
    }

    fn step(&mut self) -> Result<()> {
        self.optimizers
            .iter_mut()
            .try_for_each(|(_, optimizer)| optimizer.step())
    }

    fn supports_step_scaled(&self) -> bool {
        self.each().all(Optimizer::supports_step_scaled)
    }

    /// Steps all optimizers or none: if one does not support it, the others must not be stepped either.
    fn step_scaled(&mut self, scaling: &GradScaling<'_>) -> Result<bool> {
        if !self.supports_step_scaled() {
            return Ok(false);
        }
        for (_, optimizer) in &mut self.optimizers {
            optimizer.step_scaled(scaling)?;
        }
        Ok(true)
    }

    fn zero_grad(&mut self) -> Result<()> {
        self.optimizers
            .iter_mut()
            .try_for_each(|(_, optimizer)| optimizer.zero_grad())
    }

    fn learning_rates(&self) -> Vec<f64> {
        self.each().flat_map(Optimizer::learning_rates).collect()
    }

    fn set_learning_rates(&mut self, learning_rates: &[f64]) -> Result<()> {
        let groups = self.learning_rates().len();
        if learning_rates.len() != groups {
            let given = learning_rates.len();
            return Err(Error::LearningRateCount { given, groups });
        }
        // All are checked before an optimizer gets its own.
        for &rate in learning_rates {
            check_non_negative("learning_rate", rate)?;
        }
        // The number was checked above, so `split_at` cannot panic.
        let mut rest = learning_rates;
        for (_, optimizer) in &mut self.optimizers {
            let (own, others) = rest.split_at(optimizer.learning_rates().len());
            optimizer.set_learning_rates(own)?;
            rest = others;
        }
        Ok(())
    }

    fn state_dict(&self) -> Result<StateDict> {
        let mut tensors = BTreeMap::new();
        let mut metadata = serde_json::Map::new();
        for (name, optimizer) in &self.optimizers {
            let state = optimizer.state_dict()?;
            let named = state.tensors.into_iter();
            tensors.extend(named.map(|(key, tensor)| (format!("{name}/{key}"), tensor)));
            metadata.insert(name.clone(), state.metadata);
        }
        Ok(StateDict {
            tensors,
            metadata: metadata.into(),
        })
    }

    fn load_state_dict(&mut self, state: &StateDict) -> Result<()> {
        let stored = state.metadata.as_object();
        let stored: Vec<&String> = stored
            .into_iter()
            .flat_map(|stored| stored.keys())
            .collect();
        let own: Vec<&String> = self.optimizers.iter().map(|(name, _)| name).collect();
        if own.len() != stored.len() || own.iter().any(|name| !stored.contains(name)) {
            return Err(mismatch(format!(
                "it is for the optimizers {stored:?}, but these are {own:?}"
            )));
        }
        // An error of a later optimizer gives the earlier ones their states back; that of the last is not needed.
        let earlier = self.each().take(self.optimizers.len().saturating_sub(1));
        let before: Vec<StateDict> = earlier
            .map(|optimizer| copied(optimizer.state_dict()?))
            .collect::<Result<_>>()?;
        for index in 0..self.optimizers.len() {
            let (name, optimizer) = &mut self.optimizers[index];
            let prefix = format!("{name}/");
            let own = state.tensors.iter().filter_map(|(key, tensor)| {
                let key = key.strip_prefix(&prefix)?.to_owned();
                Some((key, tensor.shallow_clone()))
            });
            let loaded = optimizer.load_state_dict(&StateDict {
                tensors: own.collect(),
                metadata: state.metadata[name.as_str()].clone(),
            });
            if let Err(error) = loaded {
                let changed = self.optimizers[..index].iter_mut().zip(&before);
                for ((_, optimizer), state) in changed {
                    optimizer.load_state_dict(state)?;
                }
                return Err(error);
            }
        }
        Ok(())
    }
}

/// Returns the state with tensors of its own: an optimizer may load another state in place.
fn copied(state: StateDict) -> Result<StateDict> {
    let copy = |(name, tensor): (String, Tensor)| Ok((name, tensor.f_detach_copy()?));
    let tensors = state.tensors.into_iter().map(copy);
    Ok(StateDict {
        tensors: tensors.collect::<Result<_>>()?,
        metadata: state.metadata,
    })
}

impl std::fmt::Debug for CombinedOptimizer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let names: Vec<_> = self.optimizers.iter().map(|(name, _)| name).collect();
        f.debug_struct("CombinedOptimizer")
            .field("optimizers", &names)
            .finish_non_exhaustive()
    }
}
