//! `cargo xtask matrix`: each crate as another project sees it, alone and with its own features only.
//!
//! A build of the workspace hides a feature that a crate forgot to ask for, because another crate asks for it.

use serde_json::Value;

use crate::cargo::{self, Cargo};
use crate::failure::{Failure, Result};

/// Features that no machine without CUDA's headers builds, and the one that builds no code.
const NOT_HERE: [&str; 3] = ["cuda", "nccl", "doc-only"];

/// Compiles the crate that works without libtorch without its features, for the checks of CI. All crates with each of their
/// features take many minutes.
pub(crate) fn without_libtorch() -> Result<()> {
    cargo::check_alone("overdrive-datasets", None).run()
}

/// Compiles each published crate of `chosen` (all if it is empty) without features and with each feature by itself.
pub(crate) fn matrix(chosen: &[String]) -> Result<()> {
    let metadata = cargo::own_metadata().output()?;
    let metadata: Value = serde_json::from_str(&metadata)
        .map_err(|error| Failure::new(format!("cargo metadata printed no JSON: {error}")))?;
    // `publish = false` is an empty list of registries.
    let packages = metadata["packages"].as_array().into_iter().flatten();
    let published = packages.filter(|package| package["publish"].is_null());
    let published: Vec<(&str, &Value)> = published
        .filter_map(|package| Some((package["name"].as_str()?, &package["features"])))
        .collect();
    let is_known = |name: &&String| published.iter().any(|(known, _)| known == name);
    if let Some(name) = chosen.iter().find(|name| !is_known(name)) {
        let known: Vec<&str> = published.iter().map(|(name, _)| *name).collect();
        let known = known.join(", ");
        return Err(Failure::new(format!(
            "there is no crate {name:?}; the crates are {known}"
        )));
    }
    let mut failed = Vec::new();
    for (name, features) in published {
        if !chosen.is_empty() && chosen.iter().all(|chosen| chosen != name) {
            continue;
        }
        let features = features.as_object().into_iter().flat_map(|map| map.keys());
        let features = features.filter(|name| !NOT_HERE.contains(&name.as_str()));
        for feature in std::iter::once(None).chain(features.map(|name| Some(name.as_str()))) {
            let cargo = cargo::check_alone(name, feature);
            if cargo.run().is_err() {
                failed.push(Cargo::line(&cargo));
            }
        }
    }
    match failed.len() {
        0 => Ok(()),
        count => Err(Failure::new(format!(
            "{count} commands failed:\n{}",
            failed.join("\n")
        ))),
    }
}
