//! Token stores on disk, read through a memory map.

use std::ops::Range;
use std::path::{Path, PathBuf};

use rayon::prelude::*;

use overdrive_core::Error as CommonError;
use overdrive_core::files::FileMap;

use crate::digest::FieldHasher;
use crate::llm_c::{self, HEADER_BYTES as LLM_C_HEADER_BYTES};
use crate::store_format::{ENTRY_BYTES, HEADER_BYTES, Header, TokenWidth, u64_at};
use crate::{Error, Result, Sha256Digest};

/// The options of [`TokenStore::open_raw`], for a token file without a header.
#[derive(Debug, Clone, Copy)]
pub struct RawOptions {
    /// The number of bytes per token, little-endian. Default: [`TokenWidth::U16`].
    pub width: TokenWidth,
    /// If given, every token must be below it, which is checked on opening and on every read. Default: `None`,
    /// not checked.
    pub vocab_size: Option<u64>,
    /// The token that ends each document, for splits by document (GPT-2: 50256). The file is read once to find
    /// the documents. Default: `None`, the whole file is one document.
    pub end_of_document: Option<u32>,
}

impl Default for RawOptions {
    fn default() -> Self {
        Self {
            width: TokenWidth::U16,
            vocab_size: None,
            end_of_document: None,
        }
    }
}

/// A document of a store.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Document {
    /// The range of its tokens in the store, including the end-of-document token.
    pub tokens: Range<usize>,
    /// The length of its text in UTF-8 bytes; `None` if the file does not have it.
    pub text_bytes: Option<u64>,
}

#[derive(Debug)]
enum Documents {
    /// The table in the file at the offset `start`.
    Table { start: usize, count: usize },
    /// One past the last token of each document, found by the end token.
    Ends(Vec<usize>),
}

/// The tokens of a corpus in a memory-mapped file.
///
/// It reads Overdrive's own format, which has the tokenizer's digest, the vocabulary size and the documents
/// ([`TokenStore::open`]; written by [`crate::TokenStoreWriter`], specified in [`crate::store_format`]), and
/// headerless files of `u16` ([`TokenStore::open_nanogpt`]) or `u32` tokens ([`TokenStore::open_raw`]), and those of
/// llm.c ([`TokenStore::open_any`]).
///
/// Opening reads the header and, in Overdrive's own format, validates the document table (16 bytes per document);
/// tokens are read on demand. The file must not change while it is open: the process would read other tokens, or
/// end if the file was truncated ([`FileMap`]).
#[derive(Debug)]
pub struct TokenStore {
    path: PathBuf,
    map: FileMap,
    tokens: Range<usize>,
    width: TokenWidth,
    vocab_size: Option<u64>,
    documents: Documents,
    end_of_document: Option<u32>,
    header: Option<Header>,
}

/// The number of tokens that a thread reads at once when the whole file is read.
const BLOCK_TOKENS: usize = 1 << 18;

impl TokenStore {
    /// Opens a store in Overdrive's own format.
    ///
    /// # Errors
    /// [`Error::Common`] if the file cannot be read, [`Error::InvalidFile`] if it is not a store,
    /// [`Error::DamagedFile`] if it is damaged or truncated. Only [`TokenStore::verify`] compares the checksums of
    /// tokens and documents, since that reads the whole file.
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let map = FileMap::open(path)?;
        let header = Header::decode(&map, path)?;
        let too_large = || Error::damaged(path, "its token count is too large for this machine");
        // `decode` made sure that these offsets are within the mapped file.
        let end = header
            .tokens_end()
            .and_then(|end| usize::try_from(end).ok());
        let start = header
            .table_start()
            .and_then(|start| usize::try_from(start).ok());
        let (Some(tokens_end), Some(start)) = (end, start) else {
            return Err(too_large());
        };
        let count = usize::try_from(header.documents).map_err(|_| too_large())?;
        let store = Self {
            path: path.to_owned(),
            tokens: HEADER_BYTES..tokens_end,
            width: header.width,
            vocab_size: Some(header.vocab_size),
            documents: Documents::Table { start, count },
            end_of_document: header.end_of_document,
            header: Some(header),
            map,
        };
        store.check_document_table()?;
        Ok(store)
    }

    /// Opens a file as nanoGPT's `prepare.py` writes it: tokens, little-endian, no header.
    ///
    /// # Errors
    /// Those of [`TokenStore::open_raw`].
    pub fn open_nanogpt(path: impl AsRef<Path>, width: TokenWidth) -> Result<Self> {
        Self::open_raw(
            path,
            &RawOptions {
                width,
                ..RawOptions::default()
            },
        )
    }

    /// Opens a file of tokens by its content: a store in Overdrive's own format, a `.bin` file of llm.c (its header
    /// has the width), or tokens without a header. `options` are those of [`TokenStore::open_raw`] for the latter two.
    ///
    /// # Errors
    /// Those of [`TokenStore::open`] and [`TokenStore::open_raw`].
    pub fn open_any(path: impl AsRef<Path>, options: &RawOptions) -> Result<Self> {
        let path = path.as_ref();
        let map = FileMap::open(path)?;
        if map.starts_with(&crate::MAGIC) {
            return Self::open(path);
        }
        match llm_c::width(path, &map)? {
            Some(width) => Self::of_raw(path, map, LLM_C_HEADER_BYTES, width, options),
            None => Self::open_raw(path, options),
        }
    }

    /// Opens a file of tokens without a header.
    ///
    /// # Errors
    /// Returns an error if the file cannot be read, its length is not a multiple of the width, it is an Overdrive
    /// store, or a token is not below `options.vocab_size`.
    pub fn open_raw(path: impl AsRef<Path>, options: &RawOptions) -> Result<Self> {
        let path = path.as_ref();
        let length = std::fs::metadata(path)
            .map_err(CommonError::io("open", path))?
            .len();
        let width_bytes = options.width.bytes() as u32;
        if length % u64::from(width_bytes) != 0 {
            return Err(Error::invalid_file(
                path,
                format!(
                    "it has {length} bytes, which is not a multiple of {width_bytes}: it is not a file of \
            {width_bytes}-byte tokens, or it was truncated"
                ),
            ));
        }
        let map = FileMap::open(path)?;
        if map.starts_with(&crate::MAGIC) {
            let problem =
                "it is an Overdrive token store and not raw tokens; open it with TokenStore::open";
            return Err(Error::invalid_file(path, problem));
        }
        Self::of_raw(path, map, 0, options.width, options)
    }

    /// Returns the store of the tokens from byte `start` of a file on.
    fn of_raw(
        path: &Path,
        map: FileMap,
        start: usize,
        width: TokenWidth,
        options: &RawOptions,
    ) -> Result<Self> {
        let mut store = Self {
            path: path.to_owned(),
            tokens: start..map.len(),
            width,
            vocab_size: options.vocab_size,
            documents: Documents::Ends(Vec::new()),
            end_of_document: options.end_of_document,
            header: None,
            map,
        };
        store.check_vocabulary()?;
        let ends = match options.end_of_document {
            Some(token) => store.positions_after(token),
            None => vec![store.len()],
        };
        store.documents = Documents::Ends(ends);
        Ok(store)
    }

    /// Returns the number of tokens.
    pub fn len(&self) -> usize {
        self.tokens.len() / self.width.bytes()
    }

    /// Returns `true` if there are no tokens.
    pub fn is_empty(&self) -> bool {
        self.tokens.is_empty()
    }

    /// Returns the tokens of `range`.
    ///
    /// # Errors
    /// [`Error::OutOfRange`], and [`Error::TokenOutOfVocabulary`] for a token outside the vocabulary.
    pub fn tokens(&self, range: Range<usize>) -> Result<Vec<u32>> {
        self.check_range(range.start, range.len())?;
        let mut out = vec![0; range.len()];
        self.read(range.start, &mut out, |token| token)?;
        Ok(out)
    }

    /// Copies the tokens from `start` on into `out`, without an allocation.
    ///
    /// # Errors
    /// [`Error::OutOfRange`], and [`Error::TokenOutOfVocabulary`] for a token outside the vocabulary. The check
    /// belongs here: an embedding of such a token fails on a GPU by an assertion that ends the process.
    pub fn copy_to(&self, start: usize, out: &mut [i64]) -> Result<()> {
        self.read(start, out, i64::from)
    }

    /// Returns the number of documents.
    pub fn document_count(&self) -> usize {
        match &self.documents {
            Documents::Table { count, .. } => *count,
            Documents::Ends(ends) => ends.len(),
        }
    }

    /// Returns document `index`, counted from 0 in the order of the file; `None` after the last.
    pub fn document(&self, index: usize) -> Option<Document> {
        if index >= self.document_count() {
            return None;
        }
        let start = if index == 0 {
            0
        } else {
            self.document_end(index - 1)
        };
        let text_bytes = match &self.documents {
            Documents::Table { start, .. } => {
                Some(u64_at(&self.map, start + index * ENTRY_BYTES + 8))
            }
            Documents::Ends(_) => None,
        };
        Some(Document {
            tokens: start..self.document_end(index),
            text_bytes,
        })
    }

    /// Returns all documents, in the order of the file.
    pub fn documents(&self) -> impl ExactSizeIterator<Item = Document> + '_ {
        (0..self.document_count()).map(|index| {
            self.document(index)
                .expect("the index is below the document count")
        })
    }

    /// Returns the length of all documents' text in UTF-8 bytes; `None` for files without a header.
    pub fn text_bytes(&self) -> Option<u64> {
        self.header.as_ref().map(|header| header.text_bytes)
    }

    /// Returns the size of the vocabulary, below which every token is; `None` if a headerless file was opened
    /// without it.
    pub fn vocab_size(&self) -> Option<u64> {
        self.vocab_size
    }

    /// Returns the token that ends each document: that of the header, or of [`RawOptions::end_of_document`].
    pub fn end_of_document(&self) -> Option<u32> {
        self.end_of_document
    }

    /// Returns the largest token; `None` without tokens. It reads the whole file, on all cores.
    pub fn largest_token(&self) -> Option<u32> {
        let block_bytes = BLOCK_TOKENS * self.width.bytes();
        let blocks = self.map[self.tokens.clone()].par_chunks(block_bytes);
        blocks.filter_map(|bytes| self.iter(bytes).max()).max()
    }

    /// Returns the number of bytes per token.
    pub fn width(&self) -> TokenWidth {
        self.width
    }

    /// Returns the SHA-256 of the tokenizer that made the store, if the header has it.
    pub fn tokenizer_digest(&self) -> Option<Sha256Digest> {
        self.header
            .as_ref()
            .map(|header| header.tokenizer)
            .filter(Sha256Digest::is_known)
    }

    /// Returns the key of the content that the store was made from, if the header has it.
    pub fn source_digest(&self) -> Option<Sha256Digest> {
        self.header
            .as_ref()
            .map(|header| header.source)
            .filter(Sha256Digest::is_known)
    }

    /// Returns a digest of the tokens and the lengths of the documents, whatever files they were made from; `None`
    /// for files without a header. It is read from the header.
    pub fn content_digest(&self) -> Option<Sha256Digest> {
        let header = self.header.as_ref()?;
        let hasher = FieldHasher::default().field(&header.tokens_digest.0);
        Some(hasher.field(&header.table_digest.0).finish())
    }

    /// Returns the path of the file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Checks that the store was made with the tokenizer of this digest. A store without a digest passes.
    ///
    /// # Errors
    /// [`Error::TokenizerMismatch`].
    pub fn expect_tokenizer(&self, expected: Sha256Digest) -> Result<()> {
        match self.tokenizer_digest() {
            Some(found) if found != expected => Err(Error::TokenizerMismatch {
                path: self.path.clone(),
                expected,
                found,
            }),
            _ => Ok(()),
        }
    }

    /// Reads the whole file and verifies it: each token against the vocabulary and, if there is a header, the
    /// checksums of tokens and documents.
    ///
    /// # Errors
    /// [`Error::TokenOutOfVocabulary`], [`Error::DamagedFile`].
    pub fn verify(&self) -> Result<()> {
        if let (Some(header), Documents::Table { start, .. }) = (&self.header, &self.documents) {
            let tables = [
                (
                    "tokens",
                    &self.map[self.tokens.clone()],
                    header.tokens_digest,
                ),
                ("documents", &self.map[*start..], header.table_digest),
            ];
            for (part, bytes, expected) in tables {
                if Sha256Digest::of(bytes) != expected {
                    let problem = format!(
                        "its {part} do not match the checksum in its header; build it again"
                    );
                    return Err(Error::damaged(&self.path, problem));
                }
            }
        }
        self.check_vocabulary()
    }

    fn document_end(&self, index: usize) -> usize {
        match &self.documents {
            // `open` checked that each end is at most the token count, which fits usize.
            Documents::Table { start, .. } => {
                u64_at(&self.map, start + index * ENTRY_BYTES) as usize
            }
            Documents::Ends(ends) => ends[index],
        }
    }

    fn check_document_table(&self) -> Result<()> {
        let Some(header) = &self.header else {
            return Ok(());
        };
        let damaged = |problem: String| {
            Err(Error::damaged(
                &self.path,
                format!("{problem}; build it again"),
            ))
        };
        let mut previous = 0;
        let mut text_bytes = 0_u64;
        for (index, document) in self.documents().enumerate() {
            let end = document.tokens.end;
            if end < previous || end > self.len() {
                return damaged(format!(
                    "its document {index} ends at token {end}, after one that ends at {previous}"
                ));
            }
            previous = end;
            text_bytes = text_bytes.saturating_add(document.text_bytes.unwrap_or(0));
        }
        if previous != self.len() {
            let tokens = self.len();
            return damaged(format!("its documents hold {previous} of {tokens} tokens"));
        }
        if text_bytes != header.text_bytes {
            let stored = header.text_bytes;
            return damaged(format!(
                "its header has {stored} text bytes, and its documents have {text_bytes}"
            ));
        }
        Ok(())
    }

    fn check_vocabulary(&self) -> Result<()> {
        let Some(vocab_size) = self.vocab_size else {
            return Ok(());
        };
        // In this case every value of the width is a valid token.
        if vocab_size >= self.width.max_vocab_size() {
            return Ok(());
        }
        let width = self.width.bytes();
        let outside = self.map[self.tokens.clone()]
            .par_chunks(BLOCK_TOKENS * width)
            .enumerate()
            // The search for an invalid token runs in parallel, and still returns the first one.
            .find_map_first(|(block, bytes)| {
                let at = self
                    .iter(bytes)
                    .position(|token| u64::from(token) >= vocab_size)?;
                Some(block * BLOCK_TOKENS + at)
            });
        match outside {
            Some(position) => Err(self.outside_vocabulary(position, vocab_size)),
            None => Ok(()),
        }
    }

    /// Returns the ends of the documents: one past each `token`, and the end of the file.
    fn positions_after(&self, token: u32) -> Vec<usize> {
        let tokens = self.iter(&self.map[self.tokens.clone()]);
        let mut ends: Vec<usize> = tokens
            .enumerate()
            .filter_map(|(position, found)| (found == token).then_some(position + 1))
            .collect();
        // The tokens after the last end token are a document too.
        if ends.last().copied().unwrap_or(0) != self.len() {
            ends.push(self.len());
        }
        ends
    }

    fn iter<'a>(&self, bytes: &'a [u8]) -> impl Iterator<Item = u32> + use<'a> {
        let width = self.width;
        bytes
            .chunks_exact(width.bytes())
            .map(move |token| match width {
                TokenWidth::U16 => u32::from(u16::from_le_bytes([token[0], token[1]])),
                TokenWidth::U32 => u32::from_le_bytes([token[0], token[1], token[2], token[3]]),
            })
    }

    /// Returns the end of `count` tokens from `start` on, if the file has them.
    fn check_range(&self, start: usize, count: usize) -> Result<usize> {
        let end = start.saturating_add(count);
        match end <= self.len() {
            true => Ok(end),
            false => Err(Error::OutOfRange {
                start,
                end,
                tokens: self.len(),
            }),
        }
    }

    fn read<T>(&self, start: usize, out: &mut [T], convert: impl Fn(u32) -> T) -> Result<()> {
        let end = self.check_range(start, out.len())?;
        let width = self.width.bytes();
        let bytes = &self.map[self.tokens.clone()][start * width..end * width];
        // The loop tracks the largest token instead of comparing each one: without an early exit the compiler
        // vectorizes it.
        let mut largest = 0;
        match self.width {
            TokenWidth::U16 => {
                for (out, token) in out.iter_mut().zip(bytes.chunks_exact(2)) {
                    let token = u32::from(u16::from_le_bytes([token[0], token[1]]));
                    largest = largest.max(token);
                    *out = convert(token);
                }
            }
            TokenWidth::U32 => {
                for (out, token) in out.iter_mut().zip(bytes.chunks_exact(4)) {
                    let token = u32::from_le_bytes([token[0], token[1], token[2], token[3]]);
                    largest = largest.max(token);
                    *out = convert(token);
                }
            }
        }
        match self.vocab_size {
            Some(vocab_size) if u64::from(largest) >= vocab_size && !out.is_empty() => {
                let at = self
                    .iter(bytes)
                    .position(|token| token == largest)
                    .unwrap_or(0);
                Err(self.outside_vocabulary(start + at, vocab_size))
            }
            _ => Ok(()),
        }
    }

    fn outside_vocabulary(&self, position: usize, vocab_size: u64) -> Error {
        let width = self.width.bytes();
        let bytes = &self.map[self.tokens.clone()][position * width..(position + 1) * width];
        Error::TokenOutOfVocabulary {
            path: self.path.clone(),
            position: position as u64,
            token: self.iter(bytes).next().unwrap_or(u32::MAX),
            vocab_size,
        }
    }
}
