//! `cargo xtask semver`: whether the public interfaces can be released under the versions that the crates have.

use crate::cargo::{self, Cargo};
use crate::failure::{Failure, Result};
use crate::matrix;

/// Compares the public interface of `chosen` (all published crates if it is empty) with that of the revision `base`.
pub(crate) fn semver(base: &str, chosen: &[String]) -> Result<()> {
    is_installed()?;
    let crates = matrix::published(chosen)?;
    cargo::semver_checks(base, &crates).replace_this_process()
}

fn is_installed() -> Result<()> {
    if Cargo::has("semver-checks") {
        return Ok(());
    }
    Err(Failure::new("cargo-semver-checks is not installed")
        .remedy("cargo install --locked cargo-semver-checks"))
}
