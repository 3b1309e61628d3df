//! Vectors of 16 floats, written once and compiled for each instruction set.
//!
//! A [`Kernel`] is generic over [`Simd`]; [`dispatch`] runs it with the widest instruction set that
//! the machine has. Everything a kernel calls is `#[inline(always)]` (closures too), so that it ends
//! up in the one function that is compiled for that set.

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod element;
pub(crate) mod math;
mod portable;

use half::{bf16, f16};

pub(crate) use element::{Element, each_vector, load, store};

/// Floats in a vector.
pub(crate) const LANES: usize = 16;

/// An instruction set: the operations on vectors of [`LANES`] floats.
///
/// A value of an implementing type is a proof that the machine has the instructions.
pub(crate) trait Simd: Copy {
    /// A vector.
    type F: Copy;

    /// Rows and columns of the square of sums that fits the registers beside its operands: 2 or 4.
    const TILE: usize = 2;

    fn splat(self, x: f32) -> Self::F;
    fn load_f32(self, from: &[f32; LANES]) -> Self::F;
    fn store_f32(self, x: Self::F, to: &mut [f32; LANES]);
    fn load_bf16(self, from: &[bf16; LANES]) -> Self::F;
    /// Rounds to nearest, ties to even; NaN stays NaN.
    fn store_bf16(self, x: Self::F, to: &mut [bf16; LANES]);
    fn load_f16(self, from: &[f16; LANES]) -> Self::F;
    /// Rounds to nearest, ties to even; NaN stays NaN.
    fn store_f16(self, x: Self::F, to: &mut [f16; LANES]);

    fn add(self, a: Self::F, b: Self::F) -> Self::F;
    fn sub(self, a: Self::F, b: Self::F) -> Self::F;
    fn mul(self, a: Self::F, b: Self::F) -> Self::F;
    fn div(self, a: Self::F, b: Self::F) -> Self::F;
    /// `a · b + c`; rounded once where the machine can.
    fn mul_add(self, a: Self::F, b: Self::F, c: Self::F) -> Self::F;
    /// `a` where `a < b`, else `b`: so `b` where either is NaN.
    fn min(self, a: Self::F, b: Self::F) -> Self::F;
    /// `a` where `a > b`, else `b`: so `b` where either is NaN.
    fn max(self, a: Self::F, b: Self::F) -> Self::F;
    /// `then` where `a < b`, else `otherwise`.
    fn select_lt(self, a: Self::F, b: Self::F, then: Self::F, otherwise: Self::F) -> Self::F;
    fn abs(self, x: Self::F) -> Self::F;
    /// To the nearest integer, ties to even.
    fn round(self, x: Self::F) -> Self::F;
    /// `x · 2ⁿ` for integral `n` in `-252..=252`; anything where `n` is NaN and `x` is too.
    fn scale(self, x: Self::F, n: Self::F) -> Self::F;
    /// Exchanges lanes 0 and 1, 2 and 3, and so on.
    fn swap_pairs(self, x: Self::F) -> Self::F;
    fn reduce_add(self, x: Self::F) -> f32;
    fn reduce_max(self, x: Self::F) -> f32;
    /// Asks for the memory at `address` to be brought close; any address will do.
    #[inline(always)]
    fn prefetch<T>(self, address: *const T) {
        let _ = address;
    }
    /// The sums of four vectors, for less than four times the price of one.
    #[inline(always)]
    fn reduce_add_each(self, x: [Self::F; 4]) -> [f32; 4] {
        let [a, b, c, d] = x;
        [
            self.reduce_add(a),
            self.reduce_add(b),
            self.reduce_add(c),
            self.reduce_add(d),
        ]
    }
}

/// Work that is compiled for each instruction set.
pub(crate) trait Kernel {
    type Output;
    /// Implementations are `#[inline(always)]`.
    fn run<S: Simd>(self, simd: S) -> Self::Output;
}

/// The instruction sets that kernels are compiled for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum InstructionSet {
    #[cfg(target_arch = "x86_64")]
    Avx512(avx512::Avx512),
    #[cfg(target_arch = "x86_64")]
    Avx2(avx2::Avx2),
    Portable,
}

impl InstructionSet {
    /// All that this machine has, the widest first.
    pub(crate) fn available() -> impl Iterator<Item = Self> {
        #[cfg(target_arch = "x86_64")]
        let wide = [
            avx512::Avx512::detect().map(Self::Avx512),
            avx2::Avx2::detect().map(Self::Avx2),
        ];
        #[cfg(not(target_arch = "x86_64"))]
        let wide = [None; 0];
        wide.into_iter().flatten().chain([Self::Portable])
    }

    /// The one that kernels run with.
    pub(crate) fn best() -> Self {
        static BEST: std::sync::OnceLock<InstructionSet> = std::sync::OnceLock::new();
        *BEST.get_or_init(|| {
            let wanted = std::env::var("OVERDRIVE_SIMD").ok();
            let fits = |set: &Self| wanted.as_deref().is_none_or(|name| name == set.name());
            Self::available().find(fits).unwrap_or(Self::Portable)
        })
    }

    pub(crate) fn name(self) -> &'static str {
        match self {
            #[cfg(target_arch = "x86_64")]
            Self::Avx512(_) => "avx512",
            #[cfg(target_arch = "x86_64")]
            Self::Avx2(_) => "avx2",
            Self::Portable => "portable",
        }
    }

    /// Runs `kernel` compiled for this set.
    pub(crate) fn run<K: Kernel>(self, kernel: K) -> K::Output {
        match self {
            #[cfg(target_arch = "x86_64")]
            Self::Avx512(simd) => simd.run(kernel),
            #[cfg(target_arch = "x86_64")]
            Self::Avx2(simd) => simd.run(kernel),
            Self::Portable => kernel.run(portable::Portable),
        }
    }
}

/// Runs `kernel` with the widest instruction set of this machine.
pub(crate) fn dispatch<K: Kernel>(kernel: K) -> K::Output {
    InstructionSet::best().run(kernel)
}

/// The instruction set that the kernels of this crate run with: `"avx512"`, `"avx2"` or
/// `"portable"` (on aarch64 that is NEON).
///
/// The environment variable `OVERDRIVE_SIMD`, read once, forces a narrower one, to compare.
pub fn instruction_set() -> &'static str {
    InstructionSet::best().name()
}
