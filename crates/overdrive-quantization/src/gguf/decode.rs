//! Decoding of the blocks of the quantized types to codes, scales and offsets.
//!
//! Every type is `number(code) · scale + offset` by group, with the arithmetic in f32 in that order.
//! [`GgufType::groups`] decides the number of a code: of 4 bits symmetric `code − 8`, of 8 bits symmetric
//! the two's complement, otherwise the code itself.

use half::f16;

use super::tensor_type::{GgufType, SUPER};

/// The destinations of the codes, scales and offsets of a block; `offsets` is empty for symmetric types.
pub(super) struct GroupsMut<'a> {
    pub(super) codes: &'a mut [u8],
    pub(super) scales: &'a mut [f32],
    pub(super) offsets: &'a mut [f32],
}

/// Decodes one block.
pub(super) fn decode(kind: GgufType, block: &[u8], out: &mut GroupsMut<'_>) {
    match kind {
        GgufType::Q8_0 => {
            out.scales[0] = half(block, 0);
            out.codes.copy_from_slice(&block[2..34]);
        }
        GgufType::Q4_0 => {
            out.scales[0] = half(block, 0);
            nibbles(&block[2..18], out.codes);
        }
        GgufType::Q4_1 => {
            out.scales[0] = half(block, 0);
            out.offsets[0] = half(block, 2);
            nibbles(&block[4..20], out.codes);
        }
        GgufType::Q5_0 => {
            out.scales[0] = half(block, 0);
            nibbles(&block[6..22], out.codes);
            fifth_bits(&block[2..6], out.codes);
            // Signed codes of 8 bits: the format subtracts 16 from the 5 bits.
            for code in &mut *out.codes {
                *code = code.wrapping_sub(16);
            }
        }
        GgufType::Q5_1 => {
            out.scales[0] = half(block, 0);
            out.offsets[0] = half(block, 2);
            nibbles(&block[8..24], out.codes);
            fifth_bits(&block[4..8], out.codes);
        }
        GgufType::Q2_K => q2_k(block, out),
        GgufType::Q3_K => q3_k(block, out),
        GgufType::Q4_K => {
            six_bit_scales(block, out);
            nibble_pairs(&block[16..144], out.codes);
        }
        GgufType::Q5_K => {
            six_bit_scales(block, out);
            nibble_pairs(&block[48..176], out.codes);
            let high = &block[16..48];
            for (group, codes) in out.codes.chunks_exact_mut(32).enumerate() {
                for (code, high) in codes.iter_mut().zip(high) {
                    *code |= ((high >> group) & 1) << 4;
                }
            }
        }
        GgufType::Q6_K => q6_k(block, out),
        // The other types are stored element by element.
        _ => {}
    }
}

fn half(bytes: &[u8], at: usize) -> f32 {
    f16::from_le_bytes([bytes[at], bytes[at + 1]]).to_f32()
}

/// Unpacks bytes whose low halves are the first half of the codes and whose high halves the second.
fn nibbles(bytes: &[u8], codes: &mut [u8]) {
    let (low, high) = codes.split_at_mut(bytes.len());
    for ((byte, low), high) in bytes.iter().zip(low).zip(high) {
        *low = byte & 15;
        *high = byte >> 4;
    }
}

/// Unpacks each 32 bytes as [`nibbles`] does.
fn nibble_pairs(bytes: &[u8], codes: &mut [u8]) {
    for (bytes, codes) in bytes.chunks_exact(32).zip(codes.chunks_exact_mut(64)) {
        nibbles(bytes, codes);
    }
}

/// Adds the fifth bit of 32 codes.
fn fifth_bits(bytes: &[u8], codes: &mut [u8]) {
    for (index, code) in codes.iter_mut().enumerate() {
        *code |= ((bytes[index / 8] >> (index % 8)) & 1) << 4;
    }
}

/// Decodes the scales and offsets of `Q4_K` and `Q5_K`: eight of each in 6 bits, in 12 bytes after their two
/// factors. The upper two bits of the last four are stored above the first four.
fn six_bit_scales(block: &[u8], out: &mut GroupsMut<'_>) {
    let (scale, offset) = (half(block, 0), half(block, 2));
    let packed = &block[4..16];
    for group in 0..8 {
        let (s, m) = if group < 4 {
            (packed[group] & 63, packed[group + 4] & 63)
        } else {
            let (low, s, m) = (packed[group + 4], packed[group - 4], packed[group]);
            ((low & 15) | ((s >> 6) << 4), (low >> 4) | ((m >> 6) << 4))
        };
        out.scales[group] = scale * f32::from(s);
        out.offsets[group] = -(offset * f32::from(m));
    }
}

/// Unpacks codes of 2 bits: each byte has one code of each of four runs of 32.
fn two_bits(bytes: &[u8], codes: &mut [u8]) {
    for (bytes, codes) in bytes.chunks_exact(32).zip(codes.chunks_exact_mut(128)) {
        for (quarter, codes) in codes.chunks_exact_mut(32).enumerate() {
            for (code, byte) in codes.iter_mut().zip(bytes) {
                *code = (byte >> (2 * quarter)) & 3;
            }
        }
    }
}

fn q2_k(block: &[u8], out: &mut GroupsMut<'_>) {
    let (scale, offset) = (half(block, 80), half(block, 82));
    for (group, &packed) in block[..16].iter().enumerate() {
        out.scales[group] = scale * f32::from(packed & 15);
        out.offsets[group] = -(offset * f32::from(packed >> 4));
    }
    two_bits(&block[16..80], out.codes);
}

fn q3_k(block: &[u8], out: &mut GroupsMut<'_>) {
    let (masks, scales) = (&block[..32], &block[96..108]);
    let scale = half(block, 108);
    for group in 0..16 {
        let low = (scales[group % 8] >> (4 * (group / 8))) & 15;
        let high = (scales[8 + group % 4] >> (2 * (group / 4))) & 3;
        let six_bits = i16::from(low | (high << 4)) - 32;
        out.scales[group] = scale * f32::from(six_bits);
    }
    two_bits(&block[32..96], out.codes);
    for (eighth, codes) in out.codes.chunks_exact_mut(32).enumerate() {
        for (code, mask) in codes.iter_mut().zip(masks) {
            // A bit that is not set subtracts 4, and 8 is the zero point of symmetric codes of 4 bits.
            *code += 4 + 4 * ((mask >> eighth) & 1);
        }
    }
}

fn q6_k(block: &[u8], out: &mut GroupsMut<'_>) {
    let (low, high) = (&block[..SUPER / 2], &block[SUPER / 2..SUPER / 4 * 3]);
    let scale = half(block, 208);
    for (slot, &factor) in out.scales.iter_mut().zip(&block[192..208]) {
        *slot = scale * f32::from(factor.cast_signed());
    }
    for (half, codes) in out.codes.chunks_exact_mut(128).enumerate() {
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
