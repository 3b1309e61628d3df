//! The registry of what must survive a restart.

use std::collections::BTreeMap;
use std::fmt;

use overdrive_optim::{StateDict, StateError, Stateful};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use tch::{Device, Tensor};

use crate::{Contents, Error, Result, Scope, Snapshot};

/// The part of a snapshot that lists what was registered.
const REGISTRY: &str = "run_state";
/// The part with the states of the random generators.
const RANDOM: &str = "random";
const FORMAT_VERSION: u32 = 1;

/// A registry of all that must survive a restart, each part under a name, in the spirit of Accelerate's
/// `register_for_checkpointing`, `save_state` and `load_state`: modules or `VarStore`s, optimizers,
/// schedules, scalers, averages, loaders, random states, early stopping, anything with a state dict.
///
/// A run builds it in one place and hands it to
/// [`SnapshotManager::save_state`](crate::SnapshotManager::save_state) and
/// [`SnapshotManager::load_state`](crate::SnapshotManager::load_state). What was registered at saving and
/// is missing at restoring, or the reverse, is an error that names it.
///
/// ```
/// use overdrive_optim::{AdamW, AdamWConfig, Optimizer, decay_groups};
/// use overdrive_snapshot::{RunState, SnapshotManager};
/// use tch::{Device, Kind, nn};
///
/// struct Run { store: nn::VarStore, optimizer: AdamW, tokens_seen: u64 }
///
/// impl Run {
///     fn new() -> Result<Self, Box<dyn std::error::Error>> {
///         let store = nn::VarStore::new(Device::Cpu);
///         store.root().ones("weight", &[2]);
///         let optimizer = AdamW::new(decay_groups(store.variables(), 0.1), AdamWConfig::default())?;
///         Ok(Self { store, optimizer, tokens_seen: 0 })
///     }
///
///     fn state(&mut self) -> RunState<'_> {
///         RunState::new()
///             .tensors("model", self.store.variables())
///             .register("optimizer", &mut self.optimizer)
///             .value("tokens_seen", &mut self.tokens_seen)
///             .random_states()
///     }
/// }
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let dir = tempfile::tempdir()?;
/// # let folder = dir.path();
/// let mut snapshots = SnapshotManager::open(folder, Default::default())?;
/// let mut run = Run::new()?;
/// run.store.variables()["weight"].sum(Kind::Float).backward();
/// run.optimizer.step()?;
/// run.tokens_seen = 2048;
/// snapshots.save_state(1, None, run.state())?;
/// snapshots.wait()?;
///
/// let mut resumed = Run::new()?;
/// let latest = snapshots.latest()?.expect("one was written");
/// snapshots.load_state(&latest, resumed.state())?;
/// assert_eq!(resumed.tokens_seen, 2048);
/// # Ok(())
/// # }
/// ```
#[derive(Default)]
#[must_use = "a registry does nothing until it is saved or loaded"]
pub struct RunState<'a> {
    entries: Vec<Entry<'a>>,
    files: Vec<(String, Vec<u8>)>,
}

struct Entry<'a> {
    name: String,
    scope: Scope,
    value: Value<'a>,
}

enum Value<'a> {
    Tensors(Vec<(String, Tensor)>),
    Stateful(&'a mut dyn Stateful),
    Owned(Box<dyn Stateful + 'a>),
    Random,
}

/// The names that were registered, and whose they are.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Registry {
    format_version: u32,
    registered: BTreeMap<String, Scope>,
}

/// A value that is written as JSON.
struct Json<'a, T>(&'a mut T);

impl<T: Serialize + DeserializeOwned> Stateful for Json<'_, T> {
    fn state_dict(&self) -> std::result::Result<StateDict, StateError> {
        StateDict::of_value(&*self.0)
    }

    fn load_state_dict(&mut self, state: &StateDict) -> std::result::Result<(), StateError> {
        *self.0 = state.value()?;
        Ok(())
    }
}

/// A state that was read already, and what takes it back.
struct WithLoad<T, F> {
    state: T,
    load: Option<F>,
}

impl<T, E, F> Stateful for WithLoad<T, F>
where
    T: Serialize + DeserializeOwned,
    E: Into<StateError>,
    F: FnOnce(T) -> std::result::Result<(), E>,
{
    fn state_dict(&self) -> std::result::Result<StateDict, StateError> {
        StateDict::of_value(&self.state)
    }

    fn load_state_dict(&mut self, state: &StateDict) -> std::result::Result<(), StateError> {
        match self.load.take() {
            Some(load) => load(state.value()?).map_err(Into::into),
            None => Ok(()),
        }
    }
}

impl<'a> RunState<'a> {
    /// Makes a registry without parts.
    pub fn new() -> Self {
        Self::default()
    }

    /// Registers named tensors, the same on all ranks: the parameters and buffers of a module, the
    /// variables of a `VarStore`. Restoring copies into them.
    pub fn tensors(self, name: &str, tensors: impl IntoIterator<Item = (String, Tensor)>) -> Self {
        let mut tensors: Vec<_> = tensors.into_iter().collect();
        tensors.sort_by(|(a, _), (b, _)| a.cmp(b));
        self.entry(name, Scope::Run, Value::Tensors(tensors))
    }

    /// Registers a value with a state dict that is the same on all ranks: an optimizer, a schedule, an
    /// average of weights, a scaler, early stopping.
    pub fn register(self, name: &str, value: &'a mut dyn Stateful) -> Self {
        self.entry(name, Scope::Run, Value::Stateful(value))
    }

    /// Registers a value that a run may do without: nothing for `None`.
    pub fn register_optional<T: Stateful>(self, name: &str, value: Option<&'a mut T>) -> Self {
        match value {
            Some(value) => self.register(name, value),
            None => self,
        }
    }

    /// Registers a value of which each rank has its own: sharded optimizer states.
    pub fn register_per_rank(self, name: &str, value: &'a mut dyn Stateful) -> Self {
        self.entry(name, Scope::Rank, Value::Stateful(value))
    }

    /// Registers a plain value, written as JSON: counters, options.
    pub fn value<T: Serialize + DeserializeOwned>(self, name: &str, value: &'a mut T) -> Self {
        self.entry(name, Scope::Run, Value::Owned(Box::new(Json(value))))
    }

    /// Registers a value by its state and by what takes a state back, for types that do not implement
    /// [`Stateful`]: `.with_load("loader", loader.state_dict(), |state| loader.load_state_dict(state))`.
    pub fn with_load<T, E>(
        self,
        name: &str,
        state: T,
        load: impl FnOnce(T) -> std::result::Result<(), E> + 'a,
    ) -> Self
    where
        T: Serialize + DeserializeOwned + 'a,
        E: Into<StateError> + 'a,
    {
        let load = Some(load);
        self.entry(
            name,
            Scope::Run,
            Value::Owned(Box::new(WithLoad { state, load })),
        )
    }

    /// Registers the random generators of the CPU and of every GPU that this process sees, for each rank.
    /// At restoring, a generator that was not there at saving keeps its state.
    pub fn random_states(self) -> Self {
        self.entry(RANDOM, Scope::Rank, Value::Random)
    }

    /// Adds a file that every snapshot holds beside the state, under its own name: `config.json`,
    /// `tokenizer.json`. Restoring does not read it.
    pub fn file(mut self, name: impl Into<String>, bytes: impl Into<Vec<u8>>) -> Self {
        self.files.push((name.into(), bytes.into()));
        self
    }

    fn entry(mut self, name: &str, scope: Scope, value: Value<'a>) -> Self {
        let name = name.to_owned();
        self.entries.push(Entry { name, scope, value });
        self
    }

    fn registry(&self) -> Registry {
        let names = self.entries.iter();
        Registry {
            format_version: FORMAT_VERSION,
            registered: names
                .map(|entry| (entry.name.clone(), entry.scope))
                .collect(),
        }
    }

    /// The files of a snapshot after `step`.
    pub(crate) fn contents(self, step: u64, metric: Option<f64>) -> Result<Contents> {
        let mut contents = Contents::at(step);
        if let Some(metric) = metric {
            contents.metric(metric);
        }
        contents.document(REGISTRY, Scope::Run, &self.registry())?;
        for Entry { name, scope, value } in self.entries {
            let state = match value {
                Value::Tensors(tensors) => {
                    contents.tensors(&name, scope, tensors)?;
                    continue;
                }
                Value::Random => {
                    contents.tensors(&name, scope, random_states()?)?;
                    continue;
                }
                Value::Stateful(value) => value.state_dict(),
                Value::Owned(value) => value.state_dict(),
            };
            let state = state.map_err(|source| Error::NotSaved {
                part: name.clone(),
                source,
            })?;
            match state.tensors.is_empty() {
                true => contents.document(&name, scope, &state.metadata)?,
                false => contents.state(&name, scope, state)?,
            };
        }
        for (name, bytes) in self.files {
            contents.file(&name, bytes)?;
        }
        Ok(contents)
    }

    /// Takes over what `snapshot` holds for `rank`.
    pub(crate) fn restore(self, snapshot: &Snapshot, rank: usize) -> Result<()> {
        self.check(snapshot)?;
        for Entry { name, scope, value } in self.entries {
            let mut load: Box<dyn Stateful + '_> = match value {
                Value::Tensors(targets) => {
                    snapshot.copy_into(&name, scope, rank, targets)?;
                    continue;
                }
                Value::Random => {
                    set_random_states(snapshot, &name, rank)?;
                    continue;
                }
                Value::Stateful(value) => Box::new(Borrowed(value)),
                Value::Owned(value) => value,
            };
            let state = match snapshot.has_tensors(&name, scope, rank) {
                true => snapshot.state(&name, scope, rank)?,
                false => StateDict {
                    tensors: BTreeMap::new(),
                    metadata: snapshot.document(&name, scope, rank)?,
                },
            };
            load.load_state_dict(&state)
                .map_err(|source| Error::NotRestored {
                    path: snapshot.path().to_owned(),
                    part: name,
                    source,
                })?;
        }
        Ok(())
    }

    /// Compares the names here with those at saving.
    fn check(&self, snapshot: &Snapshot) -> Result<()> {
        let stored: Registry = snapshot.document(REGISTRY, Scope::Run, 0)?;
        if stored.format_version != FORMAT_VERSION {
            let found = stored.format_version;
            let reason =
                format!("its registry has format {found}, this program reads {FORMAT_VERSION}");
            return Err(Error::damaged(snapshot.path(), reason));
        }
        let (own, stored) = (self.registry().registered, stored.registered);
        let mut differences = Vec::new();
        for (name, scope) in &stored {
            match own.get(name) {
                None => differences.push(format!(
                    "`{name}` is in the snapshot and not registered here"
                )),
                Some(here) if here != scope => differences.push(format!(
                    "`{name}` is stored {} and registered {}",
                    scope.words(),
                    here.words()
                )),
                Some(_) => {}
            }
        }
        let new = own.keys().filter(|name| !stored.contains_key(*name));
        differences
            .extend(new.map(|name| format!("`{name}` is registered and not in the snapshot")));
        if differences.is_empty() {
            return Ok(());
        }
        Err(Error::OtherParts {
            path: snapshot.path().to_owned(),
            differences,
        })
    }
}

/// A borrowed value as a boxed one.
struct Borrowed<'a>(&'a mut dyn Stateful);

impl Stateful for Borrowed<'_> {
    fn state_dict(&self) -> std::result::Result<StateDict, StateError> {
        self.0.state_dict()
    }

    fn load_state_dict(&mut self, state: &StateDict) -> std::result::Result<(), StateError> {
        self.0.load_state_dict(state)
    }
}

fn random_states() -> Result<Vec<(String, Tensor)>> {
    let state = |device| {
        Ok((
            generator_name(device),
            overdrive_sys::random::state(device)?,
        ))
    };
    devices().into_iter().map(state).collect()
}

fn set_random_states(snapshot: &Snapshot, name: &str, rank: usize) -> Result<()> {
    let stored = snapshot.tensors(name, Scope::Rank, rank)?;
    for device in devices() {
        if let Ok(state) = stored.tensor(&generator_name(device)) {
            let state = state.copy_to_tensor(None, Device::Cpu)?;
            overdrive_sys::random::set_state(device, &state)?;
        }
    }
    Ok(())
}

fn devices() -> Vec<Device> {
    let gpus = usize::try_from(tch::Cuda::device_count()).unwrap_or(0);
    std::iter::once(Device::Cpu)
        .chain((0..gpus).map(Device::Cuda))
        .collect()
}

fn generator_name(device: Device) -> String {
    match device {
        Device::Cuda(index) => format!("cuda:{index}"),
        _ => "cpu".to_owned(),
    }
}

impl fmt::Debug for RunState<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RunState")
            .field("registered", &self.registry().registered)
            .finish_non_exhaustive()
    }
}
