//! Language models for `tch`: decoders, encoders and encoder-decoder models, from and to Hugging Face checkpoints.
//!
//! [`CausalLm`] is a decoder with its language-model head. [`CausalLm::new`] makes a new model,
//! [`CausalLm::from_pretrained`] loads a Hugging Face folder, and [`CausalLm::save_pretrained`] writes a folder that
//! `transformers` loads.
//!
//! | `model_type` | models | features |
//! |---|---|---|
//! | `llama` | Llama 1 to 3, and models saved in its format | RMSNorm, rotary positions, grouped queries, SwiGLU; biases if `attention_bias` or `mlp_bias` is set |
//! | `mistral` | Mistral, Mistral Small 3 (text) | a sliding window in every layer, or in none |
//! | `ministral3` | Ministral 3 (text) | Mistral without windows, whose queries are multiplied by a factor that grows with their position |
//! | `mistral3` | the text model of multimodal Mistral Small 3.1 and Ministral 3 | as `mistral` or `ministral3`, and saved as that |
//! | `mixtral` | Mixtral | Mistral with a mixture of experts in every layer |
//! | `qwen2` | Qwen 1.5 to 2.5 | biases on query, key and value; windows from a layer on |
//! | `qwen3` | Qwen 3 | normalised queries and keys |
//! | `qwen2_moe` | Qwen 1.5 and 2 with experts (A2.7B, 57B-A14B) | Qwen2 with a mixture of experts, one of which computes every token behind a gate |
//! | `qwen3_moe` | Qwen 3 with experts (30B-A3B, 235B-A22B) | Qwen3 with a mixture of experts in some or all layers |
//! | `gpt_oss` | gpt-oss (20B, 120B) | a mixture of experts with bounded gates, a logit of each head that takes part in the softmax without a value, a window in every other layer; experts in MXFP4 stay packed |
//! | `deepseek_v2` | DeepSeek-V2, V2-Lite and V2.5 | multi-head latent attention, whose cache holds one vector a token; mixtures of experts with shared ones, chosen from groups of experts |
//! | `deepseek_v3` | DeepSeek-V3, R1, Moonlight | as DeepSeek-V2, with sigmoid scores, and corrections of them that choose the experts |
//! | `qwen3_next` | Qwen3-Next | most layers have states of fixed size in place of keys and values (the gated delta rule); attention with a gate; mixtures of experts with a shared one |
//! | `qwen3_5_text`, `qwen3_5_moe_text` | Qwen3.5 (text), dense and with experts | as Qwen3-Next, with other projections |
//! | `qwen3_5`, `qwen3_5_moe` | the text model of multimodal Qwen3.5 | saved as `qwen3_5_text` and `qwen3_5_moe_text` |
//! | `smollm3` | SmolLM3 | no rotary positions in every fourth layer, or in those that `no_rope_layers` lists |
//! | `olmo2` | OLMo 2 | norms after attention and the feed-forward block only; queries and keys normalised as a whole |
//! | `olmo3` | OLMo 3 | as OLMo 2, with a window in three of four layers, whose rotary positions are not scaled |
//! | `granite` | Granite 3 | factors of the embedding, the scores, the outputs of blocks and the logits |
//! | `granitemoehybrid` | Granite 4 without Mamba layers and experts | as Granite 3, with one layer for gate and up; with or without rotary positions |
//! | `glm4` | GLM-4 (0414) | norms before and after attention and the feed-forward block, one layer for gate and up, neighbouring channels of half a head rotated together |
//! | `phi` | Phi-1, 1.5 and 2 | attention and the feed-forward block in parallel, with one LayerNorm; biases, rotation of the first channels of a head |
//! | `phi3` | Phi-3, Phi-3.5, Phi-4, Phi-4-mini | one layer for query, key and value, and one for gate and up; LongRoPE |
//! | `gemma` | Gemma 1 | norms with the gain `1 + weight`, a scaled embedding |
//! | `gemma2` | Gemma 2 | norms with the gain `1 + weight` before and after attention and the feed-forward block, bounded scores and logits, a window in every other layer |
//! | `gemma3_text` | Gemma 3 (text) | as Gemma 2, with normalised queries and keys instead of the bounds, and rotary frequencies by layer type |
//! | `gemma3` | the text model of multimodal Gemma 3 | as `gemma3_text`, and saved as `gemma3_text` |
//! | `gemma3n_text` | Gemma 3n (text) | parallel residual streams (AltUp), a learned residual connection (LAuReL), an input of each layer beside the streams, sparse gates, blocks of several widths, last layers that share the keys and values of earlier ones |
//! | `gemma3n` | the text model of multimodal Gemma 3n | as `gemma3n_text`, and saved as `gemma3n_text` |
//! | `gemma4_text` | Gemma 4 (text), dense and with experts (26B-A4B) | as Gemma 3n, with one residual stream; heads of another size and number in layers without a window, whose keys may be values; with or without a mixture of experts beside the feed-forward block |
//! | `gemma4` | the text model of multimodal Gemma 4 | as `gemma4_text`, and saved as `gemma4_text` |
//! | `qwen3_vl` | Qwen3-VL, dense | a Qwen3 that sees images ([`CausalLm::encode_images`]): a vision tower, three rotary positions for each token |
//! | `qwen3_vl_moe` | Qwen3-VL with experts (30B-A3B, 235B-A22B) | as `qwen3_vl`, with a mixture of experts in some or all layers |
//! | `gpt2` | GPT-2 | learned positions, LayerNorm |
//!
//! [`MaskedLm`], [`SequenceClassifier`] and [`EncoderModel`] are bidirectional encoders ([`EncoderFamily`]):
//!
//! | `model_type` | models | features |
//! |---|---|---|
//! | `bert` | BERT, and models saved in its format | learned positions, token types, norms after each block |
//! | `roberta` | RoBERTa, and models saved in its format | positions that skip padding |
//! | `xlm-roberta` | XLM-RoBERTa, BGE-M3, multilingual E5 | as RoBERTa |
//! | `modernbert` | ModernBERT | rotary positions, a window in two of three layers, gated blocks, no biases |
//!
//! [`EmbeddingModel`] and [`Reranker`] give one vector or one score for each sequence, by an encoder or a causal model
//! (Qwen3-Embedding, Qwen3-Reranker) or a Gemma 3 with bidirectional attention (EmbeddingGemma); they read the folders of
//! sentence-transformers.
//!
//! [`Seq2SeqLm`] is an encoder-decoder model, read and written in the same way: T5, T5 v1.1 and Flan-T5 (`t5`) and BART
//! (`bart`), with cross-attention whose keys and values are computed once.
//!
//! Rotary positions are scaled by any [`RopeScaling`]: linear, dynamic, YaRN, LongRoPE, Llama 3, proportional. Dynamic
//! scaling and LongRoPE choose their frequencies by the largest position of a forward pass, as in
//! `transformers`: the sequences of a batch then affect one another, and keys in a cache keep the
//! frequencies with which they were written.
//!
//! Logits equal those of `transformers` within 1e-5 in fp32 (the largest difference measured is 7.1e-6) on
//! random checkpoints of each architecture and scaling, also at positions around 100,000; the fixtures and the
//! script that makes them are in `tests/`.
//!
//! ```
//! use overdrive_transformer::{CausalLm, InitOptions, LabelShift, LlamaConfig};
//! use tch::{Kind, Tensor};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let config = LlamaConfig {
//!     vocab_size: 100,
//!     hidden_size: 32,
//!     intermediate_size: 64,
//!     num_hidden_layers: 2,
//!     num_attention_heads: 4,
//!     ..LlamaConfig::default()
//! };
//! let model = CausalLm::new(&config.into(), &InitOptions { seed: 1, ..Default::default() })?;
//! model.set_requires_grad(true)?;
//!
//! let tokens = Tensor::f_from_slice(&[5i64, 9, 3, 7])?.f_view([1, 4])?;
//! let loss = model.loss(&tokens, &tokens, LabelShift::HuggingFace)?;
//! assert_eq!(loss.tokens()?, 3); // the last token has nothing to predict
//! loss.mean()?.f_backward()?;
//!
//! let dir = std::env::temp_dir().join(format!("overdrive-doc-{}", std::process::id()));
//! model.save_pretrained(&dir, &Default::default())?;
//! let again = CausalLm::from_pretrained(&dir, &Default::default())?;
//! assert_eq!(again.num_parameters(), model.num_parameters());
//! # std::fs::remove_dir_all(dir)?;
//! # Ok(())
//! # }
//! ```
//!
//! # Precision
//! Everything works under autocast (`overdrive-precision`): matmuls run in low precision, and normalisation,
//! rotation, softmax and the loss in fp32, as in PyTorch.
//!
//! # Speed
//! [`Execution`] selects among equivalent implementations; its defaults are the fastest ones in the benchmark
//! `execution_time`.
//!
//! # Sources
//! Touvron et al. 2023 (LLaMA, arXiv:2302.13971); Su et al. 2021 (rotary positions,
//! arXiv:2104.09864); Ainslie et al. 2023 (grouped queries, arXiv:2305.13245); Shazeer 2020 (SwiGLU,
//! arXiv:2002.05202); Radford et al. 2019 (GPT-2); Gemma Team 2024 and 2025 (arXiv:2403.08295, arXiv:2408.00118,
//! arXiv:2503.19786; Gemma 3n: Baykal et al. 2023, arXiv:2301.13310, and Menghani et al. 2024, arXiv:2411.07501);
//! Gunasekar et al. 2023 and Abdin et al. 2024 (Phi, arXiv:2306.11644 and 2404.14219); Jiang et
//! al. 2024 (Mixtral, arXiv:2401.04088); Yang et al. 2024 (Qwen2, arXiv:2407.10671); OLMo Team 2024 (OLMo 2,
//! arXiv:2501.00656); GLM Team 2024 (GLM-4, arXiv:2406.12793); Devlin et al. 2018 (BERT, arXiv:1810.04805); Liu et al. 2019 (RoBERTa,
//! arXiv:1907.11692); Warner et al. 2024 (ModernBERT, arXiv:2412.13663); Raffel et al. 2020 (T5, arXiv:1910.10683);
//! Lewis et al. 2020 (BART, arXiv:1910.13461); file formats and names: `transformers`.
#![deny(missing_docs)]

mod activation_names;
mod adapter_host;
mod attend;
mod attention;
mod block_groups;
mod causal_lm;
mod checkpoint;
mod config;
mod decode_step;
mod encoder;
mod error;
mod execution;
mod feed_forward;
mod gated_delta_net;
mod gguf;
mod gpt2;
mod init;
mod input;
mod latent_attention;
mod layer_norm;
mod llama;
mod loss;
mod mask;
mod model_parts;
mod moe;
mod norm;
mod parallel_block;
mod parameters;
mod per_layer;
mod pooling;
mod projections;
mod quantize;
mod rms_norm;
mod rope;
mod rounding;
mod seq2seq;
mod shared_kv;
mod sigmoid_gates;
mod vision;

pub use causal_lm::{CausalLm, InitOptions};
pub use checkpoint::{CheckpointProblems, LoadOptions, LoadProgress, Misshapen, SaveOptions};
pub use config::{
    AltUpConfig, BartConfig, DeltaNetConfig, ExpertsConfig, Gpt2Config, LayerType, LlamaConfig,
    LlamaFamily, LongRope, MlaConfig, ModelConfig, PerLayerConfig, RopeScaling, Seq2SeqConfig,
    T5Config, VisionConfig, Yarn,
};
pub use encoder::{
    BaseHead, ClassifierHead, Encoder, EncoderConfig, EncoderFamily, EncoderHead, EncoderInput,
    EncoderModel, HeadKind, LoadReport, MaskedLm, MaskedLmHead, ProblemType, SequenceClassifier,
};
pub use error::{Error, Result};
pub use execution::{AttentionImplementation, Execution};
pub use gguf::{
    GgufFileType, GgufOptions, end_of_text_tokens, generation_config_from_gguf, save_gguf_adapter,
};
pub use init::Init;
pub use input::{ForwardInput, Logits};
pub use loss::{IGNORE_INDEX, LabelShift, LossOutput, causal_lm_loss};
pub use overdrive_checkpointing::{CheckpointOptions, SavePolicy, Schedule};
pub use overdrive_fused::Activation;
pub use parameters::{ParameterRole, ParameterSpec};
pub use pooling::{EmbeddingModel, Pooling, PoolingMode, PoolingTask, Reranker, TokenSequence};
pub use quantize::QuantizeOptions;
pub use seq2seq::{CrossAttentionCache, DecoderInput, Encoded, Seq2SeqLm, Source};
pub use vision::{ImageFeatures, ImagePositions, ImageTokens};
