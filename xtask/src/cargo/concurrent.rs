//! The tests of the workspace, several programs at a time: many of them wait, for processes, timeouts and single threads.

use std::collections::VecDeque;
use std::process::{Command, Output, Stdio};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::Instant;

use super::checks::WAIT_POLICY;
use super::{Artifact, Cargo, artifacts, prepare};
use crate::failure::{Failure, Result};

/// The largest number of programs at a time. Each has a thread for every core.
const MOST: usize = 4;

/// A unit of work, which runs beside others.
#[derive(Debug)]
enum Job {
    /// Commands one after the other.
    Commands(Vec<Cargo>),
    /// A test program.
    Program(Artifact),
}

/// The output of a job and its end.
struct Done {
    name: String,
    text: String,
    succeeded: bool,
}

/// The numbers of tests in libtest's lines "test result: …".
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
struct Counts {
    passed: u64,
    failed: u64,
    ignored: u64,
}

/// Builds all test programs and the examples that some of them start, and runs the programs, the documentation tests and the
/// `beside` commands, several at a time. What one prints is shown when it has ended. All of them run, also if some fail.
pub(crate) fn test_all(beside: Vec<Cargo>) -> Result<()> {
    super::checks::examples_of_tests().run()?;
    let built = super::checks::test_programs().output()?;
    let documentation = beside
        .into_iter()
        .chain([super::checks::documentation_tests()]);
    // The commands take longest, so they begin first.
    let jobs = std::iter::once(Job::Commands(documentation.collect()));
    let programs = artifacts(&built).into_iter();
    let programs: Vec<Artifact> = programs.filter(|program| program.is_test).collect();
    if programs.is_empty() {
        return Err(Failure::new("cargo built no test program"));
    }
    run(jobs.chain(programs.into_iter().map(Job::Program)).collect())
}

fn run(jobs: VecDeque<Job>) -> Result<()> {
    // One more than there are cores: a program whose tests wait for a lost peer or a client leaves its core idle.
    let cores = thread::available_parallelism().map_or(1, usize::from);
    let at_once = (cores + 1).min(MOST);
    let jobs = Mutex::new(jobs);
    let done: Mutex<Vec<Done>> = Mutex::default();
    let work = || {
        loop {
            // Not in the condition of a `while`, which would keep the lock.
            let next = locked(&jobs).pop_front();
            let Some(job) = next else { break };
            let one = job.run();
            let mut done = locked(&done);
            eprint!("{}", one.text);
            done.push(one);
        }
    };
    thread::scope(|scope| {
        for _ in 0..at_once {
            scope.spawn(work);
        }
    });
    let done = done.into_inner().unwrap_or_else(PoisonError::into_inner);
    let counts = done.iter().map(|one| Counts::of(&one.text));
    let Counts {
        passed,
        failed,
        ignored,
    } = counts.fold(Counts::default(), Counts::and);
    eprintln!("\ntests: {passed} passed, {failed} failed, {ignored} ignored");
    let failures: Vec<&str> = done
        .iter()
        .filter(|one| !one.succeeded)
        .map(|one| one.name.as_str())
        .collect();
    match failures.is_empty() {
        true => Ok(()),
        false => Err(Failure::new(format!("failed: {}", failures.join(", ")))),
    }
}

fn locked<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Job {
    fn run(self) -> Done {
        match self {
            Job::Commands(commands) => {
                let mut all = Done {
                    name: String::new(),
                    text: String::new(),
                    succeeded: true,
                };
                for cargo in commands {
                    let one = finished(&cargo.line(), &mut cargo.command());
                    all.text += &one.text;
                    if !one.succeeded {
                        all.succeeded = false;
                        all.name = one.name;
                    }
                }
                all
            }
            Job::Program(program) => finished(&name_of(&program), &mut command_of(&program)),
        }
    }
}

/// Runs a command to its end.
fn finished(name: &str, command: &mut Command) -> Done {
    // Shown at once, so that a log names a program that hangs.
    eprintln!("     Running {name}");
    let begun = Instant::now();
    let (text, succeeded) = match command.stdin(Stdio::null()).output() {
        Err(error) => (format!("could not start: {error}\n"), false),
        Ok(Output {
            status,
            stdout,
            stderr,
        }) => {
            let text = [stderr, stdout].map(|text| String::from_utf8_lossy(&text).into_owned());
            let end = match status.success() {
                true => String::new(),
                false => format!("{status}\n"),
            };
            (text.concat() + &end, status.success())
        }
    };
    let seconds = begun.elapsed().as_secs_f64();
    Done {
        name: name.to_owned(),
        text: format!("\n     Ended {name} after {seconds:.1} s\n{text}"),
        succeeded,
    }
}

/// Returns the package and the source file of a test program.
fn name_of(program: &Artifact) -> String {
    let (folder, source) = (&program.folder, &program.source);
    let package = folder.file_name().unwrap_or_default().to_string_lossy();
    let source = source.strip_prefix(folder).unwrap_or(source);
    format!("{package} {}", source.display())
}

/// Returns the command with the folder and the variables that Cargo gives to a test program.
fn command_of(program: &Artifact) -> Command {
    let mut command = Command::new(&program.executable);
    prepare(&mut command);
    let (name, value) = WAIT_POLICY;
    if std::env::var_os(name).is_none() {
        command.env(name, value);
    }
    command.current_dir(&program.folder);
    command.env("CARGO_MANIFEST_DIR", &program.folder);
    command
}

impl Counts {
    fn of(text: &str) -> Counts {
        let lines = text
            .lines()
            .filter_map(|line| line.strip_prefix("test result: "));
        let count = |line: &str, of: &str| {
            let part = line.split([';', '.']).find(|part| part.ends_with(of));
            let number = part.and_then(|part| part.split_whitespace().next());
            number.and_then(|number| number.parse().ok()).unwrap_or(0)
        };
        let counts = lines.map(|line| Counts {
            passed: count(line, " passed"),
            failed: count(line, " failed"),
            ignored: count(line, " ignored"),
        });
        counts.fold(Counts::default(), Counts::and)
    }

    fn and(self, other: Counts) -> Counts {
        Counts {
            passed: self.passed + other.passed,
            failed: self.failed + other.failed,
            ignored: self.ignored + other.ignored,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_lines_of_libtest_are_added() {
        let text = "running 3 tests\ntest result: ok. 12 passed; 0 failed; 3 ignored; 0 measured; 0 filtered out; \
                    finished in 0.75s\nno result\ntest result: FAILED. 1 passed; 2 failed; 0 ignored; 0 measured\n";
        let expected = Counts {
            passed: 13,
            failed: 2,
            ignored: 3,
        };
        assert_eq!(Counts::of(text), expected);
    }

    #[test]
    fn a_test_program_is_named_after_its_package_and_its_source() {
        let program = Artifact {
            executable: "/t/it-1".into(),
            folder: "/w/crates/one".into(),
            source: "/w/crates/one/tests/it/main.rs".into(),
            kinds: Vec::new(),
            is_test: true,
        };
        assert_eq!(name_of(&program), "one tests/it/main.rs");
    }

    #[test]
    fn a_command_that_fails_or_does_not_start_is_a_failure() {
        let failed = finished(
            "a",
            Command::new("sh").args(["-c", "echo out; echo err >&2; exit 3"]),
        );
        assert!(!failed.succeeded);
        for part in ["Ended a", "out\n", "err\n", "exit status: 3"] {
            assert!(failed.text.contains(part), "{}", failed.text);
        }
        let none = finished("b", &mut Command::new("/no/such/program"));
        assert!(!none.succeeded && none.text.contains("could not start"));
        assert!(finished("c", &mut Command::new("true")).succeeded);
    }
}
