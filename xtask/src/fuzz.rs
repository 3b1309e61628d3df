//! `cargo xtask fuzz`: coverage-guided fuzzing of the readers of foreign bytes, which are in `fuzz/`.
//!
//! It uses libFuzzer and AddressSanitizer through the workspace's own toolchain; neither cargo-fuzz nor a nightly
//! compiler is needed. A search starts with the corpus of the previous one.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use overdrive_core::print_line;

use crate::cargo::{self, Cargo};
use crate::failure::{Failure, Result};
use crate::setup::{self, Request};

/// The compiler flags that `cargo fuzz build` passes. The first makes a stable compiler accept the -Z options in the
/// second.
const BUILD: [(&str, &str); 2] = [
    ("RUSTC_BOOTSTRAP", "1"),
    (
        "RUSTFLAGS",
        "--cfg fuzzing -Zsanitizer=address -Cpasses=sancov-module \
         -Cllvm-args=-sanitizer-coverage-level=4 -Cllvm-args=-sanitizer-coverage-inline-8bit-counters \
         -Cllvm-args=-sanitizer-coverage-pc-table -Cllvm-args=-sanitizer-coverage-trace-compares",
    ),
];

/// The limits of one input: an endless loop and an allocation of an unchecked size are defects.
const LIMITS: [&str; 4] = [
    "-timeout=20",
    "-rss_limit_mb=3072",
    "-malloc_limit_mb=1024",
    "-max_len=65536",
];

/// Runs `target`, or all targets one after the other, for `minutes` each. Fails if one of them found something.
pub(crate) fn fuzz(target: Option<&str>, minutes: f64) -> Result<()> {
    if !(minutes.is_finite() && minutes > 0.0) {
        return Err(Failure::new(format!(
            "--minutes is {minutes}; it must be positive"
        )));
    }
    setup::setup(Request::Any, false)?;
    let program = build()?;
    let scratch = std::env::temp_dir().join(format!("overdrive-fuzz-{}", std::process::id()));
    let names = names(&program, &scratch)?;
    let chosen: Vec<&str> = match target {
        None => names.lines().collect(),
        Some(name) if names.lines().any(|known| known == name) => vec![name],
        Some(name) => {
            let known = names.lines().collect::<Vec<_>>().join(", ");
            return Err(Failure::new(format!(
                "there is no target {name:?}; the targets are {known}"
            )));
        }
    };
    // 0 seconds would mean unlimited time to libFuzzer.
    let seconds = (minutes * 60.0).ceil() as u64;
    let folder = cargo::target_folder().join("fuzz");
    let mut found = Vec::new();
    for name in chosen {
        let searched = search(&program, name, seconds, &folder, &scratch);
        let _ = fs::remove_dir_all(&scratch);
        let (log, succeeded) = searched?;
        let what = if succeeded { "nothing" } else { "something" };
        let log = log.display();
        print_line(format_args!(
            "{name:<22} found {what} in {seconds} s: {log}"
        ));
        if !succeeded {
            found.push(name);
        }
    }
    match found.is_empty() {
        true => Ok(()),
        false => Err(Failure::new(format!(
            "the readers {} failed; their logs name the input",
            found.join(", ")
        ))
        .remedy(
            "To reproduce a failure, run the program with the file that the log names as its only argument. Fix \
             the reader, minimize the input with `-minimize_crash=1`, and add it to the reader's tests.",
        )),
    }
}

fn build() -> Result<PathBuf> {
    let (workspace, host) = (cargo::workspace(), cargo::host()?);
    let manifest = workspace.join("fuzz/Cargo.toml");
    let lock = manifest.with_file_name("Cargo.lock");
    // The versions of the workspace; cargo adds those of the fuzzer.
    fs::copy(workspace.join("Cargo.lock"), &lock)
        .map_err(|error| Failure::io("could not write", &lock, &error))?;
    // A named target, so that build scripts and procedural macros are compiled without the flags.
    let target = cargo::target_folder().join("fuzz/build");
    Cargo::fuzzer(&manifest, &target, &host, BUILD).run()?;
    Ok(target.join(host).join("release/readers"))
}

fn readers(program: &Path, name: &str, scratch: &Path) -> Command {
    let mut command = Command::new(program);
    command
        .env("OVERDRIVE_FUZZ_TARGET", name)
        .env("OVERDRIVE_FUZZ_SCRATCH", scratch)
        // libtorch keeps what it allocates once until the end of the process.
        .env("ASAN_OPTIONS", "detect_leaks=0")
        .env("OMP_NUM_THREADS", "1")
        .env("RAYON_NUM_THREADS", "1")
        .stdin(Stdio::null());
    command
}

fn names(program: &Path, scratch: &Path) -> Result<String> {
    let output = readers(program, "list", scratch)
        .output()
        .map_err(|error| Failure::io("could not start", program, &error))?;
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        return Err(Failure::new(format!("the fuzzer did not start: {said}")));
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// Searches, and returns the log, which ends with libFuzzer's statistics, and `true` if nothing was found.
fn search(
    program: &Path,
    name: &str,
    seconds: u64,
    folder: &Path,
    scratch: &Path,
) -> Result<(PathBuf, bool)> {
    let corpus = folder.join("corpus").join(name);
    let artifacts = folder.join("artifacts").join(name);
    for needed in [&corpus, &artifacts] {
        fs::create_dir_all(needed)
            .map_err(|error| Failure::io("could not create", needed, &error))?;
    }
    let path = folder.join(format!("{name}.log"));
    let fail = |error: std::io::Error| Failure::io("could not write", &path, &error);
    let log = fs::File::create(&path).map_err(fail)?;
    let copy = log.try_clone().map_err(fail)?;
    let status = readers(program, name, scratch)
        .env("OVERDRIVE_FUZZ_CORPUS", &corpus)
        .args(LIMITS)
        .arg(format!("-max_total_time={seconds}"))
        // With a separator at its end it is a folder.
        .arg(format!("-artifact_prefix={}/", artifacts.display()))
        .arg("-print_final_stats=1")
        .arg(&corpus)
        .stdout(log)
        .stderr(copy)
        .status()
        .map_err(|error| Failure::io("could not start", program, &error))?;
    Ok((path, status.success()))
}
