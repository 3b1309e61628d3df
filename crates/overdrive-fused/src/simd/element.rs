//! Elements of tensors as vectors of floats.

use half::{bf16, f16};

use super::{LANES, Simd};

/// A floating-point type that kernels read and write; they compute in f32.
pub(crate) trait Element: overdrive_sys::raw::Element {
    const ZERO: Self;
    fn from_f32(x: f32) -> Self;
    fn to_f32(self) -> f32;
    fn load<S: Simd>(simd: S, from: &[Self; LANES]) -> S::F;
    fn store<S: Simd>(simd: S, x: S::F, to: &mut [Self; LANES]);
}

macro_rules! element {
    ($type:ty, $zero:expr, $from:expr, $to:expr, $load:ident, $store:ident) => {
        impl Element for $type {
            const ZERO: Self = $zero;

            #[inline(always)]
            fn from_f32(x: f32) -> Self {
                $from(x)
            }

            #[inline(always)]
            fn to_f32(self) -> f32 {
                $to(self)
            }

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

element!(f32, 0.0, |x| x, |x| x, load_f32, store_f32);
element!(
    bf16,
    bf16::ZERO,
    bf16::from_f32,
    bf16::to_f32,
    load_bf16,
    store_bf16
);
element!(
    f16,
    f16::ZERO,
    f16::from_f32,
    f16::to_f32,
    load_f16,
    store_f16
);

/// The elements `at .. at + count` of a row: a whole vector, or what is left at its end.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Span {
    at: usize,
    count: usize,
}

/// Calls `body` for each vector of a row of `len`, the shorter one at the end last.
#[inline(always)]
pub(crate) fn each_vector(len: usize, mut body: impl FnMut(Span)) {
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

/// The elements of `row` in `span`; lanes beyond its end are zero.
#[inline(always)]
pub(crate) fn load<S: Simd, T: Element>(simd: S, row: &[T], span: Span) -> S::F {
    let part = &row[span.at..span.at + span.count];
    match part.first_chunk::<LANES>() {
        Some(whole) => T::load(simd, whole),
        None => {
            let mut padded = [T::ZERO; LANES];
            padded[..part.len()].copy_from_slice(part);
            T::load(simd, &padded)
        }
    }
}

/// Writes the lanes of `x` that `span` has.
#[inline(always)]
pub(crate) fn store<S: Simd, T: Element>(simd: S, x: S::F, row: &mut [T], span: Span) {
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
