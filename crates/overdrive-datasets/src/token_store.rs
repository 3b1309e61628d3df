//! Tokens on disk, read through a memory map.

use std::ops::Range;
use std::path::{Path, PathBuf};

use memmap2::Mmap;
use rayon::prelude::*;

use crate::mmap::map_file;
use crate::store_format::{ENTRY_BYTES, HEADER_BYTES, Header, TokenWidth, u64_at};
use crate::{Error, Result, Sha256Digest};

/// How to read a token file that has no header.
#[derive(Debug, Clone, Copy)]
pub struct RawOptions {
    /// Bytes a token, little-endian. Default: [`TokenWidth::U16`].
    pub width: TokenWidth,
    /// When given, every token is checked to be below it: at opening and whenever it is read.
    /// Default: not checked.
    pub vocab_size: Option<u64>,
    /// The token that ends each document, for splits by document (GPT-2: 50256). The file is read
    /// once to find them. Default: the whole file is one document.
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

/// One document of a store.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Document {
    /// Where its tokens are in the store, the end-of-document token included.
    pub tokens: Range<usize>,
    /// The length of its text in UTF-8 bytes; `None` where the file does not say.
    pub text_bytes: Option<u64>,
}

#[derive(Debug)]
enum Documents {
    /// In the file, from this byte on.
    Table { start: usize, count: usize },
    /// Found by their end token: one past the last token of each.
    Ends(Vec<usize>),
}

/// Tokens of a corpus in a memory-mapped file.
///
/// Three kinds of file: Overdrive's own, which knows its tokenizer, its vocabulary and where its
/// documents are ([`TokenStore::open`]; written by [`crate::TokenStoreWriter`] in the layout of
/// [`crate::store_format`]), and headerless
/// files of `u16` ([`TokenStore::open_nanogpt`]) or `u32` tokens ([`TokenStore::open_raw`]).
///
/// Opening reads the header and, in Overdrive's own format, walks the document table (16 bytes a
/// document); tokens are read when they are asked for. The file must not change while it is open:
/// the process would see other tokens, or end with SIGBUS where the file was cut short.
#[derive(Debug)]
pub struct TokenStore {
    path: PathBuf,
    map: Mmap,
    tokens: Range<usize>,
    width: TokenWidth,
    vocab_size: Option<u64>,
    documents: Documents,
    header: Option<Header>,
}

impl TokenStore {
    /// Opens a store in Overdrive's own format.
    ///
    /// # Errors
    /// When the file cannot be read, is no store, is damaged or cut off; each error names what.
    /// The checksums of tokens and documents are checked by [`TokenStore::verify`] only, since that
    /// reads the whole file.
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let map = map_file(path)?;
        let header = Header::decode(&map, path)?;
        let too_large = || Error::DamagedHeader {
            path: path.to_owned(),
            field: "token count",
            problem: "is too large for this machine".to_owned(),
        };
        // Decoding proved that these lie inside the mapped file.
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
            header: Some(header),
            map,
        };
        store.check_document_table()?;
        Ok(store)
    }

    /// Opens a file as nanoGPT's `prepare.py` writes it: tokens, little-endian, no header.
    ///
    /// # Errors
    /// As [`TokenStore::open_raw`].
    pub fn open_nanogpt(path: impl AsRef<Path>, width: TokenWidth) -> Result<Self> {
        Self::open_raw(
            path,
            &RawOptions {
                width,
                ..RawOptions::default()
            },
        )
    }

    /// Opens a file of tokens without a header.
    ///
    /// # Errors
    /// When the file cannot be read, its length is no multiple of the width, it is an Overdrive
    /// store, or a token is not below `options.vocab_size`.
    pub fn open_raw(path: impl AsRef<Path>, options: &RawOptions) -> Result<Self> {
        let path = path.as_ref();
        let length = std::fs::metadata(path)
            .map_err(Error::io("open", path))?
            .len();
        let width_bytes = options.width.bytes() as u32;
        if length % u64::from(width_bytes) != 0 {
            return Err(Error::OddLength {
                path: path.to_owned(),
                bytes: length,
                width_bytes,
            });
        }
        let map = map_file(path)?;
        if map.starts_with(&crate::MAGIC) {
            return Err(Error::UnsupportedFormat {
                path: path.to_owned(),
                format: "an Overdrive token store read as raw tokens",
                hint: "open it with TokenStore::open",
            });
        }
        let mut store = Self {
            path: path.to_owned(),
            tokens: 0..map.len(),
            width: options.width,
            vocab_size: options.vocab_size,
            documents: Documents::Ends(Vec::new()),
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

    /// The number of tokens.
    pub fn len(&self) -> usize {
        self.tokens.len() / self.width.bytes()
    }

    /// Whether there is no token.
    pub fn is_empty(&self) -> bool {
        self.tokens.is_empty()
    }

    /// The tokens of `range`.
    ///
    /// # Errors
    /// When the range reaches over the end, and when a token is outside the vocabulary.
    pub fn tokens(&self, range: Range<usize>) -> Result<Vec<u32>> {
        let mut out = vec![0; range.len()];
        self.read(range.start, &mut out, |token| token)?;
        Ok(out)
    }

    /// Fills `out` with the tokens from `start` on, without an allocation.
    ///
    /// # Errors
    /// When they reach over the end, and when a token is outside the vocabulary (embedding it would
    /// otherwise fail far from here, on a GPU by an assertion that ends the process).
    pub fn copy_to(&self, start: usize, out: &mut [i64]) -> Result<()> {
        self.read(start, out, i64::from)
    }

    /// The number of documents.
    pub fn document_count(&self) -> usize {
        match &self.documents {
            Documents::Table { count, .. } => *count,
            Documents::Ends(ends) => ends.len(),
        }
    }

    /// Document `index`, counted from 0 in the order of the file; `None` behind the last.
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

    /// All documents in the order of the file.
    pub fn documents(&self) -> impl ExactSizeIterator<Item = Document> + '_ {
        (0..self.document_count()).map(|index| {
            self.document(index)
                .expect("the index is below the document count")
        })
    }

    /// The UTF-8 bytes of all documents' text; `None` for files without a header.
    pub fn text_bytes(&self) -> Option<u64> {
        self.header.as_ref().map(|header| header.text_bytes)
    }

    /// Every token is below this; `None` where a headerless file was opened without it.
    pub fn vocab_size(&self) -> Option<u64> {
        self.vocab_size
    }

    /// The token behind each document, where the file says.
    pub fn end_of_document(&self) -> Option<u32> {
        self.header
            .as_ref()
            .and_then(|header| header.end_of_document)
    }

    /// Bytes a token.
    pub fn width(&self) -> TokenWidth {
        self.width
    }

    /// The SHA-256 of the tokenizer that made it, where the file says.
    pub fn tokenizer_digest(&self) -> Option<Sha256Digest> {
        self.header
            .as_ref()
            .map(|header| header.tokenizer)
            .filter(Sha256Digest::is_known)
    }

    /// The key of the content that it was made from, where the file says.
    pub fn source_digest(&self) -> Option<Sha256Digest> {
        self.header
            .as_ref()
            .map(|header| header.source)
            .filter(Sha256Digest::is_known)
    }

    /// Where the file is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Refuses a store that another tokenizer made. A store that does not say passes.
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

    /// Reads the whole file and checks it: each token against the vocabulary, and the checksums of
    /// tokens and documents where there is a header.
    ///
    /// # Errors
    /// [`Error::TokenOutOfVocabulary`], [`Error::ChecksumMismatch`].
    pub fn verify(&self) -> Result<()> {
        if let (Some(header), Documents::Table { start, .. }) = (&self.header, &self.documents) {
            let parts = [
                (
                    "tokens",
                    &self.map[self.tokens.clone()],
                    header.tokens_digest,
                ),
                ("documents", &self.map[*start..], header.table_digest),
            ];
            for (part, bytes, expected) in parts {
                if Sha256Digest::of(bytes) != expected {
                    return Err(Error::ChecksumMismatch {
                        path: self.path.clone(),
                        part,
                    });
                }
            }
        }
        self.check_vocabulary()
    }

    fn document_end(&self, index: usize) -> usize {
        match &self.documents {
            // Opening checked that each end is at most the token count, which is a usize.
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
        let damaged = |field, problem: String| {
            Err(Error::DamagedHeader {
                path: self.path.clone(),
                field,
                problem,
            })
        };
        let mut previous = 0;
        let mut text_bytes = 0_u64;
        for (index, document) in self.documents().enumerate() {
            let end = document.tokens.end;
            if end < previous || end > self.len() {
                let problem =
                    format!("{index} ends at token {end}, after one that ends at {previous}");
                return damaged("document", problem);
            }
            previous = end;
            text_bytes = text_bytes.saturating_add(document.text_bytes.unwrap_or(0));
        }
        if previous != self.len() {
            let tokens = self.len();
            return damaged("documents", format!("hold {previous} of {tokens} tokens"));
        }
        if text_bytes != header.text_bytes {
            let promised = header.text_bytes;
            return damaged(
                "text bytes",
                format!("are {promised}, documents have {text_bytes}"),
            );
        }
        Ok(())
    }

    fn check_vocabulary(&self) -> Result<()> {
        let Some(vocab_size) = self.vocab_size else {
            return Ok(());
        };
        if vocab_size >= self.width.max_vocab_size() {
            return Ok(());
        }
        const BLOCK_TOKENS: usize = 1 << 18;
        let width = self.width.bytes();
        let outside = self.map[self.tokens.clone()]
            .par_chunks(BLOCK_TOKENS * width)
            .enumerate()
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

    /// Ends of documents: one past each `token`, and the end of the file.
    fn positions_after(&self, token: u32) -> Vec<usize> {
        let tokens = self.iter(&self.map[self.tokens.clone()]);
        let mut ends: Vec<usize> = tokens
            .enumerate()
            .filter_map(|(position, found)| (found == token).then_some(position + 1))
            .collect();
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

    fn read<T>(&self, start: usize, out: &mut [T], convert: impl Fn(u32) -> T) -> Result<()> {
        let end = start
            .checked_add(out.len())
            .filter(|&end| end <= self.len());
        let Some(end) = end else {
            let end = start.saturating_add(out.len());
            return Err(Error::OutOfRange {
                start,
                end,
                tokens: self.len(),
            });
        };
        let width = self.width.bytes();
        let bytes = &self.map[self.tokens.clone()][start * width..end * width];
        // The largest is tracked, not each compared: a loop without an exit runs on vectors.
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
