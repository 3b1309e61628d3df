//! A file in memory. The only unsafe code of the reader.
#![allow(unsafe_code)]

use std::fs::File;
use std::path::Path;

use memmap2::Mmap;

use crate::{Error, Result};

/// Maps `path`, read-only. The file must not be cut short while it is mapped: touching the lost pages
/// would end the process.
pub(super) fn map(path: &Path) -> Result<Mmap> {
    let io = |action| {
        move |source| Error::Io {
            action,
            path: path.to_path_buf(),
            source,
        }
    };
    let file = File::open(path).map_err(io("read"))?;
    // SAFETY: the map is read-only and private. If another process cuts the file short while it is
    // mapped, touching the lost pages ends this process with SIGBUS: the known limit of mapping a
    // file, and the same in llama.cpp and safetensors.
    unsafe { Mmap::map(&file) }.map_err(io("map"))
}
