//! The trials of the example `tune`: short runs of the example `train`, each in a separate process, so that its peak
//! memory can be measured.

mod sizes;
mod trial;

pub use sizes::MemoryLimit;
pub use trial::Trials;
