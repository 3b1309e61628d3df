//! What backward needs, moved out of the device's memory until then.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use overdrive_sys::op::{Value, call};
use overdrive_sys::saved_tensors::{
    Copied, HooksGuard, Packed, Saved, StorageId, copy_aside, push_hooks,
};
use overdrive_sys::{CallbackError, CallbackResult};
use serde::{Deserialize, Serialize};
use tch::{Device, Kind, Tensor};

use crate::spill_file::{SpillFile, Spilled};
use crate::versioned::Versioned;
use crate::{Error, Result};

/// Where saved tensors go.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum SavedTo {
    /// Host memory. Copies run on a stream of their own, beside the computation, which they only do
    /// from and to pinned memory. Tensors on the CPU are there already and stay.
    Host {
        /// Whether the memory is pinned (page-locked).
        pinned: bool,
    },
    /// A temporary file without a name, in this folder or the system's own for such files; also for
    /// tensors on the CPU. Reading and writing block.
    Disk {
        /// The folder; on a fast disk, and not one in memory (`tmpfs`, which `/tmp` may be).
        folder: Option<PathBuf>,
    },
}

/// Options of [`offload_saved_tensors`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct OffloadOptions {
    /// Where they go. Default: pinned host memory.
    pub to: SavedTo,
    /// Tensors of fewer bytes stay. Default 1 MiB.
    pub min_bytes: u64,
    /// How many tensors backward fetches ahead of the one it asks for, in the opposite of the order they
    /// were saved in. Each takes its memory that much earlier. Default 2; only for tensors of a device.
    pub prefetch: usize,
}

impl Default for OffloadOptions {
    fn default() -> Self {
        Self {
            to: SavedTo::Host { pinned: true },
            min_bytes: 1 << 20,
            prefetch: 2,
        }
    }
}

/// What an offload has done so far.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct OffloadStats {
    /// Tensors that went away.
    pub tensors: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Times that a tensor was saved which another operator had saved before: it went once.
    pub shared: u64,
    /// Tensors that stayed: small, weights, or on the host already.
    pub kept: u64,
}

/// Offloads, until dropped; see [`offload_saved_tensors`].
#[derive(Debug)]
#[must_use = "offloading ends when the guard is dropped"]
pub struct OffloadGuard {
    _hooks: HooksGuard,
    store: Arc<Store>,
}

impl OffloadGuard {
    /// What was done so far.
    pub fn stats(&self) -> OffloadStats {
        self.store.lock().stats
    }
}

/// Moves what operators of this thread save for backward away until backward asks for it, as long as
/// the guard lives (`torch.autograd.graph.save_on_cpu`). Backward may run after that.
///
/// Weights stay: leaves that require a gradient and views of them, and whatever shares memory with
/// `keep` – name frozen weights there. A tensor that several operators save goes once.
///
/// Around checkpoints it takes their inputs, which are all that they save: the two compose.
///
/// # Errors
/// [`Error::File`] if the file cannot be made. What goes wrong later is the error of the operator that
/// saves, or of backward.
///
/// ```
/// use overdrive_checkpointing::{OffloadOptions, SavedTo, offload_saved_tensors};
/// use tch::{Device, Kind, Tensor};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let x = Tensor::randn([64, 64], (Kind::Float, Device::Cpu)).set_requires_grad(true);
/// let options = OffloadOptions { to: SavedTo::Disk { folder: None }, min_bytes: 1024, prefetch: 0 };
/// let y = {
///     let offload = offload_saved_tensors(&options, &[])?;
///     let y = x.f_exp()?.f_sin()?;
///     assert_eq!(offload.stats().bytes, 64 * 64 * 4); // saved by both operators
///     y
/// };
/// y.f_sum(Kind::Float)?.f_backward()?;
/// assert_eq!(x.grad(), x.exp().cos() * x.exp());
/// # Ok(())
/// # }
/// ```
pub fn offload_saved_tensors(options: &OffloadOptions, keep: &[&Tensor]) -> Result<OffloadGuard> {
    let keep = keep
        .iter()
        .map(|tensor| StorageId::of(tensor))
        .collect::<overdrive_sys::Result<Vec<_>>>()?;
    let file = match &options.to {
        SavedTo::Disk { folder } => Some(SpillFile::new(folder.as_deref())?),
        SavedTo::Host { .. } => None,
    };
    let store = Arc::new(Store {
        options: options.clone(),
        file,
        keep_addresses: keep.iter().map(StorageId::address).collect(),
        _keep: Mutex::new(keep),
        state: Mutex::default(),
    });
    let packing = Arc::clone(&store);
    Ok(OffloadGuard {
        _hooks: push_hooks(move |saved| packing.pack(saved).map_err(CallbackError::from))?,
        store,
    })
}

#[derive(Debug)]
struct Store {
    options: OffloadOptions,
    file: Option<Arc<SpillFile>>,
    keep_addresses: HashSet<usize>,
    /// Holds the addresses.
    _keep: Mutex<Vec<StorageId>>,
    state: Mutex<StoreState>,
}

#[derive(Debug, Default)]
struct StoreState {
    stats: OffloadStats,
    /// What went, by what it was.
    known: HashMap<Key, (StorageId, Weak<Entry>)>,
    /// In the order they were saved.
    order: BTreeMap<u64, Weak<Entry>>,
    /// When those that backward is through with are next cleared out.
    clear_at: usize,
}

/// Two tensors with the same key have the same elements, as long as the storage is held.
#[derive(Debug, PartialEq, Eq, Hash)]
struct Key {
    storage: usize,
    start: usize,
    size: Vec<i64>,
    stride: Vec<i64>,
    kind: i32,
    version: i64,
}

impl Store {
    fn lock(&self) -> MutexGuard<'_, StoreState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn pack(self: &Arc<Self>, saved: Saved) -> Result<Box<dyn Packed>> {
        let tensor = saved.tensor.f_detach()?;
        if saved.is_parameter || !self.goes(&tensor)? {
            self.lock().stats.kept += 1;
            return Ok(Box::new(Versioned::new(&tensor)?));
        }
        let storage = StorageId::of(&tensor)?;
        if self.keep_addresses.contains(&storage.address()) {
            self.lock().stats.kept += 1;
            return Ok(Box::new(Versioned::new(&tensor)?));
        }
        let key = Key {
            storage: storage.address(),
            start: tensor.data_ptr() as usize,
            size: tensor.size(),
            stride: tensor.stride(),
            kind: tensor.f_kind()? as i32,
            version: tensor.f_internal_version()?,
        };
        let known = {
            let mut state = self.lock();
            let known = state.known.get(&key).and_then(|(_, entry)| entry.upgrade());
            state.stats.shared += u64::from(known.is_some());
            known
        };
        let entry = match known {
            Some(entry) => entry,
            None => self.send(&tensor, storage, key)?,
        };
        Ok(Box::new(Away {
            store: Arc::clone(self),
            entry,
        }))
    }

    fn goes(&self, tensor: &Tensor) -> Result<bool> {
        let bytes = tensor.numel() * tensor.f_kind()?.elt_size_in_bytes();
        let elsewhere = self.file.is_some() || tensor.device() != Device::Cpu;
        Ok(elsewhere && bytes > 0 && bytes as u64 >= self.options.min_bytes && !tensor.is_sparse())
    }

    fn send(&self, tensor: &Tensor, storage: StorageId, key: Key) -> Result<Arc<Entry>> {
        let kind = tensor.f_kind()?;
        let place = match (&self.file, &self.options.to) {
            (Some(file), _) => Place::File(file.write(tensor)?),
            (None, SavedTo::Host { pinned }) => {
                let host = empty(&tensor.size(), kind, Device::Cpu, *pinned)?;
                let copied = copy_aside(&tensor.f_contiguous()?, &host)?;
                Place::Host { host, copied }
            }
            // `file` is there for the one other place.
            (None, SavedTo::Disk { .. }) => {
                return Err(Error::InvalidOption {
                    option: "to",
                    value: "disk".to_owned(),
                    expected: "a file that was opened",
                });
            }
        };
        let mut state = self.lock();
        let entry = Arc::new(Entry {
            size: tensor.size(),
            stride: tensor.stride(),
            kind,
            device: tensor.device(),
            position: state.stats.tensors,
            place: Mutex::new(place),
            fetched: Mutex::new(None),
        });
        state.stats.tensors += 1;
        state.stats.bytes += (tensor.numel() * kind.elt_size_in_bytes()) as u64;
        // At each doubling, so that it costs little.
        if state.order.len() >= state.clear_at {
            state.known.retain(|_, (_, entry)| entry.strong_count() > 0);
            state.order.retain(|_, entry| entry.strong_count() > 0);
            state.clear_at = (2 * state.order.len()).max(64);
        }
        state.order.insert(entry.position, Arc::downgrade(&entry));
        state.known.insert(key, (storage, Arc::downgrade(&entry)));
        Ok(entry)
    }

    /// Starts to fetch what was saved just before `position`.
    fn prefetch(&self, position: u64) -> Result<()> {
        let ahead: Vec<Arc<Entry>> = {
            let state = self.lock();
            let before = state.order.range(..position).rev();
            before
                .filter_map(|(_, entry)| entry.upgrade())
                .take(self.options.prefetch)
                .collect()
        };
        for entry in ahead {
            if entry.device == Device::Cpu {
                continue;
            }
            let mut fetched = lock(&entry.fetched);
            if fetched.is_none() {
                *fetched = Some(entry.fetch()?);
            }
        }
        Ok(())
    }
}

/// A contiguous tensor with whatever is in its memory.
fn empty(size: &[i64], kind: Kind, device: Device, pinned: bool) -> Result<Tensor> {
    let made = call(
        "aten::empty",
        "memory_format",
        &[
            Value::Ints(size),
            Value::Kind(kind),
            Value::None,
            Value::Device(device),
            Value::Bool(pinned),
        ],
    )?;
    let made = made
        .into_iter()
        .next()
        .ok_or_else(|| Error::InvalidOption {
            option: "aten::empty",
            value: "no result".to_owned(),
            expected: "a tensor",
        })?;
    Ok(made.into_tensor()?)
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A tensor that went.
#[derive(Debug)]
struct Entry {
    size: Vec<i64>,
    stride: Vec<i64>,
    kind: Kind,
    device: Device,
    position: u64,
    place: Mutex<Place>,
    /// On its way back, ahead of time.
    fetched: Mutex<Option<Fetched>>,
}

#[derive(Debug)]
enum Place {
    Host { host: Tensor, copied: Copied },
    File(Spilled),
}

#[derive(Debug)]
struct Fetched {
    tensor: Tensor,
    copied: Option<Copied>,
}

impl Entry {
    /// Brings it back, contiguous; on a device possibly not there yet.
    fn fetch(&self) -> Result<Fetched> {
        match &*lock(&self.place) {
            Place::Host { host, copied } => {
                copied.wait_on(self.device)?;
                let tensor = empty(&self.size, self.kind, self.device, false)?;
                let copied = copy_aside(host, &tensor)?;
                Ok(Fetched {
                    tensor,
                    copied: Some(copied),
                })
            }
            Place::File(spilled) => {
                let host = empty(&self.size, self.kind, Device::Cpu, false)?;
                spilled.read(&host)?;
                Ok(Fetched {
                    tensor: host.f_to_device(self.device)?,
                    copied: None,
                })
            }
        }
    }

    fn get(&self) -> Result<Tensor> {
        let ready = lock(&self.fetched).take();
        let fetched = match ready {
            Some(fetched) => fetched,
            None => self.fetch()?,
        };
        if let Some(copied) = &fetched.copied {
            copied.wait_on(self.device)?;
        }
        self.arranged(fetched.tensor)
    }

    /// With its elements laid out as they were, where that was without gaps: kernels may round
    /// differently by layout.
    fn arranged(&self, contiguous: Tensor) -> Result<Tensor> {
        if contiguous.stride() == self.stride || !is_dense(&self.size, &self.stride) {
            return Ok(contiguous);
        }
        let mut dims: Vec<usize> = (0..self.size.len()).collect();
        dims.sort_by_key(|&dim| std::cmp::Reverse(self.stride[dim]));
        let of = |dim: usize| dim as i64;
        let outer_first: Vec<i64> = dims.iter().copied().map(of).collect();
        let mut back = vec![0; dims.len()];
        for (at, &dim) in dims.iter().enumerate() {
            back[dim] = of(at);
        }
        Ok(contiguous
            .f_permute(outer_first)?
            .f_contiguous()?
            .f_permute(back)?)
    }
}

/// Whether the elements fill their memory, each once.
fn is_dense(size: &[i64], stride: &[i64]) -> bool {
    let mut dims: Vec<(i64, i64)> = stride.iter().copied().zip(size.iter().copied()).collect();
    dims.sort_unstable();
    let mut expected = 1;
    for (stride, size) in dims {
        if size == 1 {
            continue;
        }
        if stride != expected {
            return false;
        }
        expected *= size;
    }
    true
}

/// What the graph holds for a tensor that went.
struct Away {
    store: Arc<Store>,
    entry: Arc<Entry>,
}

impl Packed for Away {
    fn unpack(&self) -> CallbackResult<Tensor> {
        let tensor = self.entry.get()?;
        if self.store.options.prefetch > 0 {
            self.store.prefetch(self.entry.position)?;
        }
        Ok(tensor)
    }
}
