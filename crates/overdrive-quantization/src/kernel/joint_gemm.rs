//! One GEMM of the same activations with several weights, in one parallel region.

use std::ops::Range;

use overdrive_kernels::threads::parallel_column_blocks;
use overdrive_kernels::{
    ColumnsMut, Element, InstructionSet, each_vector, load, store, vectorized,
};

/// The number of bytes of weight that a thread takes at a time: enough to be read as a stream, and few enough
/// that a delayed thread does not delay the others.
const CHUNK_BYTES: usize = 128 << 10;

/// The work (bytes of weight, for each row of activations) below which waking another thread costs more than
/// it saves.
const MIN_PARALLEL_BYTES: usize = 64 << 10;

/// Chunks have a multiple of this number of outputs, the tile of most kernels.
// A chunk that ends inside a tile would compute the rest with a slower one.
const TILE: usize = 32;

/// The GEMM of one weight with the activations: `y = x · wᵀ`.
pub(crate) trait Gemm: Sync {
    /// Returns the number of rows of the weight.
    fn outputs(&self) -> usize;

    /// Returns the number of bytes of a row of the weight.
    fn row_bytes(&self) -> usize;

    /// Computes these outputs for all rows of the activations.
    fn run(&self, outputs: Range<usize>, results: &mut dyn Results);
}

/// The destination of the results of a [`Gemm`].
///
/// Kernels put rows of f32 there, so that they are compiled once and not for each dtype of the results.
pub(crate) trait Results {
    /// Takes the results of row `row` of the activations for the outputs from `output` on.
    fn put(&mut self, row: usize, output: usize, values: &[f32]);
}

/// A GEMM in a joint one.
pub(crate) struct JointGemm<'a, T> {
    first: usize,
    gemm: Box<dyn Gemm + 'a>,
    bias: Option<&'a [T]>,
}

impl<'a, T> JointGemm<'a, T> {
    /// Returns a GEMM whose first output is column `first` of the results, and the bias of its outputs.
    pub(crate) fn new(first: usize, gemm: Box<dyn Gemm + 'a>, bias: Option<&'a [T]>) -> Self {
        JointGemm { first, gemm, bias }
    }
}

/// Computes `y (rows, columns)`. The GEMMs are in ascending order of their first columns.
pub(crate) fn joint_gemm<T: Element>(
    gemms: &[JointGemm<'_, T>],
    rows: usize,
    columns: usize,
    y: &mut [T],
) {
    if columns == 0 || rows == 0 {
        return;
    }
    // A wrong length is a bug in this crate, which `row_mut` would detect only in the last row.
    assert_eq!(
        y.len(),
        rows * columns,
        "a row of results for each row of activations"
    );
    let bytes = gemms
        .iter()
        .map(|joint| joint.gemm.outputs() * joint.gemm.row_bytes());
    let bytes: usize = bytes.sum();
    let parallel = bytes.saturating_mul(rows) > MIN_PARALLEL_BYTES;
    // A weight that is multiplied with several rows of activations stays in the L2 cache meanwhile.
    let most = if rows > 1 {
        2 * CHUNK_BYTES
    } else {
        CHUNK_BYTES
    };
    // A few chunks for each thread, so that one that starts late does not delay the others. With twice as many, a
    // decoding step of SmolLM2-135M took 2 to 4 % longer.
    let chunk_bytes = most.min(bytes / (4 * overdrive_kernels::threads::workers()));
    // A chunk or two more than that for each weight.
    let mut blocks = Vec::with_capacity(bytes / chunk_bytes.max(1) + 2 * gemms.len());
    for JointGemm { first, gemm, .. } in gemms {
        let outputs = gemm.outputs();
        let chunk = (chunk_bytes / gemm.row_bytes().max(1)).max(1);
        let chunk = chunk.next_multiple_of(TILE);
        let starts = (0..outputs).step_by(chunk);
        blocks.extend(starts.map(|start| first + start..first + (start + chunk).min(outputs)));
    }
    parallel_column_blocks(y, columns, &blocks, parallel, |columns| {
        let range = columns.range();
        let of_range = gemms.iter().rfind(|joint| joint.first <= range.start);
        let Some(JointGemm { first, gemm, bias }) = of_range else {
            unreachable!("each block belongs to a GEMM");
        };
        let outputs = range.start - first..range.end - first;
        let mut block = Block {
            columns,
            first_output: outputs.start,
            bias: *bias,
        };
        gemm.run(outputs, &mut block);
    });
}

/// The columns of some outputs.
struct Block<'a, T> {
    columns: ColumnsMut<'a, T>,
    /// The output of the first column.
    first_output: usize,
    bias: Option<&'a [T]>,
}

impl<T: Element> Results for Block<'_, T> {
    fn put(&mut self, row: usize, output: usize, values: &[f32]) {
        let first = output - self.first_output;
        let to = &mut self.columns.row_mut(row)[first..first + values.len()];
        let bias = self.bias.map(|bias| &bias[output..output + values.len()]);
        match (bias, T::as_acc_mut(to)) {
            // f32 without a bias needs no vectors.
            (None, Some(to)) => to.copy_from_slice(values),
            (bias, _) => finish(InstructionSet::best(), values, bias.unwrap_or_default(), to),
        }
    }
}

vectorized! {
    /// Adds the bias (empty: none) and rounds.
    fn finish<S: Simd, T: Element>(s: S, values: &[f32], bias: &[T], to: &mut [T]) {
        each_vector(
            values.len(),
            #[inline(always)]
            |span| {
                let mut y = load(s, values, span);
                if !bias.is_empty() {
                    y = s.add(y, load(s, bias, span));
                }
                store(s, y, to, span);
            },
        );
    }
}
