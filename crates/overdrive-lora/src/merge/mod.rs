//! Adapters as a part of the weights.

mod arithmetic;
mod host;
mod map;
mod report;

pub(crate) use arithmetic::change;
pub use host::{merge_adapters, merge_and_unload, unload, unmerge_adapters};
pub(crate) use map::Merged;
pub use report::{MergeOptions, MergeReport, MergedMap, Requantized};
