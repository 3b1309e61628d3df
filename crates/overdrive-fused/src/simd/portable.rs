//! Arrays of 16 floats, which the compiler turns into the vectors of the target's baseline: SSE2 on
//! x86-64, NEON on aarch64.

use half::{bf16, f16};

use super::{LANES, Simd};

#[derive(Debug, Clone, Copy)]
pub(crate) struct Portable;

/// 1.5 · 2²³: adding and subtracting it drops the fraction by the machine's own rounding, in two
/// instructions that every baseline has. Arguments of `exp` are far below it.
const SHIFT: f32 = 12_582_912.0;

type Lanes = [f32; LANES];

#[inline(always)]
fn map(mut a: Lanes, f: impl Fn(f32) -> f32) -> Lanes {
    for x in &mut a {
        *x = f(*x);
    }
    a
}

#[inline(always)]
fn zip(mut a: Lanes, b: Lanes, f: impl Fn(f32, f32) -> f32) -> Lanes {
    for (x, y) in a.iter_mut().zip(b) {
        *x = f(*x, y);
    }
    a
}

/// Halves the lanes that are left, four times.
#[inline(always)]
fn fold(mut a: Lanes, f: impl Fn(f32, f32) -> f32) -> f32 {
    for half in [8, 4, 2, 1] {
        for lane in 0..half {
            a[lane] = f(a[lane], a[lane + half]);
        }
    }
    a[0]
}

impl Simd for Portable {
    type F = Lanes;

    #[inline(always)]
    fn splat(self, x: f32) -> Lanes {
        [x; LANES]
    }

    #[inline(always)]
    fn load_f32(self, from: &Lanes) -> Lanes {
        *from
    }

    #[inline(always)]
    fn store_f32(self, x: Lanes, to: &mut Lanes) {
        *to = x;
    }

    #[inline(always)]
    fn load_bf16(self, from: &[bf16; LANES]) -> Lanes {
        from.map(
            #[inline(always)]
            |x| f32::from_bits(u32::from(x.to_bits()) << 16),
        )
    }

    #[inline(always)]
    fn store_bf16(self, x: Lanes, to: &mut [bf16; LANES]) {
        for (to, x) in to.iter_mut().zip(x) {
            let bits = x.to_bits();
            let rounded = bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) >> 16;
            *to = bf16::from_bits(if x.is_nan() { 0x7fc0 } else { rounded as u16 });
        }
    }

    #[inline(always)]
    fn load_f16(self, from: &[f16; LANES]) -> Lanes {
        from.map(f16::to_f32)
    }

    #[inline(always)]
    fn store_f16(self, x: Lanes, to: &mut [f16; LANES]) {
        *to = x.map(f16::from_f32);
    }

    #[inline(always)]
    fn add(self, a: Lanes, b: Lanes) -> Lanes {
        zip(
            a,
            b,
            #[inline(always)]
            |a, b| a + b,
        )
    }

    #[inline(always)]
    fn sub(self, a: Lanes, b: Lanes) -> Lanes {
        zip(
            a,
            b,
            #[inline(always)]
            |a, b| a - b,
        )
    }

    #[inline(always)]
    fn mul(self, a: Lanes, b: Lanes) -> Lanes {
        zip(
            a,
            b,
            #[inline(always)]
            |a, b| a * b,
        )
    }

    #[inline(always)]
    fn div(self, a: Lanes, b: Lanes) -> Lanes {
        zip(
            a,
            b,
            #[inline(always)]
            |a, b| a / b,
        )
    }

    #[inline(always)]
    fn mul_add(self, mut a: Lanes, b: Lanes, c: Lanes) -> Lanes {
        for ((x, y), z) in a.iter_mut().zip(b).zip(c) {
            // Where the baseline has no such instruction it would be a call for each lane.
            *x = if cfg!(any(target_arch = "aarch64", target_feature = "fma")) {
                x.mul_add(y, z)
            } else {
                *x * y + z
            };
        }
        a
    }

    #[inline(always)]
    fn min(self, a: Lanes, b: Lanes) -> Lanes {
        zip(
            a,
            b,
            #[inline(always)]
            |a, b| if a < b { a } else { b },
        )
    }

    #[inline(always)]
    fn max(self, a: Lanes, b: Lanes) -> Lanes {
        zip(
            a,
            b,
            #[inline(always)]
            |a, b| if a > b { a } else { b },
        )
    }

    #[inline(always)]
    fn select_lt(self, a: Lanes, b: Lanes, then: Lanes, mut otherwise: Lanes) -> Lanes {
        for lane in 0..LANES {
            if a[lane] < b[lane] {
                otherwise[lane] = then[lane];
            }
        }
        otherwise
    }

    #[inline(always)]
    fn abs(self, x: Lanes) -> Lanes {
        map(
            x,
            #[inline(always)]
            |x| x.abs(),
        )
    }

    #[inline(always)]
    fn round(self, x: Lanes) -> Lanes {
        map(
            x,
            #[inline(always)]
            |x| (x + SHIFT) - SHIFT,
        )
    }

    #[inline(always)]
    fn scale(self, x: Lanes, n: Lanes) -> Lanes {
        zip(
            x,
            n,
            #[inline(always)]
            |x, n| {
                // The shifted number has the integer in its lowest bits.
                let n = (n + SHIFT).to_bits().wrapping_sub(SHIFT.to_bits()) as i32;
                let (first, second) = (n >> 1, n - (n >> 1));
                let power = |n: i32| f32::from_bits((n.wrapping_add(127) as u32) << 23);
                x * power(first) * power(second)
            },
        )
    }

    #[inline(always)]
    fn swap_pairs(self, mut x: Lanes) -> Lanes {
        for pair in 0..LANES / 2 {
            x.swap(2 * pair, 2 * pair + 1);
        }
        x
    }

    #[inline(always)]
    fn reduce_add(self, x: Lanes) -> f32 {
        fold(
            x,
            #[inline(always)]
            |a, b| a + b,
        )
    }

    #[inline(always)]
    fn reduce_max(self, x: Lanes) -> f32 {
        fold(
            x,
            #[inline(always)]
            |a, b| if a > b { a } else { b },
        )
    }
}
