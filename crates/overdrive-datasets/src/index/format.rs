//! The file format of an index, and the identity of its data.
//!
//! All numbers are little-endian.
//!
//! | bytes | content |
//! |---|---|
//! | 0..8 | magic |
//! | 8..12 | format version |
//! | 12..16 | CRC-32C of the directory |
//! | 16..24 | number of offsets: the start of each record, and the end of the last one |
//! | 24..32 | size of the blocks, in bytes |
//! | 32..40 | length of the data |
//! | 40..48 | modification time of the data, seconds |
//! | 48..52 | the same, nanoseconds |
//! | 52..56 | change time of the data (Unix), nanoseconds |
//! | 56..64 | the same, seconds |
//! | 64..96 | SHA-256 of a sample of the data |
//! | 96..128 | SHA-256 of the data's path and of the scan's key |
//! | 128..132 | zeros |
//! | 132..136 | CRC-32C of bytes 0..132 |
//! | 136.. | blocks (`offsets`), then their directory, with a CRC-32C of each block |

use std::path::Path;

use crate::digest::FieldHasher;
use crate::file_state::{FileState, Time};
use crate::range_source::RangeSource;
use crate::store_format::{digest_at, u32_at, u64_at};
use crate::{Error, Result, Sha256Digest};

use super::offsets::{FinishedOffsets, OffsetTable};

const MAGIC: [u8; 8] = *b"OVDINDEX";
const VERSION: u32 = 2;
pub(crate) const HEADER_BYTES: usize = 136;
const CHECKED_BYTES: usize = 132;

/// The identity of the data that an index belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Identity {
    pub(crate) state: FileState,
    sample: Sha256Digest,
    key: Sha256Digest,
}

impl Identity {
    /// Returns the identity of the file at `path` with this state and content, for the scan with this key.
    pub(crate) fn of(path: &Path, state: FileState, data: &[u8], scan_key: &[u8]) -> Self {
        Self {
            state,
            sample: sample(data),
            key: FieldHasher::default()
                .field(&VERSION.to_le_bytes())
                .field(path.as_os_str().as_encoded_bytes())
                .field(scan_key)
                .finish(),
        }
    }

    /// Returns the identity of an object on a server: its version takes the place of the times and of the sample.
    pub(crate) fn of_source(path: &Path, source: &dyn RangeSource, scan_key: &[u8]) -> Self {
        Self {
            state: FileState::of_source(source),
            sample: Sha256Digest::of(source.version().as_bytes()),
            ..Self::of(path, FileState::of_source(source), &[], scan_key)
        }
    }

    /// Returns a key of the path and the format, without the content: the index of changed content is replaced.
    pub(crate) fn key(&self) -> Sha256Digest {
        self.key
    }

    /// Returns a key of the unpacked content. It depends on the state and on a sample of the compressed file, but
    /// not on its path.
    pub(crate) fn unpacked_key(&self) -> Sha256Digest {
        let FileState {
            bytes,
            modified,
            changed,
        } = self.state;
        let mut hasher = FieldHasher::default()
            .field(b"unpacked 2")
            .field(&bytes.to_le_bytes())
            .field(&self.sample.0);
        for time in [modified, changed] {
            hasher.add(&time.s.to_le_bytes());
            hasher.add(&time.ns.to_le_bytes());
        }
        hasher.finish()
    }
}

/// Returns the digest of 16 pages spread evenly over the data, including the first and the last one. Hashing
/// all of a large file would take longer than opening it may.
fn sample(data: &[u8]) -> Sha256Digest {
    const PAGES: usize = 16;
    const PAGE: usize = 4096;
    if data.len() <= PAGES * PAGE {
        return Sha256Digest::of(data);
    }
    let mut hasher = FieldHasher::default();
    for page in 0..PAGES {
        // The product cannot overflow in 128 bits; the start is at most `len - PAGE`.
        let start = (data.len() - PAGE) as u128 * page as u128 / (PAGES as u128 - 1);
        hasher.add(&data[start as usize..][..PAGE]);
    }
    hasher.finish()
}

/// The header of an index file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Header {
    pub(crate) identity: Identity,
    pub(crate) offsets: FinishedOffsets,
}

impl Header {
    pub(crate) fn encode(&self) -> [u8; HEADER_BYTES] {
        let mut bytes = [0; HEADER_BYTES];
        let mut put = |at: usize, field: &[u8]| bytes[at..at + field.len()].copy_from_slice(field);
        let Self { identity, offsets } = self;
        put(0, &MAGIC);
        put(8, &VERSION.to_le_bytes());
        put(12, &offsets.directory_crc.to_le_bytes());
        put(16, &offsets.count.to_le_bytes());
        put(24, &offsets.blocks_bytes.to_le_bytes());
        put(32, &identity.state.bytes.to_le_bytes());
        put(40, &identity.state.modified.s.to_le_bytes());
        put(48, &identity.state.modified.ns.to_le_bytes());
        put(52, &identity.state.changed.ns.to_le_bytes());
        put(56, &identity.state.changed.s.to_le_bytes());
        put(64, &identity.sample.0);
        put(96, &identity.key.0);
        let crc = crc32c::crc32c(&bytes[..CHECKED_BYTES]);
        bytes[CHECKED_BYTES..].copy_from_slice(&crc.to_le_bytes());
        bytes
    }

    /// Reads a header and validates everything after it, so that an opened index can be relied on. No record may
    /// end after `data_bytes`.
    pub(crate) fn decode(file: &[u8], path: &Path, data_bytes: u64) -> Result<Self> {
        let damaged = |problem: &str| damaged_index(path, problem);
        let bytes = file
            .get(..HEADER_BYTES)
            .ok_or_else(|| damaged("it is shorter than a header"))?;
        if bytes[..8] != MAGIC {
            return Err(damaged(
                "it does not begin with the magic bytes of an index",
            ));
        }
        if u32_at(bytes, 8) != VERSION {
            return Err(damaged("it has another format version"));
        }
        if crc32c::crc32c(&bytes[..CHECKED_BYTES]) != u32_at(bytes, CHECKED_BYTES) {
            return Err(damaged("the checksum of its header is wrong"));
        }
        let header = Self {
            identity: Identity {
                state: FileState {
                    bytes: u64_at(bytes, 32),
                    modified: Time {
                        s: u64_at(bytes, 40) as i64,
                        ns: u32_at(bytes, 48),
                    },
                    changed: Time {
                        s: u64_at(bytes, 56) as i64,
                        ns: u32_at(bytes, 52),
                    },
                },
                sample: digest_at(bytes, 64),
                key: digest_at(bytes, 96),
            },
            offsets: FinishedOffsets {
                count: u64_at(bytes, 16),
                blocks_bytes: u64_at(bytes, 24),
                directory_crc: u32_at(bytes, 12),
            },
        };
        let expected = OffsetTable::directory_bytes(header.offsets.count).and_then(|directory| {
            directory
                .checked_add(header.offsets.blocks_bytes)?
                .checked_add(HEADER_BYTES as u64)
        });
        if expected != Some(file.len() as u64) || header.offsets.count == 0 {
            return Err(damaged("its length is not the one in its header"));
        }
        let (blocks, directory) = header.offset_bytes(file);
        if crc32c::crc32c(directory) != header.offsets.directory_crc {
            return Err(damaged("the checksum of its directory is wrong"));
        }
        let table = OffsetTable::new(blocks, directory, header.offsets.count as usize);
        // Validating all blocks reads the whole index once, which is small compared with the data.
        match table.first_damaged_block(data_bytes) {
            None => Ok(header),
            Some(block) => Err(damaged(&format!("the checksum of block {block} is wrong"))),
        }
    }

    /// Returns the blocks and the directory out of the bytes of the whole file.
    pub(crate) fn offset_bytes<'a>(&self, file: &'a [u8]) -> (&'a [u8], &'a [u8]) {
        let body = file.get(HEADER_BYTES..).unwrap_or_default();
        let blocks = usize::try_from(self.offsets.blocks_bytes).unwrap_or(usize::MAX);
        body.split_at(blocks.min(body.len()))
    }
}

/// Returns the error of a damaged index of `path`.
pub(crate) fn damaged_index(path: &Path, problem: &str) -> Error {
    Error::damaged(
        path,
        format!(
            "its index cannot be used, since {problem}; delete it, or open with \
IndexOptions {{ rebuild: true, .. }}"
        ),
    )
}
