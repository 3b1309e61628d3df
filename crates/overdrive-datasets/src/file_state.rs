//! The state of a file by its metadata, by which a change while it is read is found.

use std::fmt;
use std::fs::Metadata;
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

use overdrive_core::Error as CommonError;

use crate::range_source::{RangeSource, registered_source};
use crate::{Error, Result};

/// The length of a file and its times. Every write changes the modification time, which a program may set back; the
/// change time, which Unix has, follows every write and no program can set it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct FileState {
    pub(crate) bytes: u64,
    pub(crate) modified: Time,
    /// Zeros where the system has none.
    pub(crate) changed: Time,
}

/// Seconds and nanoseconds since 1970.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Time {
    pub(crate) s: i64,
    pub(crate) ns: u32,
}

impl FileState {
    pub(crate) fn of(metadata: &Metadata) -> Self {
        Self {
            bytes: metadata.len(),
            modified: modified(metadata),
            changed: changed(metadata),
        }
    }

    /// Returns the state of an object on a server, whose version takes the place of the times.
    pub(crate) fn of_source(source: &dyn RangeSource) -> Self {
        Self {
            bytes: source.len(),
            modified: Time::default(),
            changed: Time::default(),
        }
    }

    /// Returns the state of the file at `path`.
    ///
    /// # Errors
    /// [`Error::Common`] if there is no such file.
    pub(crate) fn read(path: &Path) -> Result<Self> {
        if let Some(source) = registered_source(path) {
            return Ok(Self::of_source(source.as_ref()));
        }
        let metadata = std::fs::metadata(path).map_err(CommonError::io("read", path))?;
        Ok(Self::of(&metadata))
    }

    /// Checks that the file at `path` still has this state.
    ///
    /// # Errors
    /// [`Error::FileChanged`], and [`Error::Common`] if there is no such file any more.
    pub(crate) fn check(&self, path: &Path) -> Result<()> {
        if let Some(source) = registered_source(path) {
            return source.check_unchanged();
        }
        match Self::read(path)? == *self {
            true => Ok(()),
            false => Err(Error::FileChanged {
                path: path.to_owned(),
            }),
        }
    }
}

impl fmt::Display for FileState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} bytes, modified {}, changed {}",
            self.bytes, self.modified, self.changed
        )
    }
}

impl fmt::Display for Time {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} s {} ns", self.s, self.ns)
    }
}

/// Returns the modification time; zeros if the file system has none.
fn modified(metadata: &Metadata) -> Time {
    match metadata
        .modified()
        .unwrap_or(UNIX_EPOCH)
        .duration_since(SystemTime::UNIX_EPOCH)
    {
        Ok(after) => Time {
            s: after.as_secs() as i64,
            ns: after.subsec_nanos(),
        },
        // A modification time before 1970 is legal, though rare.
        Err(before) => {
            let before = before.duration();
            Time {
                s: -(before.as_secs() as i64),
                ns: before.subsec_nanos(),
            }
        }
    }
}

#[cfg(unix)]
fn changed(metadata: &Metadata) -> Time {
    use std::os::unix::fs::MetadataExt;
    Time {
        s: metadata.ctime(),
        // Below 10^9.
        ns: metadata.ctime_nsec() as u32,
    }
}

#[cfg(not(unix))]
fn changed(_: &Metadata) -> Time {
    Time::default()
}
