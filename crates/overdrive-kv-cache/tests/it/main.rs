//! Each kind of key/value cache.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod dynamic_cache;
mod paged;
mod quantized;
mod recurrent;
mod reference;
mod saved_files;
mod shared_keys;
mod sliding;
mod static_cache;
