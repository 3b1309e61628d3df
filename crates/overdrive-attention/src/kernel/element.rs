//! The element types of tensors, and the type their arithmetic is done in.

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

use super::lanes::{InstructionSet, Lanes, Real};
use super::multiversioned;

/// An element of queries, keys and values.
pub(crate) trait Element: overdrive_sys::raw::Element {
    /// What sums are kept in: f32, or f64 for f64.
    type Acc: Real + overdrive_sys::raw::Element;

    /// The same slice where no conversion is needed.
    fn as_acc(elements: &[Self]) -> Option<&[Self::Acc]>;
    /// Converts a slice of the same length.
    fn widen(set: InstructionSet, from: &[Self], to: &mut [Self::Acc]);
    /// Rounds to the nearest element.
    fn narrow(value: Self::Acc) -> Self;
    /// Converts exactly.
    fn wide(self) -> Self::Acc;
}

macro_rules! same {
    ($type:ty) => {
        impl Element for $type {
            type Acc = $type;

            fn as_acc(elements: &[$type]) -> Option<&[$type]> {
                Some(elements)
            }
            fn widen(_: InstructionSet, from: &[$type], to: &mut [$type]) {
                to.copy_from_slice(from);
            }
            #[inline(always)]
            fn narrow(value: $type) -> $type {
                value
            }
            #[inline(always)]
            fn wide(self) -> $type {
                self
            }
        }
    };
}
same!(f32);
same!(f64);

macro_rules! half {
    ($type:ty, $widen:expr) => {
        impl Element for $type {
            type Acc = f32;

            fn as_acc(_: &[$type]) -> Option<&[f32]> {
                None
            }
            fn widen(set: InstructionSet, from: &[$type], to: &mut [f32]) {
                $widen(set, from, to);
            }
            #[inline(always)]
            fn narrow(value: f32) -> $type {
                <$type>::from_f32(value)
            }
            #[inline(always)]
            fn wide(self) -> f32 {
                self.to_f32()
            }
        }
    };
}
// `half` converts f16 with the CPU's instructions where it has them.
half!(f16, |_, from: &[f16], to: &mut [f32]| from
    .convert_to_f32_slice(to));
half!(bf16, widen_bf16::<f32>);

multiversioned! {
    /// The bits of a bf16 are the upper half of those of the f32; the compiler makes the vectors.
    fn widen_bf16<R>(from: &[bf16], to: &mut [f32]) = widen_bf16_body
}

/// # Safety
/// The CPU has the instruction set of `V`.
#[inline(always)]
unsafe fn widen_bf16_body<V: Lanes>(from: &[bf16], to: &mut [f32]) {
    for (to, from) in to.iter_mut().zip(from) {
        *to = f32::from_bits(u32::from(from.to_bits()) << 16);
    }
}
