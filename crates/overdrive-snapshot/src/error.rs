use std::path::{Path, PathBuf};

/// The result of this crate's functions.
pub type Result<T> = std::result::Result<T, Error>;

/// An error while writing, finding or restoring snapshots.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A file or folder could not be read or written.
    #[error(transparent)]
    Common(#[from] overdrive_core::Error),
    /// An entry of a snapshot has a name that cannot be used.
    #[error("an entry of a snapshot cannot be named `{name}`: {reason}")]
    BadName {
        /// The name.
        name: String,
        /// The reason.
        reason: &'static str,
    },
    /// A snapshot is incomplete or was changed, or the folder is not a snapshot.
    #[error(
    "{} is not a complete snapshot ({reason}): give the folder of a complete one, such as RUN/checkpoint-120",
        path.display()
    )]
    Damaged {
        /// The folder of the snapshot.
        path: PathBuf,
        /// The reason.
        reason: String,
    },
    /// A folder has snapshots, but a run can resume from none of them.
    #[error(
        "no snapshot in {} can be resumed: {}. Nothing was changed; restore a snapshot from a copy, or start a new run \
        in another folder",
        folder.display(),
        problems.join("; ")
    )]
    NoneComplete {
        /// The folder of the run.
        folder: PathBuf,
        /// The damaged snapshots with the reasons, and for several ranks, the steps that each of them has.
        problems: Vec<String>,
    },
    /// A snapshot does not have a requested entry.
    #[error(
        "the snapshot {} has no entry `{entry}`; it has {}",
        path.display(),
        available.join(", ")
        )]
    NoEntry {
        /// The folder of the snapshot.
        path: PathBuf,
        /// The file name of the entry.
        entry: String,
        /// The names of the snapshot's files.
        available: Vec<String>,
    },
    /// The tensors of a snapshot do not have the names or shapes of the targets.
    #[error(
        "`{entry}` of the snapshot {} does not fit: {}. Nothing was loaded; use the configuration that \
        the snapshot was made with, or start a new run in another folder",
        path.display(),
        differences.join("; ")
    )]
    Differs {
        /// The folder of the snapshot.
        path: PathBuf,
        /// The name of the entry.
        entry: String,
        /// The tensors that are missing, unexpected, or of another shape.
        differences: Vec<String>,
    },
    /// The registered entries differ from those of the snapshot.
    #[error(
        "the snapshot {} belongs to another kind of run: {}. Nothing was loaded; use the configuration that the \
        snapshot was made with, or start a new run in another folder",
        path.display(),
        differences.join("; ")
        )]
    EntryMismatch {
        /// The folder of the snapshot.
        path: PathBuf,
        /// The entries that are registered or stored on one side only.
        differences: Vec<String>,
    },
    /// The state dict of a registered entry could not be made.
    #[error("`{entry}` cannot be saved: {source}")]
    NotSaved {
        /// The name under which the entry is registered.
        entry: String,
        /// The error of the registered value.
        source: overdrive_optim::StateError,
    },
    /// A registered entry could not load its state from a snapshot.
    #[error(
        "`{entry}` cannot be restored from {}: {source}; use the configuration that the snapshot was made \
        with, or start a new run in another folder",
        path.display()
    )]
    NotRestored {
        /// The folder of the snapshot.
        path: PathBuf,
        /// The name under which the entry is registered.
        entry: String,
        /// The error of the registered value.
        source: overdrive_optim::StateError,
    },
    /// Another run writes snapshots into the folder.
    #[error(
        "another run writes its snapshots into {}{}: wait for it to end, or choose another folder",
        folder.display(),
        holder.as_ref().map_or_else(String::new, |holder| format!(" ({holder})"))
    )]
    Locked {
        /// The folder.
        folder: PathBuf,
        /// The process that holds the lock, since when, and how to end it, if it is known.
        holder: Option<String>,
    },
    /// The folder was moved, removed or replaced while the run wrote into it.
    #[error(
        "the folder {} was {} while the run wrote into it, and nothing is written under the old path anew: move it \
        back, or give its new path, and resume the run",
        folder.display(),
        now.as_ref().map_or_else(|| "moved or removed".to_owned(), |now| format!("moved to {}", now.display()))
    )]
    Moved {
        /// The folder, as the run was given it.
        folder: PathBuf,
        /// Its new path, if it is known.
        now: Option<PathBuf>,
    },
    /// A plain file has the name of a snapshot's folder.
    #[error(
        "the snapshot {} cannot be saved: a file has the name of its folder; move the file away, or choose another \
        folder for the run",
        path.display()
    )]
    InTheWay {
        /// The file.
        path: PathBuf,
    },
    /// Another rank did not write its entries of a snapshot.
    #[error("rank {rank} did not write its entries of the snapshot of step {step}: {reason}")]
    Peer {
        /// The rank that was waited for.
        rank: usize,
        /// The step.
        step: u64,
        /// The reason, if known.
        reason: String,
    },
    /// Another rank could not open the folder of the run.
    #[error(
        "rank {rank} could not open the folder of the run, {}; its own output has the error",
        folder.display()
    )]
    PeerFolder {
        /// The rank.
        rank: usize,
        /// The folder.
        folder: PathBuf,
    },
    /// An error of a safetensors file.
    #[error(transparent)]
    Safetensors(#[from] overdrive_safetensors::Error),
    /// An error of a state dict of an optimizer or of averaged weights.
    #[error(transparent)]
    State(#[from] overdrive_optim::Error),
    /// An error of reading or setting the state of a random generator.
    #[error(transparent)]
    Sys(#[from] overdrive_sys::Error),
    /// An error of libtorch, with its message.
    #[error("libtorch: {0}")]
    Tch(#[from] tch::TchError),
    /// The thread that wrote a snapshot panicked.
    #[error(
        "the thread that wrote a snapshot panicked; standard error has its message, and later saves start a new thread"
    )]
    WriterEnded,
}

impl Error {
    pub(crate) fn damaged(path: &Path, reason: impl Into<String>) -> Error {
        Error::Damaged {
            path: path.to_path_buf(),
            reason: reason.into(),
        }
    }
}
