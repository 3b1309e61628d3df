//! Tests of incremental decoding against decoding all at once.

use std::ops::ControlFlow;

use crate::support::byte_tokenizer;
use overdrive_generation::{FinishReason, GenerationConfig, TextStream, generate_text};
use proptest::prelude::*;
use proptest::test_runner::RngSeed;
use serde_json::{Value, json};
use tokenizers::Tokenizer;

fn ids(tokenizer: &Tokenizer, text: &str) -> Vec<u32> {
    tokenizer.encode(text, false).unwrap().get_ids().to_vec()
}

#[test]
fn a_character_of_four_tokens_comes_in_one_piece() {
    let tokenizer = byte_tokenizer();
    let mut stream = TextStream::new(&tokenizer, true);
    let pieces: Vec<String> = ids(&tokenizer, "a🦀é")
        .into_iter()
        .map(|id| stream.push(id).unwrap())
        .collect();
    assert_eq!(pieces, ["a", "", "", "", "🦀", "", "é"]);
    assert_eq!(stream.finish().unwrap(), "");
}

#[test]
fn bytes_that_become_no_character_come_at_the_end_as_replacements() {
    let tokenizer = byte_tokenizer();
    let mut stream = TextStream::new(&tokenizer, true);
    for id in &ids(&tokenizer, "🦀")[..2] {
        assert_eq!(stream.push(*id).unwrap(), "");
    }
    assert_eq!(stream.finish().unwrap(), "\u{fffd}");
    assert_eq!(
        stream.push(ids(&tokenizer, "b")[0]).unwrap(),
        "b",
        "it begins anew"
    );
}

#[test]
fn special_tokens_leave_text_only_where_wanted() {
    let tokenizer = byte_tokenizer();
    assert_eq!(TextStream::new(&tokenizer, true).push(256).unwrap(), "");
    assert_eq!(
        TextStream::new(&tokenizer, false).push(256).unwrap(),
        "<end>"
    );
}

/// The tokenizer has the marks as special tokens, as that of Gemma 4 has; one decodes bytes, and one does not.
#[test]
fn the_marks_of_tool_calls_leave_text() {
    let special = ["<|tool_call>", "<tool_call|>", "<|\"|>", "<turn|>"];
    for decoder in ["ByteFallback", "Fuse"] {
        let added: Vec<Value> = special
            .iter()
            .zip(4..)
            .map(|(content, id)| {
                json!({"id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false,
                    "normalized": false, "special": true})
            })
            .collect();
        let tokenizer = json!({
            "version": "1.0", "truncation": null, "padding": null, "added_tokens": added, "normalizer": null,
            "pre_tokenizer": null, "post_processor": null, "decoder": {"type": decoder},
            "model": {"type": "BPE", "vocab": {"<0xC3>": 0, "<0xA9>": 1, "a": 2, "b": 3}, "merges": []},
        });
        let tokenizer: Tokenizer = tokenizer.to_string().parse().unwrap();
        let ids = [2, 4, 3, 6, 2, 6, 5, 7];
        let expected = "a<|tool_call>b<|\"|>a<|\"|><tool_call|>";
        assert_eq!(
            TextStream::decode(&tokenizer, &ids, true).unwrap(),
            expected
        );
        let mut stream = TextStream::new(&tokenizer, true);
        let mut text = String::new();
        for id in ids {
            text += &stream.push(id).unwrap();
        }
        assert_eq!(text + &stream.finish().unwrap(), expected);
    }
}

#[test]
fn a_prompt_gives_no_text_but_completes_characters() {
    let tokenizer = byte_tokenizer();
    let prompt = ids(&tokenizer, "hello");
    let mut stream = TextStream::new(&tokenizer, true).with_prefix(&prompt);
    assert_eq!(stream.push(ids(&tokenizer, "!")[0]).unwrap(), "!");
    let crab = ids(&tokenizer, "🦀");
    let mut stream = TextStream::new(&tokenizer, true).with_prefix(&crab[..2]);
    assert_eq!(stream.push(crab[2]).unwrap(), "");
    assert_eq!(stream.push(crab[3]).unwrap(), "🦀");
}

#[test]
fn an_unknown_token_is_an_error_or_no_text() {
    let tokenizer = byte_tokenizer();
    // The tokenizers crate ignores ids that it does not know.
    assert_eq!(TextStream::new(&tokenizer, true).push(99_999).unwrap(), "");
}

#[test]
fn generated_text_is_the_text_of_the_generated_tokens() {
    let config = overdrive_transformer::LlamaConfig {
        vocab_size: 257,
        hidden_size: 16,
        intermediate_size: 16,
        num_hidden_layers: 1,
        num_attention_heads: 2,
        ..Default::default()
    };
    let model = overdrive_transformer::CausalLm::new(&config.into(), &Default::default()).unwrap();
    let tokenizer = byte_tokenizer();
    let config = GenerationConfig {
        max_new_tokens: Some(200),
        do_sample: true,
        top_k: 0,
        seed: Some(4),
        ..Default::default()
    };
    let prompt: Vec<i64> = ids(&tokenizer, "hi ").into_iter().map(i64::from).collect();
    let mut text = String::new();
    let output = generate_text(&model, &tokenizer, &prompt, &config, |piece| {
        text.push_str(piece);
        ControlFlow::Continue(())
    })
    .unwrap();
    let all: Vec<u32> = output.sequences[0].iter().map(|&id| id as u32).collect();
    assert_eq!(format!("hi {text}"), tokenizer.decode(&all, true).unwrap());

    let mut pieces = 0;
    let output = generate_text(&model, &tokenizer, &prompt, &config, |_| {
        pieces += 1;
        ControlFlow::Break(())
    })
    .unwrap();
    assert_eq!(
        (pieces, output.finish_reasons[0]),
        (1, FinishReason::Stopped)
    );
}

proptest! {
    #[test]
    fn pieces_joined_are_the_text_decoded_at_once(bytes in proptest::collection::vec(0u32..257, 0..60)) {
        let tokenizer = byte_tokenizer();
        let mut stream = TextStream::new(&tokenizer, true);
        let mut text = String::new();
        for id in &bytes {
            text.push_str(&stream.push(*id).unwrap());
        }
        text.push_str(&stream.finish().unwrap());
        prop_assert_eq!(text, tokenizer.decode(&bytes, true).unwrap());
    }

    #[test]
    fn whole_characters_come_as_soon_as_they_are_whole(text in "\\PC{0,20}") {
        // U+FFFD itself waits for the next token: it looks like an incomplete character.
        prop_assume!(!text.contains('\u{fffd}'));
        let tokenizer = byte_tokenizer();
        let mut stream = TextStream::new(&tokenizer, true);
        for character in text.chars() {
            let mut pieces = String::new();
            for id in ids(&tokenizer, &character.to_string()) {
                pieces.push_str(&stream.push(id).unwrap());
            }
            prop_assert_eq!(pieces, character.to_string());
        }
    }
}

/// Returns a tokenizer whose tokens are `words`, with one special token, `</s>`, behind them.
fn tokenizer_of(words: &[String], decoder: &Value) -> Tokenizer {
    let vocab: serde_json::Map<String, Value> = words
        .iter()
        .enumerate()
        .map(|(id, word)| (word.clone(), id.into()))
        .collect();
    serde_json::from_value(json!({
        "version": "1.0", "truncation": null, "padding": null, "normalizer": null,
        "post_processor": null, "pre_tokenizer": null, "decoder": decoder,
        "added_tokens": [{"id": words.len(), "content": "</s>", "single_word": false, "lstrip": false,
            "rstrip": false, "normalized": false, "special": true}],
        "model": {"type": "BPE", "dropout": null, "unk_token": null,
            "continuing_subword_prefix": null, "end_of_word_suffix": null, "fuse_unk": false,
            "byte_fallback": true, "vocab": vocab, "merges": []},
    }))
    .unwrap()
}

/// Returns a tokenizer of each kind of decoder, with the number of its tokens.
fn every_kind() -> Vec<(&'static str, Tokenizer, u32)> {
    let words = |list: &[&str]| {
        list.iter()
            .map(|word| (*word).to_owned())
            .collect::<Vec<_>>()
    };
    let spaced = words(&["▁", "▁a", "b", "▁日", "é", "▁▁", ".", "▁it"]);
    let bytes: Vec<String> = [
        0xf0, 0x9f, 0x98, 0x80, 0xc3, 0xa9, 0x41, 0x20, 0xff, 0xe2, 0x82, 0xac,
    ]
    .map(|byte: u8| format!("<0x{byte:02X}>"))
    .to_vec();
    let with_bytes = [spaced.clone(), bytes].concat();
    let replace = json!({"type": "Replace", "pattern": {"String": "▁"}, "content": " "});
    let strip = json!({"type": "Strip", "content": " ", "start": 1, "stop": 0});
    let sequence = |steps: &[Value]| json!({"type": "Sequence", "decoders": steps});
    let (fallback, fuse) = (json!({"type": "ByteFallback"}), json!({"type": "Fuse"}));
    let metaspace = |scheme: &str| json!({"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": true});
    let llama = sequence(&[replace.clone(), fallback.clone(), fuse.clone(), strip]);
    let gemma = sequence(&[replace, fallback.clone(), fuse]);
    let pieces = words(&["a", "##b", "it", "'s", ".", "##é", "do", "n't"]);
    let ends = words(&["a</w>", "b", "é</w>", "."]);
    [
        ("SentencePiece with a space in front", &with_bytes, llama),
        ("SentencePiece without", &with_bytes, gemma),
        (
            "Metaspace and bytes",
            &with_bytes,
            sequence(&[fallback.clone(), metaspace("always")]),
        ),
        ("bytes alone", &with_bytes, fallback),
        ("Metaspace", &spaced, metaspace("always")),
        (
            "Metaspace without a space in front",
            &spaced,
            metaspace("never"),
        ),
        (
            "WordPiece",
            &pieces,
            json!({"type": "WordPiece", "prefix": "##", "cleanup": true}),
        ),
        (
            "BPE with ends of words",
            &ends,
            json!({"type": "BPEDecoder", "suffix": "</w>"}),
        ),
        ("none", &spaced, Value::Null),
    ]
    .into_iter()
    .map(|(name, words, decoder)| (name, tokenizer_of(words, &decoder), words.len() as u32 + 1))
    .chain([("byte-level", byte_tokenizer(), 257)])
    .collect()
}

fn streamed(stream: &mut TextStream<'_>, ids: &[u32]) -> String {
    let mut text = String::new();
    for id in ids {
        text.push_str(&stream.push(*id).unwrap());
    }
    text + &stream.finish().unwrap()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, rng_seed: RngSeed::Fixed(44), ..ProptestConfig::default() })]

    #[test]
    fn of_every_decoder_the_pieces_joined_are_the_text_decoded_at_once(
        numbers in proptest::collection::vec(any::<u32>(), 0..24),
        cut in 0usize..24,
        skips in any::<bool>(),
    ) {
        for (name, tokenizer, size) in every_kind() {
            let ids: Vec<u32> = numbers.iter().map(|number| number % size).collect();
            let whole = TextStream::decode(&tokenizer, &ids, skips).unwrap();
            let text = streamed(&mut TextStream::new(&tokenizer, skips), &ids);
            prop_assert_eq!(&text, &whole, "{}: {:?}", name, ids);
            // After a prompt, the rest of the text comes, and nothing of the prompt's own.
            let (prompt, rest) = ids.split_at(cut.min(ids.len()));
            let before = TextStream::decode(&tokenizer, prompt, skips).unwrap();
            let text = streamed(&mut TextStream::new(&tokenizer, skips).with_prefix(prompt), rest);
            let common: usize = before
                .chars()
                .zip(whole.chars())
                .take_while(|(a, b)| a == b)
                .map(|(a, _)| a.len_utf8())
                .sum();
            prop_assert_eq!(&text, &whole[common..], "{}: {:?} + {:?}", name, prompt, rest);
        }
    }

    #[test]
    fn where_bytes_are_whole_characters_the_text_is_that_of_the_tokenizers_crate(
        texts in proptest::collection::vec(proptest::sample::select(vec!["😀", "é", "A", " ", "€", "▁a", "b", "▁", "</s>"]), 0..16),
    ) {
        for (name, tokenizer, _) in every_kind().into_iter().take(4) {
            let ids: Vec<u32> = texts
                .iter()
                .flat_map(|text| match tokenizer.token_to_id(text) {
                    Some(id) => vec![id],
                    None => text
                        .bytes()
                        .map(|byte| tokenizer.token_to_id(&format!("<0x{byte:02X}>")).unwrap())
                        .collect(),
                })
                .collect();
            let want = tokenizer.decode(&ids, true).unwrap();
            prop_assert_eq!(TextStream::decode(&tokenizer, &ids, true).unwrap(), want, "{}", name);
        }
    }
}

#[test]
fn an_incomplete_character_after_whole_ones_is_one_replacement() {
    let (_, tokenizer, _) = every_kind().remove(0);
    let byte = |byte: u8| tokenizer.token_to_id(&format!("<0x{byte:02X}>")).unwrap();
    let face = "😀".bytes().map(byte);
    let ids: Vec<u32> = face.chain([byte(0xf0)]).collect();
    let mut stream = TextStream::new(&tokenizer, true);
    let pieces: Vec<String> = ids.iter().map(|&id| stream.push(id).unwrap()).collect();
    assert_eq!(pieces, ["", "", "", "😀", ""]);
    assert_eq!(stream.finish().unwrap(), "\u{fffd}");
    // A prompt that ends in bytes leaves none of them to the continuation.
    let mut stream = TextStream::new(&tokenizer, true).with_prefix(&ids[..4]);
    assert_eq!(stream.push(byte(0xf0)).unwrap(), "");
    assert_eq!(stream.finish().unwrap(), "\u{fffd}");
    let mut stream = TextStream::new(&tokenizer, true).with_prefix(&ids[..2]);
    assert_eq!(stream.push(ids[2]).unwrap(), "");
    assert_eq!(stream.push(ids[3]).unwrap(), "😀");
}
