//! Tests that every exact cache gives the tokens of the run without a cache.

use std::ops::ControlFlow;

use crate::support::{greedy, load};
use overdrive_generation::{CacheConfig, FinishReason, GenerationConfig, generate, generate_with};
use overdrive_transformer::{AttentionImplementation, Execution};

const CASES: [&str; 26] = [
    "llama_gqa",
    "llama_tied_biases",
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
    "glm4",
    "qwen2_moe",
    "gpt_oss",
    "ministral3",
    "gpt2",
    "gemma3n",
    "gemma4",
    "gemma4_dense",
    "gemma4_moe",
];

fn with_cache(name: &str, config: GenerationConfig) -> GenerationConfig {
    GenerationConfig {
        cache_implementation: Some(name.to_owned()),
        ..config
    }
}

fn without_cache(config: GenerationConfig) -> GenerationConfig {
    GenerationConfig {
        use_cache: false,
        ..config
    }
}

#[test]
fn exact_caches_equal_the_uncached_run_token_for_token() {
    let batches = [
        vec![vec![5, 9, 3, 7, 11, 2, 40]],
        vec![vec![5, 9, 3, 7, 11, 2, 40], vec![100], vec![8, 8, 60]],
        vec![vec![5, 9, 3], vec![100, 4, 1]],
    ];
    for case in CASES {
        let model = load(case);
        for prompts in &batches {
            let want = generate(&model, prompts, &without_cache(greedy(20))).unwrap();
            let mut names = vec!["dynamic", "static", "paged"];
            if model.layer_windows().iter().any(Option::is_some) {
                names.push("sliding_window");
            }
            for name in names {
                for chunk in [None, Some(3)] {
                    let config = GenerationConfig {
                        prefill_chunk_size: chunk,
                        ..with_cache(name, greedy(20))
                    };
                    let got = generate(&model, prompts, &config).unwrap();
                    assert_eq!(got.sequences, want.sequences, "{case}, {name}, {chunk:?}");
                }
            }
            let ragged = generate(&model, prompts, &greedy(20)).unwrap();
            assert_eq!(
                ragged.sequences, want.sequences,
                "{case}, no particular cache"
            );
        }
    }
}

#[test]
fn beams_and_several_samples_are_the_same_over_every_exact_cache() {
    let prompts = [vec![5, 9, 3, 7, 11], vec![100], vec![8, 8, 60]];
    let beams = GenerationConfig {
        num_beams: 4,
        num_return_sequences: 4,
        eos_token_id: vec![17, 30],
        ..greedy(40)
    };
    let samples = GenerationConfig {
        num_return_sequences: 3,
        eos_token_id: vec![17, 30, 50, 70, 90],
        ..crate::support::sampled(40, 3)
    };
    for case in ["llama_gqa", "gpt2", "gemma4"] {
        let model = load(case);
        for config in [&beams, &samples] {
            let want = generate(&model, &prompts, &without_cache(config.clone())).unwrap();
            for name in ["dynamic", "static", "paged"] {
                let config = with_cache(name, config.clone());
                let got = generate(&model, &prompts, &config).unwrap();
                assert_eq!(got.sequences, want.sequences, "{case}, {name}");
                assert_eq!(got.finish_reasons, want.finish_reasons, "{case}, {name}");
            }
        }
    }
}

#[test]
fn speculation_truncates_rejected_tokens_in_every_cache() {
    let prompts = [vec![5, 9, 3, 7, 5, 9], vec![8, 8, 60, 8]];
    for case in ["llama_gqa", "qwen2_sliding", "gpt2", "gemma3n", "gemma4"] {
        let model = load(case);
        let want = generate(&model, &prompts, &without_cache(greedy(40))).unwrap();
        let mut names = vec!["dynamic", "static", "paged"];
        if model.layer_windows().iter().any(Option::is_some) {
            names.push("sliding_window");
        }
        for name in names {
            let config = GenerationConfig {
                prompt_lookup_num_tokens: Some(6),
                max_matching_ngram_size: 1,
                ..with_cache(name, greedy(40))
            };
            let got = generate(&model, &prompts, &config).unwrap();
            assert_eq!(got.sequences, want.sequences, "{case}, {name}");
            let statistics = got.speculation.unwrap();
            assert!(
                statistics.accepted < statistics.proposed,
                "{case}: some were wrong"
            );
        }
    }
}

#[test]
fn a_batch_ends_where_the_context_does_in_every_cache() {
    let model = load("llama_gqa");
    let prompts = [(2..62).collect::<Vec<i64>>(), vec![2]];
    let want = generate(&model, &prompts, &without_cache(greedy(50))).unwrap();
    assert_eq!(
        want.finish_reasons,
        [FinishReason::ContextFull, FinishReason::Length]
    );
    for name in ["dynamic", "static", "paged"] {
        let got = generate(&model, &prompts, &with_cache(name, greedy(50))).unwrap();
        assert_eq!(got.sequences, want.sequences, "{name}");
        assert_eq!(got.finish_reasons, want.finish_reasons, "{name}");
    }
}

#[test]
fn the_largest_number_of_new_tokens_ends_with_the_context() {
    let model = load("llama_gqa");
    let context = model.config().max_position_embeddings() as usize;
    let all = GenerationConfig {
        prefill_chunk_size: Some(usize::MAX),
        ..greedy(usize::MAX)
    };
    for prompts in [vec![vec![5, 9, 3]], vec![vec![5, 9, 3], vec![100]]] {
        let want = generate(&model, &prompts, &greedy(context + 1)).unwrap();
        for name in ["dynamic", "static", "paged", "int8"] {
            let got = generate(&model, &prompts, &with_cache(name, all.clone())).unwrap();
            if name != "int8" {
                assert_eq!(got.sequences, want.sequences, "{name}");
            }
            for (sequence, reason) in got.sequences.iter().zip(&got.finish_reasons) {
                assert_eq!(
                    (sequence.len(), *reason),
                    (context + 1, FinishReason::ContextFull)
                );
            }
        }
        let lengths = GenerationConfig {
            max_new_tokens: None,
            max_length: Some(usize::MAX),
            ..all.clone()
        };
        let got = generate(&model, &prompts, &lengths).unwrap();
        assert_eq!(got.sequences, want.sequences);
        let proposed = GenerationConfig {
            prompt_lookup_num_tokens: Some(4),
            max_matching_ngram_size: usize::MAX,
            ..all.clone()
        };
        let got = generate(&model, &prompts, &proposed).unwrap();
        assert_eq!(got.sequences, want.sequences);
    }
    // Where nothing but the end of text would end it, a callback can.
    let endless = GenerationConfig {
        cache_config: CacheConfig {
            window_length: Some(context as i64 / 2),
            num_sink_tokens: 4,
            ..CacheConfig::default()
        },
        ..with_cache("sliding_window", all)
    };
    let mut tokens = 0;
    let got = generate_with(&model, &[vec![5, 9, 3]], &endless, |_| {
        tokens += 1;
        match tokens < 2 * context {
            true => ControlFlow::Continue(()),
            false => ControlFlow::Break(()),
        }
    })
    .unwrap();
    assert_eq!(got.new_tokens(0).len(), 2 * context);
}

#[test]
fn a_model_whose_attention_needs_one_tensor_pads_its_batch() {
    let mut model = load("llama_gqa");
    let prompts = [vec![5, 9, 3, 7, 11], vec![100]];
    let want = generate(&model, &prompts, &greedy(20)).unwrap();
    let mut execution = Execution::default();
    execution.attention = AttentionImplementation::Sdpa;
    model.set_execution(execution);
    let got = generate(&model, &prompts, &greedy(20)).unwrap();
    assert_eq!(got.sequences, want.sequences);
    let error = generate(&model, &prompts, &with_cache("paged", greedy(20))).unwrap_err();
    assert!(
        error
            .to_string()
            .contains("cannot return them as one tensor"),
        "{error}"
    );
}

#[test]
fn a_window_cache_needs_a_model_with_windows() {
    let model = load("llama_gqa");
    let config = with_cache("sliding_window", greedy(5));
    let error = generate(&model, &[vec![5]], &config)
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("no layer of this model has a window"),
        "{error}"
    );
}

#[test]
fn over_a_window_with_sinks_a_sequence_continues_beyond_the_context() {
    let model = load("llama_gqa");
    let context = model.config().max_position_embeddings() as usize;
    let wanted = 2 * context;
    let windowed = |window_length, num_sink_tokens| GenerationConfig {
        cache_config: CacheConfig {
            window_length: Some(window_length),
            num_sink_tokens,
            ..CacheConfig::default()
        },
        ..with_cache("sliding_window", greedy(wanted))
    };
    let prompt = [vec![5, 9, 3, 7, 11, 2, 40]];
    let exact = generate(&model, &prompt, &with_cache("dynamic", greedy(wanted))).unwrap();
    assert_eq!(exact.finish_reasons, [FinishReason::ContextFull]);
    // Nothing has been dropped while the window is not full.
    let window = context as i64 / 2;
    let endless = generate(&model, &prompt, &windowed(window, 4)).unwrap();
    assert_eq!(endless.finish_reasons, [FinishReason::Length]);
    assert_eq!(endless.new_tokens(0).len(), wanted);
    let same = window as usize;
    assert_eq!(endless.sequences[0][..same], exact.sequences[0][..same]);
    // A window and sinks wider than the context give no bound.
    let wide = generate(&model, &prompt, &windowed(context as i64, 4)).unwrap();
    assert_eq!(wide.finish_reasons, [FinishReason::ContextFull]);
}

#[test]
fn sinks_are_refused_for_prompts_of_different_lengths() {
    let model = load("llama_gqa");
    let windowed = |num_sink_tokens| GenerationConfig {
        cache_config: CacheConfig {
            window_length: Some(16),
            num_sink_tokens,
            ..CacheConfig::default()
        },
        ..with_cache("sliding_window", greedy(20))
    };
    // The first tokens of a shorter prompt would be dropped, and its padding kept.
    let uneven = [vec![5, 9, 3, 7], vec![8]];
    let error = generate(&model, &uneven, &windowed(2)).unwrap_err();
    assert!(
        error.to_string().starts_with(
            "cache_config.num_sink_tokens cannot be combined with prompts of different lengths"
        ),
        "{error}"
    );
    generate(&model, &uneven, &windowed(0)).unwrap();
    let even = [vec![5, 9, 3, 7], vec![8, 8, 60, 1]];
    let output = generate(&model, &even, &windowed(2)).unwrap();
    let alone = generate(&model, &even[1..], &windowed(2)).unwrap();
    assert_eq!(output.sequences[1], alone.sequences[0]);
}

#[test]
fn a_quantized_cache_is_exact_until_its_tail_is_full() {
    let model = load("llama_gqa");
    let prompts = [vec![5, 9, 3, 7, 11, 2, 40], vec![100, 1, 2, 3, 4, 5, 6]];
    let exact = generate(&model, &prompts, &with_cache("dynamic", greedy(20))).unwrap();
    for name in ["int8", "int4", "quantized"] {
        let rounded = generate(&model, &prompts, &with_cache(name, greedy(20))).unwrap();
        assert_eq!(rounded.sequences, exact.sequences, "{name}");
    }
}
