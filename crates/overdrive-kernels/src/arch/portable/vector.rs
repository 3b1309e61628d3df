//! Vectors as plain arrays.
#![allow(unsafe_code, reason = "loads and stores by pointer")]

use std::array::from_fn;

use super::{FUSED, Portable};
use crate::vector::{EXP2_F32, EXP2_F64, polynomial};
use crate::{Real, Vector};

/// An array of `N` floats.
#[derive(Debug, Clone, Copy)]
pub struct Array<T, const N: usize>(pub(super) [T; N]);

/// The operations of f32 and f64 that [`Real`] does not have.
pub trait Scalar: Real {
    /// Returns the magnitude.
    fn abs(self) -> Self;
    /// Returns `self · by + plus`.
    fn mul_add(self, by: Self, plus: Self) -> Self;
    /// Returns `2^x`.
    fn exp2_array<const N: usize>(x: Array<Self, N>) -> Array<Self, N>;
}

macro_rules! scalar {
    ($type:ty, $bits:ty, $magic:expr, $mantissa:expr, $least:expr, $coefficients:expr) => {
        impl Scalar for $type {
            #[inline(always)]
            fn abs(self) -> Self {
                <$type>::abs(self)
            }

            #[inline(always)]
            fn mul_add(self, by: Self, plus: Self) -> Self {
                if FUSED {
                    <$type>::mul_add(self, by, plus)
                } else {
                    self * by + plus
                }
            }

            #[inline(always)]
            fn exp2_array<const N: usize>(x: Array<Self, N>) -> Array<Self, N> {
                // Adding 1.5 · 2^mantissa rounds to an integer and leaves it in the low bits, from
                // where it is added to the exponent.
                let shifted = x.0.map(|x| x + $magic);
                let fraction = Array::<Self, N>(from_fn(|i| x.0[i] - (shifted[i] - $magic)));
                let power = polynomial(Portable, fraction, &$coefficients);
                Array(from_fn(|i| {
                    let exponent = shifted[i].to_bits() << $mantissa;
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
    pub(super) fn map(mut self, f: impl Fn(T) -> T) -> Self {
        for x in &mut self.0 {
            *x = f(*x);
        }
        self
    }

    #[inline(always)]
    pub(super) fn zip(mut self, other: Self, f: impl Fn(T, T) -> T) -> Self {
        for (x, y) in self.0.iter_mut().zip(other.0) {
            *x = f(*x, y);
        }
        self
    }

    /// Joins the lanes by halves, as registers do.
    #[inline(always)]
    pub(super) fn fold(mut self, f: impl Fn(T, T) -> T) -> T {
        let mut half = N / 2;
        while half > 0 {
            for lane in 0..half {
                self.0[lane] = f(self.0[lane], self.0[lane + half]);
            }
            half /= 2;
        }
        self.0[0]
    }
}

impl<T: Scalar, const N: usize> Vector for Array<T, N> {
    type Scalar = T;
    type Token = Portable;
    const LEN: usize = N;

    #[inline(always)]
    fn splat(_: Portable, value: T) -> Self {
        Array([value; N])
    }
    #[inline(always)]
    unsafe fn load_pointer(_: Portable, from: *const T) -> Self {
        // SAFETY: the caller guarantees `N` readable floats; an array of `T` has no padding.
        Array(unsafe { from.cast::<[T; N]>().read_unaligned() })
    }
    #[inline(always)]
    unsafe fn store_pointer(self, to: *mut T) {
        // SAFETY: the caller guarantees `N` writable floats.
        unsafe { to.cast::<[T; N]>().write_unaligned(self.0) }
    }
    #[inline(always)]
    fn add(self, other: Self) -> Self {
        self.zip(
            other,
            #[inline(always)]
            |a, b| a + b,
        )
    }
    #[inline(always)]
    fn sub(self, other: Self) -> Self {
        self.zip(
            other,
            #[inline(always)]
            |a, b| a - b,
        )
    }
    #[inline(always)]
    fn mul(self, other: Self) -> Self {
        self.zip(
            other,
            #[inline(always)]
            |a, b| a * b,
        )
    }
    #[inline(always)]
    fn div(self, other: Self) -> Self {
        self.zip(
            other,
            #[inline(always)]
            |a, b| a / b,
        )
    }
    #[inline(always)]
    fn abs(self) -> Self {
        self.map(Scalar::abs)
    }
    #[inline(always)]
    fn max(self, other: Self) -> Self {
        self.zip(
            other,
            #[inline(always)]
            |a, b| if a > b { a } else { b },
        )
    }
    #[inline(always)]
    fn min(self, other: Self) -> Self {
        self.zip(
            other,
            #[inline(always)]
            |a, b| if a < b { a } else { b },
        )
    }
    #[inline(always)]
    fn mul_add(mut self, by: Self, plus: Self) -> Self {
        for ((x, y), z) in self.0.iter_mut().zip(by.0).zip(plus.0) {
            *x = Scalar::mul_add(*x, y, z);
        }
        self
    }
    #[inline(always)]
    fn select_lt(self, other: Self, then: Self, mut otherwise: Self) -> Self {
        for lane in 0..N {
            if self.0[lane] < other.0[lane] {
                otherwise.0[lane] = then.0[lane];
            }
        }
        otherwise
    }
    #[inline(always)]
    fn sum(self) -> T {
        self.fold(
            #[inline(always)]
            |a, b| a + b,
        )
    }
    #[inline(always)]
    fn exp2(self) -> Self {
        T::exp2_array(self)
    }
}
