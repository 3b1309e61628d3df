use std::collections::HashMap;

use proptest::prelude::*;

use super::*;

/// A pool that only counts its blocks: nothing is shared.
struct Pool {
    total: usize,
    block_size: usize,
    sequences: HashMap<u32, usize>,
    next: u32,
}

impl Pool {
    fn new(total: usize, block_size: usize) -> Pool {
        Pool {
            total,
            block_size,
            sequences: HashMap::new(),
            next: 0,
        }
    }

    fn take(&mut self, id: u32, tokens: usize) {
        assert!(
            self.needed(id, tokens) <= self.free(),
            "more blocks planned than free"
        );
        *self.sequences.get_mut(&id).unwrap() += tokens;
    }
}

impl BlockAllocator for Pool {
    type Id = u32;

    fn add(&mut self, _: u64, _: &[i64]) -> Result<(u32, usize)> {
        self.next += 1;
        self.sequences.insert(self.next, 0);
        Ok((self.next, 0))
    }

    fn fork(&mut self, id: u32) -> Result<u32> {
        let (copy, _) = self.add(0, &[])?;
        let tokens = self.sequences[&id];
        self.take(copy, tokens);
        Ok(copy)
    }

    fn release(&mut self, id: u32) -> Result<()> {
        self.sequences.remove(&id).expect("released once");
        Ok(())
    }

    fn needed(&self, id: u32, new: usize) -> usize {
        let held = self.sequences[&id];
        (held + new).div_ceil(self.block_size) - held.div_ceil(self.block_size)
    }

    fn free(&self) -> usize {
        let used: usize = self
            .sequences
            .values()
            .map(|n| n.div_ceil(self.block_size))
            .sum();
        self.total - used
    }
}

/// A sequence of a trace of requests.
#[derive(Debug, Clone)]
struct TracedSequence {
    /// The number of steps after the previous arrival.
    pause: usize,
    prompt: usize,
    new: usize,
    /// The step after its arrival in which it is cancelled.
    cancel: Option<usize>,
}

fn sequence(longest: usize) -> impl Strategy<Value = TracedSequence> {
    let cancel = prop_oneof![4 => Just(None), 1 => (0usize..40).prop_map(Some)];
    (0usize..4, 1..=longest / 2, 1..=longest / 2, cancel).prop_map(
        |(pause, prompt, new, cancel)| TracedSequence {
            pause,
            prompt,
            new,
            cancel,
        },
    )
}

/// Runs a trace, and checks every rule at every step.
fn run(trace: &[TracedSequence], limits: Limits, total: usize, block_size: usize) -> Counts {
    let mut pool = Pool::new(total, block_size);
    let mut scheduler: Scheduler<u32, usize> = Scheduler::new(limits);
    let mut arrivals = Vec::new();
    let mut at = 0;
    for (number, sequence) in trace.iter().enumerate() {
        at += sequence.pause;
        arrivals.push((at, number));
    }
    let work: usize = trace
        .iter()
        .map(|sequence| sequence.prompt + sequence.new)
        .sum();
    let (mut step, mut ended) = (0, 0);
    while ended < trace.len() {
        for &(_, number) in arrivals.iter().filter(|(at, _)| *at == step) {
            let sequence = &trace[number];
            // The data is the length at which it ends.
            let length = sequence.prompt + sequence.new;
            scheduler.submit(
                (number as u64, 0),
                0,
                (vec![1; sequence.prompt], usize::MAX),
                None,
                length,
            );
        }
        let cancelled = |number: u64| {
            let (at, sequence) = (arrivals[number as usize].0, &trace[number as usize]);
            sequence.cancel.is_some_and(|after| at + after == step)
        };
        let gone = scheduler.remove_where(&mut pool, |sequence| cancelled(sequence.arrival.0));
        ended += gone.unwrap().len();

        for (index, sequence) in scheduler.running.iter_mut().enumerate() {
            // The owner proposes no tokens beyond the end of the sequence.
            let most = sequence.data - sequence.tokens.len() - 1;
            sequence.proposed = most.min((7 * index + step) % 5);
        }
        let chunks = scheduler.schedule(&mut pool).unwrap();
        let tokens: usize = chunks.iter().map(Chunk::len).sum();
        assert!(tokens <= limits.tokens && chunks.len() <= limits.max_sequences);
        assert!(scheduler.running().len() <= limits.max_sequences);
        assert_eq!(chunks.is_empty(), scheduler.is_empty());

        // First come, first served: every running sequence arrived before every waiting one, and the
        // first of all always makes progress.
        let running: Vec<_> = scheduler
            .running()
            .iter()
            .map(|sequence| sequence.arrival)
            .collect();
        assert!(running.is_sorted());
        let waiting: Vec<_> = scheduler
            .waiting
            .iter()
            .map(|sequence| sequence.arrival)
            .collect();
        assert!(waiting.is_sorted());
        if let (Some(last), Some(first)) = (running.last(), waiting.first()) {
            assert!(last < first, "{last:?} runs before {first:?}");
        }
        assert!(chunks.first().is_none_or(|chunk| chunk.sequence == 0));
        // Every sequence that wants one token has it.
        for (index, sequence) in scheduler.running().iter().enumerate() {
            let has = chunks.iter().any(|chunk| chunk.sequence == index);
            assert!(
                has || !sequence.is_decoding(),
                "a decoding sequence was left out"
            );
        }
        for chunk in &chunks {
            pool.take(scheduler.cache_id(chunk.sequence).unwrap(), chunk.len());
        }
        scheduler.computed(&chunks);
        for chunk in &chunks {
            let id = scheduler.cache_id(chunk.sequence).unwrap();
            let sequence = scheduler.sequence(chunk.sequence).unwrap();
            assert!(chunk.proposed == 0 || chunk.end == sequence.tokens.len());
            assert!(chunk.proposed <= sequence.proposed);
            if chunk.end == sequence.tokens.len() {
                // Some of the proposed tokens are accepted, and the keys of the others dropped.
                let accepted = chunk.proposed.min(step % 3);
                sequence.tokens.extend(std::iter::repeat_n(1, accepted + 1));
                sequence.computed += accepted;
                *pool.sequences.get_mut(&id).unwrap() -= chunk.proposed - accepted;
                assert_eq!(pool.sequences[&id], sequence.computed);
            }
        }
        let gone =
            scheduler.remove_where(&mut pool, |sequence| sequence.tokens.len() >= sequence.data);
        ended += gone.unwrap().len();
        step += 1;
        // Each step computes a token of the first sequence at least; lost work is computed again only
        // for sequences that an earlier one displaced.
        assert!(
            step <= at + 2 + work * (1 + trace.len()),
            "no end after {step} steps"
        );
    }
    assert!(
        pool.sequences.is_empty(),
        "sequences left: {:?}",
        pool.sequences
    );
    assert_eq!(pool.free(), total);
    scheduler.counts
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, ..ProptestConfig::default() })]

    #[test]
    fn every_sequence_ends_in_order_of_arrival_within_the_bounds(
        trace in prop::collection::vec(sequence(64), 1..40),
        max_sequences in 1usize..12,
        extra in 0usize..40,
        reserve in 0usize..3,
        spare in 0usize..24,
        block_size in 1usize..9,
    ) {
        // The pool always holds the longest sequence alone, and often little more.
        let total = 64usize.div_ceil(block_size) + spare;
        let limits = Limits { max_sequences, tokens: max_sequences + extra, reserve };
        run(&trace, limits, total, block_size);
    }
}

#[test]
fn a_full_cache_preempts_the_latest_and_computes_it_again() {
    let sequence = |prompt, new| TracedSequence {
        pause: 0,
        prompt,
        new,
        cancel: None,
    };
    // Two sequences of 8 blocks in 10 blocks of 4.
    let limits = Limits {
        max_sequences: 4,
        tokens: 64,
        reserve: 0,
    };
    let counts = run(&[sequence(8, 24), sequence(8, 24)], limits, 10, 4);
    assert_eq!(counts.preemptions, 1);
    // The second had as many tokens as the first when blocks ran out: five blocks each.
    assert_eq!(counts.recomputed_tokens, 20);
}

#[test]
fn a_long_prompt_is_read_in_chunks_beside_the_tokens_of_others() {
    let mut pool = Pool::new(100, 4);
    let limits = Limits {
        max_sequences: 4,
        tokens: 8,
        reserve: 0,
    };
    let mut scheduler: Scheduler<u32, ()> = Scheduler::new(limits);
    scheduler.submit((0, 0), 0, (vec![1; 3], usize::MAX), None, ());
    scheduler.submit((1, 0), 0, (vec![1; 20], usize::MAX), None, ());
    let mut steps = Vec::new();
    for _ in 0..4 {
        let chunks = scheduler.schedule(&mut pool).unwrap();
        for chunk in &chunks {
            pool.take(
                scheduler.cache_id(chunk.sequence).unwrap(),
                chunk.end - chunk.start,
            );
        }
        scheduler.computed(&chunks);
        steps.push(
            chunks
                .iter()
                .map(|p| (p.sequence, p.start, p.end))
                .collect::<Vec<_>>(),
        );
        for chunk in chunks {
            let sequence = scheduler.sequence(chunk.sequence).unwrap();
            if chunk.end == sequence.tokens.len() {
                sequence.tokens.push(1);
            }
        }
    }
    assert_eq!(
        steps,
        [
            vec![(0, 0, 3), (1, 0, 5)],
            vec![(0, 3, 4), (1, 5, 12)],
            vec![(0, 4, 5), (1, 12, 19)],
            vec![(0, 5, 6), (1, 19, 20)],
        ]
    );
}

#[test]
fn a_fork_shares_blocks_and_waits_if_there_is_no_seat() {
    let mut pool = Pool::new(100, 4);
    let limits = Limits {
        max_sequences: 2,
        tokens: 8,
        reserve: 0,
    };
    let mut scheduler: Scheduler<u32, &str> = Scheduler::new(limits);
    scheduler.submit((0, 0), 0, (vec![1; 6], usize::MAX), None, "first");
    let chunks = scheduler.schedule(&mut pool).unwrap();
    pool.take(scheduler.cache_id(0).unwrap(), 6);
    scheduler.computed(&chunks);
    scheduler.fork(0, 1, 7, "second", &mut pool).unwrap();
    scheduler.fork(0, 2, 8, "third", &mut pool).unwrap();
    scheduler.sequence(0).unwrap().tokens.push(9);
    scheduler.remove_where(&mut pool, |_| false).unwrap();

    let running: Vec<_> = scheduler
        .running()
        .iter()
        .map(|sequence| (sequence.data, sequence.computed))
        .collect();
    assert_eq!(running, [("first", 6), ("second", 6)]);
    assert_eq!(scheduler.waiting(), 1);
    let gone = scheduler
        .remove_where(&mut pool, |sequence| sequence.data == "first")
        .unwrap();
    assert_eq!(gone[0].tokens.last(), Some(&9));
    let chunks = scheduler.schedule(&mut pool).unwrap();
    let lengths: Vec<_> = chunks.iter().map(|chunk| chunk.end - chunk.start).collect();
    assert_eq!(
        lengths,
        [1, 7],
        "the third reads the prompt again, and its own first token"
    );
    assert_eq!(scheduler.running()[1].tokens.last(), Some(&8));
}
