//! What a profiler recorded.

mod chrome;
mod key_averages;

pub use key_averages::{GroupBy, KeyAverages, OperatorStats, SortBy};

use std::fs::{self, File};
use std::path::{Path, PathBuf};

use overdrive_sys::profiler::Profile;
pub use overdrive_sys::profiler::ProfileEvent as TraceEvent;

use crate::{Error, Result};

/// What libtorch's profiler saw: every operator, range, kernel and allocation.
///
/// [`save_chrome_trace`](Self::save_chrome_trace) writes a file for `chrome://tracing` and
/// <https://ui.perfetto.dev>, [`key_averages`](Self::key_averages) adds up what each operator took.
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

    /// Everything that happened.
    pub fn events(&self) -> &[TraceEvent] {
        &self.events
    }

    /// What each operator took in all, as `key_averages()` of `torch.profiler`.
    pub fn key_averages(&self, group_by: GroupBy) -> KeyAverages {
        KeyAverages::of(&self.events, group_by)
    }

    /// Writes the trace as Chrome's JSON: under a temporary name beside `path` first, so that a
    /// reader never sees half of it.
    ///
    /// The first time Kineto writes it, with all it knows. It works once; later calls (and the first,
    /// where Kineto leaves no file) write the same operators, ranges, kernels and allocations
    /// themselves, without the arrows between forward and backward. overdrive-sys keeps Kineto's own log
    /// quiet, which on a machine without a GPU complains of that; `KINETO_LOG_LEVEL=0` shows it.
    ///
    /// # Errors
    /// [`Error::Io`], [`Error::Trace`].
    pub fn save_chrome_trace(&mut self, path: impl AsRef<Path>) -> Result<()> {
        let path = path.as_ref();
        if let Some(folder) = path.parent() {
            fs::create_dir_all(folder).map_err(Error::io("create the folder", folder))?;
        }
        let partial = partial_name(path)?;
        // Made before Kineto is asked, which does not say when it cannot write.
        File::create(&partial).map_err(Error::io("create", &partial))?;
        let written = self.write_to(&partial);
        let moved = written.and_then(|()| {
            File::open(&partial)
                .and_then(|file| file.sync_all())
                .map_err(Error::io("sync", &partial))?;
            fs::rename(&partial, path).map_err(Error::io("rename the trace to", path))
        });
        if moved.is_err() {
            // The first error is the one to tell.
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
            let size = fs::metadata(partial).map_err(Error::io("read", partial))?;
            if size.len() > 0 {
                return Ok(());
            }
        }
        let json = chrome::json(&self.events, self.start_ns);
        fs::write(partial, json).map_err(Error::io("write", partial))
    }
}

/// A name beside `path` that no other writer takes.
fn partial_name(path: &Path) -> Result<PathBuf> {
    let name = path.file_name().ok_or_else(|| Error::Trace {
        path: path.to_owned(),
        message: "it names no file".to_owned(),
    })?;
    let mut partial = std::ffi::OsString::from(".");
    partial.push(name);
    partial.push(format!(".{}.partial", std::process::id()));
    Ok(path.with_file_name(partial))
}
