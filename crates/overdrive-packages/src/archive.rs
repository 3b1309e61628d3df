//! The archive of a package, read and verified before any code of it is loaded.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

use overdrive_core::Error as CommonError;
use zip::ZipArchive;

use crate::{Error, Manifest, Result};

/// The newest archive version that libtorch 2.11 and 2.13 write and read.
const ARCHIVE_VERSION: &str = "0";

/// The size limit in bytes for all metadata of a package; one model's takes a few kilobytes. It bounds memory, since a
/// zip entry may unpack to a thousand times its compressed size.
const MAX_TEXT_BYTES: u64 = 16 << 20;

/// The models of a package (`.pt2`).
///
/// ```no_run
/// // Needs a package, which only Python can make.
/// let package = overdrive_packages::PackageInfo::read("model.pt2")?;
/// for model in package.models() {
///     println!("{} for {}", model.name, model.device());
/// }
/// # Ok::<(), overdrive_packages::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct PackageInfo {
    path: PathBuf,
    models: Vec<ModelInfo>,
}

/// A model of a package.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct ModelInfo {
    /// Its name in the package.
    pub name: String,
    /// The metadata of the model: PyTorch's own keys, which begin with `AOTI_`, and those that the compilation
    /// added.
    pub metadata: BTreeMap<String, String>,
    /// The manifest that compile_package.py wrote; `None` for a package made without it.
    pub manifest: Option<Manifest>,
}

impl ModelInfo {
    /// Returns the device that the model was compiled for, `cpu` or `cuda`; empty if the metadata does not name one.
    #[must_use]
    pub fn device(&self) -> &str {
        self.metadata("AOTI_DEVICE_KEY")
    }

    /// Returns the metadata under `key`; empty if there is none.
    #[must_use]
    pub fn metadata(&self, key: &str) -> &str {
        self.metadata.get(key).map_or("", String::as_str)
    }
}

impl PackageInfo {
    /// Reads the whole file and verifies every checksum. libtorch does not verify them, and would load damaged
    /// code.
    ///
    /// # Errors
    /// [`overdrive_core::Error::Io`] if the file cannot be read, [`Error::Damaged`] if it is not a package, is
    /// damaged, or has more than 16 MiB of metadata, [`Error::InvalidManifest`] for metadata of a later version.
    pub fn read(path: impl AsRef<Path>) -> Result<PackageInfo> {
        let path = path.as_ref();
        let damaged = |problem: String| Error::Damaged {
            path: path.to_owned(),
            problem,
        };
        let file = File::open(path).map_err(CommonError::io("open", path))?;
        // On Linux, opening a folder succeeds; reading it would fail with a message about zip archives.
        let metadata = file.metadata().map_err(CommonError::io("read", path))?;
        if metadata.is_dir() {
            return Err(damaged("it is a folder".to_owned()));
        }
        let mut archive = ZipArchive::new(file).map_err(|error| damaged(error.to_string()))?;
        let mut contents = Contents::default();
        let mut text_left = MAX_TEXT_BYTES;
        for index in 0..archive.len() {
            let mut entry = archive
                .by_index(index)
                .map_err(|error| damaged(error.to_string()))?;
            let name = entry
                .name()
                .map_err(|error| damaged(error.to_string()))?
                .into_owned();
            // libtorch unpacks entries by their names: `../` would write outside its temporary folder.
            if entry.enclosed_name().is_none() {
                return Err(damaged(format!(
                    "its entry {name:?} leads out of the package's folder"
                )));
            }
            let is_text = contents.is_text(&name);
            let too_long = || {
                damaged(format!(
                    "its entry {name:?} brings its metadata to more than {MAX_TEXT_BYTES} bytes"
                ))
            };
            // Checks the declared size here and the real size below: either may be wrong.
            if is_text && entry.size() > text_left {
                return Err(too_long());
            }
            let mut text = Vec::new();
            // Libraries and weights may take gigabytes, so they are read only for their checksum, which the reader
            // compares at the end of the entry.
            let read = match is_text {
                true => {
                    let mut entry = entry.take(text_left + 1);
                    entry.read_to_end(&mut text).map(|_| ())
                }
                false => std::io::copy(&mut entry, &mut std::io::sink()).map(|_| ()),
            };
            read.map_err(|error| damaged(format!("its entry {name:?}: {error}")))?;
            text_left = text_left
                .checked_sub(text.len() as u64)
                .ok_or_else(too_long)?;
            contents
                .add(&name, is_text.then_some(text))
                .map_err(damaged)?;
        }
        let models = contents.models(path)?;
        Ok(PackageInfo {
            path: path.to_owned(),
            models,
        })
    }

    /// Returns the path of the file.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the models, sorted by name.
    #[must_use]
    pub fn models(&self) -> &[ModelInfo] {
        &self.models
    }

    /// Returns the model called `name`, or the only model if `name` is `None`.
    ///
    /// # Errors
    /// [`Error::NoSuchModel`] if there is no such model, or if there are several and no name was given.
    pub fn model(&self, name: Option<&str>) -> Result<&ModelInfo> {
        let found = match (name, self.models.as_slice()) {
            (None, [only]) => Some(only),
            (None, _) => None,
            (Some(name), models) => models.iter().find(|model| model.name == name),
        };
        found.ok_or_else(|| Error::NoSuchModel {
            path: self.path.clone(),
            requested: name
                .unwrap_or("(no name was given, and there are several)")
                .to_owned(),
            models: self.models.iter().map(|model| model.name.clone()).collect(),
        })
    }
}

/// The entries read from the archive.
#[derive(Default)]
struct Contents {
    format: Option<String>,
    version: Option<String>,
    models: BTreeMap<String, ModelFiles>,
}

#[derive(Default)]
struct ModelFiles {
    libraries: usize,
    metadata: Option<Vec<u8>>,
}

impl Contents {
    /// Returns `true` for an entry whose text is parsed as well as verified.
    fn is_text(&self, name: &str) -> bool {
        let inner = inner(name);
        matches!(inner, "archive_format" | "archive_version") || inner.ends_with("_metadata.json")
    }

    fn add(&mut self, name: &str, text: Option<Vec<u8>>) -> std::result::Result<(), String> {
        let inner = inner(name);
        let as_text = |bytes: Option<&[u8]>| {
            let bytes = bytes.unwrap_or_default();
            String::from_utf8_lossy(bytes).trim().to_owned()
        };
        match inner {
            "archive_format" => self.format = Some(as_text(text.as_deref())),
            "archive_version" => self.version = Some(as_text(text.as_deref())),
            _ => {}
        }
        let Some((model, file)) = inner
            .strip_prefix("data/aotinductor/")
            .and_then(|rest| rest.split_once('/'))
        else {
            return Ok(());
        };
        let files = self.models.entry(model.to_owned()).or_default();
        // AOTInductor names its library `.so`, on Windows `.pyd`.
        files.libraries += usize::from(file.ends_with(".so") || file.ends_with(".pyd"));
        if file.ends_with(".wrapper_metadata.json") {
            if files.metadata.is_some() {
                return Err(format!("model {model:?} has two files of metadata"));
            }
            files.metadata = text;
        }
        Ok(())
    }

    fn models(self, path: &Path) -> Result<Vec<ModelInfo>> {
        let damaged = |problem: String| Error::Damaged {
            path: path.to_owned(),
            problem,
        };
        if self.format.as_deref() != Some("pt2") {
            let found = match self.format {
                None => "it is a zip archive without the entry `archive_format`".to_owned(),
                Some(format) => format!("its format is {format:?}, not \"pt2\""),
            };
            return Err(damaged(found));
        }
        if let Some(version) = self.version.filter(|version| version != ARCHIVE_VERSION) {
            return Err(damaged(format!(
                "its archive has version {version}; libtorch reads version {ARCHIVE_VERSION}"
            )));
        }
        if self.models.is_empty() {
            return Err(damaged(
                "it holds no compiled model (an exported program that is not compiled needs Python)"
                    .to_owned(),
            ));
        }
        let parse = |(name, files): (String, ModelFiles)| {
            // libtorch loads the first library that it finds; with two, their order would decide.
            if files.libraries != 1 {
                let count = files.libraries;
                return Err(damaged(format!(
                    "model {name:?} has {count} libraries, not one"
                )));
            }
            let bytes = files
                .metadata
                .ok_or_else(|| damaged(format!("model {name:?} has no metadata")))?;
            let metadata: BTreeMap<String, String> = serde_json::from_slice(&bytes)
                .map_err(|error| damaged(format!("the metadata of model {name:?}: {error}")))?;
            let manifest = metadata
                .get("overdrive")
                .map(|text| Manifest::parse(text))
                .transpose()
                .map_err(|problem| Error::InvalidManifest {
                    path: path.to_owned(),
                    model: name.clone(),
                    problem,
                })?;
            Ok(ModelInfo {
                name,
                metadata,
                manifest,
            })
        };
        self.models.into_iter().map(parse).collect()
    }
}

/// Returns an entry's name without the top folder, whose name `torch.export` chooses.
fn inner(name: &str) -> &str {
    name.split_once('/').map_or(name, |(_, inner)| inner)
}
