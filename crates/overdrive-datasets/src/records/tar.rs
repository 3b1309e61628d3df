//! Samples of WebDataset shards.

use std::path::Path;

use serde::de::DeserializeOwned;

use super::{RecordFiles, find_files};
use crate::index::{Members, TarScan, split_name};
use crate::{Dataset, Error, IndexOptions, Result};

/// A sample: files that belong together.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WebSample {
    key: String,
    files: Vec<(String, Vec<u8>)>,
}

impl WebSample {
    /// What its files are called up to the first dot, with the folder.
    pub fn key(&self) -> &str {
        &self.key
    }

    /// The bytes of the file with this extension (what is behind the first dot: `jpg`, `seg.png`).
    pub fn get(&self, extension: &str) -> Option<&[u8]> {
        let file = self.files.iter().find(|(name, _)| name == extension)?;
        Some(&file.1)
    }

    /// The extensions and the bytes of all its files, as they are in the archive.
    pub fn files(&self) -> impl Iterator<Item = (&str, &[u8])> {
        self.files
            .iter()
            .map(|(name, bytes)| (name.as_str(), bytes.as_slice()))
    }

    /// The file with this extension as text.
    ///
    /// # Errors
    /// When there is none, or it is not UTF-8.
    pub fn text(&self, extension: &str) -> Result<&str> {
        std::str::from_utf8(self.file(extension)?)
            .map_err(|error| self.error(extension, error.to_string()))
    }

    /// The file with this extension, read as JSON.
    ///
    /// # Errors
    /// When there is none, or it is something else.
    pub fn json<T: DeserializeOwned>(&self, extension: &str) -> Result<T> {
        serde_json::from_slice(self.file(extension)?)
            .map_err(|error| self.error(extension, error.to_string()))
    }

    fn file(&self, extension: &str) -> Result<&[u8]> {
        self.get(extension).ok_or_else(|| {
            let names: Vec<&str> = self.files().map(|(name, _)| name).collect();
            self.error(
                extension,
                format!("there is none; the sample has {}", names.join(", ")),
            )
        })
    }

    fn error(&self, extension: &str, problem: String) -> Error {
        Error::BadSample {
            key: self.key.clone(),
            extension: extension.to_owned(),
            problem,
        }
    }
}

/// Samples of WebDataset shards: tar archives in which the files of a sample follow one another and
/// are called alike up to the first dot.
///
/// The archives are mapped and indexed as text files are, so any sample is read at once, in any order:
/// shards need not be streamed, and not be shuffled when they are written. For compressed ones, see
/// [`IndexOptions::unpack`].
///
/// ```no_run
/// // Needs shards on disk.
/// use overdrive_datasets::{Dataset, IndexOptions, WebDataset};
/// let samples = WebDataset::open(["shards/train-*.tar"], &IndexOptions::default())?;
/// let sample = samples.get(0)?;
/// println!("{}: {:?} bytes, {}", sample.key(), sample.get("jpg").map(<[u8]>::len), sample.text("txt")?);
/// # Ok::<(), overdrive_datasets::Error>(())
/// ```
#[derive(Debug)]
pub struct WebDataset {
    records: RecordFiles,
}

impl WebDataset {
    /// Opens archives, folders (of `.tar` files) and patterns (see [`find_files`]).
    ///
    /// # Errors
    /// When no file is found, and when one cannot be read, is no tar archive or is cut short.
    pub fn open<P: AsRef<Path>>(
        paths: impl IntoIterator<Item = P>,
        options: &IndexOptions,
    ) -> Result<Self> {
        let files = find_files(paths, &["tar"])?;
        Ok(Self {
            records: RecordFiles::open(&files, &TarScan, options, 0)?,
        })
    }

    /// The samples as bytes, headers and all, and where they are.
    pub fn records(&self) -> &RecordFiles {
        &self.records
    }
}

impl Dataset for WebDataset {
    type Item = WebSample;

    fn len(&self) -> usize {
        self.records.len()
    }

    fn get(&self, index: usize) -> Result<WebSample> {
        self.records.read(index, |bytes| {
            let mut members = Members::new(bytes);
            let mut sample = WebSample {
                key: String::new(),
                files: Vec::new(),
            };
            while let Some(member) = members.next_file().map_err(|error| error.problem)? {
                let (key, extension) = split_name(&member.name);
                if sample.get(extension).is_some() {
                    return Err(format!("the sample {key} has two files {extension}"));
                }
                sample.key = key.to_owned();
                let content = bytes[member.content].to_vec();
                sample.files.push((extension.to_owned(), content));
            }
            Ok(sample)
        })
    }
}
