//! One register of floats, of either precision and any instruction set.
#![allow(unsafe_code, reason = "loads and stores of whole registers")]

use std::fmt::Debug;

use crate::Simd;

/// The floats that kernels compute in: f32 and f64.
pub trait Real:
    Copy
    + Default
    + PartialOrd
    + Send
    + Sync
    + Debug
    + std::ops::Add<Output = Self>
    + std::ops::Sub<Output = Self>
    + std::ops::Mul<Output = Self>
    + std::ops::Div<Output = Self>
    + std::ops::Neg<Output = Self>
    + std::ops::AddAssign
    + 'static
{
    /// The register of an instruction set that holds this type.
    type Vector<S: Simd>: Vector<Scalar = Self, Token = S>;

    /// 0.
    const ZERO: Self;
    /// 1.
    const ONE: Self;
    /// Positive infinity.
    const INFINITY: Self;
    /// The start of a running maximum: finite, so that `-inf` minus it is `-inf` and not NaN.
    const LOWEST: Self;

    /// Rounds `value` to this type.
    fn of(value: f64) -> Self;
    /// Returns the value as f64.
    fn to_f64(self) -> f64;
    /// Returns `2^self`.
    fn exp2(self) -> Self;
    /// Returns the logarithm to base 2.
    fn log2(self) -> Self;
    /// Returns the same slice if this type is f32.
    fn as_f32(numbers: &[Self]) -> Option<&[f32]>;
    /// Returns the same slice, mutable, if this type is f32.
    fn as_f32_mut(numbers: &mut [Self]) -> Option<&mut [f32]>;
}

macro_rules! real {
    ($type:ident, $vector:ident, $lowest:expr, $numbers:ident => $as_f32:expr) => {
        impl Real for $type {
            type Vector<S: Simd> = S::$vector;

            const ZERO: $type = 0.0;
            const ONE: $type = 1.0;
            const INFINITY: $type = $type::INFINITY;
            const LOWEST: $type = $lowest;

            #[inline(always)]
            fn of(value: f64) -> $type {
                value as $type
            }
            #[inline(always)]
            fn to_f64(self) -> f64 {
                f64::from(self)
            }
            #[inline(always)]
            fn exp2(self) -> $type {
                $type::exp2(self)
            }
            #[inline(always)]
            fn log2(self) -> $type {
                $type::log2(self)
            }
            #[inline(always)]
            fn as_f32($numbers: &[Self]) -> Option<&[f32]> {
                $as_f32
            }
            #[inline(always)]
            fn as_f32_mut($numbers: &mut [Self]) -> Option<&mut [f32]> {
                $as_f32
            }
        }
    };
}
real!(f32, F32, -1e30, numbers => Some(numbers));
real!(f64, F64, -1e300, _numbers => None);

/// A vector of [`LEN`](Self::LEN) floats.
///
/// Only functions that take the token of the instruction set create one, so a value proves that the machine has
/// the instructions, and the arithmetic is safe to call.
pub trait Vector: Copy + Debug {
    /// The type of a lane.
    type Scalar: Real;
    /// The token of the instruction set.
    type Token: Copy;
    /// The number of lanes.
    const LEN: usize;

    /// Returns a vector of equal lanes.
    fn splat(token: Self::Token, value: Self::Scalar) -> Self;
    /// Reads [`LEN`](Self::LEN) floats.
    ///
    /// # Safety
    /// `from` points to `LEN` readable floats (of any alignment).
    unsafe fn load_pointer(token: Self::Token, from: *const Self::Scalar) -> Self;
    /// Writes [`LEN`](Self::LEN) floats.
    ///
    /// # Safety
    /// `to` points to `LEN` writable floats (of any alignment).
    unsafe fn store_pointer(self, to: *mut Self::Scalar);

    /// Reads the first [`LEN`](Self::LEN) floats of `from`.
    ///
    /// # Panics
    /// If `from` has fewer.
    #[inline(always)]
    fn load(token: Self::Token, from: &[Self::Scalar]) -> Self {
        assert!(from.len() >= Self::LEN, "a whole vector");
        // SAFETY: the length was checked.
        unsafe { Self::load_pointer(token, from.as_ptr()) }
    }
    /// Writes the first [`LEN`](Self::LEN) floats of `to`.
    ///
    /// # Panics
    /// If `to` has fewer.
    #[inline(always)]
    fn store(self, to: &mut [Self::Scalar]) {
        assert!(to.len() >= Self::LEN, "a whole vector");
        // SAFETY: the length was checked.
        unsafe { self.store_pointer(to.as_mut_ptr()) }
    }

    /// Returns `self + other`.
    fn add(self, other: Self) -> Self;
    /// Returns `self - other`.
    fn sub(self, other: Self) -> Self;
    /// Returns `self · other`.
    fn mul(self, other: Self) -> Self;
    /// Returns `self / other`.
    fn div(self, other: Self) -> Self;
    /// Returns the magnitudes.
    fn abs(self) -> Self;
    /// Returns the larger; `other` in lanes where either is NaN.
    fn max(self, other: Self) -> Self;
    /// Returns the smaller; `other` in lanes where either is NaN.
    fn min(self, other: Self) -> Self;
    /// Returns `self · by + plus`, rounded once if the machine supports it.
    fn mul_add(self, by: Self, plus: Self) -> Self;
    /// Returns `then` in the lanes where `self < other`, `otherwise` in the others.
    fn select_lt(self, other: Self, then: Self, otherwise: Self) -> Self;
    /// Returns the sum of the lanes.
    fn sum(self) -> Self::Scalar;
    /// Returns `2^self` with a relative error of about 1e-7 (f32) and 1e-15 (f64). Results below the smallest normal
    /// number are zero, as for `-inf`; NaN stays NaN. Arguments must be below the largest exponent.
    fn exp2(self) -> Self;
}

/// A vector of two registers.
// Two fields instead of an array: a loop over two registers would keep them in memory until it is unrolled.
#[derive(Debug, Clone, Copy)]
#[cfg(target_arch = "x86_64")]
pub struct Double<V>(pub(crate) V, pub(crate) V);

#[cfg(target_arch = "x86_64")]
impl<V: Vector> Vector for Double<V> {
    type Scalar = V::Scalar;
    type Token = V::Token;
    const LEN: usize = 2 * V::LEN;

    #[inline(always)]
    fn splat(token: V::Token, value: V::Scalar) -> Self {
        let both = V::splat(token, value);
        Double(both, both)
    }
    #[inline(always)]
    unsafe fn load_pointer(token: V::Token, from: *const V::Scalar) -> Self {
        // SAFETY: the caller vouches for the floats of both registers.
        unsafe {
            Double(
                V::load_pointer(token, from),
                V::load_pointer(token, from.add(V::LEN)),
            )
        }
    }
    #[inline(always)]
    unsafe fn store_pointer(self, to: *mut V::Scalar) {
        // SAFETY: the caller vouches for the floats of both registers.
        unsafe {
            self.0.store_pointer(to);
            self.1.store_pointer(to.add(V::LEN));
        }
    }
    #[inline(always)]
    fn add(self, other: Self) -> Self {
        Double(self.0.add(other.0), self.1.add(other.1))
    }
    #[inline(always)]
    fn sub(self, other: Self) -> Self {
        Double(self.0.sub(other.0), self.1.sub(other.1))
    }
    #[inline(always)]
    fn mul(self, other: Self) -> Self {
        Double(self.0.mul(other.0), self.1.mul(other.1))
    }
    #[inline(always)]
    fn div(self, other: Self) -> Self {
        Double(self.0.div(other.0), self.1.div(other.1))
    }
    #[inline(always)]
    fn abs(self) -> Self {
        Double(self.0.abs(), self.1.abs())
    }
    #[inline(always)]
    fn max(self, other: Self) -> Self {
        Double(self.0.max(other.0), self.1.max(other.1))
    }
    #[inline(always)]
    fn min(self, other: Self) -> Self {
        Double(self.0.min(other.0), self.1.min(other.1))
    }
    #[inline(always)]
    fn mul_add(self, by: Self, plus: Self) -> Self {
        Double(self.0.mul_add(by.0, plus.0), self.1.mul_add(by.1, plus.1))
    }
    #[inline(always)]
    fn select_lt(self, other: Self, then: Self, otherwise: Self) -> Self {
        Double(
            self.0.select_lt(other.0, then.0, otherwise.0),
            self.1.select_lt(other.1, then.1, otherwise.1),
        )
    }
    #[inline(always)]
    fn sum(self) -> V::Scalar {
        self.0.add(self.1).sum()
    }
    #[inline(always)]
    fn exp2(self) -> Self {
        Double(self.0.exp2(), self.1.exp2())
    }
}

/// The coefficients of `2^f` for `|f| <= 1/2` in f32: a minimax polynomial of degree 6, off by 2e-9 before
/// rounding.
pub(crate) const EXP2_F32: [f32; 7] = [
    1.0,
    std::f32::consts::LN_2,
    0.240_226_46,
    0.055_503_286,
    0.009_618_489,
    0.001_339_993,
    0.000_153_458_08,
];

/// The coefficients of `2^f` for `|f| <= 1/2` in f64: the series, `ln(2)^k / k!`, off by 4e-18.
pub(crate) const EXP2_F64: [f64; 14] = [
    1.0,
    std::f64::consts::LN_2,
    0.240_226_506_959_100_7,
    0.055_504_108_664_821_576,
    0.009_618_129_107_628_477,
    0.001_333_355_814_642_844_1,
    0.000_154_035_303_933_816_06,
    1.525_273_380_405_984e-5,
    1.321_548_679_014_430_5e-6,
    1.017_808_600_923_969_6e-7,
    7.054_911_620_801_121e-9,
    4.445_538_271_870_81e-10,
    2.567_843_599_348_819_6e-11,
    1.369_148_885_390_412_4e-12,
];

/// Returns the polynomial `c[0] + c[1]·x + …`, by Horner's rule.
#[inline(always)]
pub(crate) fn polynomial<V: Vector, const N: usize>(
    token: V::Token,
    x: V,
    coefficients: &[V::Scalar; N],
) -> V {
    let mut sum = V::splat(token, coefficients[N - 1]);
    for &coefficient in coefficients[..N - 1].iter().rev() {
        sum = sum.mul_add(x, V::splat(token, coefficient));
    }
    sum
}
