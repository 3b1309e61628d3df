//! Text generation with the words and the semantics of transformers' `GenerationConfig`.
//!
//! [`generate`] continues one prompt or a batch of them over a growing key/value cache: greedy, or
//! sampling with temperature, top-k, top-p, min-p and a repetition penalty. [`generate_with`] hands out
//! each token as it comes, [`generate_text`] each piece of text; [`TextStream`] sees to it that no UTF-8
//! character is split. Greedy output equals that of transformers token for token on the fixtures in `tests/`.
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

mod config;
mod error;
mod generate;
mod processors;
mod prompts;
mod random;
mod sampler;
mod text_stream;

pub use config::GenerationConfig;
pub use error::{Error, Result};
pub use generate::{
    FinishReason, GenerateOutput, GenerateTimings, GeneratedToken, generate, generate_with,
};
pub use sampler::Sampler;
pub use text_stream::{TextStream, generate_text};
pub use tokenizers::Tokenizer;
