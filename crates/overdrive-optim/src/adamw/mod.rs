//! AdamW with decoupled weight decay over parameter groups.

mod bucket;
mod config;
mod optimizer;
mod state;

pub(crate) use config::check_learning_rate;
pub use config::{AdamWConfig, Implementation};
pub use optimizer::AdamW;
