//! Tests of incremental decoding against decoding all at once.

use std::ops::ControlFlow;

use crate::support::byte_tokenizer;
use overdrive_generation::{FinishReason, GenerationConfig, TextStream, generate_text};
use proptest::prelude::*;
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
