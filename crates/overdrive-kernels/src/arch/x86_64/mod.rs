//! AVX2 and AVX-512.
#![allow(unsafe_code, reason = "intrinsics")]

/// Evaluates an expression of intrinsics.
macro_rules! intrinsics {
    ($call:expr) => {
        // SAFETY: this is only used in methods of a token or a vector of an instruction set, whose values
        // prove that the machine has the instructions; loads and stores go through references to arrays of the
        // size that they access, or through pointers whose validity the caller of an unsafe method ensures.
        unsafe { $call }
    };
}

/// Defines a token, its detection, and the function that kernels are compiled in.
macro_rules! token {
    ($(#[$doc:meta])* $name:ident: $($feature:tt),+; $all:literal) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub struct $name(());

        impl crate::dispatch::Token for $name {
            fn detect() -> Option<Self> {
                let has = $(is_x86_feature_detected!($feature))&&+;
                has.then_some(Self(()))
            }

            #[inline]
            fn run<K: crate::Kernel>(self, kernel: K) -> K::Output {
                #[target_feature(enable = $all)]
                fn compiled<K: crate::Kernel>(simd: $name, kernel: K) -> K::Output {
                    kernel.run(simd)
                }
                intrinsics!(compiled(self, kernel))
            }
        }
    };
}

/// Defines one register of floats from the intrinsics of its operations.
macro_rules! vector {
    (
        $(#[$doc:meta])* $name:ident($register:ident) of $scalar:ident, $len:literal, $token:ident;
        $set1:ident, $loadu:ident, $storeu:ident, $add:ident, $sub:ident, $mul:ident, $div:ident,
        $max:ident, $min:ident, $fmadd:ident, $abs:ident, $select_lt:ident, $sum:ident, $exp2:ident
    ) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy)]
        pub struct $name(pub(super) $register);

        impl crate::Vector for $name {
            type Scalar = $scalar;
            type Token = $token;
            const LEN: usize = $len;

            #[inline(always)]
            fn splat(_: $token, value: $scalar) -> Self {
                $name(intrinsics!($set1(value)))
            }
            #[inline(always)]
            unsafe fn load_pointer(_: $token, from: *const $scalar) -> Self {
                $name(intrinsics!($loadu(from)))
            }
            #[inline(always)]
            unsafe fn store_pointer(self, to: *mut $scalar) {
                intrinsics!($storeu(to, self.0))
            }
            #[inline(always)]
            fn add(self, other: Self) -> Self {
                $name(intrinsics!($add(self.0, other.0)))
            }
            #[inline(always)]
            fn sub(self, other: Self) -> Self {
                $name(intrinsics!($sub(self.0, other.0)))
            }
            #[inline(always)]
            fn mul(self, other: Self) -> Self {
                $name(intrinsics!($mul(self.0, other.0)))
            }
            #[inline(always)]
            fn div(self, other: Self) -> Self {
                $name(intrinsics!($div(self.0, other.0)))
            }
            #[inline(always)]
            fn abs(self) -> Self {
                $name(intrinsics!($abs(self.0)))
            }
            #[inline(always)]
            fn max(self, other: Self) -> Self {
                $name(intrinsics!($max(self.0, other.0)))
            }
            #[inline(always)]
            fn min(self, other: Self) -> Self {
                $name(intrinsics!($min(self.0, other.0)))
            }
            #[inline(always)]
            fn mul_add(self, by: Self, plus: Self) -> Self {
                $name(intrinsics!($fmadd(self.0, by.0, plus.0)))
            }
            #[inline(always)]
            fn select_lt(self, other: Self, then: Self, otherwise: Self) -> Self {
                $name(intrinsics!($select_lt(self.0, other.0, then.0, otherwise.0)))
            }
            #[inline(always)]
            fn sum(self) -> $scalar {
                intrinsics!($sum(self.0))
            }
            #[inline(always)]
            fn exp2(self) -> Self {
                intrinsics!($exp2(self))
            }
        }
    };
}

// Below the macros, which are in scope from their definition on.
mod avx2;
mod avx512;

pub use avx2::Avx2;
pub use avx512::Avx512;
