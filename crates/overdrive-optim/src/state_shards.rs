//! The redistribution of sharded optimizer states over another number of ranks.

use std::collections::BTreeSet;

use serde_json::Value;
use tch::Tensor;

use crate::state_metadata::mismatch;
use crate::{Result, StateDict};

/// The metadata of an optimizer lists its parameters by group.
pub(crate) const GROUPS: &str = "groups";
pub(crate) const NAME: &str = "name";
const PARAMETERS: &str = "parameters";
pub(crate) const WITHOUT_STATE: &str = "without_state";
/// A [`CombinedOptimizer`](crate::CombinedOptimizer) puts it between an optimizer's name and those of its tensors.
const SEPARATOR: char = '/';

impl StateDict {
    /// Returns the state of the parameters that this state lists, collected from `shards`: the states that the ranks
    /// of a run with another number of processes stored. A sharded optimizer can therefore resume on any number of
    /// ranks: `self` is its new state, and the result is loaded into it. Shards are read one after another, and only
    /// the tensors of these parameters are kept from each.
    ///
    /// ```
    /// use overdrive_optim::{AdamW, AdamWConfig, Optimizer, ParamGroup, StateDict};
    /// use tch::{Device, Kind, Tensor};
    ///
    /// let tensor = || Tensor::ones([2], (Kind::Float, Device::Cpu)).set_requires_grad(true);
    /// let [a, b] = [tensor(), tensor()];
    /// let of = |named: &[(&str, &Tensor)]| {
    ///     let named = named.iter().map(|(name, tensor)| (name.to_string(), tensor.shallow_clone()));
    ///     AdamW::new(vec![ParamGroup::new("all", named.collect())], AdamWConfig::default())
    /// };
    /// (&a + &b * 2.0).sum(Kind::Float).backward();
    /// let mut ranks = [of(&[("a", &a)])?, of(&[("b", &b)])?];
    /// for rank in &mut ranks {
    ///     rank.step()?;
    /// }
    /// let mut one = of(&[("a", &a), ("b", &b)])?;
    /// let shards = ranks.iter().map(Optimizer::state_dict);
    /// let state = one.state_dict()?.gather(shards)?;
    /// one.load_state_dict(&state)?;
    /// assert_eq!(one.state_dict()?.tensors, state.tensors);
    /// # Ok::<(), overdrive_optim::Error>(())
    /// ```
    ///
    /// # Errors
    /// The first error of a shard; [`crate::Error::StateMismatch`] if the shards have different options, or a state
    /// is not that of an optimizer.
    pub fn gather<E: From<crate::Error>>(
        &self,
        shards: impl IntoIterator<Item = std::result::Result<StateDict, E>>,
    ) -> std::result::Result<StateDict, E> {
        let mut own = Vec::new();
        list(&self.metadata, "", &mut own)?;
        let own: BTreeSet<String> = own.into_iter().collect();
        let mut gathered = StateDict {
            tensors: std::collections::BTreeMap::new(),
            metadata: Value::Null,
        };
        for shard in shards {
            let shard = shard?;
            let mut stored = Vec::new();
            list(&shard.metadata, "", &mut stored)?;
            let stored: BTreeSet<String> = stored.into_iter().collect();
            let is_own =
                |key: &str| parameter_of(key, &stored).is_some_and(|name| own.contains(name));
            let tensors = shard.tensors.into_iter();
            gathered
                .tensors
                .extend(tensors.filter(|(key, _): &(String, Tensor)| is_own(key)));
            if let Some(metadata) = restricted(shard.metadata, "", &own) {
                join(&mut gathered.metadata, metadata)?;
            }
        }
        Ok(gathered)
    }
}

/// Lists the parameters in the metadata of an optimizer, each with the names of the optimizers that contain it.
fn list(metadata: &Value, prefix: &str, into: &mut Vec<String>) -> Result<()> {
    // A rank without a parameter stores nothing.
    if metadata.is_null() {
        return Ok(());
    }
    if let Some(groups) = metadata[GROUPS].as_array() {
        let parameters = groups
            .iter()
            .filter_map(|group| group[PARAMETERS].as_array());
        let names = parameters.flatten().filter_map(Value::as_str);
        into.extend(names.map(|name| format!("{prefix}{name}")));
        return Ok(());
    }
    let optimizers = metadata.as_object();
    let optimizers = optimizers.filter(|all| all.values().all(Value::is_object));
    let Some(optimizers) = optimizers else {
        return Err(mismatch(
            "it is not the state of an optimizer by parameters, so it cannot be divided over another number of \
             processes"
                .to_owned(),
        ));
    };
    for (name, metadata) in optimizers {
        list(metadata, &format!("{prefix}{name}{SEPARATOR}"), into)?;
    }
    Ok(())
}

/// Returns the parameter that a tensor belongs to. Names of parameters contain dots, so the longest match is chosen.
fn parameter_of<'a>(key: &'a str, parameters: &BTreeSet<String>) -> Option<&'a str> {
    let ends = key.rmatch_indices('.').map(|(end, _)| &key[..end]);
    ends.into_iter().find(|name| parameters.contains(*name))
}

/// Returns the metadata without the parameters that are not in `own`; `None` if it is not that of an optimizer.
fn restricted(metadata: Value, prefix: &str, own: &BTreeSet<String>) -> Option<Value> {
    let Value::Object(mut fields) = metadata else {
        return None;
    };
    if !fields.contains_key(GROUPS) {
        let inner = fields.into_iter().filter_map(|(name, metadata)| {
            let metadata = restricted(metadata, &format!("{prefix}{name}{SEPARATOR}"), own)?;
            Some((name, metadata))
        });
        return Some(Value::Object(inner.collect()));
    }
    let keep = |names: Option<&mut Value>| {
        if let Some(names) = names.and_then(Value::as_array_mut) {
            names.retain(|name| {
                let name = name.as_str().unwrap_or_default();
                own.contains(&format!("{prefix}{name}"))
            });
        }
    };
    keep(fields.get_mut(WITHOUT_STATE));
    // A group may be empty on this rank, which knows its learning rate nevertheless.
    for group in fields.get_mut(GROUPS).and_then(Value::as_array_mut)? {
        keep(group.get_mut(PARAMETERS));
    }
    Some(Value::Object(fields))
}

/// Joins the metadata of two shards of one optimizer.
fn join(all: &mut Value, shard: Value) -> Result<()> {
    if all.is_null() {
        *all = shard;
        return Ok(());
    }
    let (Value::Object(all), Value::Object(shard)) = (all, shard) else {
        return Err(mismatch("its metadata is damaged".to_owned()));
    };
    let is_one = all.contains_key(GROUPS);
    for (key, value) in shard {
        let here = all.entry(key.clone()).or_insert(Value::Null);
        match key.as_str() {
            GROUPS if is_one => join_groups(here, value)?,
            WITHOUT_STATE if is_one => append(here, value),
            _ if !is_one => join(here, value)?,
            _ if *here != value => {
                return Err(mismatch(format!(
                    "`{key}` is {here} on one rank and {value} on another"
                )));
            }
            _ => {}
        }
    }
    Ok(())
}

/// Joins groups by their names.
fn join_groups(all: &mut Value, shard: Value) -> Result<()> {
    let (Value::Array(all), Value::Array(shard)) = (all, shard) else {
        return Err(mismatch("its groups are damaged".to_owned()));
    };
    for mut group in shard {
        match all.iter_mut().find(|other| other[NAME] == group[NAME]) {
            Some(other) => append(&mut other[PARAMETERS], group[PARAMETERS].take()),
            None => all.push(group),
        }
    }
    Ok(())
}

fn append(all: &mut Value, more: Value) {
    if let (Value::Array(all), Value::Array(more)) = (all, more) {
        all.extend(more);
    }
}
