#![allow(clippy::unwrap_used, reason = "a test may panic")]

use proptest::prelude::*;

use super::{Ledger, Prepared, SequenceId};
use crate::Error;

/// The first `n` numbers of a text, in one: what a key at that place depends on.
fn key(tokens: &[i64]) -> u64 {
    tokens.iter().fold(17, |sum: u64, token| {
        sum.wrapping_mul(1_000_003).wrapping_add(*token as u64 + 1)
    })
}

/// A ledger with blocks that hold the keys of the tokens, as the pool of a model does.
struct Model {
    ledger: Ledger,
    block_size: usize,
    cells: Vec<u64>,
    /// Each text as it should be.
    texts: Vec<(SequenceId, Vec<i64>)>,
}

impl Model {
    fn new(blocks: u32, block_size: usize, share: bool) -> Model {
        Model {
            ledger: Ledger::new(blocks, block_size, share),
            block_size,
            cells: vec![0; blocks as usize * block_size],
            texts: Vec::new(),
        }
    }

    fn pick(&self, choice: usize) -> Option<usize> {
        (!self.texts.is_empty()).then(|| choice % self.texts.len())
    }

    fn add(&mut self, tokens: &[i64]) -> usize {
        let (id, cached) = self.ledger.add(tokens);
        assert!(cached < tokens.len().max(1) && cached % self.block_size == 0);
        self.texts.push((id, tokens[..cached].to_vec()));
        cached
    }

    /// What a model does: copies, then writes keys in place, whether or not the step is committed.
    fn run(&mut self, prepared: &[Prepared]) {
        let size = self.block_size;
        for part in prepared {
            if let Some((from, to)) = part.copy {
                let (from, to) = (from as usize * size, to as usize * size);
                self.cells.copy_within(from..from + size, to);
            }
        }
        for part in prepared {
            let mut text = self.ledger.tokens(part.id).unwrap().to_vec();
            for token in &part.tokens {
                let cell = part.table[text.len() / size] as usize * size + text.len() % size;
                text.push(*token);
                self.cells[cell] = key(&text);
            }
        }
    }

    fn step(&mut self, parts: &[(usize, Vec<i64>)], commit: bool) -> crate::Result<()> {
        let named: Vec<(SequenceId, &[i64])> = parts
            .iter()
            .map(|(text, tokens)| (self.texts[*text].0, tokens.as_slice()))
            .collect();
        let (free, idle) = (self.ledger.available(), self.ledger.idle());
        let needed: usize = named
            .iter()
            .map(|(id, tokens)| self.ledger.blocks_needed(*id, tokens.len()).unwrap())
            .sum();
        let prepared = match self.ledger.prepare(&named) {
            Ok(prepared) => prepared,
            Err(error) => {
                assert_eq!((free, idle), (self.ledger.available(), self.ledger.idle()));
                match error {
                    Error::OutOfBlocks { .. } => assert!(needed > free),
                    _ => assert!(matches!(error, Error::SequenceTwice { .. })),
                }
                return Err(error);
            }
        };
        assert_eq!(self.ledger.available(), free - needed);
        self.run(&prepared);
        if commit {
            self.ledger.commit(prepared);
            for (text, tokens) in parts {
                self.texts[*text].1.extend(tokens);
            }
        } else {
            self.ledger.cancel(prepared);
            assert_eq!(self.ledger.available(), free);
        }
        Ok(())
    }

    fn check(&self) {
        self.ledger.audit().unwrap();
        assert_eq!(self.ledger.texts(), self.texts.len());
        for (id, tokens) in &self.texts {
            assert_eq!(self.ledger.tokens(*id).unwrap(), tokens);
            let table = self.ledger.table(*id).unwrap();
            for at in 0..tokens.len() {
                let cell = table[at / self.block_size] as usize * self.block_size;
                let held = self.cells[cell + at % self.block_size];
                assert_eq!(held, key(&tokens[..=at]), "token {at} of text {id}");
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
    // Two different tokens: prefixes meet all the time.
    let tokens = |most| prop::collection::vec(0..2_i64, 0..most);
    let part = (any::<usize>(), tokens(9_usize));
    let action = prop_oneof![
        3 => tokens(14).prop_map(Action::Add),
        8 => (prop::collection::vec(part, 1..5), prop::bool::weighted(0.8))
            .prop_map(|(parts, commit)| Action::Step(parts, commit)),
        2 => any::<usize>().prop_map(Action::Fork),
        2 => (any::<usize>(), any::<usize>()).prop_map(|(text, len)| Action::Truncate(text, len)),
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
                Action::Step(parts, commit) => {
                    let named: Vec<_> = parts
                        .into_iter()
                        .filter_map(|(text, tokens)| Some((model.pick(text)?, tokens)))
                        .collect();
                    let mut texts: Vec<_> = named.iter().map(|(text, _)| *text).collect();
                    texts.sort_unstable();
                    let twice = texts.windows(2).any(|pair| pair[0] == pair[1]);
                    let result = model.step(&named, commit);
                    prop_assert!(!twice || result.is_err());
                }
                Action::Fork(text) => {
                    if let Some(text) = model.pick(text) {
                        let (id, tokens) = model.texts[text].clone();
                        let fork = model.ledger.fork(id).unwrap();
                        model.texts.push((fork, tokens));
                    }
                }
                Action::Truncate(text, len) => {
                    if let Some(text) = model.pick(text) {
                        let (id, tokens) = &mut model.texts[text];
                        let len = len % (tokens.len() + 1);
                        model.ledger.truncate(*id, len).unwrap();
                        tokens.truncate(len);
                    }
                }
                Action::Release(text) => {
                    if let Some(text) = model.pick(text) {
                        let (id, _) = model.texts.swap_remove(text);
                        model.ledger.release(id).unwrap();
                        let twice = model.ledger.release(id);
                        assert!(matches!(twice, Err(Error::NoSuchSequence { .. })));
                    }
                }
                Action::Forget => {
                    model.ledger.forget_prefixes();
                    prop_assert_eq!(model.ledger.idle(), 0);
                }
            }
            model.check();
        }
        model.ledger.release_all();
        model.texts.clear();
        model.check();
        prop_assert_eq!(model.ledger.available(), blocks as usize);
        model.ledger.forget_prefixes();
        prop_assert_eq!((model.ledger.idle(), model.ledger.available()), (0, blocks as usize));
        model.check();
    }
}

#[test]
fn what_was_let_go_longest_ago_is_evicted_first_and_the_end_of_a_text_before_its_beginning() {
    let mut model = Model::new(4, 2, true);
    let (old, new) = ([1, 2, 3, 4], [5, 6, 7, 8]);
    for text in [old, new] {
        model.add(&text);
        model
            .step(&[(model.texts.len() - 1, text.to_vec())], true)
            .unwrap();
    }
    for _ in 0..2 {
        let (id, _) = model.texts.remove(0);
        model.ledger.release(id).unwrap();
    }
    let known = |model: &Model, text: &[i64; 4]| {
        let longer: Vec<i64> = text.iter().copied().chain([0]).collect();
        model.ledger.known_blocks(&longer).len()
    };
    assert_eq!((known(&model, &old), known(&model, &new)), (2, 2));
    model.add(&[9]);
    for (tokens, expected) in [([9, 9], (1, 2)), ([9, 9], (0, 2)), ([9, 9], (0, 1))] {
        model.step(&[(0, tokens.to_vec())], true).unwrap();
        assert_eq!((known(&model, &old), known(&model, &new)), expected);
    }
    assert_eq!(model.ledger.statistics().evictions, 3);
    model.check();
}

#[test]
fn a_found_prefix_is_young_again() {
    let mut model = Model::new(2, 2, true);
    for text in [[1, 2], [3, 4]] {
        model.add(&text);
        model
            .step(&[(model.texts.len() - 1, text.to_vec())], true)
            .unwrap();
    }
    for _ in 0..2 {
        let (id, _) = model.texts.remove(0);
        model.ledger.release(id).unwrap();
    }
    assert_eq!(model.add(&[1, 2, 0]), 2);
    let (id, _) = model.texts.remove(0);
    model.ledger.release(id).unwrap();
    model.add(&[7]);
    model.step(&[(0, vec![7])], true).unwrap();
    assert_eq!(model.ledger.known_blocks(&[1, 2, 0]).len(), 1);
    assert_eq!(model.ledger.known_blocks(&[3, 4, 0]).len(), 0);
}

#[test]
fn two_texts_of_one_step_that_are_equal_end_up_with_one_copy() {
    let mut model = Model::new(8, 2, true);
    let text = vec![1, 2, 3, 4, 5];
    for _ in 0..2 {
        assert_eq!(model.add(&text), 0);
    }
    model.step(&[(0, text.clone()), (1, text)], true).unwrap();
    assert_eq!(model.ledger.blocks() - model.ledger.available(), 4);
    assert_eq!(model.ledger.statistics().merged, 2);
    model.check();
}

#[test]
fn the_whole_pool_can_be_refilled_after_a_cut_in_the_middle_of_a_full_block() {
    // The cut block is written in place: a copy would need a block that is not there.
    let mut model = Model::new(3, 4, true);
    model.add(&[0]);
    model.step(&[(0, (0..12).collect())], true).unwrap();
    let id = model.texts[0].0;
    model.ledger.truncate(id, 6).unwrap();
    model.texts[0].1.truncate(6);
    assert_eq!(model.ledger.blocks_needed(id, 6).unwrap(), 1);
    model
        .step(&[(0, vec![100, 101, 102, 103, 104, 105])], true)
        .unwrap();
    model.check();
    assert_eq!(model.ledger.available(), 0);
    // The old middle cannot be found any more, its beginning can.
    let old: Vec<i64> = (0..13).collect();
    assert_eq!(model.ledger.known_blocks(&old).len(), 1);
}
