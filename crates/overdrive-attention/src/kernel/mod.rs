//! The blockwise kernel on plain slices: online softmax forward, recomputing backward, O(T) memory.
//!
//! A block of up to 64 queries lies across vector lanes, one query a lane, so that the softmax over
//! keys is a column of plain vector operations without a reduction across lanes, and keys and values
//! are read where they are, broadcast one number at a time: nothing but the queries is repacked.
//! All five products of forward and backward are one micro-kernel ([`product`]).
//!
//! The order of additions depends only on the problem and the number of threads: results repeat
//! bit for bit.
//!
//! Method: Dao 2023, FlashAttention-2, <https://arxiv.org/abs/2307.08691>.
#![allow(
    unsafe_code,
    reason = "vector intrinsics, and threads that write disjoint rows of one output"
)]

mod backward;
mod bias_gradient;
mod block;
mod dropout;
mod element;
mod forward;
mod lanes;
mod pages;
mod portable;
mod problem;
mod product;
mod schedule;
mod scores;
mod tensors;
#[cfg(target_arch = "x86_64")]
mod x86;

pub(crate) use backward::{BackwardInputs, BackwardOutputs, backward, backward_workspace};
pub(crate) use bias_gradient::{bias_gradient, bias_gradient_workspace};
pub(crate) use dropout::Dropout;
pub(crate) use element::Element;
pub(crate) use forward::{ForwardOutputs, forward, forward_workspace};
pub(crate) use lanes::InstructionSet;
pub(crate) use pages::write_rows;
pub(crate) use problem::{Bias, BiasValues, Pages, Problem, Rules, Sequence, Slopes};
pub(crate) use tensors::{Fresh, Strided};

/// Defines a function that runs `body::<V>` with the vectors of an instruction set, compiled for it.
///
/// `body` is an `unsafe fn` whose contract is that the CPU has the instruction set of `V`.
macro_rules! multiversioned {
    ($(#[$doc:meta])* fn $name:ident<$real:ident>($($arg:ident: $type:ty),* $(,)?) = $body:ident) => {
        $(#[$doc])*
        #[allow(clippy::too_many_arguments, reason = "a kernel, called from one or two places")]
        pub(super) fn $name<$real: super::lanes::Real>(
            set: super::lanes::InstructionSet,
            $($arg: $type),*
        ) {
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
            #[allow(clippy::too_many_arguments, reason = "as above")]
            fn avx512<$real: super::lanes::Real>($($arg: $type),*) {
                // SAFETY: this function is compiled for, and called only with, AVX-512.
                unsafe { $body::<$real::Avx512>($($arg),*) }
            }
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,fma")]
            #[allow(clippy::too_many_arguments, reason = "as above")]
            fn avx2<$real: super::lanes::Real>($($arg: $type),*) {
                // SAFETY: this function is compiled for, and called only with, AVX2 and FMA.
                unsafe { $body::<$real::Avx2>($($arg),*) }
            }
            match set {
                // SAFETY: `InstructionSet::detect` found the instructions.
                #[cfg(target_arch = "x86_64")]
                super::lanes::InstructionSet::Avx512 => unsafe { avx512::<$real>($($arg),*) },
                // SAFETY: as above.
                #[cfg(target_arch = "x86_64")]
                super::lanes::InstructionSet::Avx2 => unsafe { avx2::<$real>($($arg),*) },
                // SAFETY: plain arrays need no instruction set.
                super::lanes::InstructionSet::Portable => unsafe {
                    $body::<$real::Portable>($($arg),*)
                },
            }
        }
    };
}
use multiversioned;

#[cfg(test)]
mod tests;
