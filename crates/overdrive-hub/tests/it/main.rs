//! Tests against a local server that speaks the hub's protocol, well and badly.
#![allow(missing_docs, reason = "these are tests")]

mod broken_answers;
mod cache;
mod names;
mod python;
mod server;
