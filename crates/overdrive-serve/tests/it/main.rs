//! Tests of the server behind a real socket, with a tiny random model.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod adapters;
mod answers;
mod batch;
mod cancellation;
mod chat;
mod client;
mod connections;
mod embeddings;
mod evaluation;
mod images;
mod limits;
mod lm_eval;
#[path = "../../../../on_python/mod.rs"]
mod on_python;
mod openai_client;
mod pooling;
mod reasoning;
mod responses;
mod routes;
mod shutdown;
mod soak;
mod support;
mod tokenization;
