use overdrive_core::Error as Common;
use tokenizers::models::unigram::Unigram;
use tokenizers::normalizers::Precompiled;
use tokenizers::{NormalizerWrapper, Tokenizer};

use super::vocabulary::{TokenType, Vocabulary};
use super::{Ends, charsmap, part, replace, sentencepiece};
use crate::Result;

/// Returns SentencePiece unigram: the segmentation of a text with the best sum of scores.
pub(super) fn tokenizer(vocabulary: &Vocabulary<'_>) -> Result<(Tokenizer, Ends)> {
    let key = "tokenizer.ggml.scores";
    let scores = vocabulary
        .scores()?
        .ok_or_else(|| Common::option(key, "missing", "the scores of the tokens"))?;
    // A token without a score of its own must not make unknown characters unlikelier: their score is relative to
    // the lowest one.
    let normal = vocabulary
        .tokens()
        .zip(&scores)
        .filter(|((_, _, kind), _)| *kind == TokenType::Normal);
    let lowest = normal
        .map(|(_, &score)| score)
        .reduce(f32::min)
        .unwrap_or(0.0);
    let pieces = vocabulary
        .tokens()
        .zip(&scores)
        .map(|((_, text, kind), &score)| {
            let score = match kind {
                TokenType::Normal => score,
                _ => lowest,
            };
            (text.to_owned(), f64::from(score))
        });
    let unknown = vocabulary.special("unknown_token_id")?;
    let unknown = unknown.map(|id| id as usize);
    let model = Unigram::from(pieces.collect(), unknown, vocabulary.has_bytes())
        .map_err(|error| vocabulary.refused(error))?;
    let mut tokenizer = Tokenizer::new(model);
    let mut steps = Vec::new();
    if let Some(map) = vocabulary
        .bytes("precompiled_charsmap")?
        .filter(|map| !map.is_empty())
    {
        let damaged = |reason: String| {
            Common::option("tokenizer.ggml.precompiled_charsmap", "damaged", reason)
        };
        charsmap::check(&map).map_err(damaged)?;
        let map = Precompiled::from(&map).map_err(|error| damaged(error.to_string()))?;
        steps.push(NormalizerWrapper::Precompiled(map));
    }
    if vocabulary.flag("remove_extra_whitespaces", false)? {
        steps.push(part(replace(" {2,}", " "))?);
        steps.push(part(replace(r"\A | \z", ""))?);
    }
    let prefix = vocabulary.flag("add_space_prefix", false)?;
    sentencepiece::set_spaces(&mut tokenizer, prefix, steps)?;
    Ok((tokenizer, Ends::read(vocabulary, false, true)?))
}
