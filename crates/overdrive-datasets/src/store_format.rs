//! The file format of a token store.
//!
//! All numbers are little-endian.
//!
//! | bytes | content |
//! |---|---|
//! | 0..256 | header, see below |
//! | 256.. | tokens, 2 or 4 bytes each |
//! | padding to 8 | zeros |
//! | table | an entry of 16 bytes per document: one past its last token (u64), the length of its text in UTF-8 bytes (u64) |
//!
//! | header bytes | field |
//! |---|---|
//! | 0..8 | magic, [`MAGIC`] |
//! | 8..12 | format version, [`FORMAT_VERSION`] |
//! | 12..16 | token width in bytes, 2 or 4 |
//! | 16..24 | vocabulary size: every token is below it |
//! | 24..32 | token count |
//! | 32..40 | document count |
//! | 40..48 | UTF-8 bytes of all documents |
//! | 48..52 | the token that ends a document, or `u32::MAX` |
//! | 52..64 | zeros |
//! | 64..96 | SHA-256 of the tokenizer ([`crate::tokenizer_digest`]), or zeros |
//! | 96..128 | key of the content that it was made from, or zeros |
//! | 128..160 | SHA-256 of the tokens' bytes |
//! | 160..192 | SHA-256 of the document table |
//! | 192..224 | zeros |
//! | 224..256 | SHA-256 of bytes 0..224 |

use std::path::Path;

use crate::{Error, Result, Sha256Digest};

/// The first eight bytes of a token store.
pub const MAGIC: [u8; 8] = *b"OVDTOKEN";
/// The format version that this version of the crate writes and reads.
pub const FORMAT_VERSION: u32 = 1;

pub(crate) const HEADER_BYTES: usize = 256;
pub(crate) const ENTRY_BYTES: usize = 16;
const CHECKED_BYTES: usize = 224;
/// The stored value for a missing end-of-document token; no vocabulary has this id.
const NO_TOKEN: u32 = u32::MAX;

/// The number of bytes of a token on disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum TokenWidth {
    /// Two bytes, for vocabularies up to 65,536 (nanoGPT's `.bin`).
    U16,
    /// Four bytes, for any vocabulary.
    U32,
}

impl TokenWidth {
    /// Returns the smallest width that holds all tokens below `vocab_size`.
    pub fn for_vocab_size(vocab_size: u64) -> Self {
        if vocab_size <= 1 << 16 {
            Self::U16
        } else {
            Self::U32
        }
    }

    /// Returns the number of bytes, 2 or 4.
    pub fn bytes(self) -> usize {
        match self {
            Self::U16 => 2,
            Self::U32 => 4,
        }
    }

    /// Returns the size of the largest vocabulary that fits.
    pub fn max_vocab_size(self) -> u64 {
        match self {
            Self::U16 => 1 << 16,
            Self::U32 => 1 << 32,
        }
    }
}

/// The fields of the header.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Header {
    pub(crate) width: TokenWidth,
    pub(crate) vocab_size: u64,
    pub(crate) tokens: u64,
    pub(crate) documents: u64,
    pub(crate) text_bytes: u64,
    pub(crate) end_of_document: Option<u32>,
    pub(crate) tokenizer: Sha256Digest,
    pub(crate) source: Sha256Digest,
    pub(crate) tokens_digest: Sha256Digest,
    pub(crate) table_digest: Sha256Digest,
}

impl Header {
    pub(crate) fn encode(&self) -> [u8; HEADER_BYTES] {
        let mut bytes = [0; HEADER_BYTES];
        let mut put = |at: usize, field: &[u8]| bytes[at..at + field.len()].copy_from_slice(field);
        put(0, &MAGIC);
        put(8, &FORMAT_VERSION.to_le_bytes());
        put(12, &(self.width.bytes() as u32).to_le_bytes());
        put(16, &self.vocab_size.to_le_bytes());
        put(24, &self.tokens.to_le_bytes());
        put(32, &self.documents.to_le_bytes());
        put(40, &self.text_bytes.to_le_bytes());
        put(48, &self.end_of_document.unwrap_or(NO_TOKEN).to_le_bytes());
        put(64, &self.tokenizer.0);
        put(96, &self.source.0);
        put(128, &self.tokens_digest.0);
        put(160, &self.table_digest.0);
        let digest = Sha256Digest::of(&bytes[..CHECKED_BYTES]);
        bytes[CHECKED_BYTES..].copy_from_slice(&digest.0);
        bytes
    }

    /// Reads and validates the header of the file at `path`, whose whole content is `file`.
    pub(crate) fn decode(file: &[u8], path: &Path) -> Result<Self> {
        let damaged = |problem: String| {
            Err(Error::damaged(
                path,
                format!("{problem}; build the store again"),
            ))
        };
        let wrong_length = |expected: u64| {
            damaged(format!(
                "it has {} bytes where {expected} were expected, so it was truncated or changed after it \
        was written",
                file.len()
            ))
        };
        // The magic is checked before the length: a file of another format should not be called truncated.
        let Some(magic) = file.first_chunk::<8>() else {
            return wrong_length(HEADER_BYTES as u64);
        };
        if *magic != MAGIC {
            return Err(Error::invalid_file(
                path,
                format!(
                    "it is not an Overdrive token store (it starts with {magic:02x?}); open a headerless \
            token file such as nanoGPT's train.bin with TokenStore::open_raw or open_nanogpt"
                ),
            ));
        }
        let Some(bytes) = file.first_chunk::<HEADER_BYTES>() else {
            return wrong_length(HEADER_BYTES as u64);
        };
        let version = u32_at(bytes, 8);
        if version != FORMAT_VERSION {
            return damaged(format!(
                "it has format version {version}, and this version of overdrive-datasets reads version \
            {FORMAT_VERSION}"
            ));
        }
        // Each field is checked before the checksum, so that the error names the field.
        let width = match u32_at(bytes, 12) {
            2 => TokenWidth::U16,
            4 => TokenWidth::U32,
            other => {
                return damaged(format!(
                    "the token width in its header is {other} bytes, expected 2 or 4"
                ));
            }
        };
        let vocab_size = u64_at(bytes, 16);
        if vocab_size == 0 || vocab_size > width.max_vocab_size() {
            return damaged(format!(
                "the vocabulary size in its header is {vocab_size}, expected 1 to {}",
                width.max_vocab_size()
            ));
        }
        let end = u32_at(bytes, 48);
        if end != NO_TOKEN && u64::from(end) >= vocab_size {
            return damaged(format!(
                "the end-of-document token in its header is {end}, outside the vocabulary of {vocab_size}"
            ));
        }
        let header = Self {
            width,
            vocab_size,
            tokens: u64_at(bytes, 24),
            documents: u64_at(bytes, 32),
            text_bytes: u64_at(bytes, 40),
            end_of_document: (end != NO_TOKEN).then_some(end),
            tokenizer: digest_at(bytes, 64),
            source: digest_at(bytes, 96),
            tokens_digest: digest_at(bytes, 128),
            table_digest: digest_at(bytes, 160),
        };
        if Sha256Digest::of(&bytes[..CHECKED_BYTES]) != digest_at(bytes, CHECKED_BYTES) {
            return damaged("the checksum of its header is wrong".to_owned());
        }
        match header.file_bytes() {
            Some(expected) if expected == file.len() as u64 => Ok(header),
            Some(expected) => wrong_length(expected),
            None => damaged("the token count in its header is larger than any file".to_owned()),
        }
    }

    /// Returns the offset at which the tokens end.
    pub(crate) fn tokens_end(&self) -> Option<u64> {
        (self.tokens.checked_mul(self.width.bytes() as u64)?).checked_add(HEADER_BYTES as u64)
    }

    /// Returns the offset of the document table, which is aligned to its 8-byte fields.
    pub(crate) fn table_start(&self) -> Option<u64> {
        self.tokens_end()?.checked_next_multiple_of(8)
    }

    /// Returns the length of the whole file; `None` if it does not fit 64 bits.
    pub(crate) fn file_bytes(&self) -> Option<u64> {
        self.table_start()?
            .checked_add(self.documents.checked_mul(ENTRY_BYTES as u64)?)
    }
}

pub(crate) fn u32_at(bytes: &[u8], at: usize) -> u32 {
    let mut field = [0; 4];
    field.copy_from_slice(&bytes[at..at + 4]);
    u32::from_le_bytes(field)
}

pub(crate) fn u64_at(bytes: &[u8], at: usize) -> u64 {
    let mut field = [0; 8];
    field.copy_from_slice(&bytes[at..at + 8]);
    u64::from_le_bytes(field)
}

pub(crate) fn digest_at(bytes: &[u8], at: usize) -> Sha256Digest {
    let mut field = [0; 32];
    field.copy_from_slice(&bytes[at..at + 32]);
    Sha256Digest(field)
}
