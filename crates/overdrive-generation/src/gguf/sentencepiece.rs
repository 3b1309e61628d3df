use ahash::AHashMap;
use serde_json::json;
use tokenizers::models::bpe::BPE;
use tokenizers::normalizers::Sequence;
use tokenizers::{NormalizerWrapper, Tokenizer};

use super::vocabulary::{TokenType, Vocabulary};
use super::{Ends, part, replace, set_decoder, set_pre_tokenizer, split};
use crate::{Error, Result};

/// The letter by which SentencePiece writes a space.
pub(super) const SPACE: &str = "▁";

/// Returns SentencePiece BPE whose merges follow from the scores of the tokens.
pub(super) fn by_scores(vocabulary: &Vocabulary<'_>) -> Result<(Tokenizer, Ends)> {
    let merges = match (vocabulary.merges()?, vocabulary.scores()?) {
        // Files that were made from a tokenizer.json have its merges, and the same score for every token.
        (Some(merges), _) => merges,
        (None, Some(scores)) => merges_of_scores(vocabulary, &scores),
        (None, None) => {
            let expected = "the scores of the tokens";
            return Err(overdrive_core::Error::option(
                "tokenizer.ggml.scores",
                "missing",
                expected,
            )
            .into());
        }
    };
    let prefix = vocabulary.flag("add_space_prefix", true)?;
    let mut tokenizer = Tokenizer::new(model(vocabulary, merges, false)?);
    set_spaces(&mut tokenizer, prefix, Vec::new())?;
    Ok((tokenizer, Ends::read(vocabulary, true, false)?))
}

/// Returns SentencePiece BPE with the merges of the file, which may cross word boundaries but not line breaks.
pub(super) fn by_merges(vocabulary: &Vocabulary<'_>) -> Result<(Tokenizer, Ends)> {
    let merges = vocabulary.merges()?.ok_or_else(|| {
        let expected = "the merges of its BPE";
        overdrive_core::Error::option("tokenizer.ggml.merges", "missing", expected)
    })?;
    // llama.cpp looks several newlines up as a whole.
    let mut tokenizer = Tokenizer::new(model(vocabulary, merges, true)?);
    set_spaces(
        &mut tokenizer,
        vocabulary.flag("add_space_prefix", false)?,
        Vec::new(),
    )?;
    set_pre_tokenizer(&mut tokenizer, vec![split(r"[^\n]+|[\n]+")])?;
    let gemma = vocabulary.model()? == "gemma4" || vocabulary.pre() == Some("gemma4");
    Ok((tokenizer, Ends::read(vocabulary, gemma, false)?))
}

fn model(
    vocabulary: &Vocabulary<'_>,
    merges: Vec<(String, String)>,
    ignore_merges: bool,
) -> Result<BPE> {
    let ids = vocabulary
        .tokens()
        .map(|(id, text, _)| (text.to_owned(), id));
    let mut builder = BPE::builder()
        .vocab_and_merges(ids.collect::<AHashMap<_, _>>(), merges)
        .ignore_merges(ignore_merges)
        .byte_fallback(vocabulary.has_bytes())
        .fuse_unk(true);
    if let Some(unknown) = vocabulary.special("unknown_token_id")? {
        builder = builder.unk_token(vocabulary.text(unknown).to_owned());
    }
    builder.build().map_err(|error| vocabulary.refused(error))
}

/// Sets the normalizer after `first`, and the decoder: spaces are written as [`SPACE`], with one before each text
/// if `prefix` is set.
pub(super) fn set_spaces(
    tokenizer: &mut Tokenizer,
    prefix: bool,
    first: Vec<NormalizerWrapper>,
) -> Result<()> {
    let mut steps = first;
    if prefix {
        steps.push(part(json!({"type": "Prepend", "prepend": SPACE}))?);
    }
    steps.push(part(replace(" ", SPACE))?);
    tokenizer
        .with_normalizer(Some(Sequence::new(steps)))
        .map_err(Error::Tokenizer)?;
    let mut steps = vec![
        json!({"type": "Replace", "pattern": {"String": SPACE}, "content": " "}),
        json!({"type": "ByteFallback"}),
        json!({"type": "Fuse"}),
    ];
    if prefix {
        steps.push(json!({"type": "Strip", "content": " ", "start": 1, "stop": 0}));
    }
    set_decoder(tokenizer, steps)
}

/// Returns every pair of tokens whose concatenation is a token, ordered by the score of that token, best first:
/// SentencePiece joins the two neighbours whose concatenation has the best score.
fn merges_of_scores(vocabulary: &Vocabulary<'_>, scores: &[f32]) -> Vec<(String, String)> {
    let is_text = |kind| matches!(kind, TokenType::Normal | TokenType::Unused);
    let texts = vocabulary.tokens().filter(|&(_, _, kind)| is_text(kind));
    let texts: AHashMap<&str, u32> = texts.map(|(id, text, _)| (text, id)).collect();
    let mut pairs = Vec::new();
    for (&text, &id) in &texts {
        for (middle, _) in text.char_indices().skip(1) {
            let (left, right) = text.split_at(middle);
            if texts.contains_key(left) && texts.contains_key(right) {
                pairs.push((id, left, right));
            }
        }
    }
    let score = |id: u32| scores[id as usize];
    // Tokens of equal score stay in the order of their training; the remaining keys only make the order deterministic.
    pairs.sort_unstable_by(|a, b| {
        let by_score = score(b.0).total_cmp(&score(a.0));
        let by_length = || b.1.len().cmp(&a.1.len());
        by_score.then_with(|| a.0.cmp(&b.0)).then_with(by_length)
    });
    let owned = |(_, left, right): (u32, &str, &str)| (left.to_owned(), right.to_owned());
    pairs.into_iter().map(owned).collect()
}
