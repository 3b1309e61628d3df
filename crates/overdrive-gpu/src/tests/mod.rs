//! Tests against the embedded files, and against a library that stands in for the CUDA driver.

mod choice;
mod decode;
mod delta_rule;
mod embedded;
mod launches;
mod stand_in;

use std::path::{Path, PathBuf};

/// Returns a file of the folder with the kernels.
fn source(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("kernels")
        .join(name)
}
