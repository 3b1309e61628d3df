//! Tables of 256 floats: the value of a code, and the nearest code of a value.

/// A table of 256 floats, also stored as planes of their bytes for byte-wise look-ups.
#[derive(Debug)]
#[repr(C, align(64))]
pub struct Table256 {
    /// Plane `p` has byte `p` (little-endian) of each float.
    pub(crate) planes: [[u8; 256]; 4],
    values: [f32; 256],
}

impl Table256 {
    /// Creates the table of `values`.
    pub fn new(values: &[f32; 256]) -> Self {
        // The permutations of VBMI read bytes from two registers, so a table of floats takes part byte by byte.
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

    /// Writes the bits of each code's float.
    #[inline(always)]
    pub(crate) fn look_up(&self, codes: &[u8], bits: &mut [u32]) {
        for (bits, &code) in bits.iter_mut().zip(codes) {
            *bits = self.values[usize::from(code)].to_bits();
        }
    }
}

/// Finds the nearest of 256 ascending floats with one look-up and one comparison.
///
/// No two bounds between neighbours may share their upper 16 bits.
#[derive(Debug)]
pub struct Nearest256 {
    pub(crate) bounds: [f32; 256],
    /// The number of bounds below all floats that have these upper 16 bits. Three bytes more than there are such
    /// halves, for vector units that read four at a time.
    pub(crate) start: Box<[u8; HALVES + 3]>,
}

/// The number of upper halves of floats.
const HALVES: usize = 1 << 16;

impl Nearest256 {
    /// Returns the table for codes of which `code + 1` is nearer than `code` above `bounds[code]`; the last bound is
    /// infinity.
    pub fn new(bounds: [f32; 256]) -> Self {
        let mut start = Box::new([0; HALVES + 3]);
        for (half, start) in (0..1_u32 << 16).zip(start.iter_mut()) {
            let ends = [half << 16, half << 16 | 0xFFFF].map(f32::from_bits);
            let least = ends[0].min(ends[1]);
            let below = bounds.iter().filter(|&&bound| bound < least).count();
            *start = u8::try_from(below).unwrap_or(u8::MAX);
        }
        Self { bounds, start }
    }

    /// Returns the bounds.
    pub fn bounds(&self) -> &[f32; 256] {
        &self.bounds
    }

    /// Returns the nearest code of `value`.
    #[inline(always)]
    pub fn nearest(&self, value: f32) -> u8 {
        let start = self.start[(value.to_bits() >> 16) as usize];
        start + u8::from(value > self.bounds[usize::from(start)])
    }
}
