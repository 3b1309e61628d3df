//! The table "default, + mixed precision, + flash attention, + checkpointing, + fused kernels, all".
//!
//! Each configuration is a run of the example trainer in its own process, so that its peak memory can be
//! measured, and all start from the same seed on the same data. Configurations alternate over several rounds,
//! so that a drift of the machine's speed affects all of them.

mod configuration;
mod picture;
mod run;
mod table;

pub use configuration::{CONFIGURATIONS, Configuration, Precisions, RowPrecision};
pub use picture::write_picture;
pub use run::{Measurement, Trainer};
pub use table::{Row, Table};
