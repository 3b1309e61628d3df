//! Files that appear whole or not at all.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use crate::{Error, Result};

/// Writes `bytes` to `path` as [`write`](crate::write()) writes tensors: whole, or not at all. For the
/// small files that lie beside weights.
///
/// # Errors
/// [`Error::Io`]; the file at `path` is then as it was.
pub fn write_bytes(path: impl AsRef<Path>, bytes: &[u8]) -> Result<()> {
    let path = path.as_ref();
    replace(path, |file| {
        file.write_all(bytes).map_err(Error::io("write", path))
    })
}

/// Lets `fill` write a temporary file in the folder of `path`, flushes it to the disk and gives it its
/// name, in place of what has it.
pub(crate) fn replace(path: &Path, fill: impl FnOnce(&mut File) -> Result<()>) -> Result<()> {
    let failed = |source| Error::io("write", path)(source);
    let mut temporary = Temporary::beside(path).map_err(failed)?;
    fill(&mut temporary.file)?;
    temporary.file.sync_all().map_err(failed)?;
    fs::rename(&temporary.path, path).map_err(failed)?;
    temporary.renamed = true;
    flush_folder(path).map_err(failed)
}

/// A file that is removed again unless it was renamed, on a panic too.
struct Temporary {
    path: PathBuf,
    file: File,
    renamed: bool,
}

impl Temporary {
    fn beside(path: &Path) -> io::Result<Temporary> {
        // Two writers of one process must not share a name either.
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
            // The error to tell is the one that came first.
            let _ = fs::remove_file(&self.path);
        }
    }
}

/// Makes the rename last through a crash of the machine.
fn flush_folder(path: &Path) -> io::Result<()> {
    if !cfg!(unix) {
        return Ok(());
    }
    let folder = path
        .parent()
        .filter(|folder| !folder.as_os_str().is_empty());
    File::open(folder.unwrap_or(Path::new(".")))?.sync_all()
}
