//! Runs each section in its own process.

use std::collections::VecDeque;
use std::io::{BufRead as _, BufReader, Read};
use std::os::unix::process::{CommandExt as _, ExitStatusExt as _};
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use overdrive::core::print_line;
use overdrive::sys::process::terminate_with_parent;
use rustix::process::{Pid, Signal, kill_process_group};

use crate::finding::{Check, Finding, NO_TIME, Outcome};
use crate::line::Line;
use crate::report::{KernelUse, Report, SectionReport, value_text};
use crate::sections::{GRACE, Section, Target, share};

/// The minimum time left in which a section is started.
const LEAST: Duration = Duration::from_secs(5);
/// The number of ended processes after which a section is abandoned.
const MOST_PROCESSES: usize = 8;
/// The report is written at most this often within a section.
const WRITE_EVERY: Duration = Duration::from_secs(1);

/// The options of a run.
#[derive(Debug)]
pub(crate) struct Options {
    /// The device.
    pub(crate) target: Target,
    /// The sections in the order in which they run.
    pub(crate) sections: Vec<&'static Section>,
    /// The file of the report.
    pub(crate) report: PathBuf,
    /// The time for all sections together.
    pub(crate) budget: Duration,
    /// If `true`, a skip is a failure unless it is allowed.
    pub(crate) is_gpu_required: bool,
}

/// Runs the sections, prints a line for each check, and keeps the report up to date.
pub(crate) fn run(options: &Options) -> Result<Report> {
    let commit = std::env::var("OVERDRIVE_COMMIT").ok();
    let mut report = Report::new(options.target.name(), commit);
    let began = Instant::now();
    // Before anything is measured, so that a path that cannot be written is an error at once.
    report.write(&options.report)?;
    for (index, section) in options.sections.iter().enumerate() {
        let left = options.budget.saturating_sub(began.elapsed());
        let section_began = Instant::now();
        let mut written = Instant::now();
        report.sections.push(SectionReport {
            name: section.name.to_owned(),
            about: section.about.to_owned(),
            seconds: 0.0,
            checks: Vec::new(),
            own_kernels: None,
        });
        print_line(format_args!("== {}: {} ==", section.name, section.about));
        let mut add = |check: Check| -> Result<()> {
            let check = match options.is_gpu_required {
                true => check.required(),
                false => check,
            };
            print_check(&check);
            if let Some(current) = report.sections.last_mut() {
                current.checks.push(check);
                current.seconds = section_began.elapsed().as_secs_f64();
            }
            if written.elapsed() > WRITE_EVERY {
                written = Instant::now();
                report.update(began.elapsed());
                report.write(&options.report)?;
            }
            Ok(())
        };
        let mut progress = Progress::default();
        if left < LEAST {
            add(Finding::skipped(NO_TIME).into_check("all".to_owned(), 0.0))?;
        } else {
            let limit = share(&options.sections[index..], options.target, left).max(LEAST);
            run_section(section, options.target, limit, &mut progress, &mut add)?;
        }
        if let Some(first) = progress.warnings.first() {
            let count = progress.warnings.len();
            let finding = Finding::failed(format!("{count} on standard error, the first: {first}"));
            add(finding.into_check("no warning of libtorch".to_owned(), 0.0))?;
        }
        if let Some(current) = report.sections.last_mut() {
            current.own_kernels = progress.own_kernels;
        }
        report.update(began.elapsed());
        report.write(&options.report)?;
    }
    report.complete = true;
    report.update(began.elapsed());
    report.write(&options.report)?;
    Ok(report)
}

fn print_check(check: &Check) {
    let outcome = match check.finding.outcome {
        Outcome::Passed => "ok    ",
        Outcome::Failed => "FAILED",
        Outcome::Skipped => "skip  ",
    };
    let figures = check.finding.figures.iter();
    let figures = figures.map(|figure| format!("  {} {}", figure.name, value_text(figure.value)));
    let detail = match check.finding.detail.as_str() {
        "" => String::new(),
        detail => format!("  ({detail})"),
    };
    print_line(format_args!(
        "{outcome} {}{}{detail}",
        check.name,
        figures.collect::<String>()
    ));
}

/// The progress of a section over its processes.
#[derive(Default)]
struct Progress {
    /// The number of checks that were reported.
    done: usize,
    /// The running check.
    current: Option<String>,
    is_complete: bool,
    own_kernels: Option<KernelUse>,
    /// The warnings of libtorch on standard error.
    warnings: Vec<String>,
}

/// Runs the checks of a section. A check that ends the process has failed, and another process continues with the next
/// check.
fn run_section(
    section: &Section,
    target: Target,
    limit: Duration,
    progress: &mut Progress,
    add: &mut dyn FnMut(Check) -> Result<()>,
) -> Result<()> {
    let began = Instant::now();
    for _ in 0..MOST_PROCESSES {
        let left = limit.saturating_sub(began.elapsed());
        let check_began = Instant::now();
        let end = run_process(section, target, left, progress, add)?;
        if progress.is_complete {
            return Ok(());
        }
        // The device was lost after a check that was reported; or it was the process between two checks.
        let Some(name) = progress.current.take() else {
            if end.is_late {
                let detail = format!("stopped after its limit of {:.0} s", limit.as_secs_f64());
                return add(Finding::failed(detail).into_check("the rest".to_owned(), 0.0));
            }
            if end.was_lost {
                continue;
            }
            let detail = format!("the process ended between checks: {}", end.reason());
            return add(Finding::failed(detail).into_check("the rest".to_owned(), 0.0));
        };
        let reason = match end.is_late {
            true => format!(
                "stopped: the section has a limit of {:.0} s",
                limit.as_secs_f64()
            ),
            false => format!("ended the process: {}", end.reason()),
        };
        progress.done += 1;
        let seconds = check_began.elapsed().as_secs_f64();
        add(Finding::failed(reason).into_check(name, seconds))?;
        if end.is_late {
            return Ok(());
        }
    }
    let detail = format!("{MOST_PROCESSES} processes of this section ended prematurely");
    add(Finding::failed(detail).into_check("the rest".to_owned(), 0.0))
}

/// The end of a process.
struct End {
    status: Option<ExitStatus>,
    is_late: bool,
    was_lost: bool,
    /// The last lines of its standard error.
    last_words: Vec<String>,
}

impl End {
    fn reason(&self) -> String {
        let status = match self.status {
            Some(status) => match status.signal() {
                Some(signal) => format!("signal {signal}"),
                None => format!("exit code {}", status.code().unwrap_or(-1)),
            },
            None => "unknown status".to_owned(),
        };
        match self.last_words.as_slice() {
            [] => status,
            words => format!("{status}; {}", words.join(" ")),
        }
    }
}

/// Ends the process and its children, however this function returns.
struct Group(Child);

impl Group {
    fn kill(&mut self) -> Option<ExitStatus> {
        // The group's processes may have ended already.
        let _ = kill_process_group(Pid::from_child(&self.0), Signal::KILL);
        self.0.wait().ok()
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        let _ = self.kill();
    }
}

fn run_process(
    section: &Section,
    target: Target,
    limit: Duration,
    progress: &mut Progress,
    add: &mut dyn FnMut(Check) -> Result<()>,
) -> Result<End> {
    let program = std::env::current_exe().context("the path of this program")?;
    let mut command = Command::new(&program);
    command
        .args(["run-section", section.name, "--device", target.name()])
        .args(["--first", &progress.done.to_string()])
        // The process ends by itself before it is stopped.
        .args([
            "--seconds",
            &limit.saturating_sub(GRACE).as_secs_f64().to_string(),
        ])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        // A group of its own, so that the Python programs of a section end with it.
        .process_group(0);
    terminate_with_parent(&mut command);
    let child = command
        .spawn()
        .with_context(|| format!("could not start {}", program.display()))?;
    let mut group = Group(child);
    let (sender, receiver) = channel();
    let output = group.0.stdout.take().map(|pipe| forward(pipe, sender));
    let errors = group
        .0
        .stderr
        .take()
        .map(|pipe| thread::spawn(|| keep_errors(pipe)));
    let stop = Instant::now() + limit;
    let (mut is_late, mut was_lost) = (false, false);
    loop {
        let left = stop.saturating_duration_since(Instant::now());
        match receiver.recv_timeout(left) {
            Ok(Line::Begin { name, .. }) => progress.current = Some(name),
            Ok(Line::Done { index, check }) => {
                progress.current = None;
                progress.done = index + 1;
                add(check)?;
            }
            Ok(Line::Lost) => was_lost = true,
            Ok(Line::Kernels(used)) => progress.own_kernels.get_or_insert_default().add(used),
            Ok(Line::End) => progress.is_complete = true,
            Err(RecvTimeoutError::Timeout) => {
                is_late = true;
                break;
            }
            // The output has ended, and with it the process.
            Err(RecvTimeoutError::Disconnected) => break,
        }
    }
    let status = match is_late {
        true => group.kill(),
        // What the section has started and left running must not hold the pipes open.
        false => {
            let status = group.0.wait().ok();
            let _ = group.kill();
            status
        }
    };
    if let Some(output) = output {
        let _ = output.join();
    }
    let errors = errors.map_or_else(Errors::default, |errors| errors.join().unwrap_or_default());
    progress.warnings.extend(errors.warnings);
    Ok(End {
        status,
        is_late,
        was_lost,
        last_words: errors.last.into(),
    })
}

/// Sends the events in `pipe`, and prints the other lines.
fn forward(pipe: impl Read + Send + 'static, sender: Sender<Line>) -> thread::JoinHandle<()> {
    thread::spawn(move || {
        for text in BufReader::new(pipe).split(b'\n').map_while(Result::ok) {
            let text = String::from_utf8_lossy(&text);
            match Line::of_text(&text) {
                Some(line) => {
                    if sender.send(line).is_err() {
                        return;
                    }
                }
                None => eprintln!("{text}"),
            }
        }
    })
}

/// The relevant lines of a standard error.
#[derive(Default)]
struct Errors {
    last: VecDeque<String>,
    /// The warnings of libtorch.
    warnings: Vec<String>,
}

/// Prints the lines of `pipe` and returns the last ones and the warnings.
fn keep_errors(pipe: impl Read) -> Errors {
    let mut errors = Errors::default();
    for text in BufReader::new(pipe).split(b'\n').map_while(Result::ok) {
        let text = String::from_utf8_lossy(&text).trim_end().to_owned();
        eprintln!("{text}");
        let start = || text.chars().take(200).collect();
        if is_warning(&text) {
            errors.warnings.push(start());
        }
        if !text.is_empty() {
            errors.last.push_back(start());
        }
        if errors.last.len() > 4 {
            errors.last.pop_front();
        }
    }
    errors
}

/// Returns `true` for a warning of libtorch, such as
/// `[W1127 17:10:33.000000000 Memory.cpp:49] Warning: The argument 'device' is deprecated (function operator())`.
fn is_warning(line: &str) -> bool {
    line.starts_with("[W") && line.contains("] Warning: ")
}
