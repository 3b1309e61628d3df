//! The engine against `generate`, one request at a time.
#![allow(clippy::unwrap_used, reason = "a failed step of a test should panic")]

mod support;

use std::cell::Cell;
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use overdrive_generation::{
    CacheShape, ChoiceConstraint, Completion, Engine, EngineConfig, EngineHandle, EngineModel,
    Error, Event, FinishReason, GenerateOptions, GenerationConfig, RaggedStep, Request, Result,
    Tokenizer, generate, generate_with_options,
};
use overdrive_transformer::{CausalLm, InitOptions, LlamaConfig};
use tch::Tensor;

const CASES: [&str; 7] = [
    "llama_gqa",
    "llama3_rope",
    "mistral",
    "qwen2_sliding",
    "qwen3",
    "gpt2",
    "gpt2_scaled",
];

fn load(case: &str) -> CausalLm {
    // Tests run beside one another, and their models are too small for threads of their own.
    tch::set_num_threads(1);
    let crates = PathBuf::from(env!("CARGO_MANIFEST_DIR"));
    let dir = crates
        .join("../overdrive-transformer/tests/fixtures")
        .join(case);
    CausalLm::from_pretrained(dir, &Default::default()).unwrap()
}

fn tiny(vocab_size: i64) -> CausalLm {
    // Tests run beside one another, and their models are too small for threads of their own.
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
    let mut config = EngineConfig::default();
    config.block_size = 4;
    config.num_blocks = Some(64);
    config.max_num_seqs = 8;
    config.max_num_batched_tokens = Some(64);
    change(&mut config);
    config
}

/// Prompts of 1 to 40 tokens, some of which begin alike.
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
        // Roomy; with parts of prompts; with so few blocks that texts are preempted; without sharing.
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
            // They join while others run.
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

#[test]
fn samples_of_one_prompt_share_its_blocks_and_equal_those_of_generate() {
    let model = tiny(128);
    let prompt: Vec<i64> = (0..41).collect();
    let config_of = |copies| GenerationConfig {
        num_return_sequences: copies,
        ..sampled(20, 3)
    };
    let want = generate(&model, std::slice::from_ref(&prompt), &config_of(5)).unwrap();
    // Seats for all of them; for two; blocks for two.
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
        engine.submit(Request::new(prompt, greedy(8))).unwrap();
        let mut outcomes = engine.run_to_end().unwrap();
        let completion = outcomes.remove(0).1.unwrap().remove(0);
        (completion.tokens, engine.statistics().reused_tokens)
    };
    let (first, reused) = run(&prompt);
    assert_eq!(reused, 0);
    let (again, reused) = run(&prompt);
    assert_eq!(
        (again, reused),
        (first.clone(), 36),
        "all blocks but that of the last token"
    );
    // A conversation goes on: what was answered is there, too, but for the last token.
    let longer = [prompt, first, vec![5, 6, 7]].concat();
    let (_, reused) = run(&longer);
    assert_eq!(reused, 36 + 44);
}

#[test]
fn what_cannot_be_served_is_refused_with_the_numbers() {
    let model = tiny(128);
    let mut engine = Engine::new(&model, config(|c| c.num_blocks = Some(10))).unwrap();
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
        "the request takes 32 tokens of prompt and 10 new ones, 11 blocks of 4 tokens, and the cache \
         has 10: lower max_new_tokens, or give the engine more num_blocks or kv_cache_memory_bytes"
    );
    assert!(refused(vec![], &|_| {}).contains("empty"));
    assert!(refused(vec![1; 300], &|_| {}).contains("the model's context 256"));
    assert!(refused(vec![1, 128], &|_| {}).contains("the model's vocabulary is 0..128"));
    assert!(refused(vec![1], &|c| c.eos_token_id = vec![128]).contains("eos_token_id"));
    assert!(refused(vec![1], &|c| c.temperature = -1.0).contains("temperature"));
    assert!(refused(vec![1], &|c| c.num_beams = 2).contains("use generate"));
    assert!(refused(vec![1], &|c| c.use_cache = false).contains("use generate"));
    let text = refused(vec![1], &|c| c.stop_strings = vec!["x".to_owned()]);
    assert!(text.contains("with_tokenizer"), "{text}");
    // 31 and 10 need 40 places: the last token is never read.
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
fn the_context_ends_a_text_as_it_does_alone() {
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
fn a_cancelled_request_leaves_with_what_it_has_and_the_others_go_on() {
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

/// A model that can be told to fail.
struct Faulty {
    model: CausalLm,
    /// Calls that fail, counted down at each.
    failures: AtomicUsize,
    /// After this token its logits are no numbers.
    poison: i64,
    calls: Cell<usize>,
}

impl Faulty {
    fn new(failures: usize) -> Faulty {
        Faulty {
            model: tiny(128),
            failures: AtomicUsize::new(failures),
            poison: 99,
            calls: Cell::new(0),
        }
    }
}

impl EngineModel for Faulty {
    fn cache_shape(&self) -> Result<CacheShape> {
        self.model.cache_shape()
    }

    fn vocab_size(&self) -> usize {
        EngineModel::vocab_size(&self.model)
    }

    fn context(&self) -> usize {
        self.model.context()
    }

    fn forward(&self, step: RaggedStep<'_, '_>) -> Result<Tensor> {
        self.calls.set(self.calls.get() + 1);
        let last = step.input_ids.view([-1]).index_select(0, step.places);
        let logits = EngineModel::forward(&self.model, step)?;
        let countdown = |left: usize| left.checked_sub(1);
        let failing = self
            .failures
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, countdown);
        // After the cache has been written.
        if failing.is_ok() && self.calls.get() > 1 {
            return Err(tch::TchError::Kind("out of memory".to_owned()).into());
        }
        let poisoned = last.eq(self.poison).unsqueeze(1);
        Ok(logits.masked_fill(&poisoned, f64::NAN))
    }
}

#[test]
fn a_request_with_bad_logits_fails_and_no_other_does() {
    let mut engine = Engine::new(Faulty::new(0), config(|_| {})).unwrap();
    let good = engine.submit(Request::new([1, 2, 3], greedy(8))).unwrap();
    let bad = engine
        .submit(Request::new(
            [4, 99],
            GenerationConfig {
                num_return_sequences: 3,
                ..sampled(8, 1)
            },
        ))
        .unwrap();
    let other = engine.submit(Request::new([5, 6], greedy(8))).unwrap();
    let outcomes: BTreeMap<_, _> = engine.run_to_end().unwrap().into_iter().collect();
    assert!(
        matches!(outcomes[&bad], Err(Error::BadLogits { .. })),
        "{:?}",
        outcomes[&bad]
    );
    for (id, prompt) in [(good, vec![1, 2, 3]), (other, vec![5, 6])] {
        let alone = generate(&engine.model().model, &[prompt], &greedy(8)).unwrap();
        assert_eq!(
            outcomes[&id].as_ref().unwrap()[0].tokens,
            alone.new_tokens(0)
        );
    }
    let statistics = engine.statistics();
    assert_eq!((statistics.finished, statistics.failed), (2, 1));
    assert_no_block_is_held(&engine);
}

#[test]
fn a_step_that_fails_is_undone_and_computed_again() {
    let mut engine = Engine::new(Faulty::new(4), config(|_| {})).unwrap();
    engine
        .submit(Request::new([1, 2, 3], sampled(10, 5)))
        .unwrap();
    engine.submit(Request::new([7; 20], greedy(10))).unwrap();
    let mut errors = 0;
    let outcomes = loop {
        match engine.run_to_end() {
            Ok(outcomes) => break outcomes,
            Err(error) => {
                assert!(error.to_string().contains("out of memory"));
                errors += 1;
            }
        }
    };
    assert_eq!(errors, 3);
    let model = &engine.model().model;
    for (outcome, (prompt, config)) in outcomes
        .iter()
        .zip([(vec![1, 2, 3], sampled(10, 5)), (vec![7; 20], greedy(10))])
    {
        let alone = generate(model, &[prompt], &config).unwrap();
        assert_eq!(outcome.1.as_ref().unwrap()[0].tokens, alone.new_tokens(0));
    }
    assert_no_block_is_held(&engine);
}

#[test]
fn constraints_log_probabilities_and_a_time_limit_are_heeded() {
    let model = tiny(128);
    let config_of = GenerationConfig {
        logprobs: Some(2),
        eos_token_id: vec![0],
        ..greedy(10)
    };
    let choices = || ChoiceConstraint::new(&[vec![9, 8, 7], vec![9, 8, 6, 5]], &[0]).unwrap();
    let options = GenerateOptions {
        constraints: vec![Box::new(choices())],
        ..GenerateOptions::default()
    };
    let go_on = |_: overdrive_generation::GeneratedToken<'_>| std::ops::ControlFlow::Continue(());
    let prompt = vec![1, 2, 3];
    let want = generate_with_options(
        &model,
        std::slice::from_ref(&prompt),
        &config_of,
        &options,
        go_on,
    )
    .unwrap();
    let mut engine = Engine::new(&model, config(|_| {})).unwrap();
    let request = Request::new(prompt, config_of).with_constraint(Box::new(choices()));
    engine.submit(request).unwrap();
    let late = GenerationConfig {
        max_time: Some(1e-9),
        ..greedy(100)
    };
    engine.submit(Request::new([1], late)).unwrap();
    let mut outcomes = engine.run_to_end().unwrap();
    let late = outcomes.remove(1).1.unwrap().remove(0);
    assert_eq!(
        (late.tokens.len(), late.finish_reason),
        (0, FinishReason::TimeLimit)
    );
    let got = outcomes.remove(0).1.unwrap().remove(0);
    assert_eq!(got.tokens, want.new_tokens(0));
    assert_eq!(got.finish_reason, want.finish_reasons[0]);
    let (got, want) = (got.logprobs.unwrap(), want.logprobs.unwrap().remove(0));
    assert_eq!(got.len(), want.len());
    for (got, want) in got.iter().zip(&want) {
        assert!(
            (got.logprob - want.logprob).abs() < 1e-4,
            "{got:?} for {want:?}"
        );
    }
}

fn byte_tokenizer() -> Arc<Tokenizer> {
    Arc::new(support::byte_tokenizer())
}

#[test]
fn texts_and_stop_strings_are_those_of_generate() {
    let (model, tokenizer) = (tiny(256), byte_tokenizer());
    let prompt: Vec<i64> = vec![10, 20, 30];
    let free = generate(&model, std::slice::from_ref(&prompt), &sampled(40, 8)).unwrap();
    let ids: Vec<u32> = free.new_tokens(0).iter().map(|&id| id as u32).collect();
    let all = tokenizer.decode(&ids, true).unwrap();
    let stop: String = all.chars().skip(12).take(2).collect();
    let config_of = GenerationConfig {
        stop_strings: vec!["never".to_owned(), stop.clone()],
        ..sampled(40, 8)
    };
    let options = GenerateOptions {
        tokenizer: Some(&tokenizer),
        ..GenerateOptions::default()
    };
    let go_on = |_: overdrive_generation::GeneratedToken<'_>| std::ops::ControlFlow::Continue(());
    let want = generate_with_options(
        &model,
        std::slice::from_ref(&prompt),
        &config_of,
        &options,
        go_on,
    )
    .unwrap();
    let mut engine = Engine::new(&model, config(|_| {}))
        .unwrap()
        .with_tokenizer(tokenizer);
    engine
        .submit(Request::new(prompt.clone(), config_of))
        .unwrap();
    let whole = engine.submit(Request::new(prompt, sampled(40, 8))).unwrap();
    let (mut streamed, mut done) = (BTreeMap::<_, String>::new(), BTreeMap::new());
    while !engine.is_idle() {
        for event in engine.step().unwrap() {
            match event {
                Event::Token { request, text, .. } => {
                    streamed.entry(request).or_default().push_str(&text);
                }
                Event::Finished {
                    request,
                    completion,
                    ..
                } => {
                    done.insert(request, completion);
                }
                other => panic!("{other:?}"),
            }
        }
    }
    assert_eq!(done[&whole].text.as_deref(), Some(all.as_str()));
    assert_eq!(streamed[&whole], all);
    let (id, stopped) = done.first_key_value().unwrap();
    assert_eq!(
        stopped.finish_reason,
        FinishReason::StopString { number: 1 }
    );
    assert_eq!(stopped.text.as_deref(), Some(want.texts[0].as_str()));
    assert_eq!(streamed[id], want.texts[0]);
    assert!(!want.texts[0].contains(&stop));
}

#[test]
fn a_handle_serves_many_threads() {
    let model = tiny(128);
    let want: Vec<_> = (0..24)
        .map(|n| generate(&model, &[vec![n, 5, 9]], &greedy(10)).unwrap())
        .collect();
    let engine = EngineHandle::spawn(Engine::new(model, config(|_| {})).unwrap()).unwrap();
    let engine = &engine;
    std::thread::scope(|scope| {
        for thread in 0..4i64 {
            let want = &want;
            scope.spawn(move || {
                for n in (thread..24).step_by(4) {
                    let events = engine.submit(Request::new([n, 5, 9], greedy(10))).unwrap();
                    if n % 3 == 0 {
                        continue; // The client goes away, and its request with it.
                    }
                    let completions = events.wait().unwrap();
                    assert_eq!(completions[0].tokens, want[n as usize].new_tokens(0));
                }
            });
        }
    });
    assert!(
        engine.submit(Request::new([500], greedy(1))).is_err(),
        "checked before it is sent"
    );
    let mut events = engine.submit(Request::new([1], greedy(200))).unwrap();
    let first = events.next().unwrap();
    assert!(matches!(first, Event::Token { .. }));
    events.cancel();
    let last = events.by_ref().last().unwrap();
    assert!(last.is_last());
    let Event::Finished { completion, .. } = last else {
        panic!("{last:?}");
    };
    assert_eq!(completion.finish_reason, FinishReason::Stopped);
}

#[test]
fn a_handle_gives_up_what_cannot_be_computed_and_serves_what_comes_after() {
    // The first call is left alone; the four after it fail.
    let engine = Engine::new(Faulty::new(5), config(|_| {})).unwrap();
    let engine = EngineHandle::spawn(engine).unwrap();
    let error = engine
        .submit(Request::new([1, 2], greedy(8)))
        .unwrap()
        .wait()
        .unwrap_err();
    assert!(matches!(error, Error::EngineFailed { .. }), "{error}");
    assert!(error.to_string().contains("out of memory"));
    let completions = engine
        .submit(Request::new([1, 2], greedy(8)))
        .unwrap()
        .wait()
        .unwrap();
    let alone = generate(&tiny(128), &[vec![1, 2]], &greedy(8)).unwrap();
    assert_eq!(completions[0].tokens, alone.new_tokens(0));
    let statistics = engine.finish().unwrap();
    assert_eq!(
        (
            statistics.failed,
            statistics.finished,
            statistics.blocks_used
        ),
        (1, 1, 0)
    );
    assert!(statistics.tokens_per_second() > 0.0);
    assert!(statistics.time_to_first_token.max > Duration::ZERO);
}

#[test]
fn a_handle_that_goes_away_ends_what_it_serves() {
    let engine = EngineHandle::spawn(Engine::new(tiny(128), config(|_| {})).unwrap()).unwrap();
    let events = engine.submit(Request::new([1], greedy(250))).unwrap();
    drop(engine);
    assert!(matches!(events.wait(), Err(Error::EngineStopped)));
}
