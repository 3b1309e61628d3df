//! The scales of several rows of a weight at once, one number for each granule.

use half::f16;
use overdrive_kernels::{LANES, Simd, capacity_bytes};

use super::aligned::AlignedVec;
use super::coded_weight::CodedWeight;
use super::scales::{Floats, MagnitudeSlices, Scales};

/// The layout of the scales of some rows.
#[derive(Debug, Clone, Copy)]
pub(super) struct ScaleRows {
    pub(super) inputs: usize,
    pub(super) granule: usize,
}

impl ScaleRows {
    pub(super) fn new(inputs: usize, granule: usize) -> Self {
        ScaleRows { inputs, granule }
    }

    /// Reads the scales of rows `first .. first + count`, for [`vector`](ReadScales::vector).
    ///
    /// They are looked up for all rows before they are used: a vector load right after the stores of its
    /// elements waits for them (store forwarding fails).
    #[inline(always)]
    pub(super) fn read<'r, S: Simd>(
        &self,
        s: S,
        scales: &Scales<'r>,
        first: usize,
        count: usize,
        raw: &'r mut Raw,
    ) -> ReadScales<'r, S> {
        let (per_row, repeat) = self.of_row(scales);
        let all = count * per_row;
        let from = first * per_row;
        let range = from..from + all + LANES;
        // Borrowed if the slice has a spare vector after these rows.
        let borrowed = match (&scales.magnitudes, repeat) {
            (MagnitudeSlices::Full(Floats::F32(all)), Some(_)) => {
                all.get(range).map(Numbers::Floats)
            }
            (MagnitudeSlices::Full(Floats::F16(all)), Some(1)) => {
                all.get(range).map(Numbers::Halves)
            }
            _ => None,
        };
        let numbers = match borrowed {
            Some(numbers) => numbers,
            None => {
                // Only grown, since clearing would write every number twice.
                if raw.floats.len() < all + LANES {
                    raw.floats.resize(all + LANES, 0.0);
                }
                if repeat.is_some() {
                    let out = &mut raw.floats[..all];
                    scales.magnitudes.write(s, from, &mut raw.bits, out);
                } else {
                    let rows = raw.floats[..all].chunks_exact_mut(per_row);
                    for (index, row) in rows.enumerate() {
                        scales.row(first + index, self.inputs, self.granule, row);
                    }
                }
                Numbers::Floats(&raw.floats)
            }
        };
        // Without repetition, each granule has its own value.
        let repeat = repeat.unwrap_or(1);
        ReadScales {
            numbers,
            per_row,
            shift: repeat.trailing_zeros(),
            lanes: s.lane_indices(&groups_of(repeat)),
        }
    }

    /// Returns the address at which the scales of row `row` begin, or would begin, if blocks do not cross rows.
    #[inline(always)]
    pub(super) fn address(&self, scales: &Scales<'_>, row: usize) -> *const u8 {
        scales
            .magnitudes
            .address(row * (self.inputs / scales.block))
    }

    /// Returns the number of scales of a row, and the number of granules that share one; `None` if blocks cross
    /// rows and a number is made for each granule.
    #[inline(always)]
    fn of_row(&self, scales: &Scales<'_>) -> (usize, Option<usize>) {
        let block = scales.block;
        let repeat = block / self.granule;
        let contiguous = self.inputs.is_multiple_of(block)
            && block.is_multiple_of(self.granule)
            && repeat.is_power_of_two();
        if contiguous {
            (self.inputs / block, Some(repeat))
        } else {
            (self.inputs / self.granule, None)
        }
    }
}

impl ScaleRows {
    /// Writes the scales and offsets of `tiles` tiles of 16 outputs from `output` on, `(tiles, length)`, for
    /// [`columns`](Self::columns); returns the offsets, empty if the weight has none.
    #[inline(always)]
    #[allow(clippy::too_many_arguments, reason = "buffers that are borrowed apart")]
    pub(super) fn tiles<'o, S: Simd>(
        &self,
        s: S,
        weight: &CodedWeight<'_>,
        output: usize,
        tiles: usize,
        length: usize,
        raw: &mut Raw,
        scales: &mut AlignedVec<f32>,
        offsets: &'o mut AlignedVec<f32>,
    ) -> &'o [f32] {
        scales.grow(tiles * length);
        if weight.offsets.is_some() {
            offsets.grow(tiles * length);
        }
        for tile in 0..tiles {
            let first = output + tile * LANES;
            let count = LANES.min(weight.outputs - first);
            let of_tile = tile * length..(tile + 1) * length;
            let to = &mut scales[of_tile.clone()];
            self.columns(s, &weight.scales, first, count, raw, to);
            if let Some(from) = &weight.offsets {
                self.columns(s, from, first, count, raw, &mut offsets[of_tile]);
            }
        }
        match weight.offsets {
            Some(_) => &offsets[..tiles * length],
            None => &[],
        }
    }

    /// Writes the scales or offsets of `count` outputs, at most 16, from `first` on, as `(granules, 16)`; those of
    /// outputs that do not exist are undefined.
    #[inline(always)]
    fn columns<S: Simd>(
        &self,
        s: S,
        scales: &Scales<'_>,
        first: usize,
        count: usize,
        raw: &mut Raw,
        out: &mut [f32],
    ) {
        let made = self.read(s, scales, first, count, raw);
        let (out, _) = out.as_chunks_mut::<LANES>();
        for (vector, out) in out.chunks_exact_mut(LANES).enumerate() {
            let mut block = [s.splat(0.0); LANES];
            for (lane, block) in block.iter_mut().enumerate().take(count) {
                *block = made.vector(s, lane, vector);
            }
            for (out, column) in out.iter_mut().zip(s.transpose_floats(block)) {
                s.store_f32(column, out);
            }
        }
    }
}

/// The buffers of scales while they are read.
#[derive(Debug, Default)]
pub(super) struct Raw {
    bits: Vec<u32>,
    floats: Vec<f32>,
}

impl Raw {
    /// Returns the bytes of the buffers' memory.
    pub(super) fn bytes(&self) -> usize {
        capacity_bytes(&self.bits) + capacity_bytes(&self.floats)
    }
}

/// The scales of some rows.
pub(super) struct ReadScales<'r, S: Simd> {
    numbers: Numbers<'r>,
    per_row: usize,
    /// The logarithm of the number of granules that share a scale.
    shift: u32,
    lanes: S::Lanes,
}

/// The scales, with a spare vector after them.
#[derive(Clone, Copy)]
enum Numbers<'r> {
    Floats(&'r [f32]),
    /// The scales in f16, one for each granule.
    Halves(&'r [f16]),
}

impl<S: Simd> ReadScales<'_, S> {
    /// Returns 16 scales of a row; lanes beyond its granules have scales of other rows.
    #[inline(always)]
    pub(super) fn vector(&self, s: S, index: usize, vector: usize) -> S::F {
        let from = index * self.per_row + ((vector * LANES) >> self.shift);
        let made = match self.numbers {
            Numbers::Floats(all) => all[from..].first_chunk().map(
                #[inline(always)]
                |window| match self.shift {
                    0 => s.load_f32(window),
                    _ => s.permute(window, self.lanes),
                },
            ),
            Numbers::Halves(all) => all[from..].first_chunk().map(
                #[inline(always)]
                |window| s.load_f16(window),
            ),
        };
        // Always `Some`: there is a spare vector after the last row.
        made.unwrap_or(s.splat(0.0))
    }
}

/// Returns `0, 0, …, 1, 1, …`: the group of `of` lanes, a power of two, that each lane is in.
#[inline(always)]
pub(super) fn groups_of(of: usize) -> [u32; LANES] {
    // A shift, which is one instruction for all lanes: a division each would take as long as the scales of a tile.
    let shift = of.trailing_zeros();
    std::array::from_fn(
        #[inline(always)]
        |lane| (lane as u32) >> shift,
    )
}
