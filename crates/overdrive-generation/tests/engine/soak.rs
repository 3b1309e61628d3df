//! Thousands of random requests through one small cache: no token and no block is lost.

use std::collections::BTreeMap;

use overdrive_core::random::Generator;
use overdrive_generation::{
    Completion, Engine, EngineConfig, EngineModel, Event, FinishReason, GenerationConfig,
    RaggedStep, Request, RequestId, Result, generate,
};
use overdrive_transformer::{
    CausalLm, DeltaNetConfig, InitOptions, LayerType, LlamaConfig, LlamaFamily,
};
use tch::Tensor;

const VOCABULARY: i64 = 40;
/// The token after which the logits are NaN.
const POISON: i64 = 39;

struct Poisonable(CausalLm);

impl EngineModel for Poisonable {
    forwards_shape!(0);

    fn forward(&self, step: RaggedStep<'_, '_>) -> Result<Tensor> {
        let last = step
            .input_ids
            .view([-1])
            .index_select(0, step.logits_indices);
        let poisoned = last.eq(POISON).unsqueeze(1);
        let mut logits = EngineModel::forward(&self.0, step)?;
        // No sequence chooses it by itself.
        let _ = logits.select(1, POISON).fill_(f64::NEG_INFINITY);
        logits = logits.masked_fill(&poisoned, f64::NAN);
        Ok(logits)
    }
}

/// A model with layers of linear attention.
fn hybrid() -> CausalLm {
    let family = LlamaFamily::Qwen35;
    let defaults = LlamaConfig::of(family);
    model_of(LlamaConfig {
        num_hidden_layers: 3,
        num_key_value_heads: Some(1),
        head_dim: Some(8),
        partial_rotary_factor: 0.5,
        layer_types: Some(vec![LayerType::Linear, LayerType::Full, LayerType::Linear]),
        delta_net: defaults.delta_net.clone().map(|sizes| DeltaNetConfig {
            linear_key_head_dim: 8,
            linear_value_head_dim: 8,
            linear_num_key_heads: 1,
            linear_num_value_heads: 2,
            ..sizes
        }),
        ..defaults
    })
}

fn model() -> CausalLm {
    model_of(LlamaConfig {
        num_hidden_layers: 1,
        ..LlamaConfig::default()
    })
}

fn model_of(config: LlamaConfig) -> CausalLm {
    // Tests run in parallel, and their models are too small for threads of their own.
    tch::set_num_threads(1);
    let config = LlamaConfig {
        vocab_size: VOCABULARY,
        hidden_size: 16,
        intermediate_size: 32,
        num_attention_heads: 2,
        max_position_embeddings: 64,
        ..config
    };
    CausalLm::new(&config.into(), &InitOptions::default()).unwrap()
}

/// A source of random requests.
struct Random(Generator);

impl Random {
    fn below(&mut self, n: u64) -> u64 {
        self.0.below(n)
    }

    fn one_in(&mut self, n: u64) -> bool {
        self.below(n) == 0
    }

    /// Returns a prompt; half of them share a prefix with others.
    fn prompt(&mut self) -> Vec<i64> {
        let shared = self.below(3) as i64;
        let (common, own) = (self.below(20) as i64, 1 + self.below(12));
        let mut prompt: Vec<i64> = (0..common)
            .map(|position| (position * 7 + shared) % 38)
            .collect();
        prompt.extend((0..own).map(|_| self.below(39) as i64));
        prompt
    }

    fn config(&mut self) -> GenerationConfig {
        let do_sample = self.one_in(2);
        GenerationConfig {
            max_new_tokens: Some(1 + self.below(16) as usize),
            do_sample,
            seed: Some(self.below(1000)),
            // Proposals change no token.
            prompt_lookup_num_tokens: match self.one_in(3) {
                true => Some(1 + self.below(5) as usize),
                false => None,
            },
            num_assistant_tokens: 1 + self.below(4) as usize,
            assistant_confidence_threshold: 0.0,
            eos_token_id: if self.one_in(2) { vec![7] } else { vec![] },
            num_return_sequences: match self.below(8) {
                0 if do_sample => 1 + self.below(4) as usize,
                _ => 1,
            },
            ..GenerationConfig::default()
        }
    }
}

/// The outcome of a request.
#[derive(Default)]
struct Seen {
    tokens: BTreeMap<usize, Vec<i64>>,
    completions: BTreeMap<usize, Completion>,
    samples: usize,
    cancelled: bool,
    poisoned: bool,
    ended: bool,
}

fn soak(requests: usize, seed: u64, model: fn() -> CausalLm, assistant: Option<CausalLm>) {
    let reference = model();
    let shares = !reference.cache_shape().recurrent.contains(&true);
    let mut config = EngineConfig {
        block_size: 4,
        ..EngineConfig::default()
    };
    // The longest request, 31 and 16 tokens, takes 12 of them.
    config.num_blocks = Some(26);
    config.max_num_seqs = 12;
    config.max_num_batched_tokens = Some(24);
    let mut engine = Engine::new(Poisonable(model()), config).unwrap();
    if let Some(assistant) = assistant {
        engine = engine.with_assistant(assistant, None).unwrap();
    }
    let mut random = Random(Generator::new(seed, 0));
    let mut seen: BTreeMap<RequestId, Seen> = BTreeMap::new();
    let mut wanted = BTreeMap::new();
    let mut checked = 0;
    while seen.len() < requests || !engine.is_idle() {
        for _ in 0..random.below(4) {
            if seen.len() == requests || engine.statistics().waiting > 30 {
                break;
            }
            let (mut prompt, mut config) = (random.prompt(), random.config());
            match random.below(50) {
                0 => prompt.clear(),
                1 => prompt.push(VOCABULARY),
                2 => config.max_new_tokens = Some(1000), // cut by the context; still too large
                3 => prompt.push(POISON),
                _ => {}
            }
            let poisoned = prompt.last() == Some(&POISON);
            let samples = config.num_return_sequences;
            match engine.submit(Request::new(prompt.clone(), config.clone())) {
                Ok(id) => {
                    if random.one_in(40) && !poisoned {
                        wanted.insert(id, (prompt, config));
                    }
                    let new = Seen {
                        samples,
                        poisoned,
                        ..Seen::default()
                    };
                    assert!(seen.insert(id, new).is_none());
                }
                Err(error) => {
                    let bad = prompt.is_empty()
                        || prompt.contains(&VOCABULARY)
                        || config.max_new_tokens == Some(1000);
                    assert!(bad, "refused: {error}");
                }
            }
        }
        if random.one_in(6) && !seen.is_empty() {
            let back = random.below(20) as usize % seen.len();
            let (&id, request) = seen.iter_mut().nth_back(back).unwrap();
            let was_there = engine.cancel(id).unwrap();
            assert_eq!(
                was_there, !request.ended,
                "cancelled once, and only while it goes on"
            );
            request.cancelled |= was_there;
        }
        let statistics = engine.statistics();
        assert!(statistics.running <= 12 && statistics.blocks_used <= 26);
        for event in engine.step().unwrap() {
            let last = event.is_last();
            let request = seen.get_mut(&event.request()).unwrap();
            assert!(!request.ended, "an event after the last: {event:?}");
            request.ended = last;
            match event {
                Event::Token { sample, id, .. } => {
                    request.tokens.entry(sample).or_default().push(id);
                }
                Event::Finished {
                    sample, completion, ..
                } => {
                    let streamed = request.tokens.get(&sample).cloned().unwrap_or_default();
                    assert_eq!(completion.tokens, streamed);
                    request.completions.insert(sample, completion);
                }
                Event::Failed { error, .. } => {
                    assert!(request.poisoned, "{error}");
                }
                other => panic!("{other:?}"),
            }
        }
    }
    for (id, request) in &seen {
        assert!(request.ended, "{id} has not ended");
        if request.poisoned {
            assert!(request.cancelled || request.completions.is_empty());
            continue;
        }
        assert_eq!(request.completions.len(), request.samples, "{id}");
        let stopped = |c: &Completion| c.finish_reason == FinishReason::Stopped;
        assert!(request.cancelled || !request.completions.values().any(stopped));
        if let Some((prompt, config)) = wanted.get(id).filter(|_| !request.cancelled) {
            // The reference may choose a token that the model of the engine may not.
            let config = GenerationConfig {
                suppress_tokens: vec![POISON],
                prompt_lookup_num_tokens: None,
                ..config.clone()
            };
            let alone = generate(&reference, std::slice::from_ref(prompt), &config).unwrap();
            for (row, completion) in &request.completions {
                assert_eq!(
                    completion.tokens,
                    alone.new_tokens(*row),
                    "{id}, sample {row}"
                );
                checked += 1;
            }
        }
    }
    let statistics = engine.statistics();
    println!(
        "{statistics}, {} cancelled, {checked} compared",
        statistics.cancelled
    );
    assert!(statistics.preemptions > 0 && checked > 0);
    // States are of whole sequences, which share no prefixes.
    assert_eq!(statistics.reused_tokens > 0, shares);
    assert!(statistics.accepted_tokens > 0);
    assert!(statistics.accepted_tokens < statistics.proposed_tokens);
    let ends = statistics.finished + statistics.cancelled + statistics.failed;
    assert_eq!(ends, requests as u64);
    assert_eq!(
        (
            statistics.running,
            statistics.waiting,
            statistics.blocks_used
        ),
        (0, 0, 0)
    );
    assert_eq!(engine.cache().sequences(), 0);
    assert_eq!(engine.cache().free_blocks(), 26);
    if let Some(cache) = engine.assistant_cache() {
        assert_eq!((cache.sequences(), cache.free_blocks()), (0, 26));
    }
}

#[test]
fn after_ten_thousand_random_requests_every_block_is_free() {
    soak(10_000, 1, model, None);
}

#[test]
fn a_draft_model_changes_no_token_and_leaves_no_block() {
    // The model itself, whose proposals are accepted unless a token is drawn or has no block.
    soak(1500, 2, model, Some(model()));
}

#[test]
fn states_of_linear_attention_are_lost_and_mixed_up_as_little_as_blocks() {
    soak(1500, 3, hybrid, None);
    soak(500, 4, hybrid, Some(hybrid()));
}
