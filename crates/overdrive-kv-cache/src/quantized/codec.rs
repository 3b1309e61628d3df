//! Quantization of values to 8- or 4-bit codes, on plain slices.
//!
//! A group of values shares a scale and a minimum, `x ≈ least + scale · code` (asymmetric, as in KIVI and
//! transformers), so the error is at most half a scale: `(max - min) / 255 / 2` with 8 bits and
//! `(max - min) / 15 / 2` with 4. A group with a value or a range that is not finite
//! dequantizes to NaN.

/// The axis along which elements share a scale (transformers' `axis_key` and `axis_value`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum QuantizationAxis {
    /// A scale for each group of channels of one token.
    #[default]
    Token,
    /// A scale for one channel of a group of tokens. Keys have channels that are large in every token (KIVI,
    /// Liu et al. 2024, <https://arxiv.org/abs/2402.02750>); this way they do not coarsen the other channels.
    Channel,
}

/// The number of bits of a quantized value.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum QuantizationBits {
    /// 256 levels.
    #[default]
    Eight,
    /// 16 levels.
    Four,
}

impl QuantizationBits {
    /// Returns the number of bits: 8 or 4.
    pub fn count(self) -> u32 {
        match self {
            QuantizationBits::Eight => 8,
            QuantizationBits::Four => 4,
        }
    }

    pub(super) fn highest(self) -> f32 {
        match self {
            QuantizationBits::Eight => 255.0,
            QuantizationBits::Four => 15.0,
        }
    }
}

/// The format of quantized rows of `dim` elements.
///
/// With 4 bits, a byte holds the values `i` and `i + group/2` of a group of channels, so that a vector of bytes
/// unpacks into two vectors of consecutive values without a shuffle.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Format {
    pub(crate) bits: QuantizationBits,
    pub(crate) axis: QuantizationAxis,
    /// The number of values in a row, a multiple of `group`.
    pub(crate) dim: usize,
    /// The number of channels in a group, even.
    pub(crate) group: usize,
    /// The number of tokens in a group.
    pub(crate) block: usize,
}

impl Format {
    /// Returns the number of bytes of a row's codes.
    pub(crate) fn row_bytes(&self) -> usize {
        match self.bits {
            QuantizationBits::Eight => self.dim,
            QuantizationBits::Four => self.dim / 2,
        }
    }

    /// Returns the number of rows that share a line of scales.
    pub(crate) fn rows_per_line(&self) -> usize {
        match self.axis {
            QuantizationAxis::Token => 1,
            QuantizationAxis::Channel => self.block,
        }
    }

    /// Returns the number of values in a line: the scales, then the minima.
    pub(crate) fn line_len(&self) -> usize {
        match self.axis {
            QuantizationAxis::Token => 2 * (self.dim / self.group),
            QuantizationAxis::Channel => 2 * self.dim,
        }
    }

    /// Returns the total number of bytes of a row, including its share of the scales.
    pub(crate) fn bytes_per_row(&self) -> f64 {
        self.row_bytes() as f64 + (4 * self.line_len()) as f64 / self.rows_per_line() as f64
    }

    /// Quantizes whole lines of rows.
    pub(crate) fn quantize(&self, rows: &[f32], codes: &mut [u8], lines: &mut [f32]) {
        let per_line = self.rows_per_line();
        let rows = rows.chunks_exact(per_line * self.dim);
        let codes = codes.chunks_exact_mut(per_line * self.row_bytes());
        let lines = lines.chunks_exact_mut(self.line_len());
        for ((rows, codes), line) in rows.zip(codes).zip(lines) {
            let (scales, least) = line.split_at_mut(self.line_len() / 2);
            match self.axis {
                QuantizationAxis::Token => {
                    let groups = rows.chunks_exact(self.group);
                    for ((group, scale), least) in groups.zip(&mut *scales).zip(&mut *least) {
                        (*scale, *least) = self.range(group.iter().copied());
                    }
                }
                QuantizationAxis::Channel => {
                    for (channel, (scale, least)) in scales.iter_mut().zip(&mut *least).enumerate()
                    {
                        let column = rows[channel..].iter().step_by(self.dim).copied();
                        (*scale, *least) = self.range(column);
                    }
                }
            }
            for (row, codes) in rows
                .chunks_exact(self.dim)
                .zip(codes.chunks_exact_mut(self.row_bytes()))
            {
                self.encode(row, codes, scales, least);
            }
        }
    }

    /// Returns the scale and the minimum of a group.
    fn range(&self, group: impl Iterator<Item = f32>) -> (f32, f32) {
        let (mut low, mut high, mut finite) = (f32::INFINITY, f32::NEG_INFINITY, true);
        for x in group {
            low = low.min(x);
            high = high.max(x);
            finite &= x.is_finite();
        }
        let range = high - low;
        match finite && range.is_finite() {
            true => (range / self.bits.highest(), low),
            false => (f32::NAN, f32::NAN),
        }
    }

    fn encode(&self, row: &[f32], codes: &mut [u8], scales: &[f32], least: &[f32]) {
        let code = |channel: usize| {
            let place = match self.axis {
                QuantizationAxis::Token => channel / self.group,
                QuantizationAxis::Channel => channel,
            };
            let (scale, least) = (scales[place], least[place]);
            let steps = match scale > 0.0 {
                true => (row[channel] - least) / scale,
                false => 0.0,
            };
            // A cast of a float to an integer saturates, and takes NaN to 0.
            steps.round().min(self.bits.highest()) as u8
        };
        match self.bits {
            QuantizationBits::Eight => {
                for (channel, to) in codes.iter_mut().enumerate() {
                    *to = code(channel);
                }
            }
            QuantizationBits::Four => {
                let half = self.group / 2;
                for (group, codes) in codes.chunks_exact_mut(half).enumerate() {
                    for (place, to) in codes.iter_mut().enumerate() {
                        let channel = group * self.group + place;
                        *to = code(channel) | (code(channel + half) << 4);
                    }
                }
            }
        }
    }

    /// Dequantizes `codes` to rows, beginning with the first row of a line.
    ///
    /// It is inlined, so that it is compiled for the instruction set of its caller.
    #[inline(always)]
    pub(crate) fn dequantize(&self, codes: &[u8], lines: &[f32], rows: &mut [f32]) {
        let per_line = self.rows_per_line();
        let codes = codes.chunks(per_line * self.row_bytes());
        let lines = lines.chunks_exact(self.line_len());
        for ((rows, codes), line) in rows.chunks_mut(per_line * self.dim).zip(codes).zip(lines) {
            let (scales, least) = line.split_at(self.line_len() / 2);
            for (row, codes) in rows
                .chunks_exact_mut(self.dim)
                .zip(codes.chunks_exact(self.row_bytes()))
            {
                match (self.axis, self.bits) {
                    (QuantizationAxis::Token, QuantizationBits::Eight) => {
                        let groups = row.chunks_exact_mut(self.group);
                        let codes = codes.chunks_exact(self.group);
                        for (((to, codes), scale), least) in
                            groups.zip(codes).zip(scales).zip(least)
                        {
                            for (to, code) in to.iter_mut().zip(codes) {
                                *to = f32::from(*code) * scale + least;
                            }
                        }
                    }
                    (QuantizationAxis::Token, QuantizationBits::Four) => {
                        let groups = row.chunks_exact_mut(self.group);
                        let codes = codes.chunks_exact(self.group / 2);
                        for (((to, codes), scale), least) in
                            groups.zip(codes).zip(scales).zip(least)
                        {
                            let (low, high) = to.split_at_mut(self.group / 2);
                            for ((low, high), code) in low.iter_mut().zip(high).zip(codes) {
                                *low = f32::from(*code & 15) * scale + least;
                                *high = f32::from(*code >> 4) * scale + least;
                            }
                        }
                    }
                    (QuantizationAxis::Channel, QuantizationBits::Eight) => {
                        let of_channel = scales.iter().zip(least);
                        for ((to, code), (scale, least)) in
                            row.iter_mut().zip(codes).zip(of_channel)
                        {
                            *to = f32::from(*code) * scale + least;
                        }
                    }
                    (QuantizationAxis::Channel, QuantizationBits::Four) => {
                        let half = self.group / 2;
                        let groups = row
                            .chunks_exact_mut(self.group)
                            .zip(codes.chunks_exact(half))
                            .zip(
                                scales
                                    .chunks_exact(self.group)
                                    .zip(least.chunks_exact(self.group)),
                            );
                        for ((to, codes), (scale, least)) in groups {
                            let (low, high) = to.split_at_mut(half);
                            let (scale_low, scale_high) = scale.split_at(half);
                            let (least_low, least_high) = least.split_at(half);
                            for ((to, code), (scale, least)) in low
                                .iter_mut()
                                .zip(codes)
                                .zip(scale_low.iter().zip(least_low))
                            {
                                *to = f32::from(*code & 15) * scale + least;
                            }
                            for ((to, code), (scale, least)) in high
                                .iter_mut()
                                .zip(codes)
                                .zip(scale_high.iter().zip(least_high))
                            {
                                *to = f32::from(*code >> 4) * scale + least;
                            }
                        }
                    }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn format() -> impl Strategy<Value = Format> {
        let bits = prop_oneof![Just(QuantizationBits::Eight), Just(QuantizationBits::Four)];
        let axis = prop_oneof![
            Just(QuantizationAxis::Token),
            Just(QuantizationAxis::Channel)
        ];
        (bits, axis, 1usize..4, 1usize..20, 1usize..9).prop_map(
            |(bits, axis, groups, half, block)| Format {
                bits,
                axis,
                dim: groups * half * 2,
                group: half * 2,
                block,
            },
        )
    }

    proptest! {
        #[test]
        fn each_number_comes_back_within_half_a_step_of_its_group(
            format in format(),
            blocks in 1usize..3,
            seed in proptest::collection::vec(-1.0f32..1.0, 1..50),
            size in -30i32..30,
        ) {
            let count = blocks * format.block * format.dim;
            let unit = 2f32.powi(size);
            // Channel 1 is large in every token.
            let rows: Vec<f32> = (0..count)
                .map(|i| unit * seed[i * 7 % seed.len()] * if i % format.dim == 1 { 50.0 } else { 1.0 })
                .collect();
            let tokens = blocks * format.block;
            let mut codes = vec![0; tokens * format.row_bytes()];
            let mut lines = vec![0.0; tokens / format.rows_per_line() * format.line_len()];
            format.quantize(&rows, &mut codes, &mut lines);
            let mut back = vec![0.0; count];
            format.dequantize(&codes, &lines, &mut back);
            for (i, (x, back)) in rows.iter().zip(&back).enumerate() {
                let (token, channel) = (i / format.dim, i % format.dim);
                let group: Vec<f32> = match format.axis {
                    QuantizationAxis::Token => {
                        let start = i - channel % format.group;
                        rows[start..start + format.group].to_vec()
                    }
                    QuantizationAxis::Channel => (0..format.block)
                        .map(|n| rows[(token / format.block * format.block + n) * format.dim + channel])
                        .collect(),
                };
                let low = group.iter().copied().fold(f32::INFINITY, f32::min);
                let high = group.iter().copied().fold(f32::NEG_INFINITY, f32::max);
                let step = (high - low) / format.bits.highest();
                // Half a step, plus the rounding of f32.
                let bound = step * 0.5 * 1.0001 + 4.0 * f32::EPSILON * low.abs().max(high.abs());
                prop_assert!((x - back).abs() <= bound, "{x} came back as {back}, bound {bound}");
            }
        }
    }

    #[test]
    fn equal_numbers_and_the_ends_of_the_range_are_exact() {
        let format = Format {
            bits: QuantizationBits::Four,
            axis: QuantizationAxis::Token,
            dim: 4,
            group: 4,
            block: 1,
        };
        let rows = [0.3f32, 0.3, 0.3, 0.3, -2.0, 1.0, 13.0, 0.0];
        let (mut codes, mut lines, mut back) = ([0; 4], [0.0; 4], [0.0; 8]);
        format.quantize(&rows, &mut codes, &mut lines);
        format.dequantize(&codes, &lines, &mut back);
        assert_eq!(back, rows);
        assert_eq!(codes[2..], [15 << 4, 3 | (2 << 4)]); // 0 and 15, 3 and 2
    }

    #[test]
    fn a_group_that_is_not_finite_is_nan_and_its_neighbour_is_not() {
        let format = Format {
            bits: QuantizationBits::Eight,
            axis: QuantizationAxis::Token,
            dim: 6,
            group: 2,
            block: 1,
        };
        let rows = [1.0, 2.0, f32::INFINITY, 0.0, f32::MAX, -f32::MAX];
        let (mut codes, mut lines, mut back) = ([0; 6], [0.0; 6], [0.0; 6]);
        format.quantize(&rows, &mut codes, &mut lines);
        format.dequantize(&codes, &lines, &mut back);
        assert_eq!(back[..2], [1.0, 2.0]);
        assert!(back[2..].iter().all(|x| x.is_nan()), "{back:?}");
    }
}
