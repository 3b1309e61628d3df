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
    gpu_warning: Option<String>,
}

/// `c10::DeviceType::CUDA`.
const CUDA: i32 = 1;

impl Trace {
    /// `cupti_error` is the error of CUPTI when the profiler was started.
    pub(crate) fn new(
        profile: Profile,
        records_gpus: bool,
        cupti_error: Option<String>,
    ) -> Result<Self> {
        let events = profile.events()?;
        // Allocations are seen without CUPTI.
        let is_gpu_work =
            |event: &TraceEvent| event.device_type == CUDA && event.name != "[memory]";
        let lacks_gpus = records_gpus && !events.iter().any(is_gpu_work);
        Ok(Self {
            gpu_warning: lacks_gpus.then(|| gpu_warning(cupti_error.as_deref())),
            events,
            start_ns: profile.start_ns()?,
            profile,
            written_by_kineto: false,
        })
    }

    /// Returns the reason why the trace has no GPU work, although it should have been recorded; `None` if the trace
    /// has some, or if it was not requested. The profiler logs it as a warning too.
    pub fn gpu_warning(&self) -> Option<&str> {
        self.gpu_warning.as_deref()
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
        // The file of before stays open, since its lock says that this process is writing.
        let (_locked, partial) = files::unfinished(path)?.into_parts();
        self.write_to(&partial)?;
        // Opened again, in case Kineto has replaced the file.
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

fn gpu_warning(cupti_error: Option<&str>) -> String {
    const REMEDY: &str = "the driver lets only administrators profile: run as root (in a container with the \
                          capability SYS_ADMIN), or load the driver with NVreg_RestrictProfilingToAdminUsers=0";
    let cause = match cupti_error {
        Some(error) if error.contains("PRIVILEGES") => {
            format!("CUPTI reported {error}; {REMEDY}")
        }
        Some(error) => format!("CUPTI reported {error}"),
        None => format!("either no kernel ran while it was recorded, or {REMEDY}"),
    };
    format!(
        "the trace has no GPU work: {cause}. `KINETO_LOG_LEVEL=0` shows the log of libtorch's profiler"
    )
}

#[cfg(test)]
mod tests {
    use super::gpu_warning;

    #[test]
    fn a_missing_permission_is_named_with_its_remedy() {
        let warning = gpu_warning(Some("CUPTI_ERROR_INSUFFICIENT_PRIVILEGES"));
        for part in [
            "CUPTI reported CUPTI_ERROR_INSUFFICIENT_PRIVILEGES",
            "NVreg_RestrictProfilingToAdminUsers=0",
            "SYS_ADMIN",
        ] {
            assert!(warning.contains(part), "{part}: {warning}");
        }
        let other = gpu_warning(Some("CUPTI_ERROR_NOT_INITIALIZED"));
        assert!(!other.contains("NVreg"), "{other}");
    }
}
