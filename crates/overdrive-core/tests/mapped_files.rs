//! Mapped files that are truncated while a program reads them. Each test starts a program of its own, which ends.
#![cfg(unix)]
#![allow(
    clippy::unwrap_used,
    reason = "tests and their helpers fail by panicking"
)]

use std::fs::{self, File};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use overdrive_core::files::{FileMap, MappedRegion};

const FOLDER: &str = "OVERDRIVE_TEST_MAPPED_FOLDER";

/// More than a page of any system.
const BYTES: usize = 256 << 10;

/// Runs the ignored test `name` in a process of its own.
fn run(name: &str, folder: &Path) -> Output {
    Command::new(std::env::current_exe().unwrap())
        .args(["--exact", name, "--ignored", "--nocapture"])
        .env(FOLDER, folder)
        .stdin(Stdio::null())
        .output()
        .unwrap()
}

fn folder() -> PathBuf {
    std::env::var_os(FOLDER).unwrap().into()
}

fn map(name: &str) -> FileMap {
    let path = folder().join(name);
    fs::write(&path, vec![7; BYTES]).unwrap();
    FileMap::open(path).unwrap()
}

fn truncate(name: &str) {
    let file = File::options().write(true).open(folder().join(name));
    file.unwrap().set_len(10).unwrap();
}

#[test]
#[ignore = "started by the test below, in a process of its own"]
fn reads_a_truncated_file() {
    // Its addresses may become those of the next file, which takes its place in the registry too.
    drop(map("a.bin"));
    let maps: Vec<FileMap> = ["b.bin", "c.bin", "d.bin"].into_iter().map(map).collect();
    truncate("c.bin");
    assert_eq!(
        (maps[1][0], maps[0][BYTES - 1], maps[2][BYTES - 1]),
        (7, 7, 7)
    );
    // On a thread, whose stack is not that of the program.
    let map = &maps[1];
    let sum = std::thread::scope(|scope| scope.spawn(|| map[BYTES - 1]).join());
    println!("read {sum:?}");
}

#[test]
fn a_truncated_file_ends_the_program_with_its_name_and_the_way_out() {
    let folder = tempfile::tempdir().unwrap();
    let output = run("reads_a_truncated_file", folder.path());
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    let path = folder.path().join("c.bin");
    let expected = format!(
        "error: {} was truncated, or its disk failed, while this program read it; restore the file and start the \
         program again\n",
        path.display()
    );
    assert_eq!(String::from_utf8_lossy(&output.stderr), expected);
}

#[test]
#[ignore = "started by the test below, in a process of its own"]
fn reads_a_truncated_file_of_a_map_that_others_made() {
    let map = map("state.bin");
    let start = map.as_ptr().addr();
    truncate("state.bin");
    // The newest entry counts.
    let _region = MappedRegion::new(start..start + BYTES, "error: the state is gone");
    println!("read {}", map[BYTES - 1]);
}

#[test]
fn a_map_that_others_made_has_a_line_of_its_own() {
    let folder = tempfile::tempdir().unwrap();
    let output = run(
        "reads_a_truncated_file_of_a_map_that_others_made",
        folder.path(),
    );
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(said, "error: the state is gone\n");
}

#[test]
#[ignore = "started by the test below, in a process of its own"]
fn gets_the_signal_from_another_process() {
    let _map = map("a.bin");
    let process = std::process::id().to_string();
    let sent = Command::new("kill").args(["-BUS", &process]).status();
    println!("sent {sent:?}");
    std::thread::sleep(std::time::Duration::from_secs(60));
}

#[test]
fn the_signal_of_another_process_ends_the_program_by_itself() {
    let folder = tempfile::tempdir().unwrap();
    let output = run("gets_the_signal_from_another_process", folder.path());
    assert!(output.status.signal().is_some(), "{output:?}");
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(!said.contains("truncated"), "{said}");
}

#[test]
fn a_folder_is_named_as_one() {
    let folder = tempfile::tempdir().unwrap();
    let error = overdrive_core::files::FileMap::open(folder.path()).unwrap_err();
    assert!(error.to_string().contains("is a directory"), "{error}");
}
