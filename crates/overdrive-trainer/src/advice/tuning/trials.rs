//! Trials: short runs of a training program, each in a separate process, so that its peak memory can be measured.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::Duration;

use overdrive_core::{Error as CommonError, files};
use overdrive_optim::{LrSchedulerType, ScheduleOptions};
use overdrive_sys::process::terminate_with_parent;
use overdrive_tracking::{StepMetrics, read_metrics};

use super::{Trial, TuneCandidate, TuneOutcome};
use crate::arguments::{IntervalStrategy, SaveStrategy, TrainingArguments};
use crate::run::RunFolder;
use crate::{Error, Interrupt, Result};

/// The maximum number of micro-batches in a step of a trial. Each further micro-batch costs as much as the second, so
/// the speed of a whole step follows from two.
const MOST_ACCUMULATION: u64 = 2;

/// The interval at which a running trial, which takes seconds, is polled.
const POLL: Duration = Duration::from_millis(20);

/// The program that trains, and the numbers of steps of its trials.
#[derive(Debug)]
pub struct Trials {
    program: PathBuf,
    /// The number of measured steps in a trial.
    pub steps: u64,
    /// The number of warm-up steps before them, in which caches fill.
    pub warmup: u64,
}

impl Trials {
    /// Returns the trials of a program that trains with the arguments `--config FILE`.
    pub fn new(program: PathBuf, steps: u64, warmup: u64) -> Self {
        Self {
            program,
            steps: steps.max(1),
            warmup,
        }
    }

    /// Trains for a few steps with the settings of `candidate`.
    ///
    /// # Errors
    /// An error with the last lines of the run if it fails for a reason other than memory.
    pub fn run(
        &self,
        arguments: &TrainingArguments,
        candidate: &TuneCandidate,
    ) -> Result<TuneOutcome> {
        let folder = files::unfinished_folder(std::env::temp_dir().join("tune"))?;
        let short = self.shortened(&candidate.of(arguments), &folder.path().join("run"));
        let config = folder.path().join("trial.json");
        short.write(&config)?;
        let output = self.output(&config, folder.path())?;
        if let Some(message) = out_of_memory(&output) {
            return Ok(TuneOutcome::OutOfMemory(message));
        }
        if !output.status.success() {
            let text = String::from_utf8_lossy(&output.stderr);
            let lines: Vec<&str> = text.lines().collect();
            let last = lines[lines.len().saturating_sub(5)..].join("\n");
            return failed(format!("a trial failed with {}:\n{last}", output.status));
        }
        let run = RunFolder::open(folder.path().join("run"))?;
        let records = read_metrics(run.metrics())?.records;
        let effective = arguments.tokens_per_step();
        let measured = measure(&records, self.warmup, effective);
        match measured {
            Some(measured) => Ok(TuneOutcome::Measured(measured)),
            None => failed(format!(
                "the trial ran {} steps, too few to measure; give more data or fewer steps",
                records.len()
            )),
        }
    }

    /// Runs the program until it ends or a signal interrupts the search.
    fn output(&self, config: &Path, folder: &Path) -> Result<Output> {
        // Written to files, because nothing reads a pipe while this function waits.
        let (out, err) = (folder.join("stdout"), folder.join("stderr"));
        let mut command = Command::new(&self.program);
        command
            .arg("--config")
            .arg(config)
            .stdin(Stdio::null())
            .stdout(File::create(&out).map_err(CommonError::io("create", &out))?)
            .stderr(File::create(&err).map_err(CommonError::io("create", &err))?);
        terminate_with_parent(&mut command);
        let io = |action: &'static str| CommonError::io(action, &self.program);
        let mut child = command.spawn().map_err(io("start"))?;
        let status = loop {
            if let Some(status) = child.try_wait().map_err(io("wait for"))? {
                break status;
            }
            if Interrupt::signal_received() {
                // A trial has nothing to save.
                child.kill().map_err(io("end"))?;
                child.wait().map_err(io("wait for"))?;
                let what = "the search; run the command again to restart it".to_owned();
                return Err(Error::Interrupted { what });
            }
            std::thread::sleep(POLL);
        };
        let read = |path: &Path| fs::read(path).map_err(CommonError::io("read", path));
        Ok(Output {
            status,
            stdout: read(&out)?,
            stderr: read(&err)?,
        })
    }

    /// Returns the configuration of a trial: a few steps of at most two micro-batches, without evaluation, snapshots or
    /// logs in between.
    fn shortened(&self, arguments: &TrainingArguments, run: &Path) -> TrainingArguments {
        let accumulation = arguments.gradient_accumulation_steps.min(MOST_ACCUMULATION);
        TrainingArguments {
            output_dir: Some(run.to_owned()),
            overwrite_output_dir: false,
            max_steps: (self.warmup + self.steps).cast_signed(),
            gradient_accumulation_steps: accumulation,
            auto_find_batch_size: false,
            eval_strategy: IntervalStrategy::No,
            eval_on_start: false,
            save_strategy: SaveStrategy::No,
            resume_from_checkpoint: None,
            load_best_model_at_end: false,
            early_stopping_patience: None,
            // Phases of the whole schedule may be longer than a trial, and the speed does not depend on the
            // learning rate.
            lr_scheduler_type: LrSchedulerType::Constant,
            lr_scheduler_kwargs: ScheduleOptions::default(),
            warmup_steps: 0.0,
            warmup_ratio: 0.0,
            report_to: Vec::new(),
            trace: None,
            samples: 0,
            ..arguments.clone()
        }
    }
}

fn failed<T>(text: impl Into<String>) -> Result<T> {
    Err(Error::of_program(text.into()))
}

/// Returns the measurements of the steps after the warm-up, for optimizer steps of `effective` tokens; `None` without
/// such steps. A step of a trial may have fewer micro-batches: the time of the optimizer then counts once for all
/// tokens of the whole step.
fn measure(records: &[StepMetrics], warmup: u64, effective: u64) -> Option<Trial> {
    let warmup = usize::try_from(warmup.max(1)).unwrap_or(usize::MAX);
    let measured = records.get(warmup..)?;
    let (before, last) = (records.get(warmup - 1)?, measured.last()?);
    // The time between the ends of two steps includes everything, also the wait for the device at
    // the end of a step.
    let seconds = last.elapsed_seconds? - before.elapsed_seconds?;
    let tokens = last.tokens_seen?.saturating_sub(before.tokens_seen?) as f64;
    let phases = measured
        .iter()
        .map(|step| step.time_by_phase().unwrap_or_default());
    let (data, optimizer) = phases.fold((0.0, 0.0), |(data, optimizer), phases| {
        (data + phases.data, optimizer + phases.optimizer)
    });
    let per_token = (seconds - optimizer).max(0.0) / tokens;
    let per_step = per_token * effective as f64 + optimizer / measured.len() as f64;
    let tokens_per_second = effective as f64 / per_step;
    tokens_per_second.is_finite().then(|| Trial {
        peak_bytes: records
            .iter()
            .map(|step| step.peak_memory_bytes)
            .max()
            .unwrap_or(0),
        tokens_per_second,
        data_share: data / seconds,
    })
}

/// Returns the message if memory ran out: an error of libtorch's allocators, or the signal of the system's
/// out-of-memory killer.
fn out_of_memory(output: &Output) -> Option<String> {
    #[cfg(unix)]
    {
        use std::os::unix::process::ExitStatusExt;
        /// SIGKILL, on all systems.
        const KILL: i32 = 9;
        if output.status.signal() == Some(KILL) {
            return Some("the system ended the trial (SIGKILL)".to_owned());
        }
    }
    if output.status.success() {
        return None;
    }
    let text = String::from_utf8_lossy(&output.stderr);
    let says = |line: &&str| line.to_ascii_lowercase().contains("out of memory");
    let line = text.lines().find(says)?;
    // The message is shown in a Markdown table.
    let line: String = line.replace('|', " ").chars().take(120).collect();
    Some(line)
}
