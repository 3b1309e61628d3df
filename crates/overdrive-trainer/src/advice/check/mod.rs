//! The checks of a run before it starts: `train --check`.

mod data;
mod disk;
mod facts;
mod machine;
mod memory;
mod speed;
#[cfg(test)]
mod tests;

use std::fmt;

use tch::Device;

pub use facts::MachineFacts;

use crate::Result;
use crate::arguments::TrainingArguments;
use crate::data::TextData;
use crate::run::RunFolder;

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
    /// The subject of the check: `folder`, `data`, `disk`, `memory`, `precision`, `processes`, `threads` or `speed`.
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
            let remedy = "follow the error; the run would end with it";
            let found = Finding::fine("folder", error.to_string());
            let found = found.or(true, Severity::Failure, remedy);
            check.findings.insert(0, found);
        }
        Ok(check)
    }

    pub(crate) fn check_with(
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
        let mut findings = data::findings(self, data);
        findings.push(disk::finding(self, facts, &sizes)?);
        findings.push(memory::finding(self, facts, &sizes, processes)?);
        findings.push(machine::precision(facts));
        findings.extend(machine::other_processes(facts));
        findings.push(machine::threads(facts, processes));
        findings.extend(speed::findings(self, facts, &sizes)?);
        Ok(RunCheck { findings })
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
        let mut findings = vec![
            disk::finding(self, &facts, &sizes)?,
            memory::finding(self, &facts, &sizes, processes)?,
            machine::threads(&facts, processes),
        ];
        findings.extend(machine::other_processes(&facts));
        findings.retain(|finding| finding.severity > Severity::Fine);
        Ok(findings)
    }
}
