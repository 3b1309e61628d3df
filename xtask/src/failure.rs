//! The errors of a command: the cause and the remedy.

use std::fmt;
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
}

impl Failure {
    pub(crate) fn new(what: impl Into<String>) -> Self {
        Self {
            what: what.into(),
            remedy: None,
            code: 1,
        }
    }

    /// Returns a failure without a message, because a child process has already printed one.
    pub(crate) fn silent(code: u8) -> Self {
        Self {
            what: String::new(),
            remedy: None,
            code,
        }
    }

    pub(crate) fn remedy(mut self, remedy: impl Into<String>) -> Self {
        self.remedy = Some(remedy.into());
        self
    }

    /// Returns an error of the file system during `what` at `path`. A full disk and a folder without write
    /// permission have their own remedies.
    pub(crate) fn io(what: &str, path: &Path, error: &io::Error) -> Self {
        let failure = Self::new(format!("{what} {}: {error}", path.display()));
        match error.kind() {
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => failure.remedy(DISK_FULL),
            io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem => {
                failure.remedy(NOT_WRITABLE)
            }
            _ => failure,
        }
    }
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
