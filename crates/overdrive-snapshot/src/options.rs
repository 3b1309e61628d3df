use std::time::Duration;

/// Which metric is better.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Best {
    /// A loss (`greater_is_better: false`).
    Lowest,
    /// An accuracy (`greater_is_better: true`).
    Highest,
}

/// How snapshots are kept.
#[derive(Debug, Clone)]
pub struct SnapshotOptions {
    /// How many are kept (`save_total_limit`); the default keeps all. The newest is always kept, and
    /// with [`best`](SnapshotOptions::best) the best too.
    pub total_limit: Option<usize>,
    /// Keeps the best one, by the metric that states carry; default `None`.
    pub best: Option<Best>,
    /// Writes while training goes on; default true. Otherwise `save` returns when the snapshot is on the
    /// disk.
    pub background: bool,
    /// Whether all ranks write into the same folder; default true. If each node has a disk of its own,
    /// each process must be given a folder of its own and false here (`save_on_each_node`).
    pub shared_folder: bool,
    /// How long rank 0 waits for the parts of the others, and they for it; default 30 minutes.
    pub peer_timeout: Duration,
}

impl Default for SnapshotOptions {
    fn default() -> SnapshotOptions {
        SnapshotOptions {
            total_limit: None,
            best: None,
            background: true,
            shared_folder: true,
            peer_timeout: Duration::from_secs(30 * 60),
        }
    }
}
