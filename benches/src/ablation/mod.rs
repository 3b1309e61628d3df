//! The table "default, + mixed precision, + flash attention, + checkpointing, + fused kernels, all".
//!
//! Each configuration is a run of the example trainer in a process of its own, so that its peak memory
//! is its own, and all start from the same seed on the same data. Configurations take turns over several
//! rounds: a machine whose speed drifts drifts for all of them.

mod configuration;
mod picture;
mod run;
mod table;

pub use configuration::{CONFIGURATIONS, Configuration, mixed_precision};
pub use picture::write_picture;
pub use run::{Measurement, Trainer};
pub use table::{Row, Table};
