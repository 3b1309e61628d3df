//! Monotone offsets in about one byte each.
//!
//! Elias-Fano coding (P. Elias, "Efficient storage and retrieval by content and address of static
//! files", J. ACM 1974; R. Fano, 1971), in pieces of 4096 values. In a piece each value has its low
//! bits stored as they are and its high bits as the distance between ones in a bit string, so that
//! records of L bytes on average take about `2 + log2(L)` bits: 8 bits for lines of 50 bytes, 16 for
//! records of 16 KiB. A piece fits its own records, so a file of mixed sizes costs no more.
//!
//! A value is found by one look into the directory, one into the samples (every 64th one of the bit
//! string) and a walk over a few words: at most 192 of them whatever the values are, since a piece
//! has at most 3 * 4096 + 1 bits.

use std::io::Write;
use std::ops::Range;

/// Values in a piece.
pub(crate) const PIECE: usize = 4096;
/// One of so many ones of the bit string has its place written down.
const SAMPLE: usize = 64;
/// Bytes of a directory entry: base (u64), place of the piece (u64), CRC-32C (u32), width (u8), zeros.
pub(crate) const ENTRY_BYTES: usize = 24;

/// Writes monotone values as pieces; the directory comes behind them.
pub(crate) struct OffsetsWriter<W> {
    out: W,
    /// Bytes given to `out`.
    written: u64,
    pending: Vec<u64>,
    directory: Vec<u8>,
    count: u64,
    piece: Vec<u8>,
}

impl<W: Write> OffsetsWriter<W> {
    pub(crate) fn new(out: W) -> Self {
        Self {
            out,
            written: 0,
            pending: Vec::with_capacity(PIECE),
            directory: Vec::new(),
            count: 0,
            piece: Vec::new(),
        }
    }

    /// Adds a value, which must not be smaller than the one before.
    pub(crate) fn push(&mut self, value: u64) -> std::io::Result<()> {
        debug_assert!(self.pending.last().is_none_or(|&last| last <= value));
        self.pending.push(value);
        if self.pending.len() == PIECE {
            self.flush()?;
        }
        Ok(())
    }

    /// Writes what is left, then the directory. Gives back the writer and the directory's length.
    pub(crate) fn finish(mut self) -> std::io::Result<(W, FinishedOffsets)> {
        if !self.pending.is_empty() {
            self.flush()?;
        }
        self.out.write_all(&self.directory)?;
        let finished = FinishedOffsets {
            count: self.count,
            pieces_bytes: self.written,
            directory_crc: crc32c::crc32c(&self.directory),
        };
        Ok((self.out, finished))
    }

    fn flush(&mut self) -> std::io::Result<()> {
        self.piece.clear();
        let base = self.pending[0];
        let width = encode_piece(&self.pending, &mut self.piece);
        self.out.write_all(&self.piece)?;
        self.directory.extend(base.to_le_bytes());
        self.directory.extend(self.written.to_le_bytes());
        self.directory
            .extend(crc32c::crc32c(&self.piece).to_le_bytes());
        self.directory.extend([width, 0, 0, 0]);
        self.written += self.piece.len() as u64;
        self.count += self.pending.len() as u64;
        self.pending.clear();
        Ok(())
    }
}

/// What [`OffsetsWriter::finish`] wrote.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct FinishedOffsets {
    pub(crate) count: u64,
    pub(crate) pieces_bytes: u64,
    pub(crate) directory_crc: u32,
}

/// Appends samples, low bits and high bits of `values`; gives the number of low bits.
fn encode_piece(values: &[u64], out: &mut Vec<u8>) -> u8 {
    let (base, count) = (values[0], values.len());
    let span = values[count - 1] - base;
    // The width that makes the two parts smallest together, up to a quarter of a bit.
    let width = (span / count as u64).checked_ilog2().unwrap_or(0) as usize;
    let upper_bits = count + (span >> width) as usize + 1;
    let mut samples = Vec::with_capacity(count.div_ceil(SAMPLE));
    let mut lower = vec![0_u64; (count * width).div_ceil(64)];
    let mut upper = vec![0_u64; upper_bits.div_ceil(64)];
    for (i, value) in values.iter().map(|value| value - base).enumerate() {
        let one = (value >> width) as usize + i;
        if i % SAMPLE == 0 {
            // Below 3 * PIECE: `span >> width` is below twice the count.
            samples.push(one as u16);
        }
        upper[one / 64] |= 1 << (one % 64);
        if width > 0 {
            let low = value & ((1 << width) - 1);
            let (word, shift) = (i * width / 64, i * width % 64);
            lower[word] |= low << shift;
            if shift + width > 64 {
                lower[word + 1] |= low >> (64 - shift);
            }
        }
    }
    let start = out.len();
    out.extend(samples.iter().flat_map(|sample| sample.to_le_bytes()));
    let sample_bytes = out.len() - start;
    out.resize(start + sample_bytes.next_multiple_of(8), 0);
    out.extend(lower.iter().flat_map(|word| word.to_le_bytes()));
    out.extend(upper.iter().flat_map(|word| word.to_le_bytes()));
    width as u8
}

/// Reads the values out of the bytes that [`OffsetsWriter`] wrote.
///
/// Every read is checked against the bytes that there are: damaged bytes give a wrong value or
/// `None`, never a panic.
#[derive(Debug, Clone, Copy)]
pub(crate) struct OffsetTable<'a> {
    pieces: &'a [u8],
    directory: &'a [u8],
    count: usize,
}

/// A piece, and what the directory says of it.
struct Piece<'a> {
    base: u64,
    crc: u32,
    width: usize,
    bytes: &'a [u8],
    count: usize,
}

impl<'a> OffsetTable<'a> {
    pub(crate) fn new(pieces: &'a [u8], directory: &'a [u8], count: usize) -> Self {
        Self {
            pieces,
            directory,
            count,
        }
    }

    /// Bytes of the directory of so many values.
    pub(crate) fn directory_bytes(count: u64) -> Option<u64> {
        count.div_ceil(PIECE as u64).checked_mul(ENTRY_BYTES as u64)
    }

    /// Value `index`; `None` when there is no such value, or its bytes are damaged.
    pub(crate) fn get(&self, index: usize) -> Option<u64> {
        let piece = self.piece(index / PIECE)?;
        let at = index % PIECE;
        piece.value(at, piece.one(at)?)
    }

    /// Values `index` and `index + 1`.
    pub(crate) fn pair(&self, index: usize) -> Option<Range<u64>> {
        let piece = self.piece(index / PIECE)?;
        let at = index % PIECE;
        let one = piece.one(at)?;
        let start = piece.value(at, one)?;
        let end = if at + 1 < piece.count {
            piece.value(at + 1, piece.next_one(one)?)?
        } else {
            self.get(index + 1)?
        };
        Some(start..end)
    }

    /// The first piece that is not what was written, or whose values fall or exceed `limit`.
    pub(crate) fn first_damaged_piece(&self, limit: u64) -> Option<usize> {
        let mut last = 0;
        (0..self.count.div_ceil(PIECE)).find(|&number| {
            let Some(piece) = self.piece(number) else {
                return true;
            };
            let first_value = piece.one(0).and_then(|one| piece.value(0, one));
            let at_end = piece.count - 1;
            let last_value = piece.one(at_end).and_then(|one| piece.value(at_end, one));
            let sound = crc32c::crc32c(piece.bytes) == piece.crc
                && first_value == Some(piece.base)
                && piece.base >= last
                && last_value.is_some_and(|value| value >= piece.base && value <= limit);
            last = last_value.unwrap_or(u64::MAX);
            !sound
        })
    }

    fn piece(&self, number: usize) -> Option<Piece<'a>> {
        let entry = |at: usize| {
            let start = at.checked_mul(ENTRY_BYTES)?;
            self.directory.get(start..start.checked_add(ENTRY_BYTES)?)
        };
        let count = self
            .count
            .checked_sub(number.checked_mul(PIECE)?)
            .filter(|&count| count > 0)?
            .min(PIECE);
        let bytes = entry(number)?;
        let start = usize::try_from(u64_at(bytes, 8)?).ok()?;
        let end = match entry(number + 1) {
            Some(next) => usize::try_from(u64_at(next, 8)?).ok()?,
            None => self.pieces.len(),
        };
        Some(Piece {
            base: u64_at(bytes, 0)?,
            crc: u32::from_le_bytes(bytes.get(16..20)?.try_into().ok()?),
            width: usize::from(bytes[20]).min(63),
            bytes: self.pieces.get(start..end)?,
            count,
        })
    }
}

impl Piece<'_> {
    fn lower_start(&self) -> usize {
        (2 * self.count.div_ceil(SAMPLE)).next_multiple_of(8)
    }

    fn upper_word(&self, number: usize) -> Option<u64> {
        let start = self.lower_start() + 8 * (self.count * self.width).div_ceil(64);
        u64_at(self.bytes, start + 8 * number)
    }

    /// The place of the one of value `at`.
    fn one(&self, at: usize) -> Option<usize> {
        let sample = 2 * (at / SAMPLE);
        let sample = u16::from_le_bytes(self.bytes.get(sample..sample + 2)?.try_into().ok()?);
        let sample = usize::from(sample);
        let mut ahead = at % SAMPLE;
        let mut number = sample / 64;
        let mut word = self.upper_word(number)? & (u64::MAX << (sample % 64));
        loop {
            let ones = word.count_ones() as usize;
            if ahead < ones {
                return Some(64 * number + nth_one(word, ahead));
            }
            ahead -= ones;
            number += 1;
            word = self.upper_word(number)?;
        }
    }

    /// The place of the next one.
    fn next_one(&self, one: usize) -> Option<usize> {
        let mut number = one / 64;
        // Shifted in two steps: by 64 at once it would overflow.
        let mut word = self.upper_word(number)? & ((u64::MAX << (one % 64)) << 1);
        while word == 0 {
            number += 1;
            word = self.upper_word(number)?;
        }
        Some(64 * number + word.trailing_zeros() as usize)
    }

    /// Value `at`, whose one is at `one`.
    fn value(&self, at: usize, one: usize) -> Option<u64> {
        let high = (one.checked_sub(at)? as u64)
            .checked_shl(self.width as u32)
            .unwrap_or(0);
        self.base.checked_add(high | self.low(at)?)
    }

    fn low(&self, at: usize) -> Option<u64> {
        if self.width == 0 {
            return Some(0);
        }
        let bit = at * self.width;
        let (start, shift) = (self.lower_start() + bit / 64 * 8, bit % 64);
        let mut low = u64_at(self.bytes, start)? >> shift;
        if shift + self.width > 64 {
            low |= u64_at(self.bytes, start + 8)? << (64 - shift);
        }
        Some(low & ((1 << self.width) - 1))
    }
}

/// The place of one number `n`, which the word has.
fn nth_one(mut word: u64, n: usize) -> usize {
    let mut skipped = 0;
    let mut ahead = n;
    // Bytes first: at most seven steps, then at most seven bits.
    loop {
        let ones = (word & 0xff).count_ones() as usize;
        if ahead < ones || skipped == 56 {
            break;
        }
        ahead -= ones;
        word >>= 8;
        skipped += 8;
    }
    for _ in 0..ahead {
        word &= word - 1;
    }
    skipped + word.trailing_zeros() as usize
}

fn u64_at(bytes: &[u8], at: usize) -> Option<u64> {
    Some(u64::from_le_bytes(
        bytes.get(at..at.checked_add(8)?)?.try_into().ok()?,
    ))
}
