use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use overdrive_optim::StateDict;
use overdrive_safetensors::MappedFile;
use serde::de::DeserializeOwned;
use tch::Tensor;

use crate::contents::file_name;
use crate::manifest::Manifest;
use crate::{Error, Result, Scope};
use overdrive_core::Error as CommonError;

/// The number of differences that an error names: enough to see the pattern in a model with many layers.
const MAX_NAMED_DIFFERENCES: usize = 8;

/// A complete snapshot on disk.
#[derive(Debug, Clone)]
pub struct Snapshot {
    path: PathBuf,
    manifest: Manifest,
}

impl Snapshot {
    /// Opens the snapshot in `folder`, and reads all of its files to verify their checksums.
    ///
    /// # Errors
    /// [`Error::Damaged`] with the reason, [`Error::Common`].
    pub fn open(folder: impl AsRef<Path>) -> Result<Snapshot> {
        let snapshot = Snapshot::open_unverified(folder)?;
        snapshot.manifest.verify(&snapshot.path)?;
        Ok(snapshot)
    }

    /// Returns the snapshots in the folder of a run whose files all exist with the right lengths, the newest first.
    /// Nothing is locked or changed, so a run may be writing there.
    ///
    /// # Errors
    /// [`Error::Common`] if a file cannot be read.
    pub fn list(folder: impl AsRef<Path>) -> Result<Vec<Snapshot>> {
        crate::folder::list(folder.as_ref())
    }

    /// Returns the folders and files in the folder of a run that have the name of a snapshot, such as `checkpoint-120`,
    /// whether they are complete snapshots or not.
    ///
    /// # Errors
    /// [`Error::Common`] if the folder cannot be read.
    pub fn named(run: impl AsRef<Path>) -> Result<Vec<PathBuf>> {
        crate::folder::named(run.as_ref())
    }

    /// Returns the folders `abandoned-<n>` in the folder of a run: each has the snapshots of an abandoned branch.
    ///
    /// # Errors
    /// [`Error::Common`] if the folder cannot be read.
    pub fn abandoned(run: impl AsRef<Path>) -> Result<Vec<PathBuf>> {
        crate::folder::abandoned(run.as_ref())
    }

    /// Returns the folder of the run to which a snapshot in the folder `path` belongs, also one of an abandoned branch.
    pub fn run_folder(path: &Path) -> Option<&Path> {
        crate::folder::run_of(path)
    }

    /// Opens a snapshot by its manifest: checks that the files exist with the right lengths, but does not read them.
    ///
    /// # Errors
    /// [`Error::Damaged`] with the reason, [`Error::Common`].
    pub fn open_unverified(folder: impl AsRef<Path>) -> Result<Snapshot> {
        let folder = folder.as_ref();
        Ok(Snapshot {
            path: folder.to_path_buf(),
            manifest: Manifest::read(folder)?,
        })
    }

    /// Reads all files and compares their checksums.
    pub(crate) fn verify(&self) -> Result<()> {
        self.manifest.verify(&self.path)
    }

    /// Returns the folder of the snapshot.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the number of steps that were done when the snapshot was saved.
    pub fn step(&self) -> u64 {
        self.manifest.step
    }

    /// Returns the number of processes that wrote the snapshot.
    pub fn world_size(&self) -> usize {
        self.manifest.world_size
    }

    /// Returns the metric of the model at this step ([`Contents::metric`](crate::Contents::metric)).
    pub fn metric(&self) -> Option<f64> {
        self.manifest.metric
    }

    /// Returns the total size of all files, in bytes.
    pub fn bytes(&self) -> u64 {
        self.manifest.files.iter().map(|file| file.bytes).sum()
    }

    /// Returns the names of the files.
    pub fn files(&self) -> impl Iterator<Item = &str> {
        self.manifest.files.iter().map(|file| file.name.as_str())
    }

    /// Returns the path of a file of the snapshot, such as `tokenizer.json`, and verifies its checksum; `None` if
    /// the snapshot does not have it.
    ///
    /// # Errors
    /// [`Error::Damaged`], [`Error::Common`].
    pub fn file(&self, name: &str) -> Result<Option<PathBuf>> {
        let mut files = self.manifest.files.iter();
        let Some(file) = files.find(|file| file.name == name) else {
            return Ok(None);
        };
        file.verify(&self.path)?;
        Ok(Some(self.path.join(name)))
    }

    /// Returns `true` if the snapshot has this entry.
    pub fn has(&self, name: &str, scope: Scope, rank: usize) -> bool {
        ["safetensors", "json"].iter().any(|format| {
            self.files()
                .any(|own| own == file_name(name, scope, rank, format))
        })
    }

    pub(crate) fn has_tensors(&self, name: &str, scope: Scope, rank: usize) -> bool {
        let file = file_name(name, scope, rank, "safetensors");
        self.files().any(|own| own == file)
    }

    /// Maps the tensors of the entry `name`.
    ///
    /// # Errors
    /// [`Error::NoEntry`], [`Error::Safetensors`].
    pub fn tensors(&self, name: &str, scope: Scope, rank: usize) -> Result<MappedFile> {
        Ok(MappedFile::open(self.entry_path(
            name,
            scope,
            rank,
            "safetensors",
        )?)?)
    }

    /// Reads the state dict of the entry `name`.
    ///
    /// # Errors
    /// [`Error::NoEntry`], [`Error::State`].
    pub fn state(&self, name: &str, scope: Scope, rank: usize) -> Result<StateDict> {
        Ok(StateDict::load(self.entry_path(
            name,
            scope,
            rank,
            "safetensors",
        )?)?)
    }

    /// Reads the JSON value of the entry `name`.
    ///
    /// # Errors
    /// [`Error::NoEntry`], [`Error::Damaged`] for a value of another type.
    pub fn document<T: DeserializeOwned>(
        &self,
        name: &str,
        scope: Scope,
        rank: usize,
    ) -> Result<T> {
        let path = self.entry_path(name, scope, rank, "json")?;
        let bytes = std::fs::read(&path).map_err(CommonError::io("read", &path))?;
        serde_json::from_slice(&bytes)
            .map_err(|error| Error::damaged(&self.path, format!("{name}.json: {error}")))
    }

    /// Copies the tensors of the entry `name` into `targets`, whose names and shapes must be exactly those of the
    /// snapshot. Kinds and devices may differ.
    ///
    /// # Errors
    /// [`Error::Differs`] with the differences, before anything is copied; [`Error::NoEntry`],
    /// [`Error::Safetensors`].
    pub fn copy_into(
        &self,
        name: &str,
        scope: Scope,
        rank: usize,
        targets: impl IntoIterator<Item = (String, Tensor)>,
    ) -> Result<()> {
        let file = self.tensors(name, scope, rank)?;
        let targets: BTreeMap<String, Tensor> = targets.into_iter().collect();
        // All differences are collected before anything is copied: a half-restored model would be worthless.
        let mut differences = Vec::new();
        for stored in file.tensors() {
            let name = stored.name();
            match targets.get(name) {
                None => differences.push(format!("`{name}` is in the snapshot only")),
                Some(own) if own.size() != stored.shape() => differences.push(format!(
                    "`{name}` is {:?} in the snapshot and {:?} here",
                    stored.shape(),
                    own.size()
                )),
                Some(_) => {}
            }
        }
        let missing = targets.keys().filter(|own| file.tensor(own).is_err());
        differences.extend(missing.map(|own| format!("`{own}` is missing in the snapshot")));
        if !differences.is_empty() {
            let more = differences.len().saturating_sub(MAX_NAMED_DIFFERENCES);
            differences.truncate(MAX_NAMED_DIFFERENCES);
            if more > 0 {
                differences.push(format!("and {more} more"));
            }
            return Err(Error::Differs {
                path: self.path.clone(),
                entry: name.to_owned(),
                differences,
            });
        }
        for (name, target) in &targets {
            file.tensor(name)?.copy_into(target)?;
        }
        Ok(())
    }

    fn entry_path(&self, name: &str, scope: Scope, rank: usize, format: &str) -> Result<PathBuf> {
        let file = file_name(name, scope, rank, format);
        if self.files().any(|own| own == file) {
            return Ok(self.path.join(file));
        }
        Err(Error::NoEntry {
            path: self.path.clone(),
            entry: file,
            available: self.files().map(str::to_owned).collect(),
        })
    }
}
