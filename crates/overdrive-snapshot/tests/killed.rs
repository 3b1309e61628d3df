//! Processes killed at any moment, disks that fill up. The other process is this test program, told by a
//! variable to be a writer.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod common;

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use common::{check, failures, litter, open, state, steps};

/// The number of elements: large enough that a kill often happens during the writing.
const ELEMENTS: i64 = 1 << 18;
const FOLDER: &str = "OVERDRIVE_SNAPSHOT_TEST_FOLDER";

fn folder() -> Option<PathBuf> {
    std::env::var_os(FOLDER).map(PathBuf::from)
}

/// Returns a command that runs only `test` of this program as a writer into `folder`.
fn again(test: &str, folder: &Path) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command
        .args(["--exact", test, "--ignored", "--nocapture"])
        .env(FOLDER, folder)
        .stdout(Stdio::null());
    command
}

/// The writer, which resumes from the newest snapshot until it is killed.
#[test]
#[ignore = "the other process of the tests here"]
fn writes_until_it_is_killed() {
    let Some(folder) = folder() else { return };
    let mut manager = open(&folder, Some(3), None);
    let newest = manager.latest().unwrap();
    if let Some(snapshot) = &newest {
        check(snapshot, ELEMENTS);
    }
    let begin = newest.map_or(0, |snapshot| snapshot.step());
    for step in begin + 1.. {
        manager.save(state(step, ELEMENTS)).unwrap();
        assert!(failures(manager.outcomes().unwrap()).is_empty());
    }
}

/// Returns whether a snapshot of a later step than `step` is there; rotation may have deleted the next one.
fn has_snapshot_after(folder: &Path, step: u64) -> bool {
    let entries = std::fs::read_dir(folder).unwrap().flatten();
    let names = entries.map(|entry| entry.file_name().to_string_lossy().into_owned());
    let steps = names.filter_map(|name| name.strip_prefix("checkpoint-")?.parse::<u64>().ok());
    steps.into_iter().any(|saved| saved > step)
}

#[test]
fn no_kill_damages_the_newest_complete_snapshot() {
    let dir = tempfile::tempdir().unwrap();
    let mut before = 0;
    let mut litters = 0;
    for kill in 0..20u64 {
        let mut child: Child = again("writes_until_it_is_killed", dir.path())
            .spawn()
            .unwrap();
        // Not before it has begun, and then at moments that spread over a save.
        let begun = std::time::Instant::now();
        while !has_snapshot_after(dir.path(), before) {
            assert!(
                begun.elapsed() < Duration::from_secs(60),
                "the writer writes nothing"
            );
            assert!(
                child.try_wait().unwrap().is_none(),
                "the writer ended by itself"
            );
            std::thread::sleep(Duration::from_millis(1));
        }
        std::thread::sleep(Duration::from_micros(kill * 1_370 % 9_000));
        child.kill().unwrap();
        child.wait().unwrap();
        litters += usize::from(!litter(dir.path()).is_empty());

        let manager = open(dir.path(), Some(3), None);
        let newest = manager.latest().unwrap().unwrap();
        check(&newest, ELEMENTS);
        assert!(newest.step() > before, "{} after {before}", newest.step());
        before = newest.step();
        assert!(litter(dir.path()).is_empty());
    }
    // A writer that is killed before its first rotation leaves one snapshot more, and on a busy machine several
    // are; the rotation of the next save removes all of them.
    let mut manager = open(dir.path(), Some(3), None);
    manager.save(state(before + 1, ELEMENTS)).unwrap();
    assert!(failures(manager.wait().unwrap()).is_empty());
    assert_eq!(steps(&manager), [before + 1, before, before - 1]);
    // Otherwise the kills were all harmless, and this test shows nothing.
    assert!(litters > 0, "no kill fell into a save");
}

/// The writer on a full disk: the first snapshots fit, the next does not, and training continues.
#[test]
#[ignore = "the other process of the tests here"]
fn writes_where_there_is_no_room() {
    let Some(folder) = folder() else { return };
    let mut manager = open(&folder, None, None);
    manager.save(state(1, 1 << 10)).unwrap();
    assert!(failures(manager.wait().unwrap()).is_empty());
    manager.save(state(2, 1 << 22)).unwrap();
    let failed = failures(manager.wait().unwrap());
    assert_eq!(failed.len(), 1);
    let message = failed[0].to_string();
    assert!(
        message.contains("cannot write") && message.contains("model.safetensors"),
        "{message}"
    );
    assert_eq!(litter(&folder).len(), 0, "nothing is left of it");
    check(&manager.latest().unwrap().unwrap(), 1 << 10);
    assert_eq!(steps(&manager), [1]);
    manager.save(state(3, 1 << 10)).unwrap();
    assert!(failures(manager.wait().unwrap()).is_empty());
    assert_eq!(steps(&manager), [3, 1]);
}

/// Runs the writer behind a shell that takes the room away.
#[cfg(unix)]
fn through_shell(script: &str, folder: &Path) -> std::process::Output {
    let test = again("writes_where_there_is_no_room", folder);
    let mut shell = Command::new("sh");
    shell
        .arg("-c")
        .arg(script)
        .arg("sh")
        .arg(test.get_program());
    shell.args(test.get_args()).env(FOLDER, folder);
    shell.output().unwrap()
}

#[test]
#[cfg(unix)]
fn a_file_that_cannot_grow_is_an_outcome_and_training_goes_on() {
    let dir = tempfile::tempdir().unwrap();
    // 4 MiB a file; the signal that would end the process is ignored, so that writing fails.
    let output = through_shell("trap '' XFSZ; ulimit -f 8192; exec \"$@\"", dir.path());
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stdout)
    );
    assert!(String::from_utf8_lossy(&output.stdout).contains("1 passed"));
}

#[test]
#[cfg(target_os = "linux")]
fn a_full_disk_is_an_outcome_and_training_goes_on() {
    let dir = tempfile::tempdir().unwrap();
    // A small file system of its own, where the system lets a user make one.
    let mount = "mount -t tmpfs -o size=6m tmpfs \"$OVERDRIVE_SNAPSHOT_TEST_FOLDER\" || exit 77; exec \"$@\"";
    let script = format!("exec unshare --user --map-root-user --mount sh -c '{mount}' sh \"$@\"");
    let probe = Command::new("unshare")
        .args([
            "--user",
            "--map-root-user",
            "--mount",
            "mount",
            "-t",
            "tmpfs",
            "tmpfs",
        ])
        .arg(dir.path())
        .output();
    if !probe.is_ok_and(|probe| probe.status.success()) {
        eprintln!("not run: this system lets no user mount a file system");
        return;
    }
    let output = through_shell(&script, dir.path());
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stdout)
    );
    assert!(String::from_utf8_lossy(&output.stdout).contains("1 passed"));
}
