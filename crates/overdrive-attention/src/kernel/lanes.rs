//! Vectors of numbers, one type for each instruction set, and the choice between them.
//!
//! A kernel is written once, generic over [`Lanes`] and inlined into a function that is compiled for
//! the instruction set ([`multiversioned`](super::multiversioned)); [`InstructionSet::detect`] picks.

/// Which vector instructions the kernels may use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum InstructionSet {
    /// 512-bit vectors (AVX-512 F, BW, DQ, VL).
    #[cfg(target_arch = "x86_64")]
    Avx512,
    /// 256-bit vectors with fused multiply-add (AVX2, FMA).
    #[cfg(target_arch = "x86_64")]
    Avx2,
    /// Whatever the compiler's target has: NEON on aarch64, SSE2 on x86-64.
    Portable,
}

impl InstructionSet {
    /// The widest that this CPU has.
    pub(crate) fn detect() -> InstructionSet {
        #[cfg(target_arch = "x86_64")]
        {
            let avx2 = is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma");
            let avx512 = is_x86_feature_detected!("avx512f")
                && is_x86_feature_detected!("avx512bw")
                && is_x86_feature_detected!("avx512dq")
                && is_x86_feature_detected!("avx512vl");
            if avx2 && avx512 {
                return InstructionSet::Avx512;
            }
            if avx2 {
                return InstructionSet::Avx2;
            }
        }
        InstructionSet::Portable
    }

    /// All that this CPU has, for tests of each.
    #[cfg(test)]
    pub(crate) fn available() -> Vec<InstructionSet> {
        #[cfg(target_arch = "x86_64")]
        match InstructionSet::detect() {
            InstructionSet::Avx512 => vec![Self::Avx512, Self::Avx2, Self::Portable],
            InstructionSet::Avx2 => vec![Self::Avx2, Self::Portable],
            InstructionSet::Portable => vec![Self::Portable],
        }
        #[cfg(not(target_arch = "x86_64"))]
        vec![InstructionSet::Portable]
    }
}

/// The numbers that the kernels compute in: f32 and f64.
pub(crate) trait Real:
    Copy
    + Default
    + PartialOrd
    + Send
    + Sync
    + std::fmt::Debug
    + std::ops::Add<Output = Self>
    + std::ops::Sub<Output = Self>
    + std::ops::Mul<Output = Self>
    + std::ops::Div<Output = Self>
    + std::ops::Neg<Output = Self>
    + std::ops::AddAssign
    + 'static
{
    #[cfg(target_arch = "x86_64")]
    type Avx512: Lanes<Scalar = Self>;
    #[cfg(target_arch = "x86_64")]
    type Avx2: Lanes<Scalar = Self>;
    type Portable: Lanes<Scalar = Self>;

    const ZERO: Self;
    const ONE: Self;
    const INFINITY: Self;
    /// Where a running maximum starts: finite, so that `-inf` minus it is `-inf` and not NaN.
    const LOWEST: Self;

    fn of(value: f64) -> Self;
    #[cfg(test)]
    fn f64(self) -> f64;
    fn exp2(self) -> Self;
    fn log2(self) -> Self;
    fn lanes(set: InstructionSet) -> usize {
        match set {
            #[cfg(target_arch = "x86_64")]
            InstructionSet::Avx512 => Self::Avx512::LEN,
            #[cfg(target_arch = "x86_64")]
            InstructionSet::Avx2 => Self::Avx2::LEN,
            InstructionSet::Portable => Self::Portable::LEN,
        }
    }
}

impl Real for f32 {
    #[cfg(target_arch = "x86_64")]
    type Avx512 = super::x86::F32x16;
    #[cfg(target_arch = "x86_64")]
    type Avx2 = super::x86::F32x8;
    type Portable = super::portable::Array<f32, 8>;

    const ZERO: f32 = 0.0;
    const ONE: f32 = 1.0;
    const INFINITY: f32 = f32::INFINITY;
    const LOWEST: f32 = -1e30;

    #[allow(
        clippy::cast_possible_truncation,
        reason = "rounding to f32 is what is asked for"
    )]
    fn of(value: f64) -> f32 {
        value as f32
    }
    #[cfg(test)]
    fn f64(self) -> f64 {
        f64::from(self)
    }
    fn exp2(self) -> f32 {
        f32::exp2(self)
    }
    fn log2(self) -> f32 {
        f32::log2(self)
    }
}

impl Real for f64 {
    #[cfg(target_arch = "x86_64")]
    type Avx512 = super::x86::F64x8;
    #[cfg(target_arch = "x86_64")]
    type Avx2 = super::x86::F64x4;
    type Portable = super::portable::Array<f64, 4>;

    const ZERO: f64 = 0.0;
    const ONE: f64 = 1.0;
    const INFINITY: f64 = f64::INFINITY;
    const LOWEST: f64 = -1e300;

    fn of(value: f64) -> f64 {
        value
    }
    #[cfg(test)]
    fn f64(self) -> f64 {
        self
    }
    fn exp2(self) -> f64 {
        f64::exp2(self)
    }
    fn log2(self) -> f64 {
        f64::log2(self)
    }
}

/// A vector of `LEN` numbers.
///
/// Only `splat` and `load` make one, and both demand that the CPU has the instruction set; a value is
/// therefore proof of it, and the arithmetic is safe.
pub(crate) trait Lanes: Copy {
    type Scalar: Real;
    /// Numbers in a vector.
    const LEN: usize;
    /// Vectors side by side in the tiles of a product: as many as the registers hold, six rows high.
    const WIDE: usize;

    /// # Safety
    /// The CPU has the instruction set of this type.
    unsafe fn splat(value: Self::Scalar) -> Self;
    /// # Safety
    /// As [`Lanes::splat`], and `from` points to `LEN` readable numbers (of any alignment).
    unsafe fn load(from: *const Self::Scalar) -> Self;
    /// # Safety
    /// `to` points to `LEN` writable numbers (of any alignment).
    unsafe fn store(self, to: *mut Self::Scalar);

    fn add(self, other: Self) -> Self;
    fn sub(self, other: Self) -> Self;
    fn mul(self, other: Self) -> Self;
    fn div(self, other: Self) -> Self;
    fn abs(self) -> Self;
    /// The larger; `other` where either is NaN.
    fn max(self, other: Self) -> Self;
    /// The smaller; `other` where either is NaN.
    fn min(self, other: Self) -> Self;
    /// `self · by + plus`, fused where the CPU can.
    fn mul_add(self, by: Self, plus: Self) -> Self;
    /// `yes` in the lanes where `self <= other`, `no` in the others.
    fn where_le(self, other: Self, yes: Self, no: Self) -> Self;
    /// The sum of the lanes.
    fn sum(self) -> Self::Scalar;
    /// `2^self` to about 1e-7 (f32) and 1e-15 (f64), relative. Below the least normal number: zero,
    /// as for `-inf`; NaN stays NaN. For arguments below the largest exponent only.
    fn exp2(self) -> Self;
}

/// Coefficients of `2^f` for `|f| <= 1/2` in f32: a least-maximum fit of degree 6, off by 2e-9 before
/// rounding.
pub(super) const EXP2_F32: [f32; 7] = [
    1.0,
    std::f32::consts::LN_2,
    0.240_226_46,
    0.055_503_286,
    0.009_618_489,
    0.001_339_993,
    0.000_153_458_08,
];

/// Coefficients of `2^f` for `|f| <= 1/2` in f64: the series, `ln(2)^k / k!`, off by 4e-18.
pub(super) const EXP2_F64: [f64; 14] = [
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

/// A polynomial by Horner's rule.
#[inline(always)]
pub(super) fn polynomial<V: Lanes, const N: usize>(x: V, coefficients: &[V::Scalar; N]) -> V {
    // SAFETY: `x` proves the instruction set.
    let mut sum = unsafe { V::splat(coefficients[N - 1]) };
    for &coefficient in coefficients[..N - 1].iter().rev() {
        // SAFETY: as above.
        sum = sum.mul_add(x, unsafe { V::splat(coefficient) });
    }
    sum
}
