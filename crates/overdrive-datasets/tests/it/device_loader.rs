//! Batches on a device.

use crate::common::counting_store;
use overdrive_datasets::{
    Batch, DataLoader, DataLoaderOptions, Dataset, DatasetExt, DeviceLoader, Error, IGNORE_INDEX,
    InMemory, LastWindow, LoaderState, OnDevice, RandomWindows, Result, RowLayout,
    SequentialWindows, TextLines, TextOptions, TokenView, TokenizedExample, collate,
};
use tch::{Device, Kind, Tensor};

/// A dataset whose sequence `i` has `1 + i % 5` tokens `i`.
struct Sequences(usize);

impl Dataset for Sequences {
    type Item = TokenizedExample;

    fn len(&self) -> usize {
        self.0
    }

    fn get(&self, index: usize) -> Result<TokenizedExample> {
        Ok(vec![index as u32; 1 + index % 5].into())
    }
}

/// Returns a loader of batches of `rows` in their order.
fn loader_of<D: Dataset<Item = TokenizedExample> + 'static>(
    rows: D,
    layout: RowLayout,
    options: DataLoaderOptions,
    device: Device,
) -> DeviceLoader<Batch> {
    let collate = move |rows: Vec<TokenizedExample>| collate(&rows, layout);
    let loader = DataLoader::with_collate(rows, collate, options).unwrap();
    DeviceLoader::new(loader, device)
}

fn options(batch_size: usize, num_workers: usize) -> DataLoaderOptions {
    DataLoaderOptions {
        batch_size,
        num_workers,
        ..DataLoaderOptions::default()
    }
}

fn loader(num_workers: usize, device: Device) -> DeviceLoader<Batch> {
    let layout = RowLayout::Padded {
        pad_token: 99,
        multiple_of: 1,
    };
    loader_of(Sequences(10), layout, options(4, num_workers), device)
}

fn numbers(tensor: &Tensor) -> Vec<i64> {
    Vec::try_from(tensor.to_device(Device::Cpu).view([-1])).unwrap()
}

fn check(device: Device) {
    for workers in [0, 2] {
        let mut loader = loader(workers, device);
        assert_eq!(loader.batches_per_epoch(), 3);
        for epoch in 0..2 {
            let first = loader.next_batch().unwrap().unwrap();
            assert_eq!(first.input_ids.size(), [4, 4]);
            assert_eq!(first.input_ids.kind(), Kind::Int64);
            assert_eq!(first.input_ids.device(), device);
            let ids = [0, 99, 99, 99, 1, 1, 99, 99, 2, 2, 2, 99, 3, 3, 3, 3];
            assert_eq!(numbers(&first.input_ids), ids);
            let mut labels = ids.map(|id| if id == 99 { -100 } else { id });
            // A row's first token has nothing to be predicted from.
            labels.iter_mut().step_by(4).for_each(|first| *first = -100);
            assert_eq!(numbers(&first.labels), labels);
            let mask = ids.map(|id| i64::from(id != 99));
            assert_eq!(numbers(first.attention_mask.as_ref().unwrap()), mask);
            assert_eq!((first.tokens, first.padded_tokens()), (10, 16));
            assert_eq!((first.sequences, first.label_count), (4, 6));
            let state = LoaderState {
                epoch,
                next_batch: 1,
                batches: 3,
                joint_batch_size: 4,
                ..LoaderState::default()
            };
            // What is copied ahead does not count.
            assert_eq!(loader.state_dict(), state);
            assert_eq!(loader.next_batch().unwrap().unwrap().tokens, 5 + 1 + 2 + 3);
            loader.load_state_dict(state).unwrap();
            assert_eq!(loader.next_batch().unwrap().unwrap().tokens, 5 + 1 + 2 + 3);
            assert_eq!(loader.next_batch().unwrap().unwrap().tokens, 4 + 5);
            assert!(loader.next_batch().is_none());
        }
        let packed = loader_of(
            Sequences(10),
            RowLayout::EndToEnd,
            options(4, workers),
            device,
        );
        for batch in packed {
            let batch = batch.unwrap();
            let positions = batch.position_ids.as_ref().unwrap();
            assert_eq!(positions.device(), device);
            let expected = batch.sequence_lengths.iter().flat_map(|&length| 0..length);
            assert_eq!(numbers(positions), expected.collect::<Vec<_>>());
        }
    }
}

#[test]
fn batches_are_copied_to_the_cpu() {
    check(Device::Cpu);
}

#[test]
#[ignore = "needs a CUDA GPU"]
fn batches_are_copied_to_the_device_on_a_gpu() {
    check(Device::Cuda(0));
    let pinned = Tensor::from_slice(&[1_i64, 2]).pinned().unwrap();
    assert!(overdrive_sys::transfer::is_pinned(&pinned).unwrap());
}

#[test]
fn an_endless_loader_continues_over_passes_and_resumes_in_any() {
    let make = |workers| {
        let options = DataLoaderOptions {
            shuffle: true,
            seed: 4,
            ..options(4, workers)
        };
        loader_of(Sequences(10), RowLayout::EndToEnd, options, Device::Cpu)
    };
    let ids = |batch: Result<Batch>| numbers(&batch.unwrap().input_ids);
    // Without it, a pass ends, and the next one begins.
    let mut passes = make(0);
    let first: Vec<_> = passes.by_ref().map(ids).collect();
    let second: Vec<_> = passes.by_ref().map(ids).collect();
    assert_eq!((first.len(), second.len()), (3, 3));
    assert_ne!(first, second);

    let mut endless = make(2).endless();
    let seen: Vec<_> = endless.by_ref().take(6).map(ids).collect();
    assert_eq!(seen, [first, second].concat());
    let state = endless.state_dict();
    assert_eq!((state.epoch, state.next_batch), (1, 3));
    let rest: Vec<_> = endless.by_ref().take(5).map(ids).collect();
    let mut resumed = make(0).endless();
    resumed.load_state_dict(state).unwrap();
    assert_eq!(resumed.take(5).map(ids).collect::<Vec<_>>(), rest);
    assert_eq!(endless.stats().batches, 11);

    // A pass without a batch ends the iteration instead of looping forever.
    let none = loader_of(
        Sequences(0),
        RowLayout::EndToEnd,
        options(4, 0),
        Device::Cpu,
    );
    assert!(none.endless().next().is_none());
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

#[test]
fn tensors_hold_the_windows_with_and_without_workers() {
    let dir = tempfile::tempdir().unwrap();
    let view = TokenView::new(counting_store(dir.path(), 500));
    let windows = RandomWindows::new(view, 6, 5).unwrap();
    for workers in [0, 1, 4] {
        let layout = RowLayout::default();
        let rows = windows.clone();
        let mut loader = loader_of(rows, layout, options(3, workers), Device::Cpu);
        for number in 0..20 {
            let batch = loader.next_batch().unwrap().unwrap();
            assert_eq!(batch.input_ids.size(), [3, 6]);
            assert_eq!(batch.input_ids.kind(), Kind::Int64);
            let rows = (3 * number..3 * number + 3).map(|number| windows.get(number).unwrap());
            let ids: Vec<i64> = rows.flat_map(|row| row.input_ids).collect();
            assert_eq!(numbers(&batch.input_ids), ids);
            let mut labels = ids;
            labels.iter_mut().step_by(6).for_each(|first| *first = -100);
            assert_eq!(numbers(&batch.labels), labels);
            assert_eq!((batch.label_count, batch.tokens), (15, 18));
            assert!(batch.attention_mask.is_none() && batch.position_ids.is_none());
            // What is prepared ahead does not count.
            assert_eq!(loader.state_dict().next_batch, number + 1);
        }
    }
}

#[test]
fn the_last_batch_of_an_evaluation_is_shorter() {
    let dir = tempfile::tempdir().unwrap();
    let view = TokenView::new(counting_store(dir.path(), 32));
    let windows = SequentialWindows::new(view, 6, LastWindow::Keep).unwrap();
    let loader = loader_of(windows, RowLayout::default(), options(4, 1), Device::Cpu);
    let batches: Vec<_> = loader.map(Result::unwrap).collect();
    let sizes: Vec<_> = batches.iter().map(|batch| batch.labels.size()).collect();
    assert_eq!(sizes, [[4, 6], [2, 6]]);
    // Of each window but the last five labels count, of the last, of two tokens, one.
    let label_count = batches.iter().map(|batch| batch.label_count);
    assert_eq!(label_count.sum::<usize>(), 5 * 5 + 1);
    assert_eq!(
        numbers(&batches[1].labels)[6..],
        [-100, 31, -100, -100, -100, -100]
    );
}

#[test]
fn lines_on_disk_come_out_padded() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("lines.txt");
    std::fs::write(&path, "abc\na\n\nabcd").unwrap();
    let lines = TextLines::open([&path], &TextOptions::default()).unwrap();
    let bytes = lines.map(|line| {
        let tokens: Vec<u32> = line.bytes().map(u32::from).collect();
        Ok(TokenizedExample::from(tokens))
    });
    let layout = RowLayout::Padded {
        pad_token: 9,
        multiple_of: 4,
    };
    let mut loader = loader_of(bytes, layout, options(2, 1), Device::Cpu);
    let first = loader.next_batch().unwrap().unwrap();
    assert_eq!(first.input_ids.size(), [2, 4]);
    assert_eq!(numbers(&first.input_ids), [97, 98, 99, 9, 97, 9, 9, 9]);
    let mask = first.attention_mask.as_ref().unwrap();
    assert_eq!(numbers(mask), [1, 1, 1, 0, 1, 0, 0, 0]);
    assert_eq!(
        numbers(&first.labels),
        [-100, 98, 99, -100, -100, -100, -100, -100]
    );
    assert_eq!((first.tokens, first.padded_tokens()), (4, 8));
    // A line without a token is a row of padding, and no sequence.
    let second = loader.next_batch().unwrap().unwrap();
    assert_eq!(
        (second.sequences, second.tokens, second.label_count),
        (1, 4, 3)
    );
    assert_eq!(numbers(&second.input_ids)[..4], [9; 4]);
    assert_eq!(numbers(&second.labels)[..4], [IGNORE_INDEX; 4]);
}

#[test]
fn a_row_that_makes_no_batch_is_an_error_at_its_position() {
    struct Unlabelled;
    impl Dataset for Unlabelled {
        type Item = TokenizedExample;
        fn len(&self) -> usize {
            3
        }
        fn get(&self, index: usize) -> Result<TokenizedExample> {
            let mut row = TokenizedExample::from(vec![1_u32, 2]);
            row.labels.truncate(2 - usize::from(index == 1));
            Ok(row)
        }
    }
    let loader = loader_of(Unlabelled, RowLayout::default(), options(1, 1), Device::Cpu);
    let outcomes: Vec<_> = loader.collect();
    assert!(outcomes[0].is_ok() && outcomes[2].is_ok());
    assert!(matches!(
        &outcomes[1],
        Err(Error::Common(overdrive_core::Error::InvalidOption { option, .. })) if option == "labels"
    ));
}

#[test]
fn a_pair_is_a_batch_of_two_parts() {
    let rows = InMemory(vec![1i64, 2, 3]);
    let pair = |rows: Vec<i64>| {
        let labels = Tensor::from_slice(&rows);
        Ok((&labels * 2, vec![labels]))
    };
    let loader = DataLoader::with_collate(rows, pair, options(2, 0)).unwrap();
    let batches: Vec<(Vec<i64>, Vec<i64>)> = DeviceLoader::new(loader, Device::Cpu)
        .map(|batch| {
            let (inputs, labels) = batch.unwrap();
            (numbers(&inputs), numbers(&labels[0]))
        })
        .collect();
    assert_eq!(batches, [(vec![2, 4], vec![1, 2]), (vec![6], vec![3])]);
}
