//! The cargo commands behind the subcommands.

mod checks;
mod concurrent;
mod programs;
mod release;

use std::ffi::{OsStr, OsString};
use std::os::unix::process::{CommandExt as _, ExitStatusExt as _};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};

use serde_json::Value;

use crate::failure::{Failure, Result};
use crate::record::Record;
use crate::torch;

pub(crate) use checks::{
    check_alone, docs, docs_after_lint, faults, fmt, kernel_launches, lint, outside_project,
    run_all_tests, run_tests, training_for_check,
};
pub(crate) use programs::{ablation, bench, example, gpu_check, gpu_check_program, train, tune};
pub(crate) use release::{choose_tch, deny, examples, metadata, own_metadata, tree};

/// Returns the root of this workspace.
pub(crate) fn workspace() -> PathBuf {
    let manifest = std::env::var_os("CARGO_MANIFEST_DIR")
        .map_or_else(|| PathBuf::from(env!("CARGO_MANIFEST_DIR")), PathBuf::from);
    manifest.parent().map(Path::to_path_buf).unwrap_or(manifest)
}

/// Returns the target folder of this workspace.
pub(crate) fn target_folder() -> PathBuf {
    let given = std::env::var_os("CARGO_TARGET_DIR").map(PathBuf::from);
    let target = given.unwrap_or_else(|| workspace().join("target"));
    std::path::absolute(&target).unwrap_or(target)
}

/// The features that are off by default, because they compile long or have another licence, but are checked.
const ALL_FEATURES: [&str; 2] = [
    "--features",
    "overdrive/image,overdrive/parquet,overdrive/remote,overdrive/speech,overdrive-examples/image,\
     overdrive-examples/remote,overdrive-examples/speech",
];

/// One cargo command.
#[derive(Debug)]
pub(crate) struct Cargo {
    arguments: Vec<OsString>,
    variables: Vec<(&'static str, OsString)>,
    /// The folder that it runs in, if it is not that of this process.
    folder: Option<PathBuf>,
}

/// Runs the commands in turn; the last one replaces this process.
pub(crate) fn run_all(mut commands: Vec<Cargo>) -> Result<()> {
    let last = commands.pop();
    commands.iter().try_for_each(Cargo::run)?;
    last.map_or(Ok(()), |cargo| cargo.replace_this_process())
}

/// Returns the target triple of this machine's compiler.
pub(crate) fn host() -> Result<String> {
    host_of(&rustc(&["-vV"])?)
}

/// Returns the folder of this machine's compiler.
fn sysroot() -> Result<PathBuf> {
    Ok(PathBuf::from(rustc(&["--print", "sysroot"])?.trim_end()))
}

/// Returns what the compiler prints.
fn rustc(arguments: &[&str]) -> Result<String> {
    let output = Command::new(std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into()))
        .args(arguments)
        .output()
        .map_err(|error| Failure::new(format!("could not start rustc: {error}")))?;
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// Returns the target triple in the output of `rustc -vV`.
fn host_of(version: &str) -> Result<String> {
    let line = version.lines().find_map(|line| line.strip_prefix("host: "));
    line.map(str::to_owned)
        .ok_or_else(|| Failure::new("rustc -vV printed no host"))
}

/// A program that Cargo has built.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Artifact {
    pub(crate) executable: PathBuf,
    /// The folder of its package.
    pub(crate) folder: PathBuf,
    pub(crate) source: PathBuf,
    /// `bin`, `example`, `test` and others.
    pub(crate) kinds: Vec<String>,
    pub(crate) is_test: bool,
}

/// Returns the programs in Cargo's messages (`--message-format=json`).
pub(crate) fn artifacts(messages: &str) -> Vec<Artifact> {
    messages.lines().filter_map(Artifact::of_message).collect()
}

impl Artifact {
    fn of_message(line: &str) -> Option<Self> {
        let message: Value = serde_json::from_str(line).ok()?;
        let path = |value: &Value| value.as_str().map(PathBuf::from);
        let kinds = message["target"]["kind"].as_array().into_iter().flatten();
        Some(Self {
            executable: path(&message["executable"])?,
            folder: path(&message["manifest_path"])?.parent()?.to_path_buf(),
            source: path(&message["target"]["src_path"])?,
            kinds: kinds
                .filter_map(|kind| Some(kind.as_str()?.to_owned()))
                .collect(),
            is_test: message["profile"]["test"].as_bool()?,
        })
    }
}

impl Cargo {
    /// Runs `check`, `run` or `test` of another project with this workspace's target folder and without a network.
    pub(crate) fn of_project(project: &Path, command: &str, target: &Path) -> Self {
        let mut cargo = Self::new([command, "--offline", "--target-dir"]).and(&[target.into()]);
        cargo.folder = Some(project.to_path_buf());
        cargo
    }

    /// Lists the dependencies of another project without a network.
    pub(crate) fn tree_of_project(project: &Path) -> Self {
        let mut cargo = Self::new(["tree", "--offline", "--depth=1"]);
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
        let variables = variables.map(|(name, value)| (name, value.into()));
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

    pub(crate) fn and(mut self, further: &[OsString]) -> Self {
        self.arguments.extend(further.iter().cloned());
        self
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
        let mut variables = torch::variables();
        variables.retain(|(name, _)| self.variables.iter().all(|(own, _)| own != name));
        variables.extend(self.variables.iter().cloned());
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
        // The cargo that runs this program, so that the toolchain of the workspace is used.
        let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
        let mut command = Command::new(cargo);
        command.args(self.arguments());
        if let Some(folder) = &self.folder {
            // Cargo's configuration is that of the folder.
            command.current_dir(folder);
        }
        prepare(&mut command);
        command.envs(self.variables());
        command
    }

    /// Prints the command and replaces this process by it, so that Ctrl-C, signals, the terminal and the exit
    /// code are cargo's own.
    pub(crate) fn replace_this_process(&self) -> Result<()> {
        eprintln!("$ {}", self.line());
        let error = self.command().exec();
        Err(Failure::new(format!("could not start cargo: {error}")))
    }

    /// Prints the command, runs it, and returns a failing exit code as an error.
    pub(crate) fn run(&self) -> Result<()> {
        eprintln!("$ {}", self.line());
        let status = self
            .command()
            .status()
            .map_err(|error| Failure::new(format!("could not start cargo: {error}")))?;
        match status.success() {
            true => Ok(()),
            false => Err(Failure::silent(code_of(status))),
        }
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
}

/// Gives a command the environment of the user, with the libtorch of this workspace.
fn prepare(command: &mut Command) {
    let workspace = workspace();
    for name in inherited_from_cargo_run(&workspace) {
        command.env_remove(name);
    }
    torch::apply(command);
    if let Some(paths) = std::env::var_os("LD_LIBRARY_PATH") {
        match without_own_folders(&paths, &workspace, &target_folder()) {
            Some(rest) => command.env("LD_LIBRARY_PATH", rest),
            None => command.env_remove("LD_LIBRARY_PATH"),
        };
    }
}

/// Returns the exit code in a shell's convention: 128 + the signal if one ended the child.
fn code_of(status: ExitStatus) -> u8 {
    let signal = status.signal();
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

/// Returns `LD_LIBRARY_PATH` without the folders of this build, which `cargo run` added. `cargo xtask` itself is built in
/// the workspace's own `target`, wherever the others are.
fn without_own_folders(paths: &OsStr, workspace: &Path, target: &Path) -> Option<OsString> {
    let own = [&workspace.join("target"), target];
    let rest: Vec<PathBuf> = std::env::split_paths(paths)
        .filter(|path| !own.iter().any(|own| path.starts_with(own)))
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
pub(crate) fn words(words: &[&str]) -> Vec<OsString> {
    words.iter().map(OsString::from).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_printed_command_can_be_pasted() {
        let cargo = example("train", &words(&["--data", "my text.txt", "--steps", "3"]));
        assert_eq!(
            cargo.line(),
            "cargo run --release -p overdrive-examples --no-default-features --features hub,mlflow --example \
             train -- --data 'my text.txt' --steps 3"
        );
        assert_eq!(
            docs(&[]).line(),
            format!(
                "CARGO_ENCODED_RUSTDOCFLAGS=-Dwarnings cargo doc --no-deps --lib --workspace {}",
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
    fn the_folders_of_our_own_build_are_not_passed_on() {
        let workspace = Path::new("/w");
        let cut = |paths: &str| without_own_folders(OsStr::new(paths), workspace, Path::new("/t"));
        assert_eq!(cut("/t/release/deps:/opt/lib"), Some("/opt/lib".into()));
        assert_eq!(
            cut("/w/target/xtask/release/deps:/opt/lib"),
            Some("/opt/lib".into())
        );
        assert_eq!(cut("/w/target/xtask/release/deps"), None);
    }

    #[test]
    fn programs_are_found_in_cargos_messages() {
        let message = |executable: &str| {
            format!(
                r#"{{"reason":"compiler-artifact","manifest_path":"/w/crates/one/Cargo.toml","target":{{"kind":["test"],"src_path":"/w/crates/one/tests/it/main.rs"}},"profile":{{"test":true}},"executable":{executable}}}"#
            )
        };
        let messages = [
            &message("null"),
            &message(r#""/t/it-1""#),
            r#"{"reason":"build-finished","success":true}"#,
            "",
        ];
        let expected = Artifact {
            executable: "/t/it-1".into(),
            folder: "/w/crates/one".into(),
            source: "/w/crates/one/tests/it/main.rs".into(),
            kinds: vec!["test".to_owned()],
            is_test: true,
        };
        assert_eq!(artifacts(&messages.join("\n")), [expected]);
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
