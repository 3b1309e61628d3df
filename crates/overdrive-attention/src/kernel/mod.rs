//! The blockwise kernel on plain slices: online softmax forward, recomputing backward, O(T) memory.
//!
//! A block of up to 64 queries is laid out across vector lanes, one query in each lane. So the softmax over
//! keys consists of plain vector operations without a reduction across lanes, and keys and values are read
//! in place, broadcast one element at a time: only the queries are repacked.
//! All five matmuls of forward and backward use one micro-kernel ([`matmul`](matmul::matmul)).
//!
//! The order of additions depends only on the inputs and the number of threads, so results are reproducible
//! bit for bit.
//!
//! Method: Dao 2023, FlashAttention-2, <https://arxiv.org/abs/2307.08691>.
#![allow(
    unsafe_code,
    reason = "vector intrinsics, and threads that write disjoint rows of one output"
)]

mod backward;
mod bias_gradient;
mod block;
mod dropout;
mod eight_bit;
mod forward;
mod inputs;
mod matmul;
mod pool_rows;
mod scores;

pub(crate) use backward::{BackwardInputs, BackwardOutputs, backward, backward_workspace};
pub(crate) use bias_gradient::{bias_gradient, bias_gradient_workspace};
pub(crate) use dropout::Dropout;
pub(crate) use eight_bit::{Codes, Stored};
pub(crate) use forward::{ForwardOutputs, forward, forward_workspace};
pub(crate) use inputs::{
    AttentionInputs, Bias, BiasValues, Limits, Pages, Rules, Sequence, Slopes, View, ViewMut,
    as_limit, usize_of,
};
pub(crate) use pool_rows::{write_quantized_rows, write_rows};

#[cfg(test)]
mod tests;
