use std::time::Duration;

use crate::FolderLock;

/// The direction in which a metric is better.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Best {
    /// A lower metric is better, as for a loss (`greater_is_better: false`).
    Lowest,
    /// A higher metric is better, as for an accuracy (`greater_is_better: true`).
    Highest,
}

/// The options of a [`SnapshotManager`](crate::SnapshotManager). Names in parentheses are those of
/// transformers' `TrainingArguments`.
#[derive(Debug, Clone)]
pub struct SnapshotOptions {
    /// The number of snapshots that are kept (`save_total_limit`). The newest is always kept, and with
    /// [`best`](SnapshotOptions::best) the best one too. Default: `None`, all are kept.
    pub total_limit: Option<usize>,
    /// If given, the snapshot with the best metric is kept. Default: `None`.
    pub best: Option<Best>,
    /// If `true`, snapshots are written by a background thread while training continues; otherwise `save`
    /// returns when the snapshot is on the disk. Default: `true`.
    pub background: bool,
    /// The most bytes of page-locked (pinned) host memory for the copies of tensors on a GPU, which it writes while
    /// the host goes on; tensors beyond it are copied to ordinary memory, and each such copy is waited for. What is
    /// copied stays allocated for the next snapshot. A tensor counts with its bytes rounded up to a power of two,
    /// as libtorch allocates them. Default: 16 GiB.
    pub max_pinned_bytes: u64,
    /// If `true`, all ranks write into the same folder. If the nodes do not share a disk, give each process a
    /// folder of its own and `false` here (`save_on_each_node`). Default: `true`.
    pub shared_folder: bool,
    /// The time that rank 0 waits for the entries of the other ranks, and they for rank 0. Default: 30 minutes. A rank
    /// that fails tells the others at once, and for a rank that is lost they wait a sixtieth of this time.
    pub peer_timeout: Duration,
    /// The lock on the folder, if the program has taken it already. Default: `None`, the manager takes it.
    pub lock: Option<FolderLock>,
}

impl Default for SnapshotOptions {
    fn default() -> SnapshotOptions {
        SnapshotOptions {
            total_limit: None,
            best: None,
            background: true,
            max_pinned_bytes: 16 << 30,
            shared_folder: true,
            peer_timeout: Duration::from_secs(30 * 60),
            lock: None,
        }
    }
}
