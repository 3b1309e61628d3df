use std::path::Path;

use overdrive_core::Error as Common;
use overdrive_quantization::GgufFile;
use serde_json::Value;

use super::embedding_model::is_encoder;
use super::modules::{read_config, steps};
use crate::Result;
use crate::gguf::pooling_of_gguf;

/// The purpose of a model that generates no text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum PoolingTask {
    /// `embed`: one vector for each sequence, by [`EmbeddingModel`](crate::EmbeddingModel).
    Embed,
    /// `score`: one number for each pair of texts, by [`Reranker`](crate::Reranker).
    Score,
}

impl PoolingTask {
    /// Returns the task of a Hugging Face folder or a GGUF file, or `None` if it contains a model that generates text:
    ///
    /// | folder or file | task |
    /// |---|---|
    /// | an encoder for sequence classification; a `modules.json` without pooling, that of a cross-encoder | score |
    /// | another encoder, another `modules.json`; a GGUF file with a `pooling_type` | embed |
    ///
    /// # Errors
    /// [`Error::Common`](crate::Error::Common) for a file that cannot be read or parsed.
    pub fn of(path: impl AsRef<Path>) -> Result<Option<PoolingTask>> {
        let dir = path.as_ref();
        if dir.is_file() {
            let pooling = pooling_of_gguf(&GgufFile::open(dir)?)?;
            return Ok(pooling.map(|_| PoolingTask::Embed));
        }
        let pools = steps(dir)?.map(|steps| steps.iter().any(|(kind, _)| kind == "Pooling"));
        if pools.is_none() && !is_encoder(dir)? {
            return Ok(None);
        }
        let classifies = || -> Result<bool> {
            let config = read_config(dir)?;
            let class = config.pointer("/architectures/0").and_then(Value::as_str);
            Ok(class.is_some_and(|class| class.ends_with("ForSequenceClassification")))
        };
        let pools = pools.map_or_else(|| Ok(!classifies()?), Ok::<bool, crate::Error>)?;
        Ok(Some(match pools {
            true => PoolingTask::Embed,
            false => PoolingTask::Score,
        }))
    }
}

impl std::str::FromStr for PoolingTask {
    type Err = Common;

    fn from_str(name: &str) -> std::result::Result<PoolingTask, Common> {
        match name {
            "embed" => Ok(PoolingTask::Embed),
            "score" => Ok(PoolingTask::Score),
            _ => Err(Common::option(
                "task",
                format!("{name:?}"),
                "embed or score",
            )),
        }
    }
}
