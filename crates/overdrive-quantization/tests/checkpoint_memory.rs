#![allow(clippy::unwrap_used, reason = "a test may panic")]
//! The only test of its file: memory statistics are the process's.

use std::collections::BTreeMap;

use overdrive_quantization::{CheckpointOptions, quantize_checkpoint};
use overdrive_sys::memory;
use tch::{Device, Kind, Tensor};

#[test]
fn memory_does_not_grow_with_the_number_of_layers() {
    let folder = tempfile::tempdir().unwrap();
    let (rows, columns) = (512, 1024);
    let one = (4 * rows * columns) as u64;
    let mut peaks = Vec::new();
    for layers in [2, 12] {
        let dir = folder.path().join(format!("dense-{layers}"));
        std::fs::create_dir_all(&dir).unwrap();
        let name = |layer| format!("model.layers.{layer}.mlp.up_proj.weight");
        let tensor = || Tensor::randn([rows, columns], (Kind::Float, Device::Cpu));
        let tensors: Vec<_> = (0..layers).map(|layer| (name(layer), tensor())).collect();
        overdrive_safetensors::write(dir.join("model.safetensors"), &tensors, &BTreeMap::new())
            .unwrap();
        drop(tensors);
        std::fs::write(dir.join("config.json"), r#"{"model_type": "llama"}"#).unwrap();
        memory::reset_peak(Device::Cpu).unwrap();
        let before = memory::stats(Device::Cpu).unwrap().allocated_bytes;
        let out = folder.path().join(format!("out-{layers}"));
        let scheme = "nf4".parse().unwrap();
        quantize_checkpoint(&dir, &out, scheme, &CheckpointOptions::default()).unwrap();
        peaks.push(memory::stats(Device::Cpu).unwrap().peak_allocated_bytes - before);
    }
    println!("peaks {peaks:?} bytes, one tensor {one}");
    // The tensor, its packed form, and parts of it for the error.
    assert!(
        peaks.iter().all(|&peak| peak < 4 * one),
        "{peaks:?} of {one}"
    );
    assert!(peaks[1] <= peaks[0] + one / 8, "{peaks:?}");
}
