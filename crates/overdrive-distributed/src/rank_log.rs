//! Log lines of several ranks.

use std::io::Write;

use crate::ProcessGroup;

/// Prints lines to standard error. Each line is one write, so lines of several ranks do not mix.
///
/// ```
/// use overdrive_distributed::{ProcessGroup, RankLog};
///
/// let log = RankLog::new(&ProcessGroup::single());
/// log.main("printed by rank 0 alone");
/// log.every("printed by every rank, after `[rank 0]`");
/// ```
#[derive(Debug, Clone, Copy)]
pub struct RankLog {
    rank: usize,
}

impl RankLog {
    /// Returns the log of this process's rank.
    #[must_use]
    pub fn new(group: &ProcessGroup) -> Self {
        Self { rank: group.rank() }
    }

    /// Prints `line` on rank 0 only.
    pub fn main(&self, line: impl std::fmt::Display) {
        if self.rank == 0 {
            print_whole(&format!("{line}\n"));
        }
    }

    /// Prints `line` on every rank, after `[rank N]`.
    pub fn every(&self, line: impl std::fmt::Display) {
        print_whole(&format!("[rank {}] {line}\n", self.rank));
    }
}

/// Writes a line in one call, so that the lines of several processes do not mix. Its reader may be gone.
fn print_whole(line: &str) {
    let _ = std::io::stderr().write_all(line.as_bytes());
}
