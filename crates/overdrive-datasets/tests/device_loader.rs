//! Batches on a device.
#![allow(
    clippy::unwrap_used,
    reason = "tests and their helpers fail by panicking"
)]
#![cfg(feature = "tch")]

use overdrive_datasets::{
    DataLoader, DataLoaderOptions, Dataset, DeviceLoader, LoaderState, OnDevice, PadOptions,
    PaddedTensors, Result, pad_sequences,
};
use tch::{Device, Kind, Tensor};

/// Sequence `i` has `1 + i % 5` tokens `i`.
struct Sequences(usize);

impl Dataset for Sequences {
    type Item = Vec<u32>;

    fn len(&self) -> usize {
        self.0
    }

    fn get(&self, index: usize) -> Result<Vec<u32>> {
        Ok(vec![index as u32; 1 + index % 5])
    }
}

fn loader(num_workers: usize, device: Device) -> DeviceLoader<PaddedTensors> {
    let options = DataLoaderOptions {
        batch_size: 4,
        num_workers,
        ..DataLoaderOptions::default()
    };
    let collate = |sequences: Vec<Vec<u32>>| {
        let options = PadOptions {
            pad_token: 99,
            ..PadOptions::default()
        };
        PaddedTensors::from_padded(&pad_sequences(&sequences, &options)?)
    };
    let batches = options.batches(10).unwrap();
    let loader = DataLoader::with(Sequences(10), batches, collate, options).unwrap();
    DeviceLoader::new(loader, device)
}

fn numbers(tensor: &Tensor) -> Vec<i64> {
    Vec::try_from(tensor.to_device(Device::Cpu).view([-1])).unwrap()
}

fn check(device: Device) {
    for workers in [0, 2] {
        let mut loader = loader(workers, device);
        for epoch in 0..2 {
            let first = loader.next_batch().unwrap().unwrap();
            assert_eq!(first.input_ids.size(), [4, 4]);
            assert_eq!(first.input_ids.kind(), Kind::Int64);
            assert_eq!(first.input_ids.device(), device);
            let ids = [0, 99, 99, 99, 1, 1, 99, 99, 2, 2, 2, 99, 3, 3, 3, 3];
            assert_eq!(numbers(&first.input_ids), ids);
            let labels = ids.map(|id| if id == 99 { -100 } else { id });
            assert_eq!(numbers(&first.labels), labels);
            let mask = ids.map(|id| i64::from(id != 99));
            assert_eq!(numbers(&first.attention_mask), mask);
            assert_eq!(first.tokens, 10);
            let state = LoaderState {
                epoch,
                next_batch: 1,
            };
            // What is copied ahead does not count.
            assert_eq!(loader.state_dict(), state);
            assert_eq!(loader.next_batch().unwrap().unwrap().tokens, 5 + 1 + 2 + 3);
            loader.load_state_dict(state).unwrap();
            assert_eq!(loader.next_batch().unwrap().unwrap().tokens, 5 + 1 + 2 + 3);
            assert_eq!(loader.next_batch().unwrap().unwrap().tokens, 4 + 5);
            assert!(loader.next_batch().is_none());
        }
    }
}

#[test]
fn batches_come_on_the_cpu_and_on_a_gpu_where_there_is_one() {
    check(Device::Cpu);
    if tch::Cuda::is_available() {
        check(Device::Cuda(0));
        let pinned = Tensor::from_slice(&[1_i64, 2]).pinned().unwrap();
        assert!(pinned.is_pinned(Device::Cuda(0)));
    } else {
        eprintln!("no GPU here: copies from page-locked memory were not tested");
    }
}

#[test]
fn lists_of_tensors_go_together() {
    let tensors = vec![
        Tensor::from_slice(&[1.0_f32]),
        Tensor::from_slice(&[2.0_f32, 3.0]),
    ];
    let moved = tensors.on_device(Device::Cpu, false).unwrap();
    assert_eq!(moved[1].size(), [2]);
    assert_eq!(moved[1].kind(), Kind::Float);
}
