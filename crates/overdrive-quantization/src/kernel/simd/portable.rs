//! Arrays, in loops that a compiler turns into the vectors of its target (NEON on aarch64).

use half::f16;

use super::{BYTES, LANES, Simd};

/// What every machine has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Portable;

type Lanes = [f32; LANES];

#[inline(always)]
fn map2(a: Lanes, b: Lanes, f: impl Fn(f32, f32) -> f32) -> Lanes {
    let mut out = a;
    for lane in 0..LANES {
        out[lane] = f(a[lane], b[lane]);
    }
    out
}

impl Simd for Portable {
    type F = Lanes;
    type W = [i8; BYTES];
    type X = [i8; BYTES];
    type A = [i32; 4];

    #[inline(always)]
    fn splat(self, x: f32) -> Lanes {
        [x; LANES]
    }

    #[inline(always)]
    fn load_f32(self, from: &[f32; LANES]) -> Lanes {
        *from
    }

    #[inline(always)]
    fn store_f32(self, x: Lanes, to: &mut [f32; LANES]) {
        *to = x;
    }

    #[inline(always)]
    fn load_i8(self, from: &[i8; LANES]) -> Lanes {
        from.map(f32::from)
    }

    #[inline(always)]
    fn load_e4m3(self, from: &[u8; LANES]) -> Lanes {
        from.map(
            #[inline(always)]
            |code| {
                let code = u32::from(code);
                // The exponent's bias is 7 instead of 127: that and the division by 256.
                let scale = f32::from_bits((127 + 112) << 23);
                f32::from_bits(((code & 0x80) << 24) | ((code & 0x7f) << 20)) * scale
            },
        )
    }

    #[inline(always)]
    fn load_f16(self, from: &[f16; LANES]) -> Lanes {
        from.map(
            #[inline(always)]
            |half| f32::from_bits(widened(half.to_bits())),
        )
    }

    #[inline(always)]
    fn add(self, a: Lanes, b: Lanes) -> Lanes {
        map2(
            a,
            b,
            #[inline(always)]
            |a, b| a + b,
        )
    }

    #[inline(always)]
    fn mul(self, a: Lanes, b: Lanes) -> Lanes {
        map2(
            a,
            b,
            #[inline(always)]
            |a, b| a * b,
        )
    }

    /// Rounded twice: a fused one is a function call where the target has no instruction for it.
    #[inline(always)]
    fn mul_add(self, a: Lanes, b: Lanes, c: Lanes) -> Lanes {
        let mut out = c;
        for lane in 0..LANES {
            if cfg!(target_feature = "fma") || cfg!(target_arch = "aarch64") {
                out[lane] = a[lane].mul_add(b[lane], c[lane]);
            } else {
                out[lane] += a[lane] * b[lane];
            }
        }
        out
    }

    #[inline(always)]
    fn reduce_add(self, x: Lanes) -> f32 {
        let mut width = LANES / 2;
        let mut x = x;
        while width > 0 {
            for lane in 0..width {
                x[lane] += x[lane + width];
            }
            width /= 2;
        }
        x[0]
    }

    #[inline(always)]
    fn zero(self) -> [i32; 4] {
        [0; 4]
    }

    #[inline(always)]
    fn load_codes(self, from: &[i8; BYTES]) -> [i8; BYTES] {
        *from
    }

    #[inline(always)]
    fn load_activations(self, from: &[i8; BYTES]) -> [i8; BYTES] {
        *from
    }

    #[inline(always)]
    fn dot(self, sums: [i32; 4], w: [i8; BYTES], x: [i8; BYTES]) -> [i32; 4] {
        // Two products of codes fit 16 bits, and with that eight lanes a register (`smull`, `sadalp`).
        let mut sums = sums;
        let mut at = 0;
        while at < BYTES {
            for (lane, sum) in sums.iter_mut().enumerate() {
                let pair = at + 2 * lane;
                let product = |at: usize| i32::from(i16::from(w[at]) * i16::from(x[at]));
                *sum += product(pair) + product(pair + 1);
            }
            at += 8;
        }
        sums
    }

    #[inline(always)]
    fn add_sums(self, a: [i32; 4], b: [i32; 4]) -> [i32; 4] {
        [a[0] + b[0], a[1] + b[1], a[2] + b[2], a[3] + b[3]]
    }

    #[inline(always)]
    fn total(self, sums: [i32; 4]) -> i32 {
        sums[0] + sums[1] + sums[2] + sums[3]
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

#[cfg(test)]
mod tests {
    use super::super::{InstructionSet, Kernel};
    use super::*;

    struct Load([f16; LANES]);

    impl Kernel for Load {
        type Output = [f32; LANES];

        #[inline(always)]
        fn run<S: Simd>(self, s: S) -> [f32; LANES] {
            let mut out = [0.0; LANES];
            s.store_f32(s.load_f16(&self.0), &mut out);
            out
        }
    }

    #[test]
    fn every_finite_f16_is_loaded_exactly() {
        let finite: Vec<f16> = (0..=u16::MAX)
            .map(f16::from_bits)
            .filter(|half| half.is_finite())
            .collect();
        let (vectors, rest) = finite.as_chunks::<LANES>();
        assert!(rest.is_empty(), "a multiple of 16 numbers");
        for set in InstructionSet::available() {
            for halves in vectors {
                for (half, float) in halves.iter().zip(set.run(Load(*halves))) {
                    assert_eq!(float.to_bits(), half.to_f32().to_bits(), "{set:?}: {half}");
                }
            }
        }
    }
}
