//! AdamW with decoupled weight decay over parameter groups.

// A variant of AdamW is a file of its own beside this folder, with a `Rule` (update_rule.rs): this one is over libtorch's
// fused operator.
mod bucket;
mod config;
mod optimizer;
mod state;

pub use config::{AdamWConfig, Implementation};
pub use optimizer::AdamW;
