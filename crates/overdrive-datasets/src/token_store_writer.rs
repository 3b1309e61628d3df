//! Writing a token store.

use std::fs::File;
use std::io::{BufWriter, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};
use tempfile::NamedTempFile;

use crate::store_format::{ENTRY_BYTES, HEADER_BYTES, Header, TokenWidth};
use crate::{Error, Result, Sha256Digest, TokenStore};

/// What a store says about its tokens.
#[derive(Debug, Clone)]
pub struct StoreOptions {
    /// Every token must be below it.
    pub vocab_size: u64,
    /// Bytes a token. `None` (the default) takes the narrowest that holds the vocabulary.
    pub width: Option<TokenWidth>,
    /// The token that ends documents, where there is one. It is recorded, not written:
    /// [`TokenStoreWriter::push_document`] stores what it is given.
    pub end_of_document: Option<u32>,
    /// The tokenizer ([`crate::tokenizer_digest`]); unknown by default.
    pub tokenizer: Sha256Digest,
    /// A key of the content; unknown by default.
    pub source: Sha256Digest,
}

impl StoreOptions {
    /// Options for a vocabulary of this size, all else at its default.
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

/// Writes a token store of any length with a few buffers of memory.
///
/// The store appears under its name only when [`TokenStoreWriter::finish`] has written and synced
/// all of it: until then it is a temporary file in the same folder, which is removed when the writer
/// is dropped. A process that is killed leaves no store, at worst a `.*.tmp` file.
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
    /// The end of the last document.
    tokens_in_table: u64,
    buffer: Vec<u8>,
}

impl TokenStoreWriter {
    /// Starts a store that will be at `path`. Its folder is made where it is missing.
    ///
    /// # Errors
    /// When the folder cannot be written, and when the vocabulary is empty or does not fit the width.
    pub fn create(path: impl AsRef<Path>, options: StoreOptions) -> Result<Self> {
        let path = path.as_ref();
        let width = options
            .width
            .unwrap_or(TokenWidth::for_vocab_size(options.vocab_size));
        let vocab_size = options.vocab_size;
        if vocab_size == 0 {
            return Err(Error::InvalidOption {
                option: "vocab_size",
                value: "0".to_owned(),
                expected: "a vocabulary has at least one token",
            });
        }
        if vocab_size > width.max_vocab_size() {
            let width_bytes = width.bytes() as u32;
            return Err(Error::VocabularyTooLarge {
                vocab_size,
                width_bytes,
            });
        }
        let folder = folder_of(path);
        std::fs::create_dir_all(folder).map_err(Error::io("create the folder", folder))?;
        let file = temp_file(path).map_err(Error::io("create a file in", folder))?;
        let mut file = BufWriter::with_capacity(1 << 20, file);
        // A file with this header is no store: the real one is written last.
        file.write_all(&[0; HEADER_BYTES])
            .map_err(Error::io("write", path))?;
        // The table waits in a file of its own, so that memory stays flat with millions of documents.
        let table = tempfile::tempfile_in(folder).map_err(Error::io("create a file in", folder))?;
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

    /// Adds one whole document.
    ///
    /// # Errors
    /// As [`TokenStoreWriter::push_tokens`] and [`TokenStoreWriter::end_document`].
    pub fn push_document(&mut self, tokens: &[u32], text_bytes: u64) -> Result<()> {
        self.push_tokens(tokens)?;
        self.end_document(text_bytes)
    }

    /// Adds tokens to the current document.
    ///
    /// # Errors
    /// When a token is outside the vocabulary, and when the disk refuses.
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
            // Every token was just found below a vocabulary size that fits the width.
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
            .map_err(Error::io("write", &self.path))?;
        self.tokens_hasher.update(&self.buffer);
        self.header.tokens += tokens.len() as u64;
        Ok(())
    }

    /// Ends the current document, whose text has `text_bytes` bytes of UTF-8.
    ///
    /// # Errors
    /// When the disk refuses.
    pub fn end_document(&mut self, text_bytes: u64) -> Result<()> {
        let mut entry = [0; ENTRY_BYTES];
        entry[..8].copy_from_slice(&self.header.tokens.to_le_bytes());
        entry[8..].copy_from_slice(&text_bytes.to_le_bytes());
        self.table
            .write_all(&entry)
            .map_err(Error::io("write", &self.path))?;
        self.table_hasher.update(entry);
        self.header.documents += 1;
        self.header.text_bytes += text_bytes;
        self.tokens_in_table = self.header.tokens;
        Ok(())
    }

    /// The number of tokens so far.
    pub fn tokens(&self) -> u64 {
        self.header.tokens
    }

    /// The number of documents so far.
    pub fn documents(&self) -> u64 {
        self.header.documents
    }

    /// Completes the store, syncs it to the disk, gives it its name and opens it. A store that had
    /// the name before is replaced; who has it open keeps reading the old one.
    ///
    /// Tokens behind the last [`TokenStoreWriter::end_document`] become a document of unknown text
    /// (0 bytes).
    ///
    /// # Errors
    /// When the disk refuses; then nothing is left under the name.
    pub fn finish(mut self) -> Result<TokenStore> {
        if self.tokens_in_table != self.header.tokens {
            self.end_document(0)?;
        }
        self.write_rest().map_err(Error::io("write", &self.path))?;
        let file = self.file.into_inner().map_err(|error| Error::Io {
            action: "write",
            path: self.path.clone(),
            source: error.into_error(),
        })?;
        persist(file, &self.path)?;
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
        // Only now does the file become a store.
        self.file.seek(SeekFrom::Start(0))?;
        self.file.write_all(&self.header.encode())?;
        self.file.flush()
    }
}

/// The folder that `path` is in.
pub(crate) fn folder_of(path: &Path) -> &Path {
    match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    }
}

/// The start and the end of the names of the temporary files from which `path` is made.
pub(crate) fn temp_name(path: &Path) -> (String, &'static str) {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    (format!(".{name}."), ".tmp")
}

/// A temporary file beside `path`, readable as other files are (the default would be its owner's
/// alone, which makes a shared cache useless).
pub(crate) fn temp_file(path: &Path) -> std::io::Result<NamedTempFile> {
    let (prefix, suffix) = temp_name(path);
    let mut builder = tempfile::Builder::new();
    builder.prefix(&prefix).suffix(suffix);
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt;
        // The process' umask is taken off this.
        builder.permissions(std::fs::Permissions::from_mode(0o666));
    }
    builder.tempfile_in(folder_of(path))
}

/// Syncs a complete temporary file and gives it its name in one step.
pub(crate) fn persist(file: NamedTempFile, path: &Path) -> Result<()> {
    file.as_file()
        .sync_all()
        .map_err(Error::io("write", path))?;
    file.persist(path)
        .map_err(|error| Error::io("rename to", path)(error.error))?;
    // The name itself is durable once the folder is synced; only Unix can sync one.
    #[cfg(unix)]
    {
        let folder = folder_of(path);
        File::open(folder)
            .and_then(|folder| folder.sync_all())
            .map_err(Error::io("sync the folder", folder))?;
    }
    Ok(())
}
