//! Constants that several crates have to agree on.

/// The label of a position that has no loss: -100, as in PyTorch's `cross_entropy` and in transformers.
pub const IGNORE_INDEX: i64 = -100;

/// The exit code of a run that saved a snapshot after a signal and can be started again: 75, `EX_TEMPFAIL`
/// of `sysexits.h`.
pub const SAVED_EXIT_CODE: u8 = 75;

/// The exit code of a process that fails only because another process of its group was lost or failed: 76. A launcher
/// looks for the cause among the others.
pub const LOST_PEER_EXIT_CODE: u8 = 76;

/// The exit code of a run that ended after a signal without a snapshot of its last step: 130, the code that shells
/// report for a program that Ctrl-C has ended.
pub const INTERRUPTED_EXIT_CODE: u8 = 130;

/// The outcome of a run; for a launch of several processes, the worst of their outcomes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RunEnd {
    /// The run finished.
    Finished,
    /// A signal ended it, and there is a snapshot of its last step, from which it resumes.
    Saved,
    /// A signal ended it, and its last step is in no snapshot.
    NotSaved,
}

impl RunEnd {
    /// Returns the exit code: 0; 75, which tells a supervisor that the same command resumes the run where it stopped;
    /// or 130.
    pub fn exit_code(self) -> u8 {
        match self {
            Self::Finished => 0,
            Self::Saved => SAVED_EXIT_CODE,
            Self::NotSaved => INTERRUPTED_EXIT_CODE,
        }
    }
}

/// A program that returns nothing has done its work.
impl From<()> for RunEnd {
    fn from((): ()) -> Self {
        Self::Finished
    }
}
