#![allow(clippy::unwrap_used, reason = "a test may panic")]

use proptest::prelude::*;

use super::{BlockTables, PreparedSequence, SequenceId};
use crate::Error;

/// Returns a hash of all given tokens, which stands for the key at the last position: that key
/// depends on all of them.
fn key(tokens: &[i64]) -> u64 {
    tokens.iter().fold(17, |sum: u64, token| {
        sum.wrapping_mul(1_000_003).wrapping_add(*token as u64 + 1)
    })
}

/// A ledger with blocks that hold the keys of the tokens, as the pool of a model does.
struct Model {
    tables: BlockTables,
    block_size: usize,
    cells: Vec<u64>,
    /// The expected sequences.
    sequences: Vec<(SequenceId, Vec<i64>)>,
}

impl Model {
    fn new(blocks: u32, block_size: usize, share: bool) -> Model {
        Model {
            tables: BlockTables::new(blocks, block_size, share),
            block_size,
            cells: vec![0; blocks as usize * block_size],
            sequences: Vec::new(),
        }
    }

    fn pick(&self, choice: usize) -> Option<usize> {
        (!self.sequences.is_empty()).then(|| choice % self.sequences.len())
    }

    fn add(&mut self, tokens: &[i64]) -> usize {
        let (id, cached) = self.tables.add(0, tokens);
        assert!(cached < tokens.len().max(1) && cached % self.block_size == 0);
        self.sequences.push((id, tokens[..cached].to_vec()));
        cached
    }

    /// Runs a step as a model does: copies blocks, then writes keys, whether or not the step is committed.
    fn run(&mut self, prepared: &[PreparedSequence]) {
        let size = self.block_size;
        for new in prepared {
            if let Some((from, to)) = new.copy {
                let (from, to) = (from as usize * size, to as usize * size);
                self.cells.copy_within(from..from + size, to);
            }
        }
        for new in prepared {
            let mut sequence = self.tables.tokens(new.id).unwrap().to_vec();
            for token in &new.tokens {
                let cell = new.table[sequence.len() / size] as usize * size + sequence.len() % size;
                sequence.push(*token);
                self.cells[cell] = key(&sequence);
            }
        }
    }

    fn step(&mut self, steps: &[(usize, Vec<i64>)], commit: bool) -> crate::Result<()> {
        let named: Vec<(SequenceId, &[i64])> = steps
            .iter()
            .map(|(sequence, tokens)| (self.sequences[*sequence].0, tokens.as_slice()))
            .collect();
        let (free, evictable) = (self.tables.available(), self.tables.evictable());
        let needed: usize = named
            .iter()
            .map(|(id, tokens)| self.tables.blocks_needed(*id, tokens.len()).unwrap())
            .sum();
        let prepared = match self.tables.prepare(&named) {
            Ok(prepared) => prepared,
            Err(error) => {
                assert_eq!(
                    (free, evictable),
                    (self.tables.available(), self.tables.evictable())
                );
                match error {
                    Error::OutOfBlocks { .. } => assert!(needed > free),
                    _ => assert!(matches!(error, Error::SequenceTwice { .. })),
                }
                return Err(error);
            }
        };
        assert_eq!(self.tables.available(), free - needed);
        self.run(&prepared);
        if commit {
            self.tables.commit(prepared);
            for (sequence, tokens) in steps {
                self.sequences[*sequence].1.extend(tokens);
            }
        } else {
            self.tables.cancel(prepared);
            assert_eq!(self.tables.available(), free);
        }
        Ok(())
    }

    fn check(&self) {
        self.tables.audit().unwrap();
        assert_eq!(self.tables.sequences(), self.sequences.len());
        for (id, tokens) in &self.sequences {
            assert_eq!(self.tables.tokens(*id).unwrap(), tokens);
            let table = self.tables.table(*id).unwrap();
            for at in 0..tokens.len() {
                let cell = table[at / self.block_size] as usize * self.block_size;
                let held = self.cells[cell + at % self.block_size];
                assert_eq!(held, key(&tokens[..=at]), "token {at} of sequence {id}");
            }
        }
    }
}

#[derive(Debug, Clone)]
enum Action {
    Add(Vec<i64>),
    Step(Vec<(usize, Vec<i64>)>, bool),
    Fork(usize),
    Truncate(usize, usize),
    Release(usize),
    Forget,
}

fn actions() -> impl Strategy<Value = Vec<Action>> {
    // With only two different tokens, sequences often share prefixes.
    let tokens = |most| prop::collection::vec(0..2_i64, 0..most);
    let new = (any::<usize>(), tokens(9_usize));
    let action = prop_oneof![
        3 => tokens(14).prop_map(Action::Add),
        8 => (prop::collection::vec(new, 1..5), prop::bool::weighted(0.8))
            .prop_map(|(steps, commit)| Action::Step(steps, commit)),
        2 => any::<usize>().prop_map(Action::Fork),
        2 => (any::<usize>(), any::<usize>()).prop_map(|(sequence, len)| Action::Truncate(sequence, len)),
        2 => any::<usize>().prop_map(Action::Release),
        1 => Just(Action::Forget),
    ];
    prop::collection::vec(action, 1..60)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1_000, ..ProptestConfig::default() })]

    #[test]
    fn no_order_of_actions_loses_a_block_or_serves_a_wrong_key(
        actions in actions(),
        blocks in 1..24_u32,
        block_size in 1..5_usize,
        share in prop::bool::weighted(0.9),
    ) {
        let mut model = Model::new(blocks, block_size, share);
        for action in actions {
            match action {
                Action::Add(tokens) => {
                    let cached = model.add(&tokens);
                    prop_assert!(share || cached == 0);
                }
                Action::Step(steps, commit) => {
                    let named: Vec<_> = steps
                        .into_iter()
                        .filter_map(|(sequence, tokens)| Some((model.pick(sequence)?, tokens)))
                        .collect();
                    let mut sequences: Vec<_> = named.iter().map(|(sequence, _)| *sequence).collect();
                    sequences.sort_unstable();
                    let twice = sequences.windows(2).any(|pair| pair[0] == pair[1]);
                    let result = model.step(&named, commit);
                    prop_assert!(!twice || result.is_err());
                }
                Action::Fork(sequence) => {
                    if let Some(sequence) = model.pick(sequence) {
                        let (id, tokens) = model.sequences[sequence].clone();
                        let fork = model.tables.fork(id).unwrap();
                        model.sequences.push((fork, tokens));
                    }
                }
                Action::Truncate(sequence, len) => {
                    if let Some(sequence) = model.pick(sequence) {
                        let (id, tokens) = &mut model.sequences[sequence];
                        let len = len % (tokens.len() + 1);
                        model.tables.truncate(*id, len).unwrap();
                        tokens.truncate(len);
                    }
                }
                Action::Release(sequence) => {
                    if let Some(sequence) = model.pick(sequence) {
                        let (id, _) = model.sequences.swap_remove(sequence);
                        model.tables.release(id).unwrap();
                        let twice = model.tables.release(id);
                        assert!(matches!(twice, Err(Error::NoSuchSequence { .. })));
                    }
                }
                Action::Forget => {
                    model.tables.forget_prefixes();
                    prop_assert_eq!(model.tables.evictable(), 0);
                }
            }
            model.check();
        }
        model.tables.release_all();
        model.sequences.clear();
        model.check();
        prop_assert_eq!(model.tables.available(), blocks as usize);
        model.tables.forget_prefixes();
        prop_assert_eq!((model.tables.evictable(), model.tables.available()), (0, blocks as usize));
        model.check();
    }
}

#[test]
fn the_block_released_first_is_evicted_first_and_the_end_of_a_sequence_before_its_beginning() {
    let mut model = Model::new(4, 2, true);
    let (old, new) = ([1, 2, 3, 4], [5, 6, 7, 8]);
    for sequence in [old, new] {
        model.add(&sequence);
        model
            .step(&[(model.sequences.len() - 1, sequence.to_vec())], true)
            .unwrap();
    }
    for _ in 0..2 {
        let (id, _) = model.sequences.remove(0);
        model.tables.release(id).unwrap();
    }
    let known = |model: &Model, sequence: &[i64; 4]| {
        let longer: Vec<i64> = sequence.iter().copied().chain([0]).collect();
        model.tables.cached_blocks(0, &longer).len()
    };
    assert_eq!((known(&model, &old), known(&model, &new)), (2, 2));
    model.add(&[9]);
    for (tokens, expected) in [([9, 9], (1, 2)), ([9, 9], (0, 2)), ([9, 9], (0, 1))] {
        model.step(&[(0, tokens.to_vec())], true).unwrap();
        assert_eq!((known(&model, &old), known(&model, &new)), expected);
    }
    assert_eq!(model.tables.statistics().evictions, 3);
    model.check();
}

#[test]
fn a_prefix_that_is_found_again_counts_as_recent() {
    let mut model = Model::new(2, 2, true);
    for sequence in [[1, 2], [3, 4]] {
        model.add(&sequence);
        model
            .step(&[(model.sequences.len() - 1, sequence.to_vec())], true)
            .unwrap();
    }
    for _ in 0..2 {
        let (id, _) = model.sequences.remove(0);
        model.tables.release(id).unwrap();
    }
    assert_eq!(model.add(&[1, 2, 0]), 2);
    let (id, _) = model.sequences.remove(0);
    model.tables.release(id).unwrap();
    model.add(&[7]);
    model.step(&[(0, vec![7])], true).unwrap();
    assert_eq!(model.tables.cached_blocks(0, &[1, 2, 0]).len(), 1);
    assert_eq!(model.tables.cached_blocks(0, &[3, 4, 0]).len(), 0);
}

#[test]
fn two_sequences_of_one_step_that_are_equal_end_up_with_one_copy() {
    let mut model = Model::new(8, 2, true);
    let sequence = vec![1, 2, 3, 4, 5];
    for _ in 0..2 {
        assert_eq!(model.add(&sequence), 0);
    }
    model
        .step(&[(0, sequence.clone()), (1, sequence)], true)
        .unwrap();
    assert_eq!(model.tables.blocks() - model.tables.available(), 4);
    assert_eq!(model.tables.statistics().merged, 2);
    model.check();
}

#[test]
fn the_whole_pool_can_be_refilled_after_a_cut_in_the_middle_of_a_full_block() {
    // The cut block is written in place: a copy would need a block that is not there.
    let mut model = Model::new(3, 4, true);
    model.add(&[0]);
    model.step(&[(0, (0..12).collect())], true).unwrap();
    let id = model.sequences[0].0;
    model.tables.truncate(id, 6).unwrap();
    model.sequences[0].1.truncate(6);
    assert_eq!(model.tables.blocks_needed(id, 6).unwrap(), 1);
    model
        .step(&[(0, vec![100, 101, 102, 103, 104, 105])], true)
        .unwrap();
    model.check();
    assert_eq!(model.tables.available(), 0);
    // The middle of the old sequence can no longer be found; its beginning still can.
    let old: Vec<i64> = (0..13).collect();
    assert_eq!(model.tables.cached_blocks(0, &old).len(), 1);
}

#[test]
fn a_sequence_of_a_launched_step_is_not_cut_before_it_lands() {
    let mut tables = BlockTables::new(8, 2, false);
    let [one, other] = [0, 0].map(|namespace| {
        let (id, _) = tables.add(namespace, &[1, 2, 3, 4]);
        let prepared = tables.prepare(&[(id, &[1, 2, 3, 4])]).unwrap();
        tables.commit(prepared);
        id
    });
    let prepared = tables.prepare(&[(one, &[5])]).unwrap();
    tables.launch(prepared);
    let error = tables.truncate(one, 1).unwrap_err().to_string();
    assert!(error.contains("call `land` first"), "{error}");
    tables.truncate(other, 2).unwrap();
    tables.land(|_| Some(5));
    assert_eq!(tables.tokens(one).unwrap(), [1, 2, 3, 4, 5]);
    tables.truncate(one, 1).unwrap();
    assert_eq!(tables.blocks() - tables.available(), 2);
}

#[test]
fn namespaces_share_no_blocks() {
    const TOKENS: [i64; 5] = [1, 2, 3, 4, 5];
    let mut tables = BlockTables::new(8, 2, true);
    let (first, cached) = tables.add(1, &TOKENS);
    assert_eq!(cached, 0);
    let prepared = tables.prepare(&[(first, &TOKENS)]).unwrap();
    tables.commit(prepared);
    assert_eq!(tables.cached_blocks(0, &TOKENS).len(), 0);
    assert_eq!(tables.cached_blocks(2, &TOKENS).len(), 0);
    assert_eq!(tables.cached_blocks(1, &TOKENS).len(), 2);
    // Equal tokens of another namespace are not merged into its blocks when they become full.
    let (other, _) = tables.add(2, &TOKENS);
    let prepared = tables.prepare(&[(other, &TOKENS)]).unwrap();
    tables.commit(prepared);
    assert_eq!(tables.statistics().merged, 0);
    let fork = tables.fork(other).unwrap();
    assert_ne!(tables.table(fork).unwrap(), tables.table(first).unwrap());
    tables.audit().unwrap();
}
