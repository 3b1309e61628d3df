//! Tests of what a model's folder says about the end of a text, its cache and its padding.

use std::fs;

use crate::support::{byte_tokenizer, encode, greedy, load};
use overdrive_generation::{
    CacheConfig, ChatTemplate, ChatTemplateOptions, ChoiceConstraint, GenerationConfig, Message,
    Tokenizer, generate,
};
use serde_json::json;
use tokenizers::utils::padding::{PaddingParams, PaddingStrategy};
use tokenizers::utils::truncation::TruncationParams;

fn read(text: &str) -> GenerationConfig {
    GenerationConfig::from_map(&serde_json::from_str(text).unwrap()).unwrap()
}

#[test]
fn without_a_token_of_its_own_the_settings_take_the_end_of_text_of_the_model() {
    let folder = tempfile::tempdir().unwrap();
    let file = |name: &str, value: &serde_json::Value| {
        fs::write(folder.path().join(name), value.to_string()).unwrap();
    };
    let ends = || {
        GenerationConfig::from_dir(folder.path())
            .unwrap()
            .eos_token_id
    };
    for (config, want) in [
        (json!({"eos_token_id": 7}), vec![7]),
        (json!({"eos_token_id": [7, 8]}), vec![7, 8]),
        (
            json!({"text_config": {"eos_token_id": [1, 106]}}),
            vec![1, 106],
        ),
        (
            json!({"eos_token_id": null, "text_config": {"eos_token_id": 1}}),
            vec![1],
        ),
        (
            json!({"eos_token_id": [-1, 9, 3], "vocab_size": 5}),
            vec![3],
        ),
        (json!({"eos_token_id": null}), vec![]),
        (json!({}), vec![]),
    ] {
        file("config.json", &config);
        assert_eq!(ends(), want, "{config}");
    }
    file("config.json", &json!({"eos_token_id": [7, 8]}));
    for none in [json!(null), json!([]), json!(-1)] {
        file(
            "generation_config.json",
            &json!({"eos_token_id": none, "top_k": 9}),
        );
        assert_eq!(ends(), [7, 8], "{none}");
    }
    file("generation_config.json", &json!({"eos_token_id": 4}));
    assert_eq!(ends(), [4], "the settings' own token counts");
}

#[test]
fn the_cache_of_a_folder_is_a_hint() {
    // Gemma's folders say `hybrid`; none of them stops a generation.
    let model = load("llama_gqa");
    let prompts = [vec![5, 9, 3, 7], vec![100]];
    let want = generate(&model, &prompts, &greedy(12)).unwrap();
    for name in [
        "hybrid",
        "hybrid_chunked",
        "sliding_window",
        "dynamic",
        "dynamic_full",
        "static",
        "offloaded",
        "offloaded_static",
        "offloaded_hybrid",
        "offloaded_hybrid_chunked",
        "mamba",
        "quantized",
        "of the next release",
    ] {
        let text = json!({"cache_implementation": name, "max_new_tokens": 12}).to_string();
        let got = generate(&model, &prompts, &read(&text)).unwrap();
        assert_eq!(got.sequences, want.sequences, "{name}");
    }
    let unknown = |value| {
        let map = json!({"cache_implementation": value});
        GenerationConfig::unknown_cache(map.as_object().unwrap())
    };
    assert_eq!(unknown(json!("hybrid")), None);
    assert_eq!(unknown(json!("magic")), Some("\"magic\"".to_owned()));
    assert_eq!(unknown(json!(3)), Some("3".to_owned()));
    assert_eq!(
        read(r#"{"cache_implementation": 3}"#).cache_implementation,
        None
    );
    // The settings of transformers' backends are left out; those of a cache that exists are kept.
    let config = read(
        r#"{"cache_implementation": "quantized",
            "cache_config": {"backend": "quanto", "nbits": 2, "axis_key": 0, "q_group_size": 32}}"#,
    );
    assert_eq!(config.cache_implementation.as_deref(), Some("quantized"));
    let settings = CacheConfig {
        q_group_size: 32,
        ..CacheConfig::default()
    };
    assert_eq!(config.cache_config, settings);
    let config =
        read(r#"{"cache_implementation": "sliding_window", "cache_config": {"window_length": 8}}"#);
    assert_eq!(
        config.cache_implementation.as_deref(),
        Some("sliding_window")
    );
}

#[test]
fn padding_outside_the_vocabulary_does_not_reach_the_embedding() {
    let model = load("llama_gqa");
    let prompts = [vec![5, 9, 3, 7, 11], vec![100]];
    // Two ends: one row ends early and is filled until the other does.
    let free = generate(&model, &prompts, &greedy(20)).unwrap();
    let config = GenerationConfig {
        eos_token_id: vec![free.new_tokens(0)[3]],
        ..greedy(20)
    };
    let want = generate(&model, &prompts, &config).unwrap();
    assert!(want.new_tokens(0).len() < 20);
    for pad in [-1, 128, 100_000] {
        // Only a padded batch has a column for it, only several rows are filled.
        for cache in [None, Some("dynamic".to_owned()), Some("static".to_owned())] {
            let config = GenerationConfig {
                pad_token_id: Some(pad),
                cache_implementation: cache.clone(),
                ..config.clone()
            };
            let got = generate(&model, &prompts, &config).unwrap();
            assert_eq!(got.sequences, want.sequences, "{pad}, {cache:?}");
        }
        let beams = GenerationConfig {
            num_beams: 3,
            pad_token_id: Some(pad),
            ..config.clone()
        };
        generate(&model, &prompts, &beams).unwrap();
    }
    let no_end = GenerationConfig {
        eos_token_id: vec![-1],
        pad_token_id: Some(-1),
        cache_implementation: Some("dynamic".to_owned()),
        ..greedy(20)
    };
    let got = generate(&model, &prompts, &no_end).unwrap();
    assert_eq!(got.sequences, free.sequences);
}

#[test]
fn truncation_and_padding_of_the_tokenizers_file_do_not_cut_a_prompt() {
    let plain = byte_tokenizer();
    let mut limited = plain.clone();
    limited
        .with_truncation(Some(TruncationParams {
            max_length: 6,
            ..TruncationParams::default()
        }))
        .unwrap();
    limited.with_padding(Some(PaddingParams {
        strategy: PaddingStrategy::Fixed(40),
        ..PaddingParams::default()
    }));
    let text = "a question longer than six bytes";
    let template = ChatTemplate::new("{% for m in messages %}{{ m.content }}{% endfor %}").unwrap();
    let tokens = |tokenizer: &Tokenizer| {
        let options = ChatTemplateOptions::default();
        template
            .encode(tokenizer, &[Message::user(text)], &options)
            .unwrap()
    };
    assert_eq!(tokens(&limited), encode(&plain, text));
    assert_eq!(tokens(&limited).len(), text.len());
    // The choice of a constraint is whole, too.
    let model = crate::support::random_model(257, 1, 3);
    let choice = ChoiceConstraint::from_texts(&limited, &[text], &[]).unwrap();
    let options = overdrive_generation::GenerateOptions {
        constraints: vec![Box::new(choice)],
        ..Default::default()
    };
    let output = overdrive_generation::generate_with_options(
        &model,
        &[vec![1]],
        &greedy(100),
        &options,
        |_| std::ops::ControlFlow::Continue(()),
    )
    .unwrap();
    assert_eq!(output.new_tokens(0), encode(&plain, text));
}
