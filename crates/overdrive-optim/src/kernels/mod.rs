//! Update loops over slices, on all of libtorch's threads, compiled for the vector unit that the
//! machine turns out to have. The only unsafe code of the crate beside two mapped files.
#![allow(unsafe_code)]

mod adafactor;
mod adam;
mod adam8;
mod lion;
mod shared;

pub(crate) use adafactor::{FactoredUpdate, adafactor_step};
pub(crate) use adam::AdamNumbers;
pub(crate) use adam8::{Quantized, adam8};
pub(crate) use lion::{LionNumbers, lion};
pub(crate) use shared::{bump_version, with_elements};

/// Whether the machine has the vector unit that the fast versions are compiled for.
#[cfg(target_arch = "x86_64")]
fn has_avx2() -> bool {
    is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma")
}

/// Calls `$portable` or its copy compiled for AVX2 and FMA.
macro_rules! dispatch {
    ($body:ident $(::<$type:ty>)?, $avx2:ident, ($($argument:expr),* $(,)?)) => {{
        #[cfg(target_arch = "x86_64")]
        if crate::kernels::has_avx2() {
            // SAFETY: the machine has what the function is compiled for.
            unsafe { $avx2($($argument),*) }
        } else {
            $body::<$($type,)? false>($($argument),*)
        }
        #[cfg(not(target_arch = "x86_64"))]
        $body::<$($type,)? { cfg!(target_arch = "aarch64") }>($($argument),*)
    }};
}
use dispatch;

/// `a * b + c`, in one rounding where the vector unit has it; elsewhere that would be a call.
#[inline(always)]
fn multiply_add<const FUSED: bool>(a: f32, b: f32, c: f32) -> f32 {
    if FUSED { a.mul_add(b, c) } else { a * b + c }
}
