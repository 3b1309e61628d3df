//! The writer of token stores.

use std::fs::File;
use std::io::{BufWriter, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};
use tempfile::NamedTempFile;

use overdrive_core::{Error as CommonError, check_option, check_positive, files};

use crate::store_format::{ENTRY_BYTES, HEADER_BYTES, Header, TokenWidth};
use crate::{Error, Result, Sha256Digest, TokenStore};

/// The options of [`TokenStoreWriter`], which are recorded in the header.
#[derive(Debug, Clone)]
pub struct StoreOptions {
    /// The size of the vocabulary, below which every token must be.
    pub vocab_size: u64,
    /// The number of bytes per token. `None` (the default) uses the smallest that holds the vocabulary.
    pub width: Option<TokenWidth>,
    /// The token that ends documents, if there is one. It is recorded and not appended:
    /// [`TokenStoreWriter::push_document`] stores the tokens that it is given.
    pub end_of_document: Option<u32>,
    /// The digest of the tokenizer ([`crate::tokenizer_digest`]). Default: unknown.
    pub tokenizer: Sha256Digest,
    /// A key of the content. Default: unknown.
    pub source: Sha256Digest,
}

impl StoreOptions {
    /// Returns the options for a vocabulary of this size, with defaults for the others.
    pub fn new(vocab_size: u64) -> Self {
        Self {
            vocab_size,
            width: None,
            end_of_document: None,
            tokenizer: Sha256Digest::UNKNOWN,
            source: Sha256Digest::UNKNOWN,
        }
    }
}

/// A writer of token stores of any length, with constant memory.
///
/// The store gets its name only when [`TokenStoreWriter::finish`] has written and synced all of it: until then it
/// is a temporary file in the same folder, which is removed when the writer is dropped. A killed process leaves no
/// store, and at worst a `.*.tmp` file.
///
/// ```
/// use overdrive_datasets::{StoreOptions, TokenStoreWriter};
/// # let dir = tempfile::tempdir().unwrap();
/// let mut writer = TokenStoreWriter::create(dir.path().join("two.tokens"), StoreOptions::new(100))?;
/// writer.push_document(&[1, 2, 3, 0], 12)?;
/// writer.push_document(&[4, 0], 5)?;
/// let store = writer.finish()?;
/// assert_eq!(store.tokens(0..6)?, [1, 2, 3, 0, 4, 0]);
/// assert_eq!(store.document(1).unwrap().tokens, 4..6);
/// # Ok::<(), overdrive_datasets::Error>(())
/// ```
#[derive(Debug)]
pub struct TokenStoreWriter {
    path: PathBuf,
    file: BufWriter<NamedTempFile>,
    table: BufWriter<File>,
    tokens_hasher: Sha256,
    table_hasher: Sha256,
    header: Header,
    /// One past the last token of the last document.
    tokens_in_table: u64,
    buffer: Vec<u8>,
}

impl TokenStoreWriter {
    /// Starts a store that will be at `path`. Its folder is created if it does not exist.
    ///
    /// # Errors
    /// Returns an error if the folder cannot be written, or if the vocabulary is empty or does not fit the width.
    pub fn create(path: impl AsRef<Path>, options: StoreOptions) -> Result<Self> {
        let path = path.as_ref();
        let width = options
            .width
            .unwrap_or(TokenWidth::for_vocab_size(options.vocab_size));
        let vocab_size = options.vocab_size;
        check_positive("vocab_size", vocab_size)?;
        let limit = width.max_vocab_size();
        check_option(
            vocab_size <= limit,
            "vocab_size",
            vocab_size,
            format!(
                "at most {limit} for tokens of {} bytes; use TokenWidth::U32",
                width.bytes()
            ),
        )?;
        let folder = files::folder_of(path);
        std::fs::create_dir_all(folder).map_err(CommonError::io("create the folder", folder))?;
        let file = files::unfinished(path)?;
        // A large buffer: the tokens of a document are a few kilobytes.
        let mut file = BufWriter::with_capacity(1 << 20, file);
        // Zeros are not a valid header: the file becomes a store only when `finish` writes the real one.
        file.write_all(&[0; HEADER_BYTES])
            .map_err(CommonError::io("write", path))?;
        // The table is collected in a separate file, so that memory stays constant for millions of documents.
        let table =
            tempfile::tempfile_in(folder).map_err(CommonError::io("create a file in", folder))?;
        Ok(Self {
            path: path.to_owned(),
            file,
            table: BufWriter::new(table),
            tokens_hasher: Sha256::new(),
            table_hasher: Sha256::new(),
            header: Header {
                width,
                vocab_size,
                tokens: 0,
                documents: 0,
                text_bytes: 0,
                end_of_document: options
                    .end_of_document
                    .filter(|&t| u64::from(t) < vocab_size),
                tokenizer: options.tokenizer,
                source: options.source,
                tokens_digest: Sha256Digest::UNKNOWN,
                table_digest: Sha256Digest::UNKNOWN,
            },
            tokens_in_table: 0,
            buffer: Vec::new(),
        })
    }

    /// Appends a whole document.
    ///
    /// # Errors
    /// Those of [`TokenStoreWriter::push_tokens`] and [`TokenStoreWriter::end_document`].
    pub fn push_document(&mut self, tokens: &[u32], text_bytes: u64) -> Result<()> {
        self.push_tokens(tokens)?;
        self.end_document(text_bytes)
    }

    /// Appends tokens to the current document.
    ///
    /// # Errors
    /// [`Error::TokenOutOfVocabulary`], and [`Error::Common`] if the file cannot be written.
    pub fn push_tokens(&mut self, tokens: &[u32]) -> Result<()> {
        let vocab_size = self.header.vocab_size;
        if let Some(at) = tokens
            .iter()
            .position(|&token| u64::from(token) >= vocab_size)
        {
            return Err(Error::TokenOutOfVocabulary {
                path: self.path.clone(),
                position: self.header.tokens + at as u64,
                token: tokens[at],
                vocab_size,
            });
        }
        self.buffer.clear();
        match self.header.width {
            // The tokens were checked against a vocabulary size that fits the width.
            TokenWidth::U16 => {
                self.buffer.extend(
                    tokens
                        .iter()
                        .flat_map(|&token| (token as u16).to_le_bytes()),
                );
            }
            TokenWidth::U32 => {
                self.buffer
                    .extend(tokens.iter().flat_map(|&token| token.to_le_bytes()));
            }
        }
        self.file
            .write_all(&self.buffer)
            .map_err(CommonError::io("write", &self.path))?;
        self.tokens_hasher.update(&self.buffer);
        self.header.tokens += tokens.len() as u64;
        Ok(())
    }

    /// Ends the current document, whose text has `text_bytes` bytes of UTF-8.
    ///
    /// # Errors
    /// [`Error::Common`] if the file cannot be written.
    pub fn end_document(&mut self, text_bytes: u64) -> Result<()> {
        let mut entry = [0; ENTRY_BYTES];
        entry[..8].copy_from_slice(&self.header.tokens.to_le_bytes());
        entry[8..].copy_from_slice(&text_bytes.to_le_bytes());
        self.table
            .write_all(&entry)
            .map_err(CommonError::io("write", &self.path))?;
        self.table_hasher.update(entry);
        self.header.documents += 1;
        self.header.text_bytes += text_bytes;
        self.tokens_in_table = self.header.tokens;
        Ok(())
    }

    /// Returns the number of tokens written so far.
    pub fn tokens(&self) -> u64 {
        self.header.tokens
    }

    /// Returns the number of documents written so far.
    pub fn documents(&self) -> u64 {
        self.header.documents
    }

    /// Completes the store, syncs it to the disk, renames it and opens it. An existing store of the name is replaced;
    /// processes that have it open keep the old one.
    ///
    /// Tokens after the last [`TokenStoreWriter::end_document`] become a document of unknown text length (0 bytes).
    ///
    /// # Errors
    /// [`Error::Common`] if the file cannot be written; the store at `path` is then unchanged.
    pub fn finish(mut self) -> Result<TokenStore> {
        if self.tokens_in_table != self.header.tokens {
            self.end_document(0)?;
        }
        self.write_rest()
            .map_err(CommonError::io("write", &self.path))?;
        let file = self
            .file
            .into_inner()
            .map_err(|error| CommonError::io("write", &self.path)(error.into_error()))?;
        files::commit(file, &self.path)?;
        TokenStore::open(&self.path)
    }

    fn write_rest(&mut self) -> std::io::Result<()> {
        let tokens_bytes = self.header.tokens * self.header.width.bytes() as u64;
        let padding = tokens_bytes.next_multiple_of(8) - tokens_bytes;
        self.file.write_all(&[0; 8][..padding as usize])?;
        self.table.flush()?;
        let table = self.table.get_mut();
        table.seek(SeekFrom::Start(0))?;
        std::io::copy(table, &mut self.file)?;
        self.header.tokens_digest = Sha256Digest::finish(std::mem::take(&mut self.tokens_hasher));
        self.header.table_digest = Sha256Digest::finish(std::mem::take(&mut self.table_hasher));
        // The header is written last, because it makes the file a valid store.
        self.file.seek(SeekFrom::Start(0))?;
        self.file.write_all(&self.header.encode())?;
        self.file.flush()
    }
}
