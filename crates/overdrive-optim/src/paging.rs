//! The allocation of optimizer states in memory, in a mapped file, or in pinned host memory.

use std::fs;
use std::io::{self, Write};
use std::ops::Range;
use std::path::{Path, PathBuf};

use overdrive_core::{Error, check_option};
use overdrive_sys::op::{Value, call};
use serde::{Deserialize, Serialize};
use tch::{Device, Kind, Tensor};

use crate::Result;
use crate::checks::bytes;
use crate::joint_update::flat_range;
use crate::page_advice::{MappedPages, page_bytes};

const MIB: u64 = 1 << 20;
/// The bytes of zeros per write when disk space is allocated.
const FILL_BYTES: usize = 1 << 20;

/// The location of the states of paged optimizers, and the limit of their resident part.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct PagingConfig {
    /// The folder of the state's file, for parameters on the CPU. Default: `None`, the system's folder
    /// for temporary files; choose another one if that is in memory (tmpfs) or too small.
    pub folder: Option<PathBuf>,
    /// The maximum bytes of paged states in memory, at least 1 MiB: on the CPU the resident part of the
    /// mapped file, on a GPU the buffers for the copies. A quarter is used for windows, and the rest
    /// keeps states resident permanently. Default: 256 MiB.
    pub max_resident_bytes: u64,
    /// The number of elements below which a parameter's state is in ordinary memory. Default: 100,000, as in
    /// bitsandbytes.
    pub min_paged_elements: usize,
}

impl Default for PagingConfig {
    fn default() -> Self {
        Self {
            folder: None,
            max_resident_bytes: 256 * MIB,
            min_paged_elements: 100_000,
        }
    }
}

impl PagingConfig {
    /// Checks that every option is in its range.
    ///
    /// # Errors
    /// [`Error::Common`](crate::Error::Common) with the first option out of its range.
    pub fn validate(&self) -> Result<()> {
        let bytes = self.max_resident_bytes;
        let expected = "at least 1048576 (1 MiB)";
        Ok(check_option(
            bytes >= MIB,
            "max_resident_bytes",
            bytes,
            expected,
        )?)
    }

    /// Returns the bytes of state that one kernel call updates.
    pub(crate) fn window_bytes(&self) -> u64 {
        // A quarter for the window; the other three keep states resident. Not below 512 KiB, where the
        // cost of the system calls dominates.
        (self.max_resident_bytes / 4).max(MIB / 2)
    }
}

/// A request for a state tensor of zeros.
#[derive(Debug, Clone)]
pub(crate) struct Request {
    pub(crate) size: Vec<i64>,
    pub(crate) kind: Kind,
    /// The device of the parameter.
    pub(crate) device: Device,
    /// If `true`, the tensor may be paged, because the parameter is large.
    pub(crate) paged: bool,
}

/// A state tensor and its storage.
#[derive(Debug)]
pub(crate) struct Allocated {
    pub(crate) tensor: Tensor,
    pub(crate) storage: Storage,
}

impl Allocated {
    /// Returns elements `range` on the device of the parameter: a view of the state, or a copy if it is in host
    /// memory.
    pub(crate) fn to_device_of(&self, range: &Range<usize>, device: Device) -> Result<Tensor> {
        let stored = flat_range(&self.tensor, range)?;
        if !matches!(self.storage, Storage::Host) {
            return Ok(stored);
        }
        let copy = Tensor::f_empty(range.len() as i64, (stored.kind(), device))?;
        copy_async(&copy, &stored)?;
        Ok(copy)
    }

    /// Copies elements that [`to_device_of`](Self::to_device_of) returned back to a state in host memory.
    pub(crate) fn put_back(&self, range: &Range<usize>, fetched: &Tensor) -> Result<()> {
        if matches!(self.storage, Storage::Host) {
            copy_async(&flat_range(&self.tensor, range)?, fetched)?;
        }
        Ok(())
    }
}

/// Copies on the device's current stream, in order with its kernels, without blocking the host.
fn copy_async(to: &Tensor, from: &Tensor) -> Result<()> {
    let arguments = [Value::Tensor(to), Value::Tensor(from), Value::Bool(true)];
    call("aten::copy_", "", &arguments)?;
    Ok(())
}

/// The storage of a state tensor.
#[derive(Debug)]
pub(crate) enum Storage {
    /// The memory of the parameter's device.
    Memory,
    /// A mapped file, within the budget: it stays in memory once it is loaded.
    Kept,
    /// A mapped file, released after use.
    File(MappedPages),
    /// Pinned host memory, for a parameter on a GPU.
    Host,
}

/// Allocates states within a memory budget.
#[derive(Debug)]
pub(crate) struct Pager {
    config: PagingConfig,
    /// The bytes of mapped files that may still become resident permanently.
    keep: u64,
}

impl Pager {
    pub(crate) fn new(config: PagingConfig) -> Self {
        let keep = config
            .max_resident_bytes
            .saturating_sub(config.window_bytes());
        Self { config, keep }
    }

    /// Allocates all requests, or none.
    pub(crate) fn allocate(&mut self, requests: &[Request]) -> Result<Vec<Allocated>> {
        let on_disk = |request: &Request| request.paged && request.device == Device::Cpu;
        let total: u64 = requests
            .iter()
            .filter(|r| on_disk(r))
            .map(page_aligned_bytes)
            .sum();
        // One file for all requests: its space is allocated completely or not at all.
        let file = (total > 0)
            .then(|| mapped_zeros(self.config.folder.as_deref(), total))
            .transpose()?;
        let (mut offset, mut keep) = (0, self.keep);
        let mut allocated = Vec::with_capacity(requests.len());
        for request in requests {
            let options = (request.kind, request.device);
            let (tensor, storage) = match &file {
                Some(file) if on_disk(request) => {
                    let tensor = view_of(file, offset, request)?;
                    let aligned = page_aligned_bytes(request);
                    let storage = match keep.checked_sub(aligned) {
                        Some(rest) => {
                            keep = rest;
                            Storage::Kept
                        }
                        None => {
                            let of_state = offset..offset + bytes(&tensor);
                            Storage::File(MappedPages::new(file, of_state))
                        }
                    };
                    offset += aligned;
                    (tensor, storage)
                }
                _ if request.paged && matches!(request.device, Device::Cuda(_)) => {
                    let zeros = Tensor::f_zeros(&request.size, (request.kind, Device::Cpu))?;
                    (overdrive_sys::transfer::pin_memory(&zeros)?, Storage::Host)
                }
                _ => (Tensor::f_zeros(&request.size, options)?, Storage::Memory),
            };
            allocated.push(Allocated { tensor, storage });
        }
        // Only now, so that an error above does not reduce the budget.
        self.keep = keep;
        // Allocating the disk space has loaded all pages, of which none is needed yet.
        if let Some(file) = &file {
            MappedPages::new(file, 0..total).release(0..total)?;
        }
        Ok(allocated)
    }
}

impl Storage {
    /// Loads the pages of elements `range`, before they are read.
    pub(crate) fn fetch(&self, tensor: &Tensor, range: &Range<usize>) -> Result<()> {
        match self {
            Self::File(pages) => pages.populate(byte_range(tensor, range)),
            _ => Ok(()),
        }
    }

    /// Releases the pages of elements `range`, after they were written.
    pub(crate) fn release(&self, tensor: &Tensor, range: &Range<usize>) -> Result<()> {
        match self {
            Self::File(pages) => pages.release(byte_range(tensor, range)),
            _ => Ok(()),
        }
    }
}

fn byte_range(tensor: &Tensor, range: &Range<usize>) -> Range<u64> {
    let size = tensor.kind().elt_size_in_bytes() as u64;
    range.start as u64 * size..range.end as u64 * size
}

/// Returns the bytes of a request, rounded up to whole pages, because memory is loaded and released by page.
fn page_aligned_bytes(request: &Request) -> u64 {
    let elements: i64 = request.size.iter().product();
    let bytes = elements.unsigned_abs() * request.kind.elt_size_in_bytes() as u64;
    bytes.next_multiple_of(page_bytes())
}

/// Returns the state tensor at `offset` of the mapped file.
fn view_of(file: &Tensor, offset: u64, request: &Request) -> Result<Tensor> {
    let elements: i64 = request.size.iter().product();
    let bytes = elements * request.kind.elt_size_in_bytes() as i64;
    let view = file.f_narrow(0, offset as i64, bytes)?;
    Ok(view.f_view_dtype(request.kind)?.f_view(&request.size[..])?)
}

/// Returns a tensor of `total` zero bytes that is mapped to a file in `folder`.
///
/// All disk space is allocated: a full disk is an error here, before anything has changed, and not a
/// signal in the middle of a step. The file is unlinked once it is mapped, so the system frees it with
/// the tensor, also if the process is killed.
fn mapped_zeros(folder: Option<&Path>, total: u64) -> Result<Tensor> {
    let folder = folder.map_or_else(std::env::temp_dir, Path::to_path_buf);
    let failed = |path: &Path, source: io::Error| Error::Io {
        action: "allocate disk space in",
        path: path.to_path_buf(),
        source: io::Error::new(
            source.kind(),
            format!(
                "{source}; the paged optimizer needs {:.1} MiB there: free disk space, or set `paging.folder` to a disk with more space",
                total as f64 / MIB as f64
            ),
        ),
    };
    if !folder.is_dir() {
        let missing = io::Error::new(io::ErrorKind::NotFound, "there is no such folder");
        return Err(failed(&folder, missing).into());
    }
    let mut file = tempfile::Builder::new()
        .prefix("overdrive-optimizer-state-")
        .tempfile_in(&folder)
        .map_err(|source| failed(&folder, source))?;
    // Written rather than truncated to the size, which would make a sparse file without disk space.
    let zeros = vec![0u8; FILL_BYTES];
    let mut remaining = total;
    while remaining > 0 {
        let count = remaining.min(FILL_BYTES as u64) as usize;
        file.write_all(&zeros[..count])
            .map_err(|source| failed(file.path(), source))?;
        remaining -= count as u64;
    }
    let path = file.path().to_str().ok_or_else(|| {
        let not_utf8 = io::Error::new(io::ErrorKind::InvalidInput, "its name is not UTF-8");
        failed(file.path(), not_utf8)
    })?;
    let size = i64::try_from(total).unwrap_or(i64::MAX);
    let tensor = Tensor::f_from_file(path, true, size, (Kind::Uint8, Device::Cpu))?;
    debug_assert_eq!(bytes(&tensor), total);
    // The mapping keeps the unlinked file alive.
    let path = file.into_temp_path();
    fs::remove_file(&path).map_err(|source| failed(&path, source))?;
    Ok(tensor)
}
