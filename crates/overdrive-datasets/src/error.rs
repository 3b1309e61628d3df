//! The errors of this crate.

use std::path::{Path, PathBuf};

use crate::Sha256Digest;

/// The result of this crate's functions.
pub type Result<T> = std::result::Result<T, Error>;

/// An error of finding, tokenizing, storing or reading data.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An option is outside its range, or a file could not be read or written.
    #[error(transparent)]
    Common(#[from] overdrive_core::Error),

    /// A token store or an index file changed after it was written, or has another format version.
    #[error("{path} is damaged: {problem}")]
    DamagedFile {
        /// The file, or for an index the file that it belongs to.
        path: PathBuf,
        /// The damage, and the remedy.
        problem: String,
    },

    /// A file does not have the expected format, or its format is not supported.
    #[error("{path} cannot be read: {problem}")]
    InvalidFile {
        /// The file.
        path: PathBuf,
        /// The position and the kind of the problem, and the remedy where there is one.
        problem: String,
    },

    /// A file changed while it was read.
    #[error("{path} changed while it was read; wait until nothing writes to it and start again")]
    FileChanged {
        /// The file.
        path: PathBuf,
    },

    /// A file on a server cannot be read.
    #[error("{path} cannot be read: {problem}")]
    Remote {
        /// The name of the file: its URL without secrets.
        path: PathBuf,
        /// The answer of the server or of the network, and the remedy where there is one.
        problem: String,
    },

    /// No files, or no usable records, were found.
    #[error("no data found in {searched}: {problem}")]
    NoData {
        /// The files and folders that were searched.
        searched: String,
        /// The reason, and the remedy.
        problem: String,
    },

    /// There are too few tokens or documents for a window or a split.
    #[error("{count} {unit} are too few, at least {needed} are needed; {remedy}")]
    TooFew {
        /// "tokens", "documents" or "examples".
        unit: &'static str,
        /// The actual number.
        count: usize,
        /// The minimum.
        needed: usize,
        /// The remedy.
        remedy: &'static str,
    },

    /// A record of a file cannot be read, or is not what its format requires.
    #[error("{path}, {number} (byte {offset}): {problem}")]
    InvalidRecord {
        /// The file.
        path: PathBuf,
        /// The number of the record in the file.
        number: RecordNumber,
        /// The offset of the record's start in the file, in bytes.
        offset: u64,
        /// The reason.
        problem: String,
    },

    /// A file of a WebDataset sample is missing, or is not what the caller expects.
    #[error("the file {extension:?} of the sample {key}: {problem}")]
    InvalidSample {
        /// The key of the sample.
        key: String,
        /// The extension of the file in the sample.
        extension: String,
        /// The reason.
        problem: String,
    },

    /// A function over records failed: that of a batch, or of a map with an error of the program ([`Error::other`]).
    #[error("{}: {source}", records(*start, *end))]
    Batch {
        /// The index of the first record of the batch.
        start: usize,
        /// One past the index of the last record.
        end: usize,
        /// The error of the function.
        source: Box<Error>,
    },

    /// A function over a batch of records returned another number of results than before.
    #[error(
        "records {start}..{end}: the function returned {got} results, but {expected} when they were \
         counted; it must return the same results for the same records"
    )]
    BatchChanged {
        /// The index of the first record of the batch.
        start: usize,
        /// One past the index of the last record.
        end: usize,
        /// The number of results when they were counted.
        expected: usize,
        /// The number of results now.
        got: usize,
    },

    /// A token id is outside the vocabulary.
    #[error(
        "token {token} at position {position} of {path} is outside the vocabulary of {vocab_size}: \
         the file was made with another tokenizer, or has another token width"
    )]
    TokenOutOfVocabulary {
        /// The file.
        path: PathBuf,
        /// The position of the token in the file, in tokens.
        position: u64,
        /// The id.
        token: u32,
        /// The size of the vocabulary; valid ids are below it.
        vocab_size: u64,
    },

    /// A store was made with another tokenizer than the caller's.
    #[error(
        "{path} was made with another tokenizer (SHA-256 {found}, expected {expected}); build the \
         store again with this tokenizer, or load the one that it was made with"
    )]
    TokenizerMismatch {
        /// The store.
        path: PathBuf,
        /// The digest of the caller's tokenizer.
        expected: Sha256Digest,
        /// The digest in the store's header.
        found: Sha256Digest,
    },

    /// A range of tokens reaches beyond the end.
    #[error("tokens {start}..{end} were requested, but there are only {tokens}")]
    OutOfRange {
        /// The first token of the range.
        start: usize,
        /// One past the last token of the range.
        end: usize,
        /// The number of tokens.
        tokens: usize,
    },

    /// A record index is beyond the end.
    #[error(
        "record {index} was requested from a dataset of length {len}; records are counted from 0"
    )]
    NoSuchRecord {
        /// The index.
        index: usize,
        /// The number of records.
        len: usize,
    },

    /// An error of the `tokenizers` crate.
    #[error("cannot {action}: {source}")]
    Tokenizer {
        /// The operation that failed.
        action: String,
        /// The error of the `tokenizers` crate.
        source: Box<dyn std::error::Error + Send + Sync>,
    },

    /// This process may not read or write the cache folder, which another user may have made, or its disk is full.
    #[error("the cache folder {} cannot be used: {source}; {}", folder.display(), cache_remedy(source))]
    CacheFolder {
        /// The folder.
        folder: PathBuf,
        /// The file and the answer of the operating system.
        source: overdrive_core::Error,
    },

    /// The environment names no folder for caches.
    #[error("no cache folder: none of {tried} is set; pass a folder explicitly")]
    NoCacheFolder {
        /// The environment variables that were read.
        tried: &'static str,
    },

    /// Threads could not be started.
    #[error("cannot start {threads}: {problem}")]
    Threads {
        /// The threads, by their purpose.
        threads: &'static str,
        /// The reason.
        problem: String,
    },

    /// A background thread ended before its work was done.
    #[error("a background thread panicked; its message is on standard error")]
    WorkerPanicked,

    /// A dataset, a sampler or a collate function panicked while a batch was made.
    #[error("a function that makes a batch panicked: {message}")]
    Panicked {
        /// The message of the panic.
        message: String,
    },

    /// An error of the program's own dataset or function ([`Error::other`]).
    #[error(transparent)]
    Other(Box<dyn std::error::Error + Send + Sync>),

    /// An error of libtorch.
    #[cfg(feature = "tch")]
    #[error("libtorch could not make a batch: {0}")]
    Tch(#[from] tch::TchError),

    /// A batch could not be copied to a device.
    #[cfg(feature = "tch")]
    #[error(transparent)]
    Sys(#[from] overdrive_sys::Error),
}

/// The number of a record in its file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RecordNumber {
    /// The line of the record, counted from 1 as editors do.
    Line(u64),
    /// The index of the record, counted from 0 as datasets do.
    Record(usize),
}

impl std::fmt::Display for RecordNumber {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Line(line) => write!(f, "line {line}"),
            Self::Record(record) => write!(f, "record {record}"),
        }
    }
}

/// Returns `true` if an error says that there is no room on a disk.
fn is_full(error: &std::io::Error) -> bool {
    use std::io::ErrorKind::{QuotaExceeded, StorageFull};
    [QuotaExceeded, StorageFull].contains(&error.kind())
}

/// Returns the remedy for an error of a file in a cache folder.
fn cache_remedy(error: &overdrive_core::Error) -> &'static str {
    match error {
        overdrive_core::Error::Io { source, .. } if is_full(source) => {
            "make room there, or set `XDG_CACHE_HOME` to a folder on another disk, which moves the default cache; \
             compressed files in blocks, as of `bgzip`, need no room for their unpacked content there"
        }
        _ => {
            "set `XDG_CACHE_HOME` to a folder of your own, which moves the default cache, or let the owner of this \
             folder permit it"
        }
    }
}

/// Returns the name of the records `start..end` in a message.
fn records(start: usize, end: usize) -> String {
    match end.saturating_sub(start) {
        1 => format!("record {start}"),
        _ => format!("records {start}..{end}"),
    }
}

impl Error {
    /// Returns an error of a program's own dataset or function, from any error or message: what a function of
    /// [`crate::DatasetExt::map`] or a collate function returns if it fails. It counts as an error about a record.
    ///
    /// ```
    /// use overdrive_datasets::{Dataset, DatasetExt, Error, InMemory};
    ///
    /// let numbers = InMemory(vec!["1", "two"]).map(|text| text.parse::<i64>().map_err(Error::other));
    /// assert_eq!(numbers.get(0)?, 1);
    /// let message = numbers.get(1).map_err(|error| error.to_string());
    /// assert_eq!(message, Err("record 1: invalid digit found in string".into()));
    /// # Ok::<(), Error>(())
    /// ```
    pub fn other(error: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> Self {
        Self::Other(error.into())
    }

    /// Returns the error with the index of the record whose function failed, if it does not have a place already.
    pub(crate) fn of_record(self, index: usize) -> Self {
        match self {
            Self::Other(_) => Self::Batch {
                start: index,
                end: index.saturating_add(1),
                source: Box::new(self),
            },
            other => other,
        }
    }

    /// Returns `true` if the error is about one record, so that a policy may continue without the record
    /// (see [`crate::ErrorPolicy`]); `false` if it is about the disk, an index or an option.
    pub fn is_about_record(&self) -> bool {
        match self {
            Self::InvalidRecord { .. }
            | Self::InvalidSample { .. }
            | Self::TokenOutOfVocabulary { .. }
            | Self::Other(_) => true,
            Self::Batch { source, .. } => source.is_about_record(),
            _ => false,
        }
    }

    /// Returns the error of a damaged store or index.
    pub(crate) fn damaged(path: &Path, problem: impl Into<String>) -> Self {
        Self::DamagedFile {
            path: path.to_owned(),
            problem: problem.into(),
        }
    }

    /// Returns the error of a file without the required format.
    pub(crate) fn invalid_file(path: &Path, problem: impl Into<String>) -> Self {
        Self::InvalidFile {
            path: path.to_owned(),
            problem: problem.into(),
        }
    }

    /// Returns the file of an input/output error; `None` for other errors.
    pub(crate) fn io_path(&self) -> Option<&Path> {
        match self {
            Self::Common(overdrive_core::Error::Io { path, .. })
            | Self::CacheFolder {
                source: overdrive_core::Error::Io { path, .. },
                ..
            } => Some(path),
            _ => None,
        }
    }

    /// Returns the error of a cache folder in place of that of a file in it, if the system denies the access or the disk
    /// is full.
    pub(crate) fn of_cache(self, folder: &Path) -> Self {
        use std::io::ErrorKind::{PermissionDenied, ReadOnlyFilesystem};
        let is_of_folder = |source: &overdrive_core::Error| match source {
            overdrive_core::Error::Io { path, source, .. } => {
                path.starts_with(folder)
                    && (is_full(source)
                        || [PermissionDenied, ReadOnlyFilesystem].contains(&source.kind()))
            }
            _ => false,
        };
        match self {
            Self::Common(source) if is_of_folder(&source) => Self::CacheFolder {
                folder: folder.to_owned(),
                source,
            },
            other => other,
        }
    }

    /// Returns a function for `map_err` that wraps an error of the `tokenizers` crate.
    #[cfg(feature = "tokenizers")]
    pub(crate) fn tokenizer(
        action: impl Into<String>,
    ) -> impl FnOnce(Box<dyn std::error::Error + Send + Sync>) -> Error {
        move |source| Error::Tokenizer {
            action: action.into(),
            source,
        }
    }
}
