//! The cargo commands behind the subcommands.

use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};

use crate::failure::{Failure, Result};
use crate::record::Record;
use crate::torch;

/// Returns the root of this workspace.
pub(crate) fn workspace() -> PathBuf {
    let manifest = std::env::var_os("CARGO_MANIFEST_DIR")
        .map_or_else(|| PathBuf::from(env!("CARGO_MANIFEST_DIR")), PathBuf::from);
    manifest.parent().map(Path::to_path_buf).unwrap_or(manifest)
}

/// Returns the target folder of this workspace.
pub(crate) fn target_folder() -> PathBuf {
    std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| workspace().join("target"), PathBuf::from)
}

/// The features that are off by default, because they compile long or have another licence, but are checked.
const ALL_FEATURES: [&str; 2] = [
    "--features",
    "overdrive/image,overdrive/parquet,overdrive/speech,overdrive-examples/image,\
     overdrive-examples/speech",
];

/// Tests run concurrently, each with OpenMP's threads. Threads that spin while they wait take the cores from
/// the threads that they wait for: on two cores, ten tests of gradient accumulation took 3.7 seconds of CPU
/// time, and 0.4 with threads that sleep.
const WAIT_POLICY: (&str, &str) = ("OMP_WAIT_POLICY", "passive");

/// One cargo command.
#[derive(Debug)]
pub(crate) struct Cargo {
    arguments: Vec<OsString>,
    variables: Vec<(&'static str, &'static str)>,
    /// The folder that it runs in, if it is not that of this process.
    folder: Option<PathBuf>,
}

/// Returns the command of an example in release mode. A `--` before its arguments is optional.
pub(crate) fn example(name: &str, further: &[OsString]) -> Cargo {
    let further = match further {
        [first, rest @ ..] if first == "--" => rest,
        all => all,
    };
    // The programs whose feature is off by default, because it compiles long or has another licence.
    let feature = match name {
        "images" => Some("image"),
        "speech" => Some("speech"),
        _ => None,
    };
    Cargo::new(["run", "--release", "-p", "overdrive-examples"])
        .features(feature)
        .and(&["--example", name, "--"].map(OsString::from))
        .and(further)
}

/// Returns the command of the main program; with `--nproc N` among its flags, in N processes. The default
/// features of the examples are off, because the first step of a fresh clone waits for this build.
pub(crate) fn train(further: &[OsString]) -> Vec<Cargo> {
    let (launcher, trainer) = launchers_flags(further);
    if launcher.is_empty() {
        let further = match further {
            [first, rest @ ..] if first == "--" => rest,
            all => all,
        };
        return vec![of_main_job("run", "train").and(&["--".into()]).and(further)];
    }
    let launch = of_main_job("run", "launch").and(&["--".into()]);
    // The launcher starts the built program, so that N processes do not wait for cargo's lock.
    vec![
        of_main_job("build", "train"),
        launch.and(&launcher).and(&["train".into()]).and(&trainer),
    ]
}

/// Returns the commands of the search for the fastest settings of the main program, which it starts for its trials.
pub(crate) fn tune(further: &[OsString]) -> Vec<Cargo> {
    let further = match further {
        [first, rest @ ..] if first == "--" => rest,
        all => all,
    };
    vec![
        of_main_job("build", "train"),
        of_main_job("run", "tune").and(&["--".into()]).and(further),
    ]
}

/// Builds or runs one of the programs of the main command.
fn of_main_job(command: &str, example: &str) -> Cargo {
    Cargo::new([
        command,
        "--release",
        "-p",
        "overdrive-examples",
        "--no-default-features",
        "--example",
        example,
    ])
}

/// Separates the flags of the example `launch` from those of the program that it starts.
fn launchers_flags(further: &[OsString]) -> (Vec<OsString>, Vec<OsString>) {
    let (mut launcher, mut program) = (Vec::new(), Vec::new());
    let mut words = further.iter();
    while let Some(word) = words.next() {
        let text = word.to_string_lossy();
        let (name, value) = text.split_once('=').unzip();
        match name.unwrap_or(&text) {
            "--nproc" | "--nproc-per-node" | "--max-restarts" | "--stop-grace" => {
                launcher.push(word.clone());
                if value.is_none() {
                    // `--nproc 2`: the value is the next word.
                    launcher.extend(words.next().cloned());
                }
            }
            _ => program.push(word.clone()),
        }
    }
    (launcher, program)
}

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
        base.variables.push(WAIT_POLICY);
    }
    if chosen {
        base.and(further)
    } else {
        base.workspace().and(further)
    }
}

/// Runs the commands in turn; the last one replaces this process.
pub(crate) fn run_all(mut commands: Vec<Cargo>) -> Result<()> {
    let last = commands.pop();
    commands.iter().try_for_each(Cargo::run)?;
    last.map_or(Ok(()), |cargo| cargo.replace_this_process())
}

/// Returns the commands of the tests; without arguments, on a machine with a usable GPU, those that need it too.
/// Elsewhere cargo's summary counts these as ignored, not as passed.
pub(crate) fn tests(further: &[OsString], gpu: bool) -> Vec<Cargo> {
    let mut commands = vec![test(further)];
    if gpu && further.is_empty() {
        let on_gpu = ["--", "--ignored", "on_a_gpu"].map(OsString::from);
        commands.push(test(&on_gpu));
    }
    commands
}

pub(crate) fn bench(further: &[OsString]) -> Cargo {
    Cargo::new(["bench", "-p", "overdrive-benches"]).and(further)
}

/// Runs the ablation table. The program has its own flags, and the trainer's after a `--`.
pub(crate) fn ablation(further: &[OsString]) -> Cargo {
    Cargo::new([
        "run",
        "--release",
        "-p",
        "overdrive-benches",
        "--bin",
        "ablation",
        "--",
    ])
    .and(further)
}

/// The program of the GPU check.
const GPU_CHECK: [&str; 5] = [
    "--release",
    "-p",
    "overdrive-gpu-check",
    "--bin",
    "gpu-check",
];

/// Runs the GPU check.
pub(crate) fn gpu_check(further: &[OsString]) -> Cargo {
    let run = Cargo::new(["run"]).and(&GPU_CHECK.map(OsString::from));
    run.and(&["--".into()]).and(further)
}

/// Builds the GPU check; the output is Cargo's messages about the artifacts.
pub(crate) fn gpu_check_program() -> Cargo {
    let build = Cargo::new(["build"]).and(&GPU_CHECK.map(OsString::from));
    build.and(&["--message-format=json-render-diagnostics".into()])
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

/// Builds the documentation. The variable replaces Cargo's `rustdocflags`, whose run path only doctests need.
pub(crate) fn docs(further: &[OsString]) -> Cargo {
    let mut cargo = Cargo::new(["doc", "--no-deps"]).workspace().and(further);
    cargo.variables.push(("RUSTDOCFLAGS", "-D warnings"));
    cargo
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

/// Compiles one crate without its default features, and with one feature or none.
pub(crate) fn check_alone(name: &str, feature: Option<&str>) -> Cargo {
    Cargo::new(["check", "--no-default-features", "-p"])
        .and(&[name.into()])
        .features(feature)
}

/// Runs the tests of one crate with nothing but its own features.
pub(crate) fn test_alone(name: &str) -> Cargo {
    test(&["-p".into(), name.into()])
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
    cargo.variables.push(("OVERDRIVE_WRITE_LAUNCHES", "1"));
    cargo
}

/// Returns the command that checks the dependencies: advisories, licences, sources, bans, as `deny.toml` says.
pub(crate) fn deny(further: &[OsString]) -> Cargo {
    Cargo::new(["deny", "--all-features", "check"]).and(further)
}

/// Returns the target triple of this machine's compiler.
pub(crate) fn host() -> Result<String> {
    let output = Command::new(std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into()))
        .arg("-vV")
        .output()
        .map_err(|error| Failure::new(format!("could not start rustc: {error}")))?;
    host_of(&String::from_utf8_lossy(&output.stdout))
}

/// Returns the target triple in the output of `rustc -vV`.
fn host_of(version: &str) -> Result<String> {
    let line = version.lines().find_map(|line| line.strip_prefix("host: "));
    line.map(str::to_owned)
        .ok_or_else(|| Failure::new("rustc -vV names no host"))
}

impl Cargo {
    /// Runs `run` or `test` of another project with this workspace's target folder and without a network.
    pub(crate) fn of_project(project: &Path, command: &str, target: &Path) -> Self {
        let mut cargo = Self::new([command, "--offline", "--target-dir"]).and(&[target.into()]);
        cargo.folder = Some(project.to_path_buf());
        cargo
    }

    /// Builds the fuzzer, with `variables` for the compiler.
    pub(crate) fn fuzzer(
        manifest: &Path,
        target: &Path,
        host: &str,
        variables: [(&'static str, &'static str); 2],
    ) -> Self {
        let mut cargo = Self::new(["build", "--release", "--manifest-path"])
            .and(&[manifest.into(), "--target-dir".into(), target.into()])
            .and(&["--target".into(), host.into()]);
        cargo.variables.extend(variables);
        cargo
    }

    /// Returns `true` if cargo has the subcommand.
    pub(crate) fn has(subcommand: &str) -> bool {
        let mut command = Cargo::new(["--list"]).command();
        let output = command.stderr(Stdio::null()).output();
        output.is_ok_and(|output| {
            let list = String::from_utf8_lossy(&output.stdout).into_owned();
            list.lines()
                .any(|line| line.split_whitespace().next() == Some(subcommand))
        })
    }

    fn new<const N: usize>(arguments: [&str; N]) -> Self {
        Self {
            arguments: arguments.map(OsString::from).to_vec(),
            variables: Vec::new(),
            folder: None,
        }
    }

    fn and(mut self, further: &[OsString]) -> Self {
        self.arguments.extend(further.iter().cloned());
        self
    }

    fn packages(self, names: &[String]) -> Self {
        let flags = names.iter().flat_map(|name| ["-p".into(), name.into()]);
        let flags: Vec<OsString> = flags.collect();
        self.and(&flags)
    }

    fn features(self, features: Option<&str>) -> Self {
        match features {
            Some(features) => self.and(&["--features".into(), features.into()]),
            None => self,
        }
    }

    /// Selects every package with all features that are checked.
    fn workspace(self) -> Self {
        let [flag, features] = ALL_FEATURES;
        self.and(&["--workspace".into(), flag.into(), features.into()])
    }

    /// Returns the arguments, of a command that builds with the manifest of another release of libtorch.
    fn arguments(&self) -> Vec<OsString> {
        let mut arguments = self.arguments.clone();
        let builds = [
            "bench", "build", "check", "clippy", "doc", "metadata", "run", "test",
        ];
        let first = arguments.first().and_then(|word| word.to_str());
        if let Some(manifest) = torch::manifest()
            && first.is_some_and(|first| builds.contains(&first))
            && !arguments.iter().any(|word| word == "--manifest-path")
        {
            arguments.splice(1..1, ["--manifest-path".into(), manifest.into_os_string()]);
        }
        arguments
    }

    /// Returns the variables; those of this command come last.
    fn variables(&self) -> Vec<(&'static str, OsString)> {
        let own = self
            .variables
            .iter()
            .map(|(name, value)| (*name, value.into()));
        let mut variables = torch::variables();
        variables.retain(|(name, _)| self.variables.iter().all(|(own, _)| own != name));
        variables.extend(own);
        variables
    }

    /// Returns the command as it is typed in a shell.
    pub(crate) fn line(&self) -> String {
        let variables = self.variables();
        let variables = variables
            .iter()
            .map(|(name, value)| format!("{name}={}", quoted(&value.to_string_lossy())));
        let arguments = self.arguments();
        let arguments = arguments.iter().map(|a| quoted(&a.to_string_lossy()));
        let folder = self.folder.iter();
        let words: Vec<String> = folder
            .flat_map(|folder| {
                [
                    "cd".to_owned(),
                    quoted(&folder.to_string_lossy()),
                    "&&".to_owned(),
                ]
            })
            .chain(variables)
            .chain(["cargo".to_owned()])
            .chain(arguments)
            .collect();
        words.join(" ")
    }

    fn command(&self) -> Command {
        let workspace = workspace();
        // The cargo that runs this program, so that the toolchain of the workspace is used.
        let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
        let mut command = Command::new(cargo);
        command.args(self.arguments());
        if let Some(folder) = &self.folder {
            // Cargo's configuration is that of the folder.
            command.current_dir(folder);
        }
        for name in inherited_from_cargo_run(&workspace) {
            command.env_remove(name);
        }
        torch::apply(&mut command);
        command.envs(self.variables());
        if let Some(paths) = std::env::var_os("LD_LIBRARY_PATH") {
            match without_own_folders(&paths, &workspace) {
                Some(rest) => command.env("LD_LIBRARY_PATH", rest),
                None => command.env_remove("LD_LIBRARY_PATH"),
            };
        }
        command
    }

    /// Prints the command and replaces this process by it, so that Ctrl-C, signals, the terminal and the exit
    /// code are cargo's own. (Systems without `exec` get a child process and its exit code.)
    pub(crate) fn replace_this_process(&self) -> Result<()> {
        eprintln!("$ {}", self.line());
        #[cfg(unix)]
        {
            use std::os::unix::process::CommandExt;
            let error = self.command().exec();
            Err(Failure::new(format!("could not start cargo: {error}")))
        }
        #[cfg(not(unix))]
        self.run_quietly()
    }

    /// Prints the command, runs it, and returns a failing exit code as an error.
    pub(crate) fn run(&self) -> Result<()> {
        eprintln!("$ {}", self.line());
        self.run_quietly()
    }

    /// Prints the command, runs it, and returns its standard output.
    pub(crate) fn output(&self) -> Result<String> {
        eprintln!("$ {}", self.line());
        let output = self
            .command()
            // cargo's progress stays visible.
            .stderr(Stdio::inherit())
            .output()
            .map_err(|error| Failure::new(format!("could not start cargo: {error}")))?;
        if !output.status.success() {
            return Err(Failure::silent(code_of(output.status)));
        }
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }

    fn run_quietly(&self) -> Result<()> {
        let status = self
            .command()
            .status()
            .map_err(|error| Failure::new(format!("could not start cargo: {error}")))?;
        if status.success() {
            Ok(())
        } else {
            Err(Failure::silent(code_of(status)))
        }
    }
}

/// Returns the exit code in a shell's convention: 128 + the signal if one ended the child.
fn code_of(status: ExitStatus) -> u8 {
    #[cfg(unix)]
    let signal = std::os::unix::process::ExitStatusExt::signal(&status);
    #[cfg(not(unix))]
    let signal = None::<i32>;
    // `code` is `None` if a signal ended the child.
    let code = status
        .code()
        .or(signal.map(|signal| 128 + signal))
        .unwrap_or(1);
    u8::try_from(code).unwrap_or(1)
}

/// Returns the variables that `cargo run` set for this program and that the user's own cargo would not have.
/// Some build scripts watch them, so passing them on would rebuild crates whenever `cargo xtask` and plain
/// cargo alternate. `LIBTORCH` is one of them if it only repeats `.cargo/libtorch.toml`, which may have
/// changed meanwhile.
fn inherited_from_cargo_run(workspace: &Path) -> Vec<OsString> {
    let recorded = Record::read(workspace).map(|record| record.libtorch.into_os_string());
    std::env::vars_os()
        .filter(|(name, value)| {
            let Some(name) = name.to_str() else {
                return false;
            };
            name.starts_with("CARGO_PKG_")
                || name.starts_with("CARGO_BIN_")
                || matches!(
                    name,
                    "CARGO_MANIFEST_DIR"
                        | "CARGO_MANIFEST_PATH"
                        | "CARGO_CRATE_NAME"
                        | "CARGO_PRIMARY_PACKAGE"
                )
                || (name == "LIBTORCH"
                    && (Some(value) == recorded.as_ref()
                        || Some(value) == crate::setup::libtorch_at_start().as_ref()))
        })
        .map(|(name, _)| name)
        .collect()
}

/// Returns `LD_LIBRARY_PATH` without the folders of this build, which `cargo run` added.
fn without_own_folders(paths: &OsStr, workspace: &Path) -> Option<OsString> {
    let target = workspace.join("target");
    let rest: Vec<PathBuf> = std::env::split_paths(paths)
        .filter(|path| !path.starts_with(&target))
        .collect();
    if rest.is_empty() {
        None
    } else {
        std::env::join_paths(rest).ok()
    }
}

fn quoted(word: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_=./:,+@%".contains(c);
    if !word.is_empty() && word.chars().all(plain) {
        return word.to_owned();
    }
    format!("'{}'", word.replace('\'', r"'\''"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(words: &[&str]) -> Vec<OsString> {
        words.iter().map(OsString::from).collect()
    }

    #[test]
    fn the_printed_command_can_be_pasted() {
        let cargo = example("train", &words(&["--data", "my text.txt", "--steps", "3"]));
        assert_eq!(
            cargo.line(),
            "cargo run --release -p overdrive-examples --example train -- --data 'my text.txt' \
             --steps 3"
        );
        assert_eq!(
            docs(&[]).line(),
            format!(
                "RUSTDOCFLAGS='-D warnings' cargo doc --no-deps --workspace {}",
                ALL_FEATURES.join(" ")
            )
        );
        assert_eq!(
            example("train", &words(&["--", "--steps", "3"])).line(),
            example("train", &words(&["--steps", "3"])).line()
        );
        assert_eq!(quoted("it's"), r"'it'\''s'");
        assert_eq!(quoted(""), "''");
    }

    #[test]
    fn several_processes_are_started_by_the_example_that_does_it() {
        let lines = |given: &[&str]| -> Vec<String> {
            train(&words(given)).iter().map(Cargo::line).collect()
        };
        let plain = "cargo run --release -p overdrive-examples --no-default-features --example train -- --steps 3";
        assert_eq!(lines(&["--steps", "3"]), [plain]);
        assert_eq!(lines(&["--", "--steps", "3"]), [plain]);
        let build =
            "cargo build --release -p overdrive-examples --no-default-features --example train";
        let launch = "cargo run --release -p overdrive-examples --no-default-features --example launch -- --nproc 2 train --steps 3";
        assert_eq!(lines(&["--nproc", "2", "--steps", "3"]), [build, launch]);
        let restarts = launch.replace("--nproc 2", "--nproc=2 --max-restarts 1");
        assert_eq!(
            lines(&["--steps", "3", "--nproc=2", "--max-restarts", "1"]),
            [build, &restarts]
        );
    }

    #[test]
    fn tuning_builds_the_program_of_its_trials_first() {
        let lines: Vec<String> = tune(&words(&["--effective-batch", "16"]))
            .iter()
            .map(Cargo::line)
            .collect();
        let of = |command: &str, example: &str| {
            format!(
                "cargo {command} --release -p overdrive-examples --no-default-features --example {example}"
            )
        };
        let run = format!("{} -- --effective-batch 16", of("run", "tune"));
        assert_eq!(lines, [of("build", "train"), run]);
    }

    #[test]
    fn tests_that_need_a_gpu_run_where_there_is_one() {
        let lines = |given: &[&str], gpu: bool| -> Vec<String> {
            tests(&words(given), gpu).iter().map(Cargo::line).collect()
        };
        let [all, on_gpu] = &lines(&[], true)[..] else {
            panic!("two commands")
        };
        assert_eq!(&lines(&[], false), std::slice::from_ref(all));
        assert_eq!(on_gpu, &format!("{all} -- --ignored on_a_gpu"));
        // Arguments of the user select the tests.
        assert_eq!(lines(&["-p", "xtask"], true).len(), 1);
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

    #[test]
    fn the_folders_of_our_own_build_are_not_passed_on() {
        let workspace = Path::new("/w");
        let cut = |paths: &str| without_own_folders(OsStr::new(paths), workspace);
        assert_eq!(
            cut("/w/target/xtask/release/deps:/opt/lib"),
            Some("/opt/lib".into())
        );
        assert_eq!(cut("/w/target/xtask/release/deps"), None);
    }

    #[test]
    fn the_host_is_read_from_what_rustc_prints() {
        let version = "rustc 1.95.0\nbinary: rustc\nhost: x86_64-unknown-linux-gnu\n";
        assert_eq!(host_of(version).unwrap(), "x86_64-unknown-linux-gnu");
        assert!(host_of("").is_err());
    }

    #[test]
    fn the_workspace_is_the_folder_with_the_virtual_manifest() {
        let manifest = std::fs::read_to_string(workspace().join("Cargo.toml")).unwrap();
        assert!(manifest.starts_with("[workspace]"));
    }
}
