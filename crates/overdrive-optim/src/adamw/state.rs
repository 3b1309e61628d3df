//! The conversion of AdamW's state to and from tensors by name.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};
use tch::Tensor;

use super::bucket::Moments;
use super::optimizer::AdamW;
use crate::parameter_states::Parameter;
use crate::state_metadata::{
    GroupMetadata, check_groups, check_optimizer, copy, key, mismatch, paired,
};
use crate::{Result, StateDict};

const FORMAT_VERSION: u32 = 1;
const NAME: &str = "adamw";

/// The part of the state besides tensors.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Metadata {
    format_version: u32,
    optimizer: String,
    betas: (f64, f64),
    eps: f64,
    amsgrad: bool,
    maximize: bool,
    #[serde(default)]
    master_weights: bool,
    groups: Vec<GroupMetadata>,
    /// The parameters that have not had a gradient yet.
    without_state: BTreeSet<String>,
}

impl AdamW {
    pub(super) fn save_state(&self) -> Result<StateDict> {
        let mut tensors = BTreeMap::new();
        let mut without_state = BTreeSet::new();
        for parameter in &self.parameters.entries {
            let Some(moments) = &parameter.state else {
                without_state.insert(parameter.name.clone());
                continue;
            };
            for (part, tensor) in moments.tensors() {
                // Detached: giving the handle other memory (`set_data`) does not give it to this optimizer.
                tensors.insert(key(&parameter.name, part), tensor.f_detach()?);
            }
        }
        let metadata = Metadata {
            format_version: FORMAT_VERSION,
            optimizer: NAME.into(),
            betas: self.config.betas,
            eps: self.config.eps,
            amsgrad: self.config.amsgrad,
            maximize: self.config.maximize,
            master_weights: self.config.master_weights,
            groups: self.parameters.metadata(),
            without_state,
        };
        let metadata = serde_json::to_value(metadata).map_err(|e| mismatch(e.to_string()))?;
        Ok(StateDict { tensors, metadata })
    }

    pub(super) fn restore_state(&mut self, state: &StateDict) -> Result<()> {
        check_optimizer(&state.metadata, NAME, FORMAT_VERSION)?;
        let metadata = Metadata::deserialize(&state.metadata)
            .map_err(|e| mismatch(format!("its metadata is not AdamW's ({e})")))?;
        check_groups(&self.parameters.metadata(), &metadata.groups)?;
        let config = super::AdamWConfig {
            betas: metadata.betas,
            eps: metadata.eps,
            amsgrad: metadata.amsgrad,
            maximize: metadata.maximize,
            master_weights: metadata.master_weights,
            ..self.config.clone()
        };
        config.validate()?;
        let previous = std::mem::replace(&mut self.config, config);
        // With other options there are other tensors, for which the step is captured anew.
        let in_place = self.config.capturable
            && previous.amsgrad == self.config.amsgrad
            && previous.master_weights == self.config.master_weights;
        let restored = match self.restored(&metadata, &state.tensors, in_place) {
            Ok(restored) => restored,
            Err(error) => {
                self.config = previous;
                return Err(error);
            }
        };
        for (parameter, moments) in self.parameters.entries.iter_mut().zip(restored) {
            parameter.state = moments;
        }
        self.parameters.restore_rates(&metadata.groups);
        self.write_rates()?;
        self.forget_buckets();
        Ok(())
    }

    /// Returns the state of each parameter with the stored values, `in_place` in the memory of its present one. Nothing is
    /// written before all tensors are known to fit.
    fn restored(
        &self,
        metadata: &Metadata,
        tensors: &BTreeMap<String, Tensor>,
        in_place: bool,
    ) -> Result<Vec<Option<Moments>>> {
        let _no_grad = tch::no_grad_guard();
        let is_stored =
            |parameter: &Parameter<Moments>| !metadata.without_state.contains(&parameter.name);
        let entries = &self.parameters.entries;
        let restored = entries.iter().map(|parameter| match &parameter.state {
            // A captured step reads and writes this memory.
            Some(moments) if in_place => Ok(Some(moments.shallow_clone())),
            _ if is_stored(parameter) || self.config.capturable => {
                Ok(Some(self.new_moments(&parameter.name, &parameter.tensor)?))
            }
            _ => Ok(None),
        });
        let mut restored = restored.collect::<Result<Vec<_>>>()?;
        let own = entries.iter().zip(&restored);
        let own = own.filter(|(parameter, _)| is_stored(parameter));
        let own = own.flat_map(|(parameter, moments)| {
            let tensors = moments.iter().flat_map(Moments::tensors);
            tensors.map(|(part, tensor)| (key(&parameter.name, part), tensor))
        });
        copy(paired(own, tensors)?)?;
        for (parameter, moments) in entries.iter().zip(&mut restored) {
            if let (false, Some(moments)) = (is_stored(parameter), moments) {
                moments.reset(&parameter.tensor)?;
            }
        }
        Ok(restored)
    }
}
