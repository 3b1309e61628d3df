//! The writing of one snapshot.

use std::collections::BTreeMap;
use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant, SystemTime};

use serde::{Deserialize, Serialize};

use crate::contents::{Content, Entry};
use crate::folder::{abandon_for, check_no_file, path_of, publish, unfinished};
use crate::manifest::{FileEntry, MANIFEST, Manifest};
use crate::{Error, FolderLock, Ranks, Result};
use overdrive_core::{Error as CommonError, files};
use overdrive_sys::transfer::CopyEvent;

/// The interval at which a rank checks for the files of another: short compared with the time of writing, and
/// long enough not to load a network file system.
const POLL_INTERVAL: Duration = Duration::from_millis(20);
/// The interval at which a waiting rank asks whether another has failed: one process answers all ranks.
const ASK_INTERVAL: Duration = Duration::from_millis(500);
/// The divisor of `peer_timeout` for a lost rank, which still gets some time to finish its entries: a rank whose
/// training has failed may still be writing.
const LOST_RANK_PART: u32 = 60;
/// The time without any change of the files after which a process that is to end waits no longer: long enough to compute
/// the checksum of a large file, which changes none.
pub(crate) const QUIET_LIMIT: Duration = Duration::from_secs(30);

/// The inputs of writing one snapshot.
pub(crate) struct SaveJob {
    pub(crate) folder: PathBuf,
    pub(crate) step: u64,
    pub(crate) metric: Option<f64>,
    /// The entries that this rank writes.
    pub(crate) entries: Vec<Entry>,
    /// The events that mark the end of the copies of these entries.
    pub(crate) copies: Vec<CopyEvent>,
    pub(crate) rank: usize,
    pub(crate) world_size: usize,
    /// The id of the run, which distinguishes its unfinished folders from those of a killed run.
    pub(crate) run: u64,
    pub(crate) lock: Option<FolderLock>,
    pub(crate) peer_timeout: Duration,
    /// The flag that is set when the process is to end.
    pub(crate) interrupt: Option<Arc<AtomicBool>>,
    pub(crate) quiet_limit: Duration,
    pub(crate) peers: Peers,
}

/// The other ranks that write the same snapshot.
#[derive(Clone)]
pub(crate) struct Peers {
    pub(crate) ranks: Arc<dyn Ranks>,
    /// The key under which a rank posts that it has failed, unique to this save.
    pub(crate) key: String,
    pub(crate) step: u64,
}

/// The failure that a rank posts.
#[derive(Serialize, Deserialize)]
struct PeerFailure {
    rank: usize,
    reason: String,
}

impl Peers {
    /// Notifies the other ranks that this one has failed, so that they do not wait for it.
    pub(crate) fn post_failure(&self, error: &Error) {
        let failure = PeerFailure {
            rank: self.ranks.rank(),
            reason: error.to_string(),
        };
        if let Ok(text) = serde_json::to_string(&failure) {
            // Unreachable ranks wait for the timeout; the error of the save is the one to return.
            let _ = self.ranks.post(&self.key, &text);
        }
    }

    /// Returns an error if another rank has posted that it failed.
    fn check(&self) -> Result<()> {
        // If the request fails, the ranks may still be writing: their files will show it.
        let posted = self.ranks.posted(&self.key).ok().flatten();
        let failure = posted.and_then(|text| serde_json::from_str::<PeerFailure>(&text).ok());
        match failure {
            Some(PeerFailure { rank, reason }) => Err(Error::Peer {
                rank,
                step: self.step,
                reason,
            }),
            None => Ok(()),
        }
    }
}

impl SaveJob {
    /// Writes the snapshot, and returns its folder and the number of bytes. The snapshot is then complete, under its
    /// final name and on disk; after an error, nothing is left of it.
    pub(crate) fn write(&self) -> Result<(PathBuf, u64)> {
        let temporary = unfinished(&self.folder, self.step, self.run);
        let written = self.write_in(&temporary);
        let Err(error) = written else {
            return written;
        };
        // Whatever failed in a folder that is no longer there.
        let error = self.check_in_place().err().unwrap_or(error);
        // The failure of another rank is the cause.
        let cause = self.peers.check().err();
        if cause.is_none() {
            self.peers.post_failure(&error);
        }
        // Rank 0 removes the files of all ranks, unless it has done so before this rank wrote.
        if self.rank == 0 || matches!(cause, Some(Error::Peer { rank: 0, .. })) {
            // The error of the write is returned, so an error of the cleanup is dropped.
            let _ = fs::remove_dir_all(&temporary);
        }
        Err(cause.unwrap_or(error))
    }

    fn write_in(&self, temporary: &Path) -> Result<(PathBuf, u64)> {
        self.peers.check()?;
        let path = path_of(&self.folder, self.step);
        if self.rank == 0 {
            check_no_file(&path)?;
        }
        for copy in &self.copies {
            copy.wait()?;
        }
        self.check_in_place()?;
        // Not its parents: if the run's folder was moved, its old path must not become a second one.
        match fs::create_dir(temporary) {
            // Another rank was first.
            Err(error) if error.kind() == ErrorKind::AlreadyExists => {}
            made => made.map_err(CommonError::io("create the folder", temporary))?,
        }
        let mut files = Vec::new();
        for entry in &self.entries {
            self.peers.check()?;
            let name = entry.file_name(self.rank);
            write_entry(entry, &temporary.join(&name))?;
            // The file is hashed, not the tensors in memory, so that the checksum covers what was written.
            files.push(FileEntry::of(temporary, &name)?);
        }
        if self.rank != 0 {
            let bytes = files.iter().map(|file| file.bytes).sum();
            write_json(&temporary.join(done_file(self.rank)), &files)?;
            self.wait_for_rank_0(temporary, &path)?;
            return Ok((path, bytes));
        }
        for rank in 1..self.world_size {
            files.extend(self.wait_for_rank(temporary, rank)?);
        }
        let bytes = files.iter().map(|file| file.bytes).sum();
        let manifest = Manifest::new(self.step, self.world_size, self.metric, files);
        write_json(&temporary.join(MANIFEST), &manifest)?;
        self.check_in_place()?;
        // The directory entries must be on disk before the folder gets the name of a snapshot.
        files::sync_folder(temporary)?;
        abandon_for(&self.folder, self.step)?;
        publish(temporary, &path)?;
        Ok((path, bytes))
    }

    fn check_in_place(&self) -> Result<()> {
        self.lock
            .as_ref()
            .map_or(Ok(()), FolderLock::check_in_place)
    }

    /// Waits until another rank has written its entries, and returns its files.
    fn wait_for_rank(&self, temporary: &Path, rank: usize) -> Result<Vec<FileEntry>> {
        let list = temporary.join(done_file(rank));
        self.wait_until(temporary, rank, || list.exists())?;
        let bytes = fs::read(&list).map_err(CommonError::io("read", &list))?;
        let files: Vec<FileEntry> = serde_json::from_slice(&bytes)
            .map_err(|error| self.peer_error(rank, error.to_string()))?;
        // The lists of the other ranks must not be part of the snapshot.
        fs::remove_file(&list).map_err(CommonError::io("delete", &list))?;
        Ok(files)
    }

    fn wait_for_rank_0(&self, temporary: &Path, path: &Path) -> Result<()> {
        // Rank 0 renames the folder when it has succeeded, and removes it when it has failed.
        self.wait_until(temporary, 0, || !temporary.exists())?;
        // A snapshot of the same step may be an earlier one.
        self.peers.check()?;
        match path.join(MANIFEST).exists() {
            true => Ok(()),
            false => Err(self.peer_error(0, "it failed; its own output has the error".into())),
        }
    }

    /// Waits until `rank` is done, or until it is known that it will not be.
    fn wait_until(&self, temporary: &Path, rank: usize, is_done: impl Fn() -> bool) -> Result<()> {
        let begun = Instant::now();
        let (mut asked, mut lost_since) = (begun, None);
        let (mut changed, mut quiet_since) = (last_change(temporary), begun);
        self.peers.check()?;
        while !is_done() {
            let is_ending = self.is_ending();
            if asked.elapsed() >= ASK_INTERVAL {
                asked = Instant::now();
                self.peers.check()?;
                if self.peers.ranks.lost().contains(&rank) {
                    lost_since.get_or_insert(asked);
                }
                let change = last_change(temporary);
                // The limit counts from the signal on.
                if !is_ending || change != changed {
                    (changed, quiet_since) = (change, asked);
                }
            }
            if is_ending && quiet_since.elapsed() >= self.quiet_limit {
                let seconds = self.quiet_limit.as_secs_f64();
                let reason = format!(
                    "it has written nothing for {seconds} s since a signal came to end this process"
                );
                return Err(self.peer_error(rank, reason));
            }
            let patience = match is_ending {
                true => Duration::ZERO,
                false => self.peer_timeout / LOST_RANK_PART,
            };
            if lost_since.is_some_and(|since| since.elapsed() >= patience) {
                return Err(self.peer_error(rank, "it is lost".into()));
            }
            if begun.elapsed() >= self.peer_timeout {
                let seconds = self.peer_timeout.as_secs_f64();
                let reason = format!("it did not finish within {seconds} s (`peer_timeout`)");
                return Err(self.peer_error(rank, reason));
            }
            thread::sleep(POLL_INTERVAL);
        }
        Ok(())
    }

    /// Returns `true` if a signal has come, after which there may not be much time.
    fn is_ending(&self) -> bool {
        let flag = self.interrupt.as_ref();
        flag.is_some_and(|flag| flag.load(Ordering::SeqCst))
    }

    fn peer_error(&self, rank: usize, reason: String) -> Error {
        Error::Peer {
            rank,
            step: self.step,
            reason,
        }
    }
}

/// Returns the time of the last change of a file in `folder`. Only its changes count: the clock is that of the disk.
fn last_change(folder: &Path) -> Option<SystemTime> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let changes = entries.filter_map(|entry| entry.metadata().ok()?.modified().ok());
    changes.max()
}

fn done_file(rank: usize) -> String {
    format!(".rank-{rank}.done")
}

fn write_entry(entry: &Entry, path: &Path) -> Result<()> {
    match &entry.content {
        Content::Tensors(tensors) => {
            // transformers requires that the metadata names the framework.
            let metadata = BTreeMap::from([("format".to_owned(), "pt".to_owned())]);
            overdrive_safetensors::write(path, tensors, &metadata)?;
        }
        Content::State(state) => state.save(path)?,
        Content::Document(bytes) | Content::File(bytes) => {
            files::write(path, bytes)?;
        }
    }
    Ok(())
}

fn write_json(path: &Path, value: &impl serde::Serialize) -> Result<()> {
    let bytes = serde_json::to_vec_pretty(value)
        .map_err(|error| CommonError::io("write", path)(std::io::Error::other(error)))?;
    Ok(files::write(path, &bytes)?)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test may panic")]
    use std::io;

    use super::*;

    /// Rank 0 of two, of which the other is alive.
    struct Alive;

    impl Ranks for Alive {
        fn rank(&self) -> usize {
            0
        }

        fn world_size(&self) -> usize {
            2
        }

        fn all_gather(&self, own: &[u64]) -> io::Result<Vec<Vec<u64>>> {
            Ok(vec![own.to_vec(); 2])
        }
    }

    #[test]
    fn a_rank_that_is_to_end_does_not_wait_for_one_that_writes_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let job = SaveJob {
            folder: dir.path().to_owned(),
            step: 3,
            metric: None,
            entries: Vec::new(),
            copies: Vec::new(),
            rank: 0,
            world_size: 2,
            run: 1,
            lock: None,
            peer_timeout: Duration::MAX,
            interrupt: Some(Arc::new(AtomicBool::new(true))),
            quiet_limit: Duration::from_millis(50),
            peers: Peers {
                ranks: Arc::new(Alive),
                key: "save".to_owned(),
                step: 3,
            },
        };
        let error = job.write().unwrap_err();
        assert_eq!(
            error.to_string(),
            "rank 1 did not write its entries of the snapshot of step 3: it has written nothing for 0.05 s since a \
             signal came to end this process"
        );
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
    }
}
