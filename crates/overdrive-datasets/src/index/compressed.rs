//! Compressed files, which are read block by block or unpacked once.

use std::collections::VecDeque;
use std::fs::File;
use std::io::{BufRead, Read};
use std::ops::Range;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

use flate2::bufread::MultiGzDecoder;
use ruzstd::decoding::errors::{FrameDecoderError, ReadFrameHeaderError};
use ruzstd::decoding::{BlockDecodingStrategy, FrameDecoder};

use overdrive_core::Error as CommonError;
use overdrive_core::files::FileMap;

use super::indexed_file::{read_source, unpacked_source};
use crate::range_source::{copy, registered_source};
use crate::{Error, Result};

/// The largest block, in unpacked bytes, that is unpacked for a single record.
const MAX_BLOCK_BYTES: u64 = 16 << 20;
/// The size of the cache of unpacked blocks per file: the next record is often in the same block.
const CACHED_BYTES: usize = 8 << 20;

/// The problem of a file of Zstandard whose end is missing.
const TRUNCATED: &str = "the file ends within a frame: it was truncated";

/// The compression of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Compression {
    Gzip,
    Zstandard,
}

impl Compression {
    /// Returns the compression of a file by its first bytes; `None` if it is not compressed.
    ///
    /// # Errors
    /// [`Error::InvalidFile`] for a compression that is not supported.
    pub(crate) fn of(path: &Path, data: &[u8]) -> Result<Option<Self>> {
        let unsupported = |format: &str| {
            let hint = "unpack it, or compress it with gzip or zstd";
            Err(Error::invalid_file(
                path,
                format!("{format} is not supported here; {hint}"),
            ))
        };
        // Recognized by magic numbers and not by extensions: a compressed file may have any name.
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

    /// Returns a reader of what `packed` unpacks to, with constant memory.
    pub(crate) fn reader<'a>(self, packed: impl BufRead + 'a) -> Box<dyn Read + 'a> {
        match self {
            // A gzip file may consist of several members, and all of them count.
            Self::Gzip => Box::new(MultiGzDecoder::new(packed)),
            Self::Zstandard => Box::new(Frames {
                source: packed,
                decoder: FrameDecoder::new(),
                in_frame: false,
            }),
        }
    }
}

/// Reads the first `bytes` of a file, unpacked if it is compressed.
pub(crate) fn read_start(path: &Path, bytes: u64) -> Result<Vec<u8>> {
    if let Some(source) = registered_source(path) {
        return match unpacked_source(path, &source)? {
            Some(unpacked) => read_start(&unpacked, bytes),
            None => read_source(source.as_ref(), 0..bytes.min(source.len())),
        };
    }
    let data = FileMap::open(path)?;
    let reader: Box<dyn Read> = match Compression::of(path, &data)? {
        None => Box::new(&data[..]),
        Some(compression) => compression.reader(&data[..]),
    };
    let mut start = Vec::new();
    let mut reader = reader.take(bytes);
    reader
        .read_to_end(&mut start)
        .map_err(CommonError::io("unpack", path))?;
    Ok(start)
}

/// A reader of concatenated Zstandard frames, of which only the next bytes are in memory.
struct Frames<R> {
    source: R,
    decoder: FrameDecoder,
    in_frame: bool,
}

impl<R: BufRead> Frames<R> {
    /// Reads the header of the next frame that holds data; returns `false` at the end of the source.
    fn begin_frame(&mut self) -> std::io::Result<bool> {
        while !self.source.fill_buf()?.is_empty() {
            let length = match self.decoder.reset(&mut self.source) {
                Ok(()) => return Ok(true),
                Err(FrameDecoderError::ReadFrameHeaderError(ReadFrameHeaderError::SkipFrame {
                    length,
                    ..
                })) => u64::from(length),
                Err(error) => return Err(self.problem(error)),
            };
            let mut skipped = self.source.by_ref().take(length);
            if std::io::copy(&mut skipped, &mut std::io::sink())? < length {
                return Err(std::io::Error::other(TRUNCATED));
            }
        }
        Ok(false)
    }

    /// Returns the error of a frame: ruzstd's text about a file that ends early does not say so.
    fn problem(&mut self, error: FrameDecoderError) -> std::io::Error {
        match self.source.fill_buf() {
            Ok([]) => std::io::Error::other(format!("{TRUNCATED}, or is damaged ({error})")),
            _ => std::io::Error::other(error),
        }
    }
}

impl<R: BufRead> Read for Frames<R> {
    fn read(&mut self, out: &mut [u8]) -> std::io::Result<usize> {
        if out.is_empty() {
            return Ok(0);
        }
        while self.in_frame || self.begin_frame()? {
            self.in_frame = true;
            while self.decoder.can_collect() == 0 && !self.decoder.is_finished() {
                let one = BlockDecodingStrategy::UptoBlocks(1);
                let decoded = self.decoder.decode_blocks(&mut self.source, one);
                decoded.map_err(|error| self.problem(error))?;
            }
            let read = self.decoder.read(out)?;
            if read > 0 {
                return Ok(read);
            }
            check_sum(&self.decoder)?;
            self.in_frame = false;
        }
        Ok(0)
    }
}

/// Compares the checksum of a frame that has been read, which ruzstd computes but does not compare.
fn check_sum(decoder: &FrameDecoder) -> std::io::Result<()> {
    let sums = (
        decoder.get_checksum_from_data(),
        decoder.get_calculated_checksum(),
    );
    match sums {
        (Some(expected), Some(found)) if expected != found => {
            Err(std::io::Error::other("its checksum is wrong"))
        }
        _ => Ok(()),
    }
}

/// The blocks of a compressed file, each of which can be unpacked alone.
#[derive(Debug)]
pub(crate) struct Blocks {
    compression: Compression,
    /// The start of each block in the file and in the unpacked bytes; the last entry has the two ends.
    starts: Vec<(u64, u64)>,
    cache: Mutex<VecDeque<(usize, Arc<Vec<u8>>)>>,
}

/// The header of a block.
struct Block {
    compressed: usize,
    /// The unpacked size; `None` if the header does not have it.
    unpacked: Option<u64>,
    is_skipped: bool,
}

impl Blocks {
    /// Finds the blocks of a file by their headers alone, without unpacking; `None` if it does not consist of blocks that
    /// are small enough to be unpacked for a single record.
    ///
    /// # Errors
    /// [`Error::InvalidFile`] if the file is damaged.
    pub(crate) fn find(path: &Path, compression: Compression, data: &[u8]) -> Result<Option<Self>> {
        let mut starts = Vec::new();
        let (mut compressed, mut unpacked) = (0, 0_u64);
        while compressed < data.len() {
            let block = match compression {
                Compression::Gzip => bgzf_block(&data[compressed..]),
                Compression::Zstandard => zstandard_frame(&data[compressed..]).map(Some),
            };
            let block = block.map_err(|problem| {
                Error::invalid_file(path, format!("at byte {compressed}, {problem}"))
            })?;
            let Some(block) = block else {
                return Ok(None);
            };
            if !block.is_skipped {
                let Some(size) = block.unpacked.filter(|&size| size <= MAX_BLOCK_BYTES) else {
                    return Ok(None);
                };
                starts.push((compressed as u64, unpacked));
                unpacked += size;
            }
            compressed += block.compressed;
        }
        starts.push((compressed as u64, unpacked));
        Ok(Some(Self {
            compression,
            starts,
            cache: Mutex::default(),
        }))
    }

    /// Returns the number of unpacked bytes.
    pub(crate) fn unpacked_bytes(&self) -> u64 {
        self.starts.last().map_or(0, |&(_, unpacked)| unpacked)
    }

    pub(crate) fn compression(&self) -> Compression {
        self.compression
    }

    /// Returns a range of the unpacked bytes, within [`Blocks::unpacked_bytes`].
    pub(crate) fn read(
        &self,
        data: &[u8],
        range: &Range<u64>,
    ) -> std::result::Result<Vec<u8>, String> {
        let mut out = Vec::with_capacity((range.end - range.start) as usize);
        let first = self
            .starts
            .partition_point(|&(_, unpacked)| unpacked <= range.start);
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
        // The list is valid whenever the lock is released. Nothing is unpacked under the lock.
        let lock = || self.cache.lock().unwrap_or_else(PoisonError::into_inner);
        let find = |cache: &VecDeque<(usize, Arc<Vec<u8>>)>| {
            let found = cache.iter().find(|(other, _)| *other == number);
            found.map(|(_, block)| Arc::clone(block))
        };
        if let Some(block) = find(&lock()) {
            return Ok(block);
        }
        let block = Arc::new(self.unpack_block(data, number)?);
        let mut cache = lock();
        // Another thread may have unpacked it in the meantime; a second copy would displace other blocks.
        if let Some(block) = find(&cache) {
            return Ok(block);
        }
        cache.push_back((number, Arc::clone(&block)));
        let mut bytes: usize = cache.iter().map(|(_, block)| block.len()).sum();
        // The cache drops its oldest blocks; a record is often read with its neighbours, and rarely again.
        while bytes > CACHED_BYTES {
            bytes -= cache.pop_front().map_or(bytes, |(_, block)| block.len());
        }
        Ok(block)
    }

    fn unpack_block(&self, data: &[u8], number: usize) -> std::result::Result<Vec<u8>, String> {
        let (start, end) = match self.starts.get(number..number + 2) {
            Some([start, end]) => (start, end),
            _ => return Err("the compressed file ends before the record does".to_owned()),
        };
        let expected = end.1 - start.1;
        let compressed = data
            .get(start.0 as usize..end.0 as usize)
            .unwrap_or_default();
        let mut block = Vec::with_capacity(expected as usize);
        let damaged = |problem: String| {
            format!(
                "the compressed block at byte {} is damaged: {problem}",
                start.0
            )
        };
        // One byte more than expected, to detect a block that is too long.
        let mut reader = self.compression.reader(compressed).take(expected + 1);
        let read = reader.read_to_end(&mut block);
        read.map_err(|error| damaged(error.to_string()))?;
        if block.len() as u64 != expected {
            return Err(damaged(format!(
                "{} bytes instead of {expected}",
                block.len()
            )));
        }
        Ok(block)
    }
}

/// Parses the header of a BGZF block (the blocked gzip of bgzip, SAM specification 4.1); returns `None` for
/// plain gzip.
fn bgzf_block(data: &[u8]) -> std::result::Result<Option<Block>, String> {
    let cut = || "the file ends within a block: it was truncated".to_owned();
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
            let compressed = usize::from(u16::from_le_bytes([rest[0], rest[1]])) + 1;
            let tail = compressed
                .checked_sub(4)
                .and_then(|tail| data.get(tail..compressed));
            let tail = tail.ok_or_else(cut)?;
            let unpacked = u32::from_le_bytes([tail[0], tail[1], tail[2], tail[3]]);
            return Ok(Some(Block {
                compressed,
                unpacked: Some(u64::from(unpacked)),
                // An end-of-file marker of bgzip is an empty block, which holds no bytes.
                is_skipped: unpacked == 0,
            }));
        }
        extra = rest.get(length..).unwrap_or_default();
    }
    Ok(None)
}

/// Parses the header of a Zstandard frame (RFC 8878, section 3.1) and finds its end.
fn zstandard_frame(data: &[u8]) -> std::result::Result<Block, String> {
    let cut = || TRUNCATED.to_owned();
    let magic = data.get(..4).ok_or_else(cut)?;
    if let [0x50..=0x5f, 0x2a, 0x4d, 0x18] = magic {
        let size = data.get(4..8).ok_or_else(cut)?;
        let compressed = 8 + u32::from_le_bytes([size[0], size[1], size[2], size[3]]) as usize;
        data.get(..compressed).ok_or_else(cut)?;
        return Ok(Block {
            compressed,
            unpacked: None,
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
    let unpacked = match size_bytes {
        0 => None,
        // The two-byte field stores the size minus 256 (RFC 8878, section 3.1.1.1.4).
        2 => Some(u64::from_le_bytes(number) + 256),
        _ => Some(u64::from_le_bytes(number)),
    };
    let mut at = size_at + size_bytes;
    loop {
        let header = data.get(at..at + 3).ok_or_else(cut)?;
        let header = u32::from_le_bytes([header[0], header[1], header[2], 0]);
        let size = match header >> 1 & 3 {
            // An RLE block stores one byte; its size field is the number of repetitions.
            1 => 1,
            3 => return Err("a block of an unknown kind".to_owned()),
            _ => (header >> 3) as usize,
        };
        at += 3 + size;
        if header & 1 == 1 {
            break;
        }
    }
    let compressed = at + if has_checksum { 4 } else { 0 };
    data.get(..compressed).ok_or_else(cut)?;
    Ok(Block {
        compressed,
        unpacked,
        // An empty frame has no bytes to read, so it needs no entry.
        is_skipped: unpacked == Some(0),
    })
}

/// Unpacks into a file without a name, which is removed with its last handle. More than the
/// `expected` bytes, which the headers of the blocks give, are an error, so that a damaged file
/// cannot fill the disk.
pub(crate) fn unpack_to_temporary_file(
    compression: Compression,
    path: &Path,
    data: &[u8],
    expected: u64,
) -> Result<File> {
    let folder = std::env::temp_dir();
    let mut file = tempfile::tempfile().map_err(CommonError::io("create a file in", &folder))?;
    let reader = compression.reader(data).take(expected.saturating_add(1));
    let to = ("write to a file in", folder.as_path());
    let unpacked = copy(reader, ("unpack", path), &mut file, to)?;
    if unpacked > expected {
        let problem =
            format!("it unpacks to more than the {expected} bytes that its headers declare");
        return Err(Error::invalid_file(path, problem));
    }
    Ok(file)
}

#[cfg(test)]
mod tests {
    use std::io::BufReader;

    use super::*;

    #[test]
    fn a_stream_of_frames_is_read_to_its_end_and_one_that_ends_within_a_frame_is_an_error() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/compressed");
        let frames = std::fs::read(folder.join("frames.txt.zst")).unwrap();
        let skipped = [&[0x5a, 0x2a, 0x4d, 0x18, 3, 0, 0, 0][..], b"abc"].concat();
        let packed = [&skipped[..], &frames, &skipped].concat();
        let read = |bytes: usize| {
            let packed = BufReader::with_capacity(7, &packed[..bytes]);
            let mut unpacked = Vec::new();
            let mut reader = Compression::Zstandard.reader(packed);
            reader.read_to_end(&mut unpacked).map(|_| unpacked)
        };
        let all = read(packed.len()).unwrap();
        assert_eq!(all.split(|&byte| byte == b'\n').count(), 3000);
        let mut ends = vec![0];
        while ends[ends.len() - 1] < packed.len() {
            let start = ends[ends.len() - 1];
            ends.push(start + zstandard_frame(&packed[start..]).unwrap().compressed);
        }
        for end in (0..=packed.len()).step_by(97).chain(ends.clone()) {
            match read(end) {
                Ok(start) => assert!(ends.contains(&end) && all.starts_with(&start), "{end}"),
                Err(error) => {
                    assert!(!ends.contains(&end), "{end}: {error}");
                    assert!(error.to_string().starts_with(TRUNCATED), "{end}: {error}");
                }
            }
        }
    }
}
