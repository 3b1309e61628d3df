use std::time::Duration;

use crate::FolderLock;

/// Whether a lower or a higher metric is better.
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
    /// The number of snapshots to keep (`save_total_limit`). The newest is always kept, and with
    /// [`best`](SnapshotOptions::best) also the best one. Default: `None`, all are kept.
    pub total_limit: Option<usize>,
    /// If set, the snapshot with the best metric is kept. Default: `None`.
    pub best: Option<Best>,
    /// If `true`, snapshots are written by a background thread while training continues; otherwise `save`
    /// returns when the snapshot is on disk. Default: `true`.
    pub background: bool,
    /// The largest amount of page-locked (pinned) host memory in bytes for copies of GPU tensors, which do not block
    /// the host. Further tensors are copied to ordinary memory, and the host waits for each of these copies. The memory
    /// stays allocated for the next snapshot. The size of each tensor is rounded up to a power of two, as in libtorch's
    /// allocator. Default: 16 GiB.
    pub max_pinned_bytes: u64,
    /// If `true`, all ranks write into the same folder. If the nodes do not share a disk, give each process its own
    /// folder and set this to `false` (`save_on_each_node`). Default: `true`.
    pub shared_folder: bool,
    /// How long rank 0 waits for the entries of the other ranks, and the other ranks for rank 0. Default: 30 minutes. A
    /// rank that fails notifies the others at once; for a lost rank, they wait a sixtieth of this time.
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
