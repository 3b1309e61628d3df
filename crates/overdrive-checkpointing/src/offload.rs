//! Offloading: saved tensors that leave the device's memory until backward needs them.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use overdrive_sys::op::{Value, call};
use overdrive_sys::saved_tensors::{HooksGuard, PackedTensor, SavedTensor, push_hooks};
use overdrive_sys::storage::StorageId;
use overdrive_sys::transfer::{CopyEvent, copy_async};
use overdrive_sys::{CallbackError, CallbackResult, ScalarType};
use serde::{Deserialize, Serialize};
use tch::{Device, Tensor};

use crate::Result;
use crate::spill_file::{FileBlock, SpillFile};
use crate::versioned::Versioned;

/// The destination of saved tensors.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum SavedTo {
    /// Host memory. Copies run on a separate stream; they overlap with the computation only from and to
    /// pinned memory. Tensors on the CPU stay where they are.
    Host {
        /// If `true`, the memory is pinned (page-locked).
        pinned: bool,
    },
    /// A temporary file without a name, also for tensors on the CPU. Reading and writing block.
    Disk {
        /// The folder; `None` for the system's temporary folder. It should be on a fast disk and not in
        /// memory (`tmpfs`, which `/tmp` may be).
        folder: Option<PathBuf>,
    },
}

/// The options of [`offload_saved_tensors`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct OffloadOptions {
    /// The destination. Default: pinned host memory.
    pub to: SavedTo,
    /// The size in bytes below which tensors are not offloaded. Default: 1 MiB.
    pub min_bytes: u64,
    /// The number of tensors that backward fetches ahead, in the reverse of the order in which they were
    /// saved. Each occupies device memory accordingly earlier. Default: 2; has no effect on tensors of
    /// the CPU.
    pub prefetch: usize,
}

impl Default for OffloadOptions {
    fn default() -> Self {
        Self {
            to: SavedTo::Host { pinned: true },
            // 1 MiB takes about 40 µs over PCIe 4.0; for smaller tensors the fixed cost of a copy dominates.
            min_bytes: 1 << 20,
            prefetch: 2,
        }
    }
}

/// The statistics of an offload.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct OffloadStats {
    /// The number of tensors that were offloaded.
    pub tensors: u64,
    /// The bytes of the offloaded tensors.
    pub bytes: u64,
    /// The number of times that an operator saved a tensor that had already been offloaded for another
    /// operator.
    pub shared: u64,
    /// The number of tensors that stayed: small ones, weights, or tensors on the host.
    pub kept: u64,
}

/// A guard that offloads saved tensors until it is dropped; see [`offload_saved_tensors`].
#[derive(Debug)]
#[must_use = "offloading ends when the guard is dropped"]
pub struct OffloadGuard {
    _hooks: HooksGuard,
    store: Arc<Store>,
}

impl OffloadGuard {
    /// Returns the statistics so far.
    pub fn stats(&self) -> OffloadStats {
        self.store.lock().stats
    }
}

/// Offloads the tensors that operators of this thread save for backward, as long as the guard lives, and
/// fetches them when backward needs them (`torch.autograd.graph.save_on_cpu`). Backward may run after the
/// guard is dropped.
///
/// Weights stay: leaves that require a gradient and views of them, and every tensor that shares memory
/// with `keep`, where frozen weights belong. A tensor that several operators save is offloaded once.
///
/// Around checkpoints it offloads their inputs, the only tensors that they save.
///
/// # Errors
/// [`Error::Common`](crate::Error::Common) if the file cannot be created. Later errors are those of the
/// operator that saves a tensor, or of backward.
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
    let destination = match &options.to {
        SavedTo::Disk { folder } => Destination::File(SpillFile::new(folder.as_deref())?),
        SavedTo::Host { pinned } => Destination::Host { pinned: *pinned },
    };
    let store = Arc::new(Store {
        min_bytes: options.min_bytes,
        prefetch: options.prefetch,
        destination,
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
    min_bytes: u64,
    prefetch: usize,
    destination: Destination,
    keep_addresses: HashSet<usize>,
    /// Reserves the addresses.
    _keep: Mutex<Vec<StorageId>>,
    state: Mutex<StoreState>,
}

#[derive(Debug)]
enum Destination {
    Host { pinned: bool },
    File(Arc<SpillFile>),
}

#[derive(Debug, Default)]
struct StoreState {
    stats: OffloadStats,
    /// The offloaded tensors by identity.
    known: HashMap<TensorKey, (StorageId, Weak<Entry>)>,
    /// The offloaded tensors in the order in which they were saved.
    order: BTreeMap<u64, Weak<Entry>>,
    /// The number of entries at which those that backward has freed are next removed.
    clear_at: usize,
}

/// The identity of a tensor: two tensors with the same key have the same elements, as long as the
/// storage's id lives.
#[derive(Debug, PartialEq, Eq, Hash)]
struct TensorKey {
    storage: usize,
    start: usize,
    size: Vec<i64>,
    stride: Vec<i64>,
    dtype: ScalarType,
    version: i64,
}

impl Store {
    fn lock(&self) -> MutexGuard<'_, StoreState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn pack(self: &Arc<Self>, saved: SavedTensor) -> Result<Box<dyn PackedTensor>> {
        let tensor = saved.tensor.f_detach()?;
        if saved.is_parameter || !self.is_offloaded(&tensor) {
            self.lock().stats.kept += 1;
            return Ok(Box::new(Versioned::new(&tensor)?));
        }
        let storage = StorageId::of(&tensor)?;
        if self.keep_addresses.contains(&storage.address()) {
            self.lock().stats.kept += 1;
            return Ok(Box::new(Versioned::new(&tensor)?));
        }
        // The version tells apart the contents of memory that is changed in place between two saves.
        let key = TensorKey {
            storage: storage.address(),
            start: tensor.data_ptr() as usize,
            size: tensor.size(),
            stride: tensor.stride(),
            dtype: ScalarType::of(&tensor),
            version: tensor.f_internal_version()?,
        };
        let known = {
            let mut state = self.lock();
            // The map holds weak references: an entry that backward has freed is offloaded again.
            let known = state.known.get(&key).and_then(|(_, entry)| entry.upgrade());
            state.stats.shared += u64::from(known.is_some());
            known
        };
        let entry = match known {
            Some(entry) => entry,
            None => self.offload(&tensor, storage, key)?,
        };
        Ok(Box::new(Offloaded {
            store: Arc::clone(self),
            entry,
        }))
    }

    /// Returns `true` if tensors of this size and device are offloaded.
    fn is_offloaded(&self, tensor: &Tensor) -> bool {
        let bytes = bytes_of(tensor);
        let to_file = matches!(self.destination, Destination::File(_));
        let moves = to_file || tensor.device() != Device::Cpu;
        moves && bytes > 0 && bytes >= self.min_bytes && !tensor.is_sparse()
    }

    fn offload(&self, tensor: &Tensor, storage: StorageId, key: TensorKey) -> Result<Arc<Entry>> {
        let dtype = ScalarType::of(tensor);
        let data = match &self.destination {
            Destination::File(file) => OffloadedData::File(file.write(tensor)?),
            Destination::Host { pinned } => {
                let host = empty(&tensor.size(), dtype, Device::Cpu, *pinned)?;
                let copied = copy_async(&tensor.f_contiguous()?, &host)?;
                OffloadedData::Host { host, copied }
            }
        };
        let mut state = self.lock();
        let entry = Arc::new(Entry {
            size: tensor.size(),
            stride: tensor.stride(),
            dtype,
            device: tensor.device(),
            position: state.stats.tensors,
            data: Mutex::new(data),
            fetched: Mutex::new(None),
        });
        state.stats.tensors += 1;
        state.stats.bytes += bytes_of(tensor);
        // Only at each doubling, so that the cost per tensor stays constant.
        if state.order.len() >= state.clear_at {
            state.known.retain(|_, (_, entry)| entry.strong_count() > 0);
            state.order.retain(|_, entry| entry.strong_count() > 0);
            // At least 64, so that a short list is not scanned at every tensor.
            state.clear_at = (2 * state.order.len()).max(64);
        }
        state.order.insert(entry.position, Arc::downgrade(&entry));
        state.known.insert(key, (storage, Arc::downgrade(&entry)));
        Ok(entry)
    }

    /// Starts to fetch the tensors that were saved just before `position`.
    fn prefetch(&self, position: u64) -> Result<()> {
        let ahead: Vec<Arc<Entry>> = {
            let state = self.lock();
            let before = state.order.range(..position).rev();
            before
                .filter_map(|(_, entry)| entry.upgrade())
                .take(self.prefetch)
                .collect()
        };
        for entry in ahead {
            // Reading a file blocks, so there is nothing to overlap.
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

/// Returns the bytes of a tensor's elements.
fn bytes_of(tensor: &Tensor) -> u64 {
    (tensor.numel() * ScalarType::of(tensor).bytes()) as u64
}

/// Returns an uninitialized contiguous tensor. tch's `empty` has no option for pinned memory, and not every dtype.
fn empty(size: &[i64], dtype: ScalarType, device: Device, pinned: bool) -> Result<Tensor> {
    let made = call(
        "aten::empty",
        "memory_format",
        &[
            Value::Ints(size),
            Value::Int(dtype.code()),
            Value::None,
            Value::Device(device),
            Value::Bool(pinned),
        ],
    )?;
    let made = made
        .into_iter()
        .next()
        .ok_or_else(|| overdrive_sys::Error::Torch {
            operation: "aten::empty".to_owned(),
            message: "it returned no tensor".to_owned(),
        })?;
    Ok(made.into_tensor()?)
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// An offloaded tensor.
#[derive(Debug)]
struct Entry {
    size: Vec<i64>,
    stride: Vec<i64>,
    dtype: ScalarType,
    device: Device,
    position: u64,
    data: Mutex<OffloadedData>,
    /// The prefetched tensor, whose copy may still run.
    fetched: Mutex<Option<Fetched>>,
}

#[derive(Debug)]
enum OffloadedData {
    Host { host: Tensor, copied: CopyEvent },
    File(FileBlock),
}

#[derive(Debug)]
struct Fetched {
    tensor: Tensor,
    copied: Option<CopyEvent>,
}

impl Entry {
    /// Fetches the tensor, contiguous. On a device the copy may still run.
    fn fetch(&self) -> Result<Fetched> {
        match &*lock(&self.data) {
            OffloadedData::Host { host, copied } => {
                copied.wait_on(self.device)?;
                let tensor = empty(&self.size, self.dtype, self.device, false)?;
                let copied = copy_async(host, &tensor)?;
                Ok(Fetched {
                    tensor,
                    copied: Some(copied),
                })
            }
            OffloadedData::File(block) => {
                let host = empty(&self.size, self.dtype, Device::Cpu, false)?;
                block.read(&host)?;
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
        self.with_strides(fetched.tensor)
    }

    /// Returns the tensor with the strides that it had, if these were dense: kernels may round
    /// differently for another layout.
    fn with_strides(&self, contiguous: Tensor) -> Result<Tensor> {
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

/// Returns `true` if the elements fill their memory without gaps and overlaps, in any order of dimensions.
fn is_dense(size: &[i64], stride: &[i64]) -> bool {
    let mut dims: Vec<(i64, i64)> = stride.iter().copied().zip(size.iter().copied()).collect();
    dims.sort_unstable();
    let mut expected = 1;
    for (stride, size) in dims {
        // The stride of a dimension of size 1 is arbitrary.
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

/// The value that the graph holds for an offloaded tensor.
struct Offloaded {
    store: Arc<Store>,
    entry: Arc<Entry>,
}

impl PackedTensor for Offloaded {
    fn unpack(&self) -> CallbackResult<Tensor> {
        let tensor = self.entry.get()?;
        if self.store.prefetch > 0 {
            self.store.prefetch(self.entry.position)?;
        }
        Ok(tensor)
    }
}
