//! Models from GGUF files: metadata to configuration, llama.cpp's names to those of transformers.

mod config;
mod end_of_text;
mod load;
mod names;

use std::path::Path;

use overdrive_quantization::GgufFile;

use crate::{CausalLm, LoadOptions, ModelConfig, Result};

impl CausalLm {
    /// Reads a GGUF file of the architectures `llama` (Mistral too), `qwen2`, `qwen3`, `gemma2` and
    /// `gemma3`. A model in several files (`NAME-00001-of-00003.gguf`) is opened by any of them.
    ///
    /// Matrices in groups (`Q8_0`, `Q4_0`, `Q4_K`, `Q6_K`, … see
    /// [`GgufFile`](overdrive_quantization::GgufFile)) stay quantized as they are; with
    /// [`LoadOptions::quantization`] they are dequantized and quantized again, one at a time. Everything else
    /// is converted to [`LoadOptions::kind`], by default fp32: files of half precision have norms in fp32, and
    /// a model computes in one dtype.
    ///
    /// The configuration's `eos_token_id` has every token that ends a text or a turn in llama.cpp: those that
    /// the metadata names (`eos`, `eot`, `eom`), and those with a known text such as `<|im_end|>`.
    ///
    /// The tokenizer is not read: a GGUF file describes it in llama.cpp's terms (a vocabulary, merges or
    /// scores, and the name of a pre-tokenizer whose rules are in llama.cpp's source). Use the `tokenizer.json`
    /// of the model that the file was made from.
    ///
    /// # Errors
    /// [`Error::Unsupported`](crate::Error::Unsupported) for other architectures and for mixtures of experts,
    /// [`Error::Common`](crate::Error::Common) for metadata that is missing or wrong,
    /// [`Error::Checkpoint`](crate::Error::Checkpoint) with every tensor that is missing, unexpected or of
    /// another shape, [`Error::Quantization`](crate::Error::Quantization) for a damaged file.
    pub fn from_gguf(path: impl AsRef<Path>, options: &LoadOptions) -> Result<CausalLm> {
        let file = GgufFile::open(path)?;
        let config = ModelConfig::from_gguf(&file)?;
        let parts = load::tensors(&file, &config, options)?;
        CausalLm::from_tensors(&config, parts)
    }
}
