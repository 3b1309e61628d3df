//! An HTTP server with OpenAI's API over an [`EngineHandle`](overdrive_generation::EngineHandle).
//!
//! `/v1/models`, `/v1/completions`, `/v1/chat/completions`, `/v1/responses` and `/v1/embeddings` use the JSON of OpenAI's
//! API, with the additional sampling options of vLLM; `/tokenize`, `/detokenize` and `/tokenizer_info` are vLLM's;
//! `/health` and `/metrics` (Prometheus) are for the operator. All requests share the engine's batch and cache. A request
//! is cancelled when its client disconnects; a client that only closes its sending half gets its answer.
//!
//! [`Server::pooling`] serves an embedding model (`/v1/embeddings`) or a reranker (`/v1/rerank` as Jina and vLLM have it,
//! `/v1/score`) instead, a [`PoolingModel`].
//!
//! ```no_run
//! use std::sync::Arc;
//!
//! use overdrive_generation::{ChatTemplate, Engine, EngineConfig, EngineHandle, GenerationConfig, Tokenizer};
//! use overdrive_serve::{ServedModel, Server, ServerOptions};
//! use overdrive_transformer::CausalLm;
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
//! let folder = "models/SmolLM2-135M-Instruct";
//! let model = CausalLm::from_pretrained(folder, &Default::default())?;
//! let tokenizer = Arc::new(Tokenizer::from_file(format!("{folder}/tokenizer.json"))?);
//! let engine = Engine::new(model, EngineConfig::default())?.with_tokenizer(Arc::clone(&tokenizer));
//! let served = ServedModel::new("smollm2", tokenizer, GenerationConfig::from_dir(folder)?)
//!     .with_template(ChatTemplate::from_dir(folder)?);
//! let server = Server::new(EngineHandle::spawn(engine)?, served, ServerOptions::default())?;
//! // Until SIGTERM or SIGINT; requests that have begun are answered.
//! server.run(std::net::TcpListener::bind("127.0.0.1:8000")?)?;
//! # Ok(())
//! # }
//! ```
//!
//! [`Server::run_batch`] answers the requests of a file in OpenAI's batch format instead of a network's.
//!
//! Refused requests get OpenAI's error body, whose message names the field, its value and what is allowed.
#![forbid(unsafe_code)]
#![deny(missing_docs)]

mod answer;
mod answer_parser;
mod api_error;
mod batch;
mod chat;
mod completions;
mod connections;
mod embeddings;
mod error;
mod fields;
mod images;
mod job;
mod key;
mod logprobs;
mod messages;
mod metrics;
mod options;
mod peer;
mod pooler;
mod rerank;
mod responses;
mod routes;
mod sampling;
mod server;
mod shared;
mod text_format;
mod tokenization;
mod tools;

pub use batch::{BatchCounts, BatchRequest};
pub use error::{Error, Result};
pub use key::ApiKey;
pub use options::ServerOptions;
pub use pooler::PoolingModel;
pub use server::Server;
pub use shared::ServedModel;
