use ahash::AHashMap;
use serde_json::json;
use tokenizers::Tokenizer;
use tokenizers::models::wordpiece::WordPiece;

use super::sentencepiece::SPACE;
use super::vocabulary::{TokenType, Vocabulary};
use super::{Ends, part};
use crate::{Error, Result};

/// Returns BERT's WordPiece. llama.cpp marks the tokens that begin a word by `▁`, BERT those that continue one by
/// `##`.
pub(super) fn tokenizer(vocabulary: &Vocabulary<'_>) -> Result<(Tokenizer, Ends)> {
    let words = vocabulary.tokens().map(|(id, text, kind)| {
        let word = match text.strip_prefix(SPACE) {
            Some(first) if !first.is_empty() => first.to_owned(),
            _ if matches!(kind, TokenType::Control | TokenType::Unknown) => text.to_owned(),
            // Older files have the special tokens as normal ones.
            _ if text.starts_with('[') && text.ends_with(']') => text.to_owned(),
            _ => format!("##{text}"),
        };
        (word, id)
    });
    let words: AHashMap<String, u32> = words.collect();
    let unknown = vocabulary.special("unknown_token_id")?;
    let unknown = unknown.ok_or_else(|| {
        let expected = "the id of the token of unknown words";
        overdrive_core::Error::option("tokenizer.ggml.unknown_token_id", "missing", expected)
    })?;
    let model = WordPiece::builder()
        .vocab(words)
        .unk_token(vocabulary.text(unknown).to_owned())
        .build()
        .map_err(|error| vocabulary.refused(error))?;
    let mut tokenizer = Tokenizer::new(model);
    let lowercase = vocabulary.flag("normalizer.lowercase", true)?;
    let strip_accents = vocabulary.flag("normalizer.strip_accents", lowercase)?;
    let normalizer = part::<tokenizers::NormalizerWrapper>(json!({
        "type": "BertNormalizer", "clean_text": true, "handle_chinese_chars": true,
        "strip_accents": strip_accents, "lowercase": lowercase,
    }))?;
    tokenizer
        .with_normalizer(Some(normalizer))
        .map_err(Error::Tokenizer)?;
    let words = json!({"type": "BertPreTokenizer"});
    tokenizer.with_pre_tokenizer(Some(part::<tokenizers::PreTokenizerWrapper>(words)?));
    let decoder = json!({"type": "WordPiece", "prefix": "##", "cleanup": true});
    tokenizer.with_decoder(Some(part::<tokenizers::DecoderWrapper>(decoder)?));
    let ends = Ends {
        before: vocabulary.special("bos_token_id")?,
        after: vocabulary.special("seperator_token_id")?,
    };
    Ok((tokenizer, ends))
}
