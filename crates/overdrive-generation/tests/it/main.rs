//! Tests of generation: against transformers, options, caches, constraints, speculation.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod beams;
mod caches;
mod chat_template;
mod constraints;
mod cuda;
mod folder_settings;
mod generate;
mod gguf_export;
mod gguf_files;
mod gguf_settings;
mod gguf_tokenizers;
#[path = "../../../../on_python/mod.rs"]
mod on_python;
mod options;
mod quantized_cache;
mod seq2seq;
mod speculation;
mod support;
mod text_stream;
mod vision;
mod warm_up;
