//! The errors of the arguments, the data and the run folder.

use std::error::Error as StdError;
use std::iter::successors;
use std::path::PathBuf;

use thiserror::Error;

/// An error of the arguments, the data or the run folder.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum Error {
    /// A key whose value is not allowed, or a file that cannot be read, written or parsed.
    #[error(transparent)]
    Common(#[from] overdrive_core::Error),

    /// A run folder is not writable.
    #[error(
        "cannot write into {}: {source}; choose a folder that you may write to with `--out DIR`",
        path.display()
    )]
    NotWritable {
        /// The folder.
        path: PathBuf,
        /// The error of the operating system.
        source: std::io::Error,
    },

    /// A configuration file has an unknown extension.
    #[error(
        "the format of {} is unknown; its name must end in .json, .yaml, .yml or .toml",
        path.display()
    )]
    UnknownFormat {
        /// The file.
        path: PathBuf,
    },

    /// The configuration cannot be represented in a format.
    #[error("cannot write the configuration as {format}: {message}")]
    Unwritable {
        /// `JSON`, `YAML` or `TOML`.
        format: &'static str,
        /// The error of the serializer.
        message: String,
    },

    /// A key is unknown.
    #[error("{origin}: unknown key `{key}`{hint}")]
    UnknownKey {
        /// The file, or `the command line`.
        origin: String,
        /// The key; keys of a section are written `section.key`.
        key: String,
        /// `; did you mean …?`, or the known names if none is similar.
        hint: String,
    },

    /// A key was given under two names with different values.
    #[error("{origin}: `{first}` and `{second}` are two names of the same key; remove one of them")]
    GivenTwice {
        /// The file.
        origin: String,
        /// One name.
        first: String,
        /// The other name.
        second: String,
    },

    /// A value has the wrong type.
    #[error("{origin}: `{key}` is {given}, expected {expected}")]
    WrongType {
        /// The file.
        origin: String,
        /// The key.
        key: String,
        /// The value.
        given: String,
        /// The expected type.
        expected: String,
    },

    /// A name is not one of the choices.
    #[error(
        "{origin}: `{key}` is `{given}`, which is not one of {}{hint}",
        listed(choices)
    )]
    UnknownChoice {
        /// The file.
        origin: String,
        /// The key.
        key: String,
        /// The value.
        given: String,
        /// The choices.
        choices: Vec<String>,
        /// `; did you mean …?`, or nothing.
        hint: String,
    },

    /// A key is not supported, or only by the other program.
    #[error("{origin}: `{key}: {given}` is not supported {by}; {remedy}")]
    Unsupported {
        /// The file.
        origin: String,
        /// The key.
        key: String,
        /// The value.
        given: String,
        /// `by overdrive-trainer`, `in training from scratch` or `in fine-tuning`.
        by: &'static str,
        /// The remedy.
        remedy: String,
    },

    /// Records do not have a column.
    #[error(
        "{} has no column `{column}`{hint}; name the column with `{flag} NAME` (`{key}`)",
        path.display()
    )]
    NoColumn {
        /// The first of the files.
        path: PathBuf,
        /// The name of the column.
        column: String,
        /// `; did you mean …?`, or the columns there are where none is near.
        hint: String,
        /// The key that names the column.
        key: &'static str,
        /// The flag that names the column.
        flag: &'static str,
    },

    /// Files of records are mixed with files of another format.
    #[error(
        "{} is {kind}, but other files of `data` are not; give files of one format, or convert them to \
         JSON Lines",
        path.display()
    )]
    MixedData {
        /// The file.
        path: PathBuf,
        /// Its format.
        kind: &'static str,
    },

    /// An error of the optimizer or the learning-rate schedule.
    #[error(transparent)]
    Schedule(#[from] overdrive_optim::Error),

    /// The data could not be read, tokenized or split.
    #[error(transparent)]
    Data(#[from] overdrive_datasets::Error),

    /// The blocks to recompute do not match the model's number of blocks.
    #[error(transparent)]
    Checkpointing(#[from] overdrive_checkpointing::Error),

    /// The device could not be measured.
    #[error(transparent)]
    Profiling(#[from] overdrive_profiling::Error),

    /// A metrics file could not be opened.
    #[error(transparent)]
    Tracking(#[from] overdrive_tracking::Error),

    /// A chat template could not be read, or no text generated.
    #[error(transparent)]
    Generation(#[from] overdrive_generation::Error),

    /// The options of the adapters contradict each other.
    #[error(transparent)]
    Adapters(#[from] overdrive_lora::Error),

    /// A model could not be made, loaded, run or written.
    #[error(transparent)]
    Model(#[from] overdrive_transformer::Error),

    /// Gradients could not be accumulated.
    #[error(transparent)]
    Accumulation(#[from] overdrive_accumulation::Error),

    /// A pass could not be replayed.
    #[error(transparent)]
    Graphs(#[from] overdrive_graphs::Error),

    /// The precision could not be set.
    #[error(transparent)]
    Precision(#[from] overdrive_precision::Error),

    /// An error of the shim or of libtorch.
    #[error(transparent)]
    Sys(#[from] overdrive_sys::Error),

    /// An error of tch.
    #[error(transparent)]
    Tch(#[from] tch::TchError),

    /// The output folder already holds a run.
    #[error(
        "{} already holds a run; choose another folder with `--out DIR`, or replace that run with \
         `--overwrite`",
        path.display()
    )]
    RunExists {
        /// The folder.
        path: PathBuf,
    },

    /// The output folder holds a file that a run would overwrite and that no run has written.
    #[error(
        "{} is in the way: a run would overwrite it, but no run has written it; choose another folder with \
         `--out DIR`",
        path.display()
    )]
    InTheWay {
        /// The file or folder in the way.
        path: PathBuf,
    },

    /// A folder holds no run.
    #[error("{} holds no run: {missing} is missing; give the folder of a run", path.display())]
    NoRun {
        /// The folder.
        path: PathBuf,
        /// The file that every run has.
        missing: &'static str,
    },

    /// The data, the tokenizer or an argument is not the one that a snapshot was saved with.
    #[error(
        "{} was saved with other inputs: {}; give the same ones again, start a new run with another `--out DIR`, or \
         resume nevertheless with `--resume-with-changes`",
        snapshot.display(),
        differences.join(", ")
    )]
    InputsDiffer {
        /// The folder of the snapshot.
        snapshot: PathBuf,
        /// The inputs that differ, each with both values.
        differences: Vec<String>,
    },

    /// The data, the tokenizer or an argument of a process is not that of rank 0.
    #[error(
        "rank {rank} has other inputs than rank 0: {}; give all processes the same data, tokenizer and arguments",
        differences.join(", ")
    )]
    RankDiffers {
        /// The first rank that differs.
        rank: usize,
        /// The inputs that differ, each with both values.
        differences: Vec<String>,
    },

    /// A run cannot resume from a snapshot, or save one.
    #[error(transparent)]
    Snapshot(#[from] overdrive_snapshot::Error),

    /// The processes could not connect, or one of them was lost.
    #[error(transparent)]
    Distributed(#[from] overdrive_distributed::Error),

    /// An error of the program that trains: of its forward pass or its evaluation.
    #[error(transparent)]
    Program(ProgramError),

    /// A signal ended work of which nothing is saved. A program that [`run_main`](crate::run_main) runs ends with exit code
    /// 130.
    #[error("a signal ended {what}")]
    Interrupted {
        /// The work, and what to do.
        what: String,
    },

    /// The handlers of Ctrl-C, SIGTERM, SIGHUP and SIGQUIT could not be installed.
    #[error("cannot install the handlers of Ctrl-C, SIGTERM, SIGHUP and SIGQUIT: {source}")]
    Signals {
        /// The error of the operating system.
        source: std::io::Error,
    },
}

/// An error of the program that trains, such as `anyhow::Error` or one of tch.
pub type ProgramError = Box<dyn std::error::Error + Send + Sync>;

impl Error {
    pub(crate) fn of_program(error: impl Into<ProgramError>) -> Self {
        match error.into().downcast() {
            Ok(error) => *error,
            Err(error) => Self::Program(error),
        }
    }
}

/// A result of this crate.
pub type Result<T> = std::result::Result<T, Error>;

/// Returns the error of the process group among an error and its causes.
pub(crate) fn of_group<'a>(
    error: &'a (dyn StdError + 'static),
) -> Option<&'a overdrive_distributed::Error> {
    successors(Some(error), |&cause| cause.source()).find_map(|error| match error.downcast_ref() {
        Some(Error::Distributed(error)) => Some(error),
        Some(Error::Program(error)) => of_group(&**error),
        _ => error.downcast_ref(),
    })
}

/// Returns `true` if a signal has ended the work.
pub(crate) fn is_interrupted(error: &(dyn StdError + 'static)) -> bool {
    successors(Some(error), |&cause| cause.source()).any(|error| match error.downcast_ref() {
        Some(Error::Interrupted { .. }) => true,
        Some(Error::Program(error)) => is_interrupted(&**error),
        _ => false,
    })
}

/// Returns names as they are written in a sentence: in backticks, separated by commas.
pub(crate) fn listed(names: &[impl AsRef<str>]) -> String {
    let quoted = names.iter().map(|name| format!("`{}`", name.as_ref()));
    quoted.collect::<Vec<_>>().join(", ")
}

/// Returns an [`overdrive_core::Error::InvalidOption`]; `expected` completes "it must be".
pub(crate) fn invalid<T>(
    key: &'static str,
    value: impl std::fmt::Display,
    expected: impl Into<std::borrow::Cow<'static, str>>,
) -> Result<T> {
    Err(overdrive_core::Error::option(key, value, expected).into())
}

/// A case in which a value is not allowed: whether it holds, the key, its value, and what completes "it must be".
pub(crate) type Refusal<'a> = (bool, &'static str, &'a dyn std::fmt::Display, &'a str);

/// Returns the error of the first case that holds.
pub(crate) fn refuse(cases: &[Refusal<'_>]) -> Result<()> {
    match cases.iter().find(|(holds, ..)| *holds) {
        Some((_, key, value, expected)) => invalid(key, value, (*expected).to_owned()),
        None => Ok(()),
    }
}
