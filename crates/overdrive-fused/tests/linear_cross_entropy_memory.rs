//! The memory of the fused head, counted by libtorch's allocator. The counts are of the process, so this
//! file has one test.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

#[path = "it/common.rs"]
mod common;

use std::num::NonZeroUsize;

use common::{labels, values};
use overdrive_fused::{LinearCrossEntropyOptions, linear_cross_entropy};
use overdrive_sys::memory;
use tch::{Device, Kind, Tensor};

/// The bytes of the largest moment above those at the start, over forward and backward.
fn peak_of(run: impl FnOnce() -> Tensor) -> u64 {
    memory::reset_peak(Device::Cpu).unwrap();
    let before = memory::stats(Device::Cpu).unwrap().allocated_bytes;
    run().backward();
    memory::stats(Device::Cpu).unwrap().peak_allocated_bytes - before
}

#[test]
fn the_fused_head_holds_one_chunk_of_logits_and_the_gradients() {
    let (rows, width, classes, chunk) = (1024_i64, 64_i64, 8192_i64, 128_i64);
    let labels = labels(&[rows], classes, 0, 1);
    let leaves = || {
        [values(&[rows, width], 1), values(&[classes, width], 2)]
            .map(|leaf| leaf.set_requires_grad(true))
    };
    let logits = (rows * classes * 4) as u64;

    let [hidden, weight] = leaves();
    let fused = peak_of(|| {
        let options = LinearCrossEntropyOptions {
            chunk_rows: NonZeroUsize::new(chunk as usize),
            ..LinearCrossEntropyOptions::default()
        };
        let loss = linear_cross_entropy(&hidden, &weight, &labels, &options)
            .unwrap()
            .loss;
        // A gradient other than 1 is multiplied in place.
        loss * 0.5
    });
    let gradients = ((rows + classes) * width * 4) as u64;
    let floor = (chunk * classes * 4) as u64 + gradients;
    assert!(
        fused >= floor,
        "{fused} bytes, but a chunk and the gradients are {floor}"
    );
    // The allocator rounds blocks up; labels and losses are a few kilobytes.
    assert!(
        fused < floor + floor / 8,
        "{fused} bytes, the chunk and the gradients are {floor}"
    );

    let [hidden, weight] = leaves();
    let composed = peak_of(|| {
        let logits = hidden.linear(&weight, None::<&Tensor>);
        logits.cross_entropy_loss(&labels, None::<&Tensor>, tch::Reduction::Mean, -100, 0.0)
    });
    assert!(
        composed > 2 * logits,
        "{composed} bytes; the logits are {logits}"
    );
    assert!(fused * 8 < composed, "{fused} against {composed}");

    // No gradient wanted: the chunk alone.
    let [hidden, weight] = leaves().map(|leaf| leaf.detach());
    memory::reset_peak(Device::Cpu).unwrap();
    let before = memory::stats(Device::Cpu).unwrap().allocated_bytes;
    let options = LinearCrossEntropyOptions {
        chunk_rows: NonZeroUsize::new(chunk as usize),
        ..LinearCrossEntropyOptions::default()
    };
    let loss = linear_cross_entropy(&hidden, &weight, &labels, &options)
        .unwrap()
        .loss;
    assert_eq!(loss.kind(), Kind::Float);
    let peak = memory::stats(Device::Cpu).unwrap().peak_allocated_bytes - before;
    let chunk_bytes = (chunk * classes * 4) as u64;
    assert!(
        peak < chunk_bytes + chunk_bytes / 8,
        "{peak} bytes for a chunk of {chunk_bytes}"
    );
}
