//! Several rows of activations: lanes are outputs.
//!
//! 16 rows of the weight at a time are transposed, four bytes a lane, and their codes become words once,
//! in the first cache, for all rows of activations, whose words are broadcast.
#![allow(unsafe_code)]

use std::cell::Cell;
use std::ops::Range;

use super::activations::WordRows;
use super::coding::{ByCoding, Decode, by_coding};
use super::map::CodedMap;
use super::one_row::at;
use super::scales::Scales;
use super::words::{PACKED, WORDS, Words, Work};
use crate::kernel::element::Element;
use crate::kernel::simd::LANES;
use crate::kernel::threads::Target;

/// Tiles of 16 outputs whose words are held at once where there are many rows: words of activations
/// come from the second cache or further, and serve this many tiles at a visit.
pub(super) const GROUP: usize = 4;

/// Rows whose words stay in the first cache with one tile of weights.
pub(super) const FEW: usize = 16;

/// Some outputs of one map.
pub(super) struct Tiles<'a, T> {
    pub(super) x: &'a WordRows,
    pub(super) map: &'a CodedMap<'a>,
    pub(super) bias: Option<&'a [T]>,
    pub(super) outputs: Range<usize>,
    /// The column of the map's first output.
    pub(super) column: usize,
    pub(super) target: &'a Target<'a, T>,
}

/// What a thread needs for a group of tiles; kept, since memory that is new costs more than its use.
#[derive(Default)]
struct Scratch {
    /// `(tiles, granules, 16)`
    scales: Vec<f32>,
    /// `(tiles, granules, 16)`, where there are offsets.
    offsets: Vec<f32>,
    /// `(tiles, rows, 16)`
    sums: Vec<f32>,
    /// Of one unit, `(tiles, 16 lanes of codes, parts, 32)`.
    words: Vec<i16>,
    /// Scales of one row.
    row: Vec<f32>,
}

thread_local! {
    static SCRATCH: Cell<Scratch> = Cell::default();
}

impl<T: Element> Work for Tiles<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run<S: Words>(self, s: S) {
        by_coding(s, &self.map.coding, &self);
    }
}

impl<T: Element> ByCoding for &Tiles<'_, T> {
    #[inline(always)]
    fn run<S: Words, D: Decode<S>>(self, s: S, decode: D) {
        let mut scratch = SCRATCH.take();
        let most = if self.x.rows > FEW { GROUP } else { 1 };
        let mut output = self.outputs.start;
        while output < self.outputs.end {
            let tiles = (self.outputs.end - output).div_ceil(LANES).min(most);
            self.group(s, decode, output, tiles, &mut scratch);
            output += tiles * LANES;
        }
        SCRATCH.set(scratch);
    }
}

impl<T: Element> Tiles<'_, T> {
    /// `tiles` tiles from `output` on.
    #[inline(always)]
    fn group<S: Words, D: Decode<S>>(
        &self,
        s: S,
        decode: D,
        output: usize,
        tiles: usize,
        scratch: &mut Scratch,
    ) {
        let (x, map) = (self.x, self.map);
        let each = x.granules * LANES;
        let unit_words = LANES * D::PARTS * WORDS;
        resize(&mut scratch.row, x.granules);
        resize(&mut scratch.scales, tiles * each);
        resize(&mut scratch.words, tiles * unit_words);
        scratch.sums.clear();
        scratch.sums.resize(tiles * x.rows * LANES, 0.0);
        if map.offsets.is_some() {
            resize(&mut scratch.offsets, tiles * each);
        }
        for tile in 0..tiles {
            let first = output + tile * LANES;
            let of_tile = tile * each..(tile + 1) * each;
            self.columns(&map.scales, first, &mut scratch.row, &mut scratch.scales[of_tile.clone()]);
            if let Some(offsets) = &map.offsets {
                self.columns(offsets, first, &mut scratch.row, &mut scratch.offsets[of_tile]);
            }
        }
        for unit in 0..x.units {
            for tile in 0..tiles {
                let words = &mut scratch.words[tile * unit_words..(tile + 1) * unit_words];
                self.expand(s, decode, output + tile * LANES, unit, words);
            }
            let mut row = 0;
            while row < x.rows {
                let left = x.rows - row;
                let count = match left {
                    8.. if S::ROWS == 8 => 8,
                    4.. => 4,
                    2.. => 2,
                    _ => 1,
                };
                for tile in 0..tiles {
                    let offsets = match &map.offsets {
                        Some(_) => &scratch.offsets[tile * each..(tile + 1) * each],
                        None => &[],
                    };
                    let sums = (tile * x.rows + row) * LANES;
                    let mut block = Block {
                        x,
                        unit,
                        row,
                        words: &scratch.words[tile * unit_words..(tile + 1) * unit_words],
                        scales: &scratch.scales[tile * each..(tile + 1) * each],
                        offsets,
                        sums: &mut scratch.sums[sums..sums + count * LANES],
                    };
                    match count {
                        8 => block.add::<S, D, 8, 1>(s),
                        4 if S::ROWS == 8 => block.add::<S, D, 4, 2>(s),
                        4 => block.add::<S, D, 4, 1>(s),
                        2 => block.add::<S, D, 2, 2>(s),
                        _ => block.add::<S, D, 1, 4>(s),
                    }
                }
                row += count;
            }
        }
        for tile in 0..tiles {
            let first = output + tile * LANES;
            let count = LANES.min(self.outputs.end - first);
            for row in 0..x.rows {
                let sums = &scratch.sums[(tile * x.rows + row) * LANES..][..count];
                let mut out = [T::from_f32(0.0); LANES];
                for (lane, (out, sum)) in out.iter_mut().zip(sums).enumerate() {
                    let bias = self.bias.map_or(0.0, |bias| bias[first + lane].to_f32());
                    *out = T::from_f32(sum + bias);
                }
                self.target.set_all(row, self.column + first, &out[..count]);
            }
        }
    }

    /// The row of the weight in lane `lane`; lanes beyond the last output repeat it.
    #[inline(always)]
    fn row(&self, output: usize, lane: usize) -> usize {
        (output + lane).min(self.map.outputs - 1)
    }

    /// Scales or offsets of 16 outputs, `(granules, 16)`.
    #[inline(always)]
    fn columns(&self, scales: &Scales<'_>, output: usize, row: &mut [f32], out: &mut [f32]) {
        let x = self.x;
        let row = &mut row[..x.granules];
        for lane in 0..LANES {
            scales.row(self.row(output, lane), self.map.inputs, x.granule, row);
            for (out, scale) in out.chunks_exact_mut(LANES).zip(row.iter()) {
                out[lane] = *scale;
            }
        }
    }

    /// The words of one unit of 16 outputs.
    #[inline(always)]
    fn expand<S: Words, D: Decode<S>>(
        &self,
        s: S,
        decode: D,
        output: usize,
        unit: usize,
        out: &mut [i16],
    ) {
        let bytes = self.map.row_bytes();
        let codes = self.map.codes;
        let from = unit * PACKED;
        let count = PACKED.min(bytes - from);
        let packed = std::array::from_fn(
            #[inline(always)]
            |lane| {
                let first = self.row(output, lane) * bytes + from;
                // The same place of the next tile: short streams, many at once, are more than the
                // machine foresees by itself.
                s.prefetch(codes.as_ptr().wrapping_add(first + LANES * bytes));
                let row = &codes[first..first + count];
                match row.first_chunk::<PACKED>() {
                    Some(whole) => s.load_packed(whole),
                    None => {
                        let mut last = [0; PACKED];
                        last[..count].copy_from_slice(row);
                        s.load_packed(&last)
                    }
                }
            },
        );
        let columns = s.transpose(packed);
        let (out, _) = out.as_chunks_mut::<WORDS>();
        for (packed, out) in columns.into_iter().zip(out.chunks_exact_mut(D::PARTS)) {
            let words = decode.words(s, packed);
            for (words, out) in words.into_iter().zip(out) {
                s.store_words(words, out);
            }
        }
    }
}

/// One unit of inputs, of one tile of outputs and a few rows.
struct Block<'a> {
    x: &'a WordRows,
    unit: usize,
    row: usize,
    words: &'a [i16],
    scales: &'a [f32],
    /// Empty where there are none.
    offsets: &'a [f32],
    sums: &'a mut [f32],
}

impl Block<'_> {
    /// `N` rows, each with `P` partial sums: one would wait for itself.
    #[inline(always)]
    fn add<S: Words, D: Decode<S>, const N: usize, const P: usize>(&mut self, s: S) {
        let x = self.x;
        let lanes_granule = x.granule / D::PER_LANE;
        let granules_unit = LANES / lanes_granule;
        let row_words = D::PARTS * WORDS;
        let first = (self.unit * x.rows + self.row) * row_words;
        assert!(
            first + N * row_words <= x.words.len()
                && self.words.len() == LANES * row_words
                && self.sums.len() == N * LANES
                && self.scales.len() == x.granules * LANES,
            "the sizes that the caller gave"
        );
        let mut sums: [S::F; N] = std::array::from_fn(
            #[inline(always)]
            |n| {
                // SAFETY: `sums` has `N` vectors, see above.
                s.load_f32(unsafe { at(self.sums, n * LANES) })
            },
        );
        for part_of_unit in 0..granules_unit {
            let granule = self.unit * granules_unit + part_of_unit;
            if granule >= x.granules {
                break;
            }
            let mut totals = [[s.no_sums(); P]; N];
            for lane in part_of_unit * lanes_granule..(part_of_unit + 1) * lanes_granule {
                for part in 0..D::PARTS {
                    // SAFETY: `lane < LANES` and `part < PARTS`: inside of `words`, see above.
                    let weights =
                        s.load_words(unsafe { at(self.words, (lane * D::PARTS + part) * WORDS) });
                    for (n, totals) in totals.iter_mut().enumerate() {
                        let from = first + n * row_words + part * WORDS + 2 * lane;
                        // SAFETY: `n < N`, and in its row `part < PARTS` and `lane < LANES`.
                        let pair = s.pair(unsafe { at(&x.words, from) });
                        totals[part % P] = s.multiply(totals[part % P], weights, pair);
                    }
                }
            }
            // SAFETY: `granule < granules`, of which `scales` has a vector each.
            let scale = s.load_f32(unsafe { at(self.scales, granule * LANES) });
            let of_rows = &x.scales[granule * x.rows + self.row..][..N];
            for n in 0..N {
                let total = totals[n][1..].iter().fold(
                    totals[n][0],
                    #[inline(always)]
                    |sum, part| s.plus(sum, *part),
                );
                let scale = s.mul(scale, s.splat(of_rows[n]));
                sums[n] = s.mul_add(s.floats(total), scale, sums[n]);
            }
            if let Some(offset) = self.offsets[..].get(granule * LANES..).and_then(<[f32]>::first_chunk) {
                let offset = s.load_f32(offset);
                let of_rows = &x.sums[granule * x.rows + self.row..][..N];
                for n in 0..N {
                    sums[n] = s.mul_add(offset, s.splat(of_rows[n]), sums[n]);
                }
            }
        }
        let (out, _) = self.sums.as_chunks_mut::<LANES>();
        for (out, sum) in out.iter_mut().zip(sums) {
            s.store_f32(sum, out);
        }
    }
}

/// At least `len` elements of whatever.
fn resize<E: Copy + Default>(all: &mut Vec<E>, len: usize) {
    all.resize(len.max(all.len()), E::default());
}
