//! The thread that sends records to the server.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use overdrive_core::files;
use serde_json::{Value, json};

use super::client::{Attempt, Client, Failure, FailureKind, MAX_PAUSE};
use super::queue::{Entry, Queue};

/// The tag by which a run is found again whose creation the server did not confirm.
const START_TAG: &str = "overdrive.start";
/// The largest number of parameters in a request, MLflow's limit.
const MAX_PARAMS: usize = 100;

/// Sends the entries of a queue in their order, and retries until each is delivered or refused.
pub(super) struct Sender {
    pub(super) client: Client,
    pub(super) queue: Arc<Queue>,
    pub(super) experiment_name: String,
    pub(super) run_name: Option<String>,
    /// The run to continue.
    pub(super) run_id: Option<String>,
    /// If `true`, a new run replaces `run_id` if the server does not have it.
    pub(super) replaces_missing: bool,
    pub(super) run_id_file: Option<PathBuf>,
    /// The parameters that are still to be sent.
    pub(super) params: Vec<(String, String)>,
    /// The beginning of the run, in milliseconds since 1970.
    pub(super) start_time: u64,
    /// The value of the tag that belongs to this start of the run alone.
    pub(super) start_tag: String,
    pub(super) retry_pause: Duration,
    pub(super) progress: Progress,
}

/// The requests that have succeeded.
#[derive(Default)]
pub(super) struct Progress {
    experiment: Option<String>,
    /// `true` after a request to create a run, with or without a response.
    asked_to_create: bool,
    /// The run that takes the records.
    run: Option<String>,
    is_stored: bool,
}

impl Sender {
    /// Sends until the queue is closed.
    pub(super) fn run(mut self) {
        let mut failures = 0_u32;
        while let Some(entries) = self.queue.next() {
            let failure = match self.deliver(&entries) {
                Ok(()) => {
                    failures = 0;
                    self.queue.delivered(entries.len(), None);
                    continue;
                }
                Err(failure) => failure,
            };
            match failure.kind {
                FailureKind::Rejected => {
                    let count = entries.len();
                    let reason = failure.reason;
                    let notice =
                        format!("refuses {count} records, which are lost for MLflow: {reason}");
                    self.queue.delivered(count, Some(notice));
                }
                FailureKind::Retry(_) | FailureKind::Missing => {
                    let doubled = self.retry_pause.saturating_mul(1 << failures.min(6));
                    let pause = match failure.kind {
                        FailureKind::Retry(Some(requested)) => requested,
                        _ => doubled,
                    };
                    let skipped = self.queue.failed(failure.reason, pause.min(MAX_PAUSE));
                    // The run ends: what is left of its time is not spent in one long pause.
                    failures = if skipped { 0 } else { failures + 1 };
                }
            }
        }
    }

    /// Delivers entries that fit into one request.
    fn deliver(&mut self, entries: &[Entry]) -> Attempt<()> {
        // Whatever is wrong with the run, the records are not: they wait.
        let run = self.connect().map_err(|failure| Failure {
            kind: match failure.kind {
                FailureKind::Rejected => FailureKind::Retry(None),
                kind => kind,
            },
            ..failure
        })?;
        let metrics: Vec<Value> = entries.iter().filter_map(metric).collect();
        if !metrics.is_empty() {
            return self.client.log_batch(&run, metrics, Vec::new());
        }
        for entry in entries {
            match entry {
                Entry::Metric { .. } => {}
                Entry::Tag { key, value } => self.client.set_tag(&run, key, value)?,
                Entry::Status { status, end_time } => {
                    self.client.set_status(&run, status, Some(*end_time))?;
                }
            }
        }
        Ok(())
    }

    /// Returns the run, after it was created or continued and has its parameters.
    fn connect(&mut self) -> Attempt<String> {
        let run = match &self.progress.run {
            Some(run) => run.clone(),
            None => {
                let run = match self.continued()? {
                    Some(run) => run,
                    None => self.created()?,
                };
                self.progress.run.insert(run).clone()
            }
        };
        self.store(&run);
        while !self.params.is_empty() {
            let count = self.params.len().min(MAX_PARAMS);
            let params = self.params[..count].iter();
            let params = params.map(|(key, value)| json!({ "key": key, "value": value }));
            match self.client.log_batch(&run, Vec::new(), params.collect()) {
                Err(failure) if failure.kind == FailureKind::Rejected => {
                    let reason = failure.reason;
                    self.queue
                        .notice(format!("refuses parameters of the run: {reason}"));
                }
                sent => sent?,
            }
            self.params.drain(..count);
        }
        Ok(run)
    }

    /// Opens the run that is continued, if there is one.
    fn continued(&mut self) -> Attempt<Option<String>> {
        let Some(id) = self.run_id.clone() else {
            return Ok(None);
        };
        let run = match self.client.run(&id) {
            Err(failure) if failure.kind == FailureKind::Missing && self.replaces_missing => {
                let reason = failure.reason;
                self.queue.notice(format!(
                    "does not have the run {id}, so a new one begins: {reason}"
                ));
                self.run_id = None;
                return Ok(None);
            }
            run => run?,
        };
        if run.status != "RUNNING" {
            self.client.set_status(&id, "RUNNING", None)?;
        }
        // Parameters are final in MLflow: another value would be refused.
        self.params.retain(|(key, _)| !run.params.contains(key));
        Ok(Some(id))
    }

    /// Creates the run, or finds the one that an earlier attempt has created.
    fn created(&mut self) -> Attempt<String> {
        let experiment = match &self.progress.experiment {
            Some(experiment) => experiment.clone(),
            None => {
                let experiment = self.client.experiment(&self.experiment_name)?;
                self.progress.experiment.insert(experiment).clone()
            }
        };
        let tag = (START_TAG, self.start_tag.as_str());
        if self.progress.asked_to_create
            && let Some(run) = self.client.find_run(&experiment, tag)?
        {
            return Ok(run);
        }
        self.progress.asked_to_create = true;
        let name = self.run_name.as_deref();
        self.client
            .create_run(&experiment, name, self.start_time, tag)
    }

    /// Writes the ID of the run into its file.
    fn store(&mut self, run: &str) {
        let Some(file) = self
            .run_id_file
            .as_ref()
            .filter(|_| !self.progress.is_stored)
        else {
            return;
        };
        match files::write(file, format!("{run}\n").as_bytes()) {
            Ok(()) => self.progress.is_stored = true,
            Err(error) => {
                let notice =
                    format!("records, but a resumed run could not continue there: {error}");
                self.queue.notice(notice);
            }
        }
    }
}

fn metric(entry: &Entry) -> Option<Value> {
    match entry {
        Entry::Metric {
            key,
            value,
            timestamp,
            step,
        } => Some(json!({ "key": key, "value": value, "timestamp": timestamp, "step": step })),
        _ => None,
    }
}
