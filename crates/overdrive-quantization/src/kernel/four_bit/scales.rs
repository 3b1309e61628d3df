//! The scales of the groups of one row, wherever they are kept, as floats.

use half::f16;
use half::slice::HalfFloatSliceExt;

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

    #[inline(always)]
    fn copy(&self, first: usize, out: &mut [f32]) {
        match self {
            Floats::F32(all) => out.copy_from_slice(&all[first..first + out.len()]),
            Floats::F16(all) => all[first..first + out.len()].convert_to_f32_slice(out),
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
            } => book[usize::from(codes[index])] * scales[index / QUANTIZED_BLOCK] + offset,
        }
    }

    /// Those of blocks `first ..`.
    #[inline(always)]
    fn copy(&self, first: usize, out: &mut [f32]) {
        match self {
            Magnitudes::Full(all) => all.copy(first, out),
            Magnitudes::Quantized {
                codes,
                book,
                scales,
                offset,
            } => {
                let mut at = first;
                let mut rest = out;
                while !rest.is_empty() {
                    let count = rest.len().min(QUANTIZED_BLOCK - at % QUANTIZED_BLOCK);
                    let (part, others) = rest.split_at_mut(count);
                    let scale = scales[at / QUANTIZED_BLOCK];
                    for (out, &code) in part.iter_mut().zip(&codes[at..at + count]) {
                        *out = book[usize::from(code)];
                    }
                    // Apart from the look-up, which is no vector work.
                    for out in part {
                        *out = *out * scale + offset;
                    }
                    at += count;
                    rest = others;
                }
            }
        }
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
        if self.block == granule {
            return self.magnitudes.copy(first / granule, out);
        }
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
