//! Low-rank adapters for tch in PEFT's file format.
#![deny(missing_docs)]

mod base;
mod error;
mod host;
mod linear;

pub use base::BaseWeight;
pub use error::{Error, Result};
pub use host::AdapterHost;
pub use linear::{AdaptedLinear, joint_forward};
