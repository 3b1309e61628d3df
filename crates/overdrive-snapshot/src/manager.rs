use std::collections::hash_map::RandomState;
use std::fs::{self, File, TryLockError};
use std::hash::{BuildHasher, Hasher};
use std::path::{Path, PathBuf};
use std::time::Instant;

use crate::folder;
use crate::options::SnapshotOptions;
use crate::ranks::{Ranks, SingleProcess};
use crate::save_job::SaveJob;
use crate::staging::Staging;
use crate::writer::{Rotation, SaveOutcome, Writer, save};
use crate::{Contents, Error, Result, RunState, Snapshot};
use overdrive_core::Error as CommonError;

/// The name of the file that a running process keeps locked.
const LOCK_FILE: &str = ".lock";

/// A manager that writes, finds and rotates the snapshots of one run.
///
/// Only one run, of one or several processes, may write into a folder at a time. Dropping the manager waits until
/// a snapshot that was begun is on the disk.
pub struct SnapshotManager {
    folder: PathBuf,
    options: SnapshotOptions,
    ranks: Box<dyn Ranks>,
    run: u64,
    /// The lock on the folder. The operating system releases it however the process ends.
    _lock: Option<File>,
    staging: Staging,
    writer: Option<Writer>,
    /// The outcomes since the last call of [`SnapshotManager::outcomes`].
    outcomes: Vec<SaveOutcome>,
}

impl SnapshotManager {
    /// Opens the folder of a run of one process, and creates it if it does not exist. Incomplete snapshots that
    /// killed processes have left are removed.
    ///
    /// # Errors
    /// [`Error::Locked`] while another run writes into the folder, [`Error::Common`] if it cannot be created or read.
    pub fn open(folder: impl AsRef<Path>, options: SnapshotOptions) -> Result<SnapshotManager> {
        SnapshotManager::with_ranks(folder, options, Box::new(SingleProcess))
    }

    /// Opens the folder of a run of several processes. Every rank calls it.
    ///
    /// # Errors
    /// The same as those of [`SnapshotManager::open`], and [`Error::Common`] if a rank is lost.
    pub fn with_ranks(
        folder: impl AsRef<Path>,
        options: SnapshotOptions,
        ranks: Box<dyn Ranks>,
    ) -> Result<SnapshotManager> {
        let folder = folder.as_ref().to_path_buf();
        let owns_folder = ranks.rank() == 0 || !options.shared_folder;
        let prepared = if owns_folder {
            prepare(&folder)
        } else {
            Ok(None)
        };
        // The ranks exchange whether they failed before any of them returns: otherwise the others would wait for
        // the failed one. Rank 0's random number becomes the id of the run; a `RandomState` is seeded by the
        // operating system.
        let own = [
            u64::from(prepared.is_err()),
            RandomState::new().build_hasher().finish(),
        ];
        let all = ranks
            .all_gather(&own)
            .map_err(CommonError::io("agree on the folder", &folder))?;
        let lock = prepared?;
        if let Some(rank) = all.iter().position(|own| own.first() != Some(&0)) {
            return Err(Error::Peer {
                rank,
                step: 0,
                reason: "it could not open the folder; its own output has the error".into(),
            });
        }
        let run = all.first().and_then(|own| own.get(1)).copied();
        Ok(SnapshotManager {
            folder,
            options,
            ranks,
            run: run.unwrap_or(0),
            _lock: lock,
            staging: Staging::default(),
            writer: None,
            outcomes: Vec::new(),
        })
    }

    /// Returns the folder of the snapshots.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Saves a snapshot: copies the tensors to the host, and returns while they are written
    /// ([`SnapshotOptions::background`]). If the previous snapshot is still being written, it waits for it first.
    ///
    /// A full disk or a folder that cannot be written is not an error of this call: training continues, and
    /// [`outcomes`](SnapshotManager::outcomes) returns the error.
    ///
    /// # Errors
    /// An error of libtorch while copying, and [`Error::WriterEnded`].
    pub fn save(&mut self, contents: Contents) -> Result<()> {
        let began = Instant::now();
        // One snapshot at a time: its copies are reused for the next, and memory holds one set.
        self.settle()?;
        let rank = self.ranks.rank();
        let entries = self.staging.copy(contents.entries)?;
        // A process that has a folder of its own is rank 0 of it.
        let (rank, world_size) = match self.options.shared_folder {
            true => (rank, self.ranks.world_size()),
            false => (0, 1),
        };
        let job = SaveJob {
            folder: self.folder.clone(),
            step: contents.step,
            metric: contents.metric,
            entries,
            rank,
            world_size,
            run: self.run,
            peer_timeout: self.options.peer_timeout,
        };
        // Only one rank may delete old snapshots of a shared folder.
        let limit = self.options.total_limit.filter(|_| rank == 0);
        let rotation = limit.map(|limit| Rotation {
            limit,
            best: self.options.best,
        });
        if !self.options.background {
            let (mut outcome, entries) = save(job, rotation, 0.0);
            if let Ok(report) = &mut outcome.result {
                report.blocked_seconds = began.elapsed().as_secs_f64();
            }
            self.staging.reuse(entries);
            self.outcomes.push(outcome);
            return Ok(());
        }
        // The thread starts with the first snapshot, so that a run without any has none.
        let writer = match &mut self.writer {
            Some(writer) => writer,
            empty => {
                let started = Writer::start().map_err(CommonError::io("write", &self.folder))?;
                empty.insert(started)
            }
        };
        writer.send(job, rotation, began.elapsed().as_secs_f64())
    }

    /// Saves everything that `state` registers, after `step` steps. `metric`, such as the loss on the evaluation
    /// data, selects the best snapshot.
    ///
    /// # Errors
    /// Those of [`save`](SnapshotManager::save), and [`Error::NotSaved`], [`Error::BadName`].
    pub fn save_state(
        &mut self,
        step: u64,
        metric: Option<f64>,
        state: RunState<'_>,
    ) -> Result<()> {
        self.save(state.contents(step, metric)?)
    }

    /// Restores everything that `state` registers from a snapshot of this run. Every rank calls it.
    ///
    /// The snapshot may be one of another number of processes ([`Snapshot::world_size`]): sharded optimizer states
    /// are divided anew by the names of the parameters, and the random states are derived anew from that of
    /// rank 0. With folders that are not shared, each rank has only its own entries, and the number must be the
    /// same.
    ///
    /// # Errors
    /// [`Error::EntryMismatch`] before anything is changed; [`Error::NotRestored`] or [`Error::Differs`] for the
    /// first entry that does not fit: the entries before it have been restored.
    pub fn load_state(&self, snapshot: &Snapshot, state: RunState<'_>) -> Result<()> {
        let (rank, now) = match self.options.shared_folder {
            true => (self.ranks.rank(), self.ranks.world_size()),
            false => (0, 1),
        };
        state.restore(snapshot, rank, now)
    }

    /// Returns the outcomes of the snapshots that were finished since the last call, without waiting.
    ///
    /// # Errors
    /// [`Error::WriterEnded`].
    pub fn outcomes(&mut self) -> Result<Vec<SaveOutcome>> {
        while let Some(done) = self.writer.as_mut().map_or(Ok(None), Writer::poll)? {
            self.record(done);
        }
        Ok(std::mem::take(&mut self.outcomes))
    }

    /// Waits until all snapshots are finished, and returns their outcomes.
    ///
    /// # Errors
    /// [`Error::WriterEnded`].
    pub fn wait(&mut self) -> Result<Vec<SaveOutcome>> {
        self.settle()?;
        Ok(std::mem::take(&mut self.outcomes))
    }

    /// Returns a warning for each outcome that needs one: snapshots that could not be written, with the newest
    /// existing one, and old snapshots that could not be deleted.
    pub fn warnings(&self, outcomes: &[SaveOutcome]) -> Vec<String> {
        let mut lines = Vec::new();
        for outcome in outcomes {
            match &outcome.result {
                Err(error) => {
                    let newest = self.list().unwrap_or_default();
                    let newest = match newest.first() {
                        Some(snapshot) => format!("the last one is {}", snapshot.path().display()),
                        None => "there is none yet".to_owned(),
                    };
                    lines.push(format!(
                        "warning: no snapshot of step {}: {error}; training continues, {newest}",
                        outcome.step
                    ));
                }
                Ok(report) => lines.extend(report.rotation_error.as_ref().map(|error| {
                    format!("warning: an old snapshot could not be deleted: {error}")
                })),
            }
        }
        lines
    }

    /// Waits until all snapshots are finished; [`outcomes`](SnapshotManager::outcomes) then returns them.
    ///
    /// # Errors
    /// [`Error::WriterEnded`].
    pub fn settle(&mut self) -> Result<()> {
        while let Some(done) = self.writer.as_mut().map_or(Ok(None), Writer::next)? {
            self.record(done);
        }
        Ok(())
    }

    fn record(&mut self, (outcome, entries): (SaveOutcome, Vec<crate::contents::Entry>)) {
        self.staging.reuse(entries);
        self.outcomes.push(outcome);
    }

    /// Returns the snapshots whose files all exist with their lengths, the newest first. Others are skipped with
    /// a warning.
    ///
    /// # Errors
    /// [`Error::Common`] if the folder cannot be read.
    pub fn list(&self) -> Result<Vec<Snapshot>> {
        folder::list(&self.folder)
    }

    /// Returns the newest snapshot whose checksums are right and which every rank has; `None` if there is none.
    /// Damaged ones are skipped with a warning. It is collective: all ranks call it.
    ///
    /// # Errors
    /// [`Error::Common`] if the folder cannot be read or a rank is lost.
    pub fn latest(&self) -> Result<Option<Snapshot>> {
        let is_complete = |snapshot: &Snapshot| {
            let verified = snapshot.verify();
            if let Err(error) = &verified {
                tracing::warn!("snapshot skipped: {error}");
            }
            verified.is_ok()
        };
        if self.ranks.world_size() == 1 {
            return Ok(self.list()?.into_iter().find(is_complete));
        }
        // A rank that fails sends an empty list, so that the others do not wait for it.
        let listed = self.list();
        let own: Vec<Snapshot> = match &listed {
            Ok(snapshots) => snapshots
                .iter()
                .filter(|one| is_complete(one))
                .cloned()
                .collect(),
            Err(_) => Vec::new(),
        };
        let steps: Vec<u64> = own.iter().map(Snapshot::step).collect();
        let all = self
            .ranks
            .all_gather(&steps)
            .map_err(CommonError::io("agree on the snapshot in", &self.folder))?;
        listed?;
        let everywhere = |step: &u64| all.iter().all(|steps| steps.contains(step));
        // The newest step that all ranks have: a rank killed while writing may lack the last one.
        let step = steps.iter().copied().find(everywhere);
        Ok(own.into_iter().find(|one| Some(one.step()) == step))
    }

    /// Returns the snapshot with the best metric ([`SnapshotOptions::best`]); `None` if none has a metric. Its
    /// checksums are verified.
    ///
    /// # Errors
    /// [`Error::Damaged`], [`Error::Common`].
    pub fn best(&self) -> Result<Option<Snapshot>> {
        let Some(best) = self.options.best else {
            return Ok(None);
        };
        let snapshots = self.list()?;
        let Some(best) = folder::best_of(&snapshots, best) else {
            return Ok(None);
        };
        best.verify()?;
        Ok(Some(best.clone()))
    }
}

/// Creates the folder if it does not exist, locks it and removes incomplete snapshots. Returns the lock.
fn prepare(folder: &Path) -> Result<Option<File>> {
    fs::create_dir_all(folder).map_err(CommonError::io("create the folder", folder))?;
    let path = folder.join(LOCK_FILE);
    let lock = File::options().create(true).append(true).open(&path);
    let lock = lock.map_err(CommonError::io("lock", &path))?;
    match lock.try_lock() {
        Ok(()) => {}
        Err(TryLockError::WouldBlock) => {
            return Err(Error::Locked {
                folder: folder.to_path_buf(),
            });
        }
        // Some network file systems have no locks.
        Err(TryLockError::Error(error)) if error.kind() == std::io::ErrorKind::Unsupported => {}
        Err(TryLockError::Error(error)) => return Err(CommonError::io("lock", &path)(error).into()),
    }
    folder::clean(folder)?;
    Ok(Some(lock))
}

impl std::fmt::Debug for SnapshotManager {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SnapshotManager")
            .field("folder", &self.folder)
            .field("options", &self.options)
            .field("rank", &self.ranks.rank())
            .finish_non_exhaustive()
    }
}
