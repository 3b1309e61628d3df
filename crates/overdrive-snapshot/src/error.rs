use std::io;
use std::path::{Path, PathBuf};

/// Result of this crate.
pub type Result<T> = std::result::Result<T, Error>;

/// What can go wrong with snapshots.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A file or folder could not be read or written.
    #[error("cannot {action} {}: {source}", path.display())]
    Io {
        /// What was tried: "write", "read", "rename", …
        action: &'static str,
        /// The file or folder.
        path: PathBuf,
        /// Why not.
        source: io::Error,
    },
    /// A part of a snapshot has a name that cannot be a file's.
    #[error("a part of a snapshot cannot be called `{name}`: {reason}")]
    BadName {
        /// The name.
        name: String,
        /// What is wrong with it.
        reason: &'static str,
    },
    /// A snapshot is cut short, was changed, or is none.
    #[error(
        "{} is not a whole snapshot ({reason}): take another one, `latest` finds the newest that is whole",
        path.display()
    )]
    Damaged {
        /// Its folder.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// A snapshot lacks a part that was asked for.
    #[error(
        "the snapshot {} has no part `{part}`: it has {}",
        path.display(),
        available.join(", ")
    )]
    NoPart {
        /// Its folder.
        path: PathBuf,
        /// The part.
        part: String,
        /// The files that it has.
        available: Vec<String>,
    },
    /// A snapshot is of another model, or of other tensors than those to fill.
    #[error(
        "`{part}` of the snapshot {} does not fit: {}. Nothing was loaded; give the configuration that \
         the snapshot was made with, or begin a new run in another folder",
        path.display(),
        differences.join("; ")
    )]
    Differs {
        /// Its folder.
        path: PathBuf,
        /// The part.
        part: String,
        /// What is missing, unexpected, or of another shape, by name.
        differences: Vec<String>,
    },
    /// Other parts are registered at restoring than were at saving.
    #[error(
        "the snapshot {} is of another kind of run: {}. Nothing was loaded; give the configuration that the \
         snapshot was made with, or begin a new run in another folder",
        path.display(),
        differences.join("; ")
    )]
    OtherParts {
        /// Its folder.
        path: PathBuf,
        /// The parts that are registered on one side only, by name.
        differences: Vec<String>,
    },
    /// A part of a run did not give its state.
    #[error("`{part}` cannot be saved: {source}")]
    NotSaved {
        /// The name under which it is registered.
        part: String,
        /// Its own error.
        source: overdrive_optim::StateError,
    },
    /// A part of a run did not take the state of a snapshot.
    #[error(
        "`{part}` cannot be restored from {}: {source}; give the configuration that the snapshot was made \
         with, or begin a new run in another folder",
        path.display()
    )]
    NotRestored {
        /// The snapshot's folder.
        path: PathBuf,
        /// The name under which it is registered.
        part: String,
        /// Its own error.
        source: overdrive_optim::StateError,
    },
    /// A run resumes with another number of processes than it was saved by.
    #[error(
        "{} was saved by {saved} processes, and {now} train now: their places in the data and random states \
         are not those of {now}; start {saved} (`--nproc {saved}`)",
        path.display()
    )]
    WorldSize {
        /// The snapshot.
        path: PathBuf,
        /// The number of processes that it was saved by.
        saved: usize,
        /// The number of processes now.
        now: usize,
    },
    /// Another process writes snapshots into the folder.
    #[error(
        "another run writes its snapshots into {}: wait for it to end, or choose another folder",
        folder.display()
    )]
    Locked {
        /// The folder.
        folder: PathBuf,
    },
    /// Another rank did not finish its part of a snapshot.
    #[error("rank {rank} did not finish its part of the snapshot of step {step}: {reason}")]
    Peer {
        /// The rank that was waited for.
        rank: usize,
        /// The step.
        step: u64,
        /// What is known about it.
        reason: String,
    },
    /// A file of tensors.
    #[error(transparent)]
    Safetensors(#[from] overdrive_safetensors::Error),
    /// The state of an optimizer or of averages.
    #[error(transparent)]
    State(#[from] overdrive_optim::Error),
    /// libtorch refused to read or set a random state.
    #[error(transparent)]
    Sys(#[from] overdrive_sys::Error),
    /// An error of libtorch, with its message.
    #[error("libtorch: {0}")]
    Torch(#[from] tch::TchError),
    /// The thread that writes snapshots is gone.
    #[error("the thread that writes snapshots has ended: open the folder again")]
    WriterEnded,
}

impl Error {
    pub(crate) fn io(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Error {
        let path = path.to_path_buf();
        move |source| Error::Io {
            action,
            path,
            source,
        }
    }

    pub(crate) fn damaged(path: &Path, reason: impl Into<String>) -> Error {
        Error::Damaged {
            path: path.to_path_buf(),
            reason: reason.into(),
        }
    }
}
