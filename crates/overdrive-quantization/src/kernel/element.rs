//! Kinds of activations and results.

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

/// A floating-point type that activations and results may have; kernels compute in f32.
pub(crate) trait Element: overdrive_sys::raw::Element {
    fn from_f32(x: f32) -> Self;
    fn to_f32(self) -> f32;

    /// A row as floats: itself where it is that already, otherwise written to `scratch`.
    fn floats<'a>(row: &'a [Self], scratch: &'a mut Vec<f32>) -> &'a [f32];

    /// The numbers themselves, where they are floats.
    fn as_floats(row: &[Self]) -> Option<&[f32]> {
        let _ = row;
        None
    }

    /// The same, to be written.
    fn as_floats_mut(row: &mut [Self]) -> Option<&mut [f32]> {
        let _ = row;
        None
    }
}

impl Element for f32 {
    #[inline(always)]
    fn from_f32(x: f32) -> Self {
        x
    }

    #[inline(always)]
    fn to_f32(self) -> f32 {
        self
    }

    #[inline(always)]
    fn floats<'a>(row: &'a [Self], _scratch: &'a mut Vec<f32>) -> &'a [f32] {
        row
    }

    fn as_floats(row: &[Self]) -> Option<&[f32]> {
        Some(row)
    }

    fn as_floats_mut(row: &mut [Self]) -> Option<&mut [f32]> {
        Some(row)
    }
}

impl Element for bf16 {
    #[inline(always)]
    fn from_f32(x: f32) -> Self {
        bf16::from_f32(x)
    }

    #[inline(always)]
    fn to_f32(self) -> f32 {
        // Without the test for signalling NaN that the crate has, which keeps loops from becoming vectors.
        f32::from_bits(u32::from(self.to_bits()) << 16)
    }

    #[inline(always)]
    fn floats<'a>(row: &'a [Self], scratch: &'a mut Vec<f32>) -> &'a [f32] {
        scratch.clear();
        scratch.extend(row.iter().map(|x| x.to_f32()));
        scratch
    }
}

impl Element for f16 {
    #[inline(always)]
    fn from_f32(x: f32) -> Self {
        f16::from_f32(x)
    }

    #[inline(always)]
    fn to_f32(self) -> f32 {
        f16::to_f32(self)
    }

    #[inline(always)]
    fn floats<'a>(row: &'a [Self], scratch: &'a mut Vec<f32>) -> &'a [f32] {
        scratch.resize(row.len(), 0.0);
        row.convert_to_f32_slice(scratch);
        scratch
    }
}
