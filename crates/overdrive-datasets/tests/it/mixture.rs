//! Mixtures: shares, epochs of each source, stages, and the same order however it is read.

use overdrive_datasets::{
    BatchSampler, DataLoader, Dataset, InMemory, LastShare, LoaderState, Mixture, MixtureSampler,
    SampledBatches, Sampler, Shard, ShardedBatches, WorkerOptions,
};
use proptest::prelude::*;

/// The number of consecutive records in which the shares are exact.
const PATTERN: usize = 1 << 14;

fn mixture(lens: &[usize]) -> Mixture<InMemory<(usize, usize)>> {
    let sources = lens.iter().enumerate().map(|(number, &len)| {
        let records = (0..len).map(|record| (number, record)).collect();
        (format!("source {number}"), InMemory(records))
    });
    Mixture::new(sources.collect()).unwrap()
}

/// Returns the first records of a run.
fn run(
    mixture: &Mixture<InMemory<(usize, usize)>>,
    order: &MixtureSampler,
    records: usize,
) -> Vec<(usize, usize)> {
    let len = order.len();
    (0..records)
        .map(|at| {
            mixture
                .get(order.index((at / len) as u64, at % len))
                .unwrap()
        })
        .collect()
}

fn counts(records: &[(usize, usize)], sources: usize) -> Vec<usize> {
    let of = |number| records.iter().filter(|record| record.0 == number).count();
    (0..sources).map(of).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(12))]

    #[test]
    fn shares_are_the_weights_and_every_source_is_read_once_an_epoch(
        sources in prop::collection::vec((1_usize..400, 1_u32..50), 1..5),
        seed: u64,
    ) {
        let (lens, weights): (Vec<usize>, Vec<u32>) = sources.into_iter().unzip();
        let mixture = mixture(&lens);
        let shares: Vec<f64> = weights.iter().copied().map(f64::from).collect();
        let order = mixture.sampler(&shares, seed).unwrap();
        let all = run(&mixture, &order, 2 * PATTERN);
        let sum: f64 = shares.iter().sum();
        for part in all.chunks(PATTERN) {
            for (count, share) in counts(part, lens.len()).into_iter().zip(&shares) {
                let expected = share / sum * PATTERN as f64;
                prop_assert!((count as f64 - expected).abs() < lens.len() as f64 + 1.0);
            }
        }
        for (number, &len) in lens.iter().enumerate() {
            let own = all.iter().filter(|record| record.0 == number);
            let own: Vec<usize> = own.map(|record| record.1).collect();
            for epoch in own.chunks_exact(len) {
                let mut sorted = epoch.to_vec();
                sorted.sort_unstable();
                prop_assert_eq!(sorted, (0..len).collect::<Vec<_>>());
            }
        }
        // The counted passes are those of the records that were read.
        let position = 2 * PATTERN - 7;
        let len = order.len();
        let state = LoaderState {
            epoch: (position / len) as u64,
            next_batch: position % len,
            joint_batch_size: 1,
            ..LoaderState::default()
        };
        let epochs = order.source_epochs(&state);
        let read = counts(&all[..position], lens.len());
        for ((name, passes), (number, (read, len))) in
            epochs.into_iter().zip(read.iter().zip(&lens).enumerate())
        {
            prop_assert_eq!(name, format!("source {number}"));
            prop_assert_eq!(passes, *read as f64 / *len as f64);
        }
    }

    #[test]
    fn processes_share_the_order_of_one(
        world_size in 1_usize..5, batch_size in 1_usize..4, seed: u64, epoch in 0_u64..3,
    ) {
        let mixture = mixture(&[30, 10, 5]);
        let order = mixture.sampler(&[1.0, 1.0, 2.0], seed).unwrap();
        let batches = |shard| {
            let all = SampledBatches::new(order.clone(), batch_size, true, Shard::default()).unwrap();
            ShardedBatches::new(all, shard)
        };
        let alone = batches(Shard::default());
        let each = |rank| batches(Shard::new(rank, world_size, LastShare::Drop).unwrap());
        for number in 0..alone.len(epoch) / world_size {
            for rank in 0..world_size {
                let joint = alone.batch(epoch, number * world_size + rank);
                prop_assert_eq!(each(rank).batch(epoch, number), joint);
            }
        }
    }
}

#[test]
fn a_stage_changes_the_weights_from_its_start_on_and_epochs_go_on() {
    let lens = [500, 80, 40];
    let mixture = mixture(&lens);
    let first = mixture.sampler(&[1.0, 1.0, 0.0], 3).unwrap();
    let start = PATTERN + 100;
    let staged = first.clone().with_stage(start, &[0.0, 1.0, 3.0]).unwrap();
    let all = run(&mixture, &staged, start + PATTERN);
    assert_eq!(all[..start], run(&mixture, &first, start));
    assert_eq!(counts(&all[..PATTERN], 3), [PATTERN / 2, PATTERN / 2, 0]);
    assert_eq!(counts(&all[start..], 3), [0, PATTERN / 4, PATTERN / 4 * 3]);
    // The second source was within an epoch when the weights changed, and ends it first.
    let own = all.iter().filter(|record| record.0 == 1);
    let own: Vec<usize> = own.map(|record| record.1).collect();
    for epoch in own.chunks_exact(lens[1]) {
        let mut sorted = epoch.to_vec();
        sorted.sort_unstable();
        assert_eq!(sorted, (0..lens[1]).collect::<Vec<_>>());
    }
    let error = staged.with_stage(start, &[1.0; 3]).unwrap_err().to_string();
    assert!(
        error.contains("`start` is 16484; it must be above 16484"),
        "{error}"
    );
}

#[test]
fn a_loader_resumes_anywhere_with_any_number_of_workers() {
    let order = mixture(&[50, 20]).sampler(&[0.3, 0.7], 9).unwrap();
    let loader = |num_workers| {
        let mixture = mixture(&[50, 20]);
        let batches = SampledBatches::new(order.clone(), 3, false, Shard::default()).unwrap();
        let options = WorkerOptions {
            num_workers,
            ..WorkerOptions::default()
        };
        DataLoader::with(mixture, batches, Ok, options).unwrap()
    };
    let take = |loader: &mut DataLoader<_>, count| -> Vec<Vec<(usize, usize)>> {
        let batches = std::iter::repeat_with(|| loader.next_batch()).flatten();
        batches.take(count).map(Result::unwrap).collect()
    };
    let expected = take(&mut loader(0), 60);
    for (stop, num_workers) in [(1, 2), (24, 0), (25, 3), (47, 1)] {
        let mut first = loader(2);
        assert_eq!(take(&mut first, stop), expected[..stop]);
        let state = first.state_dict();
        let mut second = loader(num_workers);
        second.load_state_dict(state).unwrap();
        // Of 70 records, a batch has 3, and the last one of an epoch has 1.
        let records = stop / 24 * 70 + stop % 24 * 3;
        let passes = order.source_epochs(&second.state_dict());
        let counted: f64 = passes
            .iter()
            .zip([50.0, 20.0])
            .map(|((_, passes), len)| passes * len)
            .sum();
        assert!(
            (counted - records as f64).abs() < 1e-9,
            "{counted} of {records}"
        );
        assert_eq!(take(&mut second, 60 - stop), expected[stop..]);
    }
}

#[test]
fn weights_and_sources_that_make_no_mixture_are_refused() {
    let empty = Mixture::new(vec![("a".to_owned(), InMemory(Vec::<u8>::new()))]);
    let error = empty.unwrap_err().to_string();
    assert!(error.contains("0 records of \"a\""), "{error}");
    assert!(Mixture::new(Vec::<(String, InMemory<u8>)>::new()).is_err());
    let mixture = mixture(&[3, 4]);
    for weights in [
        &[1.0][..],
        &[0.0, 0.0],
        &[1.0, -1.0],
        &[1.0, f64::NAN],
        &[1.0, 1e-9],
    ] {
        let error = mixture.sampler(weights, 0).unwrap_err().to_string();
        assert!(error.contains("it must be 2 finite weights"), "{error}");
    }
    assert_eq!(mixture.get(6).unwrap(), (1, 3));
    assert!(mixture.get(7).is_err());
}
