//! The trace of a profiler.

mod chrome;
mod key_averages;

pub use key_averages::{GroupBy, KeyAverages, OperatorStats, SortBy};

use std::fs::{self, File};
use std::path::Path;

use overdrive_core::{Error as CommonError, files};
use overdrive_sys::profiler::Profile;
pub use overdrive_sys::profiler::ProfileEvent as TraceEvent;
use tempfile::NamedTempFile;

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
        // Created before Kineto writes it by its name; Kineto does not report when it cannot.
        let partial = files::unfinished(path)?.into_temp_path();
        self.write_to(&partial)?;
        // Opened again, in case that Kineto has replaced the file.
        let file = File::open(&partial).map_err(CommonError::io("read", &partial))?;
        Ok(files::commit(
            NamedTempFile::from_parts(file, partial),
            path,
        )?)
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
