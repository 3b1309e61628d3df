//! `cargo xtask matrix` and `cargo xtask package`: each crate as another project sees it, alone and with its own
//! features only.
//!
//! A build of the workspace hides a feature that a crate forgot to ask for, because another crate asks for it.

use serde_json::Value;

use crate::cargo::{self, Cargo};
use crate::failure::{Failure, Result};

/// Features that no machine without CUDA's headers builds, and the one that builds no code.
const NOT_HERE: [&str; 3] = ["cuda", "nccl", "doc-only"];

/// The crates of which the checks of CI build all combinations: the one that works without libtorch, and the
/// facade.
pub(crate) const CHECKED: [&str; 2] = ["overdrive-datasets", "overdrive"];

/// A crate and the features that are built one by one.
struct Package {
    name: String,
    features: Vec<String>,
}

/// Compiles each of `chosen` (all crates if it is empty) without features and with each feature by itself; with
/// `tests`, runs its tests alone, too.
pub(crate) fn matrix(chosen: &[String], tests: bool) -> Result<()> {
    let packages = packages()?;
    for name in chosen {
        if !packages.iter().any(|package| package.name == *name) {
            let known: Vec<&str> = packages.iter().map(|package| &*package.name).collect();
            let known = known.join(", ");
            return Err(Failure::new(format!(
                "there is no crate {name:?}; the crates are {known}"
            )));
        }
    }
    let mut failed = Vec::new();
    for package in packages {
        if !chosen.is_empty() && !chosen.contains(&package.name) {
            continue;
        }
        let alone = std::iter::once(None).chain(package.features.iter().map(|f| Some(f.as_str())));
        let mut commands: Vec<Cargo> = alone
            .map(|feature| cargo::check_alone(&package.name, feature))
            .collect();
        if tests {
            commands.push(cargo::test_alone(&package.name));
        }
        let wrong = commands.iter().filter(|cargo| cargo.run().is_err());
        failed.extend(wrong.map(Cargo::line));
    }
    match failed.is_empty() {
        true => Ok(()),
        false => Err(Failure::new(format!(
            "{} commands failed:\n{}",
            failed.len(),
            failed.join("\n")
        ))),
    }
}

/// Returns the crates that are published.
fn packages() -> Result<Vec<Package>> {
    let metadata = cargo::own_metadata().output()?;
    let metadata: Value = serde_json::from_str(&metadata)
        .map_err(|error| Failure::new(format!("cargo metadata wrote no JSON: {error}")))?;
    let packages = metadata["packages"].as_array();
    let published = packages
        .into_iter()
        .flatten()
        // `publish = false` is an empty list of registries.
        .filter(|package| package["publish"].is_null());
    let mut found: Vec<Package> = published
        .map(|package| Package {
            name: package["name"].as_str().unwrap_or_default().to_owned(),
            features: features(&package["features"]),
        })
        .collect();
    found.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(found)
}

fn features(map: &Value) -> Vec<String> {
    let names = map.as_object().into_iter().flat_map(|map| map.keys());
    names
        .filter(|name| !NOT_HERE.contains(&name.as_str()))
        .cloned()
        .collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn features_that_need_cuda_or_build_nothing_are_left_out() {
        let map = json!({"default": ["a"], "a": [], "nccl": [], "cuda": [], "doc-only": []});
        assert_eq!(features(&map), ["default", "a"]);
    }
}
