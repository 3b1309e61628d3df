//! Tests of generation with the checkpoints of overdrive-transformer's fixtures.

use std::ops::ControlFlow;
use std::path::PathBuf;

use overdrive_generation::{
    Error, FinishReason, GenerationConfig, Sampler, generate, generate_with,
};
use overdrive_transformer::CausalLm;
use tch::Tensor;

const CASES: [&str; 37] = [
    "llama_gqa",
    "llama_tied_biases",
    "llama3_rope",
    "mistral",
    "qwen2_sliding",
    "qwen3",
    "mixtral",
    "qwen3_moe",
    "phi",
    "phi_qk_norm",
    "phi3",
    "phi3_longrope",
    "gemma",
    "smollm3",
    "smollm3_sliding",
    "olmo2",
    "olmo3",
    "granite",
    "granite4",
    "deepseek_v2",
    "deepseek_v3",
    "qwen3_next",
    "qwen3_next_dense",
    "qwen3_5",
    "qwen3_5_moe",
    "glm4",
    "phi4_mini",
    "mistral_small",
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

fn fixture(case: &str) -> PathBuf {
    let crates = PathBuf::from(env!("CARGO_MANIFEST_DIR"));
    crates
        .join("../overdrive-transformer/tests/fixtures")
        .join(case)
}

fn load(case: &str) -> CausalLm {
    CausalLm::from_pretrained(fixture(case), &Default::default()).unwrap()
}

/// Returns the ids of transformers' greedy search: 8 of a prompt, 24 new ones.
fn expected(case: &str) -> Vec<i64> {
    let tensors = Tensor::read_safetensors(fixture(case).join("expected.safetensors")).unwrap();
    let (_, ids) = tensors
        .into_iter()
        .find(|(name, _)| name == "greedy")
        .unwrap();
    Vec::<i64>::try_from(ids.view([-1])).unwrap()
}

fn greedy(new: usize) -> GenerationConfig {
    GenerationConfig {
        max_new_tokens: Some(new),
        ..GenerationConfig::default()
    }
}

#[test]
fn greedy_equals_transformers_token_for_token_with_and_without_a_cache() {
    for case in CASES {
        let (model, want) = (load(case), expected(case));
        for use_cache in [true, false] {
            // transformers ran with its end-of-text token excluded.
            let config = GenerationConfig {
                use_cache,
                eos_token_id: vec![127],
                min_new_tokens: 24,
                ..greedy(24)
            };
            let output = generate(&model, &[want[..8].to_vec()], &config).unwrap();
            assert_eq!(output.sequences[0], want, "{case}, cache {use_cache}");
            assert_eq!(output.new_tokens(0), &want[8..]);
            assert_eq!(output.finish_reasons, [FinishReason::Length]);
            assert_eq!(output.timings.prefill_tokens, 8);
            assert_eq!(output.timings.decode_tokens, 23);
        }
    }
}

/// The fixture's original context is 40 tokens; transformers computes the cache of a Phi-3 again beyond it.
#[test]
fn phi3_crosses_its_original_context_as_in_transformers() {
    let model = load("phi3_longrope");
    let tensors =
        Tensor::read_safetensors(fixture("phi3_longrope").join("expected.safetensors")).unwrap();
    let (_, want) = tensors
        .iter()
        .find(|(name, _)| name == "greedy_beyond")
        .unwrap();
    let want = Vec::<i64>::try_from(want.view([-1])).unwrap();
    assert_eq!(want.len(), 64);
    let config = GenerationConfig {
        eos_token_id: vec![127],
        min_new_tokens: 56,
        ..greedy(56)
    };
    let without = GenerationConfig {
        use_cache: false,
        ..config.clone()
    };
    let chunks = GenerationConfig {
        prefill_chunk_size: Some(3),
        ..config.clone()
    };
    let lookup = GenerationConfig {
        prompt_lookup_num_tokens: Some(4),
        ..config.clone()
    };
    let named = GenerationConfig {
        cache_implementation: Some("dynamic".to_owned()),
        ..config.clone()
    };
    for config in [&config, &without, &chunks, &lookup, &named] {
        let output = generate(&model, &[want[..8].to_vec()], config).unwrap();
        assert_eq!(output.sequences[0], want, "{config:?}");
    }
    // A prompt that reaches it, or is beyond it from the start.
    for count in [39, 40, 41, 50] {
        let prompt = want[..count].to_vec();
        let config = GenerationConfig {
            max_new_tokens: Some(64 - count),
            min_new_tokens: 64 - count,
            ..config.clone()
        };
        let output = generate(&model, std::slice::from_ref(&prompt), &config).unwrap();
        let expected = generate(
            &model,
            std::slice::from_ref(&prompt),
            &GenerationConfig {
                use_cache: false,
                ..config.clone()
            },
        );
        assert_eq!(output.sequences, expected.unwrap().sequences, "{count}");
    }
    // Up to it nothing is computed again; the last token is not read.
    let paged = |new| GenerationConfig {
        max_new_tokens: Some(new),
        min_new_tokens: new,
        cache_implementation: Some("paged".to_owned()),
        ..config.clone()
    };
    let kept = GenerationConfig {
        cache_implementation: None,
        ..paged(30)
    };
    for kept in [kept, paged(33)] {
        let output = generate(&model, &[want[..8].to_vec()], &kept).unwrap();
        assert_eq!(output.sequences[0], want[..output.sequences[0].len()]);
    }
    let error = generate(&model, &[want[..8].to_vec()], &paged(34)).unwrap_err();
    assert!(
        error.to_string().contains("original context of a Phi-3"),
        "{error}"
    );
}

#[test]
fn each_row_of_a_batch_equals_its_own_run() {
    for case in CASES {
        let model = load(case);
        let prompts = [vec![5, 9, 3, 7, 11, 2, 40], vec![100], vec![8, 8, 60]];
        let sampled = GenerationConfig {
            do_sample: true,
            temperature: 1.5,
            seed: Some(7),
            ..greedy(20)
        };
        for config in [greedy(20), sampled] {
            let together = generate(&model, &prompts, &config).unwrap();
            let alone = generate(&model, &prompts[..1], &config).unwrap();
            assert_eq!(together.sequences[0], alone.sequences[0], "{case}");
            if config.is_greedy() {
                for (row, prompt) in prompts.iter().enumerate() {
                    let alone = generate(&model, std::slice::from_ref(prompt), &config).unwrap();
                    assert_eq!(
                        together.sequences[row], alone.sequences[0],
                        "{case} row {row}"
                    );
                }
            }
        }
    }
}

#[test]
fn a_seed_fixes_the_sample_and_leaves_the_global_generator_alone() {
    let model = load("llama_gqa");
    let sample = |seed| {
        let config = GenerationConfig {
            do_sample: true,
            seed,
            ..greedy(30)
        };
        generate(&model, &[vec![5, 6]], &config).unwrap().sequences
    };
    assert_eq!(sample(Some(1)), sample(Some(1)));
    assert_ne!(sample(Some(1)), sample(Some(2)));
    assert_ne!(
        sample(None),
        sample(None),
        "without a seed each call has its own"
    );
    let cold = GenerationConfig {
        do_sample: true,
        temperature: 0.0,
        ..greedy(30)
    };
    let want = generate(&model, &[vec![5, 6]], &greedy(30)).unwrap();
    assert_eq!(
        generate(&model, &[vec![5, 6]], &cold).unwrap().sequences,
        want.sequences
    );
}

#[test]
fn samples_have_the_frequencies_of_the_softmax() {
    let config = GenerationConfig {
        do_sample: true,
        seed: Some(3),
        top_k: 0,
        ..GenerationConfig::default()
    };
    let mut sampler = Sampler::new(&config, 0, 0).unwrap();
    let logits = [0.0f32, 1.0, 2.0, -1.0];
    let mut counts = [0.0f64; 4];
    let n = 100_000;
    for _ in 0..n {
        let id = sampler.next_token(&mut logits.clone(), &[], 0).unwrap();
        counts[id as usize] += 1.0;
    }
    let sum: f64 = logits.iter().map(|&x| f64::from(x).exp()).sum();
    let chi_squared: f64 = logits
        .iter()
        .zip(counts)
        .map(|(&x, count)| {
            let want = f64::from(x).exp() / sum * f64::from(n);
            (count - want).powi(2) / want
        })
        .sum();
    // 3 degrees of freedom: above 16.3 once in a thousand seeds, and this seed is fixed.
    assert!(chi_squared < 16.3, "{chi_squared}");
}

#[test]
fn a_row_ends_at_its_end_of_text_and_the_others_go_on() {
    let (model, want) = (load("llama_gqa"), expected("llama_gqa"));
    // The sixth new token is declared the end of text, and so ends the first row.
    let end = want[13];
    let first = want[8..].iter().position(|&id| id == end).unwrap();
    let config = GenerationConfig {
        eos_token_id: vec![end],
        ..greedy(24)
    };
    let output = generate(&model, &[want[..8].to_vec(), vec![2, 3]], &config).unwrap();
    assert_eq!(output.sequences[0], want[..8 + first + 1]);
    assert_eq!(output.finish_reasons[0], FinishReason::EndOfText);
    let alone = generate(&model, &[vec![2, 3]], &config).unwrap();
    assert_eq!(output.sequences[1], alone.sequences[0]);
}

#[test]
fn tokens_are_handed_out_in_order_and_the_caller_can_stop_a_row() {
    let (model, want) = (load("gpt2"), expected("gpt2"));
    let mut seen = Vec::new();
    let prompts = [want[..8].to_vec(), vec![4, 5, 6]];
    let output = generate_with(&model, &prompts, &greedy(10), |token| {
        seen.push((token.row, token.id));
        let stop = token.row == 0 && seen.iter().filter(|(row, _)| *row == 0).count() == 3;
        if stop {
            ControlFlow::Break(())
        } else {
            ControlFlow::Continue(())
        }
    })
    .unwrap();
    assert_eq!(
        output.finish_reasons,
        [FinishReason::Stopped, FinishReason::Length]
    );
    assert_eq!(output.new_tokens(0), &want[8..11]);
    assert_eq!(output.new_tokens(1).len(), 10);
    for row in 0..2 {
        let ids: Vec<i64> = seen
            .iter()
            .filter(|(r, _)| *r == row)
            .map(|(_, id)| *id)
            .collect();
        assert_eq!(ids, output.new_tokens(row));
    }
}

#[test]
fn generation_stops_where_the_context_is_full() {
    for case in ["llama_gqa", "gpt2"] {
        let model = load(case);
        let prompt: Vec<i64> = (2..62).collect();
        // A context of 64 gives tokens 61 to 65: the last position still predicts one.
        let output = generate(&model, &[prompt.clone(), vec![2]], &greedy(50)).unwrap();
        assert_eq!(output.sequences[0].len(), 65, "{case}");
        assert_eq!(
            output.finish_reasons,
            [FinishReason::ContextFull, FinishReason::Length]
        );
        let alone = generate(&model, &[vec![2]], &greedy(50)).unwrap();
        assert_eq!(
            output.sequences[1], alone.sequences[0],
            "{case}: padding takes no positions"
        );
    }
}

#[test]
fn bad_prompts_and_configurations_are_refused_with_their_reason() {
    let model = load("llama_gqa");
    let refused = |prompts: &[Vec<i64>], config: GenerationConfig| -> String {
        let error: Error = generate(&model, prompts, &config).unwrap_err();
        error.to_string()
    };
    let ok = || vec![vec![1, 2]];
    for (message, part) in [
        (refused(&[], greedy(1)), "no prompt was given"),
        (refused(&[vec![1], vec![]], greedy(1)), "prompt 1 is empty"),
        (
            refused(&[vec![3; 65]], greedy(1)),
            "65 tokens, and the model's context is 64",
        ),
        (
            refused(&[vec![1, 128]], greedy(1)),
            "token 1 of prompt 0 is 128",
        ),
        (refused(&[vec![-1]], greedy(1)), "vocabulary 0..128"),
        (
            refused(
                &ok(),
                GenerationConfig {
                    top_p: -0.1,
                    ..greedy(1)
                },
            ),
            "`top_p` is -0.1",
        ),
        (
            refused(
                &ok(),
                GenerationConfig {
                    top_p: 1.5,
                    ..greedy(1)
                },
            ),
            "`top_p` is 1.5",
        ),
        (
            refused(
                &ok(),
                GenerationConfig {
                    temperature: -1.0,
                    ..greedy(1)
                },
            ),
            "it must be 0 (greedy) or positive",
        ),
        (
            refused(
                &ok(),
                GenerationConfig {
                    temperature: f64::NAN,
                    ..greedy(1)
                },
            ),
            "`temperature`",
        ),
        (
            refused(
                &ok(),
                GenerationConfig {
                    min_p: Some(2.0),
                    ..greedy(1)
                },
            ),
            "`min_p` is 2",
        ),
        (
            refused(
                &ok(),
                GenerationConfig {
                    repetition_penalty: 0.0,
                    ..greedy(1)
                },
            ),
            "`repetition_penalty` is 0",
        ),
        (refused(&ok(), greedy(0)), "`max_new_tokens` is 0"),
    ] {
        assert!(message.contains(part), "{message}");
    }
    let mut sampler = Sampler::new(&greedy(1), 0, 4).unwrap();
    let error = sampler
        .next_token(&mut [0.0, f32::NAN], &[], 0)
        .unwrap_err()
        .to_string();
    assert!(error.contains("row 4"), "{error}");
    assert!(
        sampler
            .next_token(&mut [f32::NEG_INFINITY; 3], &[], 0)
            .is_err()
    );
}

#[test]
fn generation_records_no_gradient_and_gives_the_mode_back() {
    let model = load("llama_gqa");
    model.set_requires_grad(true).unwrap();
    generate(&model, &[vec![1, 2]], &greedy(3)).unwrap();
    let (_, parameter) = model.named_parameters().remove(0);
    assert!((parameter * 2.0).requires_grad(), "gradients are on again");
}

#[test]
fn a_generation_config_is_read_as_transformers_writes_it() {
    let config = GenerationConfig::from_dir(fixture("llama_gqa")).unwrap();
    assert_eq!(
        (config.eos_token_id, config.pad_token_id),
        (vec![127], Some(0))
    );
    assert!(!config.do_sample);
    let parse = |text: &str| {
        let map = serde_json::from_str(text).unwrap();
        GenerationConfig::from_map(&map)
    };
    let config = parse(
        r#"{"do_sample": true, "temperature": 0.6, "top_p": 0.9, "eos_token_id": [1, 2],
            "pad_token_id": null, "transformers_version": "4.46.3", "num_beams": 1}"#,
    )
    .unwrap();
    assert_eq!(
        (config.eos_token_id.clone(), config.top_k),
        (vec![1, 2], 50)
    );
    let written = serde_json::to_value(&config).unwrap();
    assert_eq!(written["eos_token_id"], serde_json::json!([1, 2]));
    for (text, part) in [
        (r#"{"temperature": "warm"}"#, "`temperature` is \"warm\""),
        (r#"{"top_k": -1}"#, "`top_k` is -1"),
        (r#"{"eos_token_id": "</s>"}"#, "`eos_token_id`"),
        (
            r#"{"penalty_alpha": 0.6}"#,
            "`penalty_alpha` is 0.6, which is not supported; set it to null",
        ),
        (r#"{"top_p": 2}"#, "`top_p` is 2"),
    ] {
        let message = parse(text).unwrap_err().to_string();
        assert!(message.contains(part), "{message}");
    }
    let none = GenerationConfig::from_dir(std::env::temp_dir().join("no-such-folder")).unwrap();
    assert_eq!(none, GenerationConfig::default());
}
