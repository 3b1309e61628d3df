//! `cargo xtask dist`: the examples with the libraries that they need, in a folder that runs on another machine
//! without Rust.

mod archive;
mod libraries;
mod licences;
pub(crate) mod manifest;
pub(crate) mod program;

use std::fs::{self, File};
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
    let target = target_of(out, "dist/overdrive")?;
    // Before the build, which takes minutes.
    replaceable("dist", manifest::FORMAT, &target)?;
    let found = setup::setup(Request::Any, false)?;
    let programs = program::of_messages(&cargo::examples(features).output()?)?;
    let libraries = libraries::of(&found.libtorch)?;

    let manifest = make(&target, |folder| {
        room(folder, &programs, &libraries)?;
        gather(folder, &programs, &libraries)?;
        licences::gather(&folder.join("licences"), &found.root, features)?;
        libraries::check(folder, &programs, &found.libtorch)?;
        let manifest = Manifest::of(folder, &found.libtorch)?;
        manifest.write(folder, &programs)?;
        Ok(manifest)
    })?;
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

/// Makes the folder `target`, which `fill` fills under another name: it appears by one rename, and one process at a time
/// makes it.
pub(crate) fn make<T>(target: &Path, fill: impl FnOnce(&Path) -> Result<T>) -> Result<T> {
    let parent = target.parent().unwrap_or(target);
    create(parent)?;
    // Beside the folder and not in it, because the folder is replaced as a whole.
    let lock = parent.join(format!(".{}.lock", name(target)));
    let _lock = lock::take(&lock, "making the same folder", |text| eprintln!("{text}"))?;
    for left in unpack::sweep(target) {
        eprintln!("removed leftovers of an earlier run: {left}");
    }
    let made = Made(unpack::unfinished(target));
    create(&made.0)?;
    let filled = fill(&made.0)?;
    unpack::sync(&made.0)?;
    unpack::publish(&made.0, target)?;
    Ok(filled)
}

/// Returns the output folder: the given one, or `default` in the target folder.
pub(crate) fn target_of(out: Option<&Path>, default: &str) -> Result<PathBuf> {
    match out {
        Some(out) => std::path::absolute(out)
            .map_err(|error| Failure::new(format!("{}: {error}", out.display()))),
        None => Ok(cargo::target_folder().join(default)),
    }
}

/// The folder under construction; it is removed if the construction fails. After the rename nothing is left.
pub(crate) struct Made(pub(crate) PathBuf);

impl Drop for Made {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// Refuses to replace a folder that the command `cargo xtask <name>` has not created, whose manifests have this `format`:
/// `--out ~` means a folder in `~`, not in its place.
pub(crate) fn replaceable(name: &str, format: &str, target: &Path) -> Result<()> {
    let refuse = |what: &str| {
        Err(Failure::new(format!("{} {what}", target.display()))
            .remedy("Name a folder that does not exist yet: `--out DIR/overdrive`."))
    };
    match fs::read_dir(target) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(error) if error.kind() == io::ErrorKind::NotADirectory => refuse("is not a folder"),
        Err(error) => Err(Failure::io("could not read", target, &error)),
        Ok(mut entries) => match entries.next() {
            Some(_) if !manifest::is_in(target, format) => refuse(&format!(
                "was not created by `cargo xtask {name}`; it is left unchanged"
            )),
            _ => Ok(()),
        },
    }
}

/// Copies programs, libraries and the project's own licences.
fn gather(made: &Path, programs: &[Program], libraries: &[PathBuf]) -> Result<()> {
    let lib = made.join("lib");
    create(&lib)?;
    for program in programs {
        program.copy_stripped(&made.join(&program.file))?;
    }
    for library in libraries {
        copy(library, &lib.join(library.file_name().unwrap_or_default()))?;
    }
    copy_own_licences(made)
}

/// Copies the project's own licences.
pub(crate) fn copy_own_licences(made: &Path) -> Result<()> {
    let workspace = cargo::workspace();
    ["LICENSE", "LICENSE-APACHE", "LICENSE-MIT"]
        .iter()
        .try_for_each(|licence| copy(&workspace.join(licence), &made.join(licence)))
}

/// Returns an error if the files do not fit on the disk beside the folder that they may replace.
fn room(folder: &Path, programs: &[Program], libraries: &[PathBuf]) -> Result<()> {
    let files = programs.iter().map(|program| &program.built);
    let bytes = files
        .chain(libraries)
        .filter_map(|path| fs::metadata(path).ok())
        .map(|metadata| metadata.len())
        .sum::<u64>();
    match space::free(folder) {
        Some(free) if free < bytes => Err(Failure::new(format!(
            "the disk of {} has {} free, but the folder takes up to {}",
            folder.parent().unwrap_or(folder).display(),
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
    let mut source =
        File::open(from).map_err(|error| Failure::io("could not read", from, &error))?;
    let copied = File::create(to).and_then(|mut target| {
        io::copy(&mut source, &mut target)?;
        target.set_permissions(source.metadata()?.permissions())
    });
    copied.map_err(|error| failed("could not copy to", to, &error))
}

pub(crate) fn create(folder: &Path) -> Result<()> {
    fs::create_dir_all(folder).map_err(|error| failed("could not create", folder, &error))
}

pub(crate) fn write(path: &Path, text: &str) -> Result<()> {
    fs::write(path, text).map_err(|error| failed("could not write", path, &error))
}

/// Returns an error of writing into the output folder.
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
        assert!(
            replaceable("dist", manifest::FORMAT, &home).is_ok(),
            "it is not there yet"
        );
        fs::create_dir(&home).unwrap();
        assert!(
            replaceable("dist", manifest::FORMAT, &home).is_ok(),
            "it is empty"
        );
        fs::write(home.join("thesis.tex"), "years").unwrap();
        let text = replaceable("dist", manifest::FORMAT, &home)
            .unwrap_err()
            .to_string();
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
        assert!(replaceable("dist", manifest::FORMAT, &home).is_err());
        fs::write(
            home.join(MANIFEST),
            r#"{"format": "overdrive-dist", "format_version": 1}"#,
        )
        .unwrap();
        assert!(replaceable("dist", manifest::FORMAT, &home).is_ok());
        let file = folder.path().join("file");
        fs::write(&file, "").unwrap();
        assert!(
            replaceable("dist", manifest::FORMAT, &file)
                .unwrap_err()
                .to_string()
                .contains("not a folder")
        );
    }

    #[test]
    fn a_folder_appears_when_it_is_filled_and_not_before() {
        let folder = tempfile::tempdir().unwrap();
        let target = folder.path().join("new/overdrive");
        let fill = |made: &Path| {
            assert!(!target.exists());
            write(&made.join("file"), "1")
        };
        make(&target, fill).unwrap();
        assert_eq!(fs::read_to_string(target.join("file")).unwrap(), "1");
        let failed = make(&target, |made| {
            write(&made.join("file"), "2")?;
            Err::<(), _>(Failure::new("on purpose"))
        });
        assert!(failed.unwrap_err().to_string().contains("on purpose"));
        assert_eq!(fs::read_to_string(target.join("file")).unwrap(), "1");
    }

    #[test]
    fn a_licence_that_cannot_be_read_is_no_matter_of_the_output_folder() {
        let folder = tempfile::tempdir().unwrap();
        let text = copy(&folder.path().join("LICENSE"), &folder.path().join("out"));
        let text = text.unwrap_err().to_string();
        assert!(
            text.contains("could not read") && !text.contains("--out"),
            "{text}"
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
