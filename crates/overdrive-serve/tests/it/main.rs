//! Tests of the server behind a real socket, with a tiny random model.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod adapters;
mod answers;
mod cancellation;
mod chat;
mod client;
mod connections;
mod embeddings;
mod limits;
mod openai_client;
mod routes;
mod shutdown;
mod soak;
mod support;
