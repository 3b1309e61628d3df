//! Datasets of the samples of WebDataset shards.

use std::path::Path;

use serde::de::DeserializeOwned;

use super::{RecordFiles, find_files};
use crate::index::{Members, TarScan, split_name};
use crate::{Dataset, Error, IndexOptions, Result};

/// A sample: a group of files with a common key.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WebSample {
    key: String,
    files: Vec<(String, Vec<u8>)>,
}

impl WebSample {
    /// Returns the key: the files' common name up to the first dot, including the folder.
    pub fn key(&self) -> &str {
        &self.key
    }

    /// Returns the bytes of the file with this extension (the name after the first dot in lower case: `jpg`,
    /// `seg.png`).
    pub fn get(&self, extension: &str) -> Option<&[u8]> {
        let file = self.files.iter().find(|(name, _)| name == extension)?;
        Some(&file.1)
    }

    /// Returns the extensions and the bytes of all files, in the order of the archive.
    pub fn files(&self) -> impl Iterator<Item = (&str, &[u8])> {
        self.files
            .iter()
            .map(|(name, bytes)| (name.as_str(), bytes.as_slice()))
    }

    /// Returns the file with this extension as text.
    ///
    /// # Errors
    /// [`Error::InvalidSample`] if there is no such file, or if it is not UTF-8.
    pub fn text(&self, extension: &str) -> Result<&str> {
        std::str::from_utf8(self.file(extension)?)
            .map_err(|error| self.error(extension, error.to_string()))
    }

    /// Parses the file with this extension as JSON.
    ///
    /// # Errors
    /// [`Error::InvalidSample`] if there is no such file, or if it is not the JSON of a `T`.
    pub fn json<T: DeserializeOwned>(&self, extension: &str) -> Result<T> {
        serde_json::from_slice(self.file(extension)?)
            .map_err(|error| self.error(extension, error.to_string()))
    }

    fn file(&self, extension: &str) -> Result<&[u8]> {
        self.get(extension).ok_or_else(|| {
            let names: Vec<&str> = self.files().map(|(name, _)| name).collect();
            self.error(
                extension,
                format!("it is missing; the sample has {}", names.join(", ")),
            )
        })
    }

    fn error(&self, extension: &str, problem: String) -> Error {
        Error::InvalidSample {
            key: self.key.clone(),
            extension: extension.to_owned(),
            problem,
        }
    }
}

/// The samples of WebDataset shards: tar archives in which the files of a sample are consecutive and have the same
/// name up to the first dot. As in the library `webdataset`, extensions are read in lower case, and files without one
/// and hidden files (`._0001.jpg`) belong to no sample.
///
/// The archives are mapped and indexed as text files are, so samples are read in any order: shards need not be
/// streamed, nor shuffled when they are written. [`IndexOptions::unpack`] says how compressed ones are read.
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
    /// Returns an error if no file is found, or if a file cannot be read, is not a tar archive or is truncated.
    pub fn open<P: AsRef<Path>>(
        paths: impl IntoIterator<Item = P>,
        options: &IndexOptions,
    ) -> Result<Self> {
        let files = find_files(paths, &["tar"])?;
        Ok(Self {
            records: RecordFiles::open(&files, |_| Ok(Box::new(TarScan)), options, 0)?,
        })
    }

    /// Returns the samples as bytes including the headers, with their locations.
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
                let Some((key, extension)) = split_name(&member.name) else {
                    continue;
                };
                // Two files of one extension would make `get` ambiguous.
                if sample.get(&extension).is_some() {
                    return Err(format!("the sample {key} has two files {extension}"));
                }
                sample.key = key.to_owned();
                let content = bytes[member.content].to_vec();
                sample.files.push((extension, content));
            }
            Ok(sample)
        })
    }

    fn prefetch(&self, indices: &[usize]) {
        self.records.prefetch(indices);
    }

    fn check_unchanged(&self) -> Result<()> {
        self.records.check_unchanged()
    }
}
