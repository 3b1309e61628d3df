//! Bicubic resizing of 8-bit images, bit for bit as torchvision does it.

use std::ops::Range;

/// An image with three channels of 8 bits, in rows of red, green and blue.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Rgb {
    pub(super) width: usize,
    pub(super) height: usize,
    pub(super) values: Vec<u8>,
}

/// The number of neighbours that the bicubic kernel reads when it does not shrink.
const TAPS: f64 = 4.0;
/// Keys' parameter with which libtorch antialiases.
const A: f64 = -0.5;
/// The most bits of a weight's fraction.
const MOST_BITS: u32 = 22;

/// Resizes an image with antialiasing: `torchvision.transforms.v2.functional.resize` with `BICUBIC` on a tensor of
/// dtype uint8. libtorch computes it in integers, with weights of 16 bits, first along the rows and then along the
/// columns, and rounds to 8 bits after each. Pillow has weights of 32 bits and another order for some sizes,
/// so its values differ.
pub(super) fn resize(image: Rgb, width: usize, height: usize) -> Rgb {
    let wide = match width == image.width {
        true => image,
        false => along_rows(&image, width),
    };
    match height == wide.height {
        true => wide,
        false => along_columns(&wide, height),
    }
}

/// The weights of the values that one new value is made of.
struct Kernel {
    sources: Range<usize>,
    weights: Vec<i32>,
}

/// The kernels of all new positions along an axis, and the bits of their weights' fractions.
struct Kernels {
    kernels: Vec<Kernel>,
    bits: u32,
}

impl Kernels {
    fn new(from: usize, to: usize) -> Kernels {
        let scale = from as f64 / to as f64;
        let stretch = scale.max(1.0);
        let support = TAPS / 2.0 * stretch;
        let most = 2 * support.ceil() as usize + 1;
        // Truncated, as in C++; the sums are not negative where they matter.
        let bound = |x: f64| (x + 0.5).max(0.0) as usize;
        let exact = (0..to).map(|index| {
            let centre = scale * (index as f64 + 0.5);
            let first = bound(centre - support);
            let sources = first..bound(centre + support).min(from).min(first + most);
            let distance = |source: usize| source as f64 - centre + 0.5;
            // A product with the reciprocal, not a quotient: its rounding is part of the result.
            let invert = if scale >= 1.0 { 1.0 / scale } else { 1.0 };
            let weights = sources
                .clone()
                .map(|source| cubic(distance(source) * invert));
            let weights: Vec<f64> = weights.collect();
            let total: f64 = weights.iter().sum();
            let weights: Vec<f64> = weights.iter().map(|weight| weight / total).collect();
            (sources, weights)
        });
        let exact: Vec<_> = exact.collect();
        let largest = exact.iter().flat_map(|(_, weights)| weights);
        let largest = largest.copied().fold(0.0, f64::max);
        let fits =
            |bits: &u32| (0.5 + largest * f64::from(1_u32 << (bits + 1))) < f64::from(1 << 15);
        let bits = (0..MOST_BITS).take_while(fits).count() as u32;
        let rounded = |weight: &f64| {
            let scaled = weight * f64::from(1_u32 << bits);
            (scaled + 0.5_f64.copysign(scaled)) as i32
        };
        let kernels = exact.into_iter().map(|(sources, weights)| Kernel {
            sources,
            weights: weights.iter().map(rounded).collect(),
        });
        Kernels {
            kernels: kernels.collect(),
            bits,
        }
    }

    fn rounded(&self, sum: i32) -> u8 {
        (sum >> self.bits).clamp(0, 255) as u8
    }

    fn half(&self) -> i32 {
        1 << (self.bits - 1)
    }
}

/// Keys' convolution kernel.
fn cubic(x: f64) -> f64 {
    match x.abs() {
        x if x < 1.0 => ((A + 2.0) * x - (A + 3.0)) * x * x + 1.0,
        x if x < 2.0 => ((A * x - 5.0 * A) * x + 8.0 * A) * x - 4.0 * A,
        _ => 0.0,
    }
}

fn along_rows(image: &Rgb, width: usize) -> Rgb {
    let kernels = Kernels::new(image.width, width);
    let mut values = Vec::with_capacity(3 * width * image.height);
    for row in image.values.chunks_exact(3 * image.width) {
        for kernel in &kernels.kernels {
            let pixels = &row[3 * kernel.sources.start..3 * kernel.sources.end];
            let mut sums = [kernels.half(); 3];
            for (pixel, weight) in pixels.chunks_exact(3).zip(&kernel.weights) {
                for (sum, value) in sums.iter_mut().zip(pixel) {
                    *sum += weight * i32::from(*value);
                }
            }
            values.extend(sums.map(|sum| kernels.rounded(sum)));
        }
    }
    Rgb {
        width,
        height: image.height,
        values,
    }
}

fn along_columns(image: &Rgb, height: usize) -> Rgb {
    let kernels = Kernels::new(image.height, height);
    let row = 3 * image.width;
    let mut values = Vec::with_capacity(row * height);
    let mut sums = vec![0; row];
    for kernel in &kernels.kernels {
        sums.fill(kernels.half());
        let rows = image.values[row * kernel.sources.start..].chunks_exact(row);
        for (source, weight) in rows.zip(&kernel.weights) {
            for (sum, value) in sums.iter_mut().zip(source) {
                *sum += weight * i32::from(*value);
            }
        }
        values.extend(sums.iter().map(|sum| kernels.rounded(*sum)));
    }
    Rgb {
        width: image.width,
        height,
        values,
    }
}
