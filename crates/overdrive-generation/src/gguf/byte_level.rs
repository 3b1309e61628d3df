use ahash::AHashMap;
use serde_json::json;
use tokenizers::Tokenizer;
use tokenizers::models::bpe::BPE;

use super::pre_tokenizers::{DEFAULT, KNOWN, WordRule, rule};
use super::vocabulary::Vocabulary;
use super::{Ends, sentencepiece, set_pre_tokenizer, split};
use crate::{Error, Result};

/// Returns byte-level BPE: words by the rule that the file names, each byte as a letter of its own alphabet.
pub(super) fn tokenizer(vocabulary: &Vocabulary<'_>) -> Result<(Tokenizer, Ends)> {
    let key = "tokenizer.ggml.pre";
    let rule = match vocabulary.pre() {
        // These write spaces as `▁` and have no alphabet of bytes.
        Some("gemma4" | "sarvam-moe" | "granite-embed-multi-311m") => {
            return sentencepiece::by_merges(vocabulary);
        }
        None => {
            tracing::warn!(
                "the file has no `{key}`, the rule by which its tokenizer splits words; llama.cpp's default is used, \
                 and the model's tokenizer.json would be right"
            );
            DEFAULT
        }
        Some(name) => rule(name).ok_or_else(|| vocabulary.unknown(key, name, KNOWN))?,
    };
    let WordRule {
        patterns,
        ignore_merges,
        add_bos,
    } = rule;
    let merges = vocabulary.merges()?.ok_or_else(|| {
        let expected = "the merges of byte-level BPE";
        overdrive_core::Error::option("tokenizer.ggml.merges", "missing", expected)
    })?;
    let ids = vocabulary
        .tokens()
        .map(|(id, text, _)| (text.to_owned(), id));
    let model = BPE::builder()
        .vocab_and_merges(ids.collect::<AHashMap<_, _>>(), merges)
        .ignore_merges(ignore_merges)
        .build()
        .map_err(|error| vocabulary.refused(error))?;
    let mut tokenizer = Tokenizer::new(model);
    let mut steps: Vec<_> = patterns.iter().map(|pattern| split(pattern)).collect();
    let bytes = json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false});
    steps.push(bytes.clone());
    set_pre_tokenizer(&mut tokenizer, steps)?;
    tokenizer.with_decoder(Some(super::part::<tokenizers::DecoderWrapper>(bytes)?));
    if vocabulary.flag("add_space_prefix", false)? {
        let prefix = json!({"type": "Prepend", "prepend": " "});
        let normalizer = super::part::<tokenizers::NormalizerWrapper>(prefix)?;
        tokenizer
            .with_normalizer(Some(normalizer))
            .map_err(Error::Tokenizer)?;
    }
    Ok((tokenizer, Ends::read(vocabulary, add_bos, false)?))
}
