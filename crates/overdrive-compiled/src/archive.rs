//! A look into a package before any code of it is loaded.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

use zip::ZipArchive;

use crate::{Error, Manifest, Result};

/// The newest version of the archive that libtorch 2.11 writes and reads.
const ARCHIVE_VERSION: &str = "0";

/// What a package (`.pt2`) holds.
///
/// ```no_run
/// // Needs a package, which only Python can make.
/// let package = overdrive_compiled::PackageInfo::read("model.pt2")?;
/// for model in package.models() {
///     println!("{} for {}", model.name, model.device());
/// }
/// # Ok::<(), overdrive_compiled::Error>(())
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
    /// What the package says of it: PyTorch's own keys, which begin with `AOTI_`, and those that were
    /// given when it was compiled.
    pub metadata: BTreeMap<String, String>,
    /// What compile_package.py wrote down; `None` for a package made otherwise.
    pub manifest: Option<Manifest>,
}

impl ModelInfo {
    /// For which device it was compiled: `cpu`, `cuda`; empty where it does not say.
    #[must_use]
    pub fn device(&self) -> &str {
        self.metadata("AOTI_DEVICE_KEY")
    }

    /// The metadata under `key`, or nothing.
    #[must_use]
    pub fn metadata(&self, key: &str) -> &str {
        self.metadata.get(key).map_or("", String::as_str)
    }
}

impl PackageInfo {
    /// Reads the whole file and compares every checksum: libtorch itself leaves them out, and would load
    /// damaged code. Takes as long as reading the file does.
    ///
    /// # Errors
    /// [`Error::Io`] if it cannot be read, [`Error::Damaged`] if it is no package or not a whole one,
    /// [`Error::BadManifest`] for metadata of a later version.
    pub fn read(path: impl AsRef<Path>) -> Result<PackageInfo> {
        let path = path.as_ref();
        let damaged = |problem: String| Error::Damaged {
            path: path.to_owned(),
            problem,
        };
        let io = |source| Error::Io {
            path: path.to_owned(),
            source,
        };
        let file = File::open(path).map_err(io)?;
        if file.metadata().map_err(io)?.is_dir() {
            return Err(damaged("it is a folder".to_owned()));
        }
        let mut archive = ZipArchive::new(file).map_err(|error| damaged(error.to_string()))?;
        let mut contents = Contents::default();
        for index in 0..archive.len() {
            let mut entry = archive
                .by_index(index)
                .map_err(|error| damaged(error.to_string()))?;
            let name = entry
                .name()
                .map_err(|error| damaged(error.to_string()))?
                .into_owned();
            if entry.enclosed_name().is_none() {
                return Err(damaged(format!(
                    "its entry {name:?} leads out of its folder"
                )));
            }
            let small = contents.wants(&name);
            let mut text = Vec::new();
            let read = match small {
                true => entry.read_to_end(&mut text).map(|_| ()),
                false => std::io::copy(&mut entry, &mut std::io::sink()).map(|_| ()),
            };
            read.map_err(|error| damaged(format!("its entry {name:?}: {error}")))?;
            contents
                .add(&name, small.then_some(text))
                .map_err(damaged)?;
        }
        let models = contents.models(path)?;
        Ok(PackageInfo {
            path: path.to_owned(),
            models,
        })
    }

    /// The file.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Its models, by name.
    #[must_use]
    pub fn models(&self) -> &[ModelInfo] {
        &self.models
    }

    /// The model of this name, or the only one.
    ///
    /// # Errors
    /// [`Error::NoSuchModel`] where there is none, or several and no name.
    pub fn model(&self, name: Option<&str>) -> Result<&ModelInfo> {
        let found = match (name, self.models.as_slice()) {
            (None, [only]) => Some(only),
            (None, _) => None,
            (Some(name), models) => models.iter().find(|model| model.name == name),
        };
        found.ok_or_else(|| Error::NoSuchModel {
            path: self.path.clone(),
            asked: name
                .unwrap_or("(none was named, and there are several)")
                .to_owned(),
            models: self.models.iter().map(|model| model.name.clone()).collect(),
        })
    }
}

/// What was seen while the archive was read.
#[derive(Default)]
struct Contents {
    format: Option<String>,
    version: Option<String>,
    models: BTreeMap<String, Parts>,
}

#[derive(Default)]
struct Parts {
    libraries: usize,
    metadata: Option<Vec<u8>>,
}

impl Contents {
    /// Whether the text of an entry is wanted, not only its checksum.
    fn wants(&self, name: &str) -> bool {
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
        let parts = self.models.entry(model.to_owned()).or_default();
        parts.libraries += usize::from(file.ends_with(".so") || file.ends_with(".pyd"));
        if file.ends_with(".wrapper_metadata.json") {
            if parts.metadata.is_some() {
                return Err(format!("model {model:?} has two files of metadata"));
            }
            parts.metadata = text;
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
                None => "it is a zip archive without the entry archive_format".to_owned(),
                Some(format) => format!("its format is {format:?}, not \"pt2\""),
            };
            return Err(damaged(found));
        }
        if let Some(version) = self.version.filter(|version| version != ARCHIVE_VERSION) {
            return Err(damaged(format!(
                "its archive has version {version}, and libtorch 2.11 reads version {ARCHIVE_VERSION}"
            )));
        }
        if self.models.is_empty() {
            return Err(damaged(
                "it holds no compiled model (an exported program alone cannot be run without Python)"
                    .to_owned(),
            ));
        }
        let parse = |(name, parts): (String, Parts)| {
            if parts.libraries != 1 {
                let count = parts.libraries;
                return Err(damaged(format!(
                    "model {name:?} has {count} libraries, not one"
                )));
            }
            let bytes = parts
                .metadata
                .ok_or_else(|| damaged(format!("model {name:?} has no metadata")))?;
            let metadata: BTreeMap<String, String> = serde_json::from_slice(&bytes)
                .map_err(|error| damaged(format!("the metadata of model {name:?}: {error}")))?;
            let manifest = metadata
                .get("overdrive")
                .map(|text| Manifest::parse(text))
                .transpose()
                .map_err(|problem| Error::BadManifest {
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

/// An entry's name without the folder that all entries lie in.
fn inner(name: &str) -> &str {
    name.split_once('/').map_or(name, |(_, inner)| inner)
}
