//! For build scripts: finds the libtorch that `torch-sys` uses, sets the run path, and links CUDA if
//! libtorch has it.
//!
//! Without it a program that uses `tch` compiles, but often does not start, because the loader "cannot open
//! `libtorch_cpu.so`": the path of libtorch is not recorded in the binary. Or it starts without CUDA, because the
//! linker dropped `libtorch_cuda.so`, none of whose symbols is referenced. Both are settings of the linker. One line
//! in the build script of the package with the binary, test, example or benchmark sets them:
//!
//! ```toml
//! [build-dependencies]
//! overdrive-build = { path = "…/crates/overdrive-build" }
//! ```
//!
//! ```
//! // build.rs
//! fn main() {
//!     overdrive_build::link();
//! }
//! ```
//!
//! A build script that compiles its own C++ code against libtorch gets the folders from [`libtorch`]:
//!
//! ```no_run
//! // no_run: needs a libtorch and the environment of a build script.
//! # fn main() -> overdrive_build::Result<()> {
//! let torch = overdrive_build::libtorch()?;
//! for include in &torch.include_dirs {
//!     println!("-I{}", include.display());
//! }
//! # Ok(())
//! # }
//! ```
//!
//! # Search order
//!
//! The order is that of `torch-sys`, because two different results would load two copies of libtorch:
//!
//! 1. `DEP_TCH_LIBTORCH_LIB`, which Cargo sets for direct dependents of `torch-sys`;
//! 2. `LIBTORCH_USE_PYTORCH`: the PyTorch of `python` (in a virtual environment) or `python3`;
//! 3. `LIBTORCH`, with `LIBTORCH_LIB` and `LIBTORCH_INCLUDE` for split installations;
//! 4. `/usr/lib/libtorch.so` on Linux;
//! 5. the download of `torch-sys` in the target folder (its feature `download-libtorch`);
//! 6. Overdrive's cache, which `cargo xtask setup` fills.
//!
//! # Versions
//!
//! [`Release`] lists the versions of libtorch that Overdrive works with. `torch-sys` accepts exactly one, so the
//! version of `tch` in a project's `Cargo.lock` decides which; `cargo update -p tch --precise 0.26.0` chooses another.
//!
//! The crate has no dependencies: every user builds it before anything else.

#![forbid(unsafe_code)]
#![deny(missing_docs)]
// The example is a complete build script, with its `main`.
#![allow(clippy::needless_doctest_main)]

pub mod cache;
pub mod cpu;
mod environment;
mod error;
mod libtorch;
mod libtorch_release;
mod link;
mod locate;
mod matmul_speed;
pub mod measured;
mod python;

pub use environment::Environment;
pub use error::{Error, Result};
pub use libtorch::{Libtorch, Source};
pub use libtorch_release::Release;
pub use link::{link, run_path};
pub use locate::{libtorch, locate};
pub use matmul_speed::MatmulSpeed;
pub use python::interpreter as python_interpreter;
