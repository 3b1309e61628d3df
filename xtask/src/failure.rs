//! What a command says when it cannot go on: what went wrong, and the way out.

use std::fmt;
use std::io;
use std::path::Path;

pub(crate) type Result<T> = std::result::Result<T, Failure>;

/// A reason to stop, with the way out where there is one.
#[derive(Debug)]
pub(crate) struct Failure {
    what: String,
    way_out: Option<String>,
    /// The exit code that this ends the program with.
    pub(crate) code: u8,
}

impl Failure {
    pub(crate) fn new(what: impl Into<String>) -> Self {
        Self {
            what: what.into(),
            way_out: None,
            code: 1,
        }
    }

    /// Ends the program with `code` and says nothing: a child has said it all.
    pub(crate) fn silent(code: u8) -> Self {
        Self {
            what: String::new(),
            way_out: None,
            code,
        }
    }

    pub(crate) fn way_out(mut self, way_out: impl Into<String>) -> Self {
        self.way_out = Some(way_out.into());
        self
    }

    /// An error of the file system while doing `what` at `path`; a full disk and a folder that may
    /// not be written have ways out of their own.
    pub(crate) fn io(what: &str, path: &Path, error: &io::Error) -> Self {
        let failure = Self::new(format!("{what} {}: {error}", path.display()));
        match error.kind() {
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => failure.way_out(DISK_FULL),
            io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem => {
                failure.way_out(NOT_WRITABLE)
            }
            _ => failure,
        }
    }
}

pub(crate) const DISK_FULL: &str = "Make room on that disk, or set XDG_CACHE_HOME to a folder on a \
                                    larger one, and run the command again: what has been \
                                    downloaded whole is not downloaded again.";

pub(crate) const NOT_WRITABLE: &str = "Set XDG_CACHE_HOME to a folder that you may write, or set \
                                       LIBTORCH to a libtorch that is there already.";

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.what)?;
        if let Some(way_out) = &self.way_out {
            write!(f, "\n  way out: {way_out}")?;
        }
        Ok(())
    }
}

impl Failure {
    pub(crate) fn is_silent(&self) -> bool {
        self.what.is_empty()
    }
}
