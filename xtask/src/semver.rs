//! `cargo xtask semver`: whether the public interfaces can be released under the versions that the crates have.

use std::process::{Command, Stdio};

use crate::cargo::{self, Cargo};
use crate::failure::{Failure, Result};
use crate::matrix;

/// Compares the public interface of `chosen` (all published crates if it is empty) with that of the revision `base`.
/// A crate that is newer than `base` has nothing to be compared with and is named.
pub(crate) fn semver(base: &str, chosen: &[String]) -> Result<()> {
    is_installed()?;
    if !exists(&format!("{base}^{{commit}}"))? {
        return Err(
            Failure::new(format!("there is no revision {base:?} in this repository"))
                .remedy("Name a commit or a tag, such as that of the last release."),
        );
    }
    let (mut old, mut new) = (Vec::new(), Vec::new());
    for name in matrix::published(chosen)? {
        // The folder of a crate is named like the crate.
        match exists(&format!("{base}:crates/{name}/Cargo.toml"))? {
            true => old.push(name),
            false => new.push(name),
        }
    }
    if !new.is_empty() {
        eprintln!(
            "not compared, because {base} does not have them: {}",
            new.join(", ")
        );
    }
    if old.is_empty() {
        return Err(Failure::new(format!("{base} has none of these crates")));
    }
    cargo::semver_checks(base, &old).replace_this_process()
}

/// Returns `true` if the repository has the git object `name`.
fn exists(name: &str) -> Result<bool> {
    let status = Command::new("git")
        .args(["cat-file", "-e", name])
        .current_dir(cargo::workspace())
        .stderr(Stdio::null())
        .status();
    let status = status.map_err(|error| Failure::new(format!("could not start git: {error}")))?;
    Ok(status.success())
}

fn is_installed() -> Result<()> {
    if Cargo::has("semver-checks") {
        return Ok(());
    }
    Err(Failure::new("cargo-semver-checks is not installed")
        .remedy("cargo install --locked cargo-semver-checks"))
}
