//! The trace of a profiler.

mod chrome;
mod key_averages;

pub use key_averages::{GroupBy, KeyAverages, OperatorStats, SortBy};

use std::fs::{self, File};
use std::path::{Path, PathBuf};

use overdrive_core::Error as CommonError;
use overdrive_sys::profiler::Profile;
pub use overdrive_sys::profiler::ProfileEvent as TraceEvent;

use crate::{Error, Result};

/// A recording of libtorch's profiler: every operator, range, kernel and allocation.
///
/// [`save_chrome_trace`](Self::save_chrome_trace) writes a file for `chrome://tracing` and
/// <https://ui.perfetto.dev>, [`key_averages`](Self::key_averages) sums the time and memory of each operator.
#[derive(Debug)]
pub struct Trace {
    profile: Profile,
    events: Vec<TraceEvent>,
    start_ns: u64,
    written_by_kineto: bool,
}

impl Trace {
    pub(crate) fn new(profile: Profile) -> Result<Self> {
        Ok(Self {
            events: profile.events()?,
            start_ns: profile.start_ns()?,
            profile,
            written_by_kineto: false,
        })
    }

    /// Returns all events.
    pub fn events(&self) -> &[TraceEvent] {
        &self.events
    }

    /// Returns the time and memory of each operator over all its calls, as `key_averages()` of `torch.profiler`.
    pub fn key_averages(&self, group_by: GroupBy) -> KeyAverages {
        KeyAverages::of(&self.events, group_by)
    }

    /// Writes the trace as Chrome's JSON, first to a temporary file beside `path`, so that a
    /// reader never sees an incomplete file.
    ///
    /// Kineto, libtorch's profiling library, writes the first file, with everything that it knows, and can do so
    /// once. Later calls (and the first, if Kineto leaves no file) write the same operators, ranges, kernels and
    /// allocations, without the arrows between forward and backward. overdrive-sys silences Kineto's own log,
    /// which warns on machines without a GPU; `KINETO_LOG_LEVEL=0` shows it.
    ///
    /// # Errors
    /// [`overdrive_core::Error::Io`], [`Error::Trace`].
    pub fn save_chrome_trace(&mut self, path: impl AsRef<Path>) -> Result<()> {
        let path = path.as_ref();
        if let Some(folder) = path.parent() {
            fs::create_dir_all(folder).map_err(CommonError::io("create the folder", folder))?;
        }
        let partial = partial_name(path)?;
        // Created before Kineto writes it, which does not report when it cannot.
        File::create(&partial).map_err(CommonError::io("create", &partial))?;
        let written = self.write_to(&partial);
        let moved = written.and_then(|()| {
            File::open(&partial)
                .and_then(|file| file.sync_all())
                .map_err(CommonError::io("sync", &partial))?;
            Ok(fs::rename(&partial, path).map_err(CommonError::io("rename the trace to", path))?)
        });
        if moved.is_err() {
            // The first error is the one to return.
            let _ = fs::remove_file(&partial);
        }
        moved
    }

    fn write_to(&mut self, partial: &Path) -> Result<()> {
        if !self.written_by_kineto {
            self.written_by_kineto = true;
            self.profile.save(partial).map_err(|error| Error::Trace {
                path: partial.to_owned(),
                message: error.to_string(),
            })?;
            let size = fs::metadata(partial).map_err(CommonError::io("read", partial))?;
            if size.len() > 0 {
                return Ok(());
            }
        }
        let json = chrome::json(&self.events, self.start_ns);
        Ok(fs::write(partial, json).map_err(CommonError::io("write", partial))?)
    }
}

/// Returns a name beside `path` that no other process uses.
fn partial_name(path: &Path) -> Result<PathBuf> {
    let name = path.file_name().ok_or_else(|| Error::Trace {
        path: path.to_owned(),
        message: "the path has no file name".to_owned(),
    })?;
    let mut partial = std::ffi::OsString::from(".");
    partial.push(name);
    partial.push(format!(".{}.partial", std::process::id()));
    Ok(path.with_file_name(partial))
}
