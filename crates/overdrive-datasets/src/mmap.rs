//! The one place where a file becomes a slice.
#![allow(unsafe_code)]

use std::fs::File;
use std::path::Path;

use memmap2::Mmap;

use crate::{Error, Result};

/// Maps a file for reading.
///
/// Memory is taken page by page as the file is read, and the operating system may drop the pages
/// again, so a store may be much larger than memory.
pub(crate) fn map_file(path: &Path) -> Result<Mmap> {
    let file = File::open(path).map_err(Error::io("open", path))?;
    map_opened(&file, path)
}

/// Maps the open file at `path`, as [`map_file`] does.
pub(crate) fn map_opened(file: &File, path: &Path) -> Result<Mmap> {
    // SAFETY: the map is read-only and is seen by this crate only as bytes, for which every value
    // is valid. What `Mmap::map` asks of the caller is that nobody changes the file while it is
    // mapped. This crate keeps that for the files that it writes: they are written under another
    // name, renamed when complete and never changed afterwards (replacing one by rename leaves the
    // old file to those who mapped it). For files that the user made it is the user's part, as it
    // is with numpy.memmap, and `TokenStore::open` and `RecordFiles` document it: bytes that change
    // under a map give other tokens, and a file cut short while mapped ends the process (SIGBUS).
    unsafe { Mmap::map(file) }.map_err(Error::io("map", path))
}
