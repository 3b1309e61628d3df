//! Compressed files: in blocks of which each can be read alone, or unpacked once.

use std::collections::VecDeque;
use std::fs::File;
use std::io::{Read, Write};
use std::ops::Range;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

use flate2::bufread::{GzDecoder, MultiGzDecoder};
use ruzstd::decoding::{FrameDecoder, StreamingDecoder};

use crate::mmap::map_file;
use crate::{Error, Result};

/// A block that is larger when it is unpacked is too much to unpack for one record.
const MAX_BLOCK: u64 = 16 << 20;
/// Unpacked blocks that are kept for the next record, a file.
const KEPT_BYTES: usize = 8 << 20;

/// How a file is compressed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Packing {
    Gzip,
    Zstandard,
}

impl Packing {
    /// Of a file with these first bytes; `None`: it is not compressed.
    ///
    /// # Errors
    /// When it is compressed in a way that cannot be read.
    pub(crate) fn of(path: &Path, data: &[u8]) -> Result<Option<Self>> {
        let unsupported = |format| {
            Err(Error::UnsupportedFormat {
                path: path.to_owned(),
                format,
                hint: "unpack it, or compress it with bgzip or zstd",
            })
        };
        match data {
            [0x1f, 0x8b, 8, ..] => Ok(Some(Self::Gzip)),
            [0x28, 0xb5, 0x2f, 0xfd, ..] | [0x50..=0x5f, 0x2a, 0x4d, 0x18, ..] => {
                Ok(Some(Self::Zstandard))
            }
            [b'B', b'Z', b'h', b'1'..=b'9', 0x31, 0x41, 0x59, 0x26, ..] => unsupported("bzip2"),
            [0xfd, b'7', b'z', b'X', b'Z', 0, ..] => unsupported("xz"),
            [b'P', b'K', 3, 4, ..] => unsupported("a zip archive"),
            _ => Ok(None),
        }
    }

    fn name(self) -> &'static str {
        match self {
            Self::Gzip => "gzip in one piece",
            Self::Zstandard => "Zstandard in one piece",
        }
    }

    fn hint(self) -> &'static str {
        match self {
            Self::Gzip => {
                "set IndexOptions::unpack to have it unpacked into the cache once, unpack it with \
                 gunzip, or compress it again with bgzip, whose blocks can be read alone"
            }
            Self::Zstandard => {
                "set IndexOptions::unpack to have it unpacked into the cache once, unpack it with \
                 unzstd, or compress it again in frames of at most 16 MiB that say their size \
                 (pzstd, or zstd on each part of `split` and the parts put together with `cat`)"
            }
        }
    }

    /// Unpacks all of `data` into `out`, with flat memory.
    pub(crate) fn unpack(self, data: &[u8], out: &mut impl Write) -> std::io::Result<u64> {
        std::io::copy(&mut self.reader(data), out)
    }

    fn reader(self, data: &[u8]) -> Box<dyn Read + '_> {
        match self {
            Self::Gzip => Box::new(MultiGzDecoder::new(data)),
            Self::Zstandard => Box::new(Frames {
                rest: data,
                frame: None,
            }),
        }
    }
}

/// Reads a file, unpacked where it is compressed.
pub(crate) fn read_start(path: &Path, bytes: u64) -> Result<Vec<u8>> {
    let data = map_file(path)?;
    let reader: Box<dyn Read> = match Packing::of(path, &data)? {
        None => Box::new(&data[..]),
        Some(packing) => packing.reader(&data),
    };
    let mut start = Vec::new();
    let mut reader = reader.take(bytes);
    reader
        .read_to_end(&mut start)
        .map_err(Error::io("unpack", path))?;
    Ok(start)
}

/// Frames of Zstandard one behind the other.
struct Frames<'a> {
    rest: &'a [u8],
    frame: Option<Box<StreamingDecoder<&'a [u8], FrameDecoder>>>,
}

impl Read for Frames<'_> {
    fn read(&mut self, out: &mut [u8]) -> std::io::Result<usize> {
        loop {
            if let Some(frame) = &mut self.frame {
                let read = frame.read(out)?;
                if read > 0 || out.is_empty() {
                    return Ok(read);
                }
                let decoder = &frame.decoder;
                let sums = (
                    decoder.get_checksum_from_data(),
                    decoder.get_calculated_checksum(),
                );
                if let (Some(expected), Some(found)) = sums
                    && expected != found
                {
                    return Err(std::io::Error::other("it does not have its checksum"));
                }
                self.frame = None;
            }
            if self.rest.is_empty() {
                return Ok(0);
            }
            let frame = zstandard_frame(self.rest).map_err(std::io::Error::other)?;
            let (bytes, rest) = self.rest.split_at(frame.packed);
            self.rest = rest;
            if !frame.is_skipped {
                let decoder = StreamingDecoder::new(bytes).map_err(std::io::Error::other)?;
                self.frame = Some(Box::new(decoder));
            }
        }
    }
}

/// The blocks of a compressed file, of which each can be unpacked alone.
#[derive(Debug)]
pub(crate) struct Blocks {
    packing: Packing,
    /// Where each block starts in the file, and what it holds in the unpacked bytes; then the ends.
    starts: Vec<(u64, u64)>,
    kept: Mutex<VecDeque<(usize, Arc<Vec<u8>>)>>,
}

/// What the header of a block says.
struct Block {
    packed: usize,
    /// `None` where the header does not say it.
    plain: Option<u64>,
    is_skipped: bool,
}

impl Blocks {
    /// The blocks of a file, found by their headers alone: nothing is unpacked.
    ///
    /// # Errors
    /// When the file is damaged, and when it is one piece.
    pub(crate) fn find(path: &Path, packing: Packing, data: &[u8]) -> Result<Self> {
        let mut starts = Vec::new();
        let (mut packed, mut plain) = (0, 0_u64);
        while packed < data.len() {
            let block = match packing {
                Packing::Gzip => bgzf_block(&data[packed..]),
                Packing::Zstandard => zstandard_frame(&data[packed..]).map(Some),
            };
            let block = block.map_err(|problem| Error::MalformedFile {
                path: path.to_owned(),
                offset: packed as u64,
                problem,
            })?;
            let one_piece = || Error::UnsupportedFormat {
                path: path.to_owned(),
                format: packing.name(),
                hint: packing.hint(),
            };
            let block = block.ok_or_else(one_piece)?;
            if !block.is_skipped {
                let size = block.plain.filter(|&size| size <= MAX_BLOCK);
                let size = size.ok_or_else(one_piece)?;
                starts.push((packed as u64, plain));
                plain += size;
            }
            packed += block.packed;
        }
        starts.push((packed as u64, plain));
        Ok(Self {
            packing,
            starts,
            kept: Mutex::default(),
        })
    }

    /// The number of unpacked bytes.
    pub(crate) fn plain_bytes(&self) -> u64 {
        self.starts.last().map_or(0, |&(_, plain)| plain)
    }

    pub(crate) fn packing(&self) -> Packing {
        self.packing
    }

    /// A range of the unpacked bytes, within [`Blocks::plain_bytes`].
    pub(crate) fn read(
        &self,
        data: &[u8],
        range: &Range<u64>,
    ) -> std::result::Result<Vec<u8>, String> {
        let mut out = Vec::with_capacity((range.end - range.start) as usize);
        let first = self
            .starts
            .partition_point(|&(_, plain)| plain <= range.start);
        let mut number = first.saturating_sub(1);
        while (out.len() as u64) < range.end - range.start {
            let block = self.block(data, number)?;
            let start = self.starts[number].1;
            let from = range.start.saturating_sub(start) as usize;
            let to = block.len().min(range.end.saturating_sub(start) as usize);
            out.extend(block.get(from..to).unwrap_or_default());
            number += 1;
        }
        Ok(out)
    }

    fn block(&self, data: &[u8], number: usize) -> std::result::Result<Arc<Vec<u8>>, String> {
        // The list is whole whenever the lock is given back. Nothing is unpacked under it.
        let lock = || self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, block)) = lock().iter().find(|(other, _)| *other == number) {
            return Ok(Arc::clone(block));
        }
        let block = Arc::new(self.unpack_block(data, number)?);
        let mut kept = lock();
        kept.push_back((number, Arc::clone(&block)));
        let mut bytes: usize = kept.iter().map(|(_, block)| block.len()).sum();
        while bytes > KEPT_BYTES {
            bytes -= kept.pop_front().map_or(bytes, |(_, block)| block.len());
        }
        Ok(block)
    }

    fn unpack_block(&self, data: &[u8], number: usize) -> std::result::Result<Vec<u8>, String> {
        let (start, end) = match self.starts.get(number..number + 2) {
            Some([start, end]) => (start, end),
            _ => return Err("the compressed file ends before the record does".to_owned()),
        };
        let expected = end.1 - start.1;
        let packed = data
            .get(start.0 as usize..end.0 as usize)
            .unwrap_or_default();
        let mut block = Vec::with_capacity(expected as usize);
        let damaged = |problem: String| {
            format!(
                "the compressed block at byte {} is damaged: {problem}",
                start.0
            )
        };
        match self.packing {
            // One byte more than expected, so that a block that is longer is noticed.
            Packing::Gzip => GzDecoder::new(packed)
                .take(expected + 1)
                .read_to_end(&mut block)
                .map(drop),
            Packing::Zstandard => Frames {
                rest: packed,
                frame: None,
            }
            .take(expected + 1)
            .read_to_end(&mut block)
            .map(drop),
        }
        .map_err(|error| damaged(error.to_string()))?;
        if block.len() as u64 != expected {
            return Err(damaged(format!(
                "{} bytes instead of {expected}",
                block.len()
            )));
        }
        Ok(block)
    }
}

/// The block of BGZF (the blocked gzip of bgzip, SAM specification 4.1) that starts here; `None`: it
/// is plain gzip.
fn bgzf_block(data: &[u8]) -> std::result::Result<Option<Block>, String> {
    let cut = || "the file ends within a block: it was cut short".to_owned();
    let header = data.get(..12).ok_or_else(cut)?;
    if header[..3] != [0x1f, 0x8b, 8] {
        return Err("expected another block of gzip".to_owned());
    }
    const EXTRA: u8 = 4;
    if header[3] & EXTRA == 0 {
        return Ok(None);
    }
    let length = usize::from(u16::from_le_bytes([header[10], header[11]]));
    let mut extra = data.get(12..12 + length).ok_or_else(cut)?;
    while let [a, b, low, high, rest @ ..] = extra {
        let length = usize::from(u16::from_le_bytes([*low, *high]));
        if [*a, *b] == *b"BC" && length == 2 && rest.len() >= 2 {
            let packed = usize::from(u16::from_le_bytes([rest[0], rest[1]])) + 1;
            let tail = packed
                .checked_sub(4)
                .and_then(|tail| data.get(tail..packed));
            let tail = tail.ok_or_else(cut)?;
            let plain = u32::from_le_bytes([tail[0], tail[1], tail[2], tail[3]]);
            return Ok(Some(Block {
                packed,
                plain: Some(u64::from(plain)),
                is_skipped: plain == 0,
            }));
        }
        extra = rest.get(length..).unwrap_or_default();
    }
    Ok(None)
}

/// The frame of Zstandard (RFC 8878, section 3.1) that starts here.
fn zstandard_frame(data: &[u8]) -> std::result::Result<Block, String> {
    let cut = || "the file ends within a frame: it was cut short".to_owned();
    let magic = data.get(..4).ok_or_else(cut)?;
    if let [0x50..=0x5f, 0x2a, 0x4d, 0x18] = magic {
        let size = data.get(4..8).ok_or_else(cut)?;
        let packed = 8 + u32::from_le_bytes([size[0], size[1], size[2], size[3]]) as usize;
        data.get(..packed).ok_or_else(cut)?;
        return Ok(Block {
            packed,
            plain: None,
            is_skipped: true,
        });
    }
    if magic != [0x28, 0xb5, 0x2f, 0xfd] {
        return Err("expected another frame of Zstandard".to_owned());
    }
    let descriptor = *data.get(4).ok_or_else(cut)?;
    let is_single = descriptor & 0x20 != 0;
    let has_checksum = descriptor & 4 != 0;
    let dictionary_bytes = [0, 1, 2, 4][usize::from(descriptor & 3)];
    let size_bytes = match descriptor >> 6 {
        0 => usize::from(is_single),
        flag => 1 << flag,
    };
    let size_at = 5 + usize::from(!is_single) + dictionary_bytes;
    let size = data.get(size_at..size_at + size_bytes).ok_or_else(cut)?;
    let mut number = [0; 8];
    number[..size_bytes].copy_from_slice(size);
    let plain = match size_bytes {
        0 => None,
        2 => Some(u64::from_le_bytes(number) + 256),
        _ => Some(u64::from_le_bytes(number)),
    };
    let mut at = size_at + size_bytes;
    loop {
        let header = data.get(at..at + 3).ok_or_else(cut)?;
        let header = u32::from_le_bytes([header[0], header[1], header[2], 0]);
        let size = match header >> 1 & 3 {
            // A byte and how often it comes.
            1 => 1,
            3 => return Err("a block of a kind that there is not".to_owned()),
            _ => (header >> 3) as usize,
        };
        at += 3 + size;
        if header & 1 == 1 {
            break;
        }
    }
    let packed = at + if has_checksum { 4 } else { 0 };
    data.get(..packed).ok_or_else(cut)?;
    Ok(Block {
        packed,
        plain,
        // An empty frame has nothing to read.
        is_skipped: plain == Some(0),
    })
}

/// Unpacks into a file without a name, which is gone when its last handle is.
pub(crate) fn unpack_for_now(packing: Packing, path: &Path, data: &[u8]) -> Result<File> {
    let folder = std::env::temp_dir();
    let mut file = tempfile::tempfile().map_err(Error::io("create a file in", &folder))?;
    packing
        .unpack(data, &mut file)
        .map_err(Error::io("unpack", path))?;
    Ok(file)
}
