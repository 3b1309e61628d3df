//! Blocks of the quantized types, taken apart into codes, scales and offsets.
//!
//! Every type is `number(code) · scale + offset` by group, with the arithmetic in fp32 in that order.
//! What a code stands for follows from [`GgufType::groups`]: of 4 bits symmetric `code − 8`, of 8 bits
//! symmetric the two's complement, otherwise the code itself.

use half::f16;

use super::tensor_type::{GgufType, SUPER};

/// Where the parts of one block go; `offsets` is empty for symmetric types.
pub(super) struct Parts<'a> {
    pub(super) codes: &'a mut [u8],
    pub(super) scales: &'a mut [f32],
    pub(super) offsets: &'a mut [f32],
}

/// Takes one block apart.
pub(super) fn decode(kind: GgufType, block: &[u8], parts: &mut Parts<'_>) {
    match kind {
        GgufType::Q8_0 => {
            parts.scales[0] = half(block, 0);
            parts.codes.copy_from_slice(&block[2..34]);
        }
        GgufType::Q4_0 => {
            parts.scales[0] = half(block, 0);
            nibbles(&block[2..18], parts.codes);
        }
        GgufType::Q4_1 => {
            parts.scales[0] = half(block, 0);
            parts.offsets[0] = half(block, 2);
            nibbles(&block[4..20], parts.codes);
        }
        GgufType::Q5_0 => {
            parts.scales[0] = half(block, 0);
            nibbles(&block[6..22], parts.codes);
            fifth_bits(&block[2..6], parts.codes);
            for code in &mut *parts.codes {
                *code = code.wrapping_sub(16);
            }
        }
        GgufType::Q5_1 => {
            parts.scales[0] = half(block, 0);
            parts.offsets[0] = half(block, 2);
            nibbles(&block[8..24], parts.codes);
            fifth_bits(&block[4..8], parts.codes);
        }
        GgufType::Q2_K => q2_k(block, parts),
        GgufType::Q3_K => q3_k(block, parts),
        GgufType::Q4_K => {
            six_bit_scales(block, parts);
            nibble_pairs(&block[16..144], parts.codes);
        }
        GgufType::Q5_K => {
            six_bit_scales(block, parts);
            nibble_pairs(&block[48..176], parts.codes);
            let high = &block[16..48];
            for (group, codes) in parts.codes.chunks_exact_mut(32).enumerate() {
                for (code, high) in codes.iter_mut().zip(high) {
                    *code |= ((high >> group) & 1) << 4;
                }
            }
        }
        GgufType::Q6_K => q6_k(block, parts),
        // Stored one by one: they have no blocks to take apart.
        _ => {}
    }
}

fn half(bytes: &[u8], place: usize) -> f32 {
    f16::from_le_bytes([bytes[place], bytes[place + 1]]).to_f32()
}

/// 16 bytes whose low halves are the first 16 codes and whose high halves the other 16.
fn nibbles(bytes: &[u8], codes: &mut [u8]) {
    let (low, high) = codes.split_at_mut(bytes.len());
    for ((byte, low), high) in bytes.iter().zip(low).zip(high) {
        *low = byte & 15;
        *high = byte >> 4;
    }
}

/// The same by 32 bytes.
fn nibble_pairs(bytes: &[u8], codes: &mut [u8]) {
    for (bytes, codes) in bytes.chunks_exact(32).zip(codes.chunks_exact_mut(64)) {
        nibbles(bytes, codes);
    }
}

/// The fifth bit of 32 codes.
fn fifth_bits(bytes: &[u8], codes: &mut [u8]) {
    for (place, code) in codes.iter_mut().enumerate() {
        *code |= ((bytes[place / 8] >> (place % 8)) & 1) << 4;
    }
}

/// Scales and offsets of `Q4_K` and `Q5_K`: eight of each in 6 bits, in 12 bytes after their two
/// factors. The last four have their upper two bits above those of the first four.
fn six_bit_scales(block: &[u8], parts: &mut Parts<'_>) {
    let (scale, offset) = (half(block, 0), half(block, 2));
    let packed = &block[4..16];
    for group in 0..8 {
        let (s, m) = if group < 4 {
            (packed[group] & 63, packed[group + 4] & 63)
        } else {
            let (low, s, m) = (packed[group + 4], packed[group - 4], packed[group]);
            ((low & 15) | ((s >> 6) << 4), (low >> 4) | ((m >> 6) << 4))
        };
        parts.scales[group] = scale * f32::from(s);
        parts.offsets[group] = -(offset * f32::from(m));
    }
}

/// 2 bits by groups of 16: four groups' worth of codes share 32 bytes.
fn two_bits(bytes: &[u8], codes: &mut [u8]) {
    for (bytes, codes) in bytes.chunks_exact(32).zip(codes.chunks_exact_mut(128)) {
        for (quarter, codes) in codes.chunks_exact_mut(32).enumerate() {
            for (code, byte) in codes.iter_mut().zip(bytes) {
                *code = (byte >> (2 * quarter)) & 3;
            }
        }
    }
}

fn q2_k(block: &[u8], parts: &mut Parts<'_>) {
    let (scale, offset) = (half(block, 80), half(block, 82));
    for (group, &packed) in block[..16].iter().enumerate() {
        parts.scales[group] = scale * f32::from(packed & 15);
        parts.offsets[group] = -(offset * f32::from(packed >> 4));
    }
    two_bits(&block[16..80], parts.codes);
}

fn q3_k(block: &[u8], parts: &mut Parts<'_>) {
    let (masks, scales) = (&block[..32], &block[96..108]);
    let scale = half(block, 108);
    for group in 0..16 {
        let low = (scales[group % 8] >> (4 * (group / 8))) & 15;
        let high = (scales[8 + group % 4] >> (2 * (group / 4))) & 3;
        let six_bits = i16::from(low | (high << 4)) - 32;
        parts.scales[group] = scale * f32::from(six_bits);
    }
    two_bits(&block[32..96], parts.codes);
    for (eighth, codes) in parts.codes.chunks_exact_mut(32).enumerate() {
        for (code, mask) in codes.iter_mut().zip(masks) {
            // −4 where the bit is not set, and 8 for the zero of 4 bits.
            *code += 4 + 4 * ((mask >> eighth) & 1);
        }
    }
}

fn q6_k(block: &[u8], parts: &mut Parts<'_>) {
    let (low, high) = (&block[..SUPER / 2], &block[SUPER / 2..SUPER / 4 * 3]);
    let scale = half(block, 208);
    for (slot, &factor) in parts.scales.iter_mut().zip(&block[192..208]) {
        *slot = scale * f32::from(factor.cast_signed());
    }
    for (half, codes) in parts.codes.chunks_exact_mut(128).enumerate() {
        let (low, high) = (&low[64 * half..][..64], &high[32 * half..][..32]);
        nibbles(low, codes);
        for (quarter, codes) in codes.chunks_exact_mut(32).enumerate() {
            for (code, high) in codes.iter_mut().zip(high) {
                *code |= ((high >> (2 * quarter)) & 3) << 4;
                *code = code.wrapping_sub(32);
            }
        }
    }
}
