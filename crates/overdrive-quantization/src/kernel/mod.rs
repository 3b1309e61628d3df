//! GEMM kernels that read weights packed: plain slices in, plain slices out.
//!
//! | module | content |
//! |---|---|
//! | `joint_gemm` | several weights in one parallel region; each kernel is a `Gemm` |
//! | `int8` | activations and weights in 8 bits |
//! | `four_bit` | weights in groups and blocks of 4 bits, and in groups of 8 bits |
//! | `dequantizing_gemm` | a few rows in f32 with a weight of 8 bits |
//! | `input_rows` | the activations of a GEMM, in each form that a kernel takes |
//! | `int8_rows` | rows of activations in 8 bits |

pub(crate) mod dequantizing_gemm;
pub(crate) mod four_bit;
pub(crate) mod input_rows;
pub(crate) mod int8;
pub(crate) mod int8_rows;
pub(crate) mod joint_gemm;

/// Returns `N` elements from `first` on.
///
/// # Safety
/// `first + N <= all.len()`.
#[inline(always)]
#[allow(unsafe_code, reason = "a read without a bounds check, for inner loops")]
unsafe fn at<E, const N: usize>(all: &[E], first: usize) -> &[E; N] {
    debug_assert!(first + N <= all.len(), "in the bounds of the slice");
    // SAFETY: the caller ensures the bounds; an array has the alignment of its elements.
    unsafe { &*all.as_ptr().add(first).cast() }
}

#[cfg(test)]
mod tests;
