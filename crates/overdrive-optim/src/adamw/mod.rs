//! AdamW with decoupled weight decay over parameter groups.

mod bucket;
mod config;
mod optimizer;
mod state;

pub use config::{AdamWConfig, Implementation};
pub use optimizer::AdamW;
