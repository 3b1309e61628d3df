//! Each kind of key/value cache.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod common;
mod files;
mod growing;
mod paged;
mod quantized;
mod sliding;
mod static_cache;
