//! The scales of several rows of a weight at once, a number for each granule.

use super::scales::Scales;
use super::words::Words;
use crate::kernel::simd::LANES;

/// Rows of a weight whose scales are made at once, and how they lie.
#[derive(Debug, Clone, Copy)]
pub(super) struct ScaleRows {
    pub(super) inputs: usize,
    pub(super) granule: usize,
    /// Numbers from one row to the next: at least the granules, rounded up to whole vectors.
    pub(super) stride: usize,
}

impl ScaleRows {
    /// With a vector to spare after each row.
    pub(super) fn new(inputs: usize, granule: usize) -> Self {
        ScaleRows {
            inputs,
            granule,
            stride: (inputs / granule).next_multiple_of(LANES) + LANES,
        }
    }

    /// Makes the scales of rows `first .. first + count`, for [`vector`](Made::vector).
    ///
    /// They are looked up for all rows before they are used: a vector that is loaded right after its
    /// parts were written has to wait for them.
    #[inline(always)]
    pub(super) fn make<'r, S: Words>(
        &self,
        s: S,
        scales: &Scales<'_>,
        first: usize,
        count: usize,
        raw: &'r mut Raw,
    ) -> Made<'r, S> {
        let granules = self.inputs / self.granule;
        let block = scales.block;
        let repeat = block / self.granule;
        let contiguous = self.inputs.is_multiple_of(block)
            && block.is_multiple_of(self.granule)
            && repeat.is_power_of_two();
        let per_row = if contiguous {
            self.inputs / block
        } else {
            granules
        };
        let all = count * per_row;
        if raw.floats.len() < all + LANES {
            raw.bits.resize(all, 0);
            raw.floats.resize(all + LANES, 0.0);
        }
        if contiguous {
            scales
                .magnitudes
                .begin(first * per_row, &mut raw.bits[..all]);
            scales
                .magnitudes
                .finish(first * per_row, &raw.bits[..all], &mut raw.floats[..all]);
        } else {
            let rows = raw.floats[..all].chunks_exact_mut(per_row);
            for (index, row) in rows.enumerate() {
                scales.row(first + index, self.inputs, self.granule, row);
            }
        }
        let repeat = if contiguous { repeat } else { 1 };
        Made {
            floats: &raw.floats,
            per_row,
            repeat,
            places: s.places(&groups_of(repeat)),
        }
    }
}

impl ScaleRows {
    /// Scales or offsets of `count` outputs, at most 16, from `first` on, as `(granules, 16)`; anything for
    /// outputs that are not there.
    #[inline(always)]
    pub(super) fn columns<S: Words>(
        &self,
        s: S,
        scales: &Scales<'_>,
        first: usize,
        count: usize,
        raw: &mut Raw,
        out: &mut [f32],
    ) {
        let made = self.make(s, scales, first, count, raw);
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

/// Scales on their way.
#[derive(Debug, Default)]
pub(super) struct Raw {
    bits: Vec<u32>,
    floats: Vec<f32>,
}

/// Scales of some rows.
pub(super) struct Made<'r, S: Words> {
    floats: &'r [f32],
    per_row: usize,
    /// Granules that share one.
    repeat: usize,
    places: S::Places,
}

impl<S: Words> Made<'_, S> {
    /// 16 scales of a row; those beyond its granules are of others.
    #[inline(always)]
    pub(super) fn vector(&self, s: S, index: usize, vector: usize) -> S::F {
        let from = index * self.per_row + vector * LANES / self.repeat;
        match self.floats[from..].first_chunk() {
            Some(window) if self.repeat == 1 => s.load_f32(window),
            Some(window) => s.spread(window, self.places),
            // Not reached: there is a vector beyond the last row.
            None => s.splat(0.0),
        }
    }
}

/// `0, 0, …, 1, 1, …`: for each lane, which group of `of` lanes it is in.
#[inline(always)]
pub(super) fn groups_of(of: usize) -> [u32; LANES] {
    let mut places = [0; LANES];
    let mut group = 0;
    for (lane, place) in places.iter_mut().enumerate() {
        *place = group;
        if (lane + 1).is_multiple_of(of) {
            group += 1;
        }
    }
    places
}
