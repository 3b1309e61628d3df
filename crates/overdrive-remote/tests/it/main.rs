//! Files on a local server that drops, delays, truncates and lies.
#![allow(
    clippy::unwrap_used,
    reason = "tests and their helpers fail by panicking"
)]

mod cache;
mod failures;
#[path = "../../../../on_python/mod.rs"]
mod on_python;
mod order;
mod records;
mod server;
mod stores;
