//! The element types of tensors, and the types that they are computed in.

use half::{bf16, f16};
use overdrive_sys::raw;

use crate::{InstructionSet, LANES, Real, Simd, vectorized};

/// A floating-point type in memory: f32, f64, bf16 or f16.
pub trait Accumulate: raw::Element {
    /// The type that it is computed in: f64 for f64, else f32.
    type Acc: Real + raw::Element;

    /// Returns the same slice if no conversion is needed.
    fn as_acc(elements: &[Self]) -> Option<&[Self::Acc]> {
        let _ = elements;
        None
    }
    /// Returns the same slice, mutable, if no conversion is needed.
    fn as_acc_mut(elements: &mut [Self]) -> Option<&mut [Self::Acc]> {
        let _ = elements;
        None
    }
    /// Converts each element of `from` exactly; the slices have the same length.
    fn widen(set: InstructionSet, from: &[Self], to: &mut [Self::Acc]);
    /// Rounds each element of `from` to nearest, ties to even; the slices have the same length.
    fn narrow(set: InstructionSet, from: &[Self::Acc], to: &mut [Self]);
    /// Rounds to the nearest element.
    fn from_acc(value: Self::Acc) -> Self;
    /// Converts exactly.
    fn to_acc(self) -> Self::Acc;
}

/// A floating-point type in memory that kernels compute in f32: f32, bf16 or f16.
pub trait Element: Accumulate<Acc = f32> {
    /// 0.
    const ZERO: Self;
    /// Reads a vector.
    fn load<S: Simd>(simd: S, from: &[Self; LANES]) -> S::F;
    /// Writes a vector, rounded to nearest, ties to even.
    fn store<S: Simd>(simd: S, x: S::F, to: &mut [Self; LANES]);

    /// Rounds to nearest, ties to even.
    #[inline(always)]
    fn from_f32(x: f32) -> Self {
        Self::from_acc(x)
    }
    /// Converts exactly.
    #[inline(always)]
    fn to_f32(self) -> f32 {
        self.to_acc()
    }
}

macro_rules! same {
    ($type:ty) => {
        impl Accumulate for $type {
            type Acc = $type;

            fn as_acc(elements: &[$type]) -> Option<&[$type]> {
                Some(elements)
            }
            fn as_acc_mut(elements: &mut [$type]) -> Option<&mut [$type]> {
                Some(elements)
            }
            #[inline(always)]
            fn widen(_: InstructionSet, from: &[$type], to: &mut [$type]) {
                to.copy_from_slice(from);
            }
            #[inline(always)]
            fn narrow(_: InstructionSet, from: &[$type], to: &mut [$type]) {
                to.copy_from_slice(from);
            }
            #[inline(always)]
            fn from_acc(value: $type) -> $type {
                value
            }
            #[inline(always)]
            fn to_acc(self) -> $type {
                self
            }
        }
    };
}
same!(f32);
same!(f64);

macro_rules! half {
    ($type:ty, $to_f32:expr) => {
        impl Accumulate for $type {
            type Acc = f32;

            fn widen(set: InstructionSet, from: &[$type], to: &mut [f32]) {
                convert_slice(set, from, to);
            }
            fn narrow(set: InstructionSet, from: &[f32], to: &mut [$type]) {
                convert_slice(set, from, to);
            }
            #[inline(always)]
            fn from_acc(value: f32) -> $type {
                <$type>::from_f32(value)
            }
            #[inline(always)]
            fn to_acc(self) -> f32 {
                $to_f32(self)
            }
        }
    };
}
// Without the crate's test for signalling NaN, which prevents vectorization.
half!(bf16, |x: bf16| f32::from_bits(u32::from(x.to_bits()) << 16));
half!(f16, f16::to_f32);

macro_rules! element {
    ($type:ty, $zero:expr, $load:ident, $store:ident) => {
        impl Element for $type {
            const ZERO: Self = $zero;

            #[inline(always)]
            fn load<S: Simd>(simd: S, from: &[Self; LANES]) -> S::F {
                simd.$load(from)
            }
            #[inline(always)]
            fn store<S: Simd>(simd: S, x: S::F, to: &mut [Self; LANES]) {
                simd.$store(x, to);
            }
        }
    };
}
element!(f32, 0.0, load_f32, store_f32);
element!(bf16, bf16::ZERO, load_bf16, store_bf16);
element!(f16, f16::ZERO, load_f16, store_f16);

vectorized! {
    fn convert_slice<S: Simd, A: Element, B: Element>(s: S, from: &[A], to: &mut [B]) {
        convert(s, from, to);
    }
}

/// Converts each element of `from`, with f32 in between: [`Accumulate::widen`] and [`Accumulate::narrow`] inside a
/// kernel.
///
/// # Panics
/// If the slices have different lengths.
#[inline(always)]
pub fn convert<S: Simd, A: Element, B: Element>(s: S, from: &[A], to: &mut [B]) {
    assert_eq!(from.len(), to.len(), "slices of the same length");
    // Chunks instead of spans: a bounds check for each vector takes a tenth of the time of dequantizing to bf16.
    let (from, from_rest) = from.as_chunks::<LANES>();
    let (to, to_rest) = to.as_chunks_mut::<LANES>();
    for (from, to) in from.iter().zip(to) {
        B::store(s, A::load(s, from), to);
    }
    each_vector(
        from_rest.len(),
        #[inline(always)]
        |span| store(s, load(s, from_rest, span), to_rest, span),
    );
}

/// The elements `at .. at + count` of a row: a whole vector, or the rest at its end.
#[derive(Debug, Clone, Copy)]
pub struct Span {
    at: usize,
    count: usize,
}

/// Calls `body` for each vector of a row of `len`, including a shorter one at the end.
#[inline(always)]
pub fn each_vector(len: usize, mut body: impl FnMut(Span)) {
    let whole = len - len % LANES;
    let mut at = 0;
    while at < whole {
        body(Span { at, count: LANES });
        at += LANES;
    }
    if whole < len {
        body(Span {
            at: whole,
            count: len - whole,
        });
    }
}

/// Reads the elements of `row` in `span`; lanes beyond its end are zero.
///
/// # Panics
/// If `row` is shorter than the row that `span` is of.
#[inline(always)]
pub fn load<S: Simd, T: Element>(simd: S, row: &[T], span: Span) -> S::F {
    let part = &row[span.at..span.at + span.count];
    match part.first_chunk::<LANES>() {
        Some(whole) => T::load(simd, whole),
        None => {
            // Only AVX-512 has masked 16-bit loads; the tail is copied once for each row.
            let mut padded = [T::ZERO; LANES];
            padded[..part.len()].copy_from_slice(part);
            T::load(simd, &padded)
        }
    }
}

/// Writes the lanes of `x` that `span` has.
///
/// # Panics
/// If `row` is shorter than the row that `span` is of.
#[inline(always)]
pub fn store<S: Simd, T: Element>(simd: S, x: S::F, row: &mut [T], span: Span) {
    let part = &mut row[span.at..span.at + span.count];
    match part.first_chunk_mut::<LANES>() {
        Some(whole) => T::store(simd, x, whole),
        None => {
            let mut padded = [T::ZERO; LANES];
            T::store(simd, x, &mut padded);
            let count = part.len();
            part.copy_from_slice(&padded[..count]);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_f16_and_bf16_is_widened_exactly_by_every_set() {
        let bits: Vec<u16> = (0..=u16::MAX).collect();
        for set in InstructionSet::available() {
            let mut floats = vec![0.0; bits.len()];
            let halves: Vec<f16> = bits.iter().copied().map(f16::from_bits).collect();
            f16::widen(set, &halves, &mut floats);
            for (half, float) in halves.iter().zip(&floats) {
                let exact = half.to_f32().to_bits() == float.to_bits();
                assert!(exact || half.is_nan() && float.is_nan(), "{set:?}: {half}");
            }
            let halves: Vec<bf16> = bits.iter().copied().map(bf16::from_bits).collect();
            bf16::widen(set, &halves, &mut floats);
            for (half, float) in halves.iter().zip(&floats) {
                let exact = half.to_f32().to_bits() == float.to_bits();
                assert!(exact || half.is_nan() && float.is_nan(), "{set:?}: {half}");
            }
        }
    }

    #[test]
    fn every_set_rounds_as_the_half_crate_does() {
        let floats: Vec<f32> = (0..=u32::MAX).step_by(65_521).map(f32::from_bits).collect();
        for set in InstructionSet::available() {
            let mut to = vec![bf16::ZERO; floats.len()];
            bf16::narrow(set, &floats, &mut to);
            for (x, y) in floats.iter().zip(&to) {
                let same = bf16::from_f32(*x).to_bits() == y.to_bits();
                assert!(same || x.is_nan() && y.is_nan(), "{set:?}: {x:e}");
            }
            let mut to = vec![f16::ZERO; floats.len()];
            f16::narrow(set, &floats, &mut to);
            for (x, y) in floats.iter().zip(&to) {
                let same = f16::from_f32(*x).to_bits() == y.to_bits();
                assert!(same || x.is_nan() && y.is_nan(), "{set:?}: {x:e}");
            }
        }
    }
}
