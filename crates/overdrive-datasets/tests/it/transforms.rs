//! Datasets made of other datasets.

use std::sync::atomic::{AtomicUsize, Ordering};

use overdrive_datasets::{
    CacheOptions, Dataset, DatasetExt, Error, ErrorPolicy, Exhausted, Interleave, LastShare,
    MapCache, RecordNumber, Result, Sha256Digest, Shard,
};
use proptest::prelude::*;

/// A dataset of the numbers from `first` on; if `broken` is `true`, those divisible by 100 cannot be read.
#[derive(Debug, Clone, Copy)]
struct Numbers {
    first: usize,
    len: usize,
    broken: bool,
}

fn numbers(len: usize) -> Numbers {
    Numbers {
        first: 0,
        len,
        broken: false,
    }
}

impl Dataset for Numbers {
    type Item = usize;

    fn len(&self) -> usize {
        self.len
    }

    fn get(&self, index: usize) -> Result<usize> {
        let number = self.first + index;
        if index >= self.len || self.broken && number.is_multiple_of(100) {
            return Err(Error::InvalidRecord {
                path: "numbers".into(),
                number: RecordNumber::Record(index),
                offset: 0,
                problem: "it cannot be read".to_owned(),
            });
        }
        Ok(number)
    }
}

fn all<D: Dataset>(dataset: &D) -> Vec<D::Item> {
    assert!(dataset.get(dataset.len()).is_err());
    (0..dataset.len())
        .map(|i| dataset.get(i).unwrap())
        .collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn the_shards_of_a_dataset_have_each_record_once(
        len in 0_usize..300, count in 1_usize..7, at in 0_usize..400, share in 0.0_f64..=1.0, seed in any::<u64>(),
    ) {
        let whole: Vec<usize> = (0..len).collect();
        let mut records: Vec<usize> =
            (0..count).flat_map(|part| all(&numbers(len).shard(part, count).unwrap())).collect();
        records.sort_unstable();
        prop_assert_eq!(&records, &whole);

        prop_assert_eq!(&[all(&numbers(len).take(at)), all(&numbers(len).skip(at))].concat(), &whole);

        let split = numbers(len).split(share, seed).unwrap();
        prop_assert_eq!(split.test.len(), (len as f64 * share).round() as usize);
        let mut records = [all(&split.test), all(&split.train)].concat();
        records.sort_unstable();
        prop_assert_eq!(&records, &whole);

        let mut records = all(&numbers(len).shuffle(seed));
        records.sort_unstable();
        prop_assert_eq!(&records, &whole);
    }

    #[test]
    fn a_filter_keeps_what_a_filter_of_a_list_keeps(len in 0_usize..5000, divisor in 1_usize..9) {
        let kept = numbers(len).filter(|number| number % divisor == 0).unwrap();
        prop_assert_eq!(all(&kept), (0..len).filter(|number| number % divisor == 0).collect::<Vec<_>>());
    }

    #[test]
    fn a_mixture_has_the_weights_and_the_orders_of_its_datasets(
        lens in prop::collection::vec(1_usize..40_000, 1..4), weights in prop::collection::vec(0.1_f64..10.0, 3), seed in any::<u64>(),
    ) {
        let datasets: Vec<Numbers> = lens
            .iter()
            .enumerate()
            .map(|(i, &len)| Numbers { first: i * 1_000_000, len, broken: false })
            .collect();
        let weights = &weights[..lens.len()];
        let sum: f64 = weights.iter().sum();
        for until in [Exhausted::First, Exhausted::All] {
            let mixture = Interleave::new(datasets.clone(), weights, seed, until).unwrap();
            let mut given = vec![0; lens.len()];
            for index in 0..mixture.len().min(50_000) {
                let record = mixture.get(index).unwrap();
                let dataset = record / 1_000_000;
                // In their order, from the first one again at the end.
                prop_assert_eq!(record % 1_000_000, given[dataset] % lens[dataset]);
                given[dataset] += 1;
            }
            if mixture.len() <= 50_000 {
                let done = given.iter().zip(&lens).filter(|(given, len)| given >= len).count();
                let enough = match until {
                    Exhausted::First => done >= 1,
                    Exhausted::All => done == lens.len(),
                };
                prop_assert!(enough);
                if until == Exhausted::First {
                    prop_assert!(given.iter().zip(&lens).all(|(given, len)| given <= len));
                }
            }
            // A whole pattern has the weights to one place in 16,384.
            if mixture.len() >= 1 << 14 {
                let mut counts = vec![0; lens.len()];
                (0..1 << 14).for_each(|place| counts[mixture.source(place).0] += 1);
                for (count, weight) in counts.iter().zip(weights) {
                    let share = f64::from(*count) / f64::from(1 << 14);
                    prop_assert!((share - weight / sum).abs() < 2.0 / f64::from(1 << 14));
                }
            }
        }
    }
}

#[test]
fn datasets_follow_one_another_and_are_mapped() {
    let second = Numbers {
        first: 50,
        len: 2,
        broken: false,
    };
    let both = numbers(3).concat(second).map(|number| Ok(number * 10));
    assert_eq!(all(&both), [0, 10, 20, 500, 510]);
    assert!(numbers(3).shard(3, 3).is_err());
    let none = numbers(3).shard(0, 0).unwrap_err().to_string();
    assert!(none.starts_with("`count` is 0"), "{none}");
    let none = Shard::new(0, 0, LastShare::Repeat).unwrap_err().to_string();
    assert!(none.starts_with("`world_size` is 0"), "{none}");
    assert!(numbers(3).split(1.5, 0).is_err());
    assert!(numbers(3).split(f64::NAN, 0).is_err());
}

#[test]
fn endless_datasets_are_mixed_concatenated_and_sharded() {
    let endless = || numbers(usize::MAX);
    for until in [Exhausted::First, Exhausted::All] {
        let mixture = Interleave::new(vec![endless(), endless()], &[3.0, 1.0], 1, until).unwrap();
        assert_eq!(mixture.len(), usize::MAX);
        assert!(mixture.get(1 << 20).is_ok());
    }
    let mixture = Interleave::new(
        vec![endless(), numbers(9)],
        &[1.0, 1.0],
        1,
        Exhausted::First,
    );
    assert!((9..1 << 14).contains(&mixture.unwrap().len()));
    let both = numbers(3).concat(endless());
    assert_eq!((both.len(), both.get(5).unwrap()), (usize::MAX, 2));
    for (rank, share) in [(0, usize::MAX / 2 + 1), (1, usize::MAX / 2)] {
        let shard = Shard::new(rank, 2, LastShare::Uneven).unwrap();
        assert_eq!(shard.len(usize::MAX), share);
        assert_eq!(shard.len(3), 2 - rank);
        assert_eq!(shard.len(0), 0);
    }
}

#[test]
fn other_seeds_are_other_splits_and_the_same_seed_the_same() {
    let test = |seed| all(&numbers(1000).split(0.1, seed).unwrap().test);
    assert_eq!(test(1), test(1));
    assert_ne!(test(1), test(2));
    assert_ne!(all(&numbers(100).shuffle(1)), (0..100).collect::<Vec<_>>());
}

#[test]
fn an_unreadable_record_stops_a_filter_and_follows_the_policy_elsewhere() {
    let broken = Numbers {
        first: 1,
        len: 250,
        broken: true,
    };
    assert!(broken.filter(|_| true).is_err());
    let mut iter = broken.iter(ErrorPolicy::Skip);
    assert_eq!(iter.by_ref().map(Result::unwrap).count(), 248);
    assert_eq!(iter.errors().count(), 2);
    let mut iter = broken.iter(ErrorPolicy::Stop);
    assert_eq!(iter.by_ref().filter(|record| record.is_ok()).count(), 99);
    assert!(iter.next().is_none());
    let replaced: Vec<usize> = broken
        .iter(ErrorPolicy::Replace)
        .map(Result::unwrap)
        .collect();
    assert_eq!(
        (replaced.len(), replaced[99], replaced[100]),
        (250, 101, 101)
    );
}

#[test]
fn mixtures_of_nothing_or_with_odd_weights_are_errors() {
    let mix = |datasets: Vec<Numbers>, weights: &[f64]| {
        Interleave::new(datasets, weights, 0, Exhausted::First)
    };
    assert!(mix(vec![], &[]).is_err());
    let error = mix(vec![numbers(1), numbers(0)], &[1.0, 1.0])
        .unwrap_err()
        .to_string();
    assert!(error.contains("dataset 1 is empty"), "{error}");
    for weights in [
        &[1.0][..],
        &[1.0, 0.0],
        &[1.0, -1.0],
        &[1.0, f64::NAN],
        &[f64::INFINITY, 1.0],
        &[1.0, 1e-6],
    ] {
        assert!(
            mix(vec![numbers(1), numbers(1)], weights).is_err(),
            "{weights:?}"
        );
    }
    assert!(
        numbers(5)
            .interleave([numbers(7)], &[1.0, 1.0], 0, Exhausted::All)
            .is_ok()
    );
}

#[test]
fn a_cached_map_computes_once_for_each_input_name_and_version() {
    let dir = tempfile::tempdir().unwrap();
    let calls = AtomicUsize::new(0);
    let run = |cache: MapCache<'_>, threads, factor: usize| {
        let options = CacheOptions {
            folder: Some(dir.path().to_owned()),
            threads: Some(threads),
            ..CacheOptions::default()
        };
        let function = |number: usize| {
            calls.fetch_add(1, Ordering::SeqCst);
            Ok(vec![number, number * factor])
        };
        all(&cache.map(&numbers(10_000), function, &options).unwrap())
    };
    let cache = MapCache {
        input: Sha256Digest::of(b"numbers"),
        name: "times",
        version: 1,
    };
    let first = run(cache, 3, 2);
    assert_eq!(first[4321], [4321, 8642]);
    assert_eq!(calls.load(Ordering::SeqCst), 10_000);
    assert_eq!(run(cache, 1, 2), first);
    assert_eq!(calls.load(Ordering::SeqCst), 10_000);
    assert_eq!(
        run(
            MapCache {
                version: 2,
                ..cache
            },
            1,
            3
        )[1],
        [1, 3]
    );
    assert_eq!(
        run(
            MapCache {
                name: "other",
                ..cache
            },
            2,
            4
        )[1],
        [1, 4]
    );
    assert_eq!(
        run(
            MapCache {
                input: cache.fingerprint(),
                ..cache
            },
            2,
            5
        )[1],
        [1, 5]
    );
    assert_eq!(calls.load(Ordering::SeqCst), 40_000);
}

fn cached_in(dir: &tempfile::TempDir) -> CacheOptions {
    CacheOptions {
        folder: Some(dir.path().to_owned()),
        ..CacheOptions::default()
    }
}

#[test]
fn a_cached_map_that_fails_keeps_nothing_and_one_of_other_data_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let options = cached_in(&dir);
    let cache = MapCache {
        input: Sha256Digest::UNKNOWN,
        name: "same",
        version: 1,
    };
    let broken = Numbers {
        first: 1,
        len: 200,
        broken: true,
    };
    assert!(cache.map(&broken, Ok, &options).is_err());
    assert_eq!(
        all(&cache.map(&numbers(5), Ok, &options).unwrap()),
        [0, 1, 2, 3, 4]
    );
    let error = cache
        .map(&numbers(6), Ok, &options)
        .unwrap_err()
        .to_string();
    assert!(error.contains("5 results for 6 records"), "{error}");
}

#[test]
fn a_result_that_json_cannot_hold_is_an_error_of_its_record_and_nothing_is_cached() {
    let dir = tempfile::tempdir().unwrap();
    let options = cached_in(&dir);
    let cache = MapCache {
        input: Sha256Digest::UNKNOWN,
        name: "inverse",
        version: 1,
    };
    let inverse = |number: usize| Ok(vec![12.0 / (number as f64 - 3.0)]);
    let error = cache.map(&numbers(5), inverse, &options).unwrap_err();
    let error = error.to_string();
    assert!(error.contains("record 3 "), "{error}");
    assert!(error.contains("NaN or infinity"), "{error}");
    let error = cache
        .map_batched(
            &numbers(5),
            2,
            |of| of.into_iter().map(inverse).collect(),
            &options,
        )
        .unwrap_err()
        .to_string();
    assert!(error.contains("record 2 "), "{error}");
    assert_eq!(
        all(&cache.map(&numbers(3), inverse, &options).unwrap()),
        [[-4.0], [-6.0], [-12.0]]
    );
    // Missing values and the word are no numbers.
    let cache = MapCache {
        version: 2,
        ..cache
    };
    let some = |number: usize| {
        Ok((
            Some(number).filter(|number| *number != 1),
            "null".to_owned(),
        ))
    };
    let results = cache.map(&numbers(2), some, &options).unwrap();
    let null = || "null".to_owned();
    assert_eq!(all(&results), [(Some(0), null()), (None, null())]);
}

/// Leaves out multiples of 3 and returns multiples of 5 twice.
fn uneven(numbers: Vec<usize>) -> Result<Vec<usize>> {
    let kept = numbers.into_iter().filter(|number| number % 3 != 0);
    Ok(kept
        .flat_map(|number| vec![number; if number.is_multiple_of(5) { 2 } else { 1 }])
        .collect())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn a_batched_map_has_the_results_of_all_batches_in_order(len in 0_usize..200, batch_size in 1_usize..50) {
        let expected = uneven((0..len).collect()).unwrap();
        let mapped = numbers(len).map_batched(batch_size, uneven).unwrap();
        prop_assert_eq!(all(&mapped), expected.clone());
        // In any order.
        for index in (0..mapped.len()).rev() {
            prop_assert_eq!(mapped.get(index).unwrap(), expected[index]);
        }
        let source = numbers(len);
        let iter = source.iter_batched(batch_size, uneven, ErrorPolicy::Stop).unwrap();
        prop_assert_eq!(iter.map(Result::unwrap).collect::<Vec<_>>(), expected);
    }
}

#[test]
fn batches_are_computed_when_they_are_read_and_in_order_only_once() {
    let calls = AtomicUsize::new(0);
    let sizes = |numbers: Vec<usize>| {
        calls.fetch_add(1, Ordering::SeqCst);
        Ok(vec![numbers.len()])
    };
    let source = numbers(2_500);
    let mut iter = source
        .iter_batched(1_000, sizes, ErrorPolicy::Stop)
        .unwrap();
    assert_eq!(calls.load(Ordering::SeqCst), 0);
    assert_eq!(iter.next().unwrap().unwrap(), 1_000);
    assert_eq!(calls.load(Ordering::SeqCst), 1);
    assert_eq!(iter.map(Result::unwrap).collect::<Vec<_>>(), [1_000, 500]);

    calls.store(0, Ordering::SeqCst);
    let twice = |numbers: Vec<usize>| {
        calls.fetch_add(1, Ordering::SeqCst);
        Ok([numbers.clone(), numbers].concat())
    };
    let mapped = source.map_batched(1_000, twice).unwrap();
    // Counted once, read once.
    assert_eq!((calls.load(Ordering::SeqCst), mapped.len()), (3, 5_000));
    for index in 0..mapped.len() {
        mapped.get(index).unwrap();
    }
    assert_eq!(calls.load(Ordering::SeqCst), 6);
}

#[test]
fn an_error_of_a_batched_function_names_the_records_and_follows_the_policy() {
    let refuse = |at: usize| {
        move |numbers: Vec<usize>| match numbers.contains(&at) {
            true => Err(Error::InvalidSample {
                key: at.to_string(),
                extension: "txt".to_owned(),
                problem: "it is refused".to_owned(),
            }),
            false => Ok(numbers),
        }
    };
    let error = numbers(95)
        .map_batched(10, refuse(91))
        .map(|_| ())
        .unwrap_err();
    let message = error.to_string();
    assert!(message.starts_with("records 90..95: "), "{message}");
    assert!(message.contains("it is refused"), "{message}");

    let source = numbers(95);
    let mut iter = source
        .iter_batched(10, refuse(33), ErrorPolicy::Skip)
        .unwrap();
    let kept: Vec<usize> = iter.by_ref().map(Result::unwrap).collect();
    assert_eq!(kept, (0..30).chain(40..95).collect::<Vec<_>>());
    assert!(iter.errors().first()[0].starts_with("records 30..40: "));
    let mut iter = source
        .iter_batched(10, refuse(33), ErrorPolicy::Stop)
        .unwrap();
    assert_eq!(iter.by_ref().filter(|result| result.is_ok()).count(), 30);
    assert!(iter.next().is_none());

    // A record that cannot be read is named itself, and is missing in its batch if the policy skips it.
    let broken = Numbers {
        first: 1,
        len: 150,
        broken: true,
    };
    let error = broken
        .map_batched(10, Ok)
        .map(|_| ())
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("record 99") && !error.contains("records"),
        "{error}"
    );
    let read = broken.iter_batched(10, Ok, ErrorPolicy::Skip).unwrap();
    assert_eq!(read.map(Result::unwrap).count(), 149);

    let error = numbers(5)
        .map_batched(0, Ok)
        .map(|_| ())
        .unwrap_err()
        .to_string();
    assert!(error.contains("`batch_size` is 0"), "{error}");

    // A function that returns other results is detected when a batch is read again.
    let calls = AtomicUsize::new(0);
    let fickle = |mut numbers: Vec<usize>| {
        numbers.truncate(10 - calls.fetch_add(1, Ordering::SeqCst));
        Ok(numbers)
    };
    let mapped = numbers(10).map_batched(10, fickle).unwrap();
    let error = mapped.get(0).unwrap_err().to_string();
    assert!(
        error.contains("9 results, but 10 when they were counted"),
        "{error}"
    );
}

#[test]
fn a_cached_batched_map_computes_each_batch_once_and_has_any_number_of_results() {
    let dir = tempfile::tempdir().unwrap();
    let calls = AtomicUsize::new(0);
    let run = |threads| {
        let cache = MapCache {
            input: Sha256Digest::of(b"numbers"),
            name: "uneven",
            version: 1,
        };
        let options = CacheOptions {
            folder: Some(dir.path().to_owned()),
            threads: Some(threads),
            ..CacheOptions::default()
        };
        let function = |numbers: Vec<usize>| {
            calls.fetch_add(1, Ordering::SeqCst);
            uneven(numbers)
        };
        all(&cache
            .map_batched(&numbers(10_000), 64, function, &options)
            .unwrap())
    };
    let expected = uneven((0..10_000).collect()).unwrap();
    assert_eq!(run(3), expected);
    assert_eq!(calls.load(Ordering::SeqCst), 157);
    assert_eq!(run(1), expected);
    assert_eq!(calls.load(Ordering::SeqCst), 157);
}

#[test]
fn a_batched_map_announces_the_records_of_a_batch_before_it_reads_them() {
    struct Noted(std::sync::Mutex<Vec<String>>);
    impl Noted {
        fn note(&self, call: String) {
            self.0.lock().unwrap().push(call);
        }
    }
    impl Dataset for Noted {
        type Item = usize;
        fn len(&self) -> usize {
            5
        }
        fn get(&self, index: usize) -> Result<usize> {
            self.note(format!("get {index}"));
            Ok(index)
        }
        fn prefetch(&self, indices: &[usize]) {
            self.note(format!("prefetch {indices:?}"));
        }
    }
    let source = Noted(std::sync::Mutex::default());
    let mut iter = source
        .iter_batched(3, Ok::<_, Error>, ErrorPolicy::Stop)
        .unwrap();
    assert!(iter.by_ref().all(|number| number.is_ok()));
    let expected = [
        "prefetch [0, 1, 2]",
        "get 0",
        "get 1",
        "get 2",
        "prefetch [3, 4]",
        "get 3",
        "get 4",
    ];
    assert_eq!(*source.0.lock().unwrap(), expected);
    source.0.lock().unwrap().clear();
    let mapped = (&source).map_batched(5, Ok::<_, Error>).unwrap();
    source.0.lock().unwrap().clear();
    mapped.prefetch(&[4, 1, 9]);
    assert_eq!(*source.0.lock().unwrap(), ["prefetch [0, 1, 2, 3, 4]"]);
    source.0.lock().unwrap().clear();
    assert_eq!(mapped.get(4).unwrap(), 4);
    let calls = source.0.lock().unwrap().clone();
    assert_eq!(calls[0], "prefetch [0, 1, 2, 3, 4]");
    assert_eq!(calls.len(), 6, "{calls:?}");
}
