//! One snapshot, onto the disk.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use crate::contents::{Content, Part, Scope};
use crate::folder::{flush, path_of, publish, unfinished};
use crate::manifest::{FileEntry, MANIFEST, Manifest};
use crate::{Error, Result};

/// How often a rank looks for what another has written.
const POLL: Duration = Duration::from_millis(20);

/// Everything that writing one snapshot takes.
#[derive(Debug)]
pub(crate) struct Job {
    pub(crate) folder: PathBuf,
    pub(crate) step: u64,
    pub(crate) metric: Option<f64>,
    pub(crate) parts: Vec<Part>,
    pub(crate) rank: usize,
    pub(crate) world_size: usize,
    /// Tells the unfinished folders of this run from those that a killed one has left.
    pub(crate) run: u64,
    pub(crate) peer_timeout: Duration,
}

impl Job {
    /// Writes the snapshot; when this returns it is whole, under its name and on the disk. After an error
    /// nothing is left of it.
    pub(crate) fn write(&self) -> Result<(PathBuf, u64)> {
        let temporary = unfinished(&self.folder, self.step, self.run);
        let written = self.write_in(&temporary);
        if written.is_err() {
            if self.rank == 0 {
                // The first error is the one to tell.
                let _ = fs::remove_dir_all(&temporary);
            } else {
                let _ = File::create(temporary.join(failed(self.rank)));
            }
        }
        written
    }

    fn write_in(&self, temporary: &Path) -> Result<(PathBuf, u64)> {
        fs::create_dir_all(temporary).map_err(Error::io("make the folder", temporary))?;
        let mut files = Vec::new();
        let own = |part: &&Part| part.scope == Scope::Rank || self.rank == 0;
        for part in self.parts.iter().filter(own) {
            let name = part.file_name(self.rank);
            write_part(part, &temporary.join(&name))?;
            files.push(FileEntry::of(temporary, &name)?);
        }
        let path = path_of(&self.folder, self.step);
        if self.rank != 0 {
            let bytes = files.iter().map(|file| file.bytes).sum();
            write_json(&temporary.join(done(self.rank)), &files)?;
            self.wait_for_rank_0(temporary, &path)?;
            return Ok((path, bytes));
        }
        for rank in 1..self.world_size {
            files.extend(self.wait_for_part(temporary, rank)?);
        }
        let bytes = files.iter().map(|file| file.bytes).sum();
        let manifest = Manifest::new(self.step, self.world_size, self.metric, files);
        write_json(&temporary.join(MANIFEST), &manifest)?;
        flush(temporary)?;
        publish(temporary, &path)?;
        Ok((path, bytes))
    }

    /// The files of another rank, when it has written them.
    fn wait_for_part(&self, temporary: &Path, rank: usize) -> Result<Vec<FileEntry>> {
        let list = temporary.join(done(rank));
        let lost = |reason: String| Error::Peer {
            rank,
            step: self.step,
            reason,
        };
        let deadline = Instant::now() + self.peer_timeout;
        while !list.exists() {
            if temporary.join(failed(rank)).exists() {
                return Err(lost(
                    "it could not write it; its own output says why".into(),
                ));
            }
            if Instant::now() >= deadline {
                return Err(lost(self.too_late()));
            }
            thread::sleep(POLL);
        }
        let bytes = fs::read(&list).map_err(Error::io("read", &list))?;
        let files: Vec<FileEntry> =
            serde_json::from_slice(&bytes).map_err(|error| lost(error.to_string()))?;
        fs::remove_file(&list).map_err(Error::io("delete", &list))?;
        Ok(files)
    }

    fn wait_for_rank_0(&self, temporary: &Path, path: &Path) -> Result<()> {
        let lost = |reason: String| Error::Peer {
            rank: 0,
            step: self.step,
            reason,
        };
        let deadline = Instant::now() + self.peer_timeout;
        // The folder goes away by getting its name, or by rank 0 giving up.
        while temporary.exists() {
            if Instant::now() >= deadline {
                return Err(lost(self.too_late()));
            }
            thread::sleep(POLL);
        }
        match path.join(MANIFEST).exists() {
            true => Ok(()),
            false => Err(lost("it gave up; its own output says why".into())),
        }
    }

    fn too_late(&self) -> String {
        format!("no word of it in {} s", self.peer_timeout.as_secs_f64())
    }
}

fn done(rank: usize) -> String {
    format!(".rank-{rank}.done")
}

fn failed(rank: usize) -> String {
    format!(".rank-{rank}.failed")
}

fn write_part(part: &Part, path: &Path) -> Result<()> {
    match &part.content {
        Content::Tensors(tensors) => {
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
        .map_err(|error| Error::io("write", path)(std::io::Error::other(error)))?;
    Ok(overdrive_safetensors::write_bytes(path, &bytes)?)
}
