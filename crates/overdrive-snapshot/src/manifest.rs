//! The manifest of a snapshot: its files with their lengths and checksums.

use std::fs::File;
use std::io::{self, Read};
use std::path::Path;

use overdrive_safetensors::file_in;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::{Error, Result};
use overdrive_core::Error as CommonError;

/// The file name of the manifest in the snapshot's folder.
pub(crate) const MANIFEST: &str = "manifest.json";

const FORMAT_VERSION: u32 = 1;
/// The size of the buffer through which files are hashed, in bytes.
const HASH_BUFFER_BYTES: usize = 1 << 20;

/// The description of a snapshot.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Manifest {
    pub(crate) format_version: u32,
    pub(crate) step: u64,
    pub(crate) world_size: usize,
    /// The metric of the model, if it was evaluated.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) metric: Option<f64>,
    /// The files, ordered by name.
    pub(crate) files: Vec<FileEntry>,
    /// The SHA-256 of all other fields, in hexadecimal.
    checksum: String,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct FileEntry {
    pub(crate) name: String,
    pub(crate) bytes: u64,
    /// The SHA-256 of the file in hexadecimal, as `sha256sum` prints it.
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
            // JSON has neither infinities nor NaN, and a model with such a loss is not the best one.
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
        // The bits of the metric, because its decimal form may parse to a neighboring value.
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

    /// Reads the manifest of the snapshot in `folder`, and checks that every file exists with the right length.
    pub(crate) fn read(folder: &Path) -> Result<Manifest> {
        let path = folder.join(MANIFEST);
        let bytes = match std::fs::read(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                return Err(Error::damaged(folder, "its manifest.json is missing"));
            }
            Err(error) if error.kind() == io::ErrorKind::NotADirectory => {
                return Err(Error::damaged(folder, "it is a file and not a folder"));
            }
            read => read.map_err(CommonError::io("read", &path))?,
        };
        let manifest: Manifest = serde_json::from_slice(&bytes)
            .map_err(|error| Error::damaged(folder, format!("its manifest.json: {error}")))?;
        // The version is checked before the checksum, because other versions may hash the fields in another order.
        if manifest.format_version != FORMAT_VERSION {
            let found = manifest.format_version;
            let reason = format!("it has format version {found}, expected {FORMAT_VERSION}");
            return Err(Error::damaged(folder, reason));
        }
        if manifest.checksum != manifest.own_checksum() {
            return Err(Error::damaged(folder, "its manifest.json was changed"));
        }
        for file in &manifest.files {
            let path = file_in(folder, &file.name, "files of manifest.json")
                .map_err(|error| Error::damaged(folder, error.to_string()))?;
            let reason = match path.metadata() {
                Ok(metadata) if metadata.len() == file.bytes => continue,
                Ok(metadata) => {
                    format!("it has {} bytes instead of {}", metadata.len(), file.bytes)
                }
                Err(error) if error.kind() == io::ErrorKind::NotFound => error.to_string(),
                // The file may be intact; the system only failed to read its metadata.
                Err(error) => return Err(CommonError::io("read", path)(error).into()),
            };
            return Err(Error::damaged(folder, format!("{}: {reason}", file.name)));
        }
        Ok(manifest)
    }

    /// Reads all files and compares their checksums.
    pub(crate) fn verify(&self, folder: &Path) -> Result<()> {
        let mut files = self.files.iter();
        files.try_for_each(|file| file.verify(folder))
    }
}

impl FileEntry {
    /// Reads the file and compares its checksum.
    pub(crate) fn verify(&self, folder: &Path) -> Result<()> {
        let problem = match FileEntry::of(folder, &self.name) {
            Ok(found) if found.sha256 == self.sha256 => return Ok(()),
            Ok(_) => "its bytes were changed".to_owned(),
            Err(Error::Common(CommonError::Io { source, .. }))
                if source.kind() == io::ErrorKind::NotFound =>
            {
                source.to_string()
            }
            Err(error) => return Err(error),
        };
        let reason = format!("{}: {problem}", self.name);
        Err(Error::damaged(folder, reason))
    }

    /// Reads the file `name` and returns its entry.
    pub(crate) fn of(folder: &Path, name: &str) -> Result<FileEntry> {
        let path = folder.join(name);
        let mut file = File::open(&path).map_err(CommonError::io("read", &path))?;
        let mut hasher = Sha256::new();
        let mut buffer = vec![0; HASH_BUFFER_BYTES];
        let mut bytes = 0;
        loop {
            let read = match file.read(&mut buffer) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                read => read.map_err(CommonError::io("read", &path))?,
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
