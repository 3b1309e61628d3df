//! Several processes that need one index at once.
#![allow(
    clippy::unwrap_used,
    reason = "tests and their helpers fail by panicking"
)]

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use overdrive_datasets::{Dataset, IndexLocation, IndexOptions, TextLines, TextOptions};

const FOLDER: &str = "OVERDRIVE_TEST_INDEX_FOLDER";
const LINES: usize = 400_000;

fn open(folder: &Path) -> TextLines {
    let options = TextOptions {
        index: IndexOptions {
            location: IndexLocation::Folder(folder.join("indexes")),
            ..IndexOptions::default()
        },
        ..TextOptions::default()
    };
    TextLines::open([folder.join("data.txt")], &options).unwrap()
}

#[test]
#[ignore = "started by the other test, in a process of its own"]
fn child() {
    let folder = PathBuf::from(std::env::var_os(FOLDER).unwrap());
    std::fs::write(folder.join(format!("ready-{}", std::process::id())), "").unwrap();
    let waiting = Instant::now();
    while !folder.join("go").exists() {
        assert!(waiting.elapsed() < Duration::from_secs(60));
        std::thread::yield_now();
    }
    let lines = open(&folder);
    assert_eq!(lines.len(), LINES);
    for line in (0..LINES).step_by(997) {
        assert_eq!(lines.get(line).unwrap(), format!("line {line} of the data"));
    }
    println!("built {}", lines.records().report().built_bytes > 0);
}

#[test]
fn processes_that_build_one_index_at_once_all_succeed_and_leave_one_index() {
    for damaged in [false, true] {
        let dir = tempfile::tempdir().unwrap();
        let data: String = (0..LINES)
            .map(|line| format!("line {line} of the data\n"))
            .collect();
        std::fs::write(dir.path().join("data.txt"), data).unwrap();
        let indexes = dir.path().join("indexes");
        if damaged {
            // An index that is cut short, and what a killed build left.
            open(dir.path());
            let index = only(&indexes, ".ovidx");
            let bytes = std::fs::read(&index).unwrap();
            std::fs::write(&index, &bytes[..bytes.len() / 2]).unwrap();
        }
        let children: Vec<_> = (0..6)
            .map(|_| {
                Command::new(std::env::current_exe().unwrap())
                    .args(["--exact", "child", "--ignored", "--nocapture"])
                    .env(FOLDER, dir.path())
                    .stdout(Stdio::piped())
                    .spawn()
                    .unwrap()
            })
            .collect();
        let waiting = Instant::now();
        let ready = || {
            std::fs::read_dir(dir.path())
                .unwrap()
                .filter(|entry| {
                    entry
                        .as_ref()
                        .unwrap()
                        .file_name()
                        .to_string_lossy()
                        .starts_with("ready-")
                })
                .count()
        };
        while ready() < children.len() {
            assert!(waiting.elapsed() < Duration::from_secs(60));
            std::thread::sleep(Duration::from_millis(1));
        }
        std::fs::write(dir.path().join("go"), "").unwrap();
        let mut built = 0;
        for child in children {
            let output = child.wait_with_output().unwrap();
            let text = String::from_utf8_lossy(&output.stdout).into_owned();
            assert!(output.status.success(), "{text}");
            built += usize::from(text.contains("built true"));
        }
        // Where the file system has locks, one builds and the others wait for it.
        assert_eq!(built, 1);
        // The index and its lock, and no file under another name.
        only(&indexes, ".ovidx");
        only(&indexes, ".lock");
        assert_eq!(std::fs::read_dir(&indexes).unwrap().count(), 2);
        // It is the one that a single process builds.
        let index = std::fs::read(only(&indexes, ".ovidx")).unwrap();
        std::fs::remove_dir_all(&indexes).unwrap();
        open(dir.path());
        assert!(std::fs::read(only(&indexes, ".ovidx")).unwrap() == index);
    }
}

/// Returns the only file of the folder whose name has this end.
fn only(folder: &Path, end: &str) -> PathBuf {
    let entries = std::fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap().path());
    let found: Vec<_> = entries
        .filter(|path| path.to_string_lossy().ends_with(end))
        .collect();
    assert_eq!(found.len(), 1, "{found:?}");
    found[0].clone()
}
