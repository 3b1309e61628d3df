//! Work that was prepared: packages that AOTInductor compiled, and CUDA graphs that were captured.
//!
//! These are handles with errors for exceptions. What makes them safe to use with any file and any
//! tensor (the look at a package before its code is loaded, the check of inputs and constants) is in
//! [overdrive-compiled].
//!
//! [overdrive-compiled]: ../../overdrive_compiled/index.html

mod ffi;
mod graph;
mod package;

pub use graph::{CaptureError, Graph, graph_functions};
pub use package::{Constant, Package, PackageOptions};
