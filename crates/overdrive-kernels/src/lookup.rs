//! Tables of 256 floats.

/// A table of 256 floats, also as the planes of their bytes: what a look-up of bytes by bytes can read.
#[derive(Debug)]
#[repr(C, align(64))]
pub struct Table256 {
    /// Plane `p` has byte `p` (little-endian) of each float.
    pub(crate) planes: [[u8; 256]; 4],
    values: [f32; 256],
}

impl Table256 {
    /// Returns the table of `values`.
    pub fn new(values: &[f32; 256]) -> Self {
        let mut planes = [[0; 256]; 4];
        for (code, value) in values.iter().enumerate() {
            for (plane, byte) in planes.iter_mut().zip(value.to_le_bytes()) {
                plane[code] = byte;
            }
        }
        Table256 {
            planes,
            values: *values,
        }
    }

    /// Returns the floats.
    pub fn values(&self) -> &[f32; 256] {
        &self.values
    }

    /// Writes the bits of the float that each code stands for.
    #[inline(always)]
    pub(crate) fn look_up(&self, codes: &[u8], bits: &mut [u32]) {
        for (bits, &code) in bits.iter_mut().zip(codes) {
            *bits = self.values[usize::from(code)].to_bits();
        }
    }
}
