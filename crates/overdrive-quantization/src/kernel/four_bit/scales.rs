//! The scales of the groups of one row, wherever they are kept, as floats.

use half::f16;

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

    /// The bits of floats for blocks `first ..`, which [`finish`](Self::finish) makes magnitudes: apart,
    /// since a look-up is no vector work, and as integers, of which more are moved at a time.
    #[inline(always)]
    pub(super) fn begin(&self, first: usize, bits: &mut [u32]) {
        match self {
            Magnitudes::Full(Floats::F32(all)) => {
                for (bits, number) in bits.iter_mut().zip(&all[first..]) {
                    *bits = number.to_bits();
                }
            }
            Magnitudes::Full(Floats::F16(all)) => {
                for (bits, half) in bits.iter_mut().zip(&all[first..]) {
                    *bits = widened(half.to_bits());
                }
            }
            Magnitudes::Quantized { codes, book, .. } => {
                for (bits, &code) in bits.iter_mut().zip(&codes[first..]) {
                    *bits = book[usize::from(code)].to_bits();
                }
            }
        }
    }

    /// The magnitudes of blocks `first ..`, of what [`begin`](Self::begin) made.
    #[inline(always)]
    pub(super) fn finish(&self, first: usize, bits: &[u32], out: &mut [f32]) {
        let Magnitudes::Quantized { scales, offset, .. } = self else {
            for (out, bits) in out.iter_mut().zip(bits) {
                *out = f32::from_bits(*bits);
            }
            return;
        };
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

/// The bits of the f32 of a finite f16: without a call or a branch, so that loops become vectors.
#[inline(always)]
fn widened(half: u16) -> u32 {
    let magnitude = u32::from(half & 0x7FFF) << 13;
    // From bias 15 to 127.
    let normal = magnitude + (112 << 23);
    // Without an exponent of its own: as one more than 2⁻¹⁴, which is taken off.
    let tiny = (f32::from_bits(normal + (1 << 23)) - 6.103_515_6e-5).to_bits();
    let bits = if magnitude < 1 << 23 { tiny } else { normal };
    bits | u32::from(half & 0x8000) << 16
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_finite_f16_is_widened_exactly() {
        for half in (0..=u16::MAX)
            .map(f16::from_bits)
            .filter(|half| half.is_finite())
        {
            assert_eq!(widened(half.to_bits()), half.to_f32().to_bits(), "{half}");
        }
    }
}
