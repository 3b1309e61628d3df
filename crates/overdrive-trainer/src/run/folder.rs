//! The folder of a run.

use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use overdrive_core::{Error as CommonError, OutputFolder, check_not_read, files};
use overdrive_distributed::ProcessGroup;
use overdrive_snapshot::{FolderLock, Snapshot};

#[cfg(feature = "mlflow")]
use crate::arguments::ReportTo;
use crate::arguments::{
    ARGUMENTS, Configuration, Program, ResumeFromCheckpoint, TrainingArguments, as_value,
};
use crate::error::invalid;
use crate::{Error, Result};

/// The parent of runs without `output_dir`.
const DEFAULT_PARENT: &str = "runs";

const METRICS: &str = "metrics.jsonl";

/// The folder of a run and its files:
///
/// ```text
/// runs/tiny-001/
///     training_args.json   the configuration that ran
///     metrics.jsonl        one line per step
///     tensorboard/         event files
///     wandb/               an offline run of Weights & Biases, if `report_to` has `wandb`
///     mlflow_run_id        the ID of the run on the MLflow server, if `report_to` has `mlflow`
///     report.html          the report
///     loss.svg             the loss curve of the report
///     model/               config.json, model.safetensors, tokenizer.json
///     model_ema/           the same with averaged weights, if `ema_decay` is set
///     checkpoint-120/      a snapshot
///     abandoned-1/         snapshots of a branch that the run has left by resuming from an earlier one
/// ```
///
/// A run locks its folder before it writes or removes anything there, and holds the lock until this value and its
/// clones are dropped.
///
/// ```
/// use overdrive_trainer::{Preset, RunFolder};
///
/// let parent = tempfile::tempdir()?;
/// let mut arguments = Preset::Tiny.arguments();
/// arguments.output_dir = Some(parent.path().join("mine"));
///
/// let run = RunFolder::create(&arguments)?;
/// assert!(run.arguments().is_file());
/// assert_eq!(run.metrics(), parent.path().join("mine/metrics.jsonl"));
/// // A second run does not overwrite the first.
/// assert!(RunFolder::create(&arguments).is_err());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone)]
pub struct RunFolder {
    root: PathBuf,
    /// Taken when something is written for the first time, and shared by all clones.
    lock: Arc<Mutex<Option<FolderLock>>>,
}

/// Declares the paths of the files and folders that a run writes beside its snapshots.
macro_rules! paths {
    ($($(#[$doc:meta])* $method:ident: $name:expr;)*) => {
        impl RunFolder {
            const NAMES: &[&str] = &[$($name),*];

            $($(#[$doc])*
            pub fn $method(&self) -> PathBuf {
                self.root.join($name)
            })*
        }
    };
}

paths! {
    /// Returns the path of the metrics, one line per step.
    metrics: METRICS;
    /// Returns the path of the report.
    report: "report.html";
    /// Returns the path of the report's loss curve.
    loss: "loss.svg";
    /// Returns the folder of TensorBoard's event files.
    tensorboard: "tensorboard";
    /// Returns the folder of the offline runs of Weights & Biases.
    wandb: "wandb";
    /// Returns the file with the ID of the run on an MLflow server.
    mlflow_run_id: "mlflow_run_id";
    /// Returns the folder of the model, in Hugging Face's layout.
    model: "model";
    /// Returns the folder of the model with averaged weights (`ema_decay`).
    averaged_model: "model_ema";
    /// Returns the path of the configuration. It is removed last, so that an interrupted removal leaves a folder that is
    /// still recognized as a run.
    arguments: ARGUMENTS;
}

impl RunFolder {
    /// Creates the folder of a run and writes the configuration into it.
    ///
    /// Without `output_dir` it is `runs/<preset>-<number>`, or `runs/finetune-<number>`, in the working directory, with the
    /// next free number; two programs that start at the same time get two folders. A given folder may hold anything but a
    /// run that has logged a step, or files and snapshots of another program under the names of a run's; with
    /// `overwrite_output_dir` the files of that run (and no others) are removed, unless it is still running. Fine-tuning
    /// and preference training also refuse a folder that they read, and one with files of a model that is no run.
    ///
    /// # Errors
    /// [`Error::RunExists`], [`Error::InTheWay`], [`Error::NotWritable`], [`Error::Common`] for a folder that the run reads,
    /// and [`overdrive_snapshot::Error::Locked`] while another run writes there.
    pub fn create<A: Configuration>(arguments: &A) -> Result<Self> {
        // Before locking, so that a refused folder does not get a lock file.
        Self::check_new(arguments)?;
        let training = arguments.training();
        let run = match &training.output_dir {
            Some(root) => Self::given(root, training.overwrite_output_dir)?,
            None => Self::numbered(Path::new(DEFAULT_PARENT), arguments.run_name())?,
        };
        run.with_arguments(arguments)
    }

    /// Locks the folder and writes the configuration into it.
    fn with_arguments<A: Configuration>(self, arguments: &A) -> Result<Self> {
        self.lock()?;
        // The numbered folder is written as `output_dir`, so that the stored file resumes this run.
        let mut values = arguments.values()?;
        values["output_dir"] = as_value(&self.root)?;
        let text = format!("{values:#}\n");
        match files::write(self.arguments(), text.as_bytes()) {
            Err(CommonError::Io { source, .. }) => Err(not_writable(&self.root, source)),
            written => Ok(written.map(|()| self)?),
        }
    }

    /// Opens the folder of the run that `resume_from_checkpoint` resumes, if it exists; else creates one as
    /// [`create`](RunFolder::create) does. Rank 0 does the work; the other processes of `group` receive the
    /// folder or the error from it.
    ///
    /// # Errors
    /// As [`create`](RunFolder::create), and [`Error::Common`] if no option names the run.
    pub fn open_or_create<A: Configuration>(group: &ProcessGroup, arguments: &A) -> Result<Self> {
        on_main(group, || match Self::to_resume(arguments.training())? {
            Some(run) => run.with_arguments(arguments),
            None => Self::create(arguments),
        })
    }

    /// Returns the folder of the run that `resume_from_checkpoint` resumes, if it exists.
    pub(crate) fn to_resume(arguments: &TrainingArguments) -> Result<Option<Self>> {
        Ok(arguments.resumed_root()?.map(Self::at))
    }

    /// Checks that the folder of a run can be created or resumed, without writing anything: call it before the data are
    /// tokenized and the model is loaded.
    ///
    /// # Errors
    /// As [`open_or_create`](Self::open_or_create).
    pub fn check<A: Configuration>(arguments: &A) -> Result<()> {
        match Self::to_resume(arguments.training())? {
            Some(_) => check_sources(arguments.training()),
            None => Self::check_new(arguments),
        }
    }

    /// Checks that the folder of a run can be created, without writing anything.
    fn check_new<A: Configuration>(arguments: &A) -> Result<()> {
        let (training, inputs) = (arguments.training(), arguments.inputs());
        check_sources(training)?;
        let Some(root) = training.output_dir.as_ref().filter(|root| root.exists()) else {
            return Ok(());
        };
        let run = Self::at(root);
        if !root.is_dir() {
            return Err(Error::InTheWay { path: run.root });
        }
        if A::PROGRAM != Program::Train {
            let inputs = inputs.iter().map(|(key, path)| (*key, path.as_path()));
            let inputs: Vec<_> = inputs.collect();
            // A folder of a run is overwritten only if `overwrite_output_dir` says so.
            match run.arguments().is_file() {
                true => check_not_read("output_dir", root, &inputs)?,
                false => drop(OutputFolder::check(
                    "finetune",
                    "output_dir",
                    root,
                    &inputs,
                )?),
            }
        }
        run.check_free(training.overwrite_output_dir)?;
        run.check_not_read(&inputs)
    }

    /// Opens the folder of an existing run.
    ///
    /// # Errors
    /// [`Error::NoRun`].
    pub fn open(root: impl Into<PathBuf>) -> Result<Self> {
        let run = Self::at(root);
        if run.arguments().is_file() {
            Ok(run)
        } else {
            Err(Error::NoRun {
                path: run.root,
                missing: ARGUMENTS,
            })
        }
    }

    fn at(root: impl Into<PathBuf>) -> Self {
        Self {
            root: root.into(),
            lock: Arc::default(),
        }
    }

    /// Locks the folder against other runs, unless this value has locked it already, and returns the lock.
    pub(crate) fn lock(&self) -> Result<FolderLock> {
        let mut held = self.lock.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(lock) = held.as_ref() {
            return Ok(lock.clone());
        }
        let lock = FolderLock::acquire(&self.root).map_err(|error| match error {
            overdrive_snapshot::Error::Common(CommonError::Io { source, .. }) => {
                not_writable(&self.root, source)
            }
            other => other.into(),
        })?;
        Ok(held.insert(lock).clone())
    }

    /// Checks that the folder still has its path, before the results of the run are written there.
    pub(crate) fn check_in_place(&self) -> Result<()> {
        let held = self.lock.lock().unwrap_or_else(PoisonError::into_inner);
        // Without a lock, this value has not written there yet.
        Ok(held.as_ref().map_or(Ok(()), FolderLock::check_in_place)?)
    }

    /// Returns the path of the folder.
    pub fn root(&self) -> &Path {
        &self.root
    }

    fn given(root: &Path, overwrite: bool) -> Result<Self> {
        let run = Self::at(root);
        fs::create_dir_all(root).map_err(|source| not_writable(root, source))?;
        let lock = run.lock()?;
        // Another run may have begun meanwhile.
        run.check_free(overwrite)?;
        if run.arguments().exists() {
            if !lock.is_exclusive() {
                if !overwrite {
                    let path = root.to_owned();
                    return Err(Error::RunExists { path });
                }
                let expected = "false on a file system without locks, where that run may still be running; \
                                remove the folder yourself, or choose another one with `--out DIR`";
                return invalid("overwrite_output_dir", true, expected);
            }
            run.clear()?;
        }
        Ok(run)
    }

    /// Checks that the folder holds no run, or one that may be overwritten, and no files or snapshots of other
    /// programs that a run would overwrite.
    fn check_free(&self, overwrite: bool) -> Result<()> {
        let in_the_way = |path: Option<PathBuf>| match path {
            Some(path) => Err(Error::InTheWay { path }),
            None => Ok(()),
        };
        // No run has written a plain file of this name, so an overwriting run does not remove it either.
        let mut named = Snapshot::named(&self.root)?.into_iter();
        in_the_way(named.find(|path| path.is_file()))?;
        if self.arguments().exists() && !overwrite && self.has_begun()? {
            let path = self.root.clone();
            return Err(Error::RunExists { path });
        }
        if self.arguments().exists() {
            return Ok(());
        }
        // Without a configuration beside it, a file of this name was not written by a run. Other programs use the same
        // names, so a snapshot could replace one of another program.
        let mut written = self.written()?.into_iter();
        in_the_way(written.find(|path| path.exists()))
    }

    /// Returns `true` if the run has logged a step or saved anything. One that failed or was stopped before has nothing to
    /// lose, so that the same command can be repeated.
    fn has_begun(&self) -> Result<bool> {
        let metrics = self.metrics();
        let has_metrics = fs::metadata(&metrics).is_ok_and(|file| file.len() > 0);
        let of_start = [
            metrics,
            self.tensorboard(),
            self.wandb(),
            self.mlflow_run_id(),
            self.arguments(),
        ];
        let mut written = self.written()?.into_iter();
        Ok(has_metrics || written.any(|path| !of_start.contains(&path) && path.exists()))
    }

    /// Checks that none of the inputs lies among the files that [`clear`](Self::clear) removes.
    fn check_not_read(&self, inputs: &[(&'static str, PathBuf)]) -> Result<()> {
        let written = self.written()?;
        let written: Vec<PathBuf> = written
            .iter()
            .filter_map(|path| path.canonicalize().ok())
            .collect();
        for (key, input) in inputs {
            let Ok(real) = input.canonicalize() else {
                continue;
            };
            if written.iter().any(|path| real.starts_with(path)) {
                let expected = format!(
                    "false, because the run reads {} (`{key}`), which would be removed; choose another folder with \
                     `--out DIR`",
                    input.display()
                );
                return invalid("overwrite_output_dir", true, expected);
            }
        }
        Ok(())
    }

    /// Removes the files of a run, which must be locked.
    fn clear(&self) -> Result<()> {
        for path in self.written()? {
            let removed = match path.is_dir() {
                true => fs::remove_dir_all(&path),
                false => fs::remove_file(&path),
            };
            ignore_missing(removed).map_err(CommonError::io("remove", path))?;
        }
        Ok(())
    }

    /// Returns the paths that a run writes: those of its snapshots, complete or not, of abandoned ones, and the others,
    /// which need not exist.
    fn written(&self) -> Result<Vec<PathBuf>> {
        let mut paths = Snapshot::named(&self.root)?;
        paths.extend(Snapshot::abandoned(&self.root)?);
        paths.extend(Self::NAMES.iter().map(|name| self.root.join(name)));
        Ok(paths)
    }

    /// Copies the metrics into new folders of abandoned snapshots, before the lines of the abandoned branch are
    /// removed.
    pub(crate) fn keep_abandoned_metrics(&self) -> Result<()> {
        let metrics = self.metrics();
        for folder in Snapshot::abandoned(&self.root)? {
            let copy = folder.join(METRICS);
            if metrics.exists() && !copy.exists() {
                let bytes = fs::read(&metrics).map_err(CommonError::io("read", &metrics))?;
                files::write(copy, &bytes)?;
            }
        }
        Ok(())
    }

    fn numbered(parent: &Path, name: &str) -> Result<Self> {
        fs::create_dir_all(parent).map_err(|source| not_writable(parent, source))?;
        // The number follows the highest one and does not fill gaps, so that numbers are in the
        // order of the runs.
        let mut number = highest_number(parent, name)? + 1;
        loop {
            let root = parent.join(format!("{name}-{number:03}"));
            match fs::create_dir(&root) {
                Ok(()) => {
                    let run = Self::at(root);
                    run.lock()?;
                    return Ok(run);
                }
                // `create_dir` fails if the folder exists, so two programs cannot get the same number.
                // Another program has created it in the meantime.
                Err(error) if error.kind() == ErrorKind::AlreadyExists => number += 1,
                Err(source) => return Err(not_writable(parent, source)),
            }
        }
    }
}

/// Checks what a run would fail with after its folder is made: the snapshot to resume from, and the destinations of
/// `report_to`.
fn check_sources(arguments: &TrainingArguments) -> Result<()> {
    if let Some(ResumeFromCheckpoint::Folder(snapshot)) = &arguments.resume_from_checkpoint {
        Snapshot::open_unverified(snapshot)?;
    }
    #[cfg(feature = "mlflow")]
    if arguments.reports_to(ReportTo::MlFlow) {
        overdrive_tracking::MlFlowOptions::from_env().validate()?;
    }
    Ok(())
}

/// Returns the folder that rank 0 opens on all ranks. In a world of one the error keeps its type.
fn on_main(group: &ProcessGroup, open: impl FnOnce() -> Result<RunFolder>) -> Result<RunFolder> {
    match group.world_size() {
        1 => open(),
        // With several processes, the error is sent as text, because not every error can be serialized.
        _ => {
            let mut own = None;
            let root = group.on_main("open the run's folder", || {
                Ok::<_, Error>(own.insert(open()?).root.clone())
            })?;
            // Rank 0 keeps the folder that it has locked.
            Ok(own.unwrap_or_else(|| RunFolder::at(root)))
        }
    }
}

fn not_writable(path: &Path, source: std::io::Error) -> Error {
    Error::NotWritable {
        path: path.to_owned(),
        source,
    }
}

/// Treats a missing file as removed.
pub(super) fn ignore_missing(removed: std::io::Result<()>) -> std::io::Result<()> {
    match removed {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
        other => other,
    }
}

/// Returns the highest number of the folders `<name>-<number>`, or 0.
fn highest_number(parent: &Path, name: &str) -> Result<u64> {
    let entries = fs::read_dir(parent).map_err(CommonError::io("list", parent))?;
    let numbers = entries.filter_map(|entry| {
        let file_name = entry.ok()?.file_name();
        file_name
            .to_str()?
            .strip_prefix(name)?
            .strip_prefix('-')?
            .parse::<u64>()
            .ok()
    });
    Ok(numbers.max().unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_without_a_folder_are_numbered() {
        let parent = tempfile::tempdir().expect("temporary folder");
        let parent = parent.path().join("runs");
        let name = |run: Result<RunFolder>| {
            run.expect("made")
                .root()
                .file_name()
                .expect("a name")
                .to_string_lossy()
                .into_owned()
        };
        assert_eq!(name(RunFolder::numbered(&parent, "tiny")), "tiny-001");
        assert_eq!(name(RunFolder::numbered(&parent, "tiny")), "tiny-002");
        assert_eq!(name(RunFolder::numbered(&parent, "small")), "small-001");
        fs::create_dir(parent.join("tiny-041")).expect("made");
        fs::create_dir(parent.join("tiny-notes")).expect("made");
        assert_eq!(name(RunFolder::numbered(&parent, "tiny")), "tiny-042");
    }
}
