//! The Python programs that do the same work with PyTorch, transformers and bitsandbytes.

use std::io::{ErrorKind, Read};
use std::path::PathBuf;
use std::process::{Command, ExitStatus, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Result, anyhow};
use overdrive::sys::process::terminate_with_parent;
use serde_json::Value;
use tch::Device;

use crate::context::Context;
use crate::finding::Finding;

/// The interval at which a running program is polled.
const POLL: Duration = Duration::from_millis(20);

/// Returns a command of the Python that has PyTorch.
pub(crate) fn python() -> Command {
    let program = std::env::var_os("OVERDRIVE_PYTHON");
    let mut command = Command::new(program.unwrap_or_else(|| "python3".into()));
    command.stdin(Stdio::null());
    // A bundle's script puts the libraries of libtorch before the machine's own path, which Python needs as it was.
    if let Some(outer) = std::env::var_os("OVERDRIVE_OUTER_LIBRARY_PATH") {
        match outer.is_empty() {
            true => command.env_remove("LD_LIBRARY_PATH"),
            false => command.env("LD_LIBRARY_PATH", outer),
        };
    }
    terminate_with_parent(&mut command);
    command
}

/// Returns the folder of the comparison's scripts: beside this program in a bundle, else in the repository.
fn scripts() -> PathBuf {
    let here = std::env::current_exe().unwrap_or_default();
    let bundled = here.with_file_name("python");
    if bundled.is_dir() {
        return bundled;
    }
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../benches/pytorch")
}

/// Returns the time for a program: at most `most`, and such that `kept` is left for the checks after it.
pub(crate) fn time_for(context: &Context, most: Duration, kept: Duration) -> Duration {
    context.time_left().saturating_sub(kept).min(most)
}

/// Runs a script for at most `limit`, and returns the figures in its last line, a JSON object. If there is none, or a
/// package is missing, it returns a finding that says so.
pub(crate) fn measure(
    script: &str,
    device: Device,
    limit: Duration,
    arguments: &[String],
) -> Result<std::result::Result<Value, Finding>> {
    if limit.is_zero() {
        return Ok(Err(Finding::failed(
            "the section has no time left for this comparison",
        )));
    }
    let device = if device == Device::Cpu { "cpu" } else { "cuda" };
    let mut command = python();
    command
        .arg(scripts().join(script))
        .args(["--device", device])
        .args(["--seconds", &limit.as_secs().to_string()])
        .args(arguments);
    let (status, output, errors) = match run(&mut command, limit)? {
        Ended::ByItself(status, output, errors) => (status, output, errors),
        Ended::Stopped => {
            let seconds = limit.as_secs();
            return Ok(Err(Finding::failed(format!("stopped after {seconds} s"))));
        }
        Ended::NoPython => return Ok(Err(Finding::skipped_allowed("there is no python3"))),
    };
    let Some(line) = output.lines().rev().find(|line| line.starts_with('{')) else {
        return Ok(Err(without_figures(&status.to_string(), &errors)));
    };
    let found: Value = serde_json::from_str(line)?;
    Ok(match found["missing"].as_str() {
        Some(reason) => Err(Finding::skipped_allowed(reason)),
        None => Ok(found),
    })
}

/// Returns a number of a program's figures.
pub(crate) fn number(found: &Value, key: &str) -> Result<f64> {
    let value = found[key].as_f64();
    value.ok_or_else(|| anyhow!("`{key}` is missing in {found}"))
}

/// The end of a program.
enum Ended {
    /// Its status, and what it printed to standard output and standard error.
    ByItself(ExitStatus, String, String),
    Stopped,
    NoPython,
}

/// Runs a command, for at most `limit`.
fn run(command: &mut Command, limit: Duration) -> Result<Ended> {
    let began = Instant::now();
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = match command.spawn() {
        Ok(child) => child,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Ended::NoPython),
        Err(error) => return Err(error.into()),
    };
    let output = child.stdout.take().map(collect);
    let errors = child.stderr.take().map(collect);
    let status = loop {
        if let Some(status) = child.try_wait()? {
            break status;
        }
        if began.elapsed() >= limit {
            child.kill()?;
            child.wait()?;
            // Compilers that it has left may hold the pipes open, so nobody waits for what it printed.
            return Ok(Ended::Stopped);
        }
        thread::sleep(POLL);
    };
    let text = |reader: Option<thread::JoinHandle<String>>| {
        reader.map_or_else(String::new, |reader| reader.join().unwrap_or_default())
    };
    Ok(Ended::ByItself(status, text(output), text(errors)))
}

fn collect(mut pipe: impl Read + Send + 'static) -> thread::JoinHandle<String> {
    thread::spawn(move || {
        let mut bytes = Vec::new();
        let _ = pipe.read_to_end(&mut bytes);
        String::from_utf8_lossy(&bytes).into_owned()
    })
}

/// Returns the finding about a program that has printed no figures, from its standard error.
///
/// Exhausted memory is a failure: the sizes are chosen so that both sides fit, and a table without its baseline proves
/// nothing. Other errors are not failures of Overdrive.
pub(crate) fn without_figures(status: &str, errors: &str) -> Finding {
    let last = errors.lines().last().unwrap_or("it says nothing");
    let reason = format!("PyTorch failed: {status}: {last}");
    let is_out_of_memory = ["OutOfMemoryError", "out of memory"];
    match is_out_of_memory.iter().any(|text| errors.contains(text)) {
        true => Finding::failed(reason),
        false => Finding::skipped_allowed(reason),
    }
}
