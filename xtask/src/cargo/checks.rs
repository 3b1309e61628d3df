//! The commands of tests, lints and documentation.

use std::ffi::OsString;

use super::concurrent::test_all;
use super::{Cargo, sysroot};
use crate::failure::Result;

/// Tests run concurrently, each with OpenMP's threads. Threads that spin while they wait take the cores from
/// the threads that they wait for: on two cores, ten tests of gradient accumulation took 3.7 seconds of CPU
/// time, and 0.4 with threads that sleep.
pub(super) const WAIT_POLICY: (&str, &str) = ("OMP_WAIT_POLICY", "passive");

/// Builds the main program as the tests are built, with the same packages, features and profile, so that
/// the tests compile none of it again; the output is Cargo's messages about the artifacts.
pub(crate) fn training_for_check() -> Cargo {
    Cargo::new(["build"]).workspace().and(
        &[
            "--example",
            "train",
            "--message-format=json-render-diagnostics",
        ]
        .map(OsString::from),
    )
}

/// Runs all tests of all packages: one failing package must not hide the others. A package named by the
/// user replaces `--workspace`, because cargo would otherwise test the whole workspace silently.
fn test(further: &[OsString]) -> Cargo {
    // Words after `--` are for the test program, whose filters may look like package flags.
    let before = further.iter().take_while(|argument| *argument != "--");
    let chosen = before.filter_map(|a| a.to_str()).any(|a| {
        a.starts_with("-p")
            || ["--package", "--manifest-path"]
                .iter()
                .any(|name| a.starts_with(name))
    });
    let mut base = Cargo::new(["test", "--no-fail-fast"]);
    if std::env::var_os(WAIT_POLICY.0).is_none() {
        base.variables.push((WAIT_POLICY.0, WAIT_POLICY.1.into()));
    }
    if chosen {
        base.and(further)
    } else {
        base.workspace().and(further)
    }
}

/// Builds the examples that tests start.
pub(super) fn examples_of_tests() -> Cargo {
    Cargo::new(["build", "--example", "launch", "--example", "own_model"]).workspace()
}

/// Builds the test programs, without the other examples: to link them takes as long as a hundred tests, and clippy checks
/// them. The output is Cargo's messages about the programs.
pub(super) fn test_programs() -> Cargo {
    let arguments = [
        "--tests",
        "--no-run",
        "--message-format=json-render-diagnostics",
    ];
    test(&arguments.map(OsString::from))
}

/// Runs the tests in the documentation, those of a crate in one process: rustdoc would start one for each of them, and libtorch
/// takes a quarter of a second to start. They run one after the other, because a few use what a process has only one of, such
/// as the profiler.
pub(super) fn documentation_tests() -> Cargo {
    // Without this variable, the program that rustdoc has compiled runs its tests itself.
    let in_one_process = r#"build.rustdocflags=["--test-runtool", "env", "--test-runtool-arg=-u", "--test-runtool-arg=RUSTDOC_DOCTEST_BIN_PATH"]"#;
    let arguments = [
        "--doc",
        "--config",
        in_one_process,
        "--",
        "--test-threads=1",
    ];
    test(&arguments.map(OsString::from))
}

/// Runs the tests that need something that few machines have: those with `part` in their names. Elsewhere, summaries
/// count them as ignored, not as passed.
fn ignored_tests(part: &str) -> Cargo {
    test(&["--", "--ignored", part].map(OsString::from))
}

/// Runs all tests, and the `beside` commands meanwhile; on a machine with a usable GPU, also those that need it, and if
/// `OVERDRIVE_PYTHON` names an interpreter, also those that need Python.
pub(crate) fn run_all_tests(gpu: bool, beside: Vec<Cargo>) -> Result<()> {
    test_all(beside)?;
    if gpu {
        ignored_tests("on_a_gpu").run()?;
    }
    if std::env::var_os("OVERDRIVE_PYTHON").is_some() {
        ignored_tests("on_python").run()?;
    }
    Ok(())
}

/// Runs the tests that the user's arguments select; without arguments, all of them.
pub(crate) fn run_tests(further: &[OsString], gpu: bool) -> Result<()> {
    match further.is_empty() {
        true => run_all_tests(gpu, Vec::new()),
        false => test(further).replace_this_process(),
    }
}

pub(crate) fn fmt(further: &[OsString]) -> Cargo {
    Cargo::new(["fmt", "--all"]).and(further)
}

/// Appends `-D warnings` after the user's own `-- …`, if there is one.
pub(crate) fn lint(further: &[OsString]) -> Cargo {
    let cargo = Cargo::new(["clippy", "--all-targets"])
        .workspace()
        .and(further);
    let cargo = if further.iter().any(|a| a == "--") {
        cargo
    } else {
        cargo.and(&["--".into()])
    };
    cargo.and(&["-D".into(), "warnings".into()])
}

/// Builds the documentation of the libraries. The variable replaces Cargo's `rustdocflags`, whose run path only doctests need.
pub(crate) fn docs(further: &[OsString]) -> Cargo {
    let mut cargo = Cargo::new(["doc", "--no-deps", "--lib"])
        .workspace()
        .and(further);
    cargo
        .variables
        .push(("CARGO_ENCODED_RUSTDOCFLAGS", "-Dwarnings".into()));
    cargo
}

/// Builds the documentation from what [`lint`] has compiled: Cargo keeps crates that clippy has checked apart from those of the
/// compiler, so that without these variables, which clippy sets too, all of them are checked again.
pub(crate) fn docs_after_lint() -> Result<Cargo> {
    let mut cargo = docs(&[]);
    let driver = sysroot()?.join("bin/clippy-driver");
    cargo
        .variables
        .push(("RUSTC_WORKSPACE_WRAPPER", driver.into_os_string()));
    // clippy's encoding of `-D warnings`.
    let separator = "__CLIPPY_HACKERY__";
    let arguments = format!("-D{separator}warnings{separator}");
    cargo.variables.push(("CLIPPY_ARGS", arguments.into()));
    Ok(cargo)
}

/// Compiles one crate without its default features, and with one feature or none.
pub(crate) fn check_alone(name: &str, feature: Option<&str>) -> Cargo {
    Cargo::new(["check", "--no-default-features", "-p"])
        .and(&[name.into()])
        .features(feature)
}

/// Returns the command that builds and starts a project outside of this workspace.
pub(crate) fn outside_project() -> Cargo {
    let only = [
        "-p",
        "overdrive-build",
        "--test",
        "it",
        "--",
        "--ignored",
        "outside_project",
    ];
    test(&only.map(OsString::from))
}

/// Returns the commands of the fault injection: each test repeats an operation until every system call of it has
/// failed once, and prints how many there were.
pub(crate) fn faults() -> Vec<Cargo> {
    let all = Cargo::new(["test"])
        .workspace()
        .and(&["--test", "fault_injection"].map(OsString::from));
    // The tests that kill a process at every call are ignored, because they take minutes.
    let all = all.and(&["--", "--include-ignored", "--nocapture"].map(OsString::from));
    let own = Cargo::new(["test", "-p", "xtask", "a_fault_in_any_call"]);
    vec![all, own.and(&["--", "--nocapture"].map(OsString::from))]
}

/// Returns the command that writes the launches which prove the GPU kernels.
pub(crate) fn kernel_launches() -> Cargo {
    let mut cargo = Cargo::new([
        "test",
        "-p",
        "overdrive-gpu",
        "--lib",
        "every_variant_is_launched",
    ]);
    cargo
        .variables
        .push(("OVERDRIVE_WRITE_LAUNCHES", "1".into()));
    cargo
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::{Path, PathBuf};

    use super::*;
    use crate::cargo::{words, workspace};

    #[test]
    fn tests_that_need_a_gpu_or_python_are_those_that_the_same_programs_ignore() {
        let all = test(&[]).line();
        for part in ["on_a_gpu", "on_python"] {
            assert_eq!(
                ignored_tests(part).line(),
                format!("{all} -- --ignored {part}")
            );
        }
        // The same build, so that nothing is compiled again.
        for other in [test_programs(), documentation_tests()] {
            assert!(other.line().starts_with(&all), "{}", other.line());
        }
    }

    /// Adds the files of Rust in `folder` with their texts to `found`.
    fn sources(folder: &Path, found: &mut Vec<(PathBuf, String)>) {
        for entry in fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            let is_output = path.file_name().is_some_and(|name| name == "target");
            if path.is_dir() && !is_output {
                sources(&path, found);
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                let text = fs::read_to_string(&path).unwrap();
                found.push((path, text));
            }
        }
    }

    fn all_sources() -> Vec<(PathBuf, String)> {
        let mut found = Vec::new();
        for folder in ["benches", "crates", "examples", "gpu-check", "xtask"] {
            sources(&workspace().join(folder), &mut found);
        }
        found
    }

    /// Returns the names of the tests in `text` that are ignored for a reason that begins with `reason`.
    fn ignored_for<'t>(text: &'t str, reason: &str) -> Vec<&'t str> {
        let mut lines = text.lines().map(str::trim);
        let ignored = format!(r#"#[ignore = "{reason}"#);
        let mut found = Vec::new();
        while lines.any(|line| line.starts_with(&ignored)) {
            found.push(lines.find_map(|line| line.strip_prefix("fn ")).unwrap());
        }
        found
    }

    /// Commands select them by this part of their names.
    #[test]
    fn every_test_that_needs_a_gpu_or_python_says_so_in_its_name() {
        let sources = all_sources();
        for (reason, part) in [
            ("needs a CUDA GPU", "on_a_gpu"),
            ("needs Python", "on_python"),
        ] {
            let all = sources.iter().flat_map(|(path, text)| {
                let names = ignored_for(text, reason).into_iter();
                names.map(move |name| (path, name))
            });
            let mut found: Vec<_> = all.collect();
            assert!(found.len() > 20, "{found:?}");
            found.retain(|(_, name)| !name.contains(part));
            assert!(found.is_empty(), "they never run: {found:#?}");
        }
    }

    /// A test that looks for the interpreter itself can pass without one.
    #[test]
    fn tests_take_their_interpreter_from_on_python() {
        let of_tests = |path: &Path| path.iter().any(|part| part == "tests");
        let names_it = |text: &str| text.contains("OVERDRIVE_PYTHON");
        let sources = all_sources();
        let own = sources
            .iter()
            .filter(|(path, text)| of_tests(path) && names_it(text));
        let own: Vec<&PathBuf> = own.map(|(path, _)| path).collect();
        assert!(own.is_empty(), "{own:#?}");
    }

    #[test]
    fn a_package_named_by_the_user_takes_the_place_of_the_workspace() {
        let all = test(&[]).line();
        assert!(all.contains("cargo test --no-fail-fast --workspace --features "));
        for package in [&["-p", "xtask"][..], &["-pxtask"], &["--package", "xtask"]] {
            assert!(
                !test(&words(package)).line().contains("--workspace"),
                "{package:?}"
            );
        }
        // After `--` the arguments are for the test program.
        assert!(test(&words(&["--", "-p"])).line().contains("--workspace"));
    }

    #[test]
    fn lints_are_errors_also_with_arguments_of_the_users_own() {
        assert!(lint(&[]).line().ends_with("speech -- -D warnings"));
        assert!(
            lint(&words(&["--", "-W", "clippy::pedantic"]))
                .line()
                .ends_with("speech -- -W clippy::pedantic -D warnings")
        );
    }
}
