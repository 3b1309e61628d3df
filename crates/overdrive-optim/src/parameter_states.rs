//! The parameters of an optimizer in their groups, each with its state.

use overdrive_core::check_non_negative;
use overdrive_sys::grad;
use tch::Tensor;

use crate::checks::{check_distinct, check_leaf, check_rates};
use crate::state_metadata::GroupMetadata;
use crate::{Error, ParamGroup, Result};

#[derive(Debug)]
pub(crate) struct Group {
    pub(crate) name: String,
    pub(crate) learning_rate: f64,
    pub(crate) weight_decay: f64,
}

#[derive(Debug)]
pub(crate) struct Parameter<S> {
    pub(crate) name: String,
    pub(crate) tensor: Tensor,
    /// The index of its group.
    pub(crate) group: usize,
    /// `None` before its first gradient.
    pub(crate) state: Option<S>,
}

/// The parameters of an optimizer in their groups. `S` is the state of a parameter.
#[derive(Debug)]
pub(crate) struct GroupedParameters<S> {
    pub(crate) groups: Vec<Group>,
    /// The parameters of all groups, in the order of the groups.
    pub(crate) entries: Vec<Parameter<S>>,
}

impl<S> GroupedParameters<S> {
    pub(crate) fn new() -> Self {
        Self {
            groups: Vec::new(),
            entries: Vec::new(),
        }
    }

    /// Returns the group and its parameters for [`push`](Self::push), after checking that they can be added.
    /// `defaults` are the learning rate and the weight decay of a group that sets none.
    pub(crate) fn prepare(
        &self,
        group: ParamGroup,
        defaults: (f64, f64),
        check_parameter: impl Fn(&str, &Tensor) -> Result<()>,
    ) -> Result<(Group, Vec<Parameter<S>>)> {
        let learning_rate = group.learning_rate.unwrap_or(defaults.0);
        let weight_decay = group.weight_decay.unwrap_or(defaults.1);
        check_rates(learning_rate, weight_decay)?;
        if self.groups.iter().any(|other| other.name == group.name) {
            let expected = "a name that no other group of this optimizer has";
            return Err(
                overdrive_core::Error::option("ParamGroup::name", group.name, expected).into(),
            );
        }
        for (name, tensor) in &group.parameters {
            check_leaf(name, tensor)?;
            check_parameter(name, tensor)?;
        }
        let present = self.entries.iter().map(|p| (p.name.as_str(), &p.tensor));
        check_distinct(present.chain(group.parameters.iter().map(|(n, t)| (n.as_str(), t))))?;
        let added = group.parameters.into_iter();
        let added = added.map(|(name, tensor)| Parameter {
            name,
            tensor,
            group: self.groups.len(),
            state: None,
        });
        let added = added.collect();
        let group = Group {
            name: group.name,
            learning_rate,
            weight_decay,
        };
        Ok((group, added))
    }

    /// Adds what [`prepare`](Self::prepare) has returned.
    pub(crate) fn push(&mut self, (group, added): (Group, Vec<Parameter<S>>)) {
        self.groups.push(group);
        self.entries.extend(added);
    }

    pub(crate) fn group_names(&self) -> impl Iterator<Item = &str> {
        self.groups.iter().map(|group| group.name.as_str())
    }

    /// Returns the parameters with their names, as handles that share memory.
    pub(crate) fn named(&self) -> impl Iterator<Item = (&str, Tensor)> {
        let entries = self.entries.iter();
        entries.map(|entry| (entry.name.as_str(), entry.tensor.shallow_clone()))
    }

    pub(crate) fn by_group(&self) -> Vec<Vec<Tensor>> {
        let mut groups: Vec<Vec<Tensor>> = self.groups.iter().map(|_| Vec::new()).collect();
        for entry in &self.entries {
            groups[entry.group].push(entry.tensor.shallow_clone());
        }
        groups
    }

    pub(crate) fn zero_grad(&self) -> Result<()> {
        for entry in &self.entries {
            grad::clear(&entry.tensor)?;
        }
        Ok(())
    }

    pub(crate) fn learning_rates(&self) -> Vec<f64> {
        self.groups.iter().map(|g| g.learning_rate).collect()
    }

    pub(crate) fn set_learning_rates(&mut self, learning_rates: &[f64]) -> Result<()> {
        if learning_rates.len() != self.groups.len() {
            let (given, groups) = (learning_rates.len(), self.groups.len());
            return Err(Error::LearningRateCount { given, groups });
        }
        // All are checked before one is set.
        for &rate in learning_rates {
            check_non_negative("learning_rate", rate)?;
        }
        for (group, &learning_rate) in self.groups.iter_mut().zip(learning_rates) {
            group.learning_rate = learning_rate;
        }
        Ok(())
    }

    /// Returns the groups as they are stored with a state.
    pub(crate) fn metadata(&self) -> Vec<GroupMetadata> {
        let names = |index| {
            let of_group = self.entries.iter().filter(move |p| p.group == index);
            of_group.map(|p| p.name.clone()).collect()
        };
        let groups = self.groups.iter().enumerate();
        let metadata = groups.map(|(index, group)| GroupMetadata {
            name: group.name.clone(),
            learning_rate: group.learning_rate,
            weight_decay: group.weight_decay,
            parameters: names(index),
        });
        metadata.collect()
    }

    /// Sets the learning rates and weight decays of a stored state.
    pub(crate) fn restore_rates(&mut self, stored: &[GroupMetadata]) {
        // By name: the order of the groups may differ.
        for group in &mut self.groups {
            if let Some(stored) = stored.iter().find(|g| g.name == group.name) {
                group.learning_rate = stored.learning_rate;
                group.weight_decay = stored.weight_decay;
            }
        }
    }
}
