use crate::Sha256Digest;

/// An image as the normalized patches that a vision model reads; made by [`ImageProcessor`](crate::ImageProcessor).
#[derive(Debug, Clone, PartialEq)]
pub struct ImagePatches {
    /// The values of all patches, (patches, `patch_width`) in row-major order. The patches of a merged token are
    /// adjacent. A patch has its red values first, once for each of the model's frames.
    pub pixels: Vec<f32>,
    /// The number of values of a patch.
    pub patch_width: usize,
    /// The number of patches along the height and along the width.
    pub grid: [usize; 2],
    /// The number of patches along each side of those that become one token.
    pub merge_size: usize,
}

impl ImagePatches {
    /// Returns the number of tokens that stand for the image in a prompt.
    pub fn tokens(&self) -> usize {
        self.grid
            .iter()
            .map(|side| side / self.merge_size)
            .product()
    }

    /// Returns a digest of grid and pixels, by which a cache distinguishes images.
    pub fn digest(&self) -> Sha256Digest {
        let grid = self
            .grid
            .iter()
            .flat_map(|side| (*side as u64).to_le_bytes());
        let pixels = self.pixels.iter().flat_map(|value| value.to_le_bytes());
        Sha256Digest::of(&grid.chain(pixels).collect::<Vec<u8>>())
    }
}
