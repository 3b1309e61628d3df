//! For build scripts: finds the libtorch that `torch-sys` found, sets the run path, links CUDA
//! where it is.
//!
//! A program that uses `tch` builds, and then often does not start: the loader "cannot open
//! `libtorch_cpu.so`", because nothing wrote down where libtorch is. Or it starts and says that
//! there is no CUDA, because the linker dropped `libtorch_cuda.so`, which no symbol asked for.
//! Both are settled when the binary is linked, so both are settled here, by one line in the build
//! script of the package that holds the binary, test, example or benchmark:
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
//! A build script that compiles C++ of its own against libtorch asks [`libtorch`] for the folders:
//!
//! ```no_run
//! // no_run: it needs a libtorch and the environment of a build script.
//! # fn main() -> overdrive_build::Result<()> {
//! let torch = overdrive_build::libtorch()?;
//! for include in &torch.include_dirs {
//!     println!("-I{}", include.display());
//! }
//! # Ok(())
//! # }
//! ```
//!
//! # Where libtorch is looked for
//!
//! In the order of `torch-sys`, because two answers in one binary are two copies of libtorch:
//!
//! 1. `DEP_TCH_LIBTORCH_LIB`, which Cargo sets for packages that depend on `torch-sys` themselves;
//! 2. `LIBTORCH_USE_PYTORCH`: the PyTorch of `python` (in a virtual environment) or `python3`;
//! 3. `LIBTORCH`, with `LIBTORCH_LIB` and `LIBTORCH_INCLUDE` for split installations;
//! 4. `/usr/lib/libtorch.so` on Linux;
//! 5. what `torch-sys` downloaded into the target folder (its feature `download-libtorch`);
//! 6. Overdrive's cache, which `cargo xtask setup` fills.
//!
//! The crate uses nothing but the standard library: every user builds it before anything else.

#![forbid(unsafe_code)]
#![deny(missing_docs)]
// The example is a build script as it stands in its file.
#![allow(clippy::needless_doctest_main)]

pub mod cache;
pub mod cpu;
mod environment;
mod error;
mod libtorch;
mod link;
mod locate;
mod python;

pub use environment::Environment;
pub use error::{Error, Result};
pub use libtorch::{Libtorch, Source, TORCH_VERSION};
pub use link::{link, link_directives};
pub use locate::{libtorch, locate};
pub use python::interpreter as python_interpreter;
