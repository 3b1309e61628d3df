//! The Rust code of the guide, compiled and run: each page of `docs/src` is the documentation of a module here, and
//! so each ```` ```rust ```` block in it a doctest. `cargo test -p overdrive-guide` runs them.
//!
//! A page shows no line that is there for the test only. Such lines are in HTML comments, which neither the book
//! nor a viewer of Markdown shows:
//!
//! ````text
//! <!-- test
//! let weight = Tensor::ones([2, 3], (Kind::Float, Device::Cpu));
//! -->
//! ```rust
//! let norm = weight.norm();
//! ```
//! <!-- test
//! assert!(norm.double_value(&[]) > 2.4);
//! -->
//! ````
//!
//! The build script puts those directly before a block at its start and those directly after it at its end. A block
//! without a `main` gets one that returns a `Result`, so that `?` works.
#![forbid(unsafe_code)]

#[cfg(doctest)]
include!(concat!(env!("OUT_DIR"), "/pages.rs"));
