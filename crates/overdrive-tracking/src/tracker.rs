//! The trait of trackers, and several trackers as one.

use std::fmt;

use crate::{Result, StepMetrics};

/// A destination of metrics: a file, TensorBoard, an experiment-tracking service.
///
/// Implement it for your own destination, with its errors wrapped in [`Error::Tracker`](crate::Error::Tracker).
pub trait Tracker {
    /// Records one step.
    ///
    /// # Errors
    /// An error if the record cannot be stored. Training can continue.
    fn log(&mut self, metrics: &StepMetrics) -> Result<()>;

    /// Records a text (the configuration, a sample of the model) under a tag. The default ignores it, for trackers of
    /// numbers only.
    ///
    /// # Errors
    /// As for [`Tracker::log`].
    fn log_text(&mut self, _step: u64, _tag: &str, _text: &str) -> Result<()> {
        Ok(())
    }

    /// Writes buffered records. Logging may continue afterwards.
    ///
    /// # Errors
    /// As for [`Tracker::log`].
    fn finish(&mut self) -> Result<()>;
}

/// A tracker that sends every record to several others.
///
/// Each tracker gets every record, even if an earlier one fails; the first error is returned.
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
    /// If `true`, the last record of [`log_or_warn`](Self::log_or_warn) was not stored by every tracker.
    failing: bool,
}

impl Trackers {
    /// Creates an empty list, which logs nothing.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a tracker.
    #[must_use]
    pub fn with(mut self, tracker: impl Tracker + Send + 'static) -> Self {
        self.trackers.push(Box::new(tracker));
        self
    }

    /// Returns the number of trackers.
    pub fn len(&self) -> usize {
        self.trackers.len()
    }

    /// Returns `true` if there are no trackers.
    pub fn is_empty(&self) -> bool {
        self.trackers.is_empty()
    }

    /// Records one step as [`Tracker::log`] does, for a loop that must continue even when the disk is full. Returns a
    /// line for the user when a tracker first fails and when all trackers work again, and otherwise `None`. The files
    /// of this crate get the missing records later.
    #[must_use = "the line tells the user that metrics are missing"]
    pub fn log_or_warn(&mut self, metrics: &StepMetrics) -> Option<String> {
        let step = metrics.step;
        let outcome = self.log(metrics);
        let failed_before = std::mem::replace(&mut self.failing, outcome.is_err());
        match outcome {
            Err(error) if !failed_before => Some(format!(
                "warning: the metrics of step {step} were not recorded: {error}; training continues, and recording \
                 is retried at the next steps"
            )),
            Ok(()) if failed_before => {
                Some(format!("metrics are recorded again from step {step} on"))
            }
            _ => None,
        }
    }

    fn each(&mut self, mut send: impl FnMut(&mut dyn Tracker) -> Result<()>) -> Result<()> {
        // Every tracker gets the record: a service that is down must not cost the lines of the file.
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
