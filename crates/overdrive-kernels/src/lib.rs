//! The foundation of Overdrive's CPU kernels: vectors, run-time dispatch, element types and threads.
//!
//! overdrive-fused, overdrive-attention, overdrive-linear-attention, overdrive-quantization, overdrive-kv-cache and
//! overdrive-optim write their loops once, against the traits of this crate, and run them with the widest instruction set
//! of the machine.
//!
//! | module or item | content |
//! |---|---|
//! | [`Simd`] = [`Floats`] + [`Int8`] + [`FourBit`] | the operations of an instruction set on vectors of 16 floats and 64 bytes |
//! | [`Vector`], [`Real`] | one register of f32 or f64, for kernels that are generic over both |
//! | [`InstructionSet`], [`Kernel`], [`dispatch`], [`vectorized`] | detection, and loops compiled for each set |
//! | [`Element`], [`Accumulate`] | f32, bf16 and f16 (and f64) in memory, and the types they are computed in |
//! | [`set_batch_invariant`] | results of a row that do not depend on the other rows |
//! | [`math`] | exponentials and functions based on them |
//! | [`threads`] | work on libtorch's threads |
//! | [`SharedSlice`], [`ColumnsMut`] | a slice or matrix that several threads write in disjoint parts |
//! | [`tensors`], [`with_element!`] | the memory of tensors as slices, and code for each element type |
//! | [`Kept`] | buffers that a thread reuses from call to call, counted and limited |
//!
//! # Instruction sets
//!
//! `arch/` has one folder for each set. Its zero-sized token ([`Floats`] is implemented on tokens) can only be
//! created by `detect`, so a value proves that the machine has the instructions, and the operations are safe to
//! call. A new set needs one folder and one line in `dispatch.rs`.
//!
//! The environment variable `OVERDRIVE_SIMD` (`avx512`, `avx2` or `portable`), read once, selects a narrower set
//! than the widest for all kernels of all crates, for comparisons or to test on one machine what another one runs.
//!
//! # Subnormal numbers
//!
//! Kernels treat operands and results below 2⁻¹²⁶ (f32 and bf16; 2⁻¹⁰²² in f64) as zero: on Intel processors, an
//! instruction with a subnormal number takes over a hundred cycles. [`InstructionSet::run`] and the loops of
//! [`threads`] set this mode on each thread that computes, and restore it when they end ([`overdrive_sys::denormals`],
//! on x86-64 and aarch64). Conversions from and to f16 keep its subnormal numbers, which are normal in f32. The bf16
//! dot products and AMX tiles that libtorch's libraries use always flush subnormal numbers.
//!
//! # Writing a kernel
//!
//! All functions that a kernel calls, including closures, are `#[inline(always)]`: only code that is inlined into the
//! function that is compiled for the set uses its instructions.
//!
//! ```
//! use overdrive_kernels::{InstructionSet, each_vector, load, vectorized};
//!
//! vectorized! {
//!     /// Returns the sum of squares.
//!     pub fn sum_of_squares<S: Simd>(s: S, x: &[f32]) -> f32 {
//!         let mut sum = s.splat(0.0);
//!         each_vector(
//!             x.len(),
//!             #[inline(always)]
//!             |span| {
//!                 let x = load(s, x, span);
//!                 sum = s.mul_add(x, x, sum);
//!             },
//!         );
//!         s.reduce_add(sum)
//!     }
//! }
//!
//! // With the widest set, and with each set of the machine.
//! assert_eq!(sum_of_squares(InstructionSet::best(), &[2.0; 33]), 132.0);
//! for set in InstructionSet::available() {
//!     assert_eq!(sum_of_squares(set, &[2.0; 33]), 132.0);
//! }
//! ```
//!
//! # Why not pulp
//!
//! [pulp](https://docs.rs/pulp) has the same design (tokens, a `Simd` trait, run-time dispatch), and was evaluated
//! for these kernels. Its AVX-512 token has F, BW, CD, DQ and VL, without VNNI and VBMI; F16C is in no token; and
//! its trait has no operation that changes the width of a lane (bf16, f16, i8 or e4m3 to f32), no look-up of bytes
//! and no dot product of bytes. These are a third of the operations of this crate and give most of its speed, so
//! it would need its own tokens and vectors in addition to pulp's. pulp's vectors also have the length of the
//! machine's registers, while these have 16 floats everywhere, so the order of sums differs less between
//! machines.
#![deny(missing_docs)]

pub mod arch;
mod batch_invariance;
mod dispatch;
pub mod e4m3;
mod element;
mod four_bit;
mod kept;
mod lookup;
pub mod math;
mod shared_slice;
mod simd;
pub mod tensors;
pub mod threads;
mod vector;

pub use batch_invariance::{is_batch_invariant, set_batch_invariant};
pub use dispatch::{InstructionSet, Kernel, dispatch, instruction_set};
pub use element::{Accumulate, Element, Span, convert, each_vector, load, store};
pub use four_bit::{FourBit, WORDS};
pub use kept::{Buffers, Kept, MAX_KEPT_BYTES, capacity_bytes};
pub use lookup::{Nearest256, Table256};
pub use shared_slice::{ColumnsMut, SharedSlice};
pub use simd::{BYTES, Floats, Int8, LANES, Simd};
pub use vector::{Real, Vector};
