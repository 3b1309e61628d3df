//! The scales of several rows of a weight at once, a number for each granule.

use half::f16;

use super::scales::{Floats, Magnitudes, Scales};
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
        scales: &Scales<'r>,
        first: usize,
        count: usize,
        raw: &'r mut Raw,
    ) -> Made<'r, S> {
        let (per_row, repeat) = self.of_row(scales);
        let all = count * per_row;
        let from = first * per_row;
        let there = from..from + all + LANES;
        let there = match (&scales.magnitudes, repeat) {
            (Magnitudes::Full(Floats::F32(all)), Some(_)) => all.get(there).map(Numbers::Floats),
            (Magnitudes::Full(Floats::F16(all)), Some(1)) => all.get(there).map(Numbers::Halves),
            _ => None,
        };
        let numbers = match there {
            Some(numbers) => numbers,
            None => {
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
        let repeat = repeat.unwrap_or(1);
        Made {
            numbers,
            per_row,
            shift: repeat.trailing_zeros(),
            places: s.places(&groups_of(repeat)),
        }
    }

    /// Where the scales of row `row` begin, if blocks do not cross rows, whether it is there or not.
    #[inline(always)]
    pub(super) fn place(&self, scales: &Scales<'_>, row: usize) -> *const u8 {
        scales.magnitudes.place(row * (self.inputs / scales.block))
    }

    /// Numbers of a row, and how many granules share one; `None` where rows and blocks do not fit and a
    /// number is made for each granule.
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
    numbers: Numbers<'r>,
    per_row: usize,
    /// The logarithm of how many granules share one.
    shift: u32,
    places: S::Places,
}

/// Where scales are, with a vector to spare after them.
#[derive(Clone, Copy)]
enum Numbers<'r> {
    Floats(&'r [f32]),
    /// One for each granule.
    Halves(&'r [f16]),
}

impl<S: Words> Made<'_, S> {
    /// 16 scales of a row; those beyond its granules are of others.
    #[inline(always)]
    pub(super) fn vector(&self, s: S, index: usize, vector: usize) -> S::F {
        let from = index * self.per_row + ((vector * LANES) >> self.shift);
        let made = match self.numbers {
            Numbers::Floats(all) => all[from..].first_chunk().map(
                #[inline(always)]
                |window| match self.shift {
                    0 => s.load_f32(window),
                    _ => s.spread(window, self.places),
                },
            ),
            Numbers::Halves(all) => all[from..].first_chunk().map(
                #[inline(always)]
                |window| s.load_f16(window),
            ),
        };
        // Always some: there is a vector beyond the last row.
        made.unwrap_or(s.splat(0.0))
    }

    /// Calls `take` with 16 scales of a row after another, and with what `with` gives: as
    /// [`vector`](Self::vector), but what is the same for all is asked once.
    #[inline(always)]
    pub(super) fn each<T>(
        &self,
        s: S,
        index: usize,
        with: impl Iterator<Item = T>,
        mut take: impl FnMut(S::F, T),
    ) {
        let from = index * self.per_row;
        match (self.numbers, self.shift) {
            (Numbers::Halves(all), _) => {
                let (vectors, _) = all[from..].as_chunks();
                for (vector, with) in vectors.iter().zip(with) {
                    take(s.load_f16(vector), with);
                }
            }
            (Numbers::Floats(all), 0) => {
                let (vectors, _) = all[from..].as_chunks();
                for (vector, with) in vectors.iter().zip(with) {
                    take(s.load_f32(vector), with);
                }
            }
            (Numbers::Floats(all), shift) => {
                let all = &all[from..];
                for (vector, with) in with.enumerate() {
                    if let Some(window) = all[(vector * LANES) >> shift..].first_chunk() {
                        take(s.spread(window, self.places), with);
                    }
                }
            }
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
