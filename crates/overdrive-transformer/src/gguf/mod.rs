//! Models from and to GGUF files: metadata and configuration, llama.cpp's names and those of transformers.

mod adapter;
mod bert;
mod config;
mod deepseek;
mod delta_net;
mod end_of_text;
mod file_type;
mod gemma;
mod generation_config;
mod load;
mod metadata;
mod names;
mod placement;
mod rope;
mod save;

pub use adapter::save_gguf_adapter;
pub(crate) use bert::{is_encoder, pooling_of_gguf};
pub use end_of_text::end_of_text_tokens;
pub use file_type::GgufFileType;
pub use generation_config::generation_config_from_gguf;
pub(crate) use names::DENSE_OVER_EMBEDDINGS;
pub use save::GgufOptions;

use std::path::Path;

use overdrive_quantization::GgufFile;
use overdrive_sys::cuda::on_device;

use crate::{CausalLm, LoadOptions, ModelConfig, Result};

impl CausalLm {
    /// Reads a GGUF file of the architectures `llama` (including Mistral and Mixtral), `qwen2`, `qwen3`, `qwen2moe`,
    /// `qwen3moe`, `qwen3next`, `qwen35`, `qwen35moe`, `phi2`, `phi3`, `gemma`, `gemma2`, `gemma3`, `gemma3n`, `gemma4`,
    /// `smollm3`, `olmo2`, `granite`, `granitehybrid` (without Mamba layers), `glm4`, `gpt-oss`,
    /// `mistral3` (Ministral 3) and `deepseek2` (DeepSeek-V2 and V3), and the text of `qwen3vl` and `qwen3vlmoe`. For a model in several files (`NAME-00001-of-00003.gguf`), pass
    /// any of them.
    ///
    /// Quantized matrices (`Q8_0`, `Q4_0`, `Q4_K`, `Q6_K`, … see
    /// [`GgufFile`](overdrive_quantization::GgufFile)) keep their quantization; with
    /// [`LoadOptions::quantization`] they are dequantized and quantized again, one at a time. All other tensors
    /// are converted to [`LoadOptions::kind`]. By default, if all matrices of a file are F16, or all BF16, the model
    /// has this dtype, and its norms, which llama.cpp stores in fp32, are converted to it. Any other file is loaded
    /// in fp32.
    ///
    /// The configuration's `eos_token_id` has every token that ends a text or a turn in llama.cpp: those that
    /// the metadata names (`eos`, `eot`, `eom`), and those with a known text such as `<|im_end|>`.
    ///
    /// [`CausalLm::generation_config`] has those tokens and the sampling defaults of `general.sampling`. The
    /// tokenizer and the chat template are read by `ModelFiles` of overdrive-generation.
    ///
    /// # Errors
    /// [`Error::Unsupported`](crate::Error::Unsupported) for other architectures,
    /// [`Error::Common`](crate::Error::Common) for metadata that is missing or wrong,
    /// [`Error::Checkpoint`](crate::Error::Checkpoint) with every tensor that is missing, unexpected or of
    /// another shape, [`Error::Quantization`](crate::Error::Quantization) for a damaged file.
    pub fn from_gguf(path: impl AsRef<Path>, options: &LoadOptions) -> Result<CausalLm> {
        let file = GgufFile::open(path)?;
        ModelConfig::from_gguf(&file)?.check_causal()?;
        CausalLm::of_gguf(&file, options)
    }

    /// Reads a model whose attention may be bidirectional (EmbeddingGemma).
    pub(crate) fn of_gguf(file: &GgufFile, options: &LoadOptions) -> Result<CausalLm> {
        let config = ModelConfig::from_gguf(file)?;
        let parts = on_device(options.device, load::tensors(file, &config, options))?;
        let mut model = CausalLm::from_tensors(&config, parts)?;
        model.set_generation_config(generation_config_from_gguf(file)?);
        Ok(model)
    }
}
