//! Encoding of f32 elements in the blocks of the quantized types: the reference quantizers of llama.cpp
//! (`quantize_row_*_ref` in ggml-quants.c), with its arithmetic in f32, operation for operation.

use half::{bf16, f16};

use super::tensor_type::{GgufType, SUPER};
use crate::codec::code_book::Book;

/// A scale at most this large stands for a group of zeros.
const SMALLEST: f32 = 1e-15;

/// Returns `true` if tensors of the type can be written.
pub(super) fn is_writable(kind: GgufType) -> bool {
    use GgufType as T;
    matches!(
        kind,
        T::F32
            | T::F16
            | T::BF16
            | T::Q8_0
            | T::Q4_0
            | T::Q4_1
            | T::Q5_0
            | T::Q5_1
            | T::Q4_K
            | T::Q5_K
            | T::Q6_K
            | T::MXFP4
    )
}

/// Appends the bytes of a row, whose length is a multiple of the block size.
pub(super) fn encode(kind: GgufType, row: &[f32], out: &mut Vec<u8>) {
    match kind {
        GgufType::F16 => out.extend(row.iter().flat_map(|&x| f16::from_f32(x).to_le_bytes())),
        GgufType::BF16 => out.extend(row.iter().flat_map(|&x| bf16::from_f32(x).to_le_bytes())),
        GgufType::Q8_0 => blocks::<32>(row, |x| q8_0(x, out)),
        GgufType::Q4_0 => blocks::<32>(row, |x| {
            let codes = symmetric(x, 8.0, out);
            out.extend(nibbles(&codes));
        }),
        GgufType::Q5_0 => blocks::<32>(row, |x| {
            let codes = symmetric(x, 16.0, out);
            out.extend(fifth_bits(&codes));
            out.extend(nibbles(&codes));
        }),
        GgufType::Q4_1 => blocks::<32>(row, |x| {
            let codes = with_offset(x, 15, out);
            out.extend(nibbles(&codes));
        }),
        GgufType::Q5_1 => blocks::<32>(row, |x| {
            let codes = with_offset(x, 31, out);
            out.extend(fifth_bits(&codes));
            out.extend(nibbles(&codes));
        }),
        GgufType::Q4_K => blocks::<SUPER>(row, |x| {
            let codes = with_six_bit_scales::<15>(x, (-1.0, 20), out);
            out.extend(nibble_pairs(&codes));
        }),
        GgufType::Q5_K => blocks::<SUPER>(row, |x| {
            let codes = with_six_bit_scales::<31>(x, (-0.5, 15), out);
            out.extend((0..32).map(|at| {
                let groups = (0..).zip(&codes);
                groups.fold(0, |all, (group, codes)| all | ((codes[at] >> 4) << group))
            }));
            out.extend(nibble_pairs(&codes));
        }),
        GgufType::Q6_K => blocks::<SUPER>(row, |x| q6_k(x, out)),
        GgufType::MXFP4 => blocks::<32>(row, |x| mxfp4(x, out)),
        // `is_writable` has none but F32 left.
        _ => out.extend(row.iter().flat_map(|x| x.to_le_bytes())),
    }
}

fn blocks<const N: usize>(row: &[f32], encode: impl FnMut(&[f32; N])) {
    row.as_chunks().0.iter().for_each(encode);
}

fn half(value: f32) -> ([u8; 2], f32) {
    let half = f16::from_f32(value);
    (half.to_le_bytes(), half.to_f32())
}

/// Returns the reciprocal, or 0 for 0.
fn inverse(scale: f32) -> f32 {
    if scale == 0.0 { 0.0 } else { 1.0 / scale }
}

/// Returns the nearest integer, of two equally near ones the even one.
fn nearest(value: f32) -> i32 {
    value.round_ties_even() as i32
}

/// Returns the element of the largest magnitude, the first of several.
fn extreme(x: &[f32]) -> f32 {
    let larger = |found: f32, &x: &f32| if found.abs() < x.abs() { x } else { found };
    x.iter().fold(0.0, larger)
}

fn q8_0(x: &[f32; 32], out: &mut Vec<u8>) {
    let scale = extreme(x).abs() / 127.0;
    out.extend(half(scale).0);
    let factor = inverse(scale);
    out.extend(
        x.iter()
            .map(|x| ((x * factor).round() as i8).cast_unsigned()),
    );
}

fn mxfp4(x: &[f32; 32], out: &mut Vec<u8>) {
    let most = extreme(x).abs();
    // The exponent of the largest float, 6, is 2.
    let exponent = match most > 0.0 {
        true => (most.log2().floor() - 2.0 + 127.0) as u8,
        false => 0,
    };
    out.push(exponent);
    // The scale of the least exponent is subnormal.
    let scale = f32::from_bits(match exponent {
        0 => 0x0040_0000,
        _ => u32::from(exponent) << 23,
    });
    let codes = x.map(|x| {
        let errors = Book::E2m1
            .numbers()
            .map(|number| (number * scale - x).abs());
        let nearest = (0..)
            .zip(errors)
            .reduce(|best, next| match next.1 < best.1 {
                true => next,
                false => best,
            });
        nearest.map_or(0, |(code, _)| code)
    });
    out.extend(nibbles(&codes));
}

/// Writes the scale of a block whose codes are numbers from `-half_range` on, and returns the codes.
fn symmetric(x: &[f32; 32], half_range: f32, out: &mut Vec<u8>) -> [u8; 32] {
    let scale = extreme(x) / -half_range;
    out.extend(half(scale).0);
    let factor = inverse(scale);
    let most = 2.0 * half_range - 1.0;
    x.map(|x| ((x * factor + (half_range + 0.5)) as u8).min(most as u8))
}

/// Writes the scale and the least element of a block, and returns its codes of up to `most`.
fn with_offset(x: &[f32; 32], most: u8, out: &mut Vec<u8>) -> [u8; 32] {
    let least = x.iter().copied().fold(f32::MAX, f32::min);
    let greatest = x.iter().copied().fold(f32::MIN, f32::max);
    let scale = (greatest - least) / f32::from(most);
    out.extend(half(scale).0);
    out.extend(half(least).0);
    let factor = inverse(scale);
    x.map(|x| (((x - least) * factor + 0.5) as u8).min(most))
}

/// Packs the first half of the codes as low and the second half as high nibbles.
fn nibbles(codes: &[u8; 32]) -> impl Iterator<Item = u8> {
    let (low, high) = codes.split_at(16);
    let pairs = low.iter().zip(high);
    pairs
        .map(|(low, high)| (low & 15) | (high << 4))
        .collect::<Vec<_>>()
        .into_iter()
}

/// Packs the fifth bits of the codes.
fn fifth_bits(codes: &[u8; 32]) -> [u8; 4] {
    let bits = (0..).zip(codes);
    let all = bits.fold(0u32, |all, (at, code)| {
        all | (u32::from((code >> 4) & 1) << at)
    });
    all.to_le_bytes()
}

/// Writes the scales and offsets of the eight groups of a super-block, in six bits each, and returns its codes of up to
/// `MOST`. `search` is that of [`scale_and_min`].
fn with_six_bit_scales<const MOST: u8>(
    x: &[f32; SUPER],
    search: (f32, u8),
    out: &mut Vec<u8>,
) -> [[u8; 32]; 8] {
    let (groups, _) = x.as_chunks::<32>();
    let mut codes = [[0u8; 32]; 8];
    let (mut scales, mut mins) = ([0f32; 8], [0f32; 8]);
    for (group, x) in groups.iter().enumerate() {
        let squares = x.iter().fold(0.0, |sum, x| sum + x * x);
        let typical = (squares / 32.0f32).sqrt();
        let weights = x.map(|x| typical + x.abs());
        (scales[group], mins[group], codes[group]) = scale_and_min::<MOST>(x, &weights, search);
    }
    let greatest = |of: &[f32; 8]| of.iter().copied().fold(0.0, f32::max);
    let (max_scale, max_min) = (greatest(&scales), greatest(&mins));
    let six_bits = |of: &[f32; 8], max: f32| {
        let factor = if max > 0.0 { 63.0 / max } else { 0.0 };
        // A cast to a byte, as in llama.cpp, before the bound.
        of.map(|value| (nearest(factor * value) as u8).min(63))
    };
    let (s, m) = (six_bits(&scales, max_scale), six_bits(&mins, max_min));
    let ((scale_bytes, scale), (min_bytes, min)) = (half(max_scale / 63.0), half(max_min / 63.0));
    out.extend(scale_bytes);
    out.extend(min_bytes);
    out.extend((0..4).map(|group| s[group] | ((s[group + 4] >> 4) << 6)));
    out.extend((0..4).map(|group| m[group] | ((m[group + 4] >> 4) << 6)));
    out.extend((4..8).map(|group| (s[group] & 15) | ((m[group] & 15) << 4)));
    for (group, x) in groups.iter().enumerate() {
        let (scale, min) = (scale * f32::from(s[group]), min * f32::from(m[group]));
        if scale != 0.0 {
            codes[group] = x.map(|x| nearest((x + min) / scale).clamp(0, MOST.into()) as u8);
        }
    }
    codes
}

/// Packs the low four bits of each pair of groups.
fn nibble_pairs(codes: &[[u8; 32]; 8]) -> impl Iterator<Item = u8> {
    let pairs = codes.as_chunks::<2>().0.iter();
    pairs.flat_map(|[low, high]| {
        let both = low.iter().zip(high);
        both.map(|(low, high)| (low & 15) | (high << 4))
    })
}

/// Returns the scale and the negated offset that make the weighted squared error of codes from 0 to `MOST` least, and
/// these codes (`make_qkx2_quants`). `search` has the first change of the range that is tried, in codes, and the number
/// of further ones, a tenth apart.
fn scale_and_min<const MOST: u8>(
    x: &[f32; 32],
    weights: &[f32; 32],
    (first, steps): (f32, u8),
) -> (f32, f32, [u8; 32]) {
    let most = f32::from(MOST);
    let greatest = x.iter().copied().fold(x[0], f32::max);
    let mut min = x.iter().copied().fold(x[0], f32::min).min(0.0);
    let mut sum_w = weights[0];
    let mut sum_x = sum_w * x[0];
    for (x, w) in x.iter().zip(weights).skip(1) {
        sum_w += w;
        sum_x += w * x;
    }
    if greatest == min {
        return (0.0, -min, [0; 32]);
    }
    // From the least element of the best codes so far, as in llama.cpp.
    let codes_of =
        |factor: f32, min: f32| x.map(|x| nearest(factor * (x - min)).clamp(0, MOST.into()) as u8);
    let error_of = |codes: &[u8; 32], scale: f32, min: f32| {
        let all = codes.iter().zip(x).zip(weights);
        all.fold(0.0, |error: f32, ((&code, x), w)| {
            let difference = scale * f32::from(code) + min - x;
            error + w * (difference * difference)
        })
    };
    let factor = most / (greatest - min);
    let mut scale = 1.0 / factor;
    let mut codes = codes_of(factor, min);
    let mut best = error_of(&codes, scale, min);
    for step in 0..=steps {
        let factor = (first + 0.1 * f32::from(step) + most) / (greatest - min);
        let tried = codes_of(factor, min);
        let (mut sum_l, mut sum_l2, mut sum_xl) = (0.0, 0.0, 0.0);
        for ((&code, x), w) in tried.iter().zip(x).zip(weights) {
            let code = f32::from(code);
            sum_l += w * code;
            sum_l2 += w * code * code;
            sum_xl += w * code * x;
        }
        let determinant = sum_w * sum_l2 - sum_l * sum_l;
        if determinant <= 0.0 {
            continue;
        }
        let mut own_scale = (sum_w * sum_xl - sum_x * sum_l) / determinant;
        let mut own_min = (sum_l2 * sum_x - sum_l * sum_xl) / determinant;
        if own_min > 0.0 {
            own_min = 0.0;
            own_scale = sum_xl / sum_l2;
        }
        let error = error_of(&tried, own_scale, own_min);
        if error < best {
            (best, scale, min, codes) = (error, own_scale, own_min, tried);
        }
    }
    (scale, -min, codes)
}

fn q6_k(x: &[f32; SUPER], out: &mut Vec<u8>) {
    let (groups, _) = x.as_chunks::<16>();
    let mut codes = [[0u8; 16]; 16];
    let mut scales = [0f32; 16];
    for (group, x) in groups.iter().enumerate() {
        (scales[group], codes[group]) = best_scale(x);
    }
    let max_scale = extreme(&scales);
    if max_scale.abs() < SMALLEST {
        out.extend([0; 210]);
        return;
    }
    let factor = -128.0 / max_scale;
    let (scale_bytes, scale) = half(1.0 / factor);
    let factors = scales.map(|scale| nearest(factor * scale).min(127) as i8);
    for (group, x) in groups.iter().enumerate() {
        let scale = scale * f32::from(factors[group]);
        if scale != 0.0 {
            codes[group] = x.map(|x| (nearest(x / scale).clamp(-32, 31) + 32) as u8);
        }
    }
    let codes = codes.as_flattened();
    let (low, high): (Vec<_>, Vec<_>) = codes
        .as_chunks::<128>()
        .0
        .iter()
        .map(|codes| {
            let low = (0..64).map(|at| (codes[at] & 15) | (codes[at + 64] << 4));
            let high = (0..32).map(|at| {
                let quarters =
                    (0..4).map(|quarter| (codes[at + 32 * quarter] >> 4) << (2 * quarter));
                quarters.fold(0, |all, bits| all | bits)
            });
            (low.collect::<Vec<u8>>(), high.collect::<Vec<u8>>())
        })
        .unzip();
    out.extend(low.into_iter().flatten());
    out.extend(high.into_iter().flatten());
    out.extend(factors.map(i8::cast_unsigned));
    out.extend(scale_bytes);
}

/// Returns the scale that makes the squared error of codes from −32 to 31 least, where each element weighs its square,
/// and these codes plus 32 (`make_qx_quants`).
fn best_scale(x: &[f32; 16]) -> (f32, [u8; 16]) {
    const MOST: f32 = 32.0;
    let extreme = extreme(x);
    if extreme.abs() < SMALLEST {
        return (0.0, [0; 16]);
    }
    let codes_of = |factor: f32| x.map(|x| nearest(factor * x).clamp(-32, 31));
    let sums_of = |codes: &[i32; 16]| {
        let all = codes.iter().zip(x);
        all.fold((0f32, 0f32), |(sum_lx, sum_l2), (&code, &x)| {
            let (weight, code) = (x * x, code as f32);
            (sum_lx + weight * x * code, sum_l2 + weight * code * code)
        })
    };
    let mut codes = codes_of(-MOST / extreme);
    let (sum_lx, sum_l2) = sums_of(&codes);
    let mut scale = if sum_l2 == 0.0 { 0.0 } else { sum_lx / sum_l2 };
    let mut best = scale * sum_lx;
    for step in (-9..=9).filter(|&step| step != 0) {
        let tried = codes_of(-(MOST + 0.1 * step as f32) / extreme);
        let (sum_lx, sum_l2) = sums_of(&tried);
        if sum_l2 > 0.0 && sum_lx * sum_lx > best * sum_l2 {
            (codes, scale) = (tried, sum_lx / sum_l2);
            best = scale * sum_lx;
        }
    }
    (scale, codes.map(|code| (code + 32) as u8))
}
