//! The GEMM of activations in words. The lanes are outputs.
//!
//! 16 rows of the weight at a time are transposed, four bytes in a lane, and words of activations are
//! broadcast. For a few rows codes are unpacked in registers; for many they are unpacked once, to the first
//! cache, for a group of tiles that is then multiplied with all rows.
#![allow(unsafe_code)]

use std::ops::Range;

use overdrive_kernels::{BYTES, Buffers, Kept, Kernel, LANES, Simd, WORDS};

use super::aligned::AlignedVec;
use super::coded_weight::CodedWeight;
use super::scale_rows::{Raw, ScaleRows};
use super::unpack::{ByCoding, Decode, by_coding};
use super::word_rows::WordRows;
use crate::kernel::at;
use crate::kernel::joint_gemm::Results;

/// The number of tiles of 16 outputs that are unpacked at once for many rows: words of activations come from the
/// second cache or further, and serve this many tiles each time.
const GROUP: usize = 4;

/// The GEMM of some outputs.
pub(super) struct WordGemm<'a> {
    pub(super) x: &'a WordRows,
    pub(super) weight: &'a CodedWeight<'a>,
    pub(super) outputs: Range<usize>,
    pub(super) results: &'a mut dyn Results,
}

/// The buffers of a group of tiles; kept, since the pages of new memory cost more than its use.
#[derive(Default)]
struct Scratch {
    /// The buffers of scales while they are read.
    raw: Raw,
    /// The scales, `(tiles, granules, 16)`, the granules in whole vectors.
    scales: AlignedVec<f32>,
    /// The offsets, likewise.
    offsets: AlignedVec<f32>,
    /// The sums, `(tiles, held rows, 16)`.
    sums: AlignedVec<f32>,
    /// The words of one unit, `(tiles, 16 lanes of codes, parts, 32)`.
    words: AlignedVec<i16>,
}

impl Buffers for Scratch {
    fn bytes(&self) -> usize {
        let aligned = [&self.scales, &self.offsets, &self.sums].map(AlignedVec::bytes);
        self.raw.bytes() + aligned.iter().sum::<usize>() + self.words.bytes()
    }
}

thread_local! {
    static SCRATCH: Kept<Scratch> = const { Kept::new() };
}

impl Kernel for WordGemm<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(mut self, s: S) {
        by_coding(s, &self.weight.coding, &mut self);
    }
}

impl ByCoding for &mut WordGemm<'_> {
    #[inline(always)]
    fn run<S: Simd, D: Decode<S>>(self, s: S, decode: D) {
        let mut scratch = Kept::take(&SCRATCH);
        // For a few rows, words stay in registers and one tile at a time is enough.
        let most = if self.x.held > S::WORD_ROWS { GROUP } else { 1 };
        let mut output = self.outputs.start;
        let first = output..(output + most * LANES).min(self.outputs.end);
        prefetch_first(s, self.weight, first);
        while output < self.outputs.end {
            let tiles = (self.outputs.end - output).div_ceil(LANES).min(most);
            self.group(s, decode, output, tiles, &mut scratch);
            output += tiles * LANES;
        }
        Kept::put(&SCRATCH, scratch);
    }
}

impl WordGemm<'_> {
    /// Computes `tiles` tiles from `output` on.
    #[inline(always)]
    fn group<S: Simd, D: Decode<S>>(
        &mut self,
        s: S,
        decode: D,
        output: usize,
        tiles: usize,
        scratch: &mut Scratch,
    ) {
        let (x, weight) = (self.x, self.weight);
        let each = x.stride * LANES;
        let unit_words = LANES * D::PARTS * WORDS;
        scratch.sums.grow(tiles * x.held * LANES);
        scratch.sums[..tiles * x.held * LANES].fill(0.0);
        let shape = ScaleRows::new(weight.inputs, x.granule);
        let offsets = shape.tiles(
            s,
            weight,
            output,
            tiles,
            each,
            &mut scratch.raw,
            &mut scratch.scales,
            &mut scratch.offsets,
        );
        if x.held <= S::WORD_ROWS {
            let mut block = Block {
                x,
                unit: 0,
                row: 0,
                scales: &scratch.scales[..each],
                offsets,
                sums: &mut scratch.sums[..x.held * LANES],
            };
            for unit in 0..x.units {
                block.unit = unit;
                let columns = codes(
                    s,
                    weight,
                    output,
                    unit,
                    next_output(output, 1, self.outputs.end),
                );
                block.rows::<S, D, _>(s, x.held, Coded { columns, decode });
            }
        } else {
            scratch.words.grow(tiles * unit_words);
            for unit in 0..x.units {
                for tile in 0..tiles {
                    let words = &mut scratch.words[tile * unit_words..(tile + 1) * unit_words];
                    let output = output + tile * LANES;
                    let columns = codes(
                        s,
                        weight,
                        output,
                        unit,
                        next_output(output, tiles, self.outputs.end),
                    );
                    unpack(s, decode, &columns, words);
                }
                let mut row = 0;
                while row < x.held {
                    let count = S::WORD_ROWS.min(x.held - row);
                    for tile in 0..tiles {
                        let of_tile = tile * each..(tile + 1) * each;
                        let sums = (tile * x.held + row) * LANES;
                        let mut block = Block {
                            x,
                            unit,
                            row,
                            scales: &scratch.scales[of_tile.clone()],
                            offsets: offsets.get(of_tile).unwrap_or_default(),
                            sums: &mut scratch.sums[sums..sums + count * LANES],
                        };
                        let words = &scratch.words[tile * unit_words..(tile + 1) * unit_words];
                        block.rows::<S, D, _>(s, count, Unpacked { words });
                    }
                    row += count;
                }
            }
        }
        self.finish(output, tiles, &scratch.sums);
    }

    /// Puts the results.
    #[inline(always)]
    fn finish(&mut self, output: usize, tiles: usize, sums: &[f32]) {
        let x = self.x;
        for tile in 0..tiles {
            let first = output + tile * LANES;
            let count = LANES.min(self.outputs.end - first);
            for row in 0..x.rows {
                let sums = &sums[(tile * x.held + row) * LANES..][..count];
                self.results.put(row, first, sums);
            }
        }
    }
}

/// Returns the output `tiles` tiles further, or `output` if that is not before `end`.
#[inline(always)]
pub(super) fn next_output(output: usize, tiles: usize, end: usize) -> usize {
    let next = output + tiles * LANES;
    if next < end { next } else { output }
}

/// The distance of the prefetch in units of the same outputs.
const AHEAD: usize = 4;

/// Prefetches the first units of `outputs`, which [`codes`] does not for the first outputs of a job.
#[inline(always)]
pub(super) fn prefetch_first<S: Simd>(s: S, weight: &CodedWeight<'_>, outputs: Range<usize>) {
    let bytes = weight.row_bytes();
    for output in outputs {
        for unit in 0..AHEAD.min(bytes / BYTES) {
            let at = output * bytes + unit * BYTES;
            s.prefetch_near(weight.codes.as_ptr().wrapping_add(at));
        }
    }
}

/// Reads one unit of 16 outputs and transposes it, so that the lanes are outputs; lanes beyond the last output
/// repeat it. A later unit is prefetched: of the same outputs, or after their last of those from `next` on.
#[inline(always)]
pub(super) fn codes<S: Simd>(
    s: S,
    weight: &CodedWeight<'_>,
    output: usize,
    unit: usize,
    next: usize,
) -> [S::Packed; LANES] {
    let bytes = weight.row_bytes();
    let codes = weight.codes;
    let from = unit * BYTES;
    let mut packed = [s.load_packed(&[0; BYTES]); LANES];
    if output + LANES > weight.outputs || from + BYTES > bytes {
        // Apart, so that the compiler keeps whole units in registers.
        for (packed, row) in packed.iter_mut().zip(&padded_codes(weight, output, unit)) {
            *packed = s.load_packed(row);
        }
        return s.transpose_packed(packed);
    }
    let first = output * bytes + from;
    // Many short streams at once are more than the hardware prefetcher follows.
    let ahead = from + AHEAD * BYTES;
    let next = match ahead < bytes {
        true => output * bytes + ahead,
        false => next * bytes + ahead - bytes,
    };
    let next = codes.as_ptr().wrapping_add(next);
    assert!(
        first + (LANES - 1) * bytes + BYTES <= codes.len(),
        "a whole unit of 16 rows"
    );
    for (lane, packed) in packed.iter_mut().enumerate() {
        s.prefetch_near(next.wrapping_add(lane * bytes));
        // SAFETY: asserted for the last lane.
        *packed = s.load_packed(unsafe { at(codes, first + lane * bytes) });
    }
    s.transpose_packed(packed)
}

/// Returns one unit of 16 outputs, of which some do not exist, or of which the inputs end: zeros from there on.
#[cold]
#[inline(never)]
fn padded_codes(weight: &CodedWeight<'_>, output: usize, unit: usize) -> [[u8; BYTES]; LANES] {
    let (bytes, from) = (weight.row_bytes(), unit * BYTES);
    let (count, last) = (BYTES.min(bytes.saturating_sub(from)), weight.outputs - 1);
    let mut rows = [[0; BYTES]; LANES];
    // The second vector of the last unit of codes of 8 bits may have none.
    if count == 0 {
        return rows;
    }
    for (lane, row) in rows.iter_mut().enumerate() {
        let first = (output + lane).min(last) * bytes + from;
        row[..count].copy_from_slice(&weight.codes[first..first + count]);
    }
    rows
}

/// Unpacks the words of one unit of 16 outputs, `(16 lanes of codes, parts, 32)`.
#[inline(always)]
fn unpack<S: Simd, D: Decode<S>>(s: S, decode: D, columns: &[S::Packed; LANES], out: &mut [i16]) {
    let (out, _) = out.as_chunks_mut::<WORDS>();
    for (packed, out) in columns.iter().zip(out.chunks_exact_mut(D::PARTS)) {
        let words = decode.words(s, *packed);
        for (words, out) in words.into_iter().zip(out) {
            s.store_words(words, out);
        }
    }
}

/// The source of the words of a unit of 16 outputs.
trait WordSource<S: Simd, D: Decode<S>>: Copy {
    /// Returns the words of one lane of codes of each output; only the first `PARTS` are meaningful.
    fn words(&self, s: S, lane: usize) -> [S::Words; 4];
}

/// Packed codes whose lanes are outputs.
#[derive(Clone, Copy)]
struct Coded<S: Simd, D> {
    columns: [S::Packed; LANES],
    decode: D,
}

impl<S: Simd, D: Decode<S>> WordSource<S, D> for Coded<S, D> {
    #[inline(always)]
    fn words(&self, s: S, lane: usize) -> [S::Words; 4] {
        self.decode.words(s, self.columns[lane])
    }
}

/// Words that [`unpack`] has written.
#[derive(Clone, Copy)]
struct Unpacked<'a> {
    words: &'a [i16],
}

impl<S: Simd, D: Decode<S>> WordSource<S, D> for Unpacked<'_> {
    #[inline(always)]
    fn words(&self, s: S, lane: usize) -> [S::Words; 4] {
        let of_lane = &self.words[lane * D::PARTS * WORDS..][..D::PARTS * WORDS];
        let mut words = [s.load_words(&[0; WORDS]); 4];
        let (of_lane, _) = of_lane.as_chunks::<WORDS>();
        for (words, from) in words.iter_mut().zip(of_lane) {
            *words = s.load_words(from);
        }
        words
    }
}

/// One unit of inputs, of one tile of outputs and a few rows.
struct Block<'a> {
    x: &'a WordRows,
    unit: usize,
    row: usize,
    scales: &'a [f32],
    /// Empty if there are none.
    offsets: &'a [f32],
    sums: &'a mut [f32],
}

impl Block<'_> {
    /// Adds `count` rows, an even number and at most `S::WORD_ROWS`. One sum would wait for its own
    /// latency: fewer rows have several partial sums.
    #[inline(always)]
    fn rows<S: Simd, D: Decode<S>, W: WordSource<S, D>>(&mut self, s: S, count: usize, source: W) {
        match count {
            8 if S::WORD_ROWS == 8 => self.add::<S, D, W, 8, 1>(s, source),
            6 if S::WORD_ROWS == 8 => self.add::<S, D, W, 6, 1>(s, source),
            4 if S::WORD_ROWS == 8 => self.add::<S, D, W, 4, 2>(s, source),
            4 => self.add::<S, D, W, 4, 1>(s, source),
            _ => self.add::<S, D, W, 2, 2>(s, source),
        }
    }

    /// Adds `N` rows, each with `P` partial sums.
    #[inline(always)]
    fn add<S: Simd, D: Decode<S>, W: WordSource<S, D>, const N: usize, const P: usize>(
        &mut self,
        s: S,
        source: W,
    ) {
        let x = self.x;
        let lanes_granule = x.granule / D::PER_LANE;
        let granules_unit = LANES / lanes_granule;
        let row_words = D::PARTS * WORDS;
        let first = (self.unit * x.held + self.row) * row_words;
        assert!(
            first + N * row_words <= x.words.len()
                && self.sums.len() == N * LANES
                && self.scales.len() == x.stride * LANES
                && (self.row + N) * x.stride <= x.scales.len(),
            "the sizes that the caller gave"
        );
        let mut sums = [s.splat(0.0); N];
        let (stored, _) = self.sums.as_chunks::<LANES>();
        for (sum, stored) in sums.iter_mut().zip(stored) {
            *sum = s.load_f32(stored);
        }
        for part_of_unit in 0..granules_unit {
            let granule = self.unit * granules_unit + part_of_unit;
            if granule >= x.granules {
                break;
            }
            let mut totals = [[s.zero_sums(); P]; N];
            for lane in part_of_unit * lanes_granule..(part_of_unit + 1) * lanes_granule {
                let weights = source.words(s, lane);
                for part in 0..D::PARTS {
                    for (n, totals) in totals.iter_mut().enumerate() {
                        let from = first + n * row_words + part * WORDS + 2 * lane;
                        // SAFETY: `n < N`, and in its row `part < PARTS` and `lane < LANES`.
                        let pair = s.splat_pair(unsafe { at(&x.words, from) });
                        totals[part % P] = s.dot_words(totals[part % P], weights[part], pair);
                    }
                }
            }
            // SAFETY: `granule < granules <= stride`, of which `scales` has a vector each.
            let scale = s.load_f32(unsafe { at(self.scales, granule * LANES) });
            for n in 0..N {
                let mut total = totals[n][0];
                for part in &totals[n][1..] {
                    total = s.merge_sums(total, *part);
                }
                let of_row = x.scales[(self.row + n) * x.stride + granule];
                let scale = s.mul(scale, s.splat(of_row));
                sums[n] = s.mul_add(s.sums_to_f32(total), scale, sums[n]);
            }
            let offsets = self.offsets.get(granule * LANES..);
            if let Some(offset) = offsets.and_then(<[f32]>::first_chunk) {
                let offset = s.load_f32(offset);
                for (n, sum) in sums.iter_mut().enumerate() {
                    let of_row = x.sums[(self.row + n) * x.stride + granule];
                    *sum = s.mul_add(offset, s.splat(of_row), *sum);
                }
            }
        }
        let (out, _) = self.sums.as_chunks_mut::<LANES>();
        for (out, sum) in out.iter_mut().zip(sums) {
            s.store_f32(sum, out);
        }
    }
}
