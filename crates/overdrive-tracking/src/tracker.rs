//! Where metrics go.

use std::fmt;

use crate::{Result, StepMetrics};

/// A place that metrics are sent to: a file, TensorBoard, a service of your own.
pub trait Tracker {
    /// Records one step.
    ///
    /// # Errors
    /// Whatever stops the place from taking the record. Training can go on after it.
    fn log(&mut self, metrics: &StepMetrics) -> Result<()>;

    /// Records a text (the configuration, a sample of the model) under a tag. Places that hold only
    /// numbers pass over it, which is the default.
    ///
    /// # Errors
    /// As [`Tracker::log`].
    fn log_text(&mut self, _step: u64, _tag: &str, _text: &str) -> Result<()> {
        Ok(())
    }

    /// Writes out what is still held back. Logging may go on afterwards.
    ///
    /// # Errors
    /// As [`Tracker::log`].
    fn finish(&mut self) -> Result<()>;
}

/// Sends every record to several trackers.
///
/// Each tracker gets every record, also when one before it fails; the first failure is returned.
///
/// ```
/// use overdrive_tracking::{JsonLines, StepMetrics, TensorBoard, Tracker, Trackers};
///
/// let folder = tempfile::tempdir()?;
/// let mut trackers = Trackers::new()
///     .with(JsonLines::append(folder.path().join("metrics.jsonl"))?)
///     .with(TensorBoard::create(folder.path().join("tensorboard"))?);
/// trackers.log(&StepMetrics { step: 1, loss: 8.3, ..Default::default() })?;
/// trackers.finish()?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Default)]
pub struct Trackers {
    trackers: Vec<Box<dyn Tracker + Send>>,
}

impl Trackers {
    /// No tracker yet: logging does nothing.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a tracker.
    #[must_use]
    pub fn with(mut self, tracker: impl Tracker + Send + 'static) -> Self {
        self.trackers.push(Box::new(tracker));
        self
    }

    /// How many trackers there are.
    pub fn len(&self) -> usize {
        self.trackers.len()
    }

    /// Whether nothing is tracked.
    pub fn is_empty(&self) -> bool {
        self.trackers.is_empty()
    }

    fn each(&mut self, mut send: impl FnMut(&mut dyn Tracker) -> Result<()>) -> Result<()> {
        let mut outcome = Ok(());
        for tracker in &mut self.trackers {
            let sent = send(tracker.as_mut());
            if outcome.is_ok() {
                outcome = sent;
            }
        }
        outcome
    }
}

impl Tracker for Trackers {
    fn log(&mut self, metrics: &StepMetrics) -> Result<()> {
        self.each(|tracker| tracker.log(metrics))
    }

    fn log_text(&mut self, step: u64, tag: &str, text: &str) -> Result<()> {
        self.each(|tracker| tracker.log_text(step, tag, text))
    }

    fn finish(&mut self) -> Result<()> {
        self.each(|tracker| tracker.finish())
    }
}

impl fmt::Debug for Trackers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Trackers")
            .field("len", &self.trackers.len())
            .finish()
    }
}
