//! Instruction sets, their detection, and running kernels with one of them.

use std::marker::PhantomData;
use std::sync::OnceLock;

use overdrive_core::Error;
use overdrive_sys::denormals::flushing_denormals;

use crate::{Real, Simd, Vector, arch};

/// The environment variable that names the instruction set.
const VARIABLE: &str = "OVERDRIVE_SIMD";

/// Work that is compiled for each instruction set.
pub trait Kernel {
    /// The type of the result.
    type Output;
    /// Runs the kernel. Implementations are `#[inline(always)]`, and so is everything they call.
    fn run<S: Simd>(self, simd: S) -> Self::Output;
}

/// The token of an instruction set, which each folder of `arch/` defines.
pub(crate) trait Token: Simd {
    /// Returns the token if the machine has the instructions.
    fn detect() -> Option<Self>;
    /// Runs `kernel` in a function that is compiled for the instructions.
    fn run<K: Kernel>(self, kernel: K) -> K::Output;
}

macro_rules! instruction_sets {
    ($($(#[$condition:meta])? $name:literal: $variant:ident = $token:path,)*) => {
        /// An instruction set that this machine supports.
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        #[non_exhaustive]
        pub enum InstructionSet {
            $(
                #[doc = concat!("The set named `", $name, "`.")]
                $(#[$condition])?
                $variant($token),
            )*
        }

        impl InstructionSet {
            /// Returns all sets that this machine supports, the widest first.
            pub fn available() -> impl Iterator<Item = Self> {
                let sets = [$(
                    $(#[$condition])?
                    <$token as Token>::detect().map(Self::$variant),
                )*];
                sets.into_iter().flatten()
            }

            /// Returns the name, as in `OVERDRIVE_SIMD`.
            pub fn name(self) -> &'static str {
                match self {
                    $(
                        $(#[$condition])?
                        Self::$variant(_) => $name,
                    )*
                }
            }

            /// Runs `kernel` compiled for this set. Subnormal numbers are treated as zero.
            #[inline]
            pub fn run<K: Kernel>(self, kernel: K) -> K::Output {
                flushing_denormals(|| match self {
                    $(
                        $(#[$condition])?
                        Self::$variant(token) => Token::run(token, kernel),
                    )*
                })
            }
        }
    };
}

// One line for each set, from the widest to the one that every machine supports.
instruction_sets! {
    #[cfg(target_arch = "x86_64")] "avx512": Avx512 = arch::Avx512,
    #[cfg(target_arch = "x86_64")] "avx2": Avx2 = arch::Avx2,
    "portable": Portable = arch::Portable,
}

impl InstructionSet {
    /// Returns the set that kernels run with: that in `OVERDRIVE_SIMD`, else the widest.
    ///
    /// The variable is read once. If it names no set of this machine, a warning is logged and the widest set is
    /// used, since an environment variable must not stop a program. Programs that want an error can use
    /// [`from_name`](Self::from_name).
    #[inline]
    pub fn best() -> Self {
        // Detection and reading the environment take longer than a short kernel, and the result never changes.
        static BEST: OnceLock<InstructionSet> = OnceLock::new();
        *BEST.get_or_init(|| {
            // Scripts that clear a variable often leave it empty.
            let wanted = std::env::var_os(VARIABLE).filter(|name| !name.is_empty());
            let Some(wanted) = wanted else {
                return Self::widest();
            };
            Self::from_name(&wanted.to_string_lossy()).unwrap_or_else(|error| {
                let widest = Self::widest();
                tracing::warn!("{error}; using {} instead", widest.name());
                widest
            })
        })
    }

    /// Returns the set of this name.
    ///
    /// # Errors
    /// [`Error::InvalidOption`] if this machine has no set of this name.
    pub fn from_name(name: &str) -> Result<Self, Error> {
        let found = Self::available().find(|set| set.name() == name);
        found.ok_or_else(|| {
            let names: Vec<_> = Self::available().map(Self::name).collect();
            let expected = format!("an instruction set of this machine: {}", names.join(", "));
            Error::option(VARIABLE, name, expected)
        })
    }

    /// Returns the number of lanes of a register of `R`.
    pub fn lanes<R: Real>(self) -> usize {
        struct Lanes<R>(PhantomData<R>);
        impl<R: Real> Kernel for Lanes<R> {
            type Output = usize;
            #[inline(always)]
            fn run<S: Simd>(self, _: S) -> usize {
                R::Vector::<S>::LEN
            }
        }
        self.run(Lanes::<R>(PhantomData))
    }

    fn widest() -> Self {
        let portable = InstructionSet::Portable(arch::Portable);
        Self::available().next().unwrap_or(portable)
    }
}

/// Runs `kernel` with [`InstructionSet::best`].
#[inline]
pub fn dispatch<K: Kernel>(kernel: K) -> K::Output {
    InstructionSet::best().run(kernel)
}

/// Returns the name of the instruction set that all kernels run with: `"avx512"` (with VNNI), `"avx2"` or
/// `"portable"` (on aarch64 that is NEON).
///
/// The environment variable `OVERDRIVE_SIMD`, read once, selects a narrower one, for comparisons.
pub fn instruction_set() -> &'static str {
    InstructionSet::best().name()
}

/// Defines a function whose body is compiled for each instruction set.
///
/// The first type parameter is the set, the first argument its token; callers pass an [`InstructionSet`] there.
/// Further type parameters with one bound each, or further const parameters, may follow. What the body calls must
/// be `#[inline(always)]` to be compiled along with it. See the example of the [crate](crate#writing-a-kernel).
#[macro_export]
macro_rules! vectorized {
    (
        $(#[$attribute:meta])*
        $vis:vis fn $name:ident<$set:ident: Simd $(, $generic:ident: $bound:path)* $(,)?>(
            $token:ident: $token_type:ident $(, $argument:ident: $type:ty)* $(,)?
        ) $(-> $result:ty)? $body:block
    ) => {
        $(#[$attribute])*
        $vis fn $name<$($generic: $bound),*>(
            set: $crate::InstructionSet $(, $argument: $type)*
        ) $(-> $result)? {
            struct Call<A>(A);
            impl<$($generic: $bound),*> $crate::Kernel for Call<($($type,)*)> {
                type Output = $crate::vectorized!(@result $($result)?);
                #[inline(always)]
                fn run<$set: $crate::Simd>(self, $token: $set) -> Self::Output {
                    // A separate function, because reference arguments are known not to overlap.
                    #[inline(always)]
                    #[allow(clippy::too_many_arguments, reason = "those of the function around it")]
                    fn body<$set: $crate::Simd $(, $generic: $bound)*>(
                        $token: $set $(, $argument: $type)*
                    ) $(-> $result)? $body
                    let ($($argument,)*) = self.0;
                    body($token $(, $argument)*)
                }
            }
            set.run(Call(($($argument,)*)))
        }
    };
    (
        $(#[$attribute:meta])*
        $vis:vis fn $name:ident<$set:ident: Simd $(, const $constant:ident: $kind:ty)+ $(,)?>(
            $token:ident: $token_type:ident $(, $argument:ident: $type:ty)* $(,)?
        ) $(-> $result:ty)? $body:block
    ) => {
        $(#[$attribute])*
        $vis fn $name<$(const $constant: $kind),*>(
            set: $crate::InstructionSet $(, $argument: $type)*
        ) $(-> $result)? {
            struct Call<A, $(const $constant: $kind),*>(A);
            impl<$(const $constant: $kind),*> $crate::Kernel for Call<($($type,)*), $($constant),*> {
                type Output = $crate::vectorized!(@result $($result)?);
                #[inline(always)]
                fn run<$set: $crate::Simd>(self, $token: $set) -> Self::Output {
                    #[inline(always)]
                    #[allow(clippy::too_many_arguments, reason = "those of the function around it")]
                    fn body<$set: $crate::Simd $(, const $constant: $kind)*>(
                        $token: $set $(, $argument: $type)*
                    ) $(-> $result)? $body
                    let ($($argument,)*) = self.0;
                    body::<$set $(, $constant)*>($token $(, $argument)*)
                }
            }
            set.run(Call::<_, $($constant),*>(($($argument,)*)))
        }
    };
    (@result) => { () };
    (@result $result:ty) => { $result };
}

#[cfg(test)]
mod tests {
    use super::*;
    use overdrive_sys::denormals::flushes_denormals;

    #[test]
    fn every_set_of_the_machine_is_found_by_its_name() {
        let sets: Vec<_> = InstructionSet::available().collect();
        assert_eq!(sets.last().unwrap().name(), "portable");
        for set in sets {
            assert_eq!(InstructionSet::from_name(set.name()).unwrap(), set);
        }
    }

    #[test]
    fn an_unknown_name_is_refused_with_the_names_that_there_are() {
        let message = InstructionSet::from_name("avx9000")
            .unwrap_err()
            .to_string();
        assert!(
            message.starts_with(
                "`OVERDRIVE_SIMD` is avx9000; it must be an instruction set of this machine: "
            ),
            "{message}"
        );
        assert!(message.ends_with("portable"), "{message}");
    }

    vectorized! {
        fn scaled<S: Simd, const BY: u32>(s: S, x: &mut [f32]) -> usize {
            let _ = s;
            for x in x.iter_mut() {
                *x *= BY as f32;
            }
            x.len()
        }
    }

    vectorized! {
        fn products<S: Simd>(_s: S, x: &[f32], y: &mut [f32]) {
            for (x, y) in x.iter().zip(y) {
                *y *= x;
            }
        }
    }

    #[test]
    fn subnormal_numbers_are_zero_in_a_kernel_on_every_set() {
        for set in InstructionSet::available() {
            // A subnormal operand, a subnormal result, and neither.
            let mut y = [1e-40, 1e-30, 1e-30];
            products(set, &[1e10, 1e-10, 1e10], &mut y);
            let expected = match flushing_denormals(flushes_denormals) {
                true => [0.0, 0.0, 1e-20],
                false => [1e-30, 1e-40, 1e-20],
            };
            for (y, expected) in y.iter().zip(expected) {
                let off = (y - expected).abs();
                assert!(off <= 1e-4 * expected.abs(), "{set:?}: {y:e} {expected:e}");
            }
            assert!(!flushes_denormals());
        }
    }

    vectorized! {
        fn first<S: Simd>(_s: S, x: &[f32]) -> f32 {
            x[0]
        }
    }

    #[test]
    fn a_kernel_that_panics_leaves_the_mode_of_its_caller() {
        for set in InstructionSet::available() {
            let panicked = std::panic::catch_unwind(|| first(set, &[]));
            assert!(panicked.is_err() && !flushes_denormals());
        }
    }

    #[test]
    fn a_vectorized_function_may_have_constants() {
        for set in InstructionSet::available() {
            let mut x = [1.0, 2.0];
            assert_eq!(scaled::<3>(set, &mut x), 2);
            assert_eq!(x, [3.0, 6.0]);
        }
    }
}
