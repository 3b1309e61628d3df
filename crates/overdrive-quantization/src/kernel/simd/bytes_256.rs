//! A book of 256 floats, as the planes of their bytes: what a look-up of bytes by bytes can read.

/// The numbers of a book, and plane `p` has byte `p` of each.
#[derive(Debug)]
#[repr(C, align(64))]
pub(crate) struct Book256 {
    pub(crate) planes: [[u8; 256]; 4],
    pub(crate) numbers: [f32; 256],
}

/// Writes the bits of the number of each code, one after the other.
#[inline(always)]
pub(crate) fn look_up(numbers: &[f32; 256], codes: &[u8], bits: &mut [u32]) {
    for (bits, &code) in bits.iter_mut().zip(codes) {
        *bits = numbers[usize::from(code)].to_bits();
    }
}

impl Book256 {
    pub(crate) fn new(numbers: &[f32; 256]) -> Self {
        let mut planes = [[0; 256]; 4];
        for (code, number) in numbers.iter().enumerate() {
            for (plane, byte) in planes.iter_mut().zip(number.to_le_bytes()) {
                plane[code] = byte;
            }
        }
        Book256 {
            planes,
            numbers: *numbers,
        }
    }
}
