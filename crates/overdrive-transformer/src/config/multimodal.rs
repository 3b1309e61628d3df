//! The text model in the folder of a multimodal model, whose configuration is in `text_config`.

use super::family::LlamaFamily;
use super::fields::Fields;
use super::llama::LlamaConfig;
use crate::{Error, Result};

/// Reads the configuration of the text model. The keys outside it concern images, except the ids of special tokens,
/// whether the head is tied, and the quantization of the weights.
///
/// `families` are those of the text model; the first is the default.
pub(super) fn text(mut fields: Fields, families: &[LlamaFamily]) -> Result<LlamaConfig> {
    let mut text = fields.object("text_config")?.unwrap_or_default();
    let found = text.string("model_type")?;
    let family = families.iter().find(|family| {
        let own = family.model_type();
        found.as_deref().is_none_or(|found| found == own)
    });
    let Some(family) = family else {
        let names: Vec<_> = families.iter().map(|family| family.model_type()).collect();
        return Err(Error::unsupported(
            "text_config.model_type",
            format!("{:?}", found.unwrap_or_default()),
            names.join(", "),
        ));
    };
    // The key in `text_config` has no effect in transformers, whose default depends on the family.
    text.put("tie_word_embeddings", ties_head(*family).into());
    for key in [
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
        "tie_word_embeddings",
        "quantization_config",
    ] {
        if let Some(value) = fields.take(key) {
            text.put(key, value);
        }
    }
    LlamaConfig::read(*family, text)
}

/// Returns the default of `tie_word_embeddings` of the multimodal model.
fn ties_head(family: LlamaFamily) -> bool {
    !(family.is_qwen35() || family.is_qwen3_vl())
}
