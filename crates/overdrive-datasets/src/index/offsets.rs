//! Monotone offsets, compressed to about one byte each.
//!
//! Elias-Fano coding (P. Elias, "Efficient storage and retrieval by content and address of static
//! files", J. ACM 1974; R. Fano, 1971), in blocks of 4096 values. A block stores the low bits of each value
//! directly and the high bits as the distance between ones in a bit string, so that records of L bytes on
//! average take about `2 + log2(L)` bits: 8 bits for lines of 50 bytes, 16 for records of 16 KiB. Each block
//! has its own width, so a file of mixed sizes takes no more.
//!
//! A value is found by one access to the directory, one to the samples (every 64th one of the bit string) and a
//! scan over a few words: at most 192 for any values, since a block has at most 3 * 4096 + 1 bits.

use std::io::Write;
use std::ops::Range;

/// The number of values in a block.
pub(crate) const BLOCK_VALUES: usize = 4096;
/// The interval of the ones in the bit string whose positions are stored as samples.
const SAMPLE_INTERVAL: usize = 64;
/// The size of a directory entry: base (u64), offset of the block (u64), CRC-32C (u32), width (u8), zeros.
pub(crate) const ENTRY_BYTES: usize = 24;

/// A writer of monotone values: first the blocks, then their directory.
pub(crate) struct OffsetsWriter<W> {
    out: W,
    /// The number of bytes written to `out`.
    written: u64,
    pending: Vec<u64>,
    directory: Vec<u8>,
    count: u64,
    block: Vec<u8>,
}

impl<W: Write> OffsetsWriter<W> {
    pub(crate) fn new(out: W) -> Self {
        Self {
            out,
            written: 0,
            pending: Vec::with_capacity(BLOCK_VALUES),
            directory: Vec::new(),
            count: 0,
            block: Vec::new(),
        }
    }

    /// Adds a value, which must not be smaller than the one before.
    pub(crate) fn push(&mut self, value: u64) -> std::io::Result<()> {
        debug_assert!(self.pending.last().is_none_or(|&last| last <= value));
        self.pending.push(value);
        if self.pending.len() == BLOCK_VALUES {
            self.flush()?;
        }
        Ok(())
    }

    /// Writes the last block and the directory. Returns the inner writer and the description of the file.
    pub(crate) fn finish(mut self) -> std::io::Result<(W, FinishedOffsets)> {
        if !self.pending.is_empty() {
            self.flush()?;
        }
        self.out.write_all(&self.directory)?;
        let finished = FinishedOffsets {
            count: self.count,
            blocks_bytes: self.written,
            directory_crc: crc32c::crc32c(&self.directory),
        };
        Ok((self.out, finished))
    }

    fn flush(&mut self) -> std::io::Result<()> {
        self.block.clear();
        let base = self.pending[0];
        let width = encode_block(&self.pending, &mut self.block);
        self.out.write_all(&self.block)?;
        self.directory.extend(base.to_le_bytes());
        self.directory.extend(self.written.to_le_bytes());
        self.directory
            .extend(crc32c::crc32c(&self.block).to_le_bytes());
        self.directory.extend([width, 0, 0, 0]);
        self.written += self.block.len() as u64;
        self.count += self.pending.len() as u64;
        self.pending.clear();
        Ok(())
    }
}

/// The description of the bytes that [`OffsetsWriter::finish`] wrote.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct FinishedOffsets {
    pub(crate) count: u64,
    pub(crate) blocks_bytes: u64,
    pub(crate) directory_crc: u32,
}

/// Appends the samples, low bits and high bits of `values`; returns the number of low bits.
fn encode_block(values: &[u64], out: &mut Vec<u8>) -> u8 {
    let (base, count) = (values[0], values.len());
    let span = values[count - 1] - base;
    // This width gives the smallest sum of low and high bits, up to a quarter of a bit per value.
    let width = (span / count as u64).checked_ilog2().unwrap_or(0) as usize;
    let upper_bits = count + (span >> width) as usize + 1;
    let mut samples = Vec::with_capacity(count.div_ceil(SAMPLE_INTERVAL));
    let mut lower = vec![0_u64; (count * width).div_ceil(64)];
    let mut upper = vec![0_u64; upper_bits.div_ceil(64)];
    for (i, value) in values.iter().map(|value| value - base).enumerate() {
        let one = (value >> width) as usize + i;
        if i % SAMPLE_INTERVAL == 0 {
            // It fits u16: the position is below 3 * BLOCK_VALUES, since `span >> width` is below twice the
            // count.
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
    // Padding to 8 bytes aligns the words that follow in the file.
    out.resize(start + sample_bytes.next_multiple_of(8), 0);
    out.extend(lower.iter().flat_map(|word| word.to_le_bytes()));
    out.extend(upper.iter().flat_map(|word| word.to_le_bytes()));
    width as u8
}

/// A reader of the bytes that [`OffsetsWriter`] wrote.
///
/// Every access is bounds-checked: damaged bytes give a wrong value or `None`, never a panic.
#[derive(Debug, Clone, Copy)]
pub(crate) struct OffsetTable<'a> {
    blocks: &'a [u8],
    directory: &'a [u8],
    count: usize,
}

/// A block and its directory entry.
struct OffsetBlock<'a> {
    base: u64,
    crc: u32,
    width: usize,
    bytes: &'a [u8],
    count: usize,
}

impl<'a> OffsetTable<'a> {
    pub(crate) fn new(blocks: &'a [u8], directory: &'a [u8], count: usize) -> Self {
        Self {
            blocks,
            directory,
            count,
        }
    }

    /// Returns the size of the directory of `count` values, in bytes.
    pub(crate) fn directory_bytes(count: u64) -> Option<u64> {
        count
            .div_ceil(BLOCK_VALUES as u64)
            .checked_mul(ENTRY_BYTES as u64)
    }

    /// Returns value `index`; `None` if there is no such value, or its bytes are damaged.
    pub(crate) fn get(&self, index: usize) -> Option<u64> {
        let block = self.block(index / BLOCK_VALUES)?;
        let at = index % BLOCK_VALUES;
        block.value(at, block.one(at)?)
    }

    /// Returns the values `index` and `index + 1` as a range.
    pub(crate) fn pair(&self, index: usize) -> Option<Range<u64>> {
        let block = self.block(index / BLOCK_VALUES)?;
        let at = index % BLOCK_VALUES;
        let one = block.one(at)?;
        let start = block.value(at, one)?;
        let end = if at + 1 < block.count {
            // The next one is usually in the same word, so a pair costs hardly more than a single value.
            block.value(at + 1, block.next_one(one)?)?
        } else {
            self.get(index + 1)?
        };
        Some(start..end)
    }

    /// Returns the first block whose checksum is wrong, or whose values decrease or exceed `limit`.
    pub(crate) fn first_damaged_block(&self, limit: u64) -> Option<usize> {
        let mut last = 0;
        (0..self.count.div_ceil(BLOCK_VALUES)).find(|&number| {
            let Some(block) = self.block(number) else {
                return true;
            };
            let first_value = block.one(0).and_then(|one| block.value(0, one));
            let at_end = block.count - 1;
            let last_value = block.one(at_end).and_then(|one| block.value(at_end, one));
            let sound = crc32c::crc32c(block.bytes) == block.crc
                && first_value == Some(block.base)
                && block.base >= last
                && last_value.is_some_and(|value| value >= block.base && value <= limit);
            last = last_value.unwrap_or(u64::MAX);
            !sound
        })
    }

    fn block(&self, number: usize) -> Option<OffsetBlock<'a>> {
        let entry = |at: usize| {
            let start = at.checked_mul(ENTRY_BYTES)?;
            self.directory.get(start..start.checked_add(ENTRY_BYTES)?)
        };
        let count = self
            .count
            .checked_sub(number.checked_mul(BLOCK_VALUES)?)
            .filter(|&count| count > 0)?
            .min(BLOCK_VALUES);
        let bytes = entry(number)?;
        let start = usize::try_from(u64_at(bytes, 8)?).ok()?;
        let end = match entry(number + 1) {
            Some(next) => usize::try_from(u64_at(next, 8)?).ok()?,
            None => self.blocks.len(),
        };
        Some(OffsetBlock {
            base: u64_at(bytes, 0)?,
            crc: u32::from_le_bytes(bytes.get(16..20)?.try_into().ok()?),
            // A damaged width must not overflow a shift.
            width: usize::from(bytes[20]).min(63),
            bytes: self.blocks.get(start..end)?,
            count,
        })
    }
}

impl OffsetBlock<'_> {
    fn lower_start(&self) -> usize {
        (2 * self.count.div_ceil(SAMPLE_INTERVAL)).next_multiple_of(8)
    }

    fn upper_word(&self, number: usize) -> Option<u64> {
        let start = self.lower_start() + 8 * (self.count * self.width).div_ceil(64);
        u64_at(self.bytes, start + 8 * number)
    }

    /// Returns the position in the bit string of the one of value `at`.
    fn one(&self, at: usize) -> Option<usize> {
        let sample = 2 * (at / SAMPLE_INTERVAL);
        let sample = u16::from_le_bytes(self.bytes.get(sample..sample + 2)?.try_into().ok()?);
        let sample = usize::from(sample);
        let mut ahead = at % SAMPLE_INTERVAL;
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

    /// Returns the position of the next one.
    fn next_one(&self, one: usize) -> Option<usize> {
        let mut number = one / 64;
        // Two shifts, since one by 64 would overflow.
        let mut word = self.upper_word(number)? & ((u64::MAX << (one % 64)) << 1);
        while word == 0 {
            number += 1;
            word = self.upper_word(number)?;
        }
        Some(64 * number + word.trailing_zeros() as usize)
    }

    /// Returns value `at`, whose one is at the position `one`.
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

/// Returns the position of one number `n` of a word that has more than `n` ones.
fn nth_one(mut word: u64, n: usize) -> usize {
    let mut skipped = 0;
    let mut ahead = n;
    // First whole bytes, at most seven, and then at most seven single bits.
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
