//! Tests of the engine against `generate`, one request at a time.

mod failures;
mod handle;
mod one_request;
mod prompt_logprobs;
mod text_and_options;

use std::cell::Cell;
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use overdrive_generation::{
    ChoiceConstraint, Completion, Engine, EngineConfig, EngineHandle, EngineModel, Error, Event,
    FinishReason, GenerateOptions, GenerationConfig, RaggedStep, Request, Result, Tokenizer,
    generate, generate_with_options,
};
use overdrive_kv_cache::PagedCacheConfig;
use overdrive_transformer::{CausalLm, InitOptions, LlamaConfig};
use tch::Tensor;

const CASES: [&str; 27] = [
    "llama_gqa",
    "llama3_rope",
    "mistral",
    "qwen2_sliding",
    "qwen3",
    "mixtral",
    "qwen3_moe",
    "smollm3_sliding",
    "olmo2",
    "olmo3",
    "granite",
    "granite4",
    "deepseek_v2",
    "deepseek_v3",
    "qwen3_next",
    "qwen3_5",
    "qwen3_5_moe",
    "glm4",
    "qwen2_moe",
    "gpt_oss",
    "ministral3",
    "gpt2",
    "gpt2_scaled",
    "gemma3n",
    "gemma4",
    "gemma4_dense",
    "gemma4_moe",
];

fn load(case: &str) -> CausalLm {
    // Tests run in parallel, and their models are too small for threads of their own.
    tch::set_num_threads(1);
    let crates = PathBuf::from(env!("CARGO_MANIFEST_DIR"));
    let dir = crates
        .join("../overdrive-transformer/tests/fixtures")
        .join(case);
    CausalLm::from_pretrained(dir, &Default::default()).unwrap()
}

fn tiny(vocab_size: i64) -> CausalLm {
    // Tests run in parallel, and their models are too small for threads of their own.
    tch::set_num_threads(1);
    let config = LlamaConfig {
        vocab_size,
        hidden_size: 32,
        intermediate_size: 64,
        num_hidden_layers: 2,
        num_attention_heads: 4,
        num_key_value_heads: Some(2),
        max_position_embeddings: 256,
        ..LlamaConfig::default()
    };
    CausalLm::new(&config.into(), &InitOptions::default()).unwrap()
}

fn greedy(new: usize) -> GenerationConfig {
    GenerationConfig {
        max_new_tokens: Some(new),
        ..GenerationConfig::default()
    }
}

fn sampled(new: usize, seed: u64) -> GenerationConfig {
    GenerationConfig {
        do_sample: true,
        temperature: 1.3,
        seed: Some(seed),
        ..greedy(new)
    }
}

fn config(change: impl FnOnce(&mut EngineConfig)) -> EngineConfig {
    let mut config = EngineConfig {
        block_size: 4,
        num_blocks: Some(64),
        max_num_seqs: 8,
        max_num_batched_tokens: Some(64),
        ..EngineConfig::default()
    };
    change(&mut config);
    config
}

/// Returns prompts of 1 to 40 tokens, some of which share a prefix.
fn prompts(vocab_size: i64) -> Vec<Vec<i64>> {
    let lengths = [7, 1, 40, 23, 40, 3, 12, 30, 1, 18];
    let prompt = |(number, &length): (usize, &i64)| {
        let text = (number as i64 % 3) * 7;
        (0..length)
            .map(|place| (place * place + text) % vocab_size)
            .collect()
    };
    lengths.iter().enumerate().map(prompt).collect()
}

fn assert_no_block_is_held<M: EngineModel>(engine: &Engine<M>) {
    let statistics = engine.statistics();
    assert_eq!((statistics.running, statistics.waiting), (0, 0));
    assert_eq!(statistics.blocks_used, 0, "blocks are still held");
    assert_eq!(engine.cache().sequences(), 0);
    assert_eq!(engine.cache().free_blocks(), statistics.blocks);
}

#[test]
fn every_request_gets_what_it_would_get_alone() {
    for case in CASES {
        let model = load(case);
        let prompts = prompts(model.config().vocab_size());
        let wanted = |number: usize| match number % 2 {
            0 => greedy(5 + 3 * number),
            _ => sampled(24, number as u64),
        };
        let alone: Vec<_> = prompts
            .iter()
            .enumerate()
            .map(|(n, prompt)| generate(&model, std::slice::from_ref(prompt), &wanted(n)).unwrap())
            .collect();
        // Enough memory; with chunks of prompts; with so few blocks that sequences are preempted;
        // without sharing.
        for change in [
            (|_| {}) as fn(&mut EngineConfig),
            |c| c.max_num_batched_tokens = Some(8),
            |c| c.num_blocks = Some(20),
            |c| {
                c.num_blocks = Some(18);
                c.enable_prefix_caching = false;
                c.watermark = 0.0;
            },
        ] {
            let config = config(change);
            let mut engine = Engine::new(&model, config.clone()).unwrap();
            let mut got: BTreeMap<_, Completion> = BTreeMap::new();
            let mut ids = Vec::new();
            let mut take = |events: Vec<Event>| {
                for event in events {
                    match event {
                        Event::Finished {
                            request,
                            completion,
                            is_last,
                            ..
                        } => {
                            assert!(is_last);
                            got.insert(request, completion);
                        }
                        Event::Failed { error, .. } => panic!("{error}"),
                        _ => {}
                    }
                }
            };
            // These requests join while others run.
            for (number, prompt) in prompts.iter().enumerate() {
                ids.push(
                    engine
                        .submit(Request::new(prompt.clone(), wanted(number)))
                        .unwrap(),
                );
                take(engine.step().unwrap());
            }
            while !engine.is_idle() {
                take(engine.step().unwrap());
            }
            for (number, (alone, id)) in alone.iter().zip(&ids).enumerate() {
                assert_eq!(
                    got[id].tokens,
                    alone.new_tokens(0),
                    "{case}, request {number}, {config:?}"
                );
                assert_eq!(got[id].finish_reason, alone.finish_reasons[0]);
            }
            let statistics = engine.statistics();
            assert_eq!(statistics.finished, 10);
            if !config.enable_prefix_caching {
                assert!(statistics.preemptions > 0, "{case}: nothing was preempted");
                assert!(statistics.recomputed_tokens > 0);
                assert_eq!(statistics.reused_tokens, 0);
            }
            assert_no_block_is_held(&engine);
        }
    }
}

/// Beyond the original context, dynamic-NTK and LongRoPE frequencies follow the longest sequence of a step.
#[test]
fn a_neighbour_does_not_change_frequencies_that_depend_on_the_length() {
    for case in ["llama_dynamic_rope", "llama_longrope"] {
        let model = load(case);
        let context = model.config().ragged_context() as usize;
        assert_eq!(context, 16, "{case}");
        assert!(model.config().max_position_embeddings() > 16);
        let ids = |count: usize, from: i64| -> Vec<i64> {
            (0..count as i64).map(|at| (at * 7 + from) % 120).collect()
        };
        let wanted = |new| GenerationConfig {
            min_new_tokens: new,
            ..greedy(new)
        };
        let (short, long) = (ids(6, 3), ids(15, 50));
        let alone = generate(&model, std::slice::from_ref(&short), &wanted(10)).unwrap();
        let mut engine = Engine::new(&model, config(|_| {})).unwrap();
        engine
            .submit(Request::new(long.clone(), wanted(40)))
            .unwrap();
        let id = engine.submit(Request::new(short, wanted(10))).unwrap();
        for (request, completions) in engine.run_to_end().unwrap() {
            let tokens = &completions.unwrap()[0].tokens;
            if request == id {
                assert_eq!(tokens, alone.new_tokens(0), "{case}");
            } else {
                // The last token is not read, so it may lie beyond the context.
                assert_eq!(tokens.len(), context + 1 - long.len(), "{case}");
            }
        }
        let error = engine.submit(Request::new(ids(17, 0), wanted(1)));
        assert!(
            matches!(error, Err(Error::PromptTooLong { limit: 16, .. })),
            "{case}: {error:?}"
        );
    }
}

#[test]
fn samples_of_one_prompt_share_its_blocks_and_equal_those_of_generate() {
    let model = tiny(128);
    let prompt: Vec<i64> = (0..41).collect();
    let config_of = |copies| GenerationConfig {
        num_return_sequences: copies,
        ..sampled(20, 3)
    };
    let want = generate(&model, std::slice::from_ref(&prompt), &config_of(5)).unwrap();
    // Seats for all samples; for two; blocks for two.
    for (seats, blocks) in [(8, 64), (2, 64), (8, 30)] {
        let mut engine = Engine::new(
            &model,
            config(|c| {
                c.max_num_seqs = seats;
                c.num_blocks = Some(blocks);
            }),
        )
        .unwrap();
        engine
            .submit(Request::new(prompt.clone(), config_of(5)))
            .unwrap();
        let first = engine.step().unwrap();
        assert_eq!(
            first.len(),
            5,
            "the first tokens of all come of one reading of the prompt"
        );
        if (seats, blocks) == (8, 64) {
            assert_eq!(engine.statistics().blocks_used, 11);
            engine.step().unwrap();
            // The last block, of one token, is copied for all but one.
            assert_eq!(engine.statistics().blocks_used, 10 + 5);
        }
        let outcomes = engine.run_to_end().unwrap();
        let (_, completions) = &outcomes[0];
        let completions = completions.as_ref().unwrap();
        assert_eq!(completions.len(), 5);
        for (row, completion) in completions.iter().enumerate() {
            assert_eq!(
                completion.tokens,
                want.new_tokens(row),
                "{seats} seats, sample {row}"
            );
        }
        assert_no_block_is_held(&engine);
    }
}

#[test]
fn a_prompt_that_was_read_before_is_found_in_the_cache() {
    let model = tiny(128);
    let mut engine = Engine::new(&model, config(|_| {})).unwrap();
    let prompt: Vec<i64> = (0..40).collect();
    let mut run = |prompt: &[i64]| {
        let before = engine.statistics().reused_tokens;
        engine.submit(Request::new(prompt, greedy(8))).unwrap();
        let mut outcomes = engine.run_to_end().unwrap();
        let completion = outcomes.remove(0).1.unwrap().remove(0);
        let reused = engine.statistics().reused_tokens;
        assert_eq!(completion.cached_tokens as u64, reused - before);
        (completion.tokens, reused)
    };
    let (first, reused) = run(&prompt);
    assert_eq!(reused, 0);
    let (again, reused) = run(&prompt);
    assert_eq!(
        (again, reused),
        (first.clone(), 36),
        "all blocks but that of the last token"
    );
    // A conversation is continued: the answer is in the cache too, except for its last token.
    let longer = [prompt, first, vec![5, 6, 7]].concat();
    let (_, reused) = run(&longer);
    assert_eq!(reused, 36 + 44);
}

#[test]
fn requests_that_cannot_be_served_are_refused_with_the_numbers() {
    let model = tiny(128);
    let small = |c: &mut EngineConfig| {
        c.num_blocks = Some(10);
        c.max_model_len = Some(256);
    };
    let mut engine = Engine::new(&model, config(small)).unwrap();
    let mut refused = |prompt: Vec<i64>, change: &dyn Fn(&mut GenerationConfig)| {
        let mut config = greedy(10);
        change(&mut config);
        engine
            .submit(Request::new(prompt, config))
            .unwrap_err()
            .to_string()
    };
    assert_eq!(
        refused(vec![1; 32], &|_| {}),
        "the request needs 32 prompt tokens and 10 new ones, 11 blocks of 4 tokens, and the cache \
         has 10; shorten the prompt, lower max_new_tokens, or raise the engine's num_blocks or \
         kv_cache_memory_bytes"
    );
    assert!(refused(vec![], &|_| {}).contains("empty"));
    assert!(refused(vec![1; 300], &|_| {}).contains("the model's context is 256"));
    assert!(refused(vec![1, 128], &|_| {}).contains("the model's vocabulary 0..128"));
    assert!(refused(vec![1], &|c| c.eos_token_id = vec![128]).contains("eos_token_id"));
    assert!(refused(vec![1], &|c| c.temperature = -1.0).contains("temperature"));
    assert!(refused(vec![1], &|c| c.num_beams = 2).contains("use generate"));
    assert!(refused(vec![1], &|c| c.use_cache = false).contains("use generate"));
    let text = refused(vec![1], &|c| c.stop_strings = vec!["x".to_owned()]);
    assert!(text.contains("with_tokenizer"), "{text}");
    // 31 and 10 need 40 slots: the last token is never read.
    engine
        .submit(Request::new(vec![1; 31], greedy(10)))
        .unwrap();
    let (_, completions) = engine.run_to_end().unwrap().remove(0);
    assert_eq!(completions.unwrap()[0].tokens.len(), 10);

    for (change, key) in [
        (
            (|c| c.max_num_seqs = 0) as fn(&mut EngineConfig),
            "max_num_seqs",
        ),
        (
            |c| c.max_num_batched_tokens = Some(7),
            "max_num_batched_tokens",
        ),
        (|c| c.block_size = 0, "block_size"),
        (|c| c.watermark = 1.0, "watermark"),
        (
            |c| c.max_model_len = Some(258),
            "`max_model_len` is 258; it must be at most 257: the context of 256, and one generated token",
        ),
        (
            |c| {
                c.num_blocks = None;
                c.kv_cache_memory_bytes = Some(1000);
            },
            "kv_cache_memory_bytes",
        ),
    ] {
        let error = Engine::new(&model, config(change)).unwrap_err().to_string();
        assert!(error.contains(key), "{error}");
    }
}

#[test]
fn the_memory_of_the_cache_holds_states_and_bounds_the_sequences_that_have_them() {
    let model = load("qwen3_next");
    let sizes = PagedCacheConfig::of(&model.cache_shape());
    // Three layers of 4 heads of 8 · 12 numbers, and of 3 inputs of 80 channels, in f32.
    assert_eq!(sizes.state_bytes, 3 * 4 * (4 * 8 * 12 + 3 * 80));
    // Two sequences have 8 states, and three would have 16.
    let bytes = 2 * 8 * sizes.state_bytes + 4 * sizes.state_bytes;
    let mut engine = Engine::new(
        &model,
        config(|c| {
            c.num_blocks = None;
            c.kv_cache_memory_bytes = Some(bytes);
        }),
    )
    .unwrap();
    for prompt in prompts(126).into_iter().take(6) {
        engine.submit(Request::new(prompt, greedy(6))).unwrap();
    }
    let mut most = 0;
    while !engine.is_idle() {
        engine.step().unwrap();
        let statistics = engine.statistics();
        most = most.max(statistics.running);
        assert!(
            statistics.cache_bytes <= bytes,
            "{}",
            statistics.cache_bytes
        );
    }
    let statistics = engine.statistics();
    assert_eq!((most, statistics.finished), (2, 6));
    let without = statistics.blocks as u64 * sizes_of_blocks(&sizes);
    assert_eq!(statistics.cache_bytes, without + 8 * sizes.state_bytes);

    let error = Engine::new(
        &model,
        config(|c| {
            c.num_blocks = None;
            c.kv_cache_memory_bytes = Some(4 * sizes.state_bytes);
        }),
    );
    let least = 4 * sizes.state_bytes + sizes_of_blocks(&sizes);
    let error = error.unwrap_err().to_string();
    assert!(
        error.contains(&format!("at least {least}, the bytes of one block and of")),
        "{error}"
    );
}

/// Returns the bytes of a block of 4 tokens.
fn sizes_of_blocks(sizes: &PagedCacheConfig) -> u64 {
    let mut sizes = sizes.clone();
    sizes.block_size = 4;
    sizes.bytes_per_block()
}

#[test]
fn the_context_ends_a_sequence_as_it_does_alone() {
    let model = tiny(128);
    let prompt = vec![3; 250];
    let alone = generate(&model, std::slice::from_ref(&prompt), &greedy(50)).unwrap();
    let mut engine = Engine::new(&model, config(|_| {})).unwrap();
    engine
        .submit(Request::new(prompt.clone(), greedy(50)))
        .unwrap();
    let completion = engine.run_to_end().unwrap().remove(0).1.unwrap().remove(0);
    assert_eq!(completion.tokens, alone.new_tokens(0));
    assert_eq!(completion.finish_reason, FinishReason::ContextFull);

    let mut engine = Engine::new(&model, config(|c| c.max_model_len = Some(252))).unwrap();
    engine.submit(Request::new(prompt, greedy(50))).unwrap();
    let completion = engine.run_to_end().unwrap().remove(0).1.unwrap().remove(0);
    assert_eq!(completion.tokens, &alone.new_tokens(0)[..2]);
}

#[test]
fn a_cancelled_request_returns_its_tokens_and_the_others_continue() {
    let model = tiny(128);
    let mut engine = Engine::new(&model, config(|c| c.max_num_seqs = 2)).unwrap();
    let [running, kept, waiting] = [vec![1, 2], vec![3, 4, 5], vec![6]]
        .map(|prompt| engine.submit(Request::new(prompt, greedy(12))).unwrap());
    for _ in 0..3 {
        engine.step().unwrap();
    }
    assert!(engine.cancel(running).unwrap());
    assert!(engine.cancel(waiting).unwrap());
    assert!(!engine.cancel(waiting).unwrap(), "it is gone");
    let outcomes = engine.run_to_end().unwrap();
    let of = |id| {
        let (_, outcome) = outcomes.iter().find(|(request, _)| *request == id).unwrap();
        &outcome.as_ref().unwrap()[0]
    };
    assert_eq!(
        (of(running).tokens.len(), of(running).finish_reason),
        (3, FinishReason::Stopped)
    );
    assert_eq!(
        (of(waiting).tokens.len(), of(waiting).finish_reason),
        (0, FinishReason::Stopped)
    );
    let alone = generate(&model, &[vec![3, 4, 5]], &greedy(12)).unwrap();
    assert_eq!(of(kept).tokens, alone.new_tokens(0));
    let statistics = engine.statistics();
    assert_eq!((statistics.finished, statistics.cancelled), (1, 2));
    assert_no_block_is_held(&engine);
}

/// A model that fails on demand.
struct Faulty {
    model: CausalLm,
    /// The number of calls that will fail, counted down at each.
    failures: AtomicUsize,
    /// The token after which its logits are NaN.
    poison: i64,
    /// The token with which every step fails.
    fatal: Option<i64>,
    calls: Cell<usize>,
}

impl Faulty {
    fn new(failures: usize) -> Faulty {
        Faulty {
            model: tiny(128),
            failures: AtomicUsize::new(failures),
            poison: 99,
            fatal: None,
            calls: Cell::new(0),
        }
    }
}

impl EngineModel for Faulty {
    forwards_shape!(model);

    fn forward(&self, step: RaggedStep<'_, '_>) -> Result<Tensor> {
        self.calls.set(self.calls.get() + 1);
        let ids = Vec::try_from(step.input_ids.view([-1]))?;
        if self.fatal.is_some_and(|fatal| ids.contains(&fatal)) {
            return Err(tch::TchError::Kind("a fatal token".to_owned()).into());
        }
        let last = step
            .input_ids
            .view([-1])
            .index_select(0, step.logits_indices);
        let logits = EngineModel::forward(&self.model, step)?;
        let countdown = |left: usize| left.checked_sub(1);
        let failing = self
            .failures
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, countdown);
        // Fails after the cache has been written.
        if failing.is_ok() && self.calls.get() > 1 {
            return Err(tch::TchError::Kind("out of memory".to_owned()).into());
        }
        let poisoned = last.eq(self.poison).unsqueeze(1);
        Ok(logits.masked_fill(&poisoned, f64::NAN))
    }
}

fn byte_tokenizer() -> Arc<Tokenizer> {
    Arc::new(crate::support::byte_tokenizer())
}
