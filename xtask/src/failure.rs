//! The errors of a command: the cause and the remedy.

use std::fmt;
use std::fs;
use std::io;
use std::path::Path;

pub(crate) type Result<T> = std::result::Result<T, Failure>;

/// An error, with the remedy if there is one.
#[derive(Debug)]
pub(crate) struct Failure {
    what: String,
    remedy: Option<String>,
    /// The exit code of the program.
    pub(crate) code: u8,
    /// The error of the file system, if it is one.
    kind: Option<io::ErrorKind>,
}

impl Failure {
    pub(crate) fn new(what: impl Into<String>) -> Self {
        Self {
            what: what.into(),
            remedy: None,
            code: 1,
            kind: None,
        }
    }

    /// Returns a failure without a message, because a child process has already printed one.
    pub(crate) fn silent(code: u8) -> Self {
        Self {
            code,
            ..Self::new("")
        }
    }

    pub(crate) fn remedy(mut self, remedy: impl Into<String>) -> Self {
        self.remedy = Some(remedy.into());
        self
    }

    /// Returns an error of the file system during `what` at `path`.
    pub(crate) fn io(what: &str, path: &Path, error: &io::Error) -> Self {
        Self {
            kind: Some(error.kind()),
            ..Self::new(format!("{what} {}: {error}", path.display()))
        }
    }

    /// Adds the remedies of an error in the cache: of a full disk, and of a folder without write permission.
    pub(crate) fn in_cache(self) -> Self {
        match self.kind {
            Some(io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded) => {
                self.remedy(DISK_FULL)
            }
            Some(io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem) => {
                self.remedy(NOT_WRITABLE)
            }
            _ => self,
        }
    }
}

/// Returns the text of a file.
pub(crate) fn read(path: &Path) -> Result<String> {
    fs::read_to_string(path).map_err(|error| Failure::io("could not read", path, &error))
}

/// Writes a file, in folders that need not exist.
pub(crate) fn write(path: &Path, bytes: impl AsRef<[u8]>) -> Result<()> {
    let parent = path.parent().unwrap_or(path);
    fs::create_dir_all(parent)
        .and_then(|()| fs::write(path, bytes))
        .map_err(|error| Failure::io("could not write", path, &error))
}

pub(crate) const DISK_FULL: &str = "Make room on that disk, or set XDG_CACHE_HOME to a folder on a \
                                    larger one, and run the command again: complete downloads \
                                    are kept.";

pub(crate) const NOT_WRITABLE: &str = "Set XDG_CACHE_HOME to a writable folder, or set LIBTORCH to \
                                       an installed libtorch.";

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.what)?;
        if let Some(remedy) = &self.remedy {
            write!(f, "\n  remedy: {remedy}")?;
        }
        Ok(())
    }
}

impl Failure {
    pub(crate) fn is_silent(&self) -> bool {
        self.what.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_an_error_in_the_cache_has_its_remedies() {
        let denied = io::ErrorKind::PermissionDenied.into();
        let failure = Failure::io("could not create", Path::new("/a"), &denied);
        assert!(!failure.to_string().contains("remedy"), "{failure}");
        let text = failure.in_cache().to_string();
        assert!(text.contains("XDG_CACHE_HOME"), "{text}");
        let missing = io::ErrorKind::NotFound.into();
        let text = Failure::io("could not read", Path::new("/a"), &missing).in_cache();
        assert!(!text.to_string().contains("remedy"), "{text}");
    }
}
