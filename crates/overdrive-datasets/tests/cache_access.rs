//! Caches that other processes and other users hold. Processes of their own, since one is stopped and one has other
//! rights.
#![cfg(target_os = "linux")]
#![allow(
    clippy::unwrap_used,
    reason = "tests and their helpers fail by panicking"
)]

mod common;

use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use common::{corpus, tokenizer, write_files};
use overdrive_core::files::FileLock;
use overdrive_datasets::{BuildOptions, BuiltTokens, Result, build_tokens};
use tracing::field::{Field, Visit};
use tracing::span;

const FOLDER: &str = "OVERDRIVE_TEST_CACHE_FOLDER";

fn build(folder: &Path) -> Result<BuiltTokens> {
    let options = BuildOptions {
        progress: false,
        ..BuildOptions::default()
    };
    build_tokens(
        &corpus(folder.join("data")),
        &tokenizer(),
        &options,
        folder.join("cache"),
    )
}

/// Returns a folder with text that everyone may read.
fn folder() -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    write_files(dir.path(), &[("data/a.txt", "some words of text\n")]);
    for path in [dir.path().to_owned(), dir.path().join("data")] {
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o755)).unwrap();
    }
    dir
}

/// Starts a test of this program in a process of its own.
fn start(test: &str, folder: &Path) -> Child {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command
        .args(["--exact", test, "--ignored", "--nocapture"])
        .env(FOLDER, folder)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    command.spawn().unwrap()
}

fn given() -> PathBuf {
    PathBuf::from(std::env::var_os(FOLDER).unwrap())
}

#[test]
#[ignore = "started by another test, in a process of its own"]
fn hold_the_lock() {
    let folder = given();
    let lock = std::fs::read_to_string(folder.join("lock")).unwrap();
    let _held = FileLock::try_acquire(lock).unwrap().unwrap();
    std::fs::write(folder.join("ready"), "").unwrap();
    std::thread::sleep(Duration::from_secs(120));
}

#[test]
#[ignore = "started by another test, in a process of its own"]
fn build_in_the_folder_of_another() {
    // For root there are no other users' files. libtorch may lie in root's folder, so it is loaded before.
    if rustix::process::getuid().is_root() {
        rustix::thread::set_thread_uid(rustix::process::Uid::from_raw(65_534)).unwrap();
    }
    match build(&given()) {
        Ok(built) => println!("built {}", built.was_cached()),
        Err(error) => println!("error: {error}"),
    }
}

/// The warnings of this thread.
#[derive(Clone, Default)]
struct Warnings(Arc<Mutex<String>>);

impl Visit for Warnings {
    fn record_debug(&mut self, _: &Field, value: &dyn std::fmt::Debug) {
        *self.0.lock().unwrap() += &format!("{value:?}\n");
    }
}

impl tracing::Subscriber for Warnings {
    fn enabled(&self, metadata: &tracing::Metadata<'_>) -> bool {
        *metadata.level() <= tracing::Level::WARN
    }
    fn new_span(&self, _: &span::Attributes<'_>) -> span::Id {
        span::Id::from_u64(1)
    }
    fn record(&self, _: &span::Id, _: &span::Record<'_>) {}
    fn record_follows_from(&self, _: &span::Id, _: &span::Id) {}
    fn event(&self, event: &tracing::Event<'_>) {
        event.record(&mut self.clone());
    }
    fn enter(&self, _: &span::Id) {}
    fn exit(&self, _: &span::Id) {}
}

#[test]
fn a_build_that_waits_for_a_stopped_process_says_so_and_how_to_resume_it() {
    use rustix::process::{Pid, Signal, kill_process};
    let dir = folder();
    let store = build(dir.path()).unwrap().store.path().to_owned();
    std::fs::remove_file(&store).unwrap();
    let lock = store.with_extension("lock");
    std::fs::write(dir.path().join("lock"), lock.to_str().unwrap()).unwrap();
    let mut holder = start("hold_the_lock", dir.path());
    let started = Instant::now();
    while !dir.path().join("ready").exists() {
        assert!(started.elapsed() < Duration::from_secs(60));
        std::thread::sleep(Duration::from_millis(1));
    }
    kill_process(Pid::from_child(&holder), Signal::STOP).unwrap();
    let warnings = Warnings::default();
    let built = std::thread::scope(|scope| {
        let waiting = scope.spawn(|| {
            tracing::subscriber::with_default(warnings.clone(), || build(dir.path()).unwrap())
        });
        let started = Instant::now();
        while warnings.0.lock().unwrap().is_empty() {
            assert!(
                started.elapsed() < Duration::from_secs(60),
                "it waits without a word"
            );
            std::thread::sleep(Duration::from_millis(1));
        }
        assert!(!waiting.is_finished());
        // The remedy that it names.
        kill_process(Pid::from_child(&holder), Signal::KILL).unwrap();
        waiting.join().unwrap()
    });
    holder.wait().unwrap();
    assert!(!built.was_cached());
    let said = warnings.0.lock().unwrap().clone();
    let process = holder.id();
    for part in [
        format!("process {process} has been building "),
        format!("`kill -CONT {process}` resumes it"),
        lock.display().to_string(),
    ] {
        assert!(said.contains(&part), "{said}");
    }
}

#[test]
fn a_cache_of_another_user_is_read_and_one_that_cannot_be_written_is_named_with_the_way_out() {
    let said = |folder: &Path| {
        let child = start("build_in_the_folder_of_another", folder);
        let output = child.wait_with_output().unwrap();
        String::from_utf8(output.stdout).unwrap()
    };
    let dir = folder();
    let cache = dir.path().join("cache");
    let store = build(dir.path()).unwrap().store.path().to_owned();
    let read_only = |path: &Path| {
        let mode = if path.is_dir() { 0o555 } else { 0o444 };
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
    };
    read_only(&store);
    read_only(&store.with_extension("lock"));
    read_only(&cache);
    let found = said(dir.path());
    assert!(found.contains("built true"), "{found}");

    std::fs::set_permissions(&cache, std::fs::Permissions::from_mode(0o755)).unwrap();
    std::fs::remove_file(&store).unwrap();
    read_only(&cache);
    let found = said(dir.path());
    for part in [
        format!("error: the cache folder {} cannot be used", cache.display()),
        "set `XDG_CACHE_HOME` to a folder of your own".to_owned(),
    ] {
        assert!(found.contains(&part), "{found}");
    }
    std::fs::set_permissions(&cache, std::fs::Permissions::from_mode(0o755)).unwrap();
}
