use std::path::PathBuf;

use thiserror::Error;

/// An error of the arguments, the data or the run folder.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum Error {
    /// A file or folder could not be read or written.
    #[error("cannot {action} {}: {source}", path.display())]
    Io {
        /// What was tried, in words: `read`, `create the folder`.
        action: &'static str,
        /// The file or folder.
        path: PathBuf,
        /// The operating system's answer.
        source: std::io::Error,
    },

    /// A run folder cannot be written to.
    #[error(
        "cannot write into {}: {source}; choose a folder that you may write to with `--out DIR`",
        path.display()
    )]
    NotWritable {
        /// The folder.
        path: PathBuf,
        /// The operating system's answer.
        source: std::io::Error,
    },

    /// The name of a configuration file does not say its format.
    #[error(
        "cannot tell the format of {} from its name; it must end in .json, .yaml, .yml or .toml",
        path.display()
    )]
    UnknownFormat {
        /// The file.
        path: PathBuf,
    },

    /// A configuration file is not valid JSON, YAML or TOML.
    #[error("{} is not valid {format}: {message}", path.display())]
    Syntax {
        /// The file.
        path: PathBuf,
        /// `JSON`, `YAML` or `TOML`.
        format: &'static str,
        /// What the parser says, with the place.
        message: String,
    },

    /// The configuration cannot be written in a format.
    #[error("cannot write the configuration as {format}: {message}")]
    Unwritable {
        /// `JSON`, `YAML` or `TOML`.
        format: &'static str,
        /// What the writer says.
        message: String,
    },

    /// A key that is not known.
    #[error("{origin}: unknown key `{key}`{hint}")]
    UnknownKey {
        /// The file, or `command line`.
        origin: String,
        /// The key; keys inside another one are written `outer.inner`.
        key: String,
        /// `; did you mean …?`, or the keys there are where none is near.
        hint: String,
    },

    /// One key under two names.
    #[error("{origin}: `{first}` and `{second}` are two names of one key; keep one of them")]
    GivenTwice {
        /// The file.
        origin: String,
        /// One name.
        first: String,
        /// The other name.
        second: String,
    },

    /// A value of the wrong type.
    #[error("{origin}: `{key}` is {given}, expected {expected}")]
    WrongType {
        /// The file.
        origin: String,
        /// The key.
        key: String,
        /// What was given.
        given: String,
        /// What is expected.
        expected: String,
    },

    /// A name that is not one of the choices.
    #[error("{origin}: `{key}` is `{given}`, which is not one of {choices}{hint}")]
    UnknownChoice {
        /// The file.
        origin: String,
        /// The key.
        key: String,
        /// What was given.
        given: String,
        /// The choices.
        choices: String,
        /// `; did you mean …?`, or nothing.
        hint: String,
    },

    /// A key whose effect Overdrive does not have, or only in the other program.
    #[error("{origin}: `{key}: {given}` is not supported {by}; {way_out}")]
    Unsupported {
        /// The file.
        origin: String,
        /// The key.
        key: String,
        /// What was given.
        given: String,
        /// `by overdrive-trainer`, `in training from scratch` or `in fine-tuning`.
        by: &'static str,
        /// What to do instead.
        way_out: String,
    },

    /// A value that makes no sense, alone or together with another one.
    #[error("`{key}` is {given}: {problem}; {way_out}")]
    Invalid {
        /// The key.
        key: &'static str,
        /// What was given.
        given: String,
        /// What is wrong with it.
        problem: String,
        /// What to do instead.
        way_out: String,
    },

    /// Records have no column of a name.
    #[error(
        "{} has no column `{column}`{hint}; name the column with `{flag} NAME` (`{key}`)",
        path.display()
    )]
    NoColumn {
        /// The first of the files.
        path: PathBuf,
        /// The name.
        column: String,
        /// `; did you mean …?`, or the columns there are where none is near.
        hint: String,
        /// The key that names the column.
        key: &'static str,
        /// The flag that does.
        flag: &'static str,
    },

    /// A file of records among files of another kind.
    #[error(
        "{} is {kind}, and other files of `data` are not; give files of one kind, or convert them to \
         JSON Lines",
        path.display()
    )]
    MixedData {
        /// The file.
        path: PathBuf,
        /// Its kind.
        kind: &'static str,
    },

    /// Files that only another build of this program can read.
    #[error(
        "{} cannot be read: this program was built without {format}; build it with \
         `--features {feature}`, or convert the file to JSON Lines",
        path.display()
    )]
    NotBuilt {
        /// The file.
        path: PathBuf,
        /// What cannot be read.
        format: &'static str,
        /// The feature that can.
        feature: &'static str,
    },

    /// The learning-rate schedule refuses its options.
    #[error(transparent)]
    Schedule(#[from] overdrive_optim::Error),

    /// The text could not be read, tokenized or split.
    #[error(transparent)]
    Data(#[from] overdrive_datasets::Error),

    /// The device could not be measured.
    #[error(transparent)]
    Profiling(#[from] overdrive_profiling::Error),

    /// A metrics file could not be opened.
    #[error(transparent)]
    Tracking(#[from] overdrive_tracking::Error),

    /// A chat template could not be read.
    #[error(transparent)]
    Generation(#[from] overdrive_generation::Error),

    /// The adapters' options do not fit together.
    #[error(transparent)]
    Adapters(#[from] overdrive_lora::Error),

    /// The precision could not be set.
    #[error(transparent)]
    Precision(#[from] overdrive_precision::Error),

    /// libtorch refused.
    #[error(transparent)]
    Sys(#[from] overdrive_sys::Error),

    /// libtorch refused.
    #[error(transparent)]
    Tch(#[from] tch::TchError),

    /// The output folder holds another run.
    #[error(
        "{} already holds a run; choose another folder with `--out DIR`, or replace that run with \
         `--overwrite`",
        path.display()
    )]
    RunExists {
        /// The folder.
        path: PathBuf,
    },

    /// The output folder holds something of that name which no run of ours has written.
    #[error(
        "{} is in the way and was not written by a run; choose another folder with `--out DIR`",
        path.display()
    )]
    InTheWay {
        /// The file or folder in the way.
        path: PathBuf,
    },

    /// A folder that should hold a run does not.
    #[error("{} holds no run: {missing} is missing", path.display())]
    NoRun {
        /// The folder.
        path: PathBuf,
        /// The file that every run has.
        missing: &'static str,
    },

    /// A run cannot go on after a snapshot, or save one.
    #[error(transparent)]
    Snapshot(#[from] overdrive_snapshot::Error),

    /// The processes could not meet, or one of them was lost.
    #[error(transparent)]
    Distributed(#[from] overdrive_distributed::Error),

    /// Ctrl-C and the termination signal cannot be caught.
    #[error("cannot catch Ctrl-C and the termination signal: {source}")]
    Signals {
        /// The operating system's answer.
        source: std::io::Error,
    },
}

/// A result of this crate.
pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    /// For `map_err`: names the action and the path beside the operating system's answer.
    pub(crate) fn io(
        action: &'static str,
        path: impl Into<PathBuf>,
    ) -> impl FnOnce(std::io::Error) -> Self {
        let path = path.into();
        move |source| Self::Io {
            action,
            path,
            source,
        }
    }
}
