//! The memory map, the only unsafe code of the reader.
#![allow(unsafe_code)]

use std::fs::File;
use std::path::Path;

use memmap2::Mmap;
use overdrive_core::Error;

use crate::Result;

/// Maps `path`, read-only. The file must not be truncated while it is mapped: an access to the lost pages
/// ends the process.
pub(super) fn map(path: &Path) -> Result<Mmap> {
    let file = File::open(path).map_err(Error::io("read", path))?;
    // SAFETY: the map is read-only and private. If another process truncates the file while it is mapped,
    // an access to the lost pages ends this process with SIGBUS: the known limit of mapping a file, and the
    // same in llama.cpp and safetensors.
    Ok(unsafe { Mmap::map(&file) }.map_err(Error::io("map", path))?)
}
