//! The kernels for CPUs.
//!
//! The gated delta rule runs in its recurrent form. The columns of a state (D_k, D_v) do not depend on each other, so a
//! *slab* of a few columns is advanced through all tokens on its own, and stays in the L1 cache: 128 rows of 16 columns
//! take 8 KB. The update of a slab by a token and its reading by the next one are one pass, so each element is loaded and
//! stored once for each token, and takes four multiplications or multiply-adds. The chunked form, which suits a GPU's
//! matrix units, takes 1.4 times as many (for chunks of 64 and heads of 128).
//!
//! Each element is computed by the same operations in the same order however the tokens are divided among calls or chunks,
//! and whatever else is computed beside it: the results of a sequence depend on nothing but the sequence.

mod conv;
mod delta_backward;
mod delta_forward;
mod one_token;
mod problem;
mod slab;
#[cfg(test)]
mod tests;

pub(crate) use conv::{Conv, ConvGradients, backward as conv_backward, forward as conv_forward};
pub(crate) use delta_backward::{InputGradients, ResultGradients, backward};
pub(crate) use delta_forward::forward;
pub(crate) use problem::{Problem, Rows, Sequence, block_columns, chunks_of};
