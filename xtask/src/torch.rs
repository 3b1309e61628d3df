//! The release of libtorch that a command builds with: that of the `tch` in `Cargo.lock`, or that of `--torch`.
//!
//! The other release needs another `tch`, and so another lock file. It gets one in a folder below `target`, beside
//! links to everything else at the root of the workspace, so that `Cargo.lock` stays as it is. Everything built is
//! in that folder too.

use std::ffi::{OsStr, OsString};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use overdrive_build::Release;

use crate::cargo;
use crate::failure::{Failure, Result};
use crate::lock;

/// The words of the command line without `--torch`.
static ARGUMENTS: OnceLock<Vec<OsString>> = OnceLock::new();
/// The release that `--torch` names, or that a command needs.
static CHOSEN: OnceLock<Release> = OnceLock::new();
/// The root of the libtorch that `setup` has found for `--torch`.
static ROOT: OnceLock<PathBuf> = OnceLock::new();

/// Reads the command line of this process and takes `--torch VERSION` out of it; whoever runs cargo asks
/// [`other`]. Returns the remaining words.
pub(crate) fn take_from_arguments() -> Result<Vec<OsString>> {
    let (rest, version) = taken(std::env::args_os());
    if let Some(version) = version {
        let _ = CHOSEN.set(named(&version)?);
    }
    Ok(ARGUMENTS.get_or_init(|| rest).clone())
}

/// Builds with the release of this libtorch, if the command line has no `--torch`.
pub(crate) fn choose(series: &str) -> Result<()> {
    let _ = CHOSEN.set(named(series)?);
    Ok(())
}

/// Returns the words of the command line without `--torch VERSION`.
pub(crate) fn arguments() -> Vec<OsString> {
    match ARGUMENTS.get() {
        Some(arguments) => arguments.clone(),
        None => std::env::args_os().collect(),
    }
}

/// Splits off `--torch VERSION` or `--torch=VERSION`; words after `--` are for another program.
fn taken(arguments: impl IntoIterator<Item = OsString>) -> (Vec<OsString>, Option<String>) {
    let (mut rest, mut version) = (Vec::new(), None);
    let mut words = arguments.into_iter();
    while let Some(word) = words.next() {
        if word == "--" {
            rest.push(word);
            rest.extend(words);
            break;
        }
        let text = word.to_string_lossy();
        if text == "--torch" {
            let value = words.next().unwrap_or_default();
            version = Some(value.to_string_lossy().into_owned());
        } else if let Some(value) = text.strip_prefix("--torch=") {
            version = Some(value.to_owned());
        } else {
            rest.push(word);
        }
    }
    (rest, version)
}

fn named(version: &str) -> Result<Release> {
    Release::of_libtorch(version).ok_or_else(|| {
        let known = Release::ALL.map(Release::series).join(" or ");
        Failure::new(format!("`--torch` is {version:?}; it must be {known}"))
    })
}

/// Returns the release of this command: the chosen one, else that of `Cargo.lock`.
pub(crate) fn release() -> Result<Release> {
    match CHOSEN.get() {
        Some(release) => Ok(*release),
        None => of_lock_file(&cargo::workspace()),
    }
}

/// Returns the chosen release if it is not that of `Cargo.lock`.
pub(crate) fn other() -> Option<Release> {
    let chosen = CHOSEN.get()?;
    let locked = of_lock_file(&cargo::workspace()).ok();
    (Some(*chosen) != locked).then_some(*chosen)
}

/// Returns an error where a command builds with `Cargo.lock` only.
pub(crate) fn refuse_other(command: &str) -> Result<()> {
    match other() {
        None => Ok(()),
        Some(release) => Err(Failure::new(format!(
            "`{command}` builds with the tch of Cargo.lock, but `--torch {}` needs another",
            release.series()
        ))
        .remedy(format!(
            "cargo update tch --precise {} changes Cargo.lock.",
            release.tch
        ))),
    }
}

/// Returns the release of the `tch` in the `Cargo.lock` of `workspace`.
fn of_lock_file(workspace: &Path) -> Result<Release> {
    let path = workspace.join("Cargo.lock");
    let text =
        fs::read_to_string(&path).map_err(|error| Failure::io("could not read", &path, &error))?;
    let tch = locked_tch(&text)
        .ok_or_else(|| Failure::new(format!("{} has no package tch", path.display())))?;
    Release::of_tch(tch).ok_or_else(|| {
        let known = Release::ALL.map(|release| release.tch).join(" or ");
        Failure::new(format!(
            "Cargo.lock has tch {tch}; Overdrive works with tch {known}"
        ))
        .remedy(format!(
            "cargo update tch --precise {}",
            Release::DEFAULT.tch
        ))
    })
}

/// Returns the version of `tch` in the text of a lock file.
pub(crate) fn locked_tch(text: &str) -> Option<&str> {
    let (_, package) = text.split_once("name = \"tch\"\nversion = \"")?;
    Some(package.split_once('"')?.0)
}

/// Remembers the libtorch of the other release for [`apply`].
pub(crate) fn use_libtorch(root: &Path) {
    let _ = ROOT.set(root.to_path_buf());
}

/// Returns the variables of a cargo command that builds with the other release; none without `--torch`.
pub(crate) fn variables() -> Vec<(&'static str, OsString)> {
    let (Some(release), Some(root)) = (other(), ROOT.get()) else {
        return Vec::new();
    };
    let run_path = overdrive_build::run_path(&root.join("lib"));
    let run_path: Vec<String> = run_path
        .iter()
        .map(|argument| format!("-Clink-arg={argument}"))
        .collect();
    vec![
        ("LIBTORCH", root.into()),
        ("CARGO_TARGET_DIR", folder(release).into()),
        // Doctests are linked by rustdoc, which no build script reaches.
        // Encoded, because a path may have spaces.
        ("CARGO_ENCODED_RUSTDOCFLAGS", run_path.join("\x1f").into()),
    ]
}

/// Returns the manifest of the workspace that a cargo command builds, if it is that of the other release's folder.
pub(crate) fn manifest() -> Option<PathBuf> {
    Some(workspace_of(other()?).join("Cargo.toml"))
}

/// Returns the root of the workspace that cargo commands build: with the other release, that of its folder.
pub(crate) fn workspace() -> PathBuf {
    other().map_or_else(cargo::workspace, workspace_of)
}

/// Returns the target folder of cargo commands: with the other release, its folder.
pub(crate) fn target_folder() -> PathBuf {
    other().map_or_else(cargo::target_folder, folder)
}

/// The folder of everything that is built with `release`.
fn folder(release: Release) -> PathBuf {
    cargo::target_folder().join(format!("torch-{}", release.series()))
}

fn workspace_of(release: Release) -> PathBuf {
    folder(release).join("workspace")
}

/// Makes the folder with the lock file of the other release; without `--torch` does nothing.
pub(crate) fn prepare() -> Result<()> {
    let Some(release) = other() else {
        return Ok(());
    };
    let (from, to) = (cargo::workspace(), workspace_of(release));
    fs::create_dir_all(&to).map_err(|error| Failure::io("could not create", &to, &error))?;
    let lock = folder(release).join("workspace.lock");
    let doing = "preparing the same workspace";
    let _lock = lock::take(&lock, doing, |text| eprintln!("{text}"))?;
    link_all(&from, &to)?;
    let locked = to.join("Cargo.lock");
    // The committed lock file that the other one was made from.
    let (base, origin) = (from.join("Cargo.lock"), to.join("Cargo.lock.of"));
    let read = |path: &Path| fs::read_to_string(path).unwrap_or_default();
    let current = read(&base);
    if read(&origin) == current && locked_tch(&read(&locked)) == Some(release.tch) {
        return Ok(());
    }
    let _ = fs::remove_file(&origin);
    let write = |path: &Path, text: &str| {
        fs::write(path, text).map_err(|error| Failure::io("could not write", path, &error))
    };
    write(&locked, &current)?;
    cargo::choose_tch(&to.join("Cargo.toml"), release.tch).run()?;
    write(&origin, &current)
}

/// Links everything of the folder `from` in `to`, except what is built and what is git's, and removes links to what
/// is no longer there.
fn link_all(from: &Path, to: &Path) -> Result<()> {
    let list = |path: &Path| {
        let entries =
            fs::read_dir(path).map_err(|error| Failure::io("could not list", path, &error))?;
        Ok::<_, Failure>(
            entries
                .filter_map(|entry| Some(entry.ok()?.file_name()))
                .collect::<Vec<_>>(),
        )
    };
    let not_linked = ["target", ".git", "Cargo.lock"].map(OsStr::new);
    for name in list(from)? {
        let link = to.join(&name);
        let wanted = from.join(&name);
        if not_linked.contains(&name.as_os_str())
            || fs::read_link(&link).is_ok_and(|to| to == wanted)
        {
            continue;
        }
        let _ = fs::remove_file(&link);
        std::os::unix::fs::symlink(&wanted, &link)
            .map_err(|error| Failure::io("could not link", &link, &error))?;
    }
    for name in list(to)? {
        let link = to.join(&name);
        if link.is_symlink() && !link.exists() {
            fs::remove_file(&link).map_err(|e| Failure::io("could not remove", &link, &e))?;
        }
    }
    Ok(())
}

/// Makes `command` build with the other release; without `--torch` changes nothing.
pub(crate) fn apply(command: &mut Command) {
    command.envs(variables());
    if other().is_some() {
        command.env_remove("LIBTORCH_USE_PYTORCH");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn split(words: &[&str]) -> (Vec<String>, Option<String>) {
        let (rest, version) = taken(words.iter().map(OsString::from));
        let rest = rest.into_iter().map(|word| word.into_string().unwrap());
        (rest.collect(), version)
    }

    #[test]
    fn the_option_may_stand_anywhere_before_the_other_programs_arguments() {
        let plain = split(&["xtask", "test", "-p", "xtask"]);
        assert_eq!(plain.1, None);
        for words in [
            &["xtask", "--torch", "2.13", "test", "-p", "xtask"][..],
            &["xtask", "test", "--torch=2.13", "-p", "xtask"],
            &["xtask", "test", "-p", "xtask", "--torch", "2.13"],
        ] {
            assert_eq!(split(words), (plain.0.clone(), Some("2.13".into())));
        }
        let theirs = ["xtask", "example", "x", "--", "--torch", "2.13"];
        assert_eq!(split(&theirs), (theirs.map(str::to_owned).to_vec(), None));
    }

    #[test]
    fn a_version_that_is_not_known_is_refused_with_those_that_are() {
        assert_eq!(named("2.13").unwrap().libtorch, "2.13.0");
        let text = named("2.12").err().unwrap().to_string();
        assert_eq!(text, "`--torch` is \"2.12\"; it must be 2.11 or 2.13");
    }

    #[test]
    fn the_committed_lock_file_has_the_default_release() {
        let lock = fs::read_to_string(cargo::workspace().join("Cargo.lock")).unwrap();
        // The folder of another release has another lock file.
        let committed = !cargo::workspace().join("Cargo.lock.of").exists();
        let release = of_lock_file(&cargo::workspace()).unwrap();
        assert_eq!(locked_tch(&lock), Some(release.tch));
        assert!(!committed || release == Release::DEFAULT, "{release}");
    }

    #[test]
    fn a_lock_file_with_another_tch_is_refused_with_the_remedy() {
        let folder = tempfile::tempdir().unwrap();
        let text = "[[package]]\nname = \"tch\"\nversion = \"0.25.0\"\nsource = \"registry\"\n";
        fs::write(folder.path().join("Cargo.lock"), text).unwrap();
        let text = of_lock_file(folder.path()).err().unwrap().to_string();
        assert!(
            text.contains("tch 0.25.0") && text.contains(Release::DEFAULT.tch),
            "{text}"
        );
    }

    #[cfg(unix)]
    #[test]
    fn the_folder_of_another_release_follows_the_workspace() {
        let folder = tempfile::tempdir().unwrap();
        let (from, to) = (folder.path().join("from"), folder.path().join("to"));
        for name in ["crates/a", "target", ".git"] {
            fs::create_dir_all(from.join(name)).unwrap();
        }
        fs::write(from.join("Cargo.toml"), "").unwrap();
        fs::write(from.join("Cargo.lock"), "").unwrap();
        fs::create_dir(&to).unwrap();
        let names = || {
            let entries = fs::read_dir(&to).unwrap();
            let mut names: Vec<_> = entries.map(|e| e.unwrap().file_name()).collect();
            names.sort();
            names
        };
        link_all(&from, &to).unwrap();
        link_all(&from, &to).unwrap();
        assert_eq!(names(), ["Cargo.toml", "crates"]);
        assert!(to.join("crates/a").is_dir());

        fs::remove_file(from.join("Cargo.toml")).unwrap();
        fs::write(from.join("README.md"), "").unwrap();
        link_all(&from, &to).unwrap();
        assert_eq!(names(), ["README.md", "crates"]);
    }
}
