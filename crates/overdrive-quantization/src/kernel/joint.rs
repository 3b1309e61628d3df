//! Products of the same rows with several weights, in one parallel region.

use std::ops::Range;

use super::threads::{CHUNK_BYTES, MIN_PARALLEL_BYTES, Target, chunks};

/// One weight of a product, with the activations it is multiplied with: `y = x · wᵀ · scales + bias`.
pub(crate) trait Part<T>: Sync {
    /// Rows of the weight.
    fn outputs(&self) -> usize;

    /// Bytes of one of them.
    fn row_bytes(&self) -> usize;

    /// Computes these outputs, for all rows of the activations, and writes them to the columns from
    /// `first + outputs.start` on.
    fn run(&self, outputs: Range<usize>, first: usize, y: &Target<'_, T>);
}

/// What threads take at a time: a multiple of so many outputs, the tile of most kernels.
const TILE: usize = 32;

/// Computes the parts, each given with the first of its columns of `y (rows, columns)`.
pub(crate) fn product<T: Copy + Send>(
    parts: &[(usize, &dyn Part<T>)],
    rows: usize,
    columns: usize,
    y: &mut [T],
) {
    if columns == 0 || rows == 0 {
        return;
    }
    assert_eq!(
        y.len(),
        rows * columns,
        "a row of results for each row of activations"
    );
    let y = Target::new(y, columns);
    let bytes = parts
        .iter()
        .map(|(_, part)| part.outputs() * part.row_bytes());
    let bytes: usize = bytes.sum();
    let parallel = bytes.saturating_mul(rows) > MIN_PARALLEL_BYTES;
    // At least a few for each thread, so that one that comes late does not hold up the others.
    // What several rows of activations are multiplied with stays in a second cache meanwhile.
    let most = if rows > 1 {
        2 * CHUNK_BYTES
    } else {
        CHUNK_BYTES
    };
    let chunk_bytes = most.min(bytes / (4 * overdrive_sys::threads::intra_op().max(1)));
    // Each part in chunks of its own, as (part, its first column, outputs).
    let mut work: Vec<(usize, usize, Range<usize>)> = Vec::new();
    for (index, (first, part)) in parts.iter().enumerate() {
        let outputs = part.outputs();
        let chunk = (chunk_bytes / part.row_bytes().max(1)).max(1);
        let chunk = chunk.next_multiple_of(TILE);
        let starts = (0..outputs).step_by(chunk);
        work.extend(starts.map(|start| (index, *first, start..(start + chunk).min(outputs))));
    }
    chunks(work.len(), 1, parallel, |range| {
        for (part, first, outputs) in &work[range] {
            parts[*part].1.run(outputs.clone(), *first, &y);
        }
    });
}
