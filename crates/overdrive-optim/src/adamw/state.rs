//! The conversion of AdamW's state to and from tensors by name.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};
use tch::{Kind, Tensor};

use super::bucket::Moments;
use super::optimizer::AdamW;
use crate::state_metadata::{
    GroupMetadata, check_empty, check_groups, check_optimizer, key, mismatch,
};
use crate::{Result, StateDict};

const FORMAT_VERSION: u32 = 1;
const NAME: &str = "adamw";
const STEP: &str = "step";
const EXP_AVG: &str = "exp_avg";
const EXP_AVG_SQ: &str = "exp_avg_sq";
const MAX_EXP_AVG_SQ: &str = "max_exp_avg_sq";
const MASTER: &str = "master";

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
            let mut insert = |part: &str, tensor: &Tensor| -> Result<()> {
                // Detached: giving the handle other memory (`set_data`) does not give it to this optimizer.
                tensors.insert(key(&parameter.name, part), tensor.f_detach()?);
                Ok(())
            };
            insert(STEP, &moments.step)?;
            insert(EXP_AVG, &moments.exp_avg)?;
            insert(EXP_AVG_SQ, &moments.exp_avg_sq)?;
            if let Some(largest) = &moments.max_exp_avg_sq {
                insert(MAX_EXP_AVG_SQ, largest)?;
            }
            if let Some(master) = &moments.master {
                insert(MASTER, master)?;
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
        self.check_tensors(&metadata, &state.tensors)?;

        // All tensors fit. `self` is changed only after the last call that can fail.
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
        let restored: Result<Vec<_>> = self
            .parameters
            .entries
            .iter()
            .map(|parameter| {
                let stored = !metadata.without_state.contains(&parameter.name);
                let mut moments = match &parameter.state {
                    // A captured step reads and writes this memory.
                    Some(moments) if in_place => moments.shallow_clone(),
                    _ if stored || self.config.capturable => {
                        self.new_moments(&parameter.name, &parameter.tensor)?
                    }
                    _ => return Ok(None),
                };
                if stored {
                    fill(&moments, &parameter.name, &state.tensors)?;
                } else {
                    let _no_grad = tch::no_grad_guard();
                    moments.reset(&parameter.tensor)?;
                }
                Ok(Some(moments))
            })
            .collect();
        let restored = match restored {
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

    fn check_tensors(&self, metadata: &Metadata, tensors: &BTreeMap<String, Tensor>) -> Result<()> {
        let mut unexpected: BTreeSet<&String> = tensors.keys().collect();
        let (mut missing, mut misshapen) = (Vec::new(), Vec::new());
        let stepped = self
            .parameters
            .entries
            .iter()
            .filter(|p| !metadata.without_state.contains(&p.name));
        for parameter in stepped {
            let amsgrad = metadata.amsgrad.then_some(MAX_EXP_AVG_SQ);
            let half = matches!(parameter.tensor.kind(), Kind::Half | Kind::BFloat16);
            let master = (metadata.master_weights && half).then_some(MASTER);
            let optional = amsgrad.into_iter().chain(master);
            for part in [STEP, EXP_AVG, EXP_AVG_SQ].into_iter().chain(optional) {
                let key = key(&parameter.name, part);
                let Some(tensor) = tensors.get(&key) else {
                    missing.push(key);
                    continue;
                };
                unexpected.remove(&key);
                let expected = if part == STEP {
                    Vec::new()
                } else {
                    parameter.tensor.size()
                };
                if tensor.size() != expected {
                    misshapen.push(format!(
                        "{key} has shape {:?} and must have {expected:?}",
                        tensor.size()
                    ));
                }
            }
        }
        check_empty([
            ("missing tensors", missing),
            (
                "unexpected tensors",
                unexpected.into_iter().cloned().collect(),
            ),
            ("misshapen tensors", misshapen),
        ])
    }
}

fn fill(moments: &Moments, parameter: &str, tensors: &BTreeMap<String, Tensor>) -> Result<()> {
    let _no_grad = tch::no_grad_guard();
    let copy = |part: &str, to: &Tensor| -> Result<()> {
        let from = tensors.get(&key(parameter, part));
        let from =
            from.ok_or_else(|| mismatch(format!("missing tensors: {}", key(parameter, part))))?;
        Ok(to.shallow_clone().f_copy_(from)?)
    };
    copy(STEP, &moments.step)?;
    copy(EXP_AVG, &moments.exp_avg)?;
    copy(EXP_AVG_SQ, &moments.exp_avg_sq)?;
    if let Some(largest) = &moments.max_exp_avg_sq {
        copy(MAX_EXP_AVG_SQ, largest)?;
    }
    if let Some(master) = &moments.master {
        copy(MASTER, master)?;
    }
    Ok(())
}
