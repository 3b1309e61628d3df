use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Instant;

use crate::folder::{self, Listing};
use crate::options::SnapshotOptions;
use crate::ranks::{Ranks, SingleProcess};
use crate::rotation::best_of;
use crate::save_job::{Peers, QUIET_LIMIT, SaveJob};
use crate::staging::Staging;
use crate::writer::{BackgroundSave, Done, Rotation, SaveOutcome, save};
use crate::{Contents, Error, FolderLock, Result, RunState, Scope, Snapshot};
use overdrive_core::Error as CommonError;
use overdrive_core::random::entropy;

/// A manager that writes, finds and rotates the snapshots of one run.
///
/// Only one run, of one or several processes, may write into a folder at a time. Dropping the manager waits until
/// the snapshot that is being saved is on disk.
pub struct SnapshotManager {
    folder: PathBuf,
    options: SnapshotOptions,
    ranks: Arc<dyn Ranks>,
    run: u64,
    /// The number of saves so far, the same on all ranks.
    saves: u64,
    /// The lock on the folder; `None` on a rank that shares the folder of rank 0.
    lock: Option<FolderLock>,
    staging: Staging,
    /// The snapshot that a thread is writing.
    saving: Option<BackgroundSave>,
    /// The flag that is set when the process is to end.
    interrupt: Option<Arc<AtomicBool>>,
    /// The outcomes since the last call of [`SnapshotManager::outcomes`].
    outcomes: Vec<SaveOutcome>,
}

impl SnapshotManager {
    /// Opens the folder of a single-process run, and creates it if it does not exist. Incomplete snapshots that
    /// killed processes left behind are removed.
    ///
    /// # Errors
    /// [`Error::Locked`] while another run writes into the folder, [`Error::Common`] if it cannot be created or read.
    pub fn open(folder: impl AsRef<Path>, options: SnapshotOptions) -> Result<SnapshotManager> {
        SnapshotManager::with_ranks(folder, options, Box::new(SingleProcess))
    }

    /// Opens the folder of a run of several processes. Every rank must call it.
    ///
    /// # Errors
    /// As for [`SnapshotManager::open`], [`Error::PeerFolder`] if another rank cannot open the folder, and
    /// [`Error::Common`] if a rank is lost.
    pub fn with_ranks(
        folder: impl AsRef<Path>,
        options: SnapshotOptions,
        ranks: Box<dyn Ranks>,
    ) -> Result<SnapshotManager> {
        let folder = folder.as_ref().to_path_buf();
        let max_pinned_bytes = options.max_pinned_bytes;
        let owns_folder = ranks.rank() == 0 || !options.shared_folder;
        let prepared = if owns_folder {
            prepare(&folder, options.lock.clone())
        } else {
            Ok(None)
        };
        // The ranks exchange whether they failed before any of them returns: otherwise the others would wait for
        // the failed one. Rank 0's random number becomes the id of the run.
        let own = [u64::from(prepared.is_err()), entropy()];
        let all = ranks
            .all_gather(&own)
            .map_err(CommonError::io("agree on the folder", &folder))?;
        let lock = prepared?;
        if let Some(rank) = all.iter().position(|own| own.first() != Some(&0)) {
            return Err(Error::PeerFolder { rank, folder });
        }
        let run = all.first().and_then(|own| own.get(1)).copied();
        Ok(SnapshotManager {
            folder,
            options,
            ranks: ranks.into(),
            run: run.unwrap_or(0),
            saves: 0,
            lock,
            staging: Staging::new(max_pinned_bytes),
            saving: None,
            interrupt: None,
            outcomes: Vec::new(),
        })
    }

    /// Sets the flag that tells later saves that the process is to end, such as by a signal. From then on a rank waits
    /// neither for a lost rank nor for one that has written nothing for 30 seconds.
    pub fn set_interrupt(&mut self, interrupt: Arc<AtomicBool>) {
        self.interrupt = Some(interrupt);
    }

    /// Returns `true` on rank 0.
    pub fn is_main(&self) -> bool {
        self.ranks.rank() == 0
    }

    /// Checks that the folder still has its path. Without a lock of its own, a rank leaves that to rank 0.
    ///
    /// # Errors
    /// [`Error::Moved`].
    pub fn check_in_place(&self) -> Result<()> {
        self.lock
            .as_ref()
            .map_or(Ok(()), FolderLock::check_in_place)
    }

    /// Returns the folder of the snapshots.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Saves a snapshot: copies the tensors to the host, and returns while they are being written
    /// ([`SnapshotOptions::background`]). Waits first for a previous snapshot that is still being written. Every rank
    /// must call it. In a shared folder, only rank 0 copies and writes the entries of [`Scope::Run`].
    ///
    /// Tensors on a GPU are copied to page-locked memory on a separate stream
    /// ([`SnapshotOptions::max_pinned_bytes`]), and this call does not wait for the copies. GPU work that is launched
    /// afterwards does wait, so that it cannot change a tensor before it is copied.
    ///
    /// A full disk or an unwritable folder is not an error of this call: training continues, and
    /// [`outcomes`](SnapshotManager::outcomes) returns the error.
    ///
    /// # Errors
    /// An error of libtorch while copying, [`Error::Moved`], and [`Error::WriterEnded`].
    pub fn save(&mut self, contents: Contents) -> Result<()> {
        let peers = self.peers(contents.step);
        self.save_with(contents, &peers)
            .inspect_err(|error| peers.post_failure(error))
    }

    /// Returns the other ranks of the next save.
    fn peers(&mut self, step: u64) -> Peers {
        self.saves += 1;
        let ranks: Arc<dyn Ranks> = match self.options.shared_folder {
            true => Arc::clone(&self.ranks),
            // Snapshots in separate folders do not depend on each other.
            false => Arc::new(SingleProcess),
        };
        Peers {
            ranks,
            key: format!("snapshot/{:016x}/{}", self.run, self.saves),
            step,
        }
    }

    /// Returns the rank of this process and the number of processes that write into its folder.
    fn writers(&self) -> (usize, usize) {
        match self.options.shared_folder {
            true => (self.ranks.rank(), self.ranks.world_size()),
            // A process with its own folder counts as rank 0 of that folder.
            false => (0, 1),
        }
    }

    fn save_with(&mut self, contents: Contents, peers: &Peers) -> Result<()> {
        let began = Instant::now();
        // One snapshot at a time, so that memory holds one set of copies, which the next snapshot reuses.
        self.settle()?;
        self.check_in_place()?;
        let (rank, world_size) = self.writers();
        let own = contents.entries.into_iter();
        let own = own.filter(|entry| rank == 0 || entry.scope == Scope::Rank);
        let (entries, copies) = self.staging.copy(own.collect())?;
        let job = SaveJob {
            folder: self.folder.clone(),
            step: contents.step,
            metric: contents.metric,
            entries,
            copies,
            rank,
            world_size,
            run: self.run,
            lock: self.lock.clone(),
            peer_timeout: self.options.peer_timeout,
            interrupt: self.interrupt.clone(),
            quiet_limit: QUIET_LIMIT,
            peers: peers.clone(),
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
            self.record((outcome, entries));
            return Ok(());
        }
        let saving = BackgroundSave::start(job, rotation, began.elapsed().as_secs_f64());
        self.saving = Some(saving.map_err(CommonError::io("write", &self.folder))?);
        Ok(())
    }

    /// Saves everything that `state` registers, after `step` steps. `metric`, such as the loss on the evaluation
    /// data, selects the best snapshot.
    ///
    /// # Errors
    /// As for [`save`](SnapshotManager::save), and [`Error::NotSaved`], [`Error::BadName`]. The other ranks are
    /// notified: their save ends with [`Error::Peer`].
    pub fn save_state(
        &mut self,
        step: u64,
        metric: Option<f64>,
        state: RunState<'_>,
    ) -> Result<()> {
        let peers = self.peers(step);
        let rank = self.writers().0;
        state
            .contents(step, metric, rank)
            .and_then(|contents| self.save_with(contents, &peers))
            .inspect_err(|error| peers.post_failure(error))
    }

    /// Restores everything that `state` registers from a snapshot. Every rank calls it.
    ///
    /// The run continues from this snapshot. Snapshots of later steps belong to a branch that the run abandons; they
    /// are moved to a new folder `abandoned-<n>` in the run's folder. If this snapshot is in another folder, all
    /// snapshots of the run's folder are moved. A warning names the new folder.
    ///
    /// The snapshot may come from a different number of processes ([`Snapshot::world_size`]): sharded optimizer states
    /// are resharded by the names of the parameters, and new random states are derived from that of rank 0. Without a
    /// shared folder, each rank has only its own entries, so the number must be the same.
    ///
    /// # Errors
    /// [`Error::EntryMismatch`] before anything is changed; [`Error::NotRestored`] or [`Error::Differs`] for the
    /// first entry that does not fit: the entries before it have been restored. [`Error::Common`] if abandoned
    /// snapshots cannot be moved.
    pub fn load_state(&self, snapshot: &Snapshot, state: RunState<'_>) -> Result<()> {
        let (rank, now) = self.writers();
        state.restore(snapshot, rank, now)?;
        match self.owns_folder() {
            true => folder::abandon_after(&self.folder, snapshot),
            false => Ok(()),
        }
    }

    /// Returns `true` on the rank that moves and deletes snapshots in the folder.
    fn owns_folder(&self) -> bool {
        self.ranks.rank() == 0 || !self.options.shared_folder
    }

    /// Returns the outcomes of the snapshots that were finished since the last call, without waiting.
    ///
    /// # Errors
    /// [`Error::WriterEnded`].
    pub fn outcomes(&mut self) -> Result<Vec<SaveOutcome>> {
        if self
            .saving
            .as_ref()
            .is_some_and(BackgroundSave::is_finished)
        {
            self.settle()?;
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
        if let Some(saving) = self.saving.take() {
            self.record(saving.wait()?);
        }
        Ok(())
    }

    fn record(&mut self, (outcome, entries): Done) {
        self.staging.reuse(entries);
        self.outcomes.push(outcome);
    }

    /// Returns the snapshots whose files all exist with the right lengths, the newest first. Only folders with the
    /// manager's own names count: a copy named `checkpoint-10-keep` is the user's.
    ///
    /// # Errors
    /// [`Error::Common`] if the folder or a manifest cannot be read.
    pub fn list(&self) -> Result<Vec<Snapshot>> {
        folder::list(&self.folder)
    }

    /// Returns the newest snapshot that has valid checksums and that every rank has; `None` if there is no
    /// `checkpoint-*` on any rank. Damaged ones are skipped with a warning. This call is collective: all ranks must
    /// make it. In a shared folder, only rank 0 reads the files, and only until it has found the snapshot.
    ///
    /// # Errors
    /// [`Error::NoneComplete`] if there are snapshots and none of them is complete on every rank, or another rank
    /// cannot read its own; [`Error::Common`] if a file cannot be read, which does not mean that it is damaged, or a
    /// rank is lost.
    pub fn latest(&self) -> Result<Option<Snapshot>> {
        let listed = folder::scan(&self.folder);
        // A rank that fails tells the others, so that they do not wait for it.
        let own = listed.as_ref().ok().map(Found::of);
        let sent = self.gather(&Found::encode(own.as_ref()))?;
        let Listing {
            snapshots,
            mut damaged,
        } = listed?;
        let mut found = Vec::new();
        for (rank, sent) in sent.iter().enumerate() {
            let decoded = Found::decode(sent);
            found.push(decoded.ok_or_else(|| self.none_complete(vec![unread(rank)]))?);
        }
        // The steps that all ranks have: a rank killed while writing may lack the last one.
        let mut common = found[0].steps.clone();
        common.retain(|step| found.iter().all(|of_rank| of_rank.steps.contains(step)));
        common.dedup();
        for step in common {
            let snapshot = snapshots.iter().find(|one| one.step() == step);
            if let Some(newest) = self.verify_on_all(snapshot, &mut damaged)? {
                self.warn_of_skipped(&damaged, newest);
                return Ok(Some(newest.clone()));
            }
        }
        if found.iter().all(Found::is_empty) {
            return Ok(None);
        }
        // A restart at step 0 would overwrite snapshots that might be repairable.
        let damaged = damaged.iter();
        let damaged = damaged.map(|(path, reason)| format!("{} ({reason})", path.display()));
        let mut problems: Vec<String> = damaged.collect();
        if found.len() > 1 {
            let ranks = found.iter().enumerate();
            problems.extend(ranks.map(|(rank, Found { steps, .. })| {
                format!("rank {rank} has snapshots of steps {steps:?}")
            }));
        }
        Err(self.none_complete(problems))
    }

    /// Returns the snapshot if its checksums are valid on all ranks, and adds it to `damaged` if they are not on this
    /// one.
    fn verify_on_all<'s>(
        &self,
        snapshot: Option<&'s Snapshot>,
        damaged: &mut Vec<(PathBuf, String)>,
    ) -> Result<Option<&'s Snapshot>> {
        const WHOLE: u64 = 0;
        const DAMAGED: u64 = 1;
        const UNREAD: u64 = 2;
        let verified = self.verify(snapshot);
        let own = match &verified {
            Ok(()) => WHOLE,
            Err(Error::Damaged { .. }) => DAMAGED,
            Err(_) => UNREAD,
        };
        let all = self.gather(&[own])?;
        match verified {
            Ok(()) => {}
            Err(Error::Damaged { path, .. }) if folder::is_gone(&path) => {}
            Err(Error::Damaged { path, reason }) => damaged.push((path, reason)),
            // The snapshot may be intact, and a run that fell back past it would lose steps.
            Err(error) => return Err(error),
        }
        if let Some(rank) = all.iter().position(|code| *code == [UNREAD]) {
            return Err(self.none_complete(vec![unread(rank)]));
        }
        Ok(snapshot.filter(|_| all.iter().all(|code| *code == [WHOLE])))
    }

    /// Warns of the damaged snapshots that are skipped; in a shared folder, one rank does.
    fn warn_of_skipped(&self, damaged: &[(PathBuf, String)], newest: &Snapshot) {
        for (path, reason) in damaged.iter().filter(|_| self.owns_folder()) {
            tracing::warn!(
                "{} is damaged ({reason}) and is skipped; the newest complete snapshot is {}",
                path.display(),
                newest.path().display()
            );
        }
    }

    fn none_complete(&self, problems: Vec<String>) -> Error {
        Error::NoneComplete {
            folder: self.folder.clone(),
            problems,
        }
    }

    /// Opens the snapshot in any folder, as [`Snapshot::open`] does. This call is collective: all ranks must make it.
    /// In a shared folder, only rank 0 reads the files.
    ///
    /// # Errors
    /// As for [`Snapshot::open`], and [`Error::Damaged`] if another rank cannot open it.
    pub fn open_snapshot(&self, folder: impl AsRef<Path>) -> Result<Snapshot> {
        let opened = Snapshot::open_unverified(folder.as_ref())
            .and_then(|snapshot| self.verify(Some(&snapshot)).map(|()| snapshot));
        let all = self.gather(&[u64::from(opened.is_ok())])?;
        let snapshot = opened?;
        match all.iter().position(|whole| *whole != [1]) {
            Some(rank) => Err(Error::damaged(
                snapshot.path(),
                format!("rank {rank} could not open it; its own output has the error"),
            )),
            None => Ok(snapshot),
        }
    }

    /// Verifies the checksums of a snapshot on rank 0, or on every rank if each has a folder of its own.
    fn verify(&self, snapshot: Option<&Snapshot>) -> Result<()> {
        match snapshot.filter(|_| self.writers().0 == 0) {
            Some(snapshot) => snapshot.verify(),
            None => Ok(()),
        }
    }

    fn gather(&self, own: &[u64]) -> Result<Vec<Vec<u64>>> {
        let all = self.ranks.all_gather(own);
        Ok(all.map_err(CommonError::io("agree on the snapshot in", &self.folder))?)
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
        let Some(best) = best_of(&snapshots, best) else {
            return Ok(None);
        };
        best.verify()?;
        Ok(Some(best.clone()))
    }
}

/// Locks the folder, unless `lock` is the lock on it, and removes incomplete snapshots. Returns the lock.
fn prepare(folder: &Path, lock: Option<FolderLock>) -> Result<Option<FolderLock>> {
    let lock = match lock.filter(|lock| lock.folder() == folder) {
        Some(lock) => lock,
        None => FolderLock::acquire(folder)?,
    };
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

/// A report of one rank to the others about the snapshots that it found.
struct Found {
    /// The number of damaged snapshots.
    damaged: u64,
    /// The steps of the others, the newest first.
    steps: Vec<u64>,
}

impl Found {
    fn of(listing: &Listing) -> Found {
        Found {
            damaged: listing.damaged.len() as u64,
            steps: listing.snapshots.iter().map(Snapshot::step).collect(),
        }
    }

    /// Returns the numbers that are sent: none if the rank could not read its snapshots.
    fn encode(found: Option<&Found>) -> Vec<u64> {
        found.map_or_else(Vec::new, |Found { damaged, steps }| {
            [&[*damaged], &steps[..]].concat()
        })
    }

    fn decode(sent: &[u64]) -> Option<Found> {
        let (&damaged, steps) = sent.split_first()?;
        let steps = steps.to_vec();
        Some(Found { damaged, steps })
    }

    fn is_empty(&self) -> bool {
        self.damaged == 0 && self.steps.is_empty()
    }
}

/// Returns the message that a rank could not read its snapshots.
fn unread(rank: usize) -> String {
    format!("rank {rank} could not read its snapshots; its own output has the error")
}
