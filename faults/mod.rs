//! Fault injection for tests: every system call of an operation fails in turn.
//!
//! A test file includes this one by `#[path]`. [`under_injection`] starts the test program again with the library
//! `inject.c` preloaded; there [`Faults::every_call`] repeats an operation and lets its first, second, … call on a
//! path below [`Faults::folder`] fail, until the operation ends without a failed call. Coverage is therefore
//! complete for what the operation does, and the same at every run.
//!
//! It needs Linux with glibc and a C compiler, which the workspace needs anyway.
#![allow(
    dead_code,
    clippy::unwrap_used,
    reason = "each test program uses its part, and a test may panic"
)]

use std::fs::{File, OpenOptions};
use std::os::unix::fs::FileExt;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::Command;

const CONTROL: &str = "OVERDRIVE_FAULTS";
const FOLDER: &str = "OVERDRIVE_FAULTS_FOLDER";
const SOURCE: &str = include_str!("inject.c");

/// The size of the control file: four words and a name.
const CONTROL_BYTES: usize = 4 * 8 + 32;
/// The largest number of calls of one operation; more is an operation that repeats itself without end.
const MOST_CALLS: u64 = 20_000;

/// The fault of a call. The numbers are those of `inject.c`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u64)]
pub(crate) enum Fault {
    /// The call fails with EIO.
    Error = 1,
    /// The disk is full from this call on: half of it is written, and everything later fails with ENOSPC.
    FullDisk = 2,
    /// The call reads or writes half of what it could, which is no error.
    Short = 3,
}

impl Fault {
    pub(crate) const ALL: [Fault; 3] = [Fault::Error, Fault::FullDisk, Fault::Short];
}

/// The control of the preloaded library.
#[derive(Debug)]
pub(crate) struct Faults {
    control: File,
    folder: PathBuf,
}

/// Runs `body` in a process of its own under the library. `test` is the full name of the calling test, which is
/// the only one that runs there.
pub(crate) fn under_injection(test: &str, body: impl FnOnce(&Faults)) {
    if let (Some(control), Some(folder)) = (std::env::var_os(CONTROL), std::env::var_os(FOLDER)) {
        let control = OpenOptions::new().read(true).write(true).open(control);
        let faults = Faults {
            control: control.unwrap(),
            folder: folder.into(),
        };
        return body(&faults);
    }
    let own = tempfile::tempdir().unwrap();
    let below = scratch();
    // Paths are compared, so the name of the folder must have no links.
    let folder = below.path().canonicalize().unwrap();
    let library = compile(own.path());
    let mut command = preloaded(test, &library, words([0; 4]), &folder);
    let output = command.output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(
        output.status.success(),
        "{}\n{text}\n{errors}",
        output.status
    );
    assert!(
        text.contains("1 passed"),
        "{test} is not the name of this test:\n{text}"
    );
    print!("{text}");
}

/// Kills a process at its first call on a path below a folder, the next one at its second, and so on, until a process
/// runs to its end. Each process runs `body` of the test, with a folder that `prepare` has filled; `check` gets that
/// folder, and `true` if the process ran to its end. Returns the number of calls.
pub(crate) fn killed_at_every_call(
    test: &str,
    body: impl FnOnce(&Path),
    prepare: impl Fn(&Path),
    check: impl Fn(&Path, bool),
) -> u64 {
    if let Some(folder) = std::env::var_os(FOLDER) {
        body(Path::new(&folder));
        return 0;
    }
    let own = tempfile::tempdir().unwrap();
    let library = compile(own.path());
    for number in 1..MOST_CALLS {
        let case = scratch();
        let folder = case.path().canonicalize().unwrap();
        prepare(&folder);
        let control = words([number, KILLED, 0, 0]);
        let mut command = preloaded(test, &library, control, &folder);
        let output = command.output().unwrap();
        let ended = output.status.success();
        if !ended {
            let killed = output.status.signal() == Some(9);
            assert!(killed, "{}", String::from_utf8_lossy(&output.stdout));
        }
        check(&folder, ended);
        if ended {
            println!("killed at each of {} calls", number - 1);
            return number - 1;
        }
    }
    panic!("the process makes more than {MOST_CALLS} calls");
}

const KILLED: u64 = 4;

fn words(words: [u64; 4]) -> Vec<u8> {
    let mut bytes: Vec<u8> = words.iter().flat_map(|word| word.to_ne_bytes()).collect();
    bytes.resize(CONTROL_BYTES, 0);
    bytes
}

/// Returns the command that runs `test` of this program under the library. Calls on paths below `folder` are counted,
/// where the user's cache is, too.
fn preloaded(test: &str, library: &Path, control: Vec<u8>, folder: &Path) -> Command {
    let file = library.with_extension("control");
    std::fs::write(&file, control).unwrap();
    let mut command = Command::new(std::env::current_exe().unwrap());
    command
        .args(["--exact", test, "--include-ignored"])
        .args(["--nocapture", "--test-threads=1"])
        .env("LD_PRELOAD", library)
        .env(CONTROL, file)
        .env(FOLDER, folder)
        .env("XDG_CACHE_HOME", folder.join("cache"));
    command
}

/// Returns a new folder, in memory where that is possible: thousands of small files are written and removed there.
fn scratch() -> tempfile::TempDir {
    tempfile::tempdir_in("/dev/shm")
        .or_else(|_| tempfile::tempdir())
        .unwrap()
}

fn compile(into: &Path) -> PathBuf {
    let source = into.join("inject.c");
    let library = into.join("inject.so");
    std::fs::write(&source, SOURCE).unwrap();
    let compiler = std::env::var_os("CC").unwrap_or_else(|| "cc".into());
    let output = Command::new(&compiler)
        .args(["-std=gnu11", "-O1", "-Wall", "-shared", "-fPIC", "-o"])
        .args([&library, &source])
        .arg("-ldl")
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{compiler:?}: {said}");
    library
}

/// One run of an operation with a fault.
#[derive(Debug)]
pub(crate) struct Case {
    /// An empty folder of this case, below the folder of the faults.
    pub(crate) folder: PathBuf,
    pub(crate) fault: Fault,
    /// The number of the call that is to fail.
    pub(crate) number: u64,
}

impl Faults {
    /// Returns the folder; only calls on paths below it are counted.
    pub(crate) fn folder(&self) -> &Path {
        &self.folder
    }

    /// Runs `case` for the first call, the second, and so on, until [`Faults::during`] in it met no such call.
    /// Returns the number of calls.
    pub(crate) fn every_call(&self, fault: Fault, mut case: impl FnMut(&Case)) -> u64 {
        for number in 1..MOST_CALLS {
            let folder = self.folder.join(format!("{fault:?}-{number}"));
            std::fs::create_dir(&folder).unwrap();
            let this = Case {
                folder,
                fault,
                number,
            };
            case(&this);
            std::fs::remove_dir_all(&this.folder).unwrap();
            if self.words()[3] == 0 {
                println!("{fault:?}: {} calls failed in turn", number - 1);
                return number - 1;
            }
        }
        panic!("{fault:?}: the operation makes more than {MOST_CALLS} calls");
    }

    /// Runs the operation of `case` with its fault. Returns the result, and the name of the call that failed.
    pub(crate) fn during<T>(
        &self,
        case: &Case,
        operation: impl FnOnce() -> T,
    ) -> (T, Option<String>) {
        let bytes = words([case.number, case.fault as u64, 0, 0]);
        self.control.write_all_at(&bytes, 0).unwrap();
        let result = operation();
        self.control.write_all_at(&[0; 8], 0).unwrap();
        let fired = self.words()[3] > 0;
        (result, fired.then(|| self.call()))
    }

    fn words(&self) -> [u64; 4] {
        let mut bytes = [0; 32];
        self.control.read_exact_at(&mut bytes, 0).unwrap();
        std::array::from_fn(|word| {
            u64::from_ne_bytes(std::array::from_fn(|byte| bytes[8 * word + byte]))
        })
    }

    fn call(&self) -> String {
        let mut name = [0; 32];
        self.control.read_exact_at(&mut name, 32).unwrap();
        let name = name.into_iter().take_while(|&byte| byte != 0).collect();
        String::from_utf8(name).unwrap()
    }
}

/// Returns the files of a folder and its folders, by their paths in it, with their bytes. What `without` names is
/// left out.
pub(crate) fn contents(folder: &Path, without: &[&str]) -> Vec<(PathBuf, Vec<u8>)> {
    let mut found = Vec::new();
    let mut open = vec![folder.to_owned()];
    while let Some(next) = open.pop() {
        for entry in std::fs::read_dir(next).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                open.push(path);
            } else if !without
                .iter()
                .any(|end| path.to_string_lossy().ends_with(end))
            {
                let name = path.strip_prefix(folder).unwrap().to_owned();
                found.push((name, std::fs::read(&path).unwrap()));
            }
        }
    }
    found.sort();
    found
}
