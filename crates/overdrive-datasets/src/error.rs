//! What can go wrong, and the way out of it.

use std::path::{Path, PathBuf};

use crate::Sha256Digest;

/// The result of this crate's functions.
pub type Result<T> = std::result::Result<T, Error>;

/// Everything that can go wrong while data is found, tokenized, stored and read.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The operating system refused an operation on a file.
    #[error("cannot {action} {path}: {source}")]
    Io {
        /// What was attempted: "open", "read", ...
        action: &'static str,
        /// On which file or folder.
        path: PathBuf,
        /// Why it failed.
        source: std::io::Error,
    },

    /// The file is shorter (or longer) than its header says, or too short to hold one.
    #[error(
        "{path} is damaged: it has {actual_bytes} bytes where {expected_bytes} were expected; \
         it was cut off or changed after it was written, so build it again"
    )]
    WrongLength {
        /// The file.
        path: PathBuf,
        /// The length that the header promises, or that of a header.
        expected_bytes: u64,
        /// The length on disk.
        actual_bytes: u64,
    },

    /// The file does not start with [`crate::MAGIC`].
    #[error(
        "{path} is not an Overdrive token store (it starts with {found:02x?}); open a headerless \
         token file such as nanoGPT's train.bin with TokenStore::open_raw or open_nanogpt"
    )]
    WrongMagic {
        /// The file.
        path: PathBuf,
        /// Its first eight bytes.
        found: [u8; 8],
    },

    /// The file was written in a format that this version does not know.
    #[error(
        "{path} has format version {found}, and this version of overdrive-datasets reads version \
         {supported}; build the store again"
    )]
    UnsupportedVersion {
        /// The file.
        path: PathBuf,
        /// The version in its header.
        found: u32,
        /// The version that can be read.
        supported: u32,
    },

    /// A header field is impossible, or the header's checksum does not match.
    #[error("the header of {path} is damaged: {field} {problem}; build the store again")]
    DamagedHeader {
        /// The file.
        path: PathBuf,
        /// The name of the field.
        field: &'static str,
        /// What is wrong with it.
        problem: String,
    },

    /// The bytes of the tokens or of the document table do not have the checksum of the header.
    #[error("{path} is damaged: its {part} do not have the checksum in its header; build it again")]
    ChecksumMismatch {
        /// The file.
        path: PathBuf,
        /// "tokens" or "documents".
        part: &'static str,
    },

    /// A headerless file whose length is no multiple of the token width.
    #[error(
        "{path} has {bytes} bytes, which is no multiple of {width_bytes}: it is not a file of \
         {width_bytes}-byte tokens, or it was cut off"
    )]
    OddLength {
        /// The file.
        path: PathBuf,
        /// Its length.
        bytes: u64,
        /// The token width it was opened with.
        width_bytes: u32,
    },

    /// A token id outside the vocabulary.
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
        /// The number of ids that are allowed; valid ids are below it.
        vocab_size: u64,
    },

    /// A vocabulary size that the token width cannot hold.
    #[error(
        "a vocabulary of {vocab_size} does not fit tokens of {width_bytes} bytes; use TokenWidth::U32"
    )]
    VocabularyTooLarge {
        /// The vocabulary size.
        vocab_size: u64,
        /// The token width.
        width_bytes: u32,
    },

    /// The store was tokenized by another tokenizer than the one at hand.
    #[error(
        "{path} was made with another tokenizer (SHA-256 {found}, expected {expected}); build the \
         store again with this tokenizer, or load the one that it was made with"
    )]
    TokenizerMismatch {
        /// The store.
        path: PathBuf,
        /// The tokenizer that the caller has.
        expected: Sha256Digest,
        /// The tokenizer in the store's header.
        found: Sha256Digest,
    },

    /// A range of tokens that reaches over the end.
    #[error("tokens {start}..{end} were asked for, and there are {tokens}")]
    OutOfRange {
        /// First token of the range.
        start: usize,
        /// One past the last token of the range.
        end: usize,
        /// How many tokens there are.
        tokens: usize,
    },

    /// Too few tokens for one window.
    #[error(
        "{tokens} tokens are too few for a window of {context} and its next-token labels \
         ({} needed); give more text or a shorter context",
        context + 1
    )]
    TooFewTokens {
        /// How many tokens there are.
        tokens: usize,
        /// The length of the window.
        context: usize,
    },

    /// An option outside its range.
    #[error("{option} = {value} is not possible: {expected}")]
    InvalidOption {
        /// The option's name.
        option: &'static str,
        /// Its value.
        value: String,
        /// What is possible.
        expected: &'static str,
    },

    /// A split by document with too few documents.
    #[error(
        "{documents} document(s) cannot be split into training and validation by document; give \
         more files, or split by position (SplitBy::Position)"
    )]
    TooFewDocuments {
        /// How many documents there are.
        documents: usize,
    },

    /// A file format that cannot be read yet.
    #[error("{path} cannot be read: {format} is not supported yet; {hint}")]
    UnsupportedFormat {
        /// The file.
        path: PathBuf,
        /// The name of its format.
        format: &'static str,
        /// What to do instead.
        hint: &'static str,
    },

    /// No text was found.
    #[error("no text found in {searched}{skipped}; {hint}")]
    EmptyCorpus {
        /// Where it was looked for.
        searched: String,
        /// What was skipped there and why, or nothing.
        skipped: String,
        /// What to do.
        hint: &'static str,
    },

    /// A JSON Lines record that is no object, or has no text.
    #[error("{path}, line {line} (byte {offset}): {problem}")]
    BadRecord {
        /// The file.
        path: PathBuf,
        /// The line, counted from 1.
        line: u64,
        /// Where the line starts in the file, in bytes.
        offset: u64,
        /// What is wrong with it.
        problem: String,
    },

    /// No record of instruction data can be learned from.
    #[error("nothing to learn from in {searched}: {report}; expected records with an answer")]
    NoExamples {
        /// The files.
        searched: String,
        /// What became of their records.
        report: String,
    },

    /// A record of a lazy dataset that cannot be read or is not what its format says.
    #[error("{path}, record {record} (byte {offset}): {problem}")]
    UnreadableRecord {
        /// The file.
        path: PathBuf,
        /// The record in this file, counted from 0.
        record: usize,
        /// Where the record starts in the file, in bytes.
        offset: u64,
        /// What is wrong with it.
        problem: String,
    },

    /// A file of a sample that is not there, or is not what was asked for.
    #[error("the file {extension:?} of the sample {key}: {problem}")]
    BadSample {
        /// The sample.
        key: String,
        /// Which of its files.
        extension: String,
        /// What is wrong with it.
        problem: String,
    },

    /// A file whose records cannot be told apart.
    #[error("{path} is not what it should be: at byte {offset}, {problem}")]
    MalformedFile {
        /// The file.
        path: PathBuf,
        /// Where it was noticed, in bytes.
        offset: u64,
        /// What was found there and what was expected.
        problem: String,
    },

    /// An index file that does not hold what was written. Opening builds such an index again.
    #[error(
        "the index of {path} is damaged: {problem}; delete it, or open with \
         IndexOptions {{ rebuild: true, .. }}"
    )]
    DamagedIndex {
        /// The index file, or the file that it belongs to.
        path: PathBuf,
        /// What is wrong with it.
        problem: String,
    },

    /// A record that there is not.
    #[error("record {index} was asked for, and there are {len}; they are counted from 0")]
    NoSuchRecord {
        /// The record asked for.
        index: usize,
        /// How many there are.
        len: usize,
    },

    /// No files were found.
    #[error("no files found in {searched}; {hint}")]
    NoFiles {
        /// Where it was looked for.
        searched: String,
        /// What to do.
        hint: &'static str,
    },

    /// A file is no longer what it was when the corpus was listed.
    #[error("{path} changed while it was read; wait until nothing writes to it and start again")]
    FileChanged {
        /// The file.
        path: PathBuf,
    },

    /// The tokenizer has no token of this name.
    #[error(
        "the tokenizer has no token {token:?}; set {option} to one that it has{known}, or to None"
    )]
    UnknownToken {
        /// The token.
        token: String,
        /// The option that names it.
        option: &'static str,
        /// The special tokens that it has, for the message.
        known: String,
    },

    /// A vocabulary that cannot hold all bytes and the special tokens.
    #[error(
        "vocab_size = {vocab_size} is too small for a byte-level tokenizer: 256 bytes and \
         {special_tokens} special token(s) need {}",
        256 + special_tokens
    )]
    VocabularyTooSmall {
        /// The size asked for.
        vocab_size: usize,
        /// How many special tokens there are.
        special_tokens: usize,
    },

    /// An error of the `tokenizers` crate.
    #[error("cannot {action}: {source}")]
    Tokenizer {
        /// What was attempted.
        action: String,
        /// Its error.
        source: Box<dyn std::error::Error + Send + Sync>,
    },

    /// No cache folder can be told from the environment.
    #[error("no cache folder: none of {tried} is set; pass a folder explicitly")]
    NoCacheFolder {
        /// The environment variables that were tried.
        tried: &'static str,
    },

    /// Threads could not be started.
    #[error("cannot start {what}: {problem}")]
    Threads {
        /// What was to be started.
        what: &'static str,
        /// Why it could not.
        problem: String,
    },

    /// A background thread ended before its work was done.
    #[error(
        "the background thread that prepares batches panicked; its message is on standard error"
    )]
    WorkerPanicked,

    /// An error of libtorch.
    #[cfg(feature = "tch")]
    #[error("libtorch could not make a batch: {0}")]
    Torch(#[from] tch::TchError),
}

impl Error {
    /// For `map_err`: an input/output error, with what was attempted on which path.
    pub(crate) fn io(action: &'static str, path: &Path) -> impl FnOnce(std::io::Error) -> Error {
        move |source| Error::Io {
            action,
            path: path.to_owned(),
            source,
        }
    }

    /// Whether it is about one record, so that a policy may go on without it (see
    /// [`crate::ErrorPolicy`]): not the disk, not the index, not an option.
    pub fn is_about_record(&self) -> bool {
        matches!(
            self,
            Self::UnreadableRecord { .. }
                | Self::BadSample { .. }
                | Self::BadRecord { .. }
                | Self::TokenOutOfVocabulary { .. }
        )
    }

    /// Whether it is an input/output error of this file.
    pub(crate) fn is_io_of(&self, file: &Path) -> bool {
        matches!(self, Self::Io { path, .. } if path == file)
    }

    /// For `map_err`: an error of the `tokenizers` crate.
    pub(crate) fn tokenizer(
        action: impl Into<String>,
    ) -> impl FnOnce(Box<dyn std::error::Error + Send + Sync>) -> Error {
        move |source| Error::Tokenizer {
            action: action.into(),
            source,
        }
    }
}
