//! The scales of groups and blocks, in each form in which they are stored.

use std::ops::Range;

use half::f16;
use half::slice::HalfFloatSliceExt;

use overdrive_kernels::{LANES, Simd, Table256};

/// A slice of f32 or f16.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Floats<'a> {
    F32(&'a [f32]),
    F16(&'a [f16]),
}

impl Floats<'_> {
    pub(crate) fn len(&self) -> usize {
        match self {
            Floats::F32(all) => all.len(),
            Floats::F16(all) => all.len(),
        }
    }

    #[inline(always)]
    fn at(&self, index: usize) -> f32 {
        match self {
            Floats::F32(all) => all[index],
            Floats::F16(all) => all[index].to_f32(),
        }
    }
}

/// The magnitudes of blocks.
#[derive(Debug, Clone, Copy)]
pub(crate) enum MagnitudeSlices<'a> {
    Full(Floats<'a>),
    /// The magnitudes `book[codes] · scale + offset`, with one scale for [`QUANTIZED_BLOCK`] codes.
    Quantized {
        codes: &'a [u8],
        book: &'a [f32; 256],
        /// The same book for faster look-ups, if it is the usual one.
        planes: Option<&'a Table256>,
        scales: &'a [f32],
        offset: f32,
    },
}

/// The number of magnitudes that share a scale, in the double quantization of bitsandbytes.
pub(crate) const QUANTIZED_BLOCK: usize = 256;

impl MagnitudeSlices<'_> {
    /// Returns the number of complete blocks.
    pub(crate) fn len(&self) -> usize {
        match self {
            MagnitudeSlices::Full(all) => all.len(),
            MagnitudeSlices::Quantized { codes, scales, .. } => {
                codes.len().min(scales.len() * QUANTIZED_BLOCK)
            }
        }
    }

    #[inline(always)]
    pub(crate) fn at(&self, index: usize) -> f32 {
        match self {
            MagnitudeSlices::Full(all) => all.at(index),
            MagnitudeSlices::Quantized {
                codes,
                book,
                scales,
                offset,
                ..
            } => book[usize::from(codes[index])] * scales[index / QUANTIZED_BLOCK] + offset,
        }
    }

    /// Returns the magnitudes of blocks `blocks`: borrowed, or computed in `memory`.
    pub(crate) fn range<'s>(&'s self, blocks: Range<usize>, memory: &'s mut Vec<f32>) -> &'s [f32] {
        match self {
            MagnitudeSlices::Full(Floats::F32(all)) => return &all[blocks],
            MagnitudeSlices::Full(Floats::F16(all)) => {
                memory.resize(blocks.len(), 0.0);
                all[blocks].convert_to_f32_slice(memory);
            }
            MagnitudeSlices::Quantized { .. } => {
                memory.clear();
                memory.extend(blocks.map(|block| self.at(block)));
            }
        }
        memory
    }

    /// Writes the magnitudes of blocks `first ..`. The ones in 8 bits are looked up as integers in `bits`, which is
    /// faster than as floats, and scaled from there in vectors.
    #[inline(always)]
    pub(super) fn write<S: Simd>(&self, s: S, first: usize, bits: &mut Vec<u32>, out: &mut [f32]) {
        match self {
            MagnitudeSlices::Full(Floats::F32(all)) => {
                out.copy_from_slice(&all[first..first + out.len()]);
            }
            MagnitudeSlices::Full(Floats::F16(all)) => {
                let all = &all[first..first + out.len()];
                let (vectors, rest) = all.as_chunks();
                let (out, rest_of_out) = out.as_chunks_mut();
                for (out, halves) in out.iter_mut().zip(vectors) {
                    s.store_f32(s.load_f16(halves), out);
                }
                if !rest.is_empty() {
                    let mut halves = [f16::ZERO; LANES];
                    let mut floats = [0.0; LANES];
                    halves[..rest.len()].copy_from_slice(rest);
                    s.store_f32(s.load_f16(&halves), &mut floats);
                    rest_of_out.copy_from_slice(&floats[..rest.len()]);
                }
            }
            MagnitudeSlices::Quantized {
                codes,
                book,
                planes,
                scales,
                offset,
            } => {
                // Only grown, since clearing would write every number twice.
                if bits.len() < out.len() {
                    bits.resize(out.len(), 0);
                }
                let (codes, bits) = (&codes[first..first + out.len()], &mut bits[..out.len()]);
                match planes {
                    Some(planes) => s.look_up_256(planes, codes, bits),
                    None => {
                        for (bits, code) in bits.iter_mut().zip(codes) {
                            *bits = book[usize::from(*code)].to_bits();
                        }
                    }
                }
                let mut done = 0;
                while done < out.len() {
                    let at = first + done;
                    let count = (out.len() - done).min(QUANTIZED_BLOCK - at % QUANTIZED_BLOCK);
                    let scale = scales[at / QUANTIZED_BLOCK];
                    let bits = &bits[done..done + count];
                    for (out, bits) in out[done..done + count].iter_mut().zip(bits) {
                        *out = f32::from_bits(*bits) * scale + offset;
                    }
                    done += count;
                }
            }
        }
    }

    /// Returns the address at which the data of block `block` is, or would be, for a prefetch.
    #[inline(always)]
    pub(super) fn address(&self, block: usize) -> *const u8 {
        let (first, size): (*const u8, _) = match self {
            MagnitudeSlices::Full(Floats::F32(all)) => (all.as_ptr().cast(), size_of::<f32>()),
            MagnitudeSlices::Full(Floats::F16(all)) => (all.as_ptr().cast(), size_of::<f16>()),
            MagnitudeSlices::Quantized { codes, .. } => (codes.as_ptr(), 1),
        };
        first.wrapping_add(block * size)
    }
}

/// The scales of the elements of a weight.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Scales<'a> {
    pub(crate) magnitudes: MagnitudeSlices<'a>,
    /// The number of elements that share a scale, counted along the flattened weight. Groups, which belong to
    /// rows, divide each row.
    pub(crate) block: usize,
}

impl Scales<'_> {
    /// Writes the scale of each `granule` elements of row `row`; a granule lies in one block.
    #[inline(always)]
    pub(crate) fn row(&self, row: usize, inputs: usize, granule: usize, out: &mut [f32]) {
        let first = row * inputs;
        let mut at = first;
        let mut rest = out;
        while !rest.is_empty() {
            let block = at / self.block;
            let end = (block + 1) * self.block;
            let count = ((end - at) / granule).clamp(1, rest.len());
            let (part, others) = rest.split_at_mut(count);
            part.fill(self.magnitudes.at(block));
            at += count * granule;
            rest = others;
        }
    }

    /// Returns the scale of one element of the flattened weight.
    pub(crate) fn of(&self, weight: usize) -> f32 {
        self.magnitudes.at(weight / self.block)
    }
}
