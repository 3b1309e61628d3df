//! Updates of many parameters with the same few operators.

use std::ops::Range;

use tch::{Device, Kind, Tensor};

use crate::Result;
use crate::adamw8bit::AdamState;
use crate::code_book::BLOCK;
use crate::kernels::AdamNumbers;
use crate::operators::{self, Piece};

/// The number of elements that are updated with temporaries at once. These take up to 26 bytes per element: 208 MiB.
pub(crate) const WINDOW: usize = 1 << 23;

/// The updates of a step that libtorch's operators compute.
#[derive(Debug, Default)]
pub(crate) struct JointUpdate {
    batches: Vec<Batch>,
    /// Parameters with gaps between their elements, and the dense copies that are updated.
    dense: Vec<(Tensor, Tensor)>,
}

/// Pieces that the same operators update.
#[derive(Debug)]
struct Batch {
    numbers: AdamNumbers,
    key: (Device, Kind, Kind),
    elements: usize,
    pieces: Vec<Piece>,
}

impl JointUpdate {
    /// Adds a parameter whose state is in the memory of its device. Nothing is updated yet.
    pub(crate) fn push(
        &mut self,
        numbers: AdamNumbers,
        parameter: &Tensor,
        gradient: &Tensor,
        state: &AdamState,
    ) -> Result<()> {
        let dense = parameter.f_contiguous()?;
        let gradient = gradient.f_contiguous()?;
        let len = parameter.numel();
        let window = window(&dense, state);
        let mut start = 0;
        while start < len {
            let range = start..start.saturating_add(window).min(len);
            start = range.end;
            let averages = [&state.exp_avg.tensor, &state.exp_avg_sq.tensor];
            let piece = Piece {
                parameter: flat_range(&dense, &range)?,
                gradient: flat_range(&gradient, &range)?,
                averages: [
                    flat_range(averages[0], &range)?,
                    flat_range(averages[1], &range)?,
                ],
                scales: scales_of(state, &range)?,
            };
            self.add(numbers, piece, window);
        }
        if !parameter.is_contiguous() {
            self.dense.push((parameter.shallow_clone(), dense));
        }
        Ok(())
    }

    fn add(&mut self, numbers: AdamNumbers, piece: Piece, window: usize) {
        let (parameter, average) = (&piece.parameter, &piece.averages[0]);
        let key = (parameter.device(), parameter.kind(), average.kind());
        // Filled up to whole blocks.
        let elements = parameter.numel().next_multiple_of(BLOCK);
        let fits = |batch: &&mut Batch| {
            batch.numbers == numbers
                && batch.key == key
                && batch.elements.saturating_add(elements) <= window
        };
        match self.batches.iter_mut().rev().find(fits) {
            Some(batch) => {
                batch.elements += elements;
                batch.pieces.push(piece);
            }
            None => self.batches.push(Batch {
                numbers,
                key,
                elements,
                pieces: vec![piece],
            }),
        }
    }

    /// Updates all parameters.
    pub(crate) fn run(self) -> Result<()> {
        for batch in &self.batches {
            match batch.key.2 {
                Kind::Uint8 => operators::adam8(&batch.numbers, &batch.pieces)?,
                _ => operators::adam32(&batch.numbers, &batch.pieces)?,
            }
        }
        for (parameter, dense) in &self.dense {
            parameter.shallow_clone().f_copy_(dense)?;
        }
        Ok(())
    }
}

/// Returns the number of elements of one update: all where libtorch's fused kernel updates in place.
fn window(parameter: &Tensor, state: &AdamState) -> usize {
    let in_place = state.scales.is_none() && parameter.kind() == state.exp_avg.tensor.kind();
    if in_place { usize::MAX } else { WINDOW }
}

/// Returns the scales of the blocks of elements `range`.
pub(crate) fn scales_of(state: &AdamState, range: &Range<usize>) -> Result<Option<[Tensor; 2]>> {
    let Some((first, second)) = &state.scales else {
        return Ok(None);
    };
    let blocks = range.start / BLOCK..range.end.div_ceil(BLOCK);
    Ok(Some([
        flat_range(first, &blocks)?,
        flat_range(second, &blocks)?,
    ]))
}

/// Returns elements `range` of a dense tensor as a flat view.
pub(crate) fn flat_range(tensor: &Tensor, range: &Range<usize>) -> Result<Tensor> {
    let flat = tensor.f_view(-1i64)?;
    Ok(flat.f_narrow(0, range.start as i64, range.len() as i64)?)
}
