//! A tracker that sends records to an MLflow server.

mod client;
mod names;
mod options;
mod queue;
mod sender;

use std::fmt;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use overdrive_core::random::entropy;
use overdrive_core::{Error as CommonError, text};

use self::client::Client;
use self::options::is_run_id;
use self::queue::{Entry, Queue};
use self::sender::{Progress, Sender};
use crate::{Error, Result, StepMetrics, Tracker};

pub use self::options::MlFlowOptions;

/// The longest wait for the server when a run ends without [`finish`](Tracker::finish).
const DROP_TIMEOUT: Duration = Duration::from_secs(5);

/// A tracker that sends metrics to an [MLflow](https://mlflow.org) server over its REST API 2.0.
///
/// Metrics have the names of Hugging Face's `MLflowCallback`, which are those of `metrics.jsonl`: `loss`,
/// `learning_rate`, `eval_loss`; those of other groups keep their tag (`memory/allocated_bytes`, see
/// [`StepMetrics::scalars`]). Numbers that are not finite are left out. A text becomes a tag of the run, of at most 5000
/// characters.
///
/// **Training never waits for the network.** A thread sends the records, in their order, and retries with growing pauses
/// until the server takes them; meanwhile [`log`](Tracker::log) returns the reason as an error, and the records wait in
/// memory, at most 32 MiB of them (about 300,000 values); a record that finds no room is lost, and its error says so.
/// Records that the server refuses as invalid are lost too, which the next call reports. [`finish`](Tracker::finish)
/// waits for the delivery at most [`MlFlowOptions::finish_timeout`], and then sets the status of the run to `FINISHED`. A
/// tracker that is dropped without it sets `FAILED`, and waits at most 5 seconds; a killed process leaves `RUNNING`.
///
/// **Nothing is recorded twice** by a server with a database, which recognizes a repeated value by its time and step; one
/// with a file store may show a value twice if a response was lost. A run whose creation was not confirmed is found again
/// by its tag `overdrive.start`.
///
/// **A continued run** ([`MlFlowOptions::run_id`], [`MlFlowOptions::run_id_file`]) keeps its parameters, which MLflow does
/// not change, and all its values, which it cannot delete: if a run resumes from an earlier step, the values of the
/// repeated steps appear beside the old ones, with later times.
///
/// ```no_run
/// // Needs a server: `mlflow server`.
/// use overdrive_tracking::{MlFlow, MlFlowOptions, StepMetrics, Tracker};
///
/// let options = MlFlowOptions {
///     tracking_uri: "http://127.0.0.1:5000".to_owned(),
///     run_name: Some("tiny-001".to_owned()),
///     ..MlFlowOptions::from_env()
/// };
/// let mut tracker = MlFlow::start(options)?;
/// tracker.log(&StepMetrics { step: 1, loss: 8.3, ..Default::default() })?;
/// tracker.finish()?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct MlFlow {
    queue: Arc<Queue>,
    server: String,
    finish_timeout: Duration,
    /// `true` if everything was delivered and nothing was recorded since.
    is_finished: bool,
}

impl MlFlow {
    /// Starts a run, or continues one. The server is contacted later, by the thread that sends the records, so a
    /// server that is down is no error here.
    ///
    /// # Errors
    /// [`overdrive_core::Error::InvalidOption`]; [`overdrive_core::Error::Io`] if the file of the run's ID cannot be
    /// read.
    pub fn start(options: MlFlowOptions) -> Result<Self> {
        options.validate()?;
        let stored = match &options.run_id_file {
            Some(file) => text::read_optional(file)?,
            None => None,
        };
        let stored = stored.map(|id| id.trim().to_owned());
        if let (Some(file), Some(id)) = (&options.run_id_file, &stored)
            && !is_run_id(id)
        {
            let expected = "a file with the ID of an MLflow run; delete it for a new run";
            return Err(CommonError::option("run_id_file", file.display(), expected).into());
        }
        let queue = Arc::new(Queue::default());
        let sender = Sender {
            client: Client::new(&options),
            queue: Arc::clone(&queue),
            replaces_missing: options.run_id.is_none(),
            run_id: options.run_id.or(stored),
            run_id_file: options.run_id_file,
            experiment_name: options.experiment_name,
            run_name: options.run_name,
            params: names::params(&options.config),
            start_time: now(),
            start_tag: format!("{:016x}{:016x}", entropy(), entropy()),
            retry_pause: options.retry_pause,
            progress: Progress::default(),
        };
        let tracker = Self {
            queue,
            server: options.tracking_uri,
            finish_timeout: options.finish_timeout,
            is_finished: false,
        };
        let thread = thread::Builder::new().name("mlflow".to_owned());
        thread
            .spawn(move || sender.run())
            .map_err(|error| tracker.error(format!("gets no records: no thread: {error}")))?;
        Ok(tracker)
    }

    fn push(&mut self, entries: Vec<Entry>) -> Result<()> {
        self.is_finished = false;
        self.queue
            .push(entries)
            .map_err(|reason| self.error(reason))
    }

    /// Sets the status of the run and waits until everything is delivered.
    fn end(&self, status: &'static str, timeout: Duration) -> Result<()> {
        let end_time = now();
        self.queue
            .finish(Entry::Status { status, end_time }, timeout)
            .map_err(|reason| self.error(reason))
    }

    fn error(&self, reason: String) -> Error {
        Error::MlFlow {
            server: self.server.clone(),
            reason,
        }
    }
}

impl Tracker for MlFlow {
    fn log(&mut self, metrics: &StepMetrics) -> Result<()> {
        let timestamp = now();
        let scalars = metrics.scalars().into_iter();
        let entries = scalars.map(|(tag, value)| Entry::Metric {
            key: names::metric_name(&tag),
            value,
            timestamp,
            step: metrics.step,
        });
        self.push(entries.collect())
    }

    fn log_text(&mut self, _step: u64, tag: &str, text: &str) -> Result<()> {
        self.push(vec![Entry::Tag {
            key: names::valid_name(tag),
            value: names::tag_value(text),
        }])
    }

    fn finish(&mut self) -> Result<()> {
        self.is_finished = true;
        self.end("FINISHED", self.finish_timeout)
    }
}

impl Drop for MlFlow {
    fn drop(&mut self) {
        if !self.is_finished {
            // Nobody can take the error any more; `finish` would have returned it.
            let _ = self.end("FAILED", self.finish_timeout.min(DROP_TIMEOUT));
        }
        // The thread is not joined, because it may wait for a response.
        self.queue.close();
    }
}

impl fmt::Debug for MlFlow {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MlFlow")
            .field("server", &self.server)
            .finish_non_exhaustive()
    }
}

/// Returns the milliseconds since 1970.
fn now() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    since.map_or(0, |since| {
        u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
    })
}
