//! Packages that AOTInductor compiled, and captured CUDA graphs.
//!
//! These are plain handles whose calls return errors instead of throwing. [overdrive-packages] adds the
//! checks that make them safe with any file and any tensor: it inspects a package before its code is
//! loaded, and checks inputs and constants. [overdrive-graphs] captures steps of decoding and training.
//!
//! [overdrive-packages]: ../../overdrive_packages/index.html
//! [overdrive-graphs]: ../../overdrive_graphs/index.html

mod ffi;
mod graph;
mod package;

pub use graph::{CaptureError, Graph, graph_functions};
pub use package::{Constant, Package, PackageOptions};
