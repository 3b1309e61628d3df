use std::fmt;
use std::sync::Arc;

/// A callback that receives the progress of a download.
///
/// ```
/// use overdrive_hub::{DownloadProgress, HubOptions};
/// let options = HubOptions {
///     progress: Some(DownloadProgress::new(|done, all| eprint!("\r{}%", 100 * done / all.max(1)))),
///     ..HubOptions::default()
/// };
/// ```
#[derive(Clone)]
pub struct DownloadProgress(Arc<dyn Fn(u64, u64) + Send + Sync>);

impl DownloadProgress {
    /// Creates a callback. `report` is called with the number of downloaded bytes and with the total of all files that
    /// are missing from the cache.
    pub fn new(report: impl Fn(u64, u64) + Send + Sync + 'static) -> DownloadProgress {
        DownloadProgress(Arc::new(report))
    }

    pub(crate) fn report(&self, done: u64, all: u64) {
        (self.0)(done, all);
    }
}

impl fmt::Debug for DownloadProgress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("DownloadProgress(..)")
    }
}
