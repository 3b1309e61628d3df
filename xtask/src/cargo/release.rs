//! The commands of a release: programs in a folder, and the licences of what they are linked with.

use std::ffi::OsString;
use std::path::Path;

use super::Cargo;
use crate::torch;

/// Builds every example; the output is Cargo's messages about the artifacts.
pub(crate) fn examples(features: Option<&str>) -> Cargo {
    Cargo::new([
        "build",
        "--release",
        "-p",
        "overdrive-examples",
        "--examples",
        // Errors are still rendered for people; the messages name the built files.
        "--message-format=json-render-diagnostics",
    ])
    .features(features)
}

/// Returns the packages that the examples depend on for the system `host`.
pub(crate) fn metadata(host: &str, features: Option<&str>) -> Cargo {
    let examples = torch::workspace().join("examples/Cargo.toml");
    Cargo::new([
        "metadata",
        "--format-version=1",
        // Without it, metadata also lists the dependencies for other systems.
        "--filter-platform",
        host,
        "--manifest-path",
    ])
    .and(&[examples.into_os_string()])
    .features(features)
}

/// Lists the packages that the examples are linked with for the system `host`, one a line: their dependencies with the
/// features that a build of the examples alone turns on, without those for build scripts and procedural macros.
pub(crate) fn tree(host: &str, features: Option<&str>) -> Cargo {
    Cargo::new([
        "tree",
        "-p",
        "overdrive-examples",
        // The examples are also linked with the dev-dependencies of their package.
        "--edges",
        "normal,dev,no-proc-macro",
        "--prefix",
        "none",
        "--format",
        "{p}",
        "--target",
        host,
    ])
    .features(features)
}

/// Lists the packages of the workspace.
pub(crate) fn own_metadata() -> Cargo {
    Cargo::new(["metadata", "--format-version=1", "--no-deps"])
}

/// Writes `tch` and its `torch-sys` of this version into the lock file beside `manifest`.
pub(crate) fn choose_tch(manifest: &Path, version: &str) -> Cargo {
    Cargo::new(["update", "tch", "--precise", version, "--manifest-path"]).and(&[manifest.into()])
}

/// Returns the command that checks the dependencies: advisories, licences, sources, bans, as `deny.toml` says.
pub(crate) fn deny(further: &[OsString]) -> Cargo {
    Cargo::new(["deny", "--all-features", "check"]).and(further)
}
