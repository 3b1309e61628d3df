//! The trials of the example `tune`: short runs of the example `train`, each in its own process, so that its peak
//! memory is its own.

mod sizes;
mod trial;

pub use sizes::MemoryLimit;
pub use trial::Trials;
