//! A loader gives the same batches in the same order whatever happens around it.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use overdrive_datasets::{
    BatchSampler, DataLoader, DataLoaderOptions, Dataset, DatasetExt, Error, ErrorPolicy, InMemory,
    LastShare, LengthGroupedBatches, LoaderState, RecordNumber, Result, SampledBatches,
    SequentialSampler, Shard, ShardedBatches, TokenBudgetBatches, TokenBudgetOptions,
    WorkerOptions,
};
use proptest::prelude::*;

/// The numbers below `len`; those in `broken` cannot be read. Counts how many were.
#[derive(Clone, Default)]
struct Numbers {
    len: usize,
    broken: Vec<usize>,
    reads: Arc<AtomicUsize>,
    /// If `true`, some records are slower, so that workers finish out of order.
    uneven: bool,
}

impl Numbers {
    fn new(len: usize) -> Self {
        Self {
            len,
            ..Self::default()
        }
    }
}

impl Dataset for Numbers {
    type Item = usize;

    fn len(&self) -> usize {
        self.len
    }

    fn get(&self, index: usize) -> Result<usize> {
        self.reads.fetch_add(1, Ordering::SeqCst);
        if self.uneven && index.is_multiple_of(7) {
            std::thread::sleep(Duration::from_millis(2));
        }
        if self.broken.contains(&index) {
            return Err(Error::InvalidRecord {
                path: "numbers".into(),
                number: RecordNumber::Record(index),
                offset: 8 * index as u64,
                problem: "it is broken".to_owned(),
            });
        }
        Ok(index)
    }
}

fn options(batch_size: usize, num_workers: usize) -> DataLoaderOptions {
    DataLoaderOptions {
        batch_size,
        num_workers,
        ..DataLoaderOptions::default()
    }
}

fn epochs(loader: &mut DataLoader<Vec<usize>>, count: usize) -> Vec<Vec<Vec<usize>>> {
    (0..count)
        .map(|_| loader.epoch().map(Result::unwrap).collect())
        .collect()
}

#[test]
fn defaults_are_those_of_pytorch() {
    let options = DataLoaderOptions::default();
    assert_eq!(
        (
            options.batch_size,
            options.num_workers,
            options.prefetch_factor
        ),
        (1, 0, 2)
    );
    assert!(!options.shuffle && !options.drop_last);
    let mut loader = DataLoader::new(Numbers::new(3), options).unwrap();
    assert_eq!(loader.len(), 3);
    assert_eq!(epochs(&mut loader, 1), [[vec![0], vec![1], vec![2]]]);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn batches_and_their_order_do_not_depend_on_workers(
        len in 0_usize..120, batch_size in 1_usize..8, prefetch_factor in 1_usize..4, shuffle in any::<bool>(), drop_last in any::<bool>(),
    ) {
        let make = |num_workers| {
            let options = DataLoaderOptions { shuffle, drop_last, prefetch_factor, ..options(batch_size, num_workers) };
            let numbers = Numbers { uneven: true, ..Numbers::new(len) };
            epochs(&mut DataLoader::new(numbers, options).unwrap(), 3)
        };
        let expected = make(0);
        prop_assert_eq!(expected[0].concat().len(), if drop_last { len / batch_size * batch_size } else { len });
        for num_workers in [1, 2, 5] {
            prop_assert_eq!(&make(num_workers), &expected);
        }
    }

    #[test]
    fn a_resumed_loader_returns_the_batches_of_one_that_did_not_stop(
        len in 1_usize..80, batch_size in 1_usize..6, stop in 0_usize..60, workers in 0_usize..3, kind in 0_usize..3,
    ) {
        let make = |num_workers| {
            let options = DataLoaderOptions { shuffle: true, seed: 9, ..options(batch_size, num_workers) };
            let lengths: Vec<u32> = (0..len as u32).map(|i| 1 + i * 31 % 50).collect();
            let numbers = Numbers::new(len);
            match kind {
                0 => DataLoader::new(numbers, options).unwrap(),
                1 => {
                    let batches = LengthGroupedBatches::new(lengths, batch_size, false, 9).unwrap();
                    DataLoader::with(numbers, batches, Ok, options.workers()).unwrap()
                }
                _ => {
                    let budget = TokenBudgetOptions { max_tokens: 100, window: 16, ..TokenBudgetOptions::default() };
                    let batches = TokenBudgetBatches::new(lengths, budget).unwrap();
                    DataLoader::with(numbers, batches, Ok, options.workers()).unwrap()
                }
            }
        };
        // `None` is the end of an epoch.
        let take = |loader: &mut DataLoader<Vec<usize>>, count| {
            (0..count).map(|_| loader.next_batch().map(Result::unwrap)).collect::<Vec<_>>()
        };
        let expected = take(&mut make(0), 100);
        let mut first = make(workers);
        prop_assert_eq!(&take(&mut first, stop)[..], &expected[..stop]);
        let state = serde_json::to_string(&first.state_dict()).unwrap();
        drop(first);
        let mut second = make(2 - workers);
        second.load_state_dict(serde_json::from_str(&state).unwrap()).unwrap();
        prop_assert_eq!(&take(&mut second, 100 - stop)[..], &expected[stop..]);
    }
}

#[test]
fn an_epoch_continues_after_an_iterator_that_was_dropped() {
    let mut loader = DataLoader::new(Numbers::new(10), options(3, 2)).unwrap();
    assert_eq!(loader.epoch().next().unwrap().unwrap(), [0, 1, 2]);
    assert_eq!(
        loader.state_dict(),
        LoaderState {
            epoch: 0,
            next_batch: 1,
            batches: 4,
            joint_batch_size: 3,
            ..LoaderState::default()
        }
    );
    assert_eq!(epochs(&mut loader, 1)[0].len(), 3);
    assert_eq!(
        loader.state_dict(),
        LoaderState {
            epoch: 1,
            next_batch: 0,
            batches: 4,
            joint_batch_size: 3,
            ..LoaderState::default()
        }
    );
    let mut epoch = loader.epoch();
    assert_eq!(epoch.by_ref().count(), 4);
    // An iterator that has ended stays ended: the next epoch needs another one.
    assert!(epoch.next().is_none());
    assert!(
        loader
            .load_state_dict(LoaderState {
                epoch: 5,
                next_batch: 4,
                ..LoaderState::default()
            })
            .is_ok()
    );
    let error = loader
        .load_state_dict(LoaderState {
            epoch: 5,
            next_batch: 5,
            ..LoaderState::default()
        })
        .unwrap_err();
    assert!(
        error
            .to_string()
            .contains("`state.next_batch` is 5; it must be at most 4, the batches of the epoch"),
        "{error}"
    );
}

#[test]
fn a_loader_of_other_processes_resumes_at_the_same_record() {
    let make = |batch_size, rank, world_size, drop_last| {
        let options = DataLoaderOptions {
            batch_size,
            rank,
            world_size,
            shuffle: true,
            drop_last,
            ..DataLoaderOptions::default()
        };
        DataLoader::new(Numbers::new(48), options).unwrap()
    };
    // The records of all processes in the next epochs, batch by batch.
    let rest = |batch_size, world_size, state: Option<LoaderState>, epochs: usize| {
        let mut loaders: Vec<_> = (0..world_size)
            .map(|rank| make(batch_size, rank, world_size, false))
            .collect();
        let mut records = Vec::new();
        for loader in &mut loaders {
            if let Some(state) = state {
                loader.load_state_dict(state).unwrap();
            }
        }
        for _ in 0..epochs {
            loop {
                let batches: Vec<_> = loaders.iter_mut().map(DataLoader::next_batch).collect();
                if batches.iter().all(Option::is_none) {
                    break;
                }
                // Within a joint batch the processes alternate record by record.
                let batches: Vec<Vec<usize>> = batches
                    .into_iter()
                    .map(|batch| batch.unwrap().unwrap())
                    .collect();
                for position in 0..batches[0].len() {
                    records.extend(batches.iter().map(|batch| batch[position]));
                }
            }
        }
        records
    };
    let whole = rest(2, 1, None, 2);
    assert_eq!(whole.len(), 96);
    for (batch_size, world_size, batches) in
        [(2, 2, 3), (4, 1, 3), (2, 3, 2), (2, 1, 6), (2, 2, 12)]
    {
        let mut first = make(batch_size, 0, world_size, false);
        for _ in 0..batches {
            first.next_batch().unwrap().unwrap();
        }
        let state = first.state_dict();
        let done = batch_size * world_size * batches;
        assert_eq!(state.epochs(), done as f64 / 48.0);
        for (batch_size, world_size) in [(2, 1), (2, 2), (1, 3), (4, 1), (6, 1)] {
            assert_eq!(rest(batch_size, world_size, Some(state), 2), whole[done..]);
        }
    }
    // Inside a batch: from its begin, so that no record is left out.
    let mut first = make(2, 0, 1, false);
    for _ in 0..3 {
        first.next_batch().unwrap().unwrap();
    }
    assert_eq!(rest(4, 1, Some(first.state_dict()), 2), whole[4..]);
    // An epoch that has ended stays so, whatever was dropped or repeated at its end.
    let mut first = make(5, 0, 2, true);
    while first.state_dict().next_batch < 4 {
        first.next_batch().unwrap().unwrap();
    }
    assert_eq!(rest(2, 1, Some(first.state_dict()), 2), whole[48..]);
}

#[test]
fn batches_grouped_by_length_resume_at_the_same_record_with_another_batch_size() {
    const RECORDS: usize = 500;
    let lengths: Vec<u32> = (0..RECORDS as u32).map(|i| 1 + i * 7919 % 97).collect();
    let make = |batch_size| {
        let batches = LengthGroupedBatches::new(lengths.clone(), batch_size, false, 5).unwrap();
        DataLoader::with(Numbers::new(RECORDS), batches, Ok, WorkerOptions::default()).unwrap()
    };
    let records = |loader: &mut DataLoader<Vec<usize>>| -> Vec<usize> {
        loader.epoch().flat_map(Result::unwrap).collect()
    };
    for (batch_size, batches) in [(16, 10), (4, 75), (1, 120), (8, 0)] {
        let mut whole = make(batch_size);
        let order = [records(&mut whole), records(&mut whole)].concat();
        let mut first = make(batch_size);
        for _ in 0..batches {
            first.next_batch().unwrap().unwrap();
        }
        let state = serde_json::to_string(&first.state_dict()).unwrap();
        for other in [1, 2, 3, 8, 16, 32, 600] {
            let mut second = make(other);
            second
                .load_state_dict(serde_json::from_str(&state).unwrap())
                .unwrap();
            let done = batch_size * batches / other * other;
            assert_eq!(
                records(&mut second),
                order[done..RECORDS],
                "{batch_size} to {other}"
            );
            // So it stays, in the next epoch and in a state that is stored again.
            let again = second.state_dict();
            assert_eq!(again.group_len, first.state_dict().group_len);
            assert_eq!(records(&mut second), order[RECORDS..]);
            let mut third = make(batch_size);
            third.load_state_dict(again).unwrap();
            assert_eq!(records(&mut third), order[RECORDS..]);
        }
    }
    // A state that was stored without the length of the groups takes the loader's own.
    let old: LoaderState =
        serde_json::from_str(r#"{"epoch":0,"next_batch":3,"batches":32,"joint_batch_size":16}"#)
            .unwrap();
    let mut loader = make(16);
    let order = records(&mut loader);
    loader.load_state_dict(old).unwrap();
    assert_eq!(records(&mut loader), order[48..]);
}

#[test]
fn an_error_is_returned_at_the_position_of_its_batch() {
    for workers in [0, 1, 3] {
        let numbers = Numbers {
            broken: vec![4],
            ..Numbers::new(8)
        };
        let mut loader = DataLoader::new(numbers, options(2, workers)).unwrap();
        let batches: Vec<_> = loader.epoch().collect();
        assert_eq!(batches.len(), 4);
        for (number, batch) in batches.into_iter().enumerate() {
            match batch {
                Ok(batch) => assert_eq!(batch, [2 * number, 2 * number + 1]),
                Err(error) => {
                    assert_eq!(number, 2);
                    let text = "numbers, record 4 (byte 32): it is broken";
                    assert_eq!(error.to_string(), text);
                }
            }
        }
    }
}

#[test]
fn invalid_records_are_skipped_or_replaced_and_counted() {
    let run = |on_error, num_workers, broken: &[usize]| {
        let numbers = Numbers {
            broken: broken.to_vec(),
            ..Numbers::new(8)
        };
        let options = DataLoaderOptions {
            on_error,
            ..options(2, num_workers)
        };
        let mut loader = DataLoader::new(numbers, options).unwrap();
        let batches: Vec<Vec<usize>> = loader.epoch().map(Result::unwrap).collect();
        (batches, loader)
    };
    for workers in [0, 2] {
        let (batches, loader) = run(ErrorPolicy::Skip, workers, &[1, 4, 5]);
        // The batch of which nothing is left is left out.
        assert_eq!(batches, [vec![0], vec![2, 3], vec![6, 7]]);
        assert!(loader.stats().failed_records >= 3);
        assert!(loader.errors().first()[0].contains("it is broken"));
        let (batches, loader) = run(ErrorPolicy::Replace, 0, &[1, 4, 5, 7]);
        assert_eq!(batches, [vec![0, 2], vec![2, 3], vec![6, 6], vec![6, 0]]);
        // 1, then 4 and 5 for the first of the third batch, 5 for its second, and 7.
        assert_eq!(loader.stats().failed_records, 5);
    }
    // No readable record can replace another.
    let numbers = Numbers {
        broken: vec![0, 1],
        ..Numbers::new(2)
    };
    let options = DataLoaderOptions {
        on_error: ErrorPolicy::Replace,
        ..options(1, 0)
    };
    assert!(
        DataLoader::new(numbers, options)
            .unwrap()
            .next_batch()
            .unwrap()
            .is_err()
    );
}

#[test]
fn an_error_that_is_not_about_a_record_is_returned_under_every_policy() {
    struct Failing;
    impl Dataset for Failing {
        type Item = ();
        fn len(&self) -> usize {
            2
        }
        fn get(&self, index: usize) -> Result<()> {
            Err(Error::NoSuchRecord { index, len: 0 })
        }
    }
    for on_error in [ErrorPolicy::Stop, ErrorPolicy::Skip, ErrorPolicy::Replace] {
        let options = DataLoaderOptions {
            on_error,
            ..options(1, 1)
        };
        let mut loader = DataLoader::new(Failing, options).unwrap();
        assert!(loader.epoch().all(|batch| batch.is_err()));
    }
}

#[test]
fn workers_wait_when_enough_is_ready() {
    let numbers = Numbers::new(1000);
    let reads = Arc::clone(&numbers.reads);
    let options = DataLoaderOptions {
        prefetch_factor: 3,
        ..options(5, 2)
    };
    let mut loader = DataLoader::new(numbers, options).unwrap();
    assert_eq!(reads.load(Ordering::SeqCst), 0);
    for taken in 1..=20 {
        loader.next_batch().unwrap().unwrap();
        std::thread::sleep(Duration::from_millis(2));
        // Two workers times three batches of five records are ahead.
        assert!(reads.load(Ordering::SeqCst) <= (taken + 6) * 5);
    }
    assert!(loader.stats().mean_queue_depth() <= 6.0);
    assert_eq!(loader.stats().batches, 20);
}

#[test]
fn dropping_ends_the_threads_at_once_wherever_they_are() {
    for taken in [0, 1, 7] {
        let numbers = Numbers::new(1_000_000);
        let reads = Arc::clone(&numbers.reads);
        let mut loader = DataLoader::new(numbers, options(3, 3)).unwrap();
        for _ in 0..taken {
            loader.next_batch().unwrap().unwrap();
        }
        drop(loader);
        let after = reads.load(Ordering::SeqCst);
        std::thread::sleep(Duration::from_millis(5));
        assert_eq!(reads.load(Ordering::SeqCst), after);
        // The last holder of the dataset is this test: nothing leaks.
        assert_eq!(Arc::strong_count(&reads), 1);
    }
}

#[test]
fn a_panic_in_a_worker_is_an_error_of_its_batch() {
    let collate = |numbers: Vec<usize>| {
        assert!(numbers != [2], "no twos");
        Ok(numbers)
    };
    for workers in [0, 2] {
        let options = options(1, workers);
        let mut loader = DataLoader::with_collate(Numbers::new(4), collate, options).unwrap();
        let outcomes: Vec<_> = loader
            .epoch()
            .map(|batch| batch.map_err(|e| e.to_string()))
            .collect();
        assert_eq!(outcomes.iter().filter(|batch| batch.is_ok()).count(), 3);
        let message = outcomes[2].as_ref().unwrap_err();
        assert!(message.ends_with("panicked: no twos"), "{message}");
    }
}

#[test]
fn an_error_of_the_program_names_its_record_and_follows_the_policy() {
    let texts = || InMemory(vec!["1", "two", "3", "4"]);
    let loader = |workers, on_error| {
        let numbers = texts().map(|text| text.parse::<usize>().map_err(Error::other));
        let options = DataLoaderOptions {
            on_error,
            ..options(2, workers)
        };
        DataLoader::new(numbers, options).unwrap()
    };
    for workers in [0, 2] {
        let mut stopping = loader(workers, ErrorPolicy::Stop);
        let first = stopping.next_batch().unwrap().unwrap_err().to_string();
        assert_eq!(first, "record 1: invalid digit found in string");
        assert_eq!(stopping.next_batch().unwrap().unwrap(), [3, 4]);

        let mut skipping = loader(workers, ErrorPolicy::Skip);
        let kept: Vec<usize> = skipping.epoch().flat_map(Result::unwrap).collect();
        assert_eq!(kept, [1, 3, 4]);
        assert_eq!(skipping.errors().first()[0], first);
    }
}

#[test]
fn options_are_checked_and_unknown_names_refused() {
    assert!(DataLoader::new(Numbers::new(1), options(0, 0)).is_err());
    let none = DataLoaderOptions {
        prefetch_factor: 0,
        ..options(1, 1)
    };
    assert!(DataLoader::new(Numbers::new(1), none).is_err());
    let read: DataLoaderOptions =
        serde_json::from_str(r#"{"num_workers": 4, "on_error": "skip"}"#).unwrap();
    assert_eq!(
        (read.num_workers, read.on_error, read.batch_size),
        (4, ErrorPolicy::Skip, 1)
    );
    assert!(serde_json::from_str::<DataLoaderOptions>(r#"{"workers": 4}"#).is_err());
}

#[test]
fn a_collate_function_may_depend_on_the_epoch_and_the_index_with_any_number_of_workers() {
    let batches_of = |num_workers| {
        let numbers = Numbers {
            broken: vec![3],
            ..Numbers::new(10)
        };
        let options = DataLoaderOptions {
            shuffle: true,
            on_error: ErrorPolicy::Skip,
            ..options(4, num_workers)
        };
        let batches = options.batches(10).unwrap();
        let collate = |epoch: u64, records: Vec<(usize, usize)>| {
            assert!(records.iter().all(|(index, item)| index == item));
            Ok((epoch, records))
        };
        let mut loader =
            DataLoader::with_indices(numbers, batches, collate, options.workers()).unwrap();
        let mut all = Vec::new();
        for epoch in 0..3 {
            for batch in loader.epoch() {
                let (own, records) = batch.unwrap();
                assert_eq!(own, epoch);
                all.push(records);
            }
        }
        all
    };
    let alone = batches_of(0);
    assert_eq!(alone, batches_of(3));
    let records: Vec<usize> = alone.concat().into_iter().map(|(index, _)| index).collect();
    assert_eq!(records.len(), 27);
    assert!(!records.contains(&3));
}

#[test]
fn a_state_counts_the_records_of_the_batches_that_the_loader_was_given() {
    let loader = |batches: Box<dyn BatchSampler>| {
        DataLoader::with(Numbers::new(120), batches, Ok, WorkerOptions::default()).unwrap()
    };
    let sampled = |batch_size, shard| {
        let order = SequentialSampler::new(120);
        SampledBatches::new(order, batch_size, false, shard).unwrap()
    };
    let shard = Shard::new(1, 3, LastShare::Repeat).unwrap();
    let all = sampled(4, Shard::default());
    for batches in [
        Box::new(sampled(4, shard)) as Box<dyn BatchSampler>,
        Box::new(ShardedBatches::new(all, shard)),
    ] {
        let mut one_of_three = loader(batches);
        for _ in 0..5 {
            one_of_three.next_batch().unwrap().unwrap();
        }
        let state = one_of_three.state_dict();
        assert_eq!(state.joint_batch_size, 12);
        let mut alone = loader(Box::new(sampled(10, Shard::default())));
        alone.load_state_dict(state).unwrap();
        assert_eq!(alone.next_batch().unwrap().unwrap()[0], 60);
    }
    // Batches of a number of tokens have no number of records.
    let budget = TokenBudgetBatches::new(vec![1; 120], TokenBudgetOptions::default()).unwrap();
    assert_eq!(loader(Box::new(budget)).state_dict().joint_batch_size, 0);
}

#[test]
fn batches_of_a_number_of_tokens_resume_at_the_same_batch_with_another_number_of_processes() {
    const RECORDS: usize = 500;
    let lengths: Vec<u32> = (0..RECORDS as u32).map(|i| 1 + i * 7919 % 97).collect();
    let make = |rank, world_size| {
        let options = TokenBudgetOptions {
            max_tokens: 200,
            window: 64,
            ..TokenBudgetOptions::default()
        };
        let all = TokenBudgetBatches::new(lengths.clone(), options).unwrap();
        let shard = Shard::new(rank, world_size, LastShare::Drop).unwrap();
        let batches: Box<dyn BatchSampler> = Box::new(ShardedBatches::new(all, shard));
        DataLoader::with(Numbers::new(RECORDS), batches, Ok, WorkerOptions::default()).unwrap()
    };
    let rest = |loader: &mut DataLoader<Vec<usize>>| -> Vec<Vec<usize>> {
        loader.epoch().map(Result::unwrap).collect()
    };
    let whole = rest(&mut make(0, 1));
    for (before, now, steps) in [(2, 1, 10), (1, 2, 10), (2, 3, 9), (1, 2, 11), (2, 2, 7)] {
        let mut first = make(0, before);
        for _ in 0..steps {
            first.next_batch().unwrap().unwrap();
        }
        let state = serde_json::to_string(&first.state_dict()).unwrap();
        // Inside a step: from its beginning, so that no batch is left out.
        let done = before * steps / now * now;
        for rank in 0..now {
            let mut loader = make(rank, now);
            loader
                .load_state_dict(serde_json::from_str(&state).unwrap())
                .unwrap();
            let steps = whole[done..].chunks_exact(now);
            let expected: Vec<_> = steps.map(|step| step[rank].clone()).collect();
            assert_eq!(rest(&mut loader), expected, "{before} to {now}");
        }
    }
    // An epoch that has ended stays so, whatever was dropped at its end.
    let mut first = make(0, 3);
    while first.state_dict().next_batch < first.len() {
        first.next_batch().unwrap().unwrap();
    }
    let mut alone = make(0, 1);
    alone.load_state_dict(first.state_dict()).unwrap();
    assert!(alone.next_batch().is_none());
}
