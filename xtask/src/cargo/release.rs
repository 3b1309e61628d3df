//! The commands of a release: programs in a folder, published crates, their licences and interfaces.

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

/// Builds the documentation as docs.rs does it: without a libtorch.
pub(crate) fn docs_without_libtorch() -> Cargo {
    let mut cargo = Cargo::new([
        "doc",
        "--no-deps",
        "--workspace",
        "--exclude",
        "xtask",
        "--exclude",
        "overdrive-benches",
        "--exclude",
        "overdrive-examples",
        "--exclude",
        "overdrive-gpu-check",
        "--exclude",
        "overdrive-guide",
        "--exclude",
        "my-model",
        "--features",
        "overdrive/doc-only",
    ]);
    cargo.variables = vec![
        ("RUSTDOCFLAGS", "-D warnings"),
        ("LIBTORCH", "/no/libtorch"),
    ];
    cargo
}

/// Lists the packages of the workspace.
pub(crate) fn own_metadata() -> Cargo {
    Cargo::new(["metadata", "--format-version=1", "--no-deps"])
}

/// Packages `crates` (every crate if it is empty) in the order of their dependencies, as `cargo publish` does it;
/// with `verify`, builds each from its package.
pub(crate) fn publish_dry_run(crates: &[String], verify: bool) -> Cargo {
    let cargo = Cargo::new(["publish", "--dry-run"]);
    let cargo = match crates {
        [] => cargo.and(&["--workspace".into()]),
        chosen => cargo.packages(chosen),
    };
    match verify {
        true => cargo,
        false => cargo.and(&["--no-verify".into()]),
    }
}

/// Compares the public interface of `crates` with that of the revision `base`. The feature `doc-only`, which it turns
/// on with the others, makes it work without libtorch.
pub(crate) fn semver_checks(base: &str, crates: &[String]) -> Cargo {
    Cargo::new(["semver-checks", "--baseline-rev", base]).packages(crates)
}

/// Writes `tch` and its `torch-sys` of this version into the lock file beside `manifest`.
pub(crate) fn choose_tch(manifest: &Path, version: &str) -> Cargo {
    Cargo::new(["update", "tch", "--precise", version, "--manifest-path"]).and(&[manifest.into()])
}

/// Returns the command that checks the dependencies: advisories, licences, sources, bans, as `deny.toml` says.
pub(crate) fn deny(further: &[OsString]) -> Cargo {
    Cargo::new(["deny", "--all-features", "check"]).and(further)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn crates_are_published_by_name_or_all_of_them() {
        let names = ["overdrive-core".to_owned(), "overdrive-pickle".to_owned()];
        assert_eq!(
            publish_dry_run(&names, true).line(),
            "cargo publish --dry-run -p overdrive-core -p overdrive-pickle"
        );
        assert_eq!(
            publish_dry_run(&[], false).line(),
            "cargo publish --dry-run --workspace --no-verify"
        );
        assert_eq!(
            semver_checks("v0.1.0", &names[..1]).line(),
            "cargo semver-checks --baseline-rev v0.1.0 -p overdrive-core"
        );
    }
}
