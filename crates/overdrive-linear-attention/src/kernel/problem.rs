//! The inputs of the kernels of the delta rule.

use overdrive_kernels::tensors::Strided;
use overdrive_kernels::{Element, InstructionSet, Kernel, LANES, Simd};
use overdrive_sys::raw;

use crate::Result;

/// The number of tokens that a slab is advanced by before the next slab; backward starts from the states at these
/// distances.
// The queries and keys of a chunk (64 KB with heads of 128) are in the L2 cache, beside the slabs of a few heads.
pub(crate) const CHUNK: usize = 64;

/// Returns the number of chunks of a sequence.
pub(crate) fn chunks_of(tokens: usize) -> usize {
    tokens.div_ceil(CHUNK)
}

/// The number of vectors in a row of a slab, 1 with AVX2 (16 registers of 8 floats) and 2 with AVX-512 (32 of 16).
pub(super) const fn vectors<S: Simd>() -> usize {
    // The sums of two products are four chains of multiply-adds then, which hide their latency. With twice as many, AVX2's
    // registers hold no further operand: the compiler keeps a sum in memory, and the loop takes twice as long.
    S::TILE / 2
}

/// Returns the number of columns of a slab.
pub(crate) fn block_columns(set: InstructionSet) -> usize {
    struct Columns;
    impl Kernel for Columns {
        type Output = usize;
        #[inline(always)]
        fn run<S: Simd>(self, _: S) -> usize {
            vectors::<S>() * LANES
        }
    }
    set.run(Columns)
}

/// A sequence of a call.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Sequence {
    /// The index in the first dimension of the inputs, if they have four.
    pub(crate) batch: usize,
    /// The first row in the dimension of tokens.
    pub(crate) start: usize,
    /// The first row of contiguous outputs.
    pub(crate) output: usize,
    pub(crate) tokens: usize,
    /// The row of the pool that has its first state; a sequence without one starts from zeros.
    pub(crate) from: Option<usize>,
    /// The row of the pool that gets its last state; that of a sequence without one is not stored.
    pub(crate) slot: Option<usize>,
    /// The number of chunks of the sequences before it.
    pub(crate) first_chunk: usize,
}

/// Rows of a tensor (batch, token, head, element) whose elements are contiguous.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Rows<'a, T> {
    pub(crate) data: &'a [T],
    /// The distances in the dimensions of batch, tokens and heads.
    pub(crate) strides: [usize; 3],
    pub(crate) width: usize,
}

impl<'a, T: raw::Element> Rows<'a, T> {
    pub(crate) fn of(tensor: &'a Strided) -> Result<Rows<'a, T>> {
        let [batch, token, head, _] = tensor.strides;
        Ok(Rows {
            data: tensor.elements()?,
            strides: [batch, token, head],
            width: tensor.width,
        })
    }
}

impl<'a, T: Copy> Rows<'a, T> {
    #[inline(always)]
    pub(crate) fn row(&self, sequence: &Sequence, token: usize, head: usize) -> &'a [T] {
        let [batch, distance, of_head] = self.strides;
        let at = sequence.batch * batch + (sequence.start + token) * distance + head * of_head;
        &self.data[at..at + self.width]
    }

    /// Returns the only element of a row.
    #[inline(always)]
    pub(crate) fn number(&self, sequence: &Sequence, token: usize, head: usize) -> T {
        self.row(sequence, token, head)[0]
    }
}

/// The inputs, options and sizes of a call.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Problem<'a, T> {
    pub(crate) query: Rows<'a, T>,
    pub(crate) key: Rows<'a, T>,
    pub(crate) value: Rows<'a, T>,
    pub(crate) decay: Rows<'a, f32>,
    pub(crate) beta: Rows<'a, f32>,
    pub(crate) sequences: &'a [Sequence],
    pub(crate) key_heads: usize,
    pub(crate) heads: usize,
    pub(crate) key_dim: usize,
    pub(crate) value_dim: usize,
    pub(crate) scale: f32,
    pub(crate) qk_l2norm: bool,
    pub(crate) set: InstructionSet,
}

/// The columns of a slab.
#[derive(Debug, Clone, Copy)]
pub(super) struct Unit {
    /// The value head.
    pub(super) head: usize,
    /// The index of the block of columns.
    pub(super) block: usize,
    /// The first column.
    pub(super) column: usize,
    /// The number of columns; fewer than a slab has in the last block of some heads.
    pub(super) count: usize,
}

impl<T: Element> Problem<'_, T> {
    /// Returns the number of value heads that a key head serves.
    pub(super) fn group(&self) -> usize {
        self.heads / self.key_heads
    }

    /// Returns the number of blocks of columns.
    pub(crate) fn blocks(&self, columns: usize) -> usize {
        self.value_dim.div_ceil(columns)
    }

    /// Returns unit `index` of the slabs of a key head.
    pub(super) fn unit(&self, key_head: usize, index: usize, columns: usize) -> Unit {
        let blocks = self.blocks(columns);
        let block = index % blocks;
        Unit {
            head: key_head * self.group() + index / blocks,
            block,
            column: block * columns,
            count: columns.min(self.value_dim - block * columns),
        }
    }

    /// Returns the number of elements of states that are advanced, over all tokens.
    pub(super) fn work(&self) -> usize {
        let tokens: usize = self.sequences.iter().map(|s| s.tokens).sum();
        tokens * self.heads * self.key_dim * self.value_dim
    }
}
