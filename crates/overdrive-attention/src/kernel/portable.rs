//! Vectors as plain arrays, which the compiler turns into whatever the target has.

use super::lanes::{EXP2_F32, EXP2_F64, Lanes, Real, polynomial};

/// `N` numbers.
#[derive(Clone, Copy)]
pub(crate) struct Array<T, const N: usize>([T; N]);

/// What f32 and f64 do differently.
pub(crate) trait Scalar: Real {
    fn abs(self) -> Self;
    fn mul_add(self, by: Self, plus: Self) -> Self;
    fn exp2_lanes<const N: usize>(x: Array<Self, N>) -> Array<Self, N>;
}

macro_rules! scalar {
    ($type:ty, $bits:ty, $magic:expr, $mantissa:expr, $least:expr, $coefficients:expr) => {
        impl Scalar for $type {
            #[inline(always)]
            fn abs(self) -> Self {
                <$type>::abs(self)
            }

            // Without the instruction, a fused multiply-add is a slow library call.
            #[inline(always)]
            fn mul_add(self, by: Self, plus: Self) -> Self {
                if cfg!(any(target_arch = "aarch64", target_feature = "fma")) {
                    <$type>::mul_add(self, by, plus)
                } else {
                    self * by + plus
                }
            }

            #[inline(always)]
            fn exp2_lanes<const N: usize>(x: Array<Self, N>) -> Array<Self, N> {
                // Adding 1.5 · 2^mantissa rounds to an integer and leaves it in the low bits, from
                // where it is added to the exponent.
                let shifted: Array<Self, N> = Array(x.0.map(|x| x + $magic));
                let fraction: Array<Self, N> =
                    Array(std::array::from_fn(|i| x.0[i] - (shifted.0[i] - $magic)));
                let power = polynomial(fraction, &$coefficients);
                Array(std::array::from_fn(|i| {
                    let exponent = shifted.0[i].to_bits() << $mantissa;
                    let scaled =
                        <$type>::from_bits(power.0[i].to_bits().wrapping_add(exponent as $bits));
                    if x.0[i] < $least {
                        0.0
                    } else if x.0[i].is_nan() {
                        x.0[i]
                    } else {
                        scaled
                    }
                }))
            }
        }
    };
}
scalar!(f32, u32, 12_582_912.0, 23, -126.0, EXP2_F32);
scalar!(f64, u64, 6_755_399_441_055_744.0, 52, -1022.0, EXP2_F64);

impl<T: Scalar, const N: usize> Array<T, N> {
    #[inline(always)]
    fn zip(self, other: Self, f: impl Fn(T, T) -> T) -> Self {
        Array(std::array::from_fn(|i| f(self.0[i], other.0[i])))
    }
}

impl<T: Scalar, const N: usize> Lanes for Array<T, N> {
    type Scalar = T;
    const LEN: usize = N;
    const WIDE: usize = 2;

    #[inline(always)]
    unsafe fn splat(value: T) -> Self {
        Array([value; N])
    }
    #[inline(always)]
    unsafe fn load(from: *const T) -> Self {
        // SAFETY: the caller vouches for `N` readable numbers; an array of `T` has no padding.
        Array(unsafe { from.cast::<[T; N]>().read_unaligned() })
    }
    #[inline(always)]
    unsafe fn store(self, to: *mut T) {
        // SAFETY: the caller vouches for `N` writable numbers.
        unsafe { to.cast::<[T; N]>().write_unaligned(self.0) }
    }
    #[inline(always)]
    fn add(self, other: Self) -> Self {
        self.zip(other, |a, b| a + b)
    }
    #[inline(always)]
    fn sub(self, other: Self) -> Self {
        self.zip(other, |a, b| a - b)
    }
    #[inline(always)]
    fn mul(self, other: Self) -> Self {
        self.zip(other, |a, b| a * b)
    }
    #[inline(always)]
    fn div(self, other: Self) -> Self {
        self.zip(other, |a, b| a / b)
    }
    #[inline(always)]
    fn abs(self) -> Self {
        Array(self.0.map(Scalar::abs))
    }
    #[inline(always)]
    fn max(self, other: Self) -> Self {
        self.zip(other, |a, b| if a > b { a } else { b })
    }
    #[inline(always)]
    fn min(self, other: Self) -> Self {
        self.zip(other, |a, b| if a < b { a } else { b })
    }
    #[inline(always)]
    fn mul_add(self, by: Self, plus: Self) -> Self {
        Array(std::array::from_fn(|i| {
            Scalar::mul_add(self.0[i], by.0[i], plus.0[i])
        }))
    }
    #[inline(always)]
    fn where_le(self, other: Self, yes: Self, no: Self) -> Self {
        Array(std::array::from_fn(|i| {
            if self.0[i] <= other.0[i] {
                yes.0[i]
            } else {
                no.0[i]
            }
        }))
    }
    #[inline(always)]
    fn sum(self) -> T {
        self.0.into_iter().fold(T::ZERO, |a, b| a + b)
    }
    #[inline(always)]
    fn exp2(self) -> Self {
        T::exp2_lanes(self)
    }
}
