use std::path::Path;

use anyhow::Result;
use overdrive::datasets::{Error, Tokenizer, load_tokenizer};
use overdrive::generation::ModelFiles;

use crate::local_tokenizer;

/// Tokens of short texts, such as captions and transcripts.
#[derive(Debug, Clone)]
pub struct TextTokens(Option<Tokenizer>);

impl TextTokens {
    /// Opens the tokenizer in a file, a folder, a GGUF file or a model on the hub; without a tokenizer, the tokens of a
    /// text are its bytes.
    pub fn open(path: Option<&Path>) -> Result<TextTokens> {
        let Some(path) = path else {
            return Ok(TextTokens(None));
        };
        let path = local_tokenizer(path)?;
        Ok(TextTokens(Some(match path.extension() {
            Some(extension) if extension == "json" => load_tokenizer(&path)?,
            _ => ModelFiles::open(&path)?.tokenizer()?,
        })))
    }

    /// Returns the tokens of a text.
    pub fn encode(&self, text: &str) -> overdrive::datasets::Result<Vec<i64>> {
        let Some(tokenizer) = &self.0 else {
            return Ok(text.bytes().map(i64::from).collect());
        };
        let encoding = tokenizer
            .encode(text, true)
            .map_err(|source| Error::Tokenizer {
                action: format!("encode {text:?}"),
                source,
            })?;
        Ok(encoding.get_ids().iter().map(|&id| i64::from(id)).collect())
    }
}
