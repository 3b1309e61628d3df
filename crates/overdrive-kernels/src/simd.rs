//! The operations of an instruction set on vectors of 16 floats and of 64 bytes.

use half::{bf16, f16};

use crate::{FourBit, Nearest256, Table256, Vector};

/// The number of floats in a vector.
pub const LANES: usize = 16;

/// The number of bytes in a vector.
pub const BYTES: usize = 64;

/// An instruction set: all operations that a [`Kernel`](crate::Kernel) may use.
pub trait Simd: Floats + Int8 + FourBit {}

impl<S: Floats + Int8 + FourBit> Simd for S {}

/// The operations on vectors of [`LANES`] floats.
///
/// A value of an implementing type is a proof that the machine has the instructions.
pub trait Floats: Copy + Send + Sync + 'static {
    /// A vector of [`LANES`] floats: one register or several.
    type F: Vector<Scalar = f32, Token = Self>;
    /// One register of f32.
    type F32: Vector<Scalar = f32, Token = Self>;
    /// One register of f64.
    type F64: Vector<Scalar = f64, Token = Self>;

    /// The size of the square of sums that fits into the registers with its operands: 2 or 4.
    // Two by two sums of two registers each take 8 of AVX2's 16 registers; AVX-512 has 32, which hold 16 sums.
    const TILE: usize = 2;
    /// If `true`, [`mul_add`](Self::mul_add) rounds once.
    const FUSED: bool = true;

    /// Reads 16 elements of bf16.
    fn load_bf16(self, from: &[bf16; LANES]) -> Self::F;
    /// Writes bf16, rounded to nearest, ties to even; NaN stays NaN.
    fn store_bf16(self, x: Self::F, to: &mut [bf16; LANES]);
    /// Reads 16 elements of f16.
    fn load_f16(self, from: &[f16; LANES]) -> Self::F;
    /// Writes f16, rounded to nearest, ties to even; NaN stays NaN.
    fn store_f16(self, x: Self::F, to: &mut [f16; LANES]);
    /// Reads 16 signed bytes.
    fn load_i8(self, from: &[i8; LANES]) -> Self::F;
    /// Reads 16 elements of FP8 (e4m3) divided by 256, for which the caller's scale compensates; the two NaN of
    /// the format become ±480 / 256.
    fn load_e4m3(self, from: &[u8; LANES]) -> Self::F;
    /// Rounds to the nearest integer, ties to even.
    fn round(self, x: Self::F) -> Self::F;
    /// Returns `x · 2ⁿ` for integral `n` in `-252..=252`; anything where `n` is NaN and `x` is too.
    fn scale(self, x: Self::F, n: Self::F) -> Self::F;
    /// Exchanges lanes 0 and 1, 2 and 3, and so on.
    fn swap_pairs(self, x: Self::F) -> Self::F;
    /// Returns the largest lane.
    fn reduce_max(self, x: Self::F) -> f32;

    /// Returns a vector of equal lanes.
    #[inline(always)]
    fn splat(self, x: f32) -> Self::F {
        Self::F::splat(self, x)
    }
    /// Reads 16 floats.
    #[inline(always)]
    fn load_f32(self, from: &[f32; LANES]) -> Self::F {
        Self::F::load(self, from)
    }
    /// Writes 16 floats.
    #[inline(always)]
    fn store_f32(self, x: Self::F, to: &mut [f32; LANES]) {
        x.store(to);
    }
    /// Returns `a + b`.
    #[inline(always)]
    fn add(self, a: Self::F, b: Self::F) -> Self::F {
        a.add(b)
    }
    /// Returns `a - b`.
    #[inline(always)]
    fn sub(self, a: Self::F, b: Self::F) -> Self::F {
        a.sub(b)
    }
    /// Returns `a · b`.
    #[inline(always)]
    fn mul(self, a: Self::F, b: Self::F) -> Self::F {
        a.mul(b)
    }
    /// Returns `a / b`.
    #[inline(always)]
    fn div(self, a: Self::F, b: Self::F) -> Self::F {
        a.div(b)
    }
    /// Returns `a · b + c`, rounded once if the machine supports it ([`FUSED`](Self::FUSED)).
    #[inline(always)]
    fn mul_add(self, a: Self::F, b: Self::F, c: Self::F) -> Self::F {
        a.mul_add(b, c)
    }
    /// Returns `a` in lanes where `a < b`, else `b`, which includes lanes where either is NaN.
    #[inline(always)]
    fn min(self, a: Self::F, b: Self::F) -> Self::F {
        a.min(b)
    }
    /// Returns `a` in lanes where `a > b`, else `b`, which includes lanes where either is NaN.
    #[inline(always)]
    fn max(self, a: Self::F, b: Self::F) -> Self::F {
        a.max(b)
    }
    /// Returns `then` where `a < b`, else `otherwise`.
    #[inline(always)]
    fn select_lt(self, a: Self::F, b: Self::F, then: Self::F, otherwise: Self::F) -> Self::F {
        a.select_lt(b, then, otherwise)
    }
    /// Returns the magnitudes.
    #[inline(always)]
    fn abs(self, x: Self::F) -> Self::F {
        x.abs()
    }
    /// Returns the sum of the lanes.
    #[inline(always)]
    fn reduce_add(self, x: Self::F) -> f32 {
        x.sum()
    }
    /// Returns the sums of four vectors, for less than four times the cost of one.
    #[inline(always)]
    fn reduce_add_each(self, x: [Self::F; 4]) -> [f32; 4] {
        let [a, b, c, d] = x;
        [a.sum(), b.sum(), c.sum(), d.sum()]
    }
    /// Returns `a · b + c` of single floats, fused as [`mul_add`](Self::mul_add) is, for plain loops that the
    /// compiler vectorizes. Without such an instruction, `f32::mul_add` would be a function call for each
    /// element.
    #[inline(always)]
    fn mul_add_scalar(self, a: f32, b: f32, c: f32) -> f32 {
        if Self::FUSED {
            a.mul_add(b, c)
        } else {
            a * b + c
        }
    }

    /// Prefetches the memory at `address` into the L1 cache; any address is allowed.
    #[inline(always)]
    fn prefetch<T>(self, address: *const T) {
        let _ = address;
    }
    /// Prefetches the memory at `address` into the L2 cache; any address is allowed.
    #[inline(always)]
    fn prefetch_near(self, address: *const u8) {
        let _ = address;
    }
}

/// Dot products of bytes, and look-ups of floats by bytes.
///
/// A value of an implementing type is a proof that the machine has the instructions.
pub trait Int8: Copy {
    /// [`BYTES`] codes of a weight.
    type W: Copy;
    /// [`BYTES`] codes of activations.
    type X: Copy;
    /// Partial sums of products.
    type A: Copy;

    /// The offset that [`dot`](Self::dot) adds to each code of a weight: its sum is too large by this times the
    /// sum of the activations.
    const OFFSET: i32 = 0;

    /// Returns sums of zero.
    fn zero(self) -> Self::A;
    /// Reads codes of a weight.
    fn load_codes(self, from: &[i8; BYTES]) -> Self::W;
    /// Reads codes of activations, in `-127..=127`: `-128` is not allowed.
    fn load_activations(self, from: &[i8; BYTES]) -> Self::X;
    /// Adds the products `(w + OFFSET) · x`, exactly, in any order.
    fn dot(self, sums: Self::A, w: Self::W, x: Self::X) -> Self::A;
    /// Returns `a + b`.
    fn add_sums(self, a: Self::A, b: Self::A) -> Self::A;
    /// Returns the total of the partial sums.
    fn total(self, sums: Self::A) -> i32;
    /// Returns the totals of four, for less than four times the cost of one.
    #[inline(always)]
    fn total_each(self, sums: [Self::A; 4]) -> [i32; 4] {
        sums.map(
            #[inline(always)]
            |sums| self.total(sums),
        )
    }

    /// Writes the bits of each code's float in `table`.
    #[inline(always)]
    fn look_up_256(self, table: &Table256, codes: &[u8], bits: &mut [u32]) {
        table.look_up(codes, bits);
    }

    /// Writes the nearest code of each value times `factor`.
    #[inline(always)]
    fn nearest_256(self, table: &Nearest256, values: &[f32], factor: f32, codes: &mut [u8]) {
        for (code, &value) in codes.iter_mut().zip(values) {
            *code = table.nearest(value * factor);
        }
    }
}
