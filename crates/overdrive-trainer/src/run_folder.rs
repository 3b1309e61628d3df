//! The folder of a run.

use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use overdrive_distributed::ProcessGroup;
use serde::{Deserialize, Serialize};

use crate::{Error, Result, ResumeFromCheckpoint, TrainingArguments};

/// Where runs go that are given no folder.
const DEFAULT_PARENT: &str = "runs";

const ARGUMENTS: &str = "training_args.json";
const METRICS: &str = "metrics.jsonl";
const REPORT: &str = "report.html";
const LOSS: &str = "loss.svg";
const TENSORBOARD: &str = "tensorboard";
const MODEL: &str = "model";
const AVERAGED_MODEL: &str = "model_ema";

/// The folder of a run and what is in it:
///
/// ```text
/// runs/tiny-001/
///     training_args.json   the configuration that ran
///     metrics.jsonl        a line a step
///     tensorboard/         event files
///     report.html          the report
///     loss.svg             its loss curve
///     model/               config.json, model.safetensors, tokenizer.json
///     model_ema/           the same with averaged weights, where `ema_decay` is given
/// ```
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
/// // A second run does not write over the first.
/// assert!(RunFolder::create(&arguments).is_err());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RunFolder {
    root: PathBuf,
}

impl RunFolder {
    /// Makes the folder of a run and writes the configuration into it.
    ///
    /// Without `output_dir` it is `runs/<preset>-<number>` under the working directory, with the
    /// next free number; two programs that start at once get two folders. A given folder may hold
    /// anything but a run; with `overwrite_output_dir` the files of that run (and no others) are
    /// removed.
    ///
    /// # Errors
    /// [`Error::RunExists`], [`Error::InTheWay`], [`Error::NotWritable`].
    pub fn create(arguments: &TrainingArguments) -> Result<Self> {
        let run = Self::make(arguments, arguments.preset.name())?;
        run.write_arguments(arguments)?;
        Ok(run)
    }

    fn write_arguments(&self, arguments: &TrainingArguments) -> Result<()> {
        let stored = TrainingArguments {
            output_dir: Some(self.root.clone()),
            ..arguments.clone()
        };
        stored.write(self.arguments()).map_err(|error| match error {
            Error::Io { source, .. } => Error::NotWritable {
                path: self.root.clone(),
                source,
            },
            other => other,
        })
    }

    /// Opens the folder of the run that `resume_from_checkpoint` resumes, where there is one; else as
    /// [`create`](RunFolder::create). Rank 0 does it; the other processes of `group` learn from it which
    /// folder it is, or what went wrong.
    ///
    /// # Errors
    /// As for [`create`](RunFolder::create), and [`Error::Invalid`] if nothing says where the run is.
    pub fn open_or_create(group: &ProcessGroup, arguments: &TrainingArguments) -> Result<Self> {
        on_main(group, || {
            let Some(run) = Self::to_resume(arguments)? else {
                return Self::create(arguments);
            };
            run.write_arguments(arguments)?;
            Ok(run)
        })
    }

    /// The folder of the run that `resume_from_checkpoint` goes on with, where there is one.
    pub(crate) fn to_resume(arguments: &TrainingArguments) -> Result<Option<Self>> {
        let root = match &arguments.resume_from_checkpoint {
            None | Some(ResumeFromCheckpoint::Latest(false)) => None,
            Some(ResumeFromCheckpoint::Latest(true)) => match &arguments.output_dir {
                Some(root) => Some(root.clone()),
                None => {
                    return Err(Error::Invalid {
                        key: "resume_from_checkpoint",
                        given: "true".to_owned(),
                        problem: "nothing says which run goes on".to_owned(),
                        way_out: "name its folder with `--out DIR` (`output_dir`)".to_owned(),
                    });
                }
            },
            Some(ResumeFromCheckpoint::Folder(snapshot)) => {
                let parent = || snapshot.parent().map(Path::to_path_buf);
                arguments.output_dir.clone().or_else(parent)
            }
        };
        Ok(root.map(Self::open).and_then(Result::ok))
    }

    /// The folder that `output_dir` names, or a new one named after `name`; nothing is in it yet.
    pub(crate) fn make(arguments: &TrainingArguments, name: &str) -> Result<Self> {
        match &arguments.output_dir {
            Some(root) => Self::given(root, arguments.overwrite_output_dir),
            None => Self::numbered(Path::new(DEFAULT_PARENT), name),
        }
    }

    /// The folder of a run that there is.
    ///
    /// # Errors
    /// [`Error::NoRun`].
    pub fn open(root: impl Into<PathBuf>) -> Result<Self> {
        let run = Self { root: root.into() };
        if run.arguments().is_file() {
            Ok(run)
        } else {
            Err(Error::NoRun {
                path: run.root,
                missing: ARGUMENTS,
            })
        }
    }

    /// The folder itself.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// The configuration that ran.
    pub fn arguments(&self) -> PathBuf {
        self.root.join(ARGUMENTS)
    }

    /// The metrics, a line a step.
    pub fn metrics(&self) -> PathBuf {
        self.root.join(METRICS)
    }

    /// The report.
    pub fn report(&self) -> PathBuf {
        self.root.join(REPORT)
    }

    /// The report's loss curve.
    pub fn loss(&self) -> PathBuf {
        self.root.join(LOSS)
    }

    /// The folder of TensorBoard's event files.
    pub fn tensorboard(&self) -> PathBuf {
        self.root.join(TENSORBOARD)
    }

    /// The folder of the model, as Hugging Face lays it out.
    pub fn model(&self) -> PathBuf {
        self.root.join(MODEL)
    }

    /// The folder of the model with averaged weights (`ema_decay`).
    pub fn averaged_model(&self) -> PathBuf {
        self.root.join(AVERAGED_MODEL)
    }

    fn given(root: &Path, overwrite: bool) -> Result<Self> {
        let run = Self {
            root: root.to_owned(),
        };
        if root.exists() && !root.is_dir() {
            return Err(Error::InTheWay {
                path: root.to_owned(),
            });
        }
        fs::create_dir_all(root).map_err(|source| not_writable(root, source))?;
        if run.arguments().exists() {
            if !overwrite {
                return Err(Error::RunExists { path: run.root });
            }
            run.clear()?;
        }
        // Without the configuration beside it, a file of these names is somebody else's.
        let names = [
            run.metrics(),
            run.report(),
            run.loss(),
            run.tensorboard(),
            run.model(),
            run.averaged_model(),
        ];
        match names.into_iter().find(|path| path.exists()) {
            Some(path) => Err(Error::InTheWay { path }),
            None => Ok(run),
        }
    }

    /// Removes what a run writes, the configuration last: what an interruption leaves is still
    /// known as a run.
    fn clear(&self) -> Result<()> {
        for folder in self.snapshot_folders()?.into_iter().chain([
            self.tensorboard(),
            self.model(),
            self.averaged_model(),
        ]) {
            gone(fs::remove_dir_all(&folder)).map_err(Error::io("remove", folder))?;
        }
        for file in [self.metrics(), self.report(), self.loss(), self.arguments()] {
            gone(fs::remove_file(&file)).map_err(Error::io("remove", file))?;
        }
        Ok(())
    }

    /// The folders of its snapshots, whole or not.
    fn snapshot_folders(&self) -> Result<Vec<PathBuf>> {
        let entries = fs::read_dir(&self.root).map_err(Error::io("list", &self.root))?;
        let paths = entries.filter_map(|entry| Some(entry.ok()?.path()));
        let is_one = |path: &PathBuf| {
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            let number = name.strip_prefix("checkpoint-").map(str::parse::<u64>);
            path.is_dir() && matches!(number, Some(Ok(_)))
        };
        Ok(paths.filter(is_one).collect())
    }

    fn numbered(parent: &Path, name: &str) -> Result<Self> {
        fs::create_dir_all(parent).map_err(|source| not_writable(parent, source))?;
        let mut number = highest_number(parent, name)? + 1;
        loop {
            let root = parent.join(format!("{name}-{number:03}"));
            match fs::create_dir(&root) {
                Ok(()) => return Ok(Self { root }),
                // Another program took it in between.
                Err(error) if error.kind() == ErrorKind::AlreadyExists => number += 1,
                Err(source) => return Err(not_writable(parent, source)),
            }
        }
    }
}

/// The folder that rank 0 opens, for all; its own error in a world of one.
pub(crate) fn on_main(
    group: &ProcessGroup,
    open: impl FnOnce() -> Result<RunFolder>,
) -> Result<RunFolder> {
    match group.world_size() {
        1 => open(),
        _ => Ok(group.on_main("open the run's folder", open)?),
    }
}

fn not_writable(path: &Path, source: std::io::Error) -> Error {
    Error::NotWritable {
        path: path.to_owned(),
        source,
    }
}

/// What is not there is as good as removed.
fn gone(removed: std::io::Result<()>) -> std::io::Result<()> {
    match removed {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
        other => other,
    }
}

/// The highest number that a folder `<name>-<number>` has, or 0.
fn highest_number(parent: &Path, name: &str) -> Result<u64> {
    let entries = fs::read_dir(parent).map_err(Error::io("list", parent))?;
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
