//! The writing of one snapshot.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use crate::contents::{Content, Entry, Scope};
use crate::folder::{flush, path_of, publish, unfinished};
use crate::manifest::{FileEntry, MANIFEST, Manifest};
use crate::{Error, Result};
use overdrive_core::Error as CommonError;

/// The interval at which a rank checks for the files of another: short beside the time that writing takes, and
/// long enough not to load a network file system.
const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// The inputs of writing one snapshot.
#[derive(Debug)]
pub(crate) struct SaveJob {
    pub(crate) folder: PathBuf,
    pub(crate) step: u64,
    pub(crate) metric: Option<f64>,
    pub(crate) entries: Vec<Entry>,
    pub(crate) rank: usize,
    pub(crate) world_size: usize,
    /// The id of the run, which tells its unfinished folders from those that a killed run has left.
    pub(crate) run: u64,
    pub(crate) peer_timeout: Duration,
}

impl SaveJob {
    /// Writes the snapshot. When it returns, the snapshot is complete, under its name and on the disk; after an
    /// error nothing is left of it. Returns the folder and the number of bytes.
    pub(crate) fn write(&self) -> Result<(PathBuf, u64)> {
        let temporary = unfinished(&self.folder, self.step, self.run);
        let written = self.write_in(&temporary);
        if written.is_err() {
            if self.rank == 0 {
                // The error of the write is returned, so one of the clean-up is dropped.
                let _ = fs::remove_dir_all(&temporary);
            } else {
                // Rank 0 sees this file and need not wait for the timeout.
                let _ = File::create(temporary.join(failed_file(self.rank)));
            }
        }
        written
    }

    fn write_in(&self, temporary: &Path) -> Result<(PathBuf, u64)> {
        fs::create_dir_all(temporary).map_err(CommonError::io("create the folder", temporary))?;
        let mut files = Vec::new();
        let own = |entry: &&Entry| entry.scope == Scope::Rank || self.rank == 0;
        for entry in self.entries.iter().filter(own) {
            let name = entry.file_name(self.rank);
            write_entry(entry, &temporary.join(&name))?;
            // Hashed from the disk and not from memory, so that the checksum covers what was written.
            files.push(FileEntry::of(temporary, &name)?);
        }
        let path = path_of(&self.folder, self.step);
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
        // The files' names must be on the disk before the folder gets the name of a snapshot.
        flush(temporary)?;
        publish(temporary, &path)?;
        Ok((path, bytes))
    }

    /// Waits until another rank has written its entries, and returns its files.
    fn wait_for_rank(&self, temporary: &Path, rank: usize) -> Result<Vec<FileEntry>> {
        let list = temporary.join(done_file(rank));
        let lost = |reason: String| Error::Peer {
            rank,
            step: self.step,
            reason,
        };
        let deadline = Instant::now() + self.peer_timeout;
        while !list.exists() {
            if temporary.join(failed_file(rank)).exists() {
                return Err(lost("it failed; its own output has the error".into()));
            }
            if Instant::now() >= deadline {
                return Err(lost(self.timeout_reason()));
            }
            thread::sleep(POLL_INTERVAL);
        }
        let bytes = fs::read(&list).map_err(CommonError::io("read", &list))?;
        let files: Vec<FileEntry> =
            serde_json::from_slice(&bytes).map_err(|error| lost(error.to_string()))?;
        // The lists of the other ranks must not be part of the snapshot.
        fs::remove_file(&list).map_err(CommonError::io("delete", &list))?;
        Ok(files)
    }

    fn wait_for_rank_0(&self, temporary: &Path, path: &Path) -> Result<()> {
        let lost = |reason: String| Error::Peer {
            rank: 0,
            step: self.step,
            reason,
        };
        let deadline = Instant::now() + self.peer_timeout;
        // Rank 0 renames the folder when it has succeeded, and removes it when it has failed.
        while temporary.exists() {
            if Instant::now() >= deadline {
                return Err(lost(self.timeout_reason()));
            }
            thread::sleep(POLL_INTERVAL);
        }
        match path.join(MANIFEST).exists() {
            true => Ok(()),
            false => Err(lost("it failed; its own output has the error".into())),
        }
    }

    fn timeout_reason(&self) -> String {
        let seconds = self.peer_timeout.as_secs_f64();
        format!("it did not finish within `peer_timeout`, {seconds} s")
    }
}

fn done_file(rank: usize) -> String {
    format!(".rank-{rank}.done")
}

fn failed_file(rank: usize) -> String {
    format!(".rank-{rank}.failed")
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
            overdrive_safetensors::write_bytes(path, bytes)?;
        }
    }
    Ok(())
}

fn write_json(path: &Path, value: &impl serde::Serialize) -> Result<()> {
    let bytes = serde_json::to_vec_pretty(value)
        .map_err(|error| CommonError::io("write", path)(std::io::Error::other(error)))?;
    Ok(overdrive_safetensors::write_bytes(path, &bytes)?)
}
