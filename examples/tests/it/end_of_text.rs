//! Tests of the flags of text generation with a GGUF file alone, and with a folder: the end of a text, hints, and the
//! tokenizer.

use std::fs;
use std::path::Path;

use clap::Parser;
use overdrive::generation::{FinishReason, GenerationConfig, generate};
use overdrive::transformer::{CausalLm, InitOptions, LlamaConfig};
use overdrive_examples::{CacheFlags, GenerationFlags, ModelFlags, generation_config};
use serde_json::json;

use crate::alone;

#[derive(Parser)]
struct Flags {
    #[command(flatten)]
    model: ModelFlags,
    #[command(flatten)]
    cache: CacheFlags,
    #[command(flatten)]
    generation: GenerationFlags,
}

fn parse(model: &Path, flags: &[&str]) -> Flags {
    let model = model.to_str().unwrap();
    Flags::parse_from(["test", "--model", model].iter().chain(flags))
}

#[test]
fn a_gguf_file_alone_ends_its_texts() {
    let _alone = alone();
    let file = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../crates/overdrive-transformer/tests/fixtures/gguf/llama.gguf"
    );
    let flags = parse(file.as_ref(), &["--logit-bias", "{\"2\": 1000}"]);
    let model = flags.model.load().unwrap();
    let files = flags.model.files().unwrap();
    let config = generation_config(&flags.generation, &files, 9).unwrap();
    assert_eq!(config.max_new_tokens, Some(9));
    assert_eq!(config.eos_token_id, [2]);
    let output = generate(&model, &[vec![5, 6]], &config).unwrap();
    assert_eq!(output.finish_reasons, [FinishReason::EndOfText]);
    // This fixture has no vocabulary; another tokenizer may be given.
    let error = flags.model.tokenizer().unwrap_err().to_string();
    assert!(error.contains("tokenizer.ggml.tokens"), "{error}");
}

#[test]
fn a_file_or_a_folder_gives_the_tokenizer_unless_another_is_named() {
    let file = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../crates/overdrive-generation/tests/fixtures/gguf/byte_level.gguf"
    );
    let flags = parse(file.as_ref(), &[]);
    let tokenizer = flags.model.tokenizer().unwrap();
    assert_eq!(tokenizer.token_to_id("<|im_end|>"), Some(2));

    let folder = tempfile::tempdir().unwrap();
    let settings = json!({"eos_token_id": 7, "cache_implementation": "hybrid"});
    fs::write(
        folder.path().join("generation_config.json"),
        settings.to_string(),
    )
    .unwrap();
    let flags = parse(folder.path(), &["--cache", "static"]);
    let files = flags.model.files().unwrap();
    let mut config = generation_config(&flags.generation, &files, 9).unwrap();
    // The folder's cache gives way to a flag.
    flags.cache.apply(&mut config).unwrap();
    assert_eq!(config.eos_token_id, [7]);
    assert_eq!(config.cache_implementation.as_deref(), Some("static"));
    // The tokenizer cuts no prompt.
    let tokenizer = json!({
        "version": "1.0", "added_tokens": [], "padding": null,
        "truncation": {"direction": "Right", "max_length": 1, "strategy": "LongestFirst", "stride": 0},
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "model": {"type": "WordLevel", "vocab": {"a": 0, "b": 1}, "unk_token": "a"},
    });
    let path = folder.path().join("tokenizer.json");
    fs::write(&path, tokenizer.to_string()).unwrap();
    let tokenizer = flags.model.tokenizer().unwrap();
    assert_eq!(tokenizer.encode("b b a", true).unwrap().len(), 3);
    // A file with a tokenizer that is not wanted.
    for given in [path.as_path(), folder.path()] {
        let flags = parse(file.as_ref(), &["--tokenizer", given.to_str().unwrap()]);
        let tokenizer = flags.model.tokenizer().unwrap();
        assert_eq!(tokenizer.get_vocab_size(true), 2);
        let out = tempfile::tempdir().unwrap();
        flags.model.copy_tokenizer(out.path()).unwrap();
        assert!(out.path().join("tokenizer.json").is_file());
    }
}

#[test]
fn the_flag_for_sinks_replaces_the_setting_of_the_model_only_if_it_is_given() {
    for (flags, sinks) in [
        (&[][..], 4),
        (&["--sinks", "2"][..], 2),
        (&["--sinks", "0"][..], 0),
    ] {
        let mut config = GenerationConfig {
            cache_implementation: Some("sliding_window".to_owned()),
            ..GenerationConfig::default()
        };
        config.cache_config.num_sink_tokens = 4;
        let cache = parse(Path::new("model"), flags).cache;
        cache.apply(&mut config).unwrap();
        assert_eq!(config.cache_config.num_sink_tokens, sinks, "{flags:?}");
    }
}

#[test]
fn the_flag_for_the_cache_replaces_the_setting_of_the_model_only_if_it_is_given() {
    for (flags, use_cache, name) in [
        (&[][..], false, "static"),
        (&["--cache", "int8"][..], true, "int8"),
        (&["--cache", "none"][..], false, "static"),
    ] {
        let mut config = GenerationConfig {
            use_cache: false,
            cache_implementation: Some("static".to_owned()),
            ..GenerationConfig::default()
        };
        let cache = parse(Path::new("model"), flags).cache;
        cache.apply(&mut config).unwrap();
        assert_eq!(config.use_cache, use_cache, "{flags:?}");
        assert_eq!(config.cache_implementation.as_deref(), Some(name));
    }
    // Only a sliding cache has a window.
    for more in [&[][..], &["--cache", "static"], &["--cache", "none"]] {
        let flags = [&["--window", "8"], more].concat();
        let cache = parse(Path::new("model"), &flags).cache;
        let error = cache.apply(&mut GenerationConfig::default()).unwrap_err();
        assert!(
            error.to_string().contains("add `--cache sliding`"),
            "{error}"
        );
    }
}

#[test]
fn a_sliding_cache_without_a_window_is_refused_with_the_flag_for_one() {
    let own = LlamaConfig {
        vocab_size: 16,
        hidden_size: 32,
        intermediate_size: 32,
        num_hidden_layers: 1,
        num_attention_heads: 4,
        ..LlamaConfig::default()
    };
    let model = CausalLm::new(&own.into(), &InitOptions::default()).unwrap();
    let check = |flags: &[&str]| {
        let mut config = GenerationConfig::default();
        parse(Path::new("model"), flags)
            .cache
            .apply(&mut config)
            .unwrap();
        CacheFlags::check(&config, &model)
    };
    check(&[]).unwrap();
    check(&["--cache", "sliding", "--window", "8"]).unwrap();
    let error = check(&["--cache", "sliding"]).unwrap_err().to_string();
    assert!(error.contains("add `--window N`"), "{error}");
}
