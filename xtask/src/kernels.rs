//! `cargo xtask kernels`: compiles the GPU kernels of overdrive-gpu with Triton and checks them in its interpreter.
//!
//! Neither a GPU nor a CUDA toolkit is needed. The environment with Triton is created once per `requirements.txt`, in
//! `target/xtask`.

use std::fs;
use std::path::PathBuf;
use std::process::Command;

use overdrive_build::Environment;
use serde_json::Value;

use crate::cargo;
use crate::failure::{Failure, Result, read};
use crate::hash;
use crate::setup::{self, Request};

const TABLE: &str = "kernels.json";

/// Compiles the kernels into the repository, or with `check` compares them with the committed ones. Then runs every
/// variant in the interpreter.
pub(crate) fn kernels(check: bool) -> Result<()> {
    let python = environment()?;
    let sources = cargo::workspace().join("crates/overdrive-gpu/kernels");
    let out = match check {
        true => cargo::target_folder().join("xtask/kernels"),
        false => sources.clone(),
    };
    let script = |name: &str| sources.join(name).into_os_string();
    run(Command::new(&python).arg(script("build.py")).arg(&out))?;
    if check {
        compare(&read(&sources.join(TABLE))?, &read(&out.join(TABLE))?)?;
    } else {
        // The launches that the interpreter repeats are those of the launcher, for the new variants.
        setup::setup(Request::Any, false)?;
        cargo::kernel_launches().run()?;
    }
    run(Command::new(&python).arg(script("check.py")))
}

/// Compares the sources and the code in two tables. The compressed file may differ: its bytes depend on the version of
/// zstd.
fn compare(committed: &str, compiled: &str) -> Result<()> {
    let [committed, compiled] = [committed, compiled].map(|text| {
        serde_json::from_str::<Value>(text)
            .map_err(|error| Failure::new(format!("{TABLE} is not JSON: {error}")))
    });
    let (committed, compiled) = (committed?, compiled?);
    let differs = |part: &str| committed[part] != compiled[part];
    let part = ["hidden_pointers", "sources", "variants"]
        .into_iter()
        .find(|part| differs(part));
    match part {
        None => Ok(()),
        Some(part) => Err(Failure::new(format!(
            "the committed kernels do not match the sources: `{part}` of {TABLE} differs"
        ))
        .remedy("Run `cargo xtask kernels` and commit what it writes.")),
    }
}

/// Returns the Python interpreter of an environment with the packages of `requirements.txt`, and creates the
/// environment if it does not exist.
fn environment() -> Result<PathBuf> {
    let workspace = cargo::workspace();
    let requirements = workspace.join("crates/overdrive-gpu/kernels/requirements.txt");
    let name = &hash::of_bytes(read(&requirements)?.as_bytes())[..12];
    let folder = cargo::target_folder().join(format!("xtask/kernels-{name}"));
    let python = folder.join("bin/python");
    let done = folder.join("complete");
    if done.exists() {
        return Ok(python);
    }
    // The leftovers of an interrupted run.
    let _ = fs::remove_dir_all(&folder);
    let mut base = Command::new(overdrive_build::python_interpreter(&Environment::process()));
    run(base.args(["-m", "venv"]).arg(&folder))?;
    let mut pip = Command::new(&python);
    pip.args([
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--only-binary",
        ":all:",
    ]);
    run(pip.arg("-r").arg(&requirements))?;
    fs::write(&done, "").map_err(|error| Failure::io("could not write", &done, &error))?;
    Ok(python)
}

fn run(command: &mut Command) -> Result<()> {
    eprintln!("$ {command:?}");
    let program = PathBuf::from(command.get_program());
    let status = command
        .status()
        .map_err(|error| Failure::io("could not start", &program, &error))?;
    match status.success() {
        true => Ok(()),
        false => Err(
            Failure::new(format!("{command:?} failed: {status}")).remedy(
                "This needs Python 3.11 or later with pip and, the first time, the package index.",
            ),
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TABLE_TEXT: &str = r#"{"hidden_pointers": 2, "sources": {"a.py": "1"}, "targets": {"x": 1}, "variants": [{"sha256": "7"}]}"#;

    #[test]
    fn code_that_differs_is_found_and_another_compression_is_not() {
        compare(TABLE_TEXT, &TABLE_TEXT.replace(r#""x": 1"#, r#""x": 2"#)).unwrap();
        let failure = compare(TABLE_TEXT, &TABLE_TEXT.replace("\"7\"", "\"8\"")).unwrap_err();
        let text = failure.to_string();
        assert!(
            text.contains("`variants` of kernels.json differs"),
            "{text}"
        );
        assert!(text.contains("cargo xtask kernels"), "{text}");
    }
}
