//! Tests that speculation changes the speed of generation and nothing else.

use std::collections::HashMap;
use std::ops::ControlFlow;

use crate::support::{chi_squared, greedy, load, once_in_a_thousand, random_model, sampled};
use overdrive_generation::{
    CacheConfig, ChoiceConstraint, GenerateOptions, GenerateOutput, GenerationConfig,
    NumAssistantTokensSchedule, Tokenizer, generate, generate_with_options,
};
use overdrive_transformer::CausalLm;

fn with_assistant(
    model: &CausalLm,
    assistant: &CausalLm,
    prompts: &[Vec<i64>],
    config: &GenerationConfig,
) -> GenerateOutput {
    let options = GenerateOptions {
        assistant_model: Some(assistant),
        ..GenerateOptions::default()
    };
    let go_on = |_: overdrive_generation::GeneratedToken<'_>| ControlFlow::Continue(());
    generate_with_options(model, prompts, config, &options, go_on).unwrap()
}

fn lookup(config: GenerationConfig) -> GenerationConfig {
    GenerationConfig {
        prompt_lookup_num_tokens: Some(5),
        ..config
    }
}

#[test]
fn greedy_speculation_gives_the_same_tokens_whatever_is_proposed() {
    let prompts = [vec![5, 9, 3, 7, 5, 9], vec![100], vec![8, 8, 8, 8]];
    for case in ["llama_gqa", "gpt2", "qwen3", "mixtral", "qwen3_5"] {
        let model = load(case);
        let vocabulary = model.config().vocab_size();
        // One draft that is always right, and one that is hardly ever.
        let assistants = [load(case), random_model(vocabulary, 1, 9)];
        for config in [
            greedy(30),
            GenerationConfig {
                repetition_penalty: 1.3,
                no_repeat_ngram_size: 3,
                eos_token_id: vec![17],
                ..greedy(30)
            },
        ] {
            let want = generate(&model, &prompts, &config).unwrap();
            let check = |got: &GenerateOutput, how: &str| {
                assert_eq!(got.sequences, want.sequences, "{case}, {how}");
                assert_eq!(got.finish_reasons, want.finish_reasons, "{case}, {how}");
            };
            check(
                &generate(&model, &prompts, &lookup(config.clone())).unwrap(),
                "lookup",
            );
            for (assistant, schedule) in assistants.iter().zip([
                NumAssistantTokensSchedule::Constant,
                NumAssistantTokensSchedule::Heuristic,
            ]) {
                let config = GenerationConfig {
                    num_assistant_tokens: 4,
                    num_assistant_tokens_schedule: schedule,
                    assistant_confidence_threshold: 0.0,
                    ..config.clone()
                };
                let got = with_assistant(&model, assistant, &prompts, &config);
                check(&got, "assistant");
            }
        }
    }
}

#[test]
fn a_model_that_assists_itself_is_always_right_and_needs_few_rounds() {
    let (model, prompt) = (load("llama_gqa"), [vec![5, 9, 3]]);
    let config = GenerationConfig {
        num_assistant_tokens: 5,
        assistant_confidence_threshold: 0.0,
        ..greedy(31)
    };
    let output = with_assistant(&model, &model, &prompt, &config);
    let statistics = output.speculation.unwrap();
    // One token from the prompt, then 6 a round.
    assert_eq!(
        (statistics.rounds, statistics.proposed, statistics.accepted),
        (5, 25, 25)
    );
    // A repetition is found in the earlier tokens.
    let repeated: Vec<i64> = [11, 12, 13, 14].repeat(5);
    let output = generate(&model, &[repeated], &lookup(greedy(40))).unwrap();
    let statistics = output.speculation.unwrap();
    assert!(statistics.proposed > 0 && statistics.rounds <= 39);
}

#[test]
fn an_unsure_assistant_stops_early() {
    let (model, prompt) = (load("llama_gqa"), [vec![5, 9, 3]]);
    let config = |threshold| GenerationConfig {
        num_assistant_tokens: 5,
        assistant_confidence_threshold: threshold,
        ..greedy(30)
    };
    let unsure = with_assistant(&model, &model, &prompt, &config(1.0));
    let statistics = unsure.speculation.unwrap();
    // One proposed token a round, which gives two; the last round has room for one only.
    assert_eq!((statistics.rounds, statistics.proposed), (15, 14));
    let sure = with_assistant(&model, &model, &prompt, &config(0.0));
    assert_eq!(unsure.sequences, sure.sequences);
}

/// Returns the frequencies of the first `tokens` new tokens over many seeds.
fn frequencies(runs: u64, mut run: impl FnMut(u64) -> Vec<i64>) -> HashMap<Vec<i64>, f64> {
    let mut counts = HashMap::new();
    for seed in 0..runs {
        *counts.entry(run(seed)).or_insert(0.0) += 1.0;
    }
    counts
}

/// Returns the probabilities of all continuations of two tokens, computed by the model itself.
fn exact(model: &CausalLm, prompt: &[i64], config: &GenerationConfig) -> HashMap<Vec<i64>, f64> {
    let next = |ids: &[i64]| -> Vec<(i64, f64)> {
        let config = GenerationConfig {
            logprobs: Some(8),
            logprobs_mode: overdrive_generation::LogprobsMode::ProcessedLogprobs,
            ..GenerationConfig {
                max_new_tokens: Some(1),
                ..config.clone()
            }
        };
        let output = generate(model, &[ids.to_vec()], &config).unwrap();
        let top = output.logprobs.unwrap()[0][0].top.clone();
        top.into_iter()
            .map(|(id, logprob)| (id, f64::from(logprob).exp()))
            .collect()
    };
    let mut all = HashMap::new();
    for (first, p) in next(prompt) {
        let longer = [prompt, &[first]].concat();
        for (second, q) in next(&longer) {
            all.insert(vec![first, second], p * q);
        }
    }
    all
}

#[test]
fn speculative_samples_have_the_distribution_of_plain_ones() {
    // 6 tokens: 36 pairs, counted over 500 seeds. A correct sampler exceeds the thresholds once in a
    // thousand sets of seeds, and these seeds are fixed.
    let (model, assistant) = (random_model(6, 2, 1), random_model(6, 1, 2));
    // The last tokens of the prompt occur earlier in it, so that there is something to look up.
    let prompt = vec![1, 2, 3, 1, 2];
    for cut in [
        sampled(2, 0),
        GenerationConfig {
            top_k: 4,
            temperature: 1.3,
            ..sampled(2, 0)
        },
    ] {
        let probabilities = exact(&model, &prompt, &cut);
        let pairs: Vec<&Vec<i64>> = probabilities.keys().collect();
        let total: f64 = probabilities.values().sum();
        assert!((total - 1.0).abs() < 1e-5, "{total}");
        for how in ["assistant", "lookup"] {
            let counts = frequencies(500, |seed| {
                // Three tokens: the second comes out of a round.
                let config = GenerationConfig {
                    max_new_tokens: Some(3),
                    seed: Some(seed),
                    num_assistant_tokens: 2,
                    assistant_confidence_threshold: 0.0,
                    ..cut.clone()
                };
                let prompts = std::slice::from_ref(&prompt);
                let output = match how {
                    "assistant" => with_assistant(&model, &assistant, prompts, &config),
                    _ => generate(&model, prompts, &lookup(config)).unwrap(),
                };
                output.new_tokens(0)[..2].to_vec()
            });
            let seen: f64 = pairs
                .iter()
                .map(|pair| counts.get(*pair).unwrap_or(&0.0))
                .sum();
            assert_eq!(seen, 500.0, "{how}: a pair that cannot be");
            let counted: Vec<f64> = pairs
                .iter()
                .map(|pair| *counts.get(*pair).unwrap_or(&0.0))
                .collect();
            let expected: Vec<f64> = pairs.iter().map(|pair| probabilities[*pair]).collect();
            let (statistic, freedom) = chi_squared(&counted, &expected);
            let threshold = once_in_a_thousand(freedom);
            assert!(
                statistic < threshold,
                "{how}: {statistic} of {threshold} at {freedom}"
            );
        }
    }
}

#[test]
fn speculation_keeps_to_a_constraint_and_reports_the_same_log_probabilities() {
    let (model, assistant) = (random_model(40, 2, 1), random_model(40, 1, 2));
    let choices = [vec![4, 5, 6, 7, 8, 9], vec![4, 5, 6, 10]];
    let config = GenerationConfig {
        logprobs: Some(2),
        num_assistant_tokens: 3,
        assistant_confidence_threshold: 0.0,
        ..greedy(12)
    };
    let run = |assistant_model| {
        let constraint = ChoiceConstraint::new(&choices, &[]).unwrap();
        let options = GenerateOptions {
            assistant_model,
            constraints: vec![Box::new(constraint)],
            ..GenerateOptions::default()
        };
        let go_on = |_: overdrive_generation::GeneratedToken<'_>| ControlFlow::Continue(());
        generate_with_options(&model, &[vec![1, 2]], &config, &options, go_on).unwrap()
    };
    let (plain, speculative) = (run(None), run(Some(&assistant)));
    assert_eq!(plain.sequences, speculative.sequences);
    assert_eq!(plain.finish_reasons, speculative.finish_reasons);
    let (want, got) = (
        plain.logprobs.clone().unwrap(),
        speculative.logprobs.unwrap(),
    );
    for (want, got) in want[0].iter().zip(&got[0]) {
        assert!((want.logprob - got.logprob).abs() < 1e-4);
        assert_eq!(want.rank, got.rank);
    }
    assert!(choices.iter().any(|choice| choice == plain.new_tokens(0)));
}

/// Returns a tokenizer whose token `id` is `name(id)`.
fn words(size: usize, name: impl Fn(usize) -> String) -> Tokenizer {
    let vocabulary: serde_json::Map<_, _> = (0..size).map(|id| (name(id), id.into())).collect();
    let json = serde_json::json!({
        "version": "1.0", "added_tokens": [],
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": name(0)},
    });
    serde_json::from_value(json).unwrap()
}

#[test]
fn a_draft_with_more_or_less_padding_proposes_the_shared_tokens() {
    let prompts = [vec![5, 9, 3, 7, 5, 9]];
    let model = random_model(60, 2, 1);
    let config = GenerationConfig {
        num_assistant_tokens: 4,
        assistant_confidence_threshold: 0.0,
        repetition_penalty: 1.2,
        // An id that the smaller draft does not have.
        suppress_tokens: vec![59],
        ..greedy(30)
    };
    let sample = GenerationConfig {
        top_k: 0,
        ..sampled(30, 4)
    };
    let want = generate(&model, &prompts, &config).unwrap();
    for size in [48, 60, 100] {
        let draft = random_model(size, 1, 2);
        let got = with_assistant(&model, &draft, &prompts, &config);
        assert_eq!(got.sequences, want.sequences, "{size}");
        assert!(got.speculation.unwrap().proposed > 0, "{size}");
        let sample = GenerationConfig {
            do_sample: true,
            ..sample.clone()
        };
        let got = with_assistant(&model, &draft, &prompts, &sample);
        assert!(got.sequences[0].iter().all(|id| (0..60).contains(id)));
        // A proposal is never a token that only one of them has: those are accepted by chance only.
        assert_eq!(got.new_tokens(0).len(), 30, "{size}");
    }
    // A token that the draft cannot read: the model goes on alone.
    let draft = random_model(48, 1, 2);
    let beyond = [vec![5, 55, 3]];
    let got = with_assistant(&model, &draft, &beyond, &config);
    let want = generate(&model, &beyond, &config).unwrap();
    assert_eq!(got.sequences, want.sequences);
    assert_eq!(got.speculation.unwrap().proposed, 0);
}

#[test]
fn a_draft_is_refused_for_another_token_of_the_same_id_and_not_for_its_size() {
    let model = random_model(60, 2, 1);
    let run = |draft: i64, tokenizers: Option<(&Tokenizer, &Tokenizer)>| {
        let draft = random_model(draft, 1, 2);
        let options = GenerateOptions {
            assistant_model: Some(&draft),
            tokenizer: tokenizers.map(|(own, _)| own),
            assistant_tokenizer: tokenizers.map(|(_, other)| other),
            ..GenerateOptions::default()
        };
        let go_on = |_: overdrive_generation::GeneratedToken<'_>| ControlFlow::Continue(());
        generate_with_options(&model, &[vec![1, 2]], &greedy(5), &options, go_on)
    };
    let plain = |id: usize| format!("w{id}");
    let (own, fewer) = (words(50, plain), words(40, plain));
    // Without tokenizers the sizes alone decide, as in llama.cpp.
    assert!(run(188, None).is_ok());
    let error = run(189, None).unwrap_err().to_string();
    assert!(error.contains("has 189 tokens"), "{error}");
    assert!(run(1000, Some((&own, &fewer))).is_ok());
    let other = words(40, |id| if id == 17 { "x".to_owned() } else { plain(id) });
    assert_eq!(
        run(60, Some((&own, &other))).unwrap_err().to_string(),
        "token 17 is \"x\" for the assistant model and \"w17\" for the model; choose an assistant \
         with the same tokenizer"
    );
    // Beyond the smaller vocabulary there is nothing to share.
    let late = words(40, |id| if id == 17 { "x".to_owned() } else { plain(id) });
    assert!(run(17, Some((&own, &late))).is_ok());
}

#[test]
fn speculation_continues_beyond_the_context_over_a_window() {
    let model = load("llama_gqa");
    let context = model.config().max_position_embeddings() as usize;
    let prompt = [vec![5, 9, 3, 7, 5, 9, 3]];
    let windowed = GenerationConfig {
        cache_implementation: Some("sliding_window".to_owned()),
        cache_config: CacheConfig {
            window_length: Some(context as i64 / 2),
            num_sink_tokens: 0,
            ..CacheConfig::default()
        },
        ..greedy(2 * context)
    };
    let want = generate(&model, &prompt, &windowed).unwrap();
    assert_eq!(want.new_tokens(0).len(), 2 * context);
    let looked_up = GenerationConfig {
        max_matching_ngram_size: 1,
        ..lookup(windowed.clone())
    };
    let got = generate(&model, &prompt, &looked_up).unwrap();
    assert_eq!(got.sequences, want.sequences);
    assert!(got.speculation.unwrap().proposed > 0);
    // A draft that is always right proposes ever more; the cache can take back as much as it keeps.
    let config = GenerationConfig {
        num_assistant_tokens: 2,
        num_assistant_tokens_schedule: NumAssistantTokensSchedule::Heuristic,
        assistant_confidence_threshold: 0.0,
        ..windowed
    };
    let got = with_assistant(&model, &model, &prompt, &config);
    assert_eq!(got.finish_reasons, want.finish_reasons);
    assert_eq!(got.new_tokens(0).len(), 2 * context);
}
