//! The text model in a folder of a multimodal Gemma 3, whose configuration is in `text_config`.

use super::family::LlamaFamily;
use super::fields::Fields;
use super::llama::LlamaConfig;
use crate::{Error, Result};

/// Reads the configuration of the text model. The keys outside it concern images, except the ids of special tokens,
/// whether the head is tied, and the quantization of the weights.
pub(super) fn text(mut fields: Fields) -> Result<LlamaConfig> {
    let mut text = fields.object("text_config")?.unwrap_or_default();
    let family = LlamaFamily::Gemma3;
    if let Some(found) = text.string("model_type")?
        && found != family.model_type()
    {
        return Err(Error::Unsupported {
            key: "text_config.model_type".to_owned(),
            found: format!("{found:?}"),
            supported: family.model_type().to_owned(),
        });
    }
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
    LlamaConfig::read(family, text)
}
