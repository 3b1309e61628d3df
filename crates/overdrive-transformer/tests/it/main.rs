//! Models: against transformers, loading formats, adapters, caches.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod adapters_peft;
mod autocast;
mod batches;
mod checkpoint;
mod common;
mod decode_step;
mod decoder_families;
mod deepseek;
mod embeddings;
mod encoders;
mod experts;
mod fp8;
mod gemma;
mod gguf;
mod gguf_end_of_text;
mod gpt_oss;
mod hybrids;
mod long_positions;
mod model;
#[path = "../../../../on_python/mod.rs"]
mod on_python;
mod packed_sequences;
mod paged;
mod parity;
mod pickled;
mod position_bound;
mod published;
mod quantized;
mod quantized_checkpoints;
mod seq2seq;
mod unused_tensors;
mod vision;
