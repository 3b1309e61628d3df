//! The common part of optimizers: groups, checks, learning rates, and states by name. An optimizer is a
//! [`Rule`] in an [`Engine`].

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Debug;

use overdrive_sys::storage::bump_versions;
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use tch::Tensor;

use crate::checks::{TensorSpec, bytes, disjoint, gradient_of};
use crate::parameter_states::GroupedParameters;
use crate::state_metadata::{
    GroupMetadata, check_groups, check_optimizer, copy, key, mismatch, paired,
};
use crate::{OptimizerId, ParamGroup, Result, StateDict};

const FORMAT_VERSION: u32 = 1;

/// The tensors of one parameter's state with their names, in a fixed order.
pub(crate) type StateTensors<'a> = Vec<(&'static str, &'a Tensor)>;

/// The options of an optimizer, which are stored with its state. The macro [`optimizer`] implements it.
pub(crate) trait Options: Clone + Debug + Default + Serialize + DeserializeOwned {
    /// Checks that every option is in its range.
    fn check(&self) -> Result<()>;

    /// Returns the learning rate and weight decay of groups that set none.
    fn group_defaults(&self) -> (f64, f64);
}

/// The update rule of an optimizer, and its state for a parameter.
pub(crate) trait Rule: Debug + Send + Sized {
    /// The name of the optimizer in stored states.
    const NAME: &'static str;
    type Config: Options;
    /// The state of a parameter.
    type State: Debug + Send;

    /// Returns the rule of valid options.
    fn new(config: &Self::Config) -> Self;

    /// Checks that the rule can update a parameter.
    fn check_parameter(name: &str, tensor: &Tensor) -> Result<()> {
        let _ = (name, tensor);
        Ok(())
    }

    /// Returns new states for parameters that have none. It is called before any update, so that an error
    /// (no memory, no space on the disk) leaves the parameters unchanged.
    fn new_states(
        &mut self,
        config: &Self::Config,
        parameters: &[(&str, &Tensor)],
    ) -> Result<Vec<Self::State>>;

    /// Returns the tensors of a state.
    fn state_tensors(state: &Self::State) -> StateTensors<'_>;

    /// Performs one step. Gradient recording is disabled, and every job has been checked.
    fn step(&mut self, config: &Self::Config, jobs: Vec<Job<'_, Self::State>>) -> Result<()>;

    /// Returns the options `config` with those of `machine` that belong to the machine: they are not stored with a
    /// state, and a loaded state does not change them.
    fn on_machine(config: Self::Config, machine: &Self::Config) -> Self::Config {
        let _ = machine;
        config
    }

    /// Returns the bytes of a state that need not be in memory.
    fn paged_bytes(state: &Self::State) -> u64 {
        let _ = state;
        0
    }
}

/// One parameter to update.
pub(crate) struct Job<'a, S> {
    pub(crate) learning_rate: f64,
    pub(crate) weight_decay: f64,
    /// Detached from the graph; it shares memory and version counter with the leaf.
    pub(crate) parameter: Tensor,
    pub(crate) gradient: Tensor,
    pub(crate) state: &'a mut S,
}

/// An optimizer's parameters, groups and states.
#[derive(Debug)]
pub(crate) struct Engine<R: Rule> {
    id: OptimizerId,
    pub(crate) config: R::Config,
    rule: R,
    /// Each state with the specification of its parameter when it was created.
    pub(crate) parameters: GroupedParameters<(TensorSpec, R::State)>,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Metadata {
    format_version: u32,
    optimizer: String,
    config: serde_json::Value,
    groups: Vec<GroupMetadata>,
    /// The parameters that have not had a gradient yet.
    // Listed, so that a missing tensor can be told from a parameter without a state.
    without_state: BTreeSet<String>,
}

impl<R: Rule> Engine<R> {
    pub(crate) fn new(groups: Vec<ParamGroup>, config: R::Config) -> Result<Self> {
        config.check()?;
        let mut this = Self {
            id: OptimizerId::unique(),
            rule: R::new(&config),
            config,
            parameters: GroupedParameters::new(),
        };
        for group in groups {
            this.add_group(group)?;
        }
        Ok(this)
    }

    pub(crate) fn add_group(&mut self, group: ParamGroup) -> Result<()> {
        let defaults = self.config.group_defaults();
        let added = self
            .parameters
            .prepare(group, defaults, R::check_parameter)?;
        self.parameters.push(added);
        Ok(())
    }

    pub(crate) fn id(&self) -> OptimizerId {
        self.id
    }

    fn states(&self) -> impl Iterator<Item = &R::State> {
        let entries = self.parameters.entries.iter();
        entries.filter_map(|entry| entry.state.as_ref().map(|(_, state)| state))
    }

    pub(crate) fn state_bytes(&self) -> u64 {
        let of_state = |state| {
            R::state_tensors(state)
                .iter()
                .map(|(_, t)| bytes(t))
                .sum::<u64>()
        };
        self.states().map(of_state).sum()
    }

    pub(crate) fn paged_bytes(&self) -> u64 {
        self.states().map(R::paged_bytes).sum()
    }

    pub(crate) fn step(&mut self) -> Result<()> {
        let _no_grad = tch::no_grad_guard();
        // All gradients are checked before a parameter is updated.
        let gradients: Vec<Option<Tensor>> = self
            .parameters
            .entries
            .iter()
            .map(|e| gradient_of(&e.name, &e.tensor, e.state.as_ref().map(|(spec, _)| spec)))
            .collect::<Result<_>>()?;
        self.make_states(|index| gradients[index].is_some())?;
        let mut jobs = Vec::new();
        for (entry, gradient) in self.parameters.entries.iter_mut().zip(gradients) {
            let (Some(gradient), Some((_, state))) = (gradient, &mut entry.state) else {
                continue;
            };
            let group = &self.parameters.groups[entry.group];
            let parameter = entry.tensor.f_detach()?;
            let gradient = disjoint(&entry.name, &parameter, gradient, &R::state_tensors(state))?;
            jobs.push(Job {
                learning_rate: group.learning_rate,
                weight_decay: group.weight_decay,
                parameter,
                gradient,
                state,
            });
        }
        let parameters: Vec<Tensor> = jobs
            .iter()
            .map(|job| job.parameter.shallow_clone())
            .collect();
        let stepped = self.rule.step(&self.config, jobs);
        // Kernels write behind libtorch's back, also those of a step that then failed.
        bump_versions(&parameters)?;
        stepped
    }

    /// Creates the missing states of the chosen parameters, all or none.
    fn make_states(&mut self, chosen: impl Fn(usize) -> bool) -> Result<()> {
        let lacking: Vec<usize> = (0..self.parameters.entries.len())
            .filter(|&index| self.parameters.entries[index].state.is_none() && chosen(index))
            .collect();
        // The usual case after the first step.
        if lacking.is_empty() {
            return Ok(());
        }
        let parameters: Vec<(&str, &Tensor)> = lacking
            .iter()
            .map(|&index| {
                (
                    self.parameters.entries[index].name.as_str(),
                    &self.parameters.entries[index].tensor,
                )
            })
            .collect();
        let states = self.rule.new_states(&self.config, &parameters)?;
        for (index, state) in lacking.into_iter().zip(states) {
            let entry = &mut self.parameters.entries[index];
            entry.state = Some((TensorSpec::of(&entry.tensor), state));
        }
        Ok(())
    }

    pub(crate) fn state_dict(&self) -> Result<StateDict> {
        let mut tensors = BTreeMap::new();
        let mut without_state = BTreeSet::new();
        for entry in &self.parameters.entries {
            let Some((_, state)) = &entry.state else {
                without_state.insert(entry.name.clone());
                continue;
            };
            for (name, tensor) in R::state_tensors(state) {
                // Detached: giving the handle other memory (`set_data`) does not give it to this optimizer.
                tensors.insert(key(&entry.name, name), tensor.f_detach()?);
            }
        }
        // A state must load on a machine with another disk.
        let stored = R::on_machine(self.config.clone(), &R::Config::default());
        let metadata = Metadata {
            format_version: FORMAT_VERSION,
            optimizer: R::NAME.to_owned(),
            config: serde_json::to_value(stored).map_err(|e| mismatch(e.to_string()))?,
            groups: self.parameters.metadata(),
            without_state,
        };
        let metadata = serde_json::to_value(metadata).map_err(|e| mismatch(e.to_string()))?;
        Ok(StateDict { tensors, metadata })
    }

    pub(crate) fn load_state_dict(&mut self, state: &StateDict) -> Result<()> {
        let _no_grad = tch::no_grad_guard();
        check_optimizer(&state.metadata, R::NAME, FORMAT_VERSION)?;
        let metadata = Metadata::deserialize(&state.metadata)
            .map_err(|e| mismatch(format!("its metadata is not that of `{}` ({e})", R::NAME)))?;
        check_groups(&self.parameters.metadata(), &metadata.groups)?;
        let config = R::Config::deserialize(&metadata.config)
            .map_err(|e| mismatch(format!("its options are not those of `{}` ({e})", R::NAME)))?;
        let config = R::on_machine(config, &self.config);
        config.check()?;
        let mut rule = R::new(&config);

        let stepped: Vec<usize> = (0..self.parameters.entries.len())
            .filter(|&index| {
                !metadata
                    .without_state
                    .contains(&self.parameters.entries[index].name)
            })
            .collect();
        let parameters: Vec<(&str, &Tensor)> = stepped
            .iter()
            .map(|&index| {
                (
                    self.parameters.entries[index].name.as_str(),
                    &self.parameters.entries[index].tensor,
                )
            })
            .collect();
        // Into new states rather than those in use, so that an error changes nothing.
        let states = rule.new_states(&config, &parameters)?;
        let own = parameters.iter().zip(&states);
        let own = own.flat_map(|((name, _), state)| {
            let tensors = R::state_tensors(state).into_iter();
            tensors.map(|(part, tensor)| (key(name, part), tensor))
        });
        copy(paired(own, &state.tensors)?)?;

        // Nothing below can fail.
        (self.config, self.rule) = (config, rule);
        for entry in &mut self.parameters.entries {
            entry.state = None;
        }
        for (index, state) in stepped.into_iter().zip(states) {
            let entry = &mut self.parameters.entries[index];
            entry.state = Some((TensorSpec::of(&entry.tensor), state));
        }
        self.parameters.restore_rates(&metadata.groups);
        Ok(())
    }
}

/// Defines a public optimizer around an [`Engine`], with the methods that all of them have.
macro_rules! optimizer {
    ($(#[$doc:meta])* $name:ident($rule:ty), $config:ty) => {
        $(#[$doc])*
        #[derive(Debug)]
        pub struct $name {
            engine: crate::update_rule::Engine<$rule>,
        }

        impl $name {
            /// Returns an optimizer of the parameters in `groups`, which share memory with the model.
            ///
            /// # Errors
            /// An error if an option is out of its range, a name or a group name is not unique, two
            /// parameters share memory, or this optimizer cannot update a parameter.
            pub fn new(groups: Vec<crate::ParamGroup>, config: $config) -> crate::Result<Self> {
                let engine = crate::update_rule::Engine::new(groups, config)?;
                Ok(Self { engine })
            }

            /// Adds a group of parameters, for example layers that were frozen before.
            ///
            /// # Errors
            /// As [`new`](Self::new); nothing is added then.
            pub fn add_group(&mut self, group: crate::ParamGroup) -> crate::Result<()> {
                self.engine.add_group(group)
            }

            /// Returns the options of this optimizer, or of the state that it loaded.
            #[must_use]
            pub fn config(&self) -> &$config {
                &self.engine.config
            }

            /// Returns the names of the groups, in the order of
            /// [`learning_rates`](crate::Optimizer::learning_rates).
            pub fn group_names(&self) -> impl Iterator<Item = &str> {
                self.engine.parameters.group_names()
            }

            /// Returns the parameters with their names, as handles that share memory.
            pub fn named_parameters(&self) -> impl Iterator<Item = (&str, tch::Tensor)> {
                self.engine.parameters.named()
            }

            /// Returns the bytes of the state, in memory and elsewhere; 0 before the first step.
            #[must_use]
            pub fn state_bytes(&self) -> u64 {
                self.engine.state_bytes()
            }
        }

        impl crate::update_rule::Options for $config {
            fn check(&self) -> crate::Result<()> {
                self.validate()
            }

            fn group_defaults(&self) -> (f64, f64) {
                (self.learning_rate, self.weight_decay)
            }
        }

        impl crate::Optimizer for $name {
            fn id(&self) -> crate::OptimizerId {
                self.engine.id()
            }
            fn parameters(&self) -> Vec<tch::Tensor> {
                self.engine.parameters.named().map(|(_, tensor)| tensor).collect()
            }
            fn parameters_by_group(&self) -> Vec<Vec<tch::Tensor>> {
                self.engine.parameters.by_group()
            }
            fn step(&mut self) -> crate::Result<()> {
                self.engine.step()
            }
            fn zero_grad(&mut self) -> crate::Result<()> {
                self.engine.parameters.zero_grad()
            }
            fn learning_rates(&self) -> Vec<f64> {
                self.engine.parameters.learning_rates()
            }
            fn set_learning_rates(&mut self, learning_rates: &[f64]) -> crate::Result<()> {
                self.engine.parameters.set_learning_rates(learning_rates)
            }
            fn state_dict(&self) -> crate::Result<crate::StateDict> {
                self.engine.state_dict()
            }
            fn load_state_dict(&mut self, state: &crate::StateDict) -> crate::Result<()> {
                self.engine.load_state_dict(state)
            }
        }
    };
}
pub(crate) use optimizer;
