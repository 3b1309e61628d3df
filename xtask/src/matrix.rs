//! `cargo xtask matrix` and `cargo xtask package`: each crate as another project sees it, alone and with its own
//! features only.
//!
//! A build of the workspace hides a feature that a crate forgot to ask for, because another crate asks for it.

use serde_json::Value;

use crate::cargo::{self, Cargo};
use crate::failure::{Failure, Result};

/// Features that no machine without CUDA's headers builds, and the one that builds no code.
const NOT_HERE: [&str; 3] = ["cuda", "nccl", "doc-only"];

/// The crates of which the checks of CI build all combinations: the one that works without libtorch. The facade, whose
/// features are one for each crate, takes four minutes more.
pub(crate) const CHECKED: [&str; 1] = ["overdrive-datasets"];

/// A crate and the features that are built one by one.
struct Package {
    name: String,
    features: Vec<String>,
    /// The crates of this workspace that it depends on, except for tests.
    dependencies: Vec<String>,
}

/// Compiles each of `chosen` (all crates if it is empty) without features and with each feature by itself; with
/// `tests`, runs its tests alone, too.
pub(crate) fn matrix(chosen: &[String], tests: bool) -> Result<()> {
    let mut failed = Vec::new();
    for package in selected(chosen)? {
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

/// Returns the names of the published crates among `chosen`; all of them if it is empty.
pub(crate) fn published(chosen: &[String]) -> Result<Vec<String>> {
    Ok(selected(chosen)?
        .into_iter()
        .map(|package| package.name)
        .collect())
}

/// Returns `chosen` and all crates of this workspace that they depend on.
pub(crate) fn with_dependencies(chosen: &[String]) -> Result<Vec<String>> {
    let packages = packages()?;
    let mut found = published(chosen)?;
    let mut next = 0;
    while let Some(name) = found.get(next).cloned() {
        let package = packages.iter().find(|package| package.name == name);
        for dependency in package.into_iter().flat_map(|p| &p.dependencies) {
            if !found.contains(dependency) {
                found.push(dependency.clone());
            }
        }
        next += 1;
    }
    Ok(found)
}

fn selected(chosen: &[String]) -> Result<Vec<Package>> {
    let mut packages = packages()?;
    for name in chosen {
        if !packages.iter().any(|package| package.name == *name) {
            let known: Vec<&str> = packages.iter().map(|package| &*package.name).collect();
            let known = known.join(", ");
            return Err(Failure::new(format!(
                "there is no crate {name:?}; the crates are {known}"
            )));
        }
    }
    packages.retain(|package| chosen.is_empty() || chosen.contains(&package.name));
    Ok(packages)
}

/// Returns the crates that are published.
fn packages() -> Result<Vec<Package>> {
    let metadata = cargo::own_metadata().output()?;
    let metadata: Value = serde_json::from_str(&metadata)
        .map_err(|error| Failure::new(format!("cargo metadata printed no JSON: {error}")))?;
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
            dependencies: dependencies(&package["dependencies"]),
        })
        .collect();
    found.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(found)
}

fn dependencies(list: &Value) -> Vec<String> {
    let all = list.as_array().into_iter().flatten();
    all.filter(|dependency| !dependency["path"].is_null() && dependency["kind"] != "dev")
        .filter_map(|dependency| Some(dependency["name"].as_str()?.to_owned()))
        .collect()
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
    fn a_crate_brings_along_what_it_depends_on() {
        let list = json!([
            {"name": "serde", "kind": null},
            {"name": "overdrive-core", "kind": null, "path": "/w/core"},
            {"name": "overdrive-build", "kind": "build", "path": "/w/build"},
            {"name": "overdrive-nn", "kind": "dev", "path": "/w/nn"},
        ]);
        assert_eq!(dependencies(&list), ["overdrive-core", "overdrive-build"]);
    }

    #[test]
    fn features_that_need_cuda_or_build_nothing_are_left_out() {
        let map = json!({"default": ["a"], "a": [], "nccl": [], "cuda": [], "doc-only": []});
        assert_eq!(features(&map), ["default", "a"]);
    }
}
