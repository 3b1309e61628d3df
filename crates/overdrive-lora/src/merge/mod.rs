//! Merging of adapters into the weights.

mod arithmetic;
mod layer;
mod model;
mod report;

pub(crate) use arithmetic::change;
pub(crate) use layer::{Merged, merge, unmerge};
pub use model::{merge_adapters, merge_and_unload, merge_obstacle, unload, unmerge_adapters};
pub use report::{MergeOptions, MergeReport, MergedLayer, Requantized};
