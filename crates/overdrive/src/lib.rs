//! Faster training and serving with libtorch, from Rust.
//!
//! Overdrive is a set of small crates over [`tch`]. Each solves one problem and can be used alone; this one re-exports
//! them, each behind a feature of its name, except `overdrive-gpu`, `overdrive-kernels` and `overdrive-build`. Features
//! marked (off) are not on by default.
//!
//! | module | feature | what it does |
//! |---|---|---|
//! | [`precision`] | `precision` | autocast on any device, `GradScaler`, FP8 training, TF32, which precision to use |
//! | [`accumulation`] | `accumulation` | token-weighted micro-batches, batch plans, batch-size search |
//! | [`checkpointing`] | `checkpointing` | activation checkpointing: by block, by segment, by operator, offloaded |
//! | [`attention`] | `attention` | flash attention: masks, windows, sinks, ALiBi, packed sequences, decode |
//! | [`distributed`] | `distributed` | several processes: DistributedDataParallel over Gloo and NCCL, a launcher |
//! | [`fused`] | `fused` | norms, rotary positions, gates and the loss in one pass each |
//! | [`autograd`] | `autograd` | functions with a backward in Rust, hooks, gradients with all options |
//! | [`optim`] | `optim` | AdamW (fused, 8-bit, paged) and others, clipping, schedules, EMA, early stopping |
//! | [`nn`] | `nn` | the linear layer, dense or quantized, with a slot for adapters; embeddings |
//! | [`transformer`] | `transformer` | language models: decoders, encoders and encoder-decoder models from and to Hugging Face checkpoints |
//! | [`kv_cache`] | `kv-cache` | growing, static, sliding, quantized and paged key/value caches |
//! | [`quantization`] | `quantization` | INT8, INT4, NF4, FP4, FP8 weights and their matmuls; GGUF, GPTQ, AWQ |
//! | [`linear_attention`] | `linear-attention` | the gated delta rule of Qwen3-Next, and its short convolution |
//! | [`lora`] | `lora` | LoRA, DoRA and QLoRA adapters in PEFT's format |
//! | [`generation`] | `generation` | sampling, beams, speculation, constraints; continuous batching; chat |
//! | [`jinja`] | `jinja` | Jinja templates with Python's values: chat templates, as jinja2 renders them |
//! | [`hub`] | `hub` | models by name: the Hugging Face hub and its cache |
//! | [`onnx`] | `onnx` | models written as ONNX, with a key/value cache and quantized weights |
//! | [`constraints`] | `constraints` | regular expressions and JSON schemas as constraints of generated text |
//! | [`datasets`] | `datasets` | records of files of any size, loaders, samplers, packing, token stores |
//! | [`profiling`] | `profiling` | step breakdown, traces, MFU, the bottleneck of a step |
//! | [`tracking`] | `tracking`, `mlflow`, `wandb` | metrics as JSON Lines, TensorBoard events, on MLflow, for Weights & Biases; progress, reports |
//! | [`safetensors`] | `safetensors` | tensors in files: mapped reads, writes whole or not at all |
//! | [`pickle`] | `pickle` | weights that `torch.save` wrote, read without running anything |
//! | [`snapshot`] | `snapshot` | the state of a run in folders that appear whole or not at all |
//! | [`trainer`] | `trainer` | training arguments in Hugging Face's words, presets, run folders, a memory estimate |
//! | `packages` | `packages` (off) | packages of AOTInductor |
//! | `remote` | `remote` (off) | training data at https://, s3:// and gs://, read by range |
//! | `serve` | `serve` (off) | an HTTP server with OpenAI's API over the engine |
//! | `graphs` | `graphs`, `cuda` (off) | CUDA graphs of decoding and training steps |
//! | [`datasets`] with | `image`, `parquet`, `speech` (off) | images with captions and images in prompts, Parquet and Arrow files, speech |
//! | [`distributed`] with | `nccl` (off) | groups over NCCL: needs the CUDA build of libtorch and NCCL's headers |
//! | – | `doc-only` (off) | the documentation is built without libtorch; nothing can be linked |
//! | [`core`] | always | the errors, checks and random numbers that all crates share |
//! | [`sys`] | always | operators by name, memory statistics, what tch does not bind |
//!
//! ```
//! use overdrive::prelude::*;
//! use overdrive::transformer::{CausalLm, InitOptions, LabelShift, LlamaConfig};
//! use tch::{Device, Kind, Tensor};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let config = LlamaConfig { vocab_size: 64, hidden_size: 32, intermediate_size: 64,
//!     num_hidden_layers: 1, num_attention_heads: 2, ..LlamaConfig::default() };
//! let model = CausalLm::new(&config.into(), &InitOptions::default())?;
//! model.set_requires_grad(true)?;
//! let groups = decay_groups(model.named_parameters(), 0.1);
//! let mut optimizer = AdamW::new(groups, AdamWConfig::default())?;
//!
//! let tokens = Tensor::f_randint(64, [2, 16], (Kind::Int64, Device::Cpu))?;
//! let loss = model.loss(&tokens, &tokens, LabelShift::HuggingFace)?.mean()?;
//! loss.f_backward()?;
//! clip_grad_norm(&optimizer.parameters(), 1.0, ClipOptions::default())?;
//! optimizer.step()?;
//! optimizer.zero_grad()?;
//! # Ok(())
//! # }
//! ```
//!
//! A binary finds libtorch when it starts if its package has this `build.rs`, with `overdrive-build` among its
//! `[build-dependencies]`:
//!
//! ```text
//! fn main() {
//!     overdrive_build::link();
//! }
//! ```
#![forbid(unsafe_code)]
#![deny(missing_docs)]

pub mod prelude;

pub use overdrive_core as core;
pub use overdrive_sys as sys;

#[cfg(feature = "accumulation")]
pub use overdrive_accumulation as accumulation;
#[cfg(feature = "attention")]
pub use overdrive_attention as attention;
#[cfg(feature = "autograd")]
pub use overdrive_autograd as autograd;
#[cfg(feature = "checkpointing")]
pub use overdrive_checkpointing as checkpointing;
#[cfg(feature = "constraints")]
pub use overdrive_constraints as constraints;
#[cfg(feature = "datasets")]
pub use overdrive_datasets as datasets;
#[cfg(feature = "distributed")]
pub use overdrive_distributed as distributed;
#[cfg(feature = "fused")]
pub use overdrive_fused as fused;
#[cfg(feature = "generation")]
pub use overdrive_generation as generation;
#[cfg(feature = "graphs")]
pub use overdrive_graphs as graphs;
#[cfg(feature = "hub")]
pub use overdrive_hub as hub;
#[cfg(feature = "jinja")]
pub use overdrive_jinja as jinja;
#[cfg(feature = "kv-cache")]
pub use overdrive_kv_cache as kv_cache;
#[cfg(feature = "linear-attention")]
pub use overdrive_linear_attention as linear_attention;
#[cfg(feature = "lora")]
pub use overdrive_lora as lora;
#[cfg(feature = "nn")]
pub use overdrive_nn as nn;
#[cfg(feature = "onnx")]
pub use overdrive_onnx as onnx;
#[cfg(feature = "optim")]
pub use overdrive_optim as optim;
#[cfg(feature = "packages")]
pub use overdrive_packages as packages;
#[cfg(feature = "pickle")]
pub use overdrive_pickle as pickle;
#[cfg(feature = "precision")]
pub use overdrive_precision as precision;
#[cfg(feature = "profiling")]
pub use overdrive_profiling as profiling;
#[cfg(feature = "quantization")]
pub use overdrive_quantization as quantization;
#[cfg(feature = "remote")]
pub use overdrive_remote as remote;
#[cfg(feature = "safetensors")]
pub use overdrive_safetensors as safetensors;
#[cfg(feature = "serve")]
pub use overdrive_serve as serve;
#[cfg(feature = "snapshot")]
pub use overdrive_snapshot as snapshot;
#[cfg(feature = "tracking")]
pub use overdrive_tracking as tracking;
#[cfg(feature = "trainer")]
pub use overdrive_trainer as trainer;
#[cfg(feature = "transformer")]
pub use overdrive_transformer as transformer;
