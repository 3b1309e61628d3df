//! Writes language models of `overdrive-transformer` as ONNX, for runtimes without libtorch.
//!
//! [`export`] writes any [`CausalLm`](overdrive_transformer::CausalLm) as a graph of ONNX operators for any batch size
//! and length. The key/value cache is among its inputs and outputs, which have the names of Hugging Face's exporter.
//! [`export_pretrained`] also writes the configuration that `optimum` reads.
//!
//! ```
//! use overdrive_onnx::{ExportOptions, export};
//! use overdrive_transformer::{CausalLm, InitOptions, LlamaConfig, QuantizeOptions};
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
//! let mut model = CausalLm::new(&config.into(), &InitOptions::default())?;
//! model.quantize(&QuantizeOptions::new("int4-g32".parse()?))?;
//!
//! let path = std::env::temp_dir().join(format!("overdrive-doc-{}.onnx", std::process::id()));
//! let report = export(&mut model, &path, &ExportOptions::default())?;
//! assert_eq!(report.inputs[3].name, "past_key_values.0.key");
//! assert_eq!(report.domains, ["com.microsoft"]); // MatMulNBits
//! # std::fs::remove_file(path)?;
//! # Ok(())
//! # }
//! ```
//!
//! # Supported models
//! Llama, Mistral, Qwen 2 and 3, Gemma 1 to 3, SmolLM3 and GPT-2 can be exported, with every RoPE scaling of
//! `overdrive-transformer`. Weights of any dtype become fp32 or fp16 ([`Precision`]); quantized weights stay quantized, in the layout of the operator that multiplies them:
//!
//! | scheme | operators | in ONNX itself |
//! |---|---|---|
//! | `int8` | activations quantized by token, `MatMulInteger` | yes |
//! | `int8-weight`, `llm-int8` | `DequantizeLinear`, `MatMul` | yes |
//! | `int4-…`, `int8-g…` | `MatMulNBits` | ONNX Runtime |
//! | `nf4`, `fp4` | `MatMulBnb4` | ONNX Runtime |
//! | `fp8` | `DequantizeLinear` of `float8e4m3fn`, `MatMul` | yes, opset 19 |
//!
//! Merge adapters first (`overdrive_lora::merge_and_unload`): a graph cannot hold them.
//!
//! # How it is tested
//! `onnx.checker` accepts each graph. ONNX Runtime's logits equal this workspace's within 1e-4 in fp32 for each
//! architecture, at opsets 18 to 26, with padding on either side and with the cache; greedy continuations are
//! identical. `cargo test -p overdrive-onnx -- --ignored on_python` runs these checks with a Python that has `onnx` and
//! `onnxruntime`.
//!
//! # Sources
//! The format and its operators: <https://onnx.ai/onnx/>; ONNX Runtime's own:
//! <https://github.com/microsoft/onnxruntime/blob/main/docs/ContribOperators.md>; names of inputs and
//! outputs: <https://huggingface.co/docs/optimum>.
#![forbid(unsafe_code)]
#![deny(missing_docs)]

mod attention;
mod embedding;
mod error;
mod export;
mod gpt2;
mod graph;
mod initializer;
mod layers;
mod linear;
mod llama;
// `Source::of` refuses adapters; linear.rs would write their products.
mod model_weights;
mod options;
#[doc(hidden)]
pub mod proto;
mod quantized_layouts;
mod report;
mod rope;
mod write;

pub use error::{Error, Result};
pub use export::{export, export_pretrained};
pub use options::{Activations, Attention, ExportOptions, ExternalData, LogitsFor, Precision};
pub use report::{ExportReport, ValueReport};
