//! `cargo xtask setup`: afterwards plain `cargo build`, `test`, `run` and `bench` work.

use std::ffi::OsString;
use std::path::PathBuf;
use std::sync::OnceLock;

use overdrive_build::Environment;

use crate::failure::{Failure, Result};
use crate::record::Record;
use crate::{cargo, torch};

#[cfg(all(test, target_os = "linux", target_env = "gnu"))]
mod fault_injection;
mod fetch;
mod found;
mod install;
mod manifest;
mod search;

pub(crate) use found::Found;

/// The build that the user requested.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Request {
    /// An existing libtorch, else the CPU build.
    Any,
    Cpu,
    Cuda,
}

/// Returns the `LIBTORCH` of `.cargo/libtorch.toml` at the start of this process. Cargo passes it on as a
/// variable, so it is not a choice of the user.
pub(crate) fn libtorch_at_start() -> Option<OsString> {
    static AT_START: OnceLock<Option<OsString>> = OnceLock::new();
    AT_START
        .get_or_init(|| Record::read(&cargo::workspace()).map(|r| r.libtorch.into_os_string()))
        .clone()
}

/// Returns the environment of the user, without the `LIBTORCH` of this project's own record.
pub(crate) fn users_environment() -> Environment {
    let environment = Environment::process();
    let own = libtorch_at_start();
    // Only an equal value is the record's: a different one was set by the user in this shell.
    if own.is_some() && environment.path("LIBTORCH").map(PathBuf::into_os_string) == own {
        return environment.without("LIBTORCH");
    }
    environment
}

/// Finds or fetches libtorch, and writes the record.
pub(crate) fn setup(wish: Request, force: bool) -> Result<Found> {
    let workspace = cargo::workspace();
    let environment = users_environment();
    let recorded = Record::read(&workspace);
    let release = torch::release()?;
    let mut found = match search::existing(&environment, release, recorded.as_ref(), wish, force)? {
        Some(found) => found,
        None => {
            let variant = search::variant(wish, recorded.as_ref());
            fetch::fetch(&environment, release, variant, force).map_err(Failure::in_cache)?
        }
    };
    if torch::other().is_some() {
        // The record is for plain cargo, which builds with the tch of Cargo.lock.
        torch::use_libtorch(&found.root);
        torch::prepare()?;
        return Ok(found);
    }
    found.recorded = found.record().write(&workspace)?;
    Ok(found)
}
