use std::fmt;
use std::sync::Arc;

/// A callback that receives the progress of loading a checkpoint.
///
/// ```
/// use overdrive_transformer::{LoadOptions, LoadProgress};
/// let options = LoadOptions {
///     progress: Some(LoadProgress::new(|done, all| eprint!("\r{}%", 100 * done / all.max(1)))),
///     ..LoadOptions::default()
/// };
/// # assert_eq!(options, options.clone());
/// ```
#[derive(Clone)]
pub struct LoadProgress(Arc<dyn Fn(u64, u64) + Send + Sync>);

impl LoadProgress {
    /// Creates a callback. `report` is called before the first tensor and after each one, with the number of bytes
    /// that have been read from the weight files and with their total. It runs on the loading thread.
    pub fn new(report: impl Fn(u64, u64) + Send + Sync + 'static) -> LoadProgress {
        LoadProgress(Arc::new(report))
    }

    pub(crate) fn report(&self, done: u64, all: u64) {
        (self.0)(done, all);
    }
}

impl fmt::Debug for LoadProgress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("LoadProgress(..)")
    }
}

impl PartialEq for LoadProgress {
    /// Returns `true` if both are the same callback.
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}
