use std::collections::HashMap;

use proptest::prelude::*;

use super::*;

/// Blocks that are only counted: nothing is shared.
struct Pool {
    total: usize,
    block_size: usize,
    texts: HashMap<u32, usize>,
    next: u32,
}

impl Pool {
    fn new(total: usize, block_size: usize) -> Pool {
        Pool {
            total,
            block_size,
            texts: HashMap::new(),
            next: 0,
        }
    }

    fn take(&mut self, id: u32, tokens: usize) {
        assert!(
            self.needed(id, tokens) <= self.free(),
            "more blocks planned than free"
        );
        *self.texts.get_mut(&id).unwrap() += tokens;
    }
}

impl Blocks for Pool {
    type Id = u32;

    fn add(&mut self, _: &[i64]) -> Result<(u32, usize)> {
        self.next += 1;
        self.texts.insert(self.next, 0);
        Ok((self.next, 0))
    }

    fn fork(&mut self, id: u32) -> Result<u32> {
        let (copy, _) = self.add(&[])?;
        let tokens = self.texts[&id];
        self.take(copy, tokens);
        Ok(copy)
    }

    fn release(&mut self, id: u32) -> Result<()> {
        self.texts.remove(&id).expect("released once");
        Ok(())
    }

    fn needed(&self, id: u32, new: usize) -> usize {
        let held = self.texts[&id];
        (held + new).div_ceil(self.block_size) - held.div_ceil(self.block_size)
    }

    fn free(&self) -> usize {
        let used: usize = self
            .texts
            .values()
            .map(|n| n.div_ceil(self.block_size))
            .sum();
        self.total - used
    }
}

/// A text of a trace.
#[derive(Debug, Clone)]
struct Text {
    /// Steps after the one before.
    pause: usize,
    prompt: usize,
    new: usize,
    /// Cancelled in this step after its arrival.
    cancel: Option<usize>,
}

fn text(longest: usize) -> impl Strategy<Value = Text> {
    let cancel = prop_oneof![4 => Just(None), 1 => (0usize..40).prop_map(Some)];
    (0usize..4, 1..=longest / 2, 1..=longest / 2, cancel).prop_map(
        |(pause, prompt, new, cancel)| Text {
            pause,
            prompt,
            new,
            cancel,
        },
    )
}

/// Runs a trace, and checks every rule at every step.
fn run(trace: &[Text], limits: Limits, total: usize, block_size: usize) -> Counts {
    let mut pool = Pool::new(total, block_size);
    let mut scheduler: Scheduler<u32, usize> = Scheduler::new(limits);
    let mut arrivals = Vec::new();
    let mut at = 0;
    for (number, text) in trace.iter().enumerate() {
        at += text.pause;
        arrivals.push((at, number));
    }
    let work: usize = trace.iter().map(|text| text.prompt + text.new).sum();
    let (mut step, mut ended) = (0, 0);
    while ended < trace.len() {
        for &(_, number) in arrivals.iter().filter(|(at, _)| *at == step) {
            let text = &trace[number];
            // The data is the length at which it ends.
            let length = text.prompt + text.new;
            scheduler.submit((number as u64, 0), vec![1; text.prompt], length);
        }
        let cancelled = |number: u64| {
            let (at, text) = (arrivals[number as usize].0, &trace[number as usize]);
            text.cancel.is_some_and(|after| at + after == step)
        };
        let gone = scheduler.settle(&mut pool, |job| cancelled(job.arrival.0));
        ended += gone.unwrap().len();

        let parts = scheduler.schedule(&mut pool).unwrap();
        let tokens: usize = parts.iter().map(|part| part.end - part.start).sum();
        assert!(tokens <= limits.tokens && parts.len() <= limits.seats);
        assert!(scheduler.running().len() <= limits.seats);
        assert_eq!(parts.is_empty(), scheduler.is_empty());

        // First come, first served: whoever runs has come before whoever waits, and the first of all
        // always goes on.
        let running: Vec<_> = scheduler.running().iter().map(|job| job.arrival).collect();
        assert!(running.is_sorted());
        let waiting: Vec<_> = scheduler.waiting.iter().map(|job| job.arrival).collect();
        assert!(waiting.is_sorted());
        if let (Some(last), Some(first)) = (running.last(), waiting.first()) {
            assert!(last < first, "{last:?} runs before {first:?}");
        }
        assert!(parts.first().is_none_or(|part| part.job == 0));
        // Every text that wants one token has it.
        for (index, job) in scheduler.running().iter().enumerate() {
            let has = parts.iter().any(|part| part.job == index);
            assert!(has || !job.is_decoding(), "a decoding text was left out");
        }
        for part in &parts {
            pool.take(scheduler.place(part.job).unwrap(), part.end - part.start);
        }
        scheduler.computed(&parts);
        for part in &parts {
            let job = scheduler.job(part.job).unwrap();
            if part.end == job.tokens.len() {
                job.tokens.push(1);
            }
        }
        let gone = scheduler.settle(&mut pool, |job| job.tokens.len() >= job.data);
        ended += gone.unwrap().len();
        step += 1;
        // Each step computes a token of the first text at least; what is lost is computed again only
        // for texts that an earlier one displaced.
        assert!(
            step <= at + 2 + work * (1 + trace.len()),
            "no end after {step} steps"
        );
    }
    assert!(pool.texts.is_empty(), "texts left: {:?}", pool.texts);
    assert_eq!(pool.free(), total);
    scheduler.counts
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, ..ProptestConfig::default() })]

    #[test]
    fn every_text_ends_in_order_of_arrival_within_the_bounds(
        trace in prop::collection::vec(text(64), 1..40),
        seats in 1usize..12,
        extra in 0usize..40,
        reserve in 0usize..3,
        spare in 0usize..24,
        block_size in 1usize..9,
    ) {
        // The longest text fits alone, and often little more does.
        let total = 64usize.div_ceil(block_size) + spare;
        let limits = Limits { seats, tokens: seats + extra, reserve };
        run(&trace, limits, total, block_size);
    }
}

#[test]
fn a_full_cache_preempts_the_latest_and_computes_it_again() {
    let text = |prompt, new| Text {
        pause: 0,
        prompt,
        new,
        cancel: None,
    };
    // Two texts of 8 blocks in 10 blocks of 4.
    let limits = Limits {
        seats: 4,
        tokens: 64,
        reserve: 0,
    };
    let counts = run(&[text(8, 24), text(8, 24)], limits, 10, 4);
    assert_eq!(counts.preemptions, 1);
    // The second had as many tokens as the first when blocks ran out: five blocks each.
    assert_eq!(counts.recomputed_tokens, 20);
}

#[test]
fn a_long_prompt_is_read_in_parts_beside_the_tokens_of_others() {
    let mut pool = Pool::new(100, 4);
    let limits = Limits {
        seats: 4,
        tokens: 8,
        reserve: 0,
    };
    let mut scheduler: Scheduler<u32, ()> = Scheduler::new(limits);
    scheduler.submit((0, 0), vec![1; 3], ());
    scheduler.submit((1, 0), vec![1; 20], ());
    let mut steps = Vec::new();
    for _ in 0..4 {
        let parts = scheduler.schedule(&mut pool).unwrap();
        for part in &parts {
            pool.take(scheduler.place(part.job).unwrap(), part.end - part.start);
        }
        scheduler.computed(&parts);
        steps.push(
            parts
                .iter()
                .map(|p| (p.job, p.start, p.end))
                .collect::<Vec<_>>(),
        );
        for part in parts {
            let job = scheduler.job(part.job).unwrap();
            if part.end == job.tokens.len() {
                job.tokens.push(1);
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
fn a_copy_shares_what_is_read_and_waits_where_there_is_no_seat() {
    let mut pool = Pool::new(100, 4);
    let limits = Limits {
        seats: 2,
        tokens: 8,
        reserve: 0,
    };
    let mut scheduler: Scheduler<u32, &str> = Scheduler::new(limits);
    scheduler.submit((0, 0), vec![1; 6], "first");
    let parts = scheduler.schedule(&mut pool).unwrap();
    pool.take(scheduler.place(0).unwrap(), 6);
    scheduler.computed(&parts);
    scheduler.fork(0, 1, 7, "second", &mut pool).unwrap();
    scheduler.fork(0, 2, 8, "third", &mut pool).unwrap();
    scheduler.job(0).unwrap().tokens.push(9);
    scheduler.settle(&mut pool, |_| false).unwrap();

    let running: Vec<_> = scheduler
        .running()
        .iter()
        .map(|job| (job.data, job.computed))
        .collect();
    assert_eq!(running, [("first", 6), ("second", 6)]);
    assert_eq!(scheduler.waiting(), 1);
    let gone = scheduler
        .settle(&mut pool, |job| job.data == "first")
        .unwrap();
    assert_eq!(gone[0].tokens.last(), Some(&9));
    let parts = scheduler.schedule(&mut pool).unwrap();
    let lengths: Vec<_> = parts.iter().map(|part| part.end - part.start).collect();
    assert_eq!(
        lengths,
        [1, 7],
        "the third reads the prompt again, and its own first token"
    );
    assert_eq!(scheduler.running()[1].tokens.last(), Some(&8));
}
