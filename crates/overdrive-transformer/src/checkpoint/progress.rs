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
    /// Makes a callback. `report` is called with the number of bytes of the weight files that are read and with
    /// their total: before the first tensor, and after each. It runs on the thread that loads.
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
    /// Returns `true` for the same callback.
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}
