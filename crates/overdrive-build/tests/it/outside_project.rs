//! A test with a project of a user, outside this workspace, that depends on one Overdrive crate by path
//! and has a build script of three lines. It must build, and start
//! without `LD_LIBRARY_PATH`.
//!
//! It is built into the workspace's own target folder, with the workspace's profile and the features of its tests, so that
//! cargo finds torch-sys and the shim compiled: they alone would take minutes.

// Helpers of tests are not "in tests" to clippy's allow-unwrap-in-tests.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use overdrive_build::{Environment, Source, locate};

const MANIFEST: &str = r#"
[package]
name = "outside"
version = "0.1.0"
edition = "2024"

[dependencies]
overdrive-precision = { path = "CRATES/overdrive-precision" }
tch = { version = ">=0.24, <0.27", default-features = false }
# Not used: with the features of the workspace's tests, whose shim is compiled.
overdrive-sys = { path = "CRATES/overdrive-sys", features = ["c10d", "compiled"] }

[build-dependencies]
overdrive-build = { path = "CRATES/overdrive-build" }

PROFILE
"#;

const BUILD: &str = "fn main() {
    overdrive_build::link();
}
";

/// Calls libtorch through tch and through Overdrive, and so through the C++ shim.
const MAIN: &str = r#"
use overdrive_precision::{autocast, is_autocast_enabled};
use tch::{Device, Kind, Tensor};

fn main() -> Result<(), overdrive_precision::Error> {
    let a = Tensor::ones([2, 3], (Kind::Float, Device::Cpu));
    let _autocast = autocast(Device::Cpu, Kind::BFloat16)?;
    let inside = is_autocast_enabled(Device::Cpu)?;
    println!("sum {} kind {:?} autocast {inside}", a.sum(Kind::Float).double_value(&[]), a.kind());
    Ok(())
}
"#;

/// The project's folder, removed at the end also when the test fails.
struct Project {
    folder: PathBuf,
    target: PathBuf,
}

impl Drop for Project {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.folder);
        // Cargo names what it builds of the project after the project's path, which is another
        // one each time: without this the target folder would grow.
        for part in ["deps", "build", ".fingerprint", "incremental"] {
            for entry in fs::read_dir(self.target.join("debug").join(part))
                .into_iter()
                .flatten()
                .flatten()
            {
                if entry.file_name().to_string_lossy().starts_with("outside-") {
                    let path = entry.path();
                    let _ = fs::remove_dir_all(&path).or_else(|_| fs::remove_file(&path));
                }
            }
        }
    }
}

impl Project {
    fn new(workspace: &Path) -> Self {
        let folder = std::env::temp_dir().join(format!("overdrive-outside-{}", std::process::id()));
        fs::create_dir_all(folder.join("src")).unwrap();
        let crates = workspace.join("crates").display().to_string();
        fs::write(
            folder.join("Cargo.toml"),
            MANIFEST
                .replace("CRATES", &crates)
                .replace("PROFILE", &profile(workspace)),
        )
        .unwrap();
        fs::write(folder.join("build.rs"), BUILD).unwrap();
        fs::write(folder.join("src/main.rs"), MAIN).unwrap();
        // The same versions as here, which are on this machine already: no network is needed.
        fs::copy(workspace.join("Cargo.lock"), folder.join("Cargo.lock")).unwrap();
        // Cargo gives each package's tests a folder in its target folder.
        let target = Path::new(env!("CARGO_TARGET_TMPDIR")).parent().unwrap();
        let target = target.to_path_buf();
        Self { folder, target }
    }
}

/// The workspace's tables `[profile.dev…]`. Cargo warns of their packages that the project does not have.
fn profile(workspace: &Path) -> String {
    let manifest = fs::read_to_string(workspace.join("Cargo.toml")).unwrap();
    let mut inside = false;
    let lines = manifest.lines().filter(|line| {
        if line.starts_with('[') {
            inside = line.starts_with("[profile.dev");
        }
        inside
    });
    lines.collect::<Vec<_>>().join("\n")
}

/// A command in the environment of a user: without what Cargo set for this test.
fn clean(program: &Path) -> Command {
    let mut command = Command::new(program);
    for (name, _) in std::env::vars_os() {
        let text = name.to_string_lossy();
        let of_cargo = [
            "CARGO_PKG_",
            "CARGO_BIN_",
            "CARGO_MANIFEST",
            "CARGO_ENCODED",
            "DEP_",
        ]
        .iter()
        .any(|start| text.starts_with(start));
        let paths = [
            "LD_LIBRARY_PATH",
            "DYLD_LIBRARY_PATH",
            "DYLD_FALLBACK_LIBRARY_PATH",
        ];
        if of_cargo || text == "OUT_DIR" || paths.contains(&text.as_ref()) {
            command.env_remove(name);
        }
    }
    command
}

fn succeeded(output: &Output, what: &str) {
    assert!(
        output.status.success(),
        "{what} ended with {}\n{}{}",
        output.status,
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
}

#[test]
#[ignore = "compiles for a minute; `cargo xtask new --check` runs it"]
fn a_project_outside_the_workspace_builds_and_starts_without_ld_library_path() {
    let workspace = Path::new(env!("CARGO_MANIFEST_DIR"))
        .ancestors()
        .nth(2)
        .unwrap();
    let libtorch = locate(&Environment::process())
        .unwrap_or_else(|error| panic!("this test needs a libtorch: {error}"));
    let project = Project::new(workspace);

    let mut cargo = clean(Path::new(env!("CARGO")));
    cargo
        .args(["build", "--offline"])
        .current_dir(&project.folder);
    cargo.env("CARGO_TARGET_DIR", &project.target);
    // What the README tells such a user to set, unless Python's PyTorch is the one in use.
    if !matches!(libtorch.source, Source::Python { .. }) {
        cargo.env("LIBTORCH", libtorch.lib_dir.parent().unwrap());
    }
    succeeded(&cargo.output().unwrap(), "cargo build");

    let binary = project
        .target
        .join("debug/outside")
        .with_extension(std::env::consts::EXE_EXTENSION);
    let output = clean(&binary)
        .current_dir(std::env::temp_dir())
        .env_remove("LIBTORCH")
        .output()
        .unwrap();
    succeeded(&output, "the project's program");
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(text.contains("sum 6 kind Float autocast"), "{text}");
    assert!(text.contains("true"), "autocast was not on inside: {text}");
}
