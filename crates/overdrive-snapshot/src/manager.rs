use std::collections::hash_map::RandomState;
use std::fs::{self, File, TryLockError};
use std::hash::{BuildHasher, Hasher};
use std::path::{Path, PathBuf};
use std::time::Instant;

use crate::folder;
use crate::options::SnapshotOptions;
use crate::ranks::{Alone, Ranks};
use crate::staging::Staging;
use crate::write::Job;
use crate::writer::{Rotation, SaveOutcome, Writer, save};
use crate::{Contents, Error, Result, RunState, Snapshot};

/// The name of the file that a running process has locked.
const LOCK: &str = ".lock";

/// The snapshots of one run: writes, finds and rotates them.
///
/// One process, or one run of several, may write into a folder at a time. Dropping it waits until what
/// was begun is on the disk.
pub struct SnapshotManager {
    folder: PathBuf,
    options: SnapshotOptions,
    ranks: Box<dyn Ranks>,
    run: u64,
    /// Held by the first writer of the folder until it ends, however it ends.
    _lock: Option<File>,
    staging: Staging,
    writer: Option<Writer>,
    /// Ended since the caller last asked.
    outcomes: Vec<SaveOutcome>,
}

impl SnapshotManager {
    /// Opens the folder of a run of one process; it is made with the first snapshot. What killed processes
    /// have left half-written is removed.
    ///
    /// # Errors
    /// [`Error::Locked`] while another run writes there, [`Error::Io`].
    pub fn open(folder: impl AsRef<Path>, options: SnapshotOptions) -> Result<SnapshotManager> {
        SnapshotManager::with_ranks(folder, options, Box::new(Alone))
    }

    /// Opens the folder of a run of several processes: each rank calls this.
    ///
    /// # Errors
    /// As for [`SnapshotManager::open`], and when a rank is lost.
    pub fn with_ranks(
        folder: impl AsRef<Path>,
        options: SnapshotOptions,
        ranks: Box<dyn Ranks>,
    ) -> Result<SnapshotManager> {
        let folder = folder.as_ref().to_path_buf();
        let keeps = ranks.rank() == 0 || !options.shared_folder;
        let prepared = if keeps { prepare(&folder) } else { Ok(None) };
        // All ranks learn of a failure before any of them goes on, and then wait for none.
        let own = [
            u64::from(prepared.is_err()),
            RandomState::new().build_hasher().finish(),
        ];
        let all = ranks
            .all_gather(&own)
            .map_err(Error::io("agree on the folder", &folder))?;
        let lock = prepared?;
        if let Some(rank) = all.iter().position(|own| own.first() != Some(&0)) {
            return Err(Error::Peer {
                rank,
                step: 0,
                reason: "it could not open the folder; its own output says why".into(),
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

    /// The folder.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Takes a snapshot: copies the tensors, and returns while they are written
    /// ([`SnapshotOptions::background`]). If the one before is still under way, this waits for it first.
    ///
    /// That the disk is full or the folder cannot be written is no error of this call: training goes on,
    /// and [`outcomes`](SnapshotManager::outcomes) tells.
    ///
    /// # Errors
    /// An error of libtorch while copying; [`Error::WriterEnded`].
    pub fn save(&mut self, contents: Contents) -> Result<()> {
        let began = Instant::now();
        self.settle()?;
        let rank = self.ranks.rank();
        let parts = self.staging.copy(contents.parts)?;
        let (rank, world_size) = match self.options.shared_folder {
            true => (rank, self.ranks.world_size()),
            false => (0, 1),
        };
        let job = Job {
            folder: self.folder.clone(),
            step: contents.step,
            metric: contents.metric,
            parts,
            rank,
            world_size,
            run: self.run,
            peer_timeout: self.options.peer_timeout,
        };
        let limit = self.options.total_limit.filter(|_| rank == 0);
        let rotation = limit.map(|limit| Rotation {
            limit,
            best: self.options.best,
        });
        if !self.options.background {
            let (mut outcome, parts) = save(job, rotation, 0.0);
            if let Ok(report) = &mut outcome.result {
                report.blocked_seconds = began.elapsed().as_secs_f64();
            }
            self.staging.reuse(parts);
            self.outcomes.push(outcome);
            return Ok(());
        }
        let writer = match &mut self.writer {
            Some(writer) => writer,
            empty => {
                let started = Writer::start().map_err(Error::io("write", &self.folder))?;
                empty.insert(started)
            }
        };
        writer.send(job, rotation, began.elapsed().as_secs_f64())
    }

    /// Saves all that `state` registers, after `step` steps. The best snapshot is kept by `metric`, such as the
    /// loss on the evaluation data.
    ///
    /// # Errors
    /// As [`save`](SnapshotManager::save), and [`Error::NotSaved`], [`Error::BadName`].
    pub fn save_state(
        &mut self,
        step: u64,
        metric: Option<f64>,
        state: RunState<'_>,
    ) -> Result<()> {
        self.save(state.contents(step, metric)?)
    }

    /// Restores all that `state` registers from a snapshot of this run. Each rank calls it.
    ///
    /// # Errors
    /// [`Error::WorldSize`] and [`Error::OtherParts`] before anything is changed; [`Error::NotRestored`] or
    /// [`Error::Differs`] for the first part that does not fit: the parts before it have been restored.
    pub fn load_state(&self, snapshot: &Snapshot, state: RunState<'_>) -> Result<()> {
        let (rank, now) = match self.options.shared_folder {
            true => (self.ranks.rank(), self.ranks.world_size()),
            false => (0, 1),
        };
        if snapshot.world_size() != now {
            return Err(Error::WorldSize {
                path: snapshot.path().to_owned(),
                saved: snapshot.world_size(),
                now,
            });
        }
        state.restore(snapshot, rank)
    }

    /// How the snapshots ended that have ended since this was last asked. It does not wait.
    ///
    /// # Errors
    /// [`Error::WriterEnded`].
    pub fn outcomes(&mut self) -> Result<Vec<SaveOutcome>> {
        while let Some(done) = self.writer.as_mut().map_or(Ok(None), Writer::poll)? {
            self.took(done);
        }
        Ok(std::mem::take(&mut self.outcomes))
    }

    /// Waits until nothing is under way, and says how all that was ended.
    ///
    /// # Errors
    /// [`Error::WriterEnded`].
    pub fn wait(&mut self) -> Result<Vec<SaveOutcome>> {
        self.settle()?;
        Ok(std::mem::take(&mut self.outcomes))
    }

    /// Returns a warning for each of `outcomes` that needs one: snapshots that could not be written, with the
    /// newest one that there is, and old ones that could not be deleted.
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
                        "warning: no snapshot of step {}: {error}; training goes on, {newest}",
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

    /// Waits until nothing is under way; [`outcomes`](SnapshotManager::outcomes) then has all.
    ///
    /// # Errors
    /// [`Error::WriterEnded`].
    pub fn settle(&mut self) -> Result<()> {
        while let Some(done) = self.writer.as_mut().map_or(Ok(None), Writer::next)? {
            self.took(done);
        }
        Ok(())
    }

    fn took(&mut self, (outcome, parts): (SaveOutcome, Vec<crate::contents::Part>)) {
        self.staging.reuse(parts);
        self.outcomes.push(outcome);
    }

    /// The snapshots whose files are all there with their lengths, the newest first. Others are passed over
    /// with a warning.
    ///
    /// # Errors
    /// [`Error::Io`] when the folder cannot be read.
    pub fn list(&self) -> Result<Vec<Snapshot>> {
        folder::list(&self.folder)
    }

    /// The newest snapshot of which every byte is as it was written, and which every rank has; `None`
    /// where there is none. Damaged ones are passed over with a warning. All ranks call this together.
    ///
    /// # Errors
    /// [`Error::Io`] when the folder cannot be read or a rank is lost.
    pub fn latest(&self) -> Result<Option<Snapshot>> {
        let whole = |snapshot: &Snapshot| {
            let verified = snapshot.verify();
            if let Err(error) = &verified {
                tracing::warn!("passed over: {error}");
            }
            verified.is_ok()
        };
        if self.ranks.world_size() == 1 {
            return Ok(self.list()?.into_iter().find(whole));
        }
        // A rank that fails says that it has none, so that the others do not wait for it.
        let listed = self.list();
        let own: Vec<Snapshot> = match &listed {
            Ok(snapshots) => snapshots.iter().filter(|one| whole(one)).cloned().collect(),
            Err(_) => Vec::new(),
        };
        let steps: Vec<u64> = own.iter().map(Snapshot::step).collect();
        let all = self
            .ranks
            .all_gather(&steps)
            .map_err(Error::io("agree on the snapshot in", &self.folder))?;
        listed?;
        let everywhere = |step: &u64| all.iter().all(|steps| steps.contains(step));
        let step = steps.iter().copied().find(everywhere);
        Ok(own.into_iter().find(|one| Some(one.step()) == step))
    }

    /// The best snapshot by its metric ([`SnapshotOptions::best`]), or `None` where none has one. Its
    /// bytes are compared with their checksums.
    ///
    /// # Errors
    /// [`Error::Damaged`], [`Error::Io`].
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

/// Locks the folder and removes what is unfinished; a folder that is not there yet is made.
fn prepare(folder: &Path) -> Result<Option<File>> {
    fs::create_dir_all(folder).map_err(Error::io("make the folder", folder))?;
    let path = folder.join(LOCK);
    let lock = File::options().create(true).append(true).open(&path);
    let lock = lock.map_err(Error::io("lock", &path))?;
    match lock.try_lock() {
        Ok(()) => {}
        Err(TryLockError::WouldBlock) => {
            return Err(Error::Locked {
                folder: folder.to_path_buf(),
            });
        }
        // Some network file systems have no locks.
        Err(TryLockError::Error(error)) if error.kind() == std::io::ErrorKind::Unsupported => {}
        Err(TryLockError::Error(error)) => return Err(Error::io("lock", &path)(error)),
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
