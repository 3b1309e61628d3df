//! The registry of the state that a run saves and restores.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::rc::Rc;

use overdrive_optim::{StateDict, StateError, Stateful};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use tch::{Device, Tensor};

use crate::{Contents, Error, Result, Scope, Snapshot};

/// The entry of a snapshot that lists the registered names.
const REGISTRY: &str = "run_state";
/// The entry with the states of the random generators.
const RANDOM: &str = "random";
const FORMAT_VERSION: u32 = 1;

/// A registry of the state that must survive a restart, each value under a name, like Accelerate's
/// `register_for_checkpointing`, `save_state` and `load_state`: modules or `VarStore`s, optimizers,
/// schedules, scalers, averages, loaders, random states, early stopping, or any value with a state dict.
///
/// A run builds it in one function and passes it to
/// [`SnapshotManager::save_state`](crate::SnapshotManager::save_state) and
/// [`SnapshotManager::load_state`](crate::SnapshotManager::load_state). A value that is registered at saving
/// and missing at restoring, or the reverse, is an error that names it.
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
    /// The names of optional entries, registered or not.
    optional: BTreeSet<String>,
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

/// The registered names and their scopes, as stored in the snapshot.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Registry {
    format_version: u32,
    registered: BTreeMap<String, Scope>,
}

/// Returns a value as JSON, from which it can be restored. JSON has no NaN: it would become `null`, and the snapshot would
/// be refused by the run that resumes.
fn restorable<T: Serialize + DeserializeOwned>(
    value: &T,
) -> std::result::Result<StateDict, StateError> {
    let state = StateDict::of_value(value)?;
    match state.value::<T>() {
        Ok(_) => Ok(state),
        Err(error) => Err(format!(
            "it could not be read back from JSON, which has no NaN or infinity ({error}); store `None` of an \
             Option in its place"
        )
        .into()),
    }
}

/// A value that is serialized as JSON.
struct Json<'a, T>(&'a mut T);

impl<T: Serialize + DeserializeOwned> Stateful for Json<'_, T> {
    fn state_dict(&self) -> std::result::Result<StateDict, StateError> {
        restorable(&*self.0)
    }

    fn load_state_dict(&mut self, state: &StateDict) -> std::result::Result<(), StateError> {
        *self.0 = state.value()?;
        Ok(())
    }
}

/// A value that the program also holds.
struct Shared(Rc<RefCell<dyn Stateful>>);

impl Stateful for Shared {
    fn state_dict(&self) -> std::result::Result<StateDict, StateError> {
        self.0.try_borrow()?.state_dict()
    }

    fn load_state_dict(&mut self, state: &StateDict) -> std::result::Result<(), StateError> {
        self.0.try_borrow_mut()?.load_state_dict(state)
    }
}

/// A state that has already been taken, and the function that loads one.
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
        restorable(&self.state)
    }

    fn load_state_dict(&mut self, state: &StateDict) -> std::result::Result<(), StateError> {
        // The state can be loaded once, since the function may consume what it captured.
        match self.load.take() {
            Some(load) => load(state.value()?).map_err(Into::into),
            None => Ok(()),
        }
    }
}

impl<'a> RunState<'a> {
    /// Returns an empty registry.
    pub fn new() -> Self {
        Self::default()
    }

    /// Registers named tensors, the same on all ranks: the parameters and buffers of a module, the
    /// variables of a `VarStore`. Restoring copies into them.
    pub fn tensors(self, name: &str, tensors: impl IntoIterator<Item = (String, Tensor)>) -> Self {
        let mut tensors: Vec<_> = tensors.into_iter().collect();
        // Sorted by name, so that equal states give equal files.
        tensors.sort_by(|(a, _), (b, _)| a.cmp(b));
        self.entry(name, Scope::Run, Value::Tensors(tensors))
    }

    /// Registers a value with a state dict that is the same on all ranks: an optimizer, a schedule, an
    /// average of weights, a scaler, early stopping. Only rank 0 takes its state dict, so that must not be collective.
    pub fn register(self, name: &str, value: &'a mut dyn Stateful) -> Self {
        self.entry(name, Scope::Run, Value::Stateful(value))
    }

    /// Registers an optional value, such as the scaler of fp16; `None` registers nothing.
    ///
    /// If only the run or only the snapshot has the entry, the run resumes with a warning: a value without a stored
    /// state keeps its new state, and a stored state without a value is ignored.
    pub fn register_optional<T: Stateful>(mut self, name: &str, value: Option<&'a mut T>) -> Self {
        self.optional.insert(name.to_owned());
        match value {
            Some(value) => self.register(name, value),
            None => self,
        }
    }

    /// Registers a value that differs between the ranks, such as sharded optimizer states. A different number of
    /// processes can restore only optimizer states, which [`StateDict::gather`] reshards.
    pub fn register_per_rank(self, name: &str, value: &'a mut dyn Stateful) -> Self {
        self.entry(name, Scope::Rank, Value::Stateful(value))
    }

    /// Registers a plain value, serialized as JSON: counters, options. JSON has no NaN and no infinity: saving a value with
    /// such a number is an error, and one in an `Option` is restored as `None`.
    pub fn value<T: Serialize + DeserializeOwned>(self, name: &str, value: &'a mut T) -> Self {
        self.entry(name, Scope::Run, Value::Owned(Box::new(Json(value))))
    }

    /// Registers a value that the program and the run share.
    pub fn shared(self, name: &str, value: Rc<RefCell<dyn Stateful>>) -> Self {
        self.entry(name, Scope::Run, Value::Owned(Box::new(Shared(value))))
    }

    /// Registers a value by its state and by the function that loads a state, for types that do not implement
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

    /// Registers libtorch's random generators of the CPU and of every visible GPU, for each rank. A generator that did
    /// not exist when the snapshot was saved keeps its state. If the number of processes differs, each rank gets a new
    /// state derived from that of rank 0.
    pub fn random_states(self) -> Self {
        self.entry(RANDOM, Scope::Rank, Value::Random)
    }

    /// Adds a file that is stored in every snapshot under its own name, such as `config.json` or
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

    /// Returns the contents of a snapshot after `step` steps, without entries that other ranks write.
    pub(crate) fn contents(self, step: u64, metric: Option<f64>, rank: usize) -> Result<Contents> {
        let mut contents = Contents::at(step);
        if let Some(metric) = metric {
            contents.metric(metric);
        }
        contents.document(REGISTRY, Scope::Run, &self.registry())?;
        for Entry { name, scope, value } in self.entries {
            // A state dict may be a copy, and only rank 0 would write this one.
            if rank != 0 && scope == Scope::Run {
                continue;
            }
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
                entry: name.clone(),
                source,
            })?;
            // A state without tensors is readable JSON; safetensors would hide it in a header.
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

    /// Restores all registered values from the entries of `snapshot` for `rank` of `world_size` ranks.
    pub(crate) fn restore(self, snapshot: &Snapshot, rank: usize, world_size: usize) -> Result<()> {
        let other_ranks = snapshot.world_size() != world_size;
        // All names are compared before the first value is changed.
        let stored = self.check(snapshot)?;
        for Entry { name, scope, value } in self.entries {
            // An optional value, which keeps its new state.
            if !stored.contains_key(&name) {
                continue;
            }
            let mut owned;
            let target: &mut dyn Stateful = match value {
                Value::Tensors(targets) => {
                    snapshot.copy_into(&name, scope, rank, targets)?;
                    continue;
                }
                Value::Random if other_ranks => {
                    derive_random_states(snapshot, &name, rank)?;
                    continue;
                }
                Value::Random => {
                    set_random_states(snapshot, &name, rank)?;
                    continue;
                }
                Value::Stateful(value) => value,
                Value::Owned(value) => {
                    owned = value;
                    owned.as_mut()
                }
            };
            let restored = match other_ranks && scope == Scope::Rank {
                true => load_shards(target, snapshot, &name),
                false => target.load_state_dict(&stored_state(snapshot, &name, scope, rank)?),
            };
            restored.map_err(|source| Error::NotRestored {
                path: snapshot.path().to_owned(),
                entry: name,
                source,
            })?;
        }
        Ok(())
    }

    /// Compares the registered names with those of the snapshot, and returns these.
    fn check(&self, snapshot: &Snapshot) -> Result<BTreeMap<String, Scope>> {
        let stored: Registry = snapshot.document(REGISTRY, Scope::Run, 0)?;
        if stored.format_version != FORMAT_VERSION {
            let found = stored.format_version;
            let reason =
                format!("its registry has format version {found}, expected {FORMAT_VERSION}");
            return Err(Error::damaged(snapshot.path(), reason));
        }
        let (own, stored) = (self.registry().registered, stored.registered);
        let path = snapshot.path().display();
        let mut differences = Vec::new();
        for (name, scope) in &stored {
            match own.get(name) {
                None if self.optional.contains(name) => {
                    tracing::warn!("the run resumes without the `{name}` of {path}");
                }
                None => differences.push(format!(
                    "`{name}` is in the snapshot and not registered here"
                )),
                Some(here) if here != scope => differences.push(format!(
                    "`{name}` is stored {} and registered {}",
                    scope.description(),
                    here.description()
                )),
                Some(_) => {}
            }
        }
        for name in own.keys().filter(|name| !stored.contains_key(*name)) {
            match self.optional.contains(name) {
                true => tracing::warn!("the run resumes with a new `{name}`, which {path} lacks"),
                false => {
                    differences.push(format!("`{name}` is registered and not in the snapshot"));
                }
            }
        }
        if differences.is_empty() {
            return Ok(stored);
        }
        Err(Error::EntryMismatch {
            path: snapshot.path().to_owned(),
            differences,
        })
    }
}

/// Reads the state of a registered value.
fn stored_state(snapshot: &Snapshot, name: &str, scope: Scope, rank: usize) -> Result<StateDict> {
    match snapshot.has_tensors(name, scope, rank) {
        true => snapshot.state(name, scope, rank),
        false => Ok(StateDict {
            tensors: BTreeMap::new(),
            metadata: snapshot.document(name, scope, rank)?,
        }),
    }
}

/// Loads this rank's shard from the states that a different number of ranks stored.
fn load_shards(
    target: &mut dyn Stateful,
    snapshot: &Snapshot,
    name: &str,
) -> std::result::Result<(), StateError> {
    let ranks = 0..snapshot.world_size();
    // One at a time, so that memory holds one stored shard besides this rank's own.
    let shards = ranks.map(|rank| {
        let shard = stored_state(snapshot, name, Scope::Rank, rank);
        shard.map_err(StateError::from)
    });
    let state = target.state_dict()?.gather(shards)?;
    target.load_state_dict(&state)
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
        // A run may resume with more GPUs than the snapshot was saved with.
        if let Ok(state) = stored.tensor(&generator_name(device)) {
            let state = state.copy_to_tensor(None, Device::Cpu)?;
            overdrive_sys::random::set_state(device, &state)?;
        }
    }
    Ok(())
}

/// Seeds the generators of this rank from the state of rank 0 in the snapshot. A different number of ranks cannot
/// continue the stored sequences, and the run's seed would repeat those of its first steps.
fn derive_random_states(snapshot: &Snapshot, name: &str, rank: usize) -> Result<()> {
    let stored = snapshot.tensors(name, Scope::Rank, 0)?;
    let state = stored.tensor(&generator_name(Device::Cpu))?;
    let mut digest = Sha256::new();
    digest.update(state.data());
    digest.update((rank as u64).to_le_bytes());
    let digest = digest.finalize();
    let (words, _) = digest.as_slice().as_chunks::<8>();
    let seed = words.first().copied().map_or(0, i64::from_le_bytes);
    // It seeds the generators of the CPU and of all GPUs.
    tch::manual_seed(seed);
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
