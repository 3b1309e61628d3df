//! Update loops over slices, on all of libtorch's threads, compiled for each instruction set.
//! The only unsafe code of the crate beside two mapped files.
#![allow(
    unsafe_code,
    reason = "the elements of tensors, which nobody else may touch during a step"
)]

mod adafactor;
mod adam;
mod adam8;
mod elements;
mod lion;

pub(crate) use adafactor::{FactoredUpdate, adafactor_step};
pub(crate) use adam::AdamNumbers;
pub(crate) use adam8::{Quantized, adam8};
pub(crate) use lion::{LionNumbers, lion};
