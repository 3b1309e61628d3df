//! The instruction sets, one folder each.

mod portable;
#[cfg(target_arch = "x86_64")]
mod x86_64;

pub use portable::Portable;
#[cfg(target_arch = "x86_64")]
pub use x86_64::{Avx2, Avx512};
