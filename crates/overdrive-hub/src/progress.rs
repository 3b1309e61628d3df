use std::fmt;
use std::sync::Arc;

use indicatif::{ProgressBar, ProgressStyle};

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

    /// Creates a callback that shows a progress bar on stderr while something is downloaded, if stderr is a terminal.
    pub fn bar() -> DownloadProgress {
        let style = "downloading {wide_bar} {bytes} of {total_bytes}";
        let style = ProgressStyle::with_template(style);
        let bar = ProgressBar::no_length()
            .with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
        DownloadProgress::new(move |done, all| {
            if bar.is_finished() {
                bar.reset();
            }
            bar.set_length(all);
            bar.set_position(done);
            if done == all {
                bar.finish_and_clear();
            }
        })
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
