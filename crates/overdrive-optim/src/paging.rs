//! Optimizer states outside the memory that is short: in a mapped file, or in pinned host memory.

use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use tch::{Device, Kind, Tensor};

use crate::checks::{bytes, check_option};
use crate::residency::{self, page_bytes};
use crate::{Error, Result};

const MIB: u64 = 1 << 20;
/// Written at a time when the room of a state is claimed.
const FILL_BYTES: usize = 1 << 20;

/// Where paged optimizers keep their states and how much of them may be in memory.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct PagingConfig {
    /// Folder of the state's file, for parameters on the CPU. `None`, the default, is the system's
    /// folder for temporary files: give another one where that lies in memory (tmpfs) or is too small.
    pub folder: Option<PathBuf>,
    /// Bytes of paged states that may be in memory at once, at least 1 MiB: on the CPU, what of the
    /// mapped file the process keeps; on a GPU, the buffers that states stream through. What is more
    /// than a quarter of it keeps states in memory for good. Default 256 MiB.
    pub max_resident_bytes: u64,
    /// Parameters with fewer elements keep their state in ordinary memory. Default 100,000, as in
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
    /// Checks every option against its range.
    ///
    /// # Errors
    /// [`Error::InvalidOption`] naming the first option outside its range.
    pub fn validate(&self) -> Result<()> {
        check_option(
            "max_resident_bytes",
            self.max_resident_bytes,
            self.max_resident_bytes >= MIB,
            "at least 1048576 (1 MiB)",
        )
    }

    /// Bytes of state that one call updates.
    pub(crate) fn window_bytes(&self) -> u64 {
        (self.max_resident_bytes / 4).max(MIB / 2)
    }
}

/// A part of a state that is to be made, of zeros.
#[derive(Debug, Clone)]
pub(crate) struct Request {
    pub(crate) size: Vec<i64>,
    pub(crate) kind: Kind,
    /// Where the parameter is.
    pub(crate) device: Device,
    /// Whether it may go out of memory at all: the parameter is large.
    pub(crate) paged: bool,
}

/// A part of a state and where it went.
#[derive(Debug)]
pub(crate) struct Allocated {
    pub(crate) tensor: Tensor,
    pub(crate) storage: Storage,
}

/// Where a part of a state lies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Storage {
    /// With the parameter.
    Memory,
    /// In a mapped file, but within the budget: left in memory once it is there.
    Kept,
    /// In a mapped file, let go after use.
    File,
    /// In host memory, pinned, for a parameter on a device.
    Host,
}

/// Gives out room for states, by a budget.
#[derive(Debug)]
pub(crate) struct Pager {
    config: PagingConfig,
    /// Bytes of mapped files that may still stay in memory.
    keep: u64,
}

impl Pager {
    pub(crate) fn new(config: PagingConfig) -> Self {
        let keep = config
            .max_resident_bytes
            .saturating_sub(config.window_bytes());
        Self { config, keep }
    }

    pub(crate) fn config(&self) -> &PagingConfig {
        &self.config
    }

    /// Room for all requests, or none.
    pub(crate) fn allocate(&mut self, requests: &[Request]) -> Result<Vec<Allocated>> {
        let on_disk = |request: &Request| request.paged && request.device == Device::Cpu;
        let total: u64 = requests.iter().filter(|r| on_disk(r)).map(room).sum();
        let file = (total > 0)
            .then(|| mapped_zeros(self.config.folder.as_deref(), total))
            .transpose()?;
        let (mut offset, mut keep) = (0, self.keep);
        let mut allocated = Vec::with_capacity(requests.len());
        for request in requests {
            let options = (request.kind, request.device);
            let (tensor, storage) = match &file {
                Some(file) if on_disk(request) => {
                    let tensor = part_of(file, offset, request)?;
                    let room = room(request);
                    offset += room;
                    let storage = match keep.checked_sub(room) {
                        Some(rest) => {
                            keep = rest;
                            Storage::Kept
                        }
                        None => Storage::File,
                    };
                    (tensor, storage)
                }
                _ if request.paged && matches!(request.device, Device::Cuda(_)) => {
                    let zeros = Tensor::f_zeros(&request.size, (request.kind, Device::Cpu))?;
                    (zeros.f_pin_memory(request.device)?, Storage::Host)
                }
                _ => (Tensor::f_zeros(&request.size, options)?, Storage::Memory),
            };
            allocated.push(Allocated { tensor, storage });
        }
        self.keep = keep;
        // What was written to claim the room is on its way to the disk; none of it is needed yet.
        if let Some(file) = &file {
            residency::release(file, 0..total)?;
        }
        Ok(allocated)
    }
}

impl Storage {
    /// Before elements `range` of a part are read: has their pages brought in together.
    pub(crate) fn fetch(self, tensor: &Tensor, range: &std::ops::Range<usize>) -> Result<()> {
        match self {
            Self::File => residency::populate(tensor, byte_range(tensor, range)),
            _ => Ok(()),
        }
    }

    /// After elements `range` of a part were written: lets their pages go.
    pub(crate) fn release(self, tensor: &Tensor, range: &std::ops::Range<usize>) -> Result<()> {
        match self {
            Self::File => residency::release(tensor, byte_range(tensor, range)),
            _ => Ok(()),
        }
    }
}

fn byte_range(tensor: &Tensor, range: &std::ops::Range<usize>) -> std::ops::Range<u64> {
    let size = tensor.kind().elt_size_in_bytes() as u64;
    range.start as u64 * size..range.end as u64 * size
}

/// Bytes of a request, in whole pages: parts come and go by the page.
fn room(request: &Request) -> u64 {
    let elements: i64 = request.size.iter().product();
    let bytes = elements.unsigned_abs() * request.kind.elt_size_in_bytes() as u64;
    bytes.next_multiple_of(page_bytes())
}

fn part_of(file: &Tensor, offset: u64, request: &Request) -> Result<Tensor> {
    let elements: i64 = request.size.iter().product();
    let bytes = elements * request.kind.elt_size_in_bytes() as i64;
    let part = file.f_narrow(0, offset as i64, bytes)?;
    Ok(part.f_view_dtype(request.kind)?.f_view(&request.size[..])?)
}

/// A tensor of `total` zero bytes mapped to a file in `folder`. Every byte has its place on the disk:
/// a full disk is an error here, where nothing has changed yet, and not a signal in the middle of a
/// step. The file has no name any more once it is mapped; the system frees it with the tensor, also
/// when the process is killed.
fn mapped_zeros(folder: Option<&Path>, total: u64) -> Result<Tensor> {
    let folder = folder.map_or_else(std::env::temp_dir, Path::to_path_buf);
    let failed = |path: &Path, source: io::Error| Error::StateFile {
        action: "make room in",
        path: path.to_path_buf(),
        source: io::Error::new(
            source.kind(),
            format!(
                "{source}; the paged optimizer needs {:.1} MiB there: free some, or set `paging.folder` to a disk with more room",
                total as f64 / MIB as f64
            ),
        ),
    };
    if !folder.is_dir() {
        let missing = io::Error::new(io::ErrorKind::NotFound, "there is no such folder");
        return Err(failed(&folder, missing));
    }
    let mut file = tempfile::Builder::new()
        .prefix("overdrive-optimizer-state-")
        .tempfile_in(&folder)
        .map_err(|source| failed(&folder, source))?;
    let zeros = vec![0u8; FILL_BYTES];
    let mut left = total;
    while left > 0 {
        let now = left.min(FILL_BYTES as u64) as usize;
        file.write_all(&zeros[..now])
            .map_err(|source| failed(file.path(), source))?;
        left -= now as u64;
    }
    let path = file.path().to_str().ok_or_else(|| {
        let odd = io::Error::new(io::ErrorKind::InvalidInput, "its name is not UTF-8");
        failed(file.path(), odd)
    })?;
    let size = i64::try_from(total).unwrap_or(i64::MAX);
    let tensor = Tensor::f_from_file(path, true, size, (Kind::Uint8, Device::Cpu))?;
    debug_assert_eq!(bytes(&tensor), total);
    // Unlinked: the mapping keeps the file alive.
    let path = file.into_temp_path();
    fs::remove_file(&path).map_err(|source| failed(&path, source))?;
    Ok(tensor)
}
