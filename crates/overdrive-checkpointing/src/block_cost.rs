//! Measured costs of blocks: the bytes that they save for backward and the time of their forward.

use std::cell::RefCell;
use std::collections::HashMap;
use std::rc::Rc;
use std::time::{Duration, Instant};

use overdrive_sys::ScalarType;
use overdrive_sys::saved_tensors::{PackedTensor, SavedTensor, push_hooks};
use overdrive_sys::storage::StorageId;
use serde::{Deserialize, Serialize};
use tch::{Cuda, Device, Tensor};

use crate::versioned::Versioned;
use crate::{Error, RegionResult, Result};

/// The measured cost of one block.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct BlockCost {
    /// The bytes that the graph holds for the block between forward and backward, with its input and
    /// without weights. Checkpointing frees them except for the input.
    pub saved_bytes: u64,
    /// The bytes of the input, which a checkpoint keeps.
    pub input_bytes: u64,
    /// The seconds of its forward pass, which are the time of a recomputation.
    pub forward_s: f64,
}

/// Runs the blocks one after another with gradient recording and measures each: the bytes in a first run,
/// the time as the minimum of two more.
///
/// `forward` runs block `index` on a hidden state. The graph is discarded.
///
/// # Errors
/// [`Error::Closure`] with the error of `forward`.
pub fn measure_blocks<F>(blocks: usize, input: &Tensor, forward: F) -> Result<Vec<BlockCost>>
where
    F: Fn(usize, &Tensor) -> RegionResult<Tensor>,
{
    let mut hidden = input.shallow_clone();
    let mut costs = Vec::with_capacity(blocks);
    for index in 0..blocks {
        // Detached, so that the next block does not keep the graph of this one alive.
        let input = hidden.f_detach()?.f_set_requires_grad(true)?;
        let (output, saved_bytes) = saved_by(&input, |x| forward(index, x))?;
        let mut forward_s = f64::INFINITY;
        for _ in 0..2 {
            let took = timed(input.device(), || forward(index, &input))?;
            forward_s = forward_s.min(took.as_secs_f64());
        }
        costs.push(BlockCost {
            saved_bytes,
            input_bytes: bytes_of(&input),
            forward_s,
        });
        hidden = output;
    }
    Ok(costs)
}

fn timed(device: Device, run: impl FnOnce() -> RegionResult<Tensor>) -> Result<Duration> {
    // Kernels of a GPU run asynchronously: without this the clock would measure their launch.
    synchronize(device);
    let start = Instant::now();
    let output = run().map_err(Error::Closure)?;
    synchronize(device);
    let took = start.elapsed();
    // Freeing the graph is not part of the forward pass.
    drop(output);
    Ok(took)
}

fn synchronize(device: Device) {
    if let Device::Cuda(index) = device
        && let Ok(index) = i64::try_from(index)
    {
        Cuda::synchronize(index);
    }
}

/// Returns the output, and the bytes of all memory that the graph holds for it. Memory that several
/// tensors share counts once.
fn saved_by(
    input: &Tensor,
    run: impl FnOnce(&Tensor) -> RegionResult<Tensor>,
) -> Result<(Tensor, u64)> {
    // By address ranges, so that views of one memory count once.
    let found: Rc<RefCell<HashMap<usize, u64>>> = Rc::default();
    // The input is a leaf here, as a weight is, but an activation in the chain.
    let input_storage = StorageId::of(input)?;
    let output = {
        let found = Rc::clone(&found);
        let _hooks = push_hooks(move |saved: SavedTensor| {
            let tensor = saved.tensor.f_detach()?;
            let is_input = StorageId::of(&tensor)?.address() == input_storage.address();
            if is_input || !saved.is_parameter {
                let (start, bytes) = extent(&tensor);
                let mut found = found.borrow_mut();
                let known = found.entry(start).or_insert(0);
                *known = bytes.max(*known);
            }
            Ok(Box::new(Versioned::new(&tensor)?) as Box<dyn PackedTensor>)
        })?;
        run(input).map_err(Error::Closure)?
    };
    let total = union(&found.borrow());
    Ok((output, total))
}

/// Returns the start of a tensor's memory and the number of bytes that it spans.
fn extent(tensor: &Tensor) -> (usize, u64) {
    let reach: i64 = tensor
        .size()
        .iter()
        .zip(tensor.stride())
        .map(|(size, stride)| (size - 1).max(0) * stride)
        .sum();
    let element = ScalarType::of(tensor).bytes() as u64;
    let elements = if tensor.numel() == 0 {
        0
    } else {
        reach.unsigned_abs() + 1
    };
    (tensor.data_ptr() as usize, elements * element)
}

/// Returns the number of bytes in the union of memory ranges.
fn union(ranges: &HashMap<usize, u64>) -> u64 {
    let mut sorted: Vec<(u64, u64)> = ranges
        .iter()
        .map(|(start, bytes)| (*start as u64, *bytes))
        .collect();
    sorted.sort_unstable();
    let (mut total, mut end) = (0, 0);
    for (start, bytes) in sorted {
        let stop = start + bytes;
        total += stop.saturating_sub(start.max(end));
        end = end.max(stop);
    }
    total
}

fn bytes_of(tensor: &Tensor) -> u64 {
    (tensor.numel() * ScalarType::of(tensor).bytes()) as u64
}
