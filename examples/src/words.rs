//! Words to reverse, a tokenizer of letters, and the shape of a small T5 that learns it.

use anyhow::Result;
use overdrive::core::random::Generator;
use overdrive::datasets::Tokenizer;
use overdrive::trainer::Seq2SeqPair;
use overdrive::transformer::{InitOptions, Seq2SeqConfig, Seq2SeqLm, T5Config};
use serde_json::{Map, json};
use tch::Device;

/// Makes words of two to five of the first eight letters, each with the same word reversed.
pub fn words_to_reverse(seed: u64, count: usize) -> Vec<Seq2SeqPair> {
    let mut random = Generator::named(seed, "words");
    let mut below = |bound: u8| (random.uniform() * f64::from(bound)) as u8;
    let mut word = || -> String {
        let length = 2 + below(4);
        (0..length).map(|_| char::from(b'a' + below(8))).collect()
    };
    let pair = |source: String| Seq2SeqPair {
        target: source.chars().rev().collect(),
        source,
    };
    (0..count).map(|_| pair(word())).collect()
}

/// The end-of-sequence token of the tokenizer of letters.
pub const END: &str = "</s>";

/// Returns a tokenizer of 29 tokens: padding, the end of sequence, an unknown letter, and the letters a to z.
fn letters() -> Result<Tokenizer> {
    let special = ["<pad>", END, "<unk>"];
    let letters = (b'a'..=b'z').map(|letter| char::from(letter).to_string());
    let tokens = special.iter().map(ToString::to_string).chain(letters);
    let vocab: Map<_, _> = tokens
        .zip(0..)
        .map(|(token, id)| (token, json!(id)))
        .collect();
    let added = |(id, token): (usize, &&str)| {
        json!({
            "id": id, "content": token, "single_word": false, "lstrip": false, "rstrip": false,
            "normalized": false, "special": true,
        })
    };
    let added: Vec<_> = special.iter().enumerate().map(added).collect();
    let text = json!({"Sequence": {"id": "A", "type_id": 0}});
    let end = json!({"SpecialToken": {"id": END, "type_id": 0}});
    Ok(serde_json::from_value(json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": added, "normalizer": null,
        "pre_tokenizer": {"type": "Split", "pattern": {"Regex": "."}, "behavior": "Isolated", "invert": false},
        "post_processor": {
            "type": "TemplateProcessing", "single": [text, end], "pair": [text, end],
            "special_tokens": {END: {"id": END, "ids": [1], "tokens": [END]}},
        },
        "decoder": {"type": "Fuse"},
        "model": {"type": "WordLevel", "vocab": vocab, "unk_token": "<unk>"},
    }))?)
}

/// Returns the configuration of a T5 of 0.2 million parameters for [`letters`].
fn small_config() -> Seq2SeqConfig {
    T5Config {
        vocab_size: 30,
        d_model: 64,
        d_kv: 16,
        d_ff: 128,
        num_layers: 2,
        num_heads: 4,
        relative_attention_num_buckets: 16,
        relative_attention_max_distance: 20,
        dropout_rate: 0.0,
        decoder_start_token_id: Some(0),
        ..T5Config::default()
    }
    .into()
}

/// Returns a small T5 of random weights with its tokenizer.
pub fn small_model(seed: u64, device: Device) -> Result<(Seq2SeqLm, Tokenizer)> {
    let options = InitOptions {
        device,
        seed,
        ..InitOptions::default()
    };
    Ok((Seq2SeqLm::new(&small_config(), &options)?, letters()?))
}
