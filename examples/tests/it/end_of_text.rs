//! Tests of the flags of text generation: the end of a text, the hints of a folder, and its tokenizer.

use std::fs;

use clap::Parser;
use overdrive::generation::{FinishReason, generate};
use overdrive_examples::{CacheFlags, GenerationFlags, ModelFlags};
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

#[test]
fn a_gguf_file_in_a_folder_without_settings_ends_its_texts() {
    let _alone = alone();
    let fixtures = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../crates/overdrive-transformer/tests/fixtures/gguf/llama.gguf"
    );
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().to_str().unwrap();
    let parse = |flags: &[&str]| {
        let all = [
            "test",
            "--model",
            path,
            "--gguf",
            fixtures,
            "--logit-bias",
            "{\"2\": 1000}",
        ];
        Flags::parse_from(all.iter().chain(flags))
    };
    let flags = parse(&[]);
    let model = flags.model.load().unwrap();
    let mut config = flags.generation.config(folder.path(), 9).unwrap();
    assert_eq!(config.max_new_tokens, Some(9));
    assert!(config.eos_token_id.is_empty(), "the folder names none");
    flags.model.add_end_of_text(&model, &mut config);
    assert_eq!(config.eos_token_id, [2]);
    let output = generate(&model, &[vec![5, 6]], &config).unwrap();
    assert_eq!(output.finish_reasons, [FinishReason::EndOfText]);
    // The folder's own tokens stay, and its cache gives way to a flag.
    let settings = json!({"eos_token_id": 7, "cache_implementation": "hybrid"});
    fs::write(
        folder.path().join("generation_config.json"),
        settings.to_string(),
    )
    .unwrap();
    let flags = parse(&["--cache", "static"]);
    let mut config = flags.generation.config(folder.path(), 9).unwrap();
    flags.model.add_end_of_text(&model, &mut config);
    flags.cache.apply(&mut config);
    assert_eq!(config.eos_token_id, [7, 2]);
    assert_eq!(config.cache_implementation.as_deref(), Some("static"));
    // The tokenizer cuts no prompt.
    let tokenizer = json!({
        "version": "1.0", "added_tokens": [], "padding": null,
        "truncation": {"direction": "Right", "max_length": 1, "strategy": "LongestFirst", "stride": 0},
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "model": {"type": "WordLevel", "vocab": {"a": 0, "b": 1}, "unk_token": "a"},
    });
    fs::write(folder.path().join("tokenizer.json"), tokenizer.to_string()).unwrap();
    let tokenizer = flags.model.tokenizer().unwrap();
    assert_eq!(tokenizer.encode("b b a", true).unwrap().len(), 3);
}
