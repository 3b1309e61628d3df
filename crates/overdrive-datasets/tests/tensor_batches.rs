//! Batches as tensors.
#![allow(
    clippy::unwrap_used,
    reason = "tests and their helpers fail by panicking"
)]
#![cfg(feature = "tch")]

mod common;

use common::counting_store;
use overdrive_datasets::{
    BatchOptions, Batches, LastWindow, RandomWindows, SequentialWindows, TokenBatches, TokenView,
};
use tch::{Device, Kind, Tensor};

fn numbers(tensor: &Tensor) -> Vec<i64> {
    Vec::try_from(tensor.view([-1])).unwrap()
}

#[test]
fn tensors_hold_the_plain_batches_with_and_without_prefetch() {
    let dir = tempfile::tempdir().unwrap();
    let view = TokenView::new(counting_store(dir.path(), 500));
    let windows = RandomWindows::new(view, 6, 5).unwrap();
    for prefetch in [0, 1, 4] {
        let options = BatchOptions {
            micro_batch_size: 3,
            prefetch,
            ..Default::default()
        };
        let plain = Batches::new(windows.clone(), options).unwrap();
        let mut tensors = TokenBatches::new(windows.clone(), options, Device::Cpu).unwrap();
        for expected in plain.take(20) {
            let expected = expected.unwrap();
            let batch = tensors.next().unwrap().unwrap();
            assert_eq!(batch.input_ids.size(), [3, 6]);
            assert_eq!(batch.input_ids.kind(), Kind::Int64);
            assert_eq!(numbers(&batch.input_ids), expected.input_ids);
            assert_eq!(numbers(&batch.labels), expected.labels);
            assert_eq!(batch.label_count, 18);
            // What is prepared ahead does not count.
            assert_eq!(tensors.state(), expected.state);
        }
    }
}

#[test]
fn the_last_batch_of_an_evaluation_is_shorter() {
    let dir = tempfile::tempdir().unwrap();
    let view = TokenView::new(counting_store(dir.path(), 32));
    let windows = SequentialWindows::new(view, 6, LastWindow::Keep { pad_token: 0 }).unwrap();
    let options = BatchOptions {
        micro_batch_size: 4,
        ..Default::default()
    };
    let batches: Vec<_> = TokenBatches::new(windows, options, Device::Cpu)
        .unwrap()
        .map(Result::unwrap)
        .collect();
    let sizes: Vec<_> = batches.iter().map(|batch| batch.labels.size()).collect();
    assert_eq!(sizes, [[4, 6], [2, 6]]);
    assert_eq!(
        batches.iter().map(|batch| batch.label_count).sum::<usize>(),
        31
    );
    assert_eq!(
        numbers(&batches[1].labels)[6..],
        [31, -100, -100, -100, -100, -100]
    );
}
