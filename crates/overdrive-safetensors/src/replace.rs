//! Atomic replacement of files.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use crate::Result;
use overdrive_core::Error as CommonError;

/// Writes `bytes` to `path` atomically, as [`write`](crate::write()) writes tensors. It is meant for the small
/// files beside the weights, such as `config.json`.
///
/// # Errors
/// [`Error::Common`](crate::Error::Common) if the file cannot be written; a previous file at `path` is then
/// unchanged.
pub fn write_bytes(path: impl AsRef<Path>, bytes: &[u8]) -> Result<()> {
    let path = path.as_ref();
    replace(path, |file| {
        Ok(file
            .write_all(bytes)
            .map_err(CommonError::io("write", path))?)
    })
}

/// Lets `fill` write a temporary file in the folder of `path`, flushes it to the disk and renames it to `path`,
/// replacing an existing file.
pub(crate) fn replace(path: &Path, fill: impl FnOnce(&mut File) -> Result<()>) -> Result<()> {
    let failed = |source| CommonError::io("write", path)(source);
    let mut temporary = Temporary::beside(path).map_err(failed)?;
    fill(&mut temporary.file)?;
    // The data must be on the disk before the name is: after a power cut a renamed file could be empty.
    temporary.file.sync_all().map_err(failed)?;
    fs::rename(&temporary.path, path).map_err(failed)?;
    temporary.renamed = true;
    Ok(flush_folder(path).map_err(failed)?)
}

/// A temporary file that is removed on drop, also by a panic, unless it was renamed.
struct Temporary {
    path: PathBuf,
    file: File,
    renamed: bool,
}

impl Temporary {
    fn beside(path: &Path) -> io::Result<Temporary> {
        // The process id keeps processes apart, the counter the threads of one process.
        static COUNT: AtomicU64 = AtomicU64::new(0);
        let name = path
            .file_name()
            .ok_or_else(|| io::Error::new(io::ErrorKind::InvalidInput, "the path names no file"))?;
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        let mut hidden = std::ffi::OsString::from(".");
        hidden.push(name);
        hidden.push(format!(".{}-{number}.tmp", std::process::id()));
        let path = path.with_file_name(hidden);
        // A file left by a killed process that had the same id is overwritten.
        let file = OpenOptions::new()
            .write(true)
            .create(true)
            .truncate(true)
            .open(&path)?;
        Ok(Temporary {
            path,
            file,
            renamed: false,
        })
    }
}

impl Drop for Temporary {
    fn drop(&mut self) {
        if !self.renamed {
            // The error that led here is the one to return, so this one is dropped.
            let _ = fs::remove_file(&self.path);
        }
    }
}

/// Flushes the folder of `path`, so that the rename survives a crash of the machine.
fn flush_folder(path: &Path) -> io::Result<()> {
    // Only Unix can open and sync a folder.
    if !cfg!(unix) {
        return Ok(());
    }
    let folder = path
        .parent()
        .filter(|folder| !folder.as_os_str().is_empty());
    File::open(folder.unwrap_or(Path::new(".")))?.sync_all()
}
