//! The state of an optimizer, which a resumed run loads.

use std::collections::BTreeMap;

use serde_json::Value;
use tch::Tensor;

use crate::state_shards::{GROUPS, NAME, WITHOUT_STATE};

/// The state of an optimizer: tensors by name, and a JSON value for the rest.
///
/// The names are `<parameter>.<state tensor>`, for AdamW `blocks.0.mlp.up.weight.exp_avg`, so a state
/// does not depend on the order of the parameters. [`save`](Self::save) writes both into one safetensors
/// file.
#[derive(Debug)]
pub struct StateDict {
    /// The tensors. Those that `state_dict` returns share memory with the optimizer.
    // Ordered, so that the same state gives the same file.
    pub tensors: BTreeMap<String, Tensor>,
    /// The hyper-parameters and the list of parameters.
    pub metadata: Value,
}

impl StateDict {
    /// Returns this state with the options of `other`, a state of the same optimizer over the same parameters: weight
    /// decays, betas, and all else but the learning rates, which a schedule sets.
    ///
    /// [`Optimizer::load_state_dict`](crate::Optimizer::load_state_dict) restores the options with the state, as in
    /// PyTorch. A run that resumes with other options passes the state of its new optimizer here.
    ///
    /// ```
    /// use overdrive_optim::{AdamW, AdamWConfig, Optimizer, ParamGroup};
    /// use tch::{Device, Kind, Tensor};
    ///
    /// let weight = Tensor::ones([2], (Kind::Float, Device::Cpu)).set_requires_grad(true);
    /// let new = |eps| {
    ///     let group = ParamGroup::new("all", vec![("weight".into(), weight.shallow_clone())]);
    ///     AdamW::new(vec![group], AdamWConfig { eps, ..Default::default() })
    /// };
    /// let (first, mut resumed) = (new(1e-8)?, new(1e-6)?);
    /// let options = resumed.state_dict()?;
    /// resumed.load_state_dict(&first.state_dict()?.with_options_of(&options))?;
    /// assert_eq!(resumed.config().eps, 1e-6);
    /// # Ok::<(), overdrive_optim::Error>(())
    /// ```
    #[must_use]
    pub fn with_options_of(mut self, other: &StateDict) -> StateDict {
        take_options(&mut self.metadata, &other.metadata);
        self
    }
}

/// Replaces the options in the metadata of an optimizer, or of several under their names.
fn take_options(metadata: &mut Value, other: &Value) {
    if metadata[GROUPS].is_array() && other[GROUPS].is_array() {
        let mut new = other.clone();
        // The parameters with a state are those of the tensors, which stay.
        new[WITHOUT_STATE] = metadata[WITHOUT_STATE].take();
        for group in new[GROUPS].as_array_mut().into_iter().flatten() {
            let mut stored = metadata[GROUPS].as_array().into_iter().flatten();
            if let Some(stored) = stored.find(|one| one[NAME] == group[NAME]) {
                group["learning_rate"] = stored["learning_rate"].clone();
            }
        }
        *metadata = new;
    } else if let Value::Object(optimizers) = metadata {
        for (name, metadata) in optimizers {
            take_options(metadata, &other[name.as_str()]);
        }
    }
}
