//! The reference of every cache: all keys and values, and attention written out.

use overdrive_core::random::Generator;
use overdrive_kv_cache::{AttendOptions, KvCache};
use proptest::prelude::*;
use tch::{Device, Kind, Tensor};

pub(crate) const BATCH: i64 = 2;
pub(crate) const HEADS: i64 = 4;
pub(crate) const KV_HEADS: i64 = 2;
pub(crate) const DIM: i64 = 8;

/// Returns standard normal numbers of a seed, without libtorch's generator, which all threads share.
pub(crate) fn random(shape: &[i64], seed: u64) -> Tensor {
    let mut generator = Generator::new(seed, 0);
    let count = shape.iter().product::<i64>();
    let normal: Vec<f32> = (0..count).map(|_| generator.normal() as f32).collect();
    Tensor::from_slice(&normal).view(shape)
}

/// Returns the softmax attention of `query (B, H, T, D)` with `mask` (bool, broadcast to `(B, 1, T, S)`).
pub(crate) fn attention(query: &Tensor, keys: &Tensor, values: &Tensor, mask: &Tensor) -> Tensor {
    attention_with_sinks(query, keys, values, mask, None)
}

/// Returns the same with a logit `(H)` for each head that takes part in the softmax without a value.
pub(crate) fn attention_with_sinks(
    query: &Tensor,
    keys: &Tensor,
    values: &Tensor,
    mask: &Tensor,
    sinks: Option<&Tensor>,
) -> Tensor {
    let group = query.size()[1] / keys.size()[1];
    let shared = |t: &Tensor| t.repeat_interleave_self_int(group, 1, None);
    let scores = query.matmul(&shared(keys).transpose(-2, -1)) / (query.size()[3] as f64).sqrt();
    let scores = scores.masked_fill(&mask.logical_not(), f64::NEG_INFINITY);
    let Some(sinks) = sinks else {
        return scores.softmax(-1, Kind::Float).matmul(&shared(values));
    };
    let size = scores.size();
    let column = sinks
        .view([1, -1, 1, 1])
        .expand([size[0], -1, size[2], 1], false);
    let weights = Tensor::cat(&[&scores, &column], -1).softmax(-1, Kind::Float);
    weights.narrow(-1, 0, size[3]).matmul(&shared(values))
}

/// Returns the mask `(T, S)` of the queries `from..to`, which see `sinks` first tokens and the last `window`.
pub(crate) fn seen(from: i64, to: i64, window: Option<i64>, sinks: i64) -> Tensor {
    let options = (Kind::Int64, Device::Cpu);
    let position = Tensor::arange_start(from, to, options).unsqueeze(-1);
    let column = Tensor::arange(to, options);
    let causal = column.le_tensor(&position);
    match window {
        None => causal,
        Some(window) => {
            let near = column.gt_tensor(&(position - window));
            causal.logical_and(&near.logical_or(&column.lt(sinks)))
        }
    }
}

pub(crate) fn close(
    found: &Tensor,
    expected: &Tensor,
    tolerance: f64,
) -> Result<(), TestCaseError> {
    let off = (found - expected).abs().max().double_value(&[]);
    prop_assert!(
        found.size() == expected.size() && off <= tolerance,
        "off by {off}"
    );
    Ok(())
}

/// The actions of a user between steps.
#[derive(Debug, Clone)]
pub(crate) enum Action {
    Append(i64),
    /// Truncate to this fraction of the length.
    Truncate(f64),
    /// Truncate by so many tokens.
    TruncateBy(i64),
    Reorder(Vec<i64>),
    Fork,
    SaveAndLoad,
    Reset,
}

pub(crate) fn actions(longest: i64) -> impl Strategy<Value = Vec<Action>> {
    let action = prop_oneof![
        6 => Just(Action::Append(1)),
        4 => (1i64..=longest).prop_map(Action::Append),
        1 => (0.0..1.0).prop_map(Action::Truncate),
        2 => (1i64..6).prop_map(Action::TruncateBy),
        1 => proptest::collection::vec(0..BATCH, BATCH as usize).prop_map(Action::Reorder),
        1 => Just(Action::Fork),
        1 => Just(Action::SaveAndLoad),
        1 => Just(Action::Reset),
    ];
    proptest::collection::vec(action, 1..40)
}

/// A cache, and all keys and values of each layer that it was given.
#[derive(Debug)]
pub(crate) struct Compared {
    pub(crate) cache: Box<dyn KvCache>,
    pub(crate) windows: Vec<Option<i64>>,
    pub(crate) sinks: i64,
    pub(crate) all: Vec<[Tensor; 2]>,
    pub(crate) seed: u64,
}

impl Compared {
    pub(crate) fn new(cache: Box<dyn KvCache>, windows: &[Option<i64>], sinks: i64) -> Compared {
        let none = || random(&[BATCH, KV_HEADS, 0, DIM], 0);
        Compared {
            all: windows.iter().map(|_| [none(), none()]).collect(),
            windows: windows.to_vec(),
            cache,
            sinks,
            seed: 0,
        }
    }

    pub(crate) fn fresh(&mut self, heads: i64, tokens: i64) -> Tensor {
        self.seed += 1;
        random(&[BATCH, heads, tokens, DIM], self.seed)
    }

    /// Runs one step through all layers; returns the outputs of cache and reference.
    pub(crate) fn step(&mut self, tokens: i64, options: &AttendOptions<'_>) -> Vec<[Tensor; 2]> {
        let mut outputs = Vec::new();
        for layer in 0..self.all.len() {
            let (keys, values) = (self.fresh(KV_HEADS, tokens), self.fresh(KV_HEADS, tokens));
            let query = self.fresh(HEADS, tokens);
            let found = self.cache.attend(layer, &query, &keys, &values, options);
            let held = &mut self.all[layer];
            for (held, new) in held.iter_mut().zip([&keys, &values]) {
                *held = Tensor::cat(&[&*held, new], 2);
            }
            let to = held[0].size()[2];
            let mask = seen(to - tokens, to, self.windows[layer], self.sinks);
            let mask = match options.mask {
                Some(padding) => mask.logical_and(padding),
                None => mask,
            };
            let expected = attention_with_sinks(&query, &held[0], &held[1], &mask, options.sinks);
            outputs.push([found.unwrap(), expected]);
        }
        outputs
    }

    pub(crate) fn len(&self) -> i64 {
        self.all[0][0].size()[2]
    }

    pub(crate) fn truncated(&mut self, len: i64) {
        let all = self.all.iter_mut().flatten();
        all.for_each(|held| *held = held.narrow(2, 0, len));
    }

    /// Runs `action`; if the cache refuses to truncate, its message must contain `refusal`.
    pub(crate) fn run(
        &mut self,
        action: Action,
        load: impl Fn() -> Box<dyn KvCache>,
        refusal: Option<&str>,
    ) -> Result<(), TestCaseError> {
        match action {
            Action::Append(tokens) => {
                for [found, expected] in self.step(tokens, &AttendOptions::default()) {
                    close(&found, &expected, 1e-5)?;
                }
            }
            Action::Truncate(_) | Action::TruncateBy(_) => {
                let len = match action {
                    Action::Truncate(share) => (share * (self.len() + 1) as f64) as i64,
                    Action::TruncateBy(tokens) => (self.len() - tokens).max(0),
                    _ => unreachable!(),
                };
                match (self.cache.truncate(len), refusal) {
                    (Ok(()), _) => self.truncated(len),
                    (Err(error), Some(text)) => prop_assert!(error.to_string().contains(text)),
                    (Err(error), None) => prop_assert!(false, "{error}"),
                }
            }
            Action::Reorder(rows) => {
                let rows = Tensor::from_slice(&rows);
                self.cache.reorder(&rows).unwrap();
                let all = self.all.iter_mut().flatten();
                all.for_each(|held| *held = held.index_select(0, &rows));
            }
            Action::Fork => {
                // The original takes other tokens, which the fork must not see.
                let fork = self.cache.fork().unwrap();
                let mut original = std::mem::replace(&mut self.cache, fork);
                let other = self.fresh(KV_HEADS, 3);
                for layer in 0..self.all.len() {
                    let _full = original.append(layer, &other, &other);
                }
            }
            Action::SaveAndLoad => {
                let state = self.cache.state().unwrap();
                let mut loaded = load();
                loaded.load_state(&state).unwrap();
                self.cache = loaded;
            }
            Action::Reset => {
                self.cache.reset();
                self.truncated(0);
            }
        }
        prop_assert_eq!(self.cache.len(), self.len());
        Ok(())
    }
}
