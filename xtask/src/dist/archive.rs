//! The archive of a release, with its checksum beside it.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use super::{failed, name, output_of, write};
use crate::failure::Result;
use crate::hash;

/// Packs `folder` into `file` beside it, and writes `file.sha256`, which `sha256sum --check` reads.
pub(crate) fn pack(folder: &Path, file: &str) -> Result<PathBuf> {
    let parent = folder.parent().unwrap_or(folder);
    let (archive, made) = (
        parent.join(file),
        parent.join(format!(".{file}.unfinished")),
    );
    let packed = tar(folder, parent, &made).and_then(|()| {
        let sum = format!("{}  {file}\n", hash::sha256(&made)?);
        let sums = parent.join(format!("{file}.sha256"));
        write(&sums, &sum)?;
        fs::rename(&made, &archive).map_err(|error| failed("could not create", &archive, &error))
    });
    if packed.is_err() {
        let _ = fs::remove_file(&made);
    }
    packed.map(|()| archive)
}

fn tar(folder: &Path, parent: &Path, made: &Path) -> Result<()> {
    let mut tar = Command::new("tar");
    // Resource forks of macOS would become files named `._…`.
    tar.env("COPYFILE_DISABLE", "1");
    tar.arg("-C").arg(parent).arg("-czf").arg(made);
    if cfg!(target_os = "linux") {
        // Two archives of the same files are equal, but for their dates.
        tar.args(["--sort=name", "--owner=0", "--group=0", "--numeric-owner"]);
    }
    output_of(tar.arg(name(folder))).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_archive_holds_the_folder_and_its_checksum_lies_beside_it() {
        let parent = tempfile::tempdir().unwrap();
        let folder = parent.path().join("overdrive");
        fs::create_dir_all(folder.join("lib")).unwrap();
        fs::write(folder.join("lib/libc10.so"), "c10").unwrap();
        let archive = pack(&folder, "overdrive-1.tar.gz").unwrap();
        assert_eq!(archive, parent.path().join("overdrive-1.tar.gz"));
        let listed = output_of(Command::new("tar").arg("-tzf").arg(&archive)).unwrap();
        assert!(
            listed.lines().any(|line| line == "overdrive/lib/libc10.so"),
            "{listed}"
        );
        let sum = fs::read_to_string(parent.path().join("overdrive-1.tar.gz.sha256")).unwrap();
        let expected = hash::of_bytes(&fs::read(&archive).unwrap());
        assert_eq!(sum, format!("{expected}  overdrive-1.tar.gz\n"));
        assert_eq!(
            fs::read_dir(parent.path()).unwrap().count(),
            3,
            "nothing unfinished is left"
        );
    }

    #[test]
    fn an_archive_that_fails_leaves_nothing() {
        let parent = tempfile::tempdir().unwrap();
        assert!(pack(&parent.path().join("nothing"), "overdrive-1.tar.gz").is_err());
        assert_eq!(fs::read_dir(parent.path()).unwrap().count(), 0);
    }
}
