//! `cargo xtask dist`: the examples with the libraries that they need, in a folder that runs on another machine
//! without Rust.

mod archive;
mod libraries;
mod licences;
pub(crate) mod manifest;
pub(crate) mod program;

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;

use overdrive_core::print_line;

use crate::failure::{Failure, Result};
use crate::lock;
use crate::setup::{self, Request};
use crate::{cargo, space, unpack};

use manifest::Manifest;
use program::Program;

/// The file by which a folder of this command is recognized.
pub(crate) const MANIFEST: &str = "manifest.json";

/// Builds, collects and checks the files; the output folder is created by one rename.
/// With `archive`, packs the folder into an archive beside it.
pub(crate) fn dist(out: Option<&Path>, features: Option<&str>, archive: bool) -> Result<()> {
    let target = target_of(out, "target/dist/overdrive")?;
    // Before the build, which takes minutes.
    replaceable(&target)?;
    let found = setup::setup(Request::Any, false)?;
    let programs = program::of_messages(&cargo::examples(features).output()?)?;
    let libraries = libraries::of(&found.libtorch)?;

    let parent = target.parent().unwrap_or(&target);
    fs::create_dir_all(parent).map_err(|error| failed("could not create", parent, &error))?;
    // Beside the folder and not in it, because the folder is replaced as a whole.
    let lock = parent.join(format!(".{}.lock", name(&target)));
    let _lock = lock::take(&lock, "making the same folder", |text| eprintln!("{text}"))?;
    for left in unpack::sweep(&target) {
        eprintln!("removed leftovers of an earlier run: {left}");
    }
    room(parent, &programs, &libraries)?;

    let made = Made(unpack::unfinished(&target));
    gather(&made.0, &programs, &libraries)?;
    licences::gather(&made.0.join("licences"), &found.root, features)?;
    libraries::check(&made.0, &programs, &found.libtorch)?;
    let manifest = Manifest::of(&made.0, &found.libtorch)?;
    manifest.write(&made.0, &programs)?;
    unpack::sync(&made.0)?;
    unpack::publish(&made.0, &target)?;
    print_line(format_args!(
        "{} programs with libtorch {} ({}), {}, are in {}",
        programs.len(),
        found
            .libtorch
            .version
            .as_deref()
            .unwrap_or("of unknown version"),
        if found.libtorch.cuda { "CUDA" } else { "CPU" },
        space::megabytes(manifest.bytes()),
        target.display()
    ));
    print_line(format_args!(
        "copy the folder anywhere, and run {}/train --help",
        name(&target)
    ));
    if archive {
        let variant = if found.libtorch.cuda { "cuda" } else { "cpu" };
        let version = env!("CARGO_PKG_VERSION");
        let file = format!("overdrive-{version}-{}-{variant}.tar.gz", cargo::host()?);
        print_line(format_args!(
            "packed in {}",
            archive::pack(&target, &file)?.display()
        ));
    }
    Ok(())
}

/// Returns the output folder: the given one, or `default` in the workspace.
pub(crate) fn target_of(out: Option<&Path>, default: &str) -> Result<PathBuf> {
    match out {
        Some(out) => std::path::absolute(out)
            .map_err(|error| Failure::new(format!("{}: {error}", out.display()))),
        None => Ok(cargo::workspace().join(default)),
    }
}

/// The folder under construction; it is removed if the construction fails. After the rename nothing is left.
pub(crate) struct Made(pub(crate) PathBuf);

impl Drop for Made {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// Refuses to replace a folder that this command has not created: `--out ~` means a folder in `~`, not in its
/// place.
fn replaceable(target: &Path) -> Result<()> {
    replaceable_by("dist", Manifest::is_in, target)
}

/// As [`replaceable`], for the command `cargo xtask <name>` that recognizes its folders by `is_own`.
pub(crate) fn replaceable_by(name: &str, is_own: fn(&Path) -> bool, target: &Path) -> Result<()> {
    let refuse = |what: &str| {
        Err(Failure::new(format!("{} {what}", target.display()))
            .remedy("Name a folder that does not exist yet: `--out DIR/overdrive`."))
    };
    match fs::read_dir(target) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(error) if error.kind() == io::ErrorKind::NotADirectory => refuse("is not a folder"),
        Err(error) => Err(failed("could not read", target, &error)),
        Ok(mut entries) => match entries.next() {
            Some(_) if !is_own(target) => refuse(&format!(
                "was not created by `cargo xtask {name}`; it is left unchanged"
            )),
            _ => Ok(()),
        },
    }
}

/// Copies programs, libraries and the project's own licences.
fn gather(made: &Path, programs: &[Program], libraries: &[PathBuf]) -> Result<()> {
    let lib = made.join("lib");
    fs::create_dir_all(&lib).map_err(|error| failed("could not create", &lib, &error))?;
    for program in programs {
        program.copy_stripped(&made.join(&program.file))?;
    }
    for library in libraries {
        copy(library, &lib.join(library.file_name().unwrap_or_default()))?;
    }
    let workspace = cargo::workspace();
    for licence in ["LICENSE", "LICENSE-APACHE", "LICENSE-MIT"] {
        copy(&workspace.join(licence), &made.join(licence))?;
    }
    Ok(())
}

/// Returns an error if the folder does not fit on the disk beside the folder that it may replace.
fn room(parent: &Path, programs: &[Program], libraries: &[PathBuf]) -> Result<()> {
    let files = programs.iter().map(|program| &program.built);
    let bytes = files
        .chain(libraries)
        .filter_map(|path| fs::metadata(path).ok())
        .map(|metadata| metadata.len())
        .sum::<u64>();
    match space::free(parent) {
        Some(free) if free < bytes => Err(Failure::new(format!(
            "the disk of {} has {} free, but the folder takes up to {}",
            parent.display(),
            space::megabytes(free),
            space::megabytes(bytes)
        ))
        .remedy(OTHER_DISK)),
        // Without `df` the size is unknown; a full disk is then an error of the copy.
        _ => Ok(()),
    }
}

const OTHER_DISK: &str = "Make room, or name a folder on another disk: `--out DIR`.";

pub(crate) fn copy(from: &Path, to: &Path) -> Result<()> {
    let copied = fs::copy(from, to);
    copied
        .map(drop)
        .map_err(|error| failed("could not copy to", to, &error))
}

pub(crate) fn failed(what: &str, path: &Path, error: &io::Error) -> Failure {
    Failure::new(format!("{what} {}: {error}", path.display())).remedy(OTHER_DISK)
}

pub(crate) fn name(target: &Path) -> String {
    let name = target.file_name().unwrap_or_default();
    name.to_string_lossy().into_owned()
}

/// Returns the output of a command; an error if it cannot be started or fails.
fn output_of(command: &mut Command) -> Result<String> {
    let line = format!("{command:?}");
    let output = command
        .output()
        .map_err(|error| Failure::new(format!("could not start {line}: {error}")))?;
    if !output.status.success() {
        return Err(Failure::new(format!(
            "{line} ended with {}\n{}",
            output.status,
            String::from_utf8_lossy(&output.stderr).trim_end()
        )));
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_of_the_users_is_never_replaced() {
        let folder = tempfile::tempdir().unwrap();
        let home = folder.path().join("home");
        assert!(replaceable(&home).is_ok(), "it is not there yet");
        fs::create_dir(&home).unwrap();
        assert!(replaceable(&home).is_ok(), "it is empty");
        fs::write(home.join("thesis.tex"), "years").unwrap();
        let text = replaceable(&home).unwrap_err().to_string();
        assert!(
            text.contains("was not created by") && text.contains("--out"),
            "{text}"
        );
        // A manifest of another program, such as a browser extension's.
        fs::write(
            home.join(MANIFEST),
            r#"{"manifest_version": 3, "name": "x"}"#,
        )
        .unwrap();
        assert!(replaceable(&home).is_err());
        fs::write(
            home.join(MANIFEST),
            r#"{"format": "overdrive-dist", "format_version": 1}"#,
        )
        .unwrap();
        assert!(replaceable(&home).is_ok());
        let file = folder.path().join("file");
        fs::write(&file, "").unwrap();
        assert!(
            replaceable(&file)
                .unwrap_err()
                .to_string()
                .contains("not a folder")
        );
    }

    #[test]
    fn what_is_in_the_making_goes_when_the_making_fails() {
        let folder = tempfile::tempdir().unwrap();
        let made = Made(folder.path().join(".overdrive.unfinished-1"));
        fs::create_dir_all(made.0.join("lib")).unwrap();
        drop(made);
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
    }
}
