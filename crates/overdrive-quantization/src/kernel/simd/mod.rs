//! Vectors of 16 floats and of 64 bytes, written once and compiled for each instruction set.
//!
//! A [`Kernel`] is generic over [`Simd`]; [`dispatch`] runs it with the widest instruction set that
//! the machine has. Everything a kernel calls is `#[inline(always)]` (closures too), so that it ends
//! up in the one function that is compiled for that set.

#[cfg(target_arch = "x86_64")]
pub(crate) mod avx2;
#[cfg(target_arch = "x86_64")]
pub(crate) mod avx512;
mod bytes_256;
pub(crate) mod portable;

pub(crate) use bytes_256::{Book256, look_up};

use half::f16;

/// Floats in a vector.
pub(crate) const LANES: usize = 16;

/// Codes in a vector.
pub(crate) const BYTES: usize = 64;

/// An instruction set.
///
/// A value of an implementing type is a proof that the machine has the instructions.
pub(crate) trait Simd: Copy {
    /// [`LANES`] floats.
    type F: Copy;
    /// [`BYTES`] codes of a weight.
    type W: Copy;
    /// [`BYTES`] codes of activations.
    type X: Copy;
    /// Partial sums of products of codes.
    type A: Copy;

    /// Rows and columns of the square of sums that fits the registers beside its operands: 2 or 4.
    const TILE: usize = 2;
    /// What [`dot`](Self::dot) adds to each code of a weight: its sum is too large by this times the
    /// sum of the activations.
    const OFFSET: i32 = 0;

    fn splat(self, x: f32) -> Self::F;
    fn load_f32(self, from: &[f32; LANES]) -> Self::F;
    fn store_f32(self, x: Self::F, to: &mut [f32; LANES]);
    /// 16 codes as floats.
    fn load_i8(self, from: &[i8; LANES]) -> Self::F;
    /// 16 numbers of 8 bits (e4m3), divided by 256, which a scale makes good; the two NaN of the format
    /// become ±480 of that.
    fn load_e4m3(self, from: &[u8; LANES]) -> Self::F;
    /// 16 finite numbers of f16, exactly.
    fn load_f16(self, from: &[f16; LANES]) -> Self::F;
    fn add(self, a: Self::F, b: Self::F) -> Self::F;
    fn mul(self, a: Self::F, b: Self::F) -> Self::F;
    /// `a · b + c`; rounded once where the machine can.
    fn mul_add(self, a: Self::F, b: Self::F, c: Self::F) -> Self::F;
    fn reduce_add(self, x: Self::F) -> f32;
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

    fn zero(self) -> Self::A;
    fn load_codes(self, from: &[i8; BYTES]) -> Self::W;
    /// In `-127..=127`: `-128` is not allowed.
    fn load_activations(self, from: &[i8; BYTES]) -> Self::X;
    /// Adds products `(w + OFFSET) · x`, exactly, in any order.
    fn dot(self, sums: Self::A, w: Self::W, x: Self::X) -> Self::A;
    fn add_sums(self, a: Self::A, b: Self::A) -> Self::A;
    fn total(self, sums: Self::A) -> i32;
    /// The totals of four, for less than four times the price of one.
    #[inline(always)]
    fn total_each(self, sums: [Self::A; 4]) -> [i32; 4] {
        sums.map(
            #[inline(always)]
            |sums| self.total(sums),
        )
    }

    /// Writes the bits of the number of each code.
    #[inline(always)]
    fn look_up_256(self, book: &Book256, codes: &[u8], bits: &mut [u32]) {
        look_up(&book.numbers, codes, bits);
    }

    /// Asks for the memory at `address` to be brought close; any address will do.
    #[inline(always)]
    fn prefetch<T>(self, address: *const T) {
        let _ = address;
    }

    /// The same, no closer than the second cache.
    #[inline(always)]
    fn prefetch_near(self, address: *const u8) {
        let _ = address;
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
    #[inline]
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
    #[inline]
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
#[inline]
pub(crate) fn dispatch<K: Kernel>(kernel: K) -> K::Output {
    InstructionSet::best().run(kernel)
}

/// The instruction set that the kernels of this crate run with: `"avx512"` (with VNNI), `"avx2"` or
/// `"portable"` (on aarch64 that is NEON).
///
/// The environment variable `OVERDRIVE_SIMD`, read once, forces a narrower one, to compare.
pub fn instruction_set() -> &'static str {
    InstructionSet::best().name()
}
