//! Text generation with the options and semantics of transformers' `GenerationConfig`.
//!
//! [`generate`] continues a prompt or a batch of prompts, greedily, by sampling or by beam search, over
//! any cache of `overdrive-kv-cache`, with all cuts, penalties and biases of [`GenerationConfig`].
//! [`generate_with`] calls back with each token as it is generated, [`generate_text`] with each piece of
//! text; [`TextStream`] never splits a UTF-8 character, and [`StopFilter`] never shows a stop string.
//! [`generate_with_options`] takes options that a configuration file cannot hold: a tokenizer for stop
//! strings, a draft model for speculation, and a [`Constraint`] and a seed for each prompt.
//!
//! [`Engine`] serves many requests at once over one paged cache, with continuous batching; [`EngineHandle`] gives
//! other threads access to it. [`warm_up`] and [`Engine::warm_up`] load GPU libraries and kernels before the first
//! request. [`ChatTemplate`] renders conversations as transformers does, and [`chat_batch`] answers a list of
//! conversations.
//!
//! [`ModelFiles`] reads the tokenizer, chat template and generation settings of a model, from a Hugging Face folder or
//! from a GGUF file alone.
//!
//! Greedy output, processed scores and beams equal those of transformers on the fixtures in `tests/`;
//! speculation changes neither greedy tokens nor distributions.
//!
//! For regular expressions and JSON schemas as constraints, see `overdrive-constraints`.
//!
//! ```
//! use overdrive_generation::{GenerationConfig, generate};
//! use overdrive_transformer::{CausalLm, InitOptions, LlamaConfig};
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
//! let model = CausalLm::new(&config.into(), &InitOptions::default())?;
//! let config = GenerationConfig {
//!     max_new_tokens: Some(8),
//!     do_sample: true,
//!     temperature: 0.8,
//!     seed: Some(1), // the same seed gives the same tokens
//!     ..GenerationConfig::default()
//! };
//! let output = generate(&model, &[vec![1, 2, 3]], &config)?;
//! assert_eq!(output.sequences[0].len(), 3 + 8);
//! println!("{:.0} tokens/s", output.timings.decode_tokens_per_second());
//! # Ok(())
//! # }
//! ```
#![forbid(unsafe_code)]
#![deny(missing_docs)]

mod beams;
mod cache;
mod captured;
mod chat;
mod chat_template;
mod config;
mod constraint;
mod decoder;
mod device_sampling;
mod engine;
mod error;
mod finish_reason;
mod generate;
mod generation_model;
mod gguf;
mod host_copy;
mod images;
mod logprobs;
mod model_files;
mod optional_file;
mod output;
mod processors;
mod prompts;
mod reasoning;
mod row_scores;
mod row_text;
mod rows;
mod sampler;
mod speculation;
mod stop_strings;
mod text_stream;
mod token_mask;
mod vector_math;
mod warm_up;

pub use chat::{Answer, ChatBatchOptions, chat_batch, chat_batch_with, conversation_from_json};
pub use chat_template::{ChatTemplate, ChatTemplateOptions, Message};
pub use config::{
    CacheConfig, EarlyStopping, GenerationConfig, LogprobsMode, NumAssistantTokensSchedule,
};
pub use constraint::{ChoiceConstraint, Constraint};
pub use engine::{
    Completion, Engine, EngineConfig, EngineHandle, EngineModel, EngineStatistics, Event, Events,
    Latency, Outcome, PromptLogprobs, RaggedStep, Request, RequestId, StepAdapters, Ticket,
};
pub use error::{Error, Result};
pub use finish_reason::FinishReason;
pub use generate::{GenerateOptions, generate, generate_with, generate_with_options};
pub use generation_model::{GenerationModel, RowDecoder};
pub use gguf::{export_gguf, tokenizer_from_gguf};
pub use logprobs::TokenLogprobs;
pub use model_files::{ModelFiles, copy_chat_template};
pub use output::{GenerateOutput, GenerateTimings, GeneratedToken, SpeculationStatistics};
pub use overdrive_datasets::{ImagePatches, ImageProcessor};
pub use overdrive_kernels::{is_batch_invariant, set_batch_invariant};
pub use overdrive_kv_cache::CacheShape;
pub use reasoning::{AnswerText, ReasoningParser};
pub use sampler::{Choice, Sampler};
pub use stop_strings::{Filtered, StopFilter, certain_length};
pub use text_stream::{TextStream, generate_text};
pub use token_mask::TokenMask;
pub use tokenizers::Tokenizer;
pub use warm_up::warm_up;
