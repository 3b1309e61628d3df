//! A tracker that writes the folder of an offline run of Weights & Biases.

mod log_file;
mod options;
mod records;

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use jiff::Timestamp;
use jiff::tz::TimeZone;
use overdrive_core::Error as CommonError;
use overdrive_core::random::{entropy, uniform_below};
use prost::Message;
use serde_json::{Map, Value, json};

use self::log_file::LogFile;
use self::records::{
    Exit, Header, History, HistoryStep, Item, Kind, Record, Run, Update, VersionInfo,
};
use crate::{Result, StepMetrics, Tracker};

pub use self::options::WandbOptions;

/// The folder of runs, as in W&B.
const FOLDER: &str = "wandb";
/// The beginning of the names of offline runs.
const OFFLINE: &str = "offline-run-";

/// A tracker that writes an offline run of [Weights & Biases](https://wandb.ai), as `wandb` does with
/// `WANDB_MODE=offline`:
///
/// ```text
/// wandb/offline-run-20260131_120000-1a2b3c4d/run-1a2b3c4d.wandb
/// ```
///
/// `wandb sync wandb/offline-run-…` uploads it, once the run is over; the tracker itself does not use the network and
/// needs no key. Metrics have the names of Hugging Face's `WandbCallback`: `train/loss`, `train/learning_rate`,
/// `eval/loss`, `train/global_step` (see [`StepMetrics::scalars`]); W&B's `_step` is the optimizer step. Numbers that are
/// not finite are left out. A text becomes a value of the summary, where a later one replaces it.
///
/// The record of each call reaches the operating system before it returns; records that did not fit on a full disk are
/// written by the next call that finds space. [`finish`](Tracker::finish) syncs the file, and ends the run with exit code
/// 0; a tracker that is dropped without it ends the run with exit code 1.
///
/// ```
/// use overdrive_tracking::{StepMetrics, Tracker, Wandb, WandbOptions};
///
/// let folder = tempfile::tempdir()?;
/// let options = WandbOptions { project: Some("tiny".to_owned()), ..WandbOptions::default() };
/// let mut tracker = Wandb::create(folder.path(), options)?;
/// tracker.log(&StepMetrics { step: 1, loss: 8.3, ..Default::default() })?;
/// tracker.finish()?;
/// assert!(tracker.path().starts_with(folder.path().join("wandb")));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct Wandb {
    file: LogFile,
    path: PathBuf,
    run_id: String,
    start: SystemTime,
    /// The number of the next record.
    num: i64,
    /// The length of the file before the record that ends the run, if it is there.
    end: Option<u64>,
}

impl Wandb {
    /// Creates a run in `folder/wandb`. Missing folders are created.
    ///
    /// # Errors
    /// [`overdrive_core::Error::InvalidOption`] and [`overdrive_core::Error::Io`].
    pub fn create(folder: impl AsRef<Path>, options: WandbOptions) -> Result<Self> {
        Self::create_at(folder.as_ref(), options, SystemTime::now())
    }

    /// Opens the newest offline run in `folder/wandb`, for a run that resumes from `step`: records of later steps, the end
    /// of the run and a truncated last record are removed. The configuration of `options` replaces the values of the same
    /// keys; the other options have no effect. Without such a run, or if its file is damaged from the beginning,
    /// one is created.
    ///
    /// # Errors
    /// As for [`create`](Self::create).
    pub fn resume(folder: impl AsRef<Path>, step: u64, options: WandbOptions) -> Result<Self> {
        let folder = folder.as_ref();
        let Some(path) = newest_run(folder)? else {
            return Self::create(folder, options);
        };
        let mut run: Option<Run> = None;
        let mut num = 0;
        let file = LogFile::resume(&path, |bytes| {
            let Ok(record) = Record::decode(bytes) else {
                return false;
            };
            let is_kept = match record.kind {
                Some(Kind::History(history)) => {
                    let logged = history.step.map_or(0, |step| step.num);
                    u64::try_from(logged).is_ok_and(|logged| logged <= step)
                }
                Some(Kind::Exit(_)) => false,
                Some(Kind::Run(found)) => {
                    run.get_or_insert(found);
                    true
                }
                _ => true,
            };
            if is_kept {
                num = record.num;
            }
            is_kept
        });
        let file = match file {
            Err(error) if error.kind() == std::io::ErrorKind::InvalidData => None,
            file => Some(file.map_err(CommonError::io("open", &path))?),
        };
        let (Some(file), Some(run)) = (file, run) else {
            return Self::create(folder, options);
        };
        let start = run.start_time.as_ref().map_or(Duration::ZERO, |time| {
            let seconds = u64::try_from(time.seconds).unwrap_or(0);
            Duration::new(seconds, u32::try_from(time.nanos).unwrap_or(0))
        });
        let mut tracker = Self {
            file,
            path,
            run_id: run.run_id,
            start: UNIX_EPOCH + start,
            num: num + 1,
            end: None,
        };
        if !options.config.is_empty() {
            tracker.write(Kind::Config(update(&options.config)))?;
        }
        Ok(tracker)
    }

    fn create_at(folder: &Path, options: WandbOptions, start: SystemTime) -> Result<Self> {
        options.validate()?;
        let run_id = options.run_id.clone().unwrap_or_else(random_id);
        let folder = folder
            .join(FOLDER)
            .join(format!("{OFFLINE}{}-{run_id}", local_time(start)));
        fs::create_dir_all(&folder).map_err(CommonError::io("create the folder", &folder))?;
        let path = folder.join(format!("run-{run_id}.wandb"));
        let file = LogFile::create(&path).map_err(CommonError::io("create", &path))?;
        let mut tracker = Self {
            file,
            path,
            run_id,
            start,
            num: 1,
            end: None,
        };
        tracker.write(Kind::Header(Header {
            version_info: Some(VersionInfo {
                producer: concat!("overdrive/", env!("CARGO_PKG_VERSION")).to_owned(),
                // As in the files of wandb 0.19 to 0.31.
                min_consumer: "0.70.0".to_owned(),
            }),
        }))?;
        let since = since_1970(start);
        tracker.write(Kind::Run(Run {
            run_id: tracker.run_id.clone(),
            entity: options.entity.unwrap_or_default(),
            project: options.project.unwrap_or_default(),
            config: Some(update(&options.config)),
            run_group: options.group.unwrap_or_default(),
            job_type: options.job_type.unwrap_or_default(),
            display_name: options.name.unwrap_or_default(),
            notes: options.notes.unwrap_or_default(),
            tags: options.tags,
            start_time: Some(records::Timestamp {
                seconds: since.as_secs().cast_signed(),
                nanos: since.subsec_nanos().cast_signed(),
            }),
        }))?;
        Ok(tracker)
    }

    /// Returns the path of the `.wandb` file; `wandb sync` takes its folder.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the ID of the run.
    pub fn run_id(&self) -> &str {
        &self.run_id
    }

    fn log_at(&mut self, metrics: &StepMetrics, now: SystemTime) -> Result<()> {
        let elapsed = now.duration_since(self.start).unwrap_or_default();
        let mut items: Vec<Item> = metrics
            .scalars()
            .into_iter()
            .map(|(tag, value)| Item::new(tag, &json!(value)))
            .collect();
        let runtime = metrics.elapsed_seconds.unwrap_or(elapsed.as_secs_f64());
        items.extend([
            Item::new("train/global_step", &json!(metrics.step)),
            Item::new("_step", &json!(metrics.step)),
            Item::new("_runtime", &json!(runtime)),
            Item::new("_timestamp", &json!(since_1970(now).as_secs_f64())),
        ]);
        let num = i64::try_from(metrics.step).unwrap_or(i64::MAX);
        // Before the summary: a resumed run drops all that follows the last step that it keeps.
        let history = self.write(Kind::History(History {
            item: items.clone(),
            step: Some(HistoryStep { num }),
        }));
        let summary = self.write(Kind::Summary(Update { update: items }));
        history.and(summary)
    }

    fn exit(&mut self, exit_code: i32, now: SystemTime) -> Result<()> {
        // Before its length is taken: an end that is already there goes.
        self.reopen()?;
        let elapsed = now.duration_since(self.start).unwrap_or_default();
        let length = self.file.length();
        let outcome = self.write(Kind::Exit(Exit {
            exit_code,
            runtime: i32::try_from(elapsed.as_secs()).unwrap_or(i32::MAX),
        }));
        self.end = Some(length);
        outcome
    }

    fn write(&mut self, kind: Kind) -> Result<()> {
        self.reopen()?;
        let record = Record {
            num: self.num,
            kind: Some(kind),
        };
        self.num += 1;
        self.file
            .append(&record.encode_to_vec())
            .map_err(CommonError::io("append to", &self.path))?;
        Ok(())
    }

    /// Removes the record that ends the run, so that others can follow.
    fn reopen(&mut self) -> Result<()> {
        if let Some(end) = self.end {
            // Nothing may wait while the file is opened anew.
            self.file
                .sync()
                .map_err(CommonError::io("sync", &self.path))?;
            self.file = LogFile::truncate(&self.path, end)
                .map_err(CommonError::io("truncate", &self.path))?;
            self.end = None;
        }
        Ok(())
    }
}

impl Tracker for Wandb {
    fn log(&mut self, metrics: &StepMetrics) -> Result<()> {
        self.log_at(metrics, SystemTime::now())
    }

    fn log_text(&mut self, _step: u64, tag: &str, text: &str) -> Result<()> {
        let update = vec![Item::new(tag, &json!(text))];
        self.write(Kind::Summary(Update { update }))
    }

    fn finish(&mut self) -> Result<()> {
        let exit = self.exit(0, SystemTime::now());
        self.file
            .sync()
            .map_err(CommonError::io("sync", &self.path))?;
        exit
    }
}

impl Drop for Wandb {
    fn drop(&mut self) {
        if self.end.is_none() {
            // Nobody can take the error any more; a run without an end is one that crashed.
            let _ = self.exit(1, SystemTime::now());
        }
    }
}

/// Returns the file of the newest offline run in `folder/wandb`.
fn newest_run(folder: &Path) -> Result<Option<PathBuf>> {
    let folder = folder.join(FOLDER);
    let entries = match fs::read_dir(&folder) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        entries => entries.map_err(CommonError::io("list", &folder))?,
    };
    let file = |entry: std::io::Result<fs::DirEntry>| {
        let name = entry.ok()?.file_name().into_string().ok()?;
        let (_, id) = name.strip_prefix(OFFLINE)?.split_once('-')?;
        let file = folder.join(&name).join(format!("run-{id}.wandb"));
        file.is_file().then_some((name, file))
    };
    // The names begin with the time.
    let newest = entries.filter_map(file).max();
    Ok(newest.map(|(_, file)| file))
}

fn update(config: &Map<String, Value>) -> Update {
    Update {
        update: config
            .iter()
            .map(|(key, value)| Item::new(key, value))
            .collect(),
    }
}

/// Returns eight random letters and digits, like W&B's IDs.
fn random_id() -> String {
    let seed = entropy();
    let letter = |index| uniform_below(36, seed, 0, index) as u32;
    (0..8)
        .filter_map(|index| char::from_digit(letter(index), 36))
        .collect()
}

/// Returns `YYYYMMDD_HHMMSS` in the local time zone, as W&B's folders have it.
fn local_time(time: SystemTime) -> String {
    let time = Timestamp::try_from(time).unwrap_or_default();
    time.to_zoned(TimeZone::system())
        .strftime("%Y%m%d_%H%M%S")
        .to_string()
}

fn since_1970(time: SystemTime) -> Duration {
    time.duration_since(UNIX_EPOCH).unwrap_or_default()
}
