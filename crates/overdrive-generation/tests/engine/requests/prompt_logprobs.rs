//! Log-probabilities of prompts against forced decoding: each token is looked up in the distribution that generation
//! has after the tokens before it.

use std::cell::RefCell;
use std::ops::ControlFlow;

use overdrive_generation::{PromptLogprobs, TokenLogprobs};
use overdrive_transformer::ForwardInput;

use super::*;

/// A model of each kind of layers and caches: forced decoding computes every prompt once for each of its tokens.
const KINDS: [&str; 8] = [
    "llama_gqa",
    "qwen2_sliding",
    "mixtral",
    "deepseek_v3",
    "qwen3_5",
    "gpt_oss",
    "gpt2",
    "gemma3n",
];

/// The rounding between a prompt that is read at once and one that is read token by token.
const CLOSE: f32 = 2e-5;

/// Returns the log-probabilities of the tokens of `prompt` by forced decoding.
fn forced(model: &CausalLm, prompt: &[i64]) -> Vec<Option<TokenLogprobs>> {
    let all = model.config().vocab_size() as usize;
    let config = GenerationConfig {
        logprobs: Some(all),
        ..greedy(1)
    };
    let next = |at: usize| {
        let output = generate(model, &[prompt[..at].to_vec()], &config).unwrap();
        let mut one = output.logprobs.unwrap()[0][0].clone();
        let (_, logprob) = *one.top.iter().find(|(id, _)| *id == prompt[at]).unwrap();
        one.logprob = logprob;
        one.rank = one.top.iter().filter(|(_, x)| *x > logprob).count() + 1;
        Some(one)
    };
    std::iter::once(None)
        .chain((1..prompt.len()).map(next))
        .collect()
}

fn assert_close(got: &PromptLogprobs, want: &[Option<TokenLogprobs>], top: usize, what: &str) {
    assert_eq!(got.len(), want.len(), "{what}");
    for (at, (got, want)) in got.iter().zip(want).enumerate() {
        let (Some(got), Some(want)) = (got, want) else {
            assert!(got.is_none() && want.is_none() && at == 0, "{what}");
            continue;
        };
        let difference = (got.logprob - want.logprob).abs();
        assert!(
            difference < CLOSE,
            "{what}, {at}: {got:?} and {}",
            want.logprob
        );
        assert_eq!(got.top.len(), top);
        for (own, other) in got.top.iter().zip(&want.top) {
            assert!(
                (own.1 - other.1).abs() < CLOSE,
                "{what}, {at}: {own:?} {other:?}"
            );
        }
        // The rank is certain up to values that are equal but for rounding.
        let near = |x: f32| {
            let better = want.top.iter().filter(|(_, other)| *other > x).count();
            better + 1
        };
        let ranks = near(want.logprob + 2.0 * CLOSE)..=near(want.logprob - 2.0 * CLOSE);
        assert!(
            ranks.contains(&got.rank),
            "{what}, {at}: {} in {ranks:?}",
            got.rank
        );
    }
}

fn scored(prompt: &[i64], config: GenerationConfig, top: usize) -> Request {
    Request::new(prompt, config).with_prompt_logprobs(top)
}

/// Returns the options of a request that only scores its prompt.
fn nothing(prompt: &[i64]) -> GenerationConfig {
    GenerationConfig {
        max_length: Some(prompt.len()),
        ..GenerationConfig::default()
    }
}

#[test]
fn they_equal_forced_decoding_in_chunks_of_any_size_and_after_preemption() {
    for case in KINDS {
        let model = load(case);
        let prompts = prompts(model.config().vocab_size());
        let want: Vec<_> = prompts
            .iter()
            .map(|prompt| forced(&model, prompt))
            .collect();
        let alone: Vec<_> = prompts
            .iter()
            .map(|prompt| generate(&model, std::slice::from_ref(prompt), &greedy(24)).unwrap())
            .collect();
        for change in [
            (|_| {}) as fn(&mut EngineConfig),
            |c| c.max_num_batched_tokens = Some(8),
            |c| c.max_num_batched_tokens = Some(11),
            |c| c.num_blocks = Some(20),
            |c| {
                c.num_blocks = Some(18);
                c.enable_prefix_caching = false;
                c.watermark = 0.0;
            },
            |c| {
                c.num_blocks = Some(18);
                c.max_num_batched_tokens = Some(8);
                c.watermark = 0.0;
            },
        ] {
            let config = config(change);
            let mut engine = Engine::new(&model, config.clone()).unwrap();
            // The second time, the cache has the prompts.
            for round in 0..2 {
                for prompt in &prompts {
                    let request = scored(prompt, greedy(24), 3);
                    engine.submit(request).unwrap();
                }
                let outcomes = engine.run_to_end().unwrap();
                for (number, (_, outcome)) in outcomes.into_iter().enumerate() {
                    let completion = outcome.unwrap().remove(0);
                    let what = format!("{case}, round {round}, request {number}, {config:?}");
                    let got = completion.prompt_logprobs.unwrap();
                    assert_close(&got, &want[number], 3, &what);
                    assert_eq!(completion.tokens, alone[number].new_tokens(0), "{what}");
                }
            }
            let statistics = engine.statistics();
            if config.watermark == 0.0 {
                assert!(statistics.preemptions > 0, "{case}: nothing was preempted");
            }
            assert_no_block_is_held(&engine);
        }
    }
}

#[test]
fn a_scored_prompt_reads_no_cached_prefix_and_leaves_one() {
    let model = tiny(96);
    let prompt: Vec<i64> = (0..30).map(|at| (at * at + 5) % 96).collect();
    let want = forced(&model, &prompt);
    let mut engine = Engine::new(&model, config(|_| {})).unwrap();
    let reused = |engine: &Engine<&CausalLm>| engine.statistics().reused_tokens;
    let run = |engine: &mut Engine<&CausalLm>, request: Request| {
        let completions = engine.run_one(request, |_| ControlFlow::Continue(()));
        completions.unwrap().remove(0)
    };
    run(&mut engine, Request::new(prompt.clone(), greedy(2)));
    let got = run(&mut engine, scored(&prompt, greedy(2), 0))
        .prompt_logprobs
        .unwrap();
    assert_close(&got, &want, 0, "after the same prompt");
    assert_eq!(reused(&engine), 0);
    let plain = run(&mut engine, Request::new(prompt, greedy(2)));
    assert_eq!(plain.prompt_logprobs, None);
    assert_eq!(reused(&engine), 28);
}

#[test]
fn a_request_that_generates_nothing_ends_when_its_prompt_is_read() {
    let model = tiny(96);
    let mut engine = Engine::new(&model, config(|c| c.max_num_batched_tokens = Some(8))).unwrap();
    for length in [1, 2, 3, 9, 40] {
        let prompt: Vec<i64> = (0..length).map(|at| (at * 5 + 1) % 96).collect();
        let request = scored(&prompt, nothing(&prompt), 1);
        let mut events = Vec::new();
        let completions = engine
            .run_one(request, |new| {
                let logprobs = new.iter().filter_map(|event| match event {
                    Event::Prompt { logprobs, .. } => Some(logprobs.clone()),
                    Event::Token { .. } => panic!("a token of no text"),
                    _ => None,
                });
                events.extend(logprobs);
                ControlFlow::Continue(())
            })
            .unwrap();
        let [completion] = &completions[..] else {
            panic!("{completions:?}");
        };
        assert_eq!(completion.tokens, [0i64; 0]);
        assert_eq!(completion.finish_reason, FinishReason::Length);
        let got = completion.prompt_logprobs.clone().unwrap();
        assert_close(
            &got,
            &forced(&model, &prompt),
            1,
            &format!("{length} tokens"),
        );
        assert_eq!(events, [got], "the event comes once, with the same values");
    }
    assert_eq!(engine.statistics().generated_tokens, 0);
    assert_no_block_is_held(&engine);
}

#[test]
fn all_samples_of_a_request_have_those_of_their_prompt() {
    let model = tiny(96);
    let prompt: Vec<i64> = (0..20).map(|at| (at * 3) % 96).collect();
    let want = forced(&model, &prompt);
    let three = |config: GenerationConfig| GenerationConfig {
        do_sample: true,
        num_return_sequences: 3,
        seed: Some(4),
        ..config
    };
    let alone = generate(&model, std::slice::from_ref(&prompt), &three(greedy(6))).unwrap();
    for (config, new) in [(greedy(6), 6), (nothing(&prompt), 0)] {
        let mut engine = Engine::new(&model, EngineConfig::default()).unwrap();
        engine.submit(scored(&prompt, three(config), 2)).unwrap();
        let (_, outcome) = engine.run_to_end().unwrap().remove(0);
        let completions = outcome.unwrap();
        assert_eq!(completions.len(), 3);
        for (row, completion) in completions.into_iter().enumerate() {
            assert_close(&completion.prompt_logprobs.unwrap(), &want, 2, "a sample");
            assert_eq!(completion.tokens, alone.new_tokens(row)[..new]);
        }
        assert_no_block_is_held(&engine);
    }
}

#[test]
fn a_cancelled_request_has_none_before_its_prompt_is_read() {
    let model = tiny(96);
    let mut engine = Engine::new(&model, config(|c| c.max_num_batched_tokens = Some(8))).unwrap();
    let prompt: Vec<i64> = (0..40).collect();
    let id = engine.submit(scored(&prompt, greedy(5), 0)).unwrap();
    assert!(engine.step().unwrap().is_empty());
    assert!(engine.cancel(id).unwrap());
    let (_, outcome) = engine.run_to_end().unwrap().remove(0);
    let completion = outcome.unwrap().remove(0);
    assert_eq!(completion.prompt_logprobs, None);
    assert_eq!(completion.finish_reason, FinishReason::Stopped);
    assert_no_block_is_held(&engine);
}

/// A model that records the blocks of its steps, and fails in the first one after it has returned the logits.
struct FailsOnce<'a>(&'a CausalLm, RefCell<Vec<Vec<usize>>>);

impl EngineModel for FailsOnce<'_> {
    forwards_shape!(0);

    fn forward(&self, step: RaggedStep<'_, '_>) -> Result<Tensor> {
        EngineModel::forward(self.0, step)
    }

    fn forward_in_blocks(
        &self,
        step: RaggedStep<'_, '_>,
        blocks: &[usize],
        on_logits: &mut dyn FnMut(usize, Tensor) -> Result<()>,
    ) -> Result<()> {
        self.0.forward_in_blocks(step, blocks, on_logits)?;
        let mut steps = self.1.borrow_mut();
        steps.push(blocks.to_vec());
        match steps.len() {
            1 => Err(Error::EngineStopped),
            _ => Ok(()),
        }
    }
}

/// A prompt of more positions than a block of logits has, in a step that fails and is computed again.
#[test]
fn logits_are_scored_in_blocks_and_a_failed_step_counts_for_nothing() {
    tch::set_num_threads(1);
    let config = LlamaConfig {
        vocab_size: 300_000,
        hidden_size: 8,
        intermediate_size: 16,
        num_hidden_layers: 1,
        num_attention_heads: 2,
        ..LlamaConfig::default()
    };
    let model = CausalLm::new(&config.into(), &InitOptions::default()).unwrap();
    let prompt: Vec<i64> = (0..130).map(|at| at * 2_000 + 7).collect();
    let watched = FailsOnce(&model, RefCell::default());
    let config = super::config(|c| c.max_num_batched_tokens = Some(256));
    let mut engine = Engine::new(&watched, config).unwrap();
    engine.submit(scored(&prompt, greedy(1), 1)).unwrap();
    assert!(matches!(engine.step(), Err(Error::EngineStopped)));
    let (_, outcome) = engine.run_to_end().unwrap().remove(0);
    let got = outcome.unwrap().remove(0).prompt_logprobs.unwrap();
    // 64 MiB hold 55 rows, and the last token has a block of its own.
    assert_eq!(*watched.1.borrow(), [[1, 55, 55, 19], [1, 55, 55, 19]]);
    let whole = tch::no_grad(|| {
        let ids = Tensor::from_slice(&prompt).unsqueeze(0);
        let hidden = CausalLm::hidden_states(&model, ForwardInput::new(&ids));
        let logits = model.logits(&hidden.unwrap()).unwrap();
        logits.squeeze_dim(0).log_softmax(-1, tch::Kind::Float)
    });
    assert_eq!(got.len(), prompt.len());
    for (at, one) in got.iter().enumerate().skip(1) {
        let want = whole.double_value(&[at as i64 - 1, prompt[at]]) as f32;
        assert!((one.as_ref().unwrap().logprob - want).abs() < CLOSE, "{at}");
    }
}
