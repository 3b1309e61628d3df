//! The list of a snapshot's files: what makes it whole.

use std::fs::File;
use std::io::{self, Read};
use std::path::Path;

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::{Error, Result};

/// The name of the list in the snapshot's folder.
pub(crate) const MANIFEST: &str = "manifest.json";

const FORMAT_VERSION: u32 = 1;

/// Everything about a snapshot but its contents.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Manifest {
    pub(crate) format_version: u32,
    pub(crate) step: u64,
    pub(crate) world_size: usize,
    /// What the model is worth, where it was evaluated.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) metric: Option<f64>,
    /// In order of their names.
    pub(crate) files: Vec<FileEntry>,
    /// SHA-256 of this list without it.
    checksum: String,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct FileEntry {
    pub(crate) name: String,
    pub(crate) bytes: u64,
    /// In hexadecimal, as `sha256sum` prints it.
    pub(crate) sha256: String,
}

impl Manifest {
    pub(crate) fn new(
        step: u64,
        world_size: usize,
        metric: Option<f64>,
        mut files: Vec<FileEntry>,
    ) -> Manifest {
        files.sort_by(|a, b| a.name.cmp(&b.name));
        let mut manifest = Manifest {
            format_version: FORMAT_VERSION,
            step,
            world_size,
            // JSON has no infinities; a loss of NaN is no best.
            metric: metric.filter(|metric| metric.is_finite()),
            files,
            checksum: String::new(),
        };
        manifest.checksum = manifest.own_checksum();
        manifest
    }

    fn own_checksum(&self) -> String {
        let Manifest {
            format_version,
            step,
            world_size,
            metric,
            ..
        } = self;
        let metric = metric.map(f64::to_bits);
        let mut hasher = Sha256::new();
        hasher.update(format!("{format_version} {step} {world_size} {metric:?}\n"));
        for FileEntry {
            name,
            bytes,
            sha256,
        } in &self.files
        {
            hasher.update(format!("{name} {bytes} {sha256}\n"));
        }
        hexadecimal(&hasher.finalize())
    }

    /// Reads the list of the snapshot `folder`, and checks that every file has its length.
    pub(crate) fn read(folder: &Path) -> Result<Manifest> {
        let path = folder.join(MANIFEST);
        let bytes = match std::fs::read(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                return Err(Error::damaged(folder, "its manifest.json is missing"));
            }
            read => read.map_err(Error::io("read", &path))?,
        };
        let manifest: Manifest = serde_json::from_slice(&bytes)
            .map_err(|error| Error::damaged(folder, format!("its manifest.json: {error}")))?;
        if manifest.format_version != FORMAT_VERSION {
            let found = manifest.format_version;
            let reason = format!("it is of format {found}, expected format {FORMAT_VERSION}");
            return Err(Error::damaged(folder, reason));
        }
        if manifest.checksum != manifest.own_checksum() {
            return Err(Error::damaged(folder, "its manifest.json was changed"));
        }
        for file in &manifest.files {
            let reason = match folder.join(&file.name).metadata() {
                Ok(metadata) if metadata.len() == file.bytes => continue,
                Ok(metadata) => format!("{} instead of {} bytes", metadata.len(), file.bytes),
                Err(error) => error.to_string(),
            };
            return Err(Error::damaged(folder, format!("{}: {reason}", file.name)));
        }
        Ok(manifest)
    }

    /// Reads every byte of every file and compares checksums.
    pub(crate) fn verify(&self, folder: &Path) -> Result<()> {
        for file in &self.files {
            if FileEntry::of(folder, &file.name)?.sha256 != file.sha256 {
                let reason = format!("{}: its bytes were changed", file.name);
                return Err(Error::damaged(folder, reason));
            }
        }
        Ok(())
    }
}

impl FileEntry {
    /// Of a file as it lies there.
    pub(crate) fn of(folder: &Path, name: &str) -> Result<FileEntry> {
        let path = folder.join(name);
        let mut file = File::open(&path).map_err(Error::io("read", &path))?;
        let mut hasher = Sha256::new();
        let mut buffer = vec![0; 1 << 20];
        let mut bytes = 0;
        loop {
            let read = match file.read(&mut buffer) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                read => read.map_err(Error::io("read", &path))?,
            };
            if read == 0 {
                break;
            }
            hasher.update(&buffer[..read]);
            bytes += read as u64;
        }
        Ok(FileEntry {
            name: name.to_owned(),
            bytes,
            sha256: hexadecimal(&hasher.finalize()),
        })
    }
}

fn hexadecimal(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}
