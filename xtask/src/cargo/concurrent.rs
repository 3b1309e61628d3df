//! The tests of the workspace, several programs at a time: many of them wait, for processes, timeouts and single threads.

use std::collections::VecDeque;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::Instant;

use serde_json::Value;

use super::checks::WAIT_POLICY;
use super::{Cargo, prepare};
use crate::failure::{Failure, Result};

/// The largest number of programs at a time. Each has a thread for every core.
const MOST: usize = 4;

/// A unit of work, which runs beside others.
#[derive(Debug)]
enum Job {
    /// Commands one after the other.
    Commands(Vec<Cargo>),
    /// A test program.
    Program(TestProgram),
}

/// A test program that Cargo has built.
#[derive(Debug, Clone, PartialEq, Eq)]
struct TestProgram {
    /// The package and the source file.
    name: String,
    /// The folder of the package.
    folder: PathBuf,
    built: PathBuf,
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
    let programs: Vec<TestProgram> = built.lines().filter_map(TestProgram::of_message).collect();
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
            Job::Program(program) => finished(&program.name, &mut program.command()),
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

impl TestProgram {
    fn of_message(line: &str) -> Option<TestProgram> {
        let message: Value = serde_json::from_str(line).ok()?;
        let is_test = message["profile"]["test"].as_bool()?;
        let (manifest, source) = (
            message["manifest_path"].as_str()?,
            &message["target"]["src_path"],
        );
        let folder = Path::new(manifest).parent()?;
        let source = Path::new(source.as_str()?);
        let source = source.strip_prefix(folder).unwrap_or(source);
        let package = folder.file_name()?.to_string_lossy();
        Some(TestProgram {
            name: format!("{package} {}", source.display()),
            folder: folder.to_path_buf(),
            built: PathBuf::from(message["executable"].as_str()?),
        })
        .filter(|_| is_test)
    }

    /// Returns the command with the folder and the variables that Cargo gives to a test program.
    fn command(&self) -> Command {
        let mut command = Command::new(&self.built);
        prepare(&mut command);
        let (name, value) = WAIT_POLICY;
        if std::env::var_os(name).is_none() {
            command.env(name, value);
        }
        command.current_dir(&self.folder);
        command.env("CARGO_MANIFEST_DIR", &self.folder);
        command
    }
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
    fn test_programs_are_found_in_cargos_messages() {
        let message = |test: bool, executable: &str| {
            format!(
                r#"{{"reason":"compiler-artifact","manifest_path":"/w/crates/one/Cargo.toml","target":{{"src_path":"/w/crates/one/tests/it/main.rs"}},"profile":{{"test":{test}}},"executable":{executable}}}"#
            )
        };
        let found = TestProgram::of_message(&message(true, r#""/t/it-1""#)).unwrap();
        assert_eq!(found.name, "one tests/it/main.rs");
        assert_eq!(found.folder, Path::new("/w/crates/one"));
        assert_eq!(found.built, Path::new("/t/it-1"));
        assert_eq!(
            TestProgram::of_message(&message(false, r#""/t/it-1""#)),
            None
        );
        assert_eq!(TestProgram::of_message(&message(true, "null")), None);
        assert_eq!(TestProgram::of_message("{}"), None);
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
