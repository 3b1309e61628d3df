//! Memory maps of files. This module has the only unsafe code of the crate.
#![allow(unsafe_code)]

use std::fs::File;
use std::path::Path;

use memmap2::Mmap;

use overdrive_core::Error as CommonError;

use crate::Result;

/// Maps the file at `path` for reading.
///
/// The operating system loads pages on first access and may drop them again, so a file may be much larger than
/// memory.
pub(crate) fn map_file(path: &Path) -> Result<Mmap> {
    let file = File::open(path).map_err(CommonError::io("open", path))?;
    map_opened(&file, path)
}

/// Maps the open file at `path`, as [`map_file`] does.
pub(crate) fn map_opened(file: &File, path: &Path) -> Result<Mmap> {
    // SAFETY: the map is read-only and used only as bytes, for which every value is valid. `Mmap::map`
    // requires that the file does not change while it is mapped. This crate keeps that for the files that
    // it writes: they are written under a temporary name, renamed when complete and never changed
    // afterwards (replacing one by a rename leaves the old file to its maps). For the user's files it is
    // the user's responsibility, as with numpy.memmap, and `TokenStore::open` and `RecordFiles` document
    // it: bytes that change give other tokens, and truncating a mapped file ends the process (SIGBUS).
    let map = unsafe { Mmap::map(file) };
    Ok(map.map_err(CommonError::io("map", path))?)
}
