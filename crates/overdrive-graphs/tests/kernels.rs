//! The kernels of overdrive-gpu in a captured graph. A target of its own: while a graph is captured, no other test may
//! use the GPU, and the kernels are turned on for the whole process.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

use overdrive_fused::{add_rms_norm, swiglu};
use overdrive_graphs::{CaptureOptions, CudaGraph, Error};
use tch::{Device, Kind, Tensor};

#[test]
#[ignore = "needs a CUDA GPU"]
fn kernels_on_a_gpu_are_captured_and_replayed() {
    let _on = overdrive_gpu::override_enabled(true);
    let device = Device::Cuda(0);
    let numbers = (Kind::BFloat16, device);
    let x = Tensor::randn([5, 256], numbers);
    let (residual, weight) = (
        Tensor::randn([5, 256], numbers),
        Tensor::randn([256], numbers),
    );
    let block = || {
        let (y, _) = add_rms_norm(&x, &residual, &weight, 1e-6).unwrap();
        Ok::<_, Error>(swiglu(&y).unwrap())
    };
    // The warm-ups load the kernels, which cannot be done inside the capture.
    let graph =
        tch::no_grad(|| CudaGraph::capture(device, CaptureOptions::default(), &block)).unwrap();
    x.shallow_clone().copy_(&Tensor::randn([5, 256], numbers));
    let replayed = graph.replay().unwrap();
    let expected = tch::no_grad(block).unwrap();
    assert_eq!(*replayed, expected);
}
