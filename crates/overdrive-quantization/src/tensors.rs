//! Bytes of tensors, for the codecs and kernels.
#![allow(unsafe_code)]

use overdrive_kernels::tensors::{Source, elements};
use tch::Kind;

use crate::Result;

/// Borrows the elements of a contiguous tensor of signed or unsigned bytes on the CPU as unsigned ones.
pub(crate) fn bytes(tensor: &impl Source) -> Result<&[u8]> {
    if tensor.dtype() != Kind::Int8 {
        return Ok(elements::<u8>(tensor)?);
    }
    let codes = elements::<i8>(tensor)?;
    // SAFETY: the slice is the same memory; both types have one byte, of which every value is valid.
    Ok(unsafe { std::slice::from_raw_parts(codes.as_ptr().cast(), codes.len()) })
}
