//! The checks of a run before it starts: `train --check`.

mod checks;
#[cfg(test)]
mod tests;

use std::fmt;
use std::path::Path;

use overdrive_precision::{Precision, Recommendation};
use overdrive_profiling::{GpuMonitor, GpuProcess, free_memory};
use overdrive_sys::threads;
use tch::Device;

use crate::arguments::TrainingArguments;
use crate::data::TextData;
use crate::memory_estimate::MemoryPlan;
use crate::run::{RunFolder, gpu_memory};
use crate::{Error, Result};

/// The weight of a [`Finding`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Severity {
    /// The check found nothing to change.
    Fine,
    /// The run would work, but slower or with less than it could have.
    Warning,
    /// The run would fail.
    Failure,
}

/// The result of one check. [`Display`](fmt::Display) is a line, and one with the remedy.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Finding {
    /// The subject of the check: `folder`, `data`, `tokenizer`, `disk`, `memory`, `threads`, `processes`, `precision` or
    /// `speed`.
    pub subject: &'static str,
    /// The weight.
    pub severity: Severity,
    /// The finding in a sentence.
    pub what: String,
    /// The change that removes the finding; empty if it is [`Severity::Fine`].
    pub remedy: String,
}

impl Finding {
    fn fine(subject: &'static str, what: impl Into<String>) -> Self {
        Self {
            subject,
            severity: Severity::Fine,
            what: what.into(),
            remedy: String::new(),
        }
    }

    /// Returns the finding with this weight and this remedy where `bad` is `true`.
    fn or(self, bad: bool, severity: Severity, remedy: impl Into<String>) -> Self {
        match bad {
            true => Self {
                severity,
                remedy: remedy.into(),
                ..self
            },
            false => self,
        }
    }
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let severity = match self.severity {
            Severity::Fine => "ok",
            Severity::Warning => "warning",
            Severity::Failure => "failure",
        };
        write!(f, "{severity:<8} {:<10} {}", self.subject, self.what)?;
        if !self.remedy.is_empty() {
            write!(f, "\n         remedy:    {}", self.remedy)?;
        }
        Ok(())
    }
}

/// The findings about a run. [`Display`](fmt::Display) is a list with a summary.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct RunCheck {
    /// The findings, in the order of the checks.
    pub findings: Vec<Finding>,
}

impl RunCheck {
    /// Returns the number of findings of this weight.
    pub fn count(&self, severity: Severity) -> usize {
        let of = |finding: &&Finding| finding.severity == severity;
        self.findings.iter().filter(of).count()
    }
}

impl fmt::Display for RunCheck {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for finding in &self.findings {
            writeln!(f, "{finding}")?;
        }
        let counted = |severity, what| match self.count(severity) {
            1 => format!("1 {what}"),
            count => format!("{count} {what}s"),
        };
        let warnings = counted(Severity::Warning, "warning");
        match (self.count(Severity::Failure), self.count(Severity::Warning)) {
            (0, 0) => f.write_str("\nthe run can start"),
            (0, _) => write!(f, "\nthe run can start, with {warnings}"),
            _ => write!(
                f,
                "\nthe run would fail: {}, {warnings}",
                counted(Severity::Failure, "failure")
            ),
        }
    }
}

/// The sizes of a run that several checks need.
struct Sizes {
    vocabulary: u64,
    /// `None` if the data cannot be read.
    micro_batches_per_epoch: Option<u64>,
}

/// The facts about the machine that a run depends on.
#[derive(Debug, Clone)]
pub(crate) struct MachineFacts {
    /// The device that trains.
    device: Device,
    /// The precision of the run.
    precision: Precision,
    /// The recommended precision of the device, with the reason.
    recommended: Recommendation,
    /// The reason why the precision of the run is slow or unsafe on the device.
    precision_warning: Option<String>,
    /// The bytes that new tensors can take on the device.
    free_memory: Option<u64>,
    /// The bytes that a user may write on the disk of the run's folder.
    free_disk: Option<u64>,
    /// The number of processors that this process may use, by its affinity and its control group.
    processors: usize,
    /// The number of threads inside one operator.
    threads: usize,
    /// The other processes on the GPU.
    gpu_processes: Vec<GpuProcess>,
}

impl MachineFacts {
    /// Finds the facts for a run with these arguments on `device`.
    ///
    /// # Errors
    /// An error of setting the number of threads.
    fn detect(arguments: &TrainingArguments, device: Device) -> Result<Self> {
        arguments.set_threads()?;
        let precision = arguments.precision();
        // Counted before anything is allocated: inside a container, the driver may list this process under a
        // different id.
        let gpu_processes = match device {
            Device::Cuda(index) => {
                GpuMonitor::open(index).map_or_else(|_| Vec::new(), |gpu| gpu.other_processes())
            }
            _ => Vec::new(),
        };
        let folder = arguments.output_dir.as_deref();
        Ok(Self {
            device,
            precision,
            recommended: Precision::recommend(device),
            precision_warning: precision.warning(device),
            free_memory: free_memory(device),
            free_disk: free_disk(folder.unwrap_or(Path::new("."))),
            processors: std::thread::available_parallelism().map_or(1, Into::into),
            threads: threads::intra_op(),
            gpu_processes,
        })
    }

    /// Returns the memory plan of the run on this machine.
    fn memory_plan(&self, arguments: &TrainingArguments, sizes: &Sizes) -> MemoryPlan {
        MemoryPlan {
            gpu_memory: gpu_memory(self.device),
            ..arguments.memory_plan(sizes.vocabulary, self.precision)
        }
    }
}

/// Returns the bytes that a user may write on the disk of `path`, whose folder need not exist yet.
#[cfg(unix)]
fn free_disk(path: &Path) -> Option<u64> {
    let absolute = std::path::absolute(path).ok()?;
    let there = absolute.ancestors().find(|path| path.exists())?;
    let disk = rustix::fs::statvfs(there).ok()?;
    disk.f_bavail.checked_mul(disk.f_frsize)
}

#[cfg(not(unix))]
fn free_disk(_: &Path) -> Option<u64> {
    None
}

/// Returns the finding of an error that the run would end with.
fn failure(subject: &'static str, error: &Error) -> Finding {
    let remedy = "follow the error; the run would end with it";
    Finding::fine(subject, error.to_string()).or(true, Severity::Failure, remedy)
}

impl TrainingArguments {
    /// Checks a run on `device` without training: its folder and its reports, the data, the disk, the memory by estimate,
    /// the precision, other processes on the GPU, the threads, and the keys that would slow it down. `processes` is the
    /// number of processes on this machine.
    ///
    /// The data is prepared as the run does it, so that its errors are those of the run; the tokenizer and the tokens
    /// are cached, and the run reuses them. Call it after [`choose_precision`](Self::choose_precision).
    ///
    /// # Errors
    /// An error of libtorch or of the arguments. What a run would fail with is a finding.
    pub fn check_run(&self, device: Device, processes: usize) -> Result<RunCheck> {
        self.validate()?;
        let facts = MachineFacts::detect(self, device)?;
        let folder = RunFolder::check(self);
        let data = TextData::prepare(self, |_| {});
        let mut check = self.check_with(&facts, data, processes)?;
        if let Err(error) = folder {
            check.findings.insert(0, failure("folder", &error));
        }
        Ok(check)
    }

    fn check_with(
        &self,
        facts: &MachineFacts,
        data: Result<TextData>,
        processes: usize,
    ) -> Result<RunCheck> {
        let data = data.as_ref();
        let sizes = Sizes {
            vocabulary: data.map_or(self.vocab_size, TextData::vocab_size),
            micro_batches_per_epoch: data.ok().map(|data| data.micro_batches_per_epoch(self)),
        };
        let mut findings = checks::data(self, data);
        // The memory of a plan that does not fit the model has no estimate, and the run would end with the same error.
        if let Err(error) = facts.memory_plan(self, &sizes).estimate() {
            findings.push(failure("memory", &error));
            return Ok(RunCheck { findings });
        }
        findings.extend(self.check_machine(facts, &sizes, processes)?);
        findings.push(checks::precision(facts));
        findings.extend(checks::speed(self, facts, &sizes)?);
        Ok(RunCheck { findings })
    }

    /// Returns the findings of the checks that take milliseconds.
    fn check_machine(
        &self,
        facts: &MachineFacts,
        sizes: &Sizes,
        processes: usize,
    ) -> Result<Vec<Finding>> {
        let mut findings = vec![
            checks::disk(self, facts, sizes)?,
            checks::memory(self, facts, sizes, processes)?,
            checks::threads(facts, processes),
        ];
        findings.extend(checks::other_processes(facts));
        Ok(findings)
    }

    /// Returns the warnings that the start of a run prints: the checks of [`check_run`](Self::check_run) that take
    /// milliseconds (disk, memory, other processes on the GPU, threads), where they find something.
    ///
    /// # Errors
    /// As [`check_run`](Self::check_run).
    pub fn start_warnings(
        &self,
        data: &TextData,
        device: Device,
        processes: usize,
    ) -> Result<Vec<Finding>> {
        let facts = MachineFacts::detect(self, device)?;
        let sizes = Sizes {
            vocabulary: data.vocab_size(),
            micro_batches_per_epoch: Some(data.micro_batches_per_epoch(self)),
        };
        let mut findings = self.check_machine(&facts, &sizes, processes)?;
        findings.retain(|finding| finding.severity > Severity::Fine);
        Ok(findings)
    }
}
