//! Tests of the conditions that end a row, of log-probabilities, and of options that must not change
//! tokens.

use std::ops::ControlFlow;

use crate::support::{byte_tokenizer, encode, greedy, load, random_model, sampled};
use overdrive_generation::{
    CacheConfig, FinishReason, GenerateOptions, GenerateOutput, GeneratedToken, GenerationConfig,
    LogprobsMode, generate, generate_text, generate_with_options,
};
use overdrive_transformer::{CausalLm, ForwardInput};
use tch::Tensor;

fn keep_generating(_: GeneratedToken<'_>) -> ControlFlow<()> {
    ControlFlow::Continue(())
}

/// Returns a text of 200 sampled bytes.
fn long_text(
    seed: u64,
) -> (
    CausalLm,
    tokenizers::Tokenizer,
    Vec<i64>,
    GenerationConfig,
    String,
) {
    let (model, tokenizer) = (random_model(257, 1, 3), byte_tokenizer());
    let prompt = encode(&tokenizer, "hi ");
    let config = GenerationConfig {
        suppress_tokens: vec![256],
        ..sampled(200, seed)
    };
    let mut text = String::new();
    generate_text(&model, &tokenizer, &prompt, &config, |piece| {
        text.push_str(piece);
        ControlFlow::Continue(())
    })
    .unwrap();
    (model, tokenizer, prompt, config, text)
}

#[test]
fn a_stop_string_ends_the_row_and_is_not_in_the_text() {
    let (model, tokenizer, prompt, config, text) = long_text(5);
    // Three characters of several bytes each, from the middle.
    let stop: String = text.chars().skip(60).take(3).collect();
    let start = text.find(&stop).unwrap();
    let config = GenerationConfig {
        stop_strings: vec!["never in it at all".to_owned(), stop.clone()],
        ..config
    };
    let mut streamed = String::new();
    let output = generate_text(&model, &tokenizer, &prompt, &config, |piece| {
        streamed.push_str(piece);
        ControlFlow::Continue(())
    })
    .unwrap();
    assert_eq!(streamed, text[..start]);
    assert_eq!(output.texts, [&text[..start]]);
    assert_eq!(
        output.finish_reasons,
        [FinishReason::StopString { number: 1 }]
    );
    // The tokens include the stop string, as in transformers, and the ones that were needed to know
    // that its last bytes are whole characters.
    let ids: Vec<u32> = output.new_tokens(0).iter().map(|&id| id as u32).collect();
    assert!(tokenizer.decode(&ids, true).unwrap().contains(&stop));
    let without = generate(&model, &[prompt], &config)
        .unwrap_err()
        .to_string();
    assert!(
        without.contains("`stop_strings` needs a tokenizer"),
        "{without}"
    );
}

#[test]
fn a_stop_string_that_is_a_special_token_ends_the_row_with_it() {
    let (model, tokenizer, prompt, config, _) = long_text(5);
    let run = |config: &GenerationConfig| {
        generate_text(&model, &tokenizer, &prompt, config, |_| {
            ControlFlow::Continue(())
        })
        .unwrap()
    };
    // Only after one token the special one is likely.
    let rare = |trigger: i64, new: usize| GenerationConfig {
        max_new_tokens: Some(new),
        suppress_tokens: Vec::new(),
        logit_bias: [(256, -1000.0)].into(),
        sequence_bias: vec![(vec![trigger, 256], 2000.0)],
        ..config.clone()
    };
    let free = run(&rare(256, 20));
    let trigger = free.new_tokens(0)[6];
    let end = 1 + free
        .new_tokens(0)
        .iter()
        .position(|&id| id == trigger)
        .unwrap();
    let before = run(&rare(trigger, end));
    let config = GenerationConfig {
        stop_strings: vec!["never in it at all".to_owned(), "<end>".to_owned()],
        ..rare(trigger, 40)
    };
    let output = run(&config);
    assert_eq!(
        output.finish_reasons,
        [FinishReason::StopString { number: 1 }]
    );
    assert_eq!(
        output.new_tokens(0).split_last().unwrap().1,
        before.new_tokens(0)
    );
    assert_eq!(output.new_tokens(0)[end], 256);
    assert_eq!(output.texts, before.texts);
    let later = run(&GenerationConfig {
        min_tokens: end + 1,
        ..config
    });
    assert_eq!(&later.new_tokens(0)[..=end], output.new_tokens(0));
    assert!(later.new_tokens(0).len() > end + 1, "it did not count");
}

#[test]
fn before_min_tokens_no_stop_token_is_chosen_and_no_stop_string_counts() {
    let (model, tokenizer, prompt, config, text) = long_text(5);
    let run = |config: &GenerationConfig| {
        generate_text(&model, &tokenizer, &prompt, config, |_| {
            ControlFlow::Continue(())
        })
        .unwrap()
    };
    let free = run(&config);
    let stop: String = text.chars().skip(60).take(3).collect();
    let output = run(&GenerationConfig {
        stop_strings: vec![stop],
        min_tokens: 200,
        ..config.clone()
    });
    assert_eq!(
        (&output.texts[0], output.finish_reasons[0]),
        (&text, FinishReason::Length)
    );
    // The first token that is another than those before it.
    let ids = free.new_tokens(0);
    let end = ids.iter().position(|id| *id != ids[0]).unwrap();
    let stop = ids[end];
    let stopping = GenerationConfig {
        stop_token_ids: vec![stop],
        ..config.clone()
    };
    let output = run(&stopping);
    assert_eq!(output.new_tokens(0), &free.new_tokens(0)[..=end]);
    // The stop token is in the sequence, and not in the text.
    let before = run(&GenerationConfig {
        max_new_tokens: Some(end),
        ..config
    });
    assert_eq!(
        (&output.texts, output.finish_reasons[0]),
        (&before.texts, FinishReason::StopToken)
    );
    let output = run(&GenerationConfig {
        min_tokens: 50,
        ..stopping
    });
    assert!(!output.new_tokens(0)[..50].contains(&stop));
}

#[test]
fn stop_tokens_end_a_row_and_stay_in_its_sequence() {
    let model = load("llama_gqa");
    let plain = generate(&model, &[vec![5, 9, 3]], &greedy(20)).unwrap();
    let stop = plain.new_tokens(0)[6];
    let first = plain
        .new_tokens(0)
        .iter()
        .position(|&id| id == stop)
        .unwrap();
    let config = GenerationConfig {
        stop_token_ids: vec![stop],
        min_new_tokens: 20,
        ..greedy(20)
    };
    let output = generate(&model, &[vec![5, 9, 3]], &config).unwrap();
    assert_eq!(output.new_tokens(0), &plain.new_tokens(0)[..=first]);
    assert_eq!(output.finish_reasons, [FinishReason::StopToken]);
}

#[test]
fn log_probabilities_are_those_of_the_models_logits() {
    let model = load("llama_gqa");
    for mode in [LogprobsMode::RawLogprobs, LogprobsMode::ProcessedLogprobs] {
        let config = GenerationConfig {
            logprobs: Some(3),
            logprobs_mode: mode,
            temperature: 0.5,
            suppress_tokens: vec![7],
            ..sampled(12, 1)
        };
        let output = generate(&model, &[vec![5, 9, 3]], &config).unwrap();
        let ids = Tensor::from_slice(&output.sequences[0]).view([1, -1]);
        let logits = model
            .forward(ForwardInput::new(&ids))
            .unwrap()
            .squeeze_dim(0);
        let logits = match mode {
            LogprobsMode::RawLogprobs => logits,
            LogprobsMode::ProcessedLogprobs => {
                let logits = logits / 0.5;
                let _ = logits.select(1, 7).fill_(f64::NEG_INFINITY);
                logits
            }
        };
        let want = logits.log_softmax(-1, tch::Kind::Float);
        let logprobs = &output.logprobs.as_ref().unwrap()[0];
        assert_eq!(logprobs.len(), 12);
        for (place, (token, &id)) in logprobs.iter().zip(output.new_tokens(0)).enumerate() {
            let row = want.get(place as i64 + 2);
            let of = |id: i64| row.double_value(&[id]) as f32;
            assert!((token.logprob - of(id)).abs() < 1e-4, "{mode:?} {place}");
            let (values, ids) = row.topk(3, -1, true, true);
            for (rank, (top, logprob)) in token.top.iter().enumerate() {
                assert_eq!(*top, ids.int64_value(&[rank as i64]));
                assert!((logprob - values.double_value(&[rank as i64]) as f32).abs() < 1e-4);
            }
            let better = row
                .gt(f64::from(of(id)))
                .sum(tch::Kind::Int64)
                .int64_value(&[]);
            assert_eq!(token.rank as i64, better + 1, "{mode:?} {place}");
        }
    }
    let greedy = generate(
        &model,
        &[vec![5]],
        &GenerationConfig {
            logprobs: Some(0),
            ..greedy(5)
        },
    );
    let greedy = greedy.unwrap();
    assert!(
        greedy.logprobs.unwrap()[0]
            .iter()
            .all(|t| t.rank == 1 && t.top.is_empty())
    );
}

#[test]
fn several_samples_of_a_prompt_differ_and_come_side_by_side() {
    let model = load("llama_gqa");
    let prompts = [vec![5, 9, 3, 4], vec![8]];
    let config = GenerationConfig {
        num_return_sequences: 3,
        ..sampled(10, 1)
    };
    let output = generate(&model, &prompts, &config).unwrap();
    assert_eq!(output.sequences.len(), 6);
    assert_eq!(output.prompt_lengths, [4, 4, 4, 1, 1, 1]);
    for (row, sequence) in output.sequences.iter().enumerate() {
        assert!(sequence.starts_with(&prompts[row / 3]));
        assert_eq!(
            output
                .sequences
                .iter()
                .filter(|other| *other == sequence)
                .count(),
            1
        );
    }
    let greedy = GenerationConfig {
        num_return_sequences: 2,
        ..greedy(3)
    };
    let error = generate(&model, &prompts, &greedy).unwrap_err().to_string();
    assert!(error.contains("set do_sample or num_beams"), "{error}");
}

#[test]
fn a_prompt_with_a_seed_of_its_own_is_the_same_in_any_batch() {
    let model = load("llama_gqa");
    let prompts = [vec![5, 9, 3, 4], vec![8, 2], vec![100]];
    let config = GenerationConfig {
        num_return_sequences: 2,
        ..sampled(15, 1)
    };
    let run = |which: &[usize]| -> GenerateOutput {
        let prompts: Vec<Vec<i64>> = which.iter().map(|&i| prompts[i].clone()).collect();
        let options = GenerateOptions {
            seeds: which.iter().map(|&i| 40 + i as u64).collect(),
            ..GenerateOptions::default()
        };
        generate_with_options(&model, &prompts, &config, &options, keep_generating).unwrap()
    };
    let all = run(&[0, 1, 2]);
    for (place, which) in [2, 0, 1].into_iter().enumerate() {
        let other = run(&[2, 0, 1]);
        assert_eq!(
            other.sequences[2 * place..2 * place + 2],
            all.sequences[2 * which..2 * which + 2]
        );
        assert_eq!(
            run(&[which]).sequences,
            all.sequences[2 * which..2 * which + 2]
        );
    }
    let options = GenerateOptions {
        seeds: vec![1, 2],
        ..GenerateOptions::default()
    };
    let error =
        generate_with_options(&model, &prompts, &config, &options, keep_generating).unwrap_err();
    assert_eq!(
        error.to_string(),
        "`seeds` has 2 entries for 3 prompts; give one for each prompt, or none"
    );
}

#[test]
fn prompts_read_in_chunks_give_the_same_tokens() {
    let prompts = [(2..39).collect(), vec![5, 9, 3], vec![8, 8, 60, 1, 17]];
    for case in ["llama_gqa", "gpt2", "qwen2_sliding"] {
        let model = load(case);
        let want = generate(&model, &prompts, &greedy(20)).unwrap();
        for chunk in [1, 4, 16, 37, 64] {
            let config = GenerationConfig {
                prefill_chunk_size: Some(chunk),
                ..greedy(20)
            };
            let got = generate(&model, &prompts, &config).unwrap();
            assert_eq!(got.sequences, want.sequences, "{case}, chunks of {chunk}");
        }
    }
}

#[test]
fn rows_that_end_are_dropped_from_the_batch_and_change_no_other() {
    let model = load("llama_gqa");
    let prompts: Vec<Vec<i64>> = (0..6).map(|n| vec![5 + n, 9, 3 * n + 1]).collect();
    let plain = generate(&model, &prompts, &greedy(30)).unwrap();
    // Every row ends at another position, at one of these tokens.
    let ends: Vec<i64> = (0..5)
        .map(|row| plain.new_tokens(row)[3 + 4 * row])
        .collect();
    let config = GenerationConfig {
        eos_token_id: ends.clone(),
        ..greedy(30)
    };
    for use_cache in [true, false] {
        let config = GenerationConfig {
            use_cache,
            ..config.clone()
        };
        let output = generate(&model, &prompts, &config).unwrap();
        let mut lengths = Vec::new();
        for row in 0..6 {
            let all = plain.new_tokens(row);
            let end = all
                .iter()
                .position(|id| ends.contains(id))
                .map_or(30, |i| i + 1);
            assert_eq!(
                output.new_tokens(row),
                &all[..end],
                "row {row}, cache {use_cache}"
            );
            lengths.push(end);
        }
        lengths.sort_unstable();
        lengths.dedup();
        assert!(
            lengths.len() > 2,
            "the rows end at different places: {lengths:?}"
        );
    }
}

#[test]
fn no_step_is_begun_after_max_time() {
    let model = load("llama_gqa");
    let config = GenerationConfig {
        max_time: Some(0.0),
        ..greedy(40)
    };
    let output = generate(&model, &[vec![5, 9], vec![3]], &config).unwrap();
    assert_eq!(output.finish_reasons, [FinishReason::TimeLimit; 2]);
    assert_eq!(
        output.new_tokens(0).len(),
        1,
        "the pass that runs is finished"
    );
}

#[test]
fn forced_first_and_last_tokens_are_there() {
    let model = load("llama_gqa");
    let config = GenerationConfig {
        forced_bos_token_id: Some(77),
        forced_eos_token_id: vec![88],
        eos_token_id: vec![88],
        suppress_tokens: vec![3],
        ..greedy(6)
    };
    let output = generate(&model, &[vec![5], vec![5, 6]], &config).unwrap();
    assert_eq!(output.new_tokens(0)[0], 77);
    assert_ne!(
        output.new_tokens(1)[0],
        77,
        "only after a prompt of one token"
    );
    assert_eq!(output.new_tokens(0)[5], 88);
    assert_eq!(output.finish_reasons, [FinishReason::EndOfText; 2]);
}

#[test]
fn options_that_exclude_one_another_or_are_out_of_range_are_refused_by_name() {
    let model = load("llama_gqa");
    let refused = |config: GenerationConfig| {
        generate(&model, &[vec![1, 2]], &config)
            .unwrap_err()
            .to_string()
    };
    let base = || greedy(4);
    for (config, part) in [
        (
            GenerationConfig {
                num_return_sequences: 100_000_000_000,
                ..sampled(4, 1)
            },
            "`num_return_sequences` is 100000000000; it must be from 1 to 16384",
        ),
        (
            GenerationConfig {
                num_beams: usize::MAX,
                ..base()
            },
            "`num_beams` is 18446744073709551615; it must be from 1 to 16384",
        ),
        (
            GenerationConfig {
                num_assistant_tokens: usize::MAX,
                ..base()
            },
            "`num_assistant_tokens` is 18446744073709551615; it must be from 1 to 2147483647",
        ),
        (
            GenerationConfig {
                cache_config: CacheConfig {
                    window_length: Some(i64::MAX),
                    ..CacheConfig::default()
                },
                ..base()
            },
            "`cache_config.window_length` is 9223372036854775807; it must be from 1 to 2147483647",
        ),
        (
            GenerationConfig {
                typical_p: 0.0,
                ..base()
            },
            "`typical_p` is 0",
        ),
        (
            GenerationConfig {
                epsilon_cutoff: 1.0,
                ..base()
            },
            "`epsilon_cutoff` is 1",
        ),
        (
            GenerationConfig {
                num_beams: 0,
                ..base()
            },
            "`num_beams` is 0",
        ),
        (
            GenerationConfig {
                bad_words_ids: vec![vec![]],
                ..base()
            },
            "`bad_words_ids` is []",
        ),
        (
            GenerationConfig {
                suppress_tokens: vec![128],
                ..base()
            },
            "`suppress_tokens` is 128",
        ),
        (
            GenerationConfig {
                forced_bos_token_id: Some(3),
                suppress_tokens: vec![3],
                ..base()
            },
            "`forced_bos_token_id` is [3]; it must be at least one token that suppress_tokens does not exclude",
        ),
        (
            GenerationConfig {
                forced_eos_token_id: vec![3, 4],
                suppress_tokens: vec![4, 3, 9],
                ..base()
            },
            "`forced_eos_token_id` is [3, 4]",
        ),
        (
            GenerationConfig {
                logit_bias: [(500, 1.0)].into(),
                ..base()
            },
            "`logit_bias` is 500; it must be an id in the model's vocabulary, 0..128",
        ),
        (
            GenerationConfig {
                stop_strings: vec![String::new()],
                ..base()
            },
            "`stop_strings` is \"\"",
        ),
        (
            GenerationConfig {
                cache_implementation: Some("magic".to_owned()),
                ..base()
            },
            "`cache_implementation` is \"magic\"; it must be one of dynamic, static",
        ),
        (
            GenerationConfig {
                num_beams: 2,
                logprobs: Some(1),
                ..base()
            },
            "logprobs cannot be combined with num_beams",
        ),
        (
            GenerationConfig {
                num_beams: 2,
                num_return_sequences: 3,
                ..base()
            },
            "num_return_sequences cannot be combined with a smaller num_beams",
        ),
        (
            GenerationConfig {
                suppress_tokens: (0..128).collect(),
                ..base()
            },
            "no token is allowed in row 0 after 0 new ones",
        ),
    ] {
        let message = refused(config);
        assert!(message.contains(part), "{message}");
    }
}

#[test]
fn all_keys_survive_a_round_trip_through_json() {
    let text = r#"{
        "max_new_tokens": 5, "min_length": 2, "early_stopping": "never", "max_time": 1.5,
        "stop_strings": "END", "do_sample": true, "cache_implementation": "static",
        "typical_p": 0.9, "bad_words_ids": [[1, 2]], "sequence_bias": [[[3], -1.5]],
        "logit_bias": {"7": 2.0}, "forced_eos_token_id": 9, "suppress_tokens": [4],
        "exponential_decay_length_penalty": [3, 1.2], "num_return_sequences": 2,
        "num_assistant_tokens_schedule": "heuristic_transient", "logprobs_mode": "processed_logprobs",
        "eos_token_id": [1, 2], "top_h": 0.4, "encoder_repetition_penalty": 1.0
    }"#;
    let config = GenerationConfig::from_map(&serde_json::from_str(text).unwrap()).unwrap();
    assert_eq!(config.sequence_bias, [(vec![3], -1.5)]);
    assert_eq!(config.logit_bias[&7], 2.0);
    assert_eq!(config.stop_strings, ["END"]);
    let written = serde_json::to_value(&config).unwrap();
    assert_eq!(written["early_stopping"], "never");
    assert_eq!(written["forced_eos_token_id"], 9);
    let again = GenerationConfig::from_map(written.as_object().unwrap()).unwrap();
    assert_eq!(again, config);
}
