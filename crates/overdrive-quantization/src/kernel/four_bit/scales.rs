//! The scales of the groups of one row, wherever they are kept, as floats.

use std::ops::Range;

use half::f16;
use half::slice::HalfFloatSliceExt;

use crate::kernel::simd::{Book256, LANES, Simd, look_up};

/// Numbers in f32 or f16.
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
pub(crate) enum Magnitudes<'a> {
    Full(Floats<'a>),
    /// `book[codes] · scale + offset`, one scale for [`QUANTIZED_BLOCK`] codes.
    Quantized {
        codes: &'a [u8],
        book: &'a [f32; 256],
        /// The same, for faster look-ups; of the usual book.
        planes: Option<&'a Book256>,
        scales: &'a [f32],
        offset: f32,
    },
}

/// Magnitudes that share a scale, in bitsandbytes' double quantization.
pub(crate) const QUANTIZED_BLOCK: usize = 256;

impl Magnitudes<'_> {
    /// As many blocks as have all that belongs to them.
    pub(crate) fn len(&self) -> usize {
        match self {
            Magnitudes::Full(all) => all.len(),
            Magnitudes::Quantized { codes, scales, .. } => {
                codes.len().min(scales.len() * QUANTIZED_BLOCK)
            }
        }
    }

    #[inline(always)]
    pub(crate) fn at(&self, index: usize) -> f32 {
        match self {
            Magnitudes::Full(all) => all.at(index),
            Magnitudes::Quantized {
                codes,
                book,
                scales,
                offset,
                ..
            } => book[usize::from(codes[index])] * scales[index / QUANTIZED_BLOCK] + offset,
        }
    }

    /// The magnitudes of blocks `blocks`: as they lie, or made in `memory`.
    pub(crate) fn range<'s>(&'s self, blocks: Range<usize>, memory: &'s mut Vec<f32>) -> &'s [f32] {
        match self {
            Magnitudes::Full(Floats::F32(all)) => return &all[blocks],
            Magnitudes::Full(Floats::F16(all)) => {
                memory.resize(blocks.len(), 0.0);
                all[blocks].convert_to_f32_slice(memory);
            }
            Magnitudes::Quantized { .. } => {
                memory.clear();
                memory.extend(blocks.map(|block| self.at(block)));
            }
        }
        memory
    }

    /// Writes the magnitudes of blocks `first ..`. Those that are looked up come by `bits`: a look-up is no
    /// vector work, and as integers more of them are moved at a time.
    #[inline(always)]
    pub(super) fn write<S: Simd>(&self, s: S, first: usize, bits: &mut Vec<u32>, out: &mut [f32]) {
        match self {
            Magnitudes::Full(Floats::F32(all)) => {
                out.copy_from_slice(&all[first..first + out.len()]);
            }
            Magnitudes::Full(Floats::F16(all)) => {
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
            Magnitudes::Quantized {
                codes,
                book,
                planes,
                scales,
                offset,
            } => {
                if bits.len() < out.len() {
                    bits.resize(out.len(), 0);
                }
                let (codes, bits) = (&codes[first..first + out.len()], &mut bits[..out.len()]);
                match planes {
                    Some(planes) => s.look_up_256(planes, codes, bits),
                    None => look_up(book, codes, bits),
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

    /// Where what belongs to block `block` is, or would be: to ask memory for it.
    #[inline(always)]
    pub(super) fn place(&self, block: usize) -> *const u8 {
        let (first, size): (*const u8, _) = match self {
            Magnitudes::Full(Floats::F32(all)) => (all.as_ptr().cast(), size_of::<f32>()),
            Magnitudes::Full(Floats::F16(all)) => (all.as_ptr().cast(), size_of::<f16>()),
            Magnitudes::Quantized { codes, .. } => (codes.as_ptr(), 1),
        };
        first.wrapping_add(block * size)
    }
}

/// Which scale belongs to which weight.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Scales<'a> {
    pub(crate) magnitudes: Magnitudes<'a>,
    /// Weights that share one, counted along the flattened weight: where groups belong to rows, these
    /// are whole in each.
    pub(crate) block: usize,
}

impl Scales<'_> {
    /// The scale of each `granule` weights of row `row`: a granule lies in one block.
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

    /// The scale of one weight of the flattened weight.
    pub(crate) fn of(&self, weight: usize) -> f32 {
        self.magnitudes.at(weight / self.block)
    }
}
