//! Arrays, in loops that the compiler turns into the vectors of its target's baseline: SSE2 on x86-64, NEON on
//! aarch64.

mod floats;
mod four_bit;
mod int8;
mod vector;

use crate::Kernel;
use crate::dispatch::Token;

/// The token of the instruction set that every machine supports.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Portable;

/// If `true`, the target has a fused multiply-add; elsewhere `mul_add` would be a call for each lane.
const FUSED: bool = cfg!(any(target_arch = "aarch64", target_feature = "fma"));

impl Token for Portable {
    fn detect() -> Option<Self> {
        Some(Portable)
    }

    #[inline]
    fn run<K: Kernel>(self, kernel: K) -> K::Output {
        kernel.run(self)
    }
}
