//! Every record once an epoch, sharding is a partition, and batches keep their promises.

use overdrive_core::random::uniform_below;
use overdrive_datasets::{
    BatchSampler, Error, LastShare, LengthGroupedBatches, RandomSampler, SampledBatches, Sampler,
    SequentialSampler, Shard, ShardedBatches, TokenBudgetBatches, TokenBudgetOptions,
};
use proptest::prelude::*;

/// Returns lengths that are distributed as those of texts: many short ones and a few long ones.
fn lengths(count: usize, seed: u64) -> Vec<u32> {
    let length = |i| {
        let x = uniform_below(1000, seed, 0, i) as f64 / 1000.0;
        (8.0 * (x * 4.5).exp()) as u32
    };
    (0..count as u64).map(length).collect()
}

fn epoch<B: BatchSampler>(batches: &B, epoch: u64) -> Vec<Vec<usize>> {
    (0..batches.len(epoch))
        .map(|n| batches.batch(epoch, n))
        .collect()
}

/// Returns the batches of all processes of an epoch, one list a process.
fn all_ranks<B: BatchSampler>(
    world_size: usize,
    last: LastShare,
    number: u64,
    make: impl Fn(Shard) -> B,
) -> Vec<Vec<Vec<usize>>> {
    (0..world_size)
        .map(|rank| epoch(&make(Shard::new(rank, world_size, last).unwrap()), number))
        .collect()
}

/// Checks that the lists of the processes are equally long, together hold each record below `len`
/// at least once, and at most `extra` more.
fn check_partition(
    ranks: &[Vec<Vec<usize>>],
    len: usize,
    most: usize,
) -> Result<(), TestCaseError> {
    let counts: Vec<usize> = ranks.iter().map(Vec::len).collect();
    prop_assert!(
        counts.windows(2).all(|pair| pair[0] == pair[1]),
        "{:?}",
        counts
    );
    let mut records: Vec<usize> = ranks.iter().flatten().flatten().copied().collect();
    prop_assert!(records.len() <= most, "{} of {most}", records.len());
    records.sort_unstable();
    records.dedup();
    prop_assert_eq!(records, (0..len).collect::<Vec<_>>());
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]

    #[test]
    fn every_record_comes_once_an_epoch_and_shards_are_a_partition(
        len in 0_usize..200, batch_size in 1_usize..9, world_size in 1_usize..6, seed in any::<u64>(), number in 0_u64..3,
    ) {
        for shuffle in [false, true] {
            let sampler = || -> Box<dyn Sampler> {
                if shuffle { Box::new(RandomSampler::new(len, seed)) } else { Box::new(SequentialSampler::new(len)) }
            };
            let make = |shard| SampledBatches::new(sampler(), batch_size, false, shard).unwrap();
            let ranks = all_ranks(world_size, LastShare::Repeat, number, make);
            check_partition(&ranks, len, len.next_multiple_of(world_size))?;
            // Records, too, are equally many on all processes.
            let records = |rank: &Vec<Vec<usize>>| rank.concat().len();
            prop_assert!(ranks.iter().all(|rank| records(rank) == records(&ranks[0])));

            let ranks = all_ranks(world_size, LastShare::Drop, number, make);
            let mut records = ranks.iter().flatten().flatten().copied().collect::<Vec<_>>();
            prop_assert_eq!(records.len(), len / world_size * world_size);
            records.sort_unstable();
            records.dedup();
            prop_assert_eq!(records.len(), len / world_size * world_size);
        }
    }

    #[test]
    fn batches_grouped_by_length_hold_every_record_once(
        len in 0_usize..700, batch_size in 1_usize..9, world_size in 1_usize..4, seed in any::<u64>(), number in 0_u64..3,
    ) {
        let lengths = lengths(len, seed);
        let make = |shard| {
            let grouped = LengthGroupedBatches::new(lengths.clone(), batch_size, false, seed).unwrap();
            ShardedBatches::new(grouped, shard)
        };
        let ranks = all_ranks(world_size, LastShare::Repeat, number, make);
        check_partition(&ranks, len, len + world_size * batch_size)?;
        if let Some(first) = ranks[0].first() {
            prop_assert_eq!(lengths[first[0]], *lengths.iter().max().unwrap());
        }
    }

    #[test]
    fn batches_of_a_token_budget_keep_it_and_hold_every_record_once(
        len in 0_usize..700, window in 1_usize..300, world_size in 1_usize..4, shuffle in any::<bool>(), seed in any::<u64>(), number in 0_u64..3,
    ) {
        let lengths = lengths(len, seed);
        let options = TokenBudgetOptions { max_tokens: 800, max_records: Some(40), shuffle, window, seed };
        let make = |shard| {
            ShardedBatches::new(TokenBudgetBatches::new(lengths.clone(), options).unwrap(), shard)
        };
        let ranks = all_ranks(world_size, LastShare::Repeat, number, make);
        for batch in ranks.iter().flatten() {
            let longest = batch.iter().map(|&record| lengths[record] as usize).max().unwrap();
            prop_assert!(longest * batch.len() <= 800 && batch.len() <= 40);
        }
        // Fewer batches than processes are missing, each of at most 40.
        check_partition(&ranks, len, len + (world_size - 1) * 40)?;
    }
}

#[test]
fn drop_last_leaves_out_the_batch_that_is_not_full() {
    let batches = |drop_last| {
        SampledBatches::new(SequentialSampler::new(7), 3, drop_last, Shard::default()).unwrap()
    };
    assert_eq!(
        epoch(&batches(false), 0),
        [vec![0, 1, 2], vec![3, 4, 5], vec![6]]
    );
    assert_eq!(epoch(&batches(true), 0), [vec![0, 1, 2], vec![3, 4, 5]]);
    assert!(batches(false).batch(0, 3).is_empty());
}

#[test]
fn processes_take_the_records_that_distributed_sampler_gives_them() {
    // torch.utils.data.DistributedSampler(range(5), num_replicas=2, rank=r, shuffle=False)
    let of = |rank| {
        let shard = Shard::new(rank, 2, LastShare::Repeat).unwrap();
        epoch(
            &SampledBatches::new(SequentialSampler::new(5), 8, false, shard).unwrap(),
            0,
        )
        .concat()
    };
    assert_eq!(of(0), [0, 2, 4]);
    assert_eq!(of(1), [1, 3, 0]);
}

#[test]
fn an_evaluation_is_sharded_with_every_batch_once() {
    for (batches, world_size) in [(7, 3), (2, 4), (8, 2), (0, 2)] {
        let ranks = all_ranks(world_size, LastShare::Uneven, 0, |shard| {
            let all = SampledBatches::new(
                SequentialSampler::new(batches * 5),
                5,
                false,
                Shard::default(),
            );
            ShardedBatches::new(all.unwrap(), shard)
        });
        let mut records = ranks.concat().concat();
        records.sort_unstable();
        assert_eq!(records, (0..batches * 5).collect::<Vec<_>>());
        let counts: Vec<_> = ranks.iter().map(Vec::len).collect();
        assert!(
            counts.iter().max().unwrap() - counts.iter().min().unwrap() <= 1,
            "{counts:?}"
        );
    }
}

#[test]
fn the_batches_of_all_processes_interleave_to_those_of_one() {
    let all = || {
        let sampler = RandomSampler::new(36, 3);
        SampledBatches::new(sampler, 4, false, Shard::default()).unwrap()
    };
    let ranks = all_ranks(3, LastShare::Repeat, 1, |shard| {
        ShardedBatches::new(all(), shard)
    });
    for (number, batch) in epoch(&all(), 1).into_iter().enumerate() {
        assert_eq!(ranks[number % 3][number / 3], batch);
    }
}

#[test]
fn epochs_have_other_orders_and_the_same_epoch_the_same() {
    let sampler = RandomSampler::new(1000, 7);
    let order = |epoch| {
        (0..1000)
            .map(|place| sampler.index(epoch, place))
            .collect::<Vec<_>>()
    };
    assert_eq!(order(0), order(0));
    assert_ne!(order(0), order(1));
    let drawn = RandomSampler::with_replacement(10, 7, 10_000);
    let mut counts = [0; 10];
    (0..drawn.len()).for_each(|place| counts[drawn.index(0, place)] += 1);
    // Binomial with p = 0.1: mean 1000, standard deviation 30; five of them are allowed.
    assert!(
        counts.iter().all(|&count| (850..=1150).contains(&count)),
        "{counts:?}"
    );
}

#[test]
fn grouping_and_budgets_pad_little() {
    let lengths = lengths(20_000, 3);
    let padding = |batches: &dyn BatchSampler| {
        let (mut padded, mut real) = (0, 0);
        for number in 0..batches.len(0) {
            let batch = batches.batch(0, number);
            let batch: Vec<usize> = batch
                .iter()
                .map(|&record| lengths[record] as usize)
                .collect();
            padded += batch.iter().max().unwrap() * batch.len();
            real += batch.iter().sum::<usize>();
        }
        1.0 - real as f64 / padded as f64
    };
    let order = RandomSampler::new(20_000, 1);
    let plain = SampledBatches::new(order, 16, false, Shard::default()).unwrap();
    let grouped = LengthGroupedBatches::new(lengths.clone(), 16, false, 1).unwrap();
    let options = TokenBudgetOptions {
        max_tokens: 4096,
        ..TokenBudgetOptions::default()
    };
    let budget = TokenBudgetBatches::new(lengths.clone(), options).unwrap();
    let [plain, grouped, budget] = [padding(&plain), padding(&grouped), padding(&budget)];
    assert!(plain > 0.6, "{plain}");
    assert!(grouped < 0.06, "{grouped}");
    assert!(budget < 0.02, "{budget}");
}

#[test]
fn options_that_make_no_batches_are_errors() {
    let sampler = SequentialSampler::new(3);
    assert!(SampledBatches::new(sampler, 0, false, Shard::default()).is_err());
    assert!(
        Shard::new(2, 2, LastShare::Drop)
            .unwrap_err()
            .to_string()
            .contains("`rank` is 2; it must be below `world_size`, 2")
    );
    assert!(Shard::new(0, 0, LastShare::Drop).is_err());
    let options = |max_tokens, window| TokenBudgetOptions {
        max_tokens,
        window,
        ..TokenBudgetOptions::default()
    };
    let make = |options| TokenBudgetBatches::new(vec![5, 9], options);
    let error = make(options(8, 10)).unwrap_err();
    assert!(
        matches!(
            &error,
            Error::Common(overdrive_core::Error::InvalidOption { option, .. }) if option == "max_tokens"
        ),
        "{error}"
    );
    assert!(make(options(9, 0)).is_err());
    assert_eq!(epoch(&make(options(9, 10)).unwrap(), 0).len(), 2);
}
