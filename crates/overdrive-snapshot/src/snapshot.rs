use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use overdrive_optim::StateDict;
use overdrive_safetensors::MappedFile;
use serde::de::DeserializeOwned;
use tch::Tensor;

use crate::contents::file_name;
use crate::manifest::Manifest;
use crate::{Error, Result, Scope};

/// How many differences an error names.
const NAMED: usize = 8;

/// A whole snapshot on the disk.
#[derive(Debug, Clone)]
pub struct Snapshot {
    path: PathBuf,
    manifest: Manifest,
}

impl Snapshot {
    /// Opens the snapshot in `folder` and reads every byte of it to compare checksums.
    ///
    /// # Errors
    /// [`Error::Damaged`] with what is wrong, [`Error::Io`].
    pub fn open(folder: impl AsRef<Path>) -> Result<Snapshot> {
        let snapshot = Snapshot::look(folder.as_ref())?;
        snapshot.manifest.verify(&snapshot.path)?;
        Ok(snapshot)
    }

    /// Opens it by its list alone: files are there and have their lengths.
    pub(crate) fn look(folder: &Path) -> Result<Snapshot> {
        Ok(Snapshot {
            path: folder.to_path_buf(),
            manifest: Manifest::read(folder)?,
        })
    }

    /// Reads every byte to compare checksums.
    pub(crate) fn verify(&self) -> Result<()> {
        self.manifest.verify(&self.path)
    }

    /// Its folder.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The steps that were done.
    pub fn step(&self) -> u64 {
        self.manifest.step
    }

    /// How many processes wrote it.
    pub fn world_size(&self) -> usize {
        self.manifest.world_size
    }

    /// The metric of the model at this step ([`Contents::metric`](crate::Contents::metric)).
    pub fn metric(&self) -> Option<f64> {
        self.manifest.metric
    }

    /// Bytes of all its files.
    pub fn bytes(&self) -> u64 {
        self.manifest.files.iter().map(|file| file.bytes).sum()
    }

    /// The names of its files.
    pub fn files(&self) -> impl Iterator<Item = &str> {
        self.manifest.files.iter().map(|file| file.name.as_str())
    }

    /// Whether it has this part.
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

    /// The file of tensors `name`, mapped.
    ///
    /// # Errors
    /// [`Error::NoPart`], [`Error::Safetensors`].
    pub fn tensors(&self, name: &str, scope: Scope, rank: usize) -> Result<MappedFile> {
        Ok(MappedFile::open(self.part(
            name,
            scope,
            rank,
            "safetensors",
        )?)?)
    }

    /// The state `name` of an optimizer or of averages.
    ///
    /// # Errors
    /// [`Error::NoPart`], [`Error::State`].
    pub fn state(&self, name: &str, scope: Scope, rank: usize) -> Result<StateDict> {
        Ok(StateDict::load(self.part(
            name,
            scope,
            rank,
            "safetensors",
        )?)?)
    }

    /// The value `name`.
    ///
    /// # Errors
    /// [`Error::NoPart`], [`Error::Damaged`] for one of another type.
    pub fn document<T: DeserializeOwned>(
        &self,
        name: &str,
        scope: Scope,
        rank: usize,
    ) -> Result<T> {
        let path = self.part(name, scope, rank, "json")?;
        let bytes = std::fs::read(&path).map_err(Error::io("read", &path))?;
        serde_json::from_slice(&bytes)
            .map_err(|error| Error::damaged(&self.path, format!("{name}.json: {error}")))
    }

    /// Copies the tensors `name` into `targets`, which must be exactly those of the snapshot, with their
    /// shapes. Kinds and devices may differ.
    ///
    /// # Errors
    /// [`Error::Differs`] naming every difference: nothing is copied then. [`Error::NoPart`],
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
            let more = differences.len().saturating_sub(NAMED);
            differences.truncate(NAMED);
            if more > 0 {
                differences.push(format!("and {more} more"));
            }
            return Err(Error::Differs {
                path: self.path.clone(),
                part: name.to_owned(),
                differences,
            });
        }
        for (name, target) in &targets {
            file.tensor(name)?.copy_into(target)?;
        }
        Ok(())
    }

    fn part(&self, name: &str, scope: Scope, rank: usize, format: &str) -> Result<PathBuf> {
        let file = file_name(name, scope, rank, format);
        if self.files().any(|own| own == file) {
            return Ok(self.path.join(file));
        }
        Err(Error::NoPart {
            path: self.path.clone(),
            part: file,
            available: self.files().map(str::to_owned).collect(),
        })
    }
}
