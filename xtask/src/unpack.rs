//! Unpacking of archives into a folder that is created by one rename.

use std::fs::{self, File};
use std::io::{self, BufReader, Read, Write};
use std::path::{Path, PathBuf};

use zip::ZipArchive;
use zip::result::ZipError;

use crate::failure::{Failure, Result};
use crate::progress;

/// Unpacks the files of `archive` that `destination` selects to the folder `into`. The checksum of each file is
/// checked; an archive with a wrong one is removed, so that the next run fetches it again.
pub(crate) fn unpack(
    archive: &Path,
    into: &Path,
    destination: impl Fn(&str) -> Option<PathBuf>,
) -> Result<()> {
    let file = File::open(archive).map_err(|e| Failure::io("could not open", archive, &e))?;
    let mut zip = ZipArchive::new(BufReader::new(file)).map_err(|e| unreadable(archive, e))?;
    // Two passes: the total is needed for the progress bar before the first file is written.
    let mut wanted = Vec::new();
    let mut total = 0;
    for index in 0..zip.len() {
        let entry = zip
            .by_index_raw(index)
            .map_err(|e| unreadable(archive, e))?;
        let name = entry.name().map_err(|e| unreadable(archive, e))?;
        if let Some(to) = destination(&name) {
            total += entry.size();
            wanted.push((index, into.join(to)));
        }
    }
    let bar = progress::bytes(total, "unpacking");
    // 256 KiB: the largest library has hundreds of megabytes, and small reads would dominate.
    let mut buffer = vec![0; 1 << 18];
    for (index, to) in wanted {
        let mut entry = zip.by_index(index).map_err(|e| unreadable(archive, e))?;
        let fail = |error: io::Error| Failure::io("could not write", &to, &error);
        if let Some(parent) = to.parent() {
            fs::create_dir_all(parent).map_err(fail)?;
        }
        let mut out = File::create(&to).map_err(fail)?;
        loop {
            let read = entry
                .read(&mut buffer)
                .map_err(|e| unreadable(archive, e))?;
            if read == 0 {
                break;
            }
            out.write_all(&buffer[..read]).map_err(fail)?;
            bar.inc(read as u64);
        }
    }
    bar.finish_and_clear();
    Ok(())
}

/// Returns the error of an archive that could not be read to its end. A damaged one is removed, because the next
/// run would take it for complete; one that the disk did not give out is kept.
fn unreadable(archive: &Path, error: impl Into<ZipError>) -> Failure {
    let reason = match error.into() {
        // Only errors of the system have a number; those of the decompression and the checksums have none.
        ZipError::Io(error) if error.raw_os_error().is_some() => {
            return Failure::io("could not read", archive, &error);
        }
        error => error.to_string(),
    };
    let _ = fs::remove_file(archive);
    Failure::new(format!(
        "{} is damaged ({reason}); it has been removed",
        archive.display()
    ))
    .remedy("Run the command again to fetch it again.")
}

/// Flushes everything under `folder` to the disk: a power failure after the rename must not leave a folder that
/// looks complete but is not.
pub(crate) fn sync(folder: &Path) -> Result<()> {
    let mut files = Vec::new();
    collect(folder, &mut files).map_err(|e| Failure::io("could not list", folder, &e))?;
    // There are thousands of headers; flushed one by one, each would wait for the disk.
    let threads = 8;
    let share = files.len().div_ceil(threads).max(1);
    std::thread::scope(|scope| {
        let workers: Vec<_> = files
            .chunks(share)
            .map(|files| {
                scope.spawn(move || {
                    files.iter().try_for_each(|path| {
                        File::open(path)
                            .and_then(|file| file.sync_all())
                            .map_err(|e| Failure::io("could not write", path, &e))
                    })
                })
            })
            .collect();
        workers.into_iter().try_for_each(|worker| {
            worker
                .join()
                .unwrap_or_else(|_| Err(Failure::new("a thread that wrote to disk failed")))
        })
    })
}

fn collect(folder: &Path, files: &mut Vec<PathBuf>) -> io::Result<()> {
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        if path.is_dir() {
            collect(&path, files)?;
        }
        // Folders are flushed too, because they hold the names of the files.
        files.push(path);
    }
    Ok(())
}

/// Moves the finished folder `made` to `target`. An existing target is first moved aside and removed afterwards;
/// programs that run with its libraries keep them.
pub(crate) fn publish(made: &Path, target: &Path) -> Result<()> {
    let aside = aside(target);
    if target.exists() {
        let _ = fs::remove_dir_all(&aside);
        fs::rename(target, &aside).map_err(|e| Failure::io("could not move aside", target, &e))?;
    }
    if let Err(error) = fs::rename(made, target) {
        // The old folder is better than none until the next run. It is not there for a new target.
        let _ = fs::rename(&aside, target);
        return Err(Failure::io("could not create", target, &error));
    }
    // The rename itself is durable only after the parent folder is flushed.
    if let Some(parent) = target.parent() {
        File::open(parent)
            .and_then(|folder| folder.sync_all())
            .map_err(|e| Failure::io("could not write", parent, &e))?;
    }
    let _ = fs::remove_dir_all(&aside);
    Ok(())
}

/// Removes the leftovers of killed runs beside `target`, and restores a target that was moved aside and not
/// replaced. The lock must be held. Returns the names that were removed.
pub(crate) fn sweep(target: &Path) -> Vec<String> {
    let aside = aside(target);
    if aside.exists() && !target.exists() {
        let _ = fs::rename(&aside, target);
    }
    let _ = fs::remove_dir_all(&aside);
    let Some(parent) = target.parent() else {
        return Vec::new();
    };
    remove_beginning_with(parent, &unfinished_prefix(target))
}

/// Removes the folders in `folder` whose names start with `start`. Returns their names.
pub(crate) fn remove_beginning_with(folder: &Path, start: &str) -> Vec<String> {
    let mut removed = Vec::new();
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        if name.starts_with(start) && fs::remove_dir_all(entry.path()).is_ok() {
            removed.push(name);
        }
    }
    removed
}

/// Returns the folder in which `target` is created: beside it, so that the rename stays on one disk.
pub(crate) fn unfinished(target: &Path) -> PathBuf {
    target.with_file_name(format!(
        "{}{}",
        unfinished_prefix(target),
        std::process::id()
    ))
}

fn unfinished_prefix(target: &Path) -> String {
    format!(".{}.unfinished-", name(target))
}

fn aside(target: &Path) -> PathBuf {
    target.with_file_name(format!(".{}.old", name(target)))
}

fn name(target: &Path) -> String {
    target
        .file_name()
        .unwrap_or_default()
        .to_string_lossy()
        .into_owned()
}

#[cfg(test)]
mod tests {
    use zip::ZipWriter;
    use zip::write::SimpleFileOptions;

    use super::*;

    fn archive(path: &Path) {
        // Stored, not deflated, so that the test finds a byte of the content in the file.
        let options =
            SimpleFileOptions::default().compression_method(zip::CompressionMethod::Stored);
        let mut zip = ZipWriter::new(File::create(path).unwrap());
        for (name, text) in [
            ("torch/lib/libc10.so", "LIBRARY"),
            ("torch/nn.py", "PYTHON"),
        ] {
            zip.start_file(name, options).unwrap();
            zip.write_all(text.as_bytes()).unwrap();
        }
        zip.finish().unwrap();
    }

    fn libraries(name: &str) -> Option<PathBuf> {
        name.ends_with(".so")
            .then(|| PathBuf::from("lib/libc10.so"))
    }

    #[test]
    fn only_what_is_wanted_is_unpacked() {
        let folder = tempfile::tempdir().unwrap();
        let zip = folder.path().join("a.whl");
        archive(&zip);
        let into = folder.path().join("into");
        unpack(&zip, &into, libraries).unwrap();
        assert_eq!(
            fs::read_to_string(into.join("lib/libc10.so")).unwrap(),
            "LIBRARY"
        );
        let mut files = Vec::new();
        collect(&into, &mut files).unwrap();
        assert_eq!(files.len(), 2, "lib and the file in it: {files:?}");
        sync(&into).unwrap();
    }

    #[test]
    fn a_flipped_byte_is_found_and_the_archive_removed() {
        let folder = tempfile::tempdir().unwrap();
        let zip = folder.path().join("a.whl");
        archive(&zip);
        let mut bytes = fs::read(&zip).unwrap();
        let at = bytes.windows(7).position(|w| w == b"LIBRARY").unwrap();
        bytes[at] ^= 1;
        fs::write(&zip, bytes).unwrap();
        let text = unpack(&zip, &folder.path().join("into"), libraries)
            .unwrap_err()
            .to_string();
        assert!(text.contains("damaged") && text.contains("again"), "{text}");
        assert!(!zip.exists());
    }

    #[test]
    fn a_folder_is_replaced_in_one_step_and_leftovers_of_killed_runs_go() {
        let folder = tempfile::tempdir().unwrap();
        let target = folder.path().join("2.11.0-cpu");
        let other = folder.path().join(".2.11.0-cuda13.unfinished-1");
        for left in [".2.11.0-cpu.unfinished-1", ".2.11.0-cpu.unfinished-22"] {
            fs::create_dir(folder.path().join(left)).unwrap();
        }
        fs::create_dir(&other).unwrap();
        assert_eq!(sweep(&target).len(), 2);
        assert!(other.exists(), "another variant's setup may be at work");

        for text in ["first", "second"] {
            let made = unfinished(&target);
            fs::create_dir(&made).unwrap();
            fs::write(made.join("file"), text).unwrap();
            publish(&made, &target).unwrap();
            assert_eq!(fs::read_to_string(target.join("file")).unwrap(), text);
        }
        assert_eq!(
            fs::read_dir(folder.path()).unwrap().count(),
            2,
            "target and the other's"
        );
    }

    #[test]
    fn a_run_killed_between_the_two_renamings_has_lost_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let target = folder.path().join("t");
        fs::create_dir(folder.path().join(".t.old")).unwrap();
        fs::write(folder.path().join(".t.old/file"), "kept").unwrap();
        sweep(&target);
        assert_eq!(fs::read_to_string(target.join("file")).unwrap(), "kept");
    }
}
