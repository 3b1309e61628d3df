//! The report: JSON for programs, Markdown for people.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use anyhow::Result;
use overdrive::core::files;
use serde::{Deserialize, Serialize};
use tch::Device;

use crate::finding::{Check, Outcome};
use crate::summary;

const FORMAT: &str = "overdrive-gpu-check";
const FORMAT_VERSION: u64 = 1;

/// The results of a run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Report {
    /// The name of the format.
    pub(crate) format: String,
    /// The version of the format.
    pub(crate) format_version: u64,
    /// The commit from which the program was built, if it is known.
    pub(crate) commit: Option<String>,
    /// The device: `cpu` or `cuda`.
    pub(crate) device: String,
    /// The time at which the run began.
    pub(crate) began: String,
    /// The time of the run so far in seconds.
    pub(crate) seconds: f64,
    /// `true` once every section has ended or was skipped.
    pub(crate) complete: bool,
    /// The number of checks that passed.
    pub(crate) passed: usize,
    /// The number of checks that failed.
    pub(crate) failed: usize,
    /// The number of checks that were skipped.
    pub(crate) skipped: usize,
    /// The sections in the order in which they ran.
    pub(crate) sections: Vec<SectionReport>,
}

/// The results of a section.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct SectionReport {
    /// The name.
    pub(crate) name: String,
    /// A description.
    pub(crate) about: String,
    /// The time of the section in seconds.
    pub(crate) seconds: f64,
    /// The checks.
    pub(crate) checks: Vec<Check>,
    /// The use of Overdrive's kernels; `None` if no process of the section came to its end.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) own_kernels: Option<KernelUse>,
}

/// The use of the kernels of overdrive-gpu by the processes of a section.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct KernelUse {
    /// The value of `OVERDRIVE_GPU_KERNELS`, if it is set. Some checks turn the kernels on regardless of it.
    pub(crate) switch: Option<String>,
    /// The images that were used, such as `sm_90a`; `None` if the kernels were never asked for.
    pub(crate) target: Option<String>,
    /// The number of launches of each kernel that was launched.
    pub(crate) launches: BTreeMap<String, u64>,
}

impl KernelUse {
    /// Returns the use by this process so far.
    pub(crate) fn of_this_process(device: Device) -> Self {
        let kernels = overdrive_gpu::opened(device);
        let launches = kernels.map(|kernels| kernels.launches());
        Self {
            switch: std::env::var("OVERDRIVE_GPU_KERNELS").ok(),
            target: kernels.map(|kernels| kernels.target().to_owned()),
            launches: launches
                .into_iter()
                .flatten()
                .filter(|(_, count)| *count > 0)
                .map(|(kernel, count)| (kernel.to_owned(), count))
                .collect(),
        }
    }

    /// Adds the use by another process.
    pub(crate) fn add(&mut self, other: Self) {
        self.switch = other.switch.or(self.switch.take());
        self.target = other.target.or(self.target.take());
        for (kernel, count) in other.launches {
            *self.launches.entry(kernel).or_default() += count;
        }
    }

    /// Returns a sentence; empty if the kernels were never asked for.
    fn text(&self) -> String {
        let Some(target) = &self.target else {
            return String::new();
        };
        let switch = self.switch.as_deref().unwrap_or("not set");
        let launches: Vec<String> = self
            .launches
            .iter()
            .map(|(kernel, count)| format!("{kernel} {count}"))
            .collect();
        let launches = match launches.as_slice() {
            [] => "none".to_owned(),
            launches => launches.join(", "),
        };
        format!(
            "Kernels of Overdrive for {target}, OVERDRIVE_GPU_KERNELS is {switch}; launches: {launches}.\n\n"
        )
    }
}

impl SectionReport {
    fn count(&self, outcome: Outcome) -> usize {
        self.checks
            .iter()
            .filter(|check| check.finding.outcome == outcome)
            .count()
    }
}

impl Report {
    /// Returns an empty report.
    pub(crate) fn new(device: &str, commit: Option<String>) -> Self {
        Self {
            format: FORMAT.to_owned(),
            format_version: FORMAT_VERSION,
            commit,
            device: device.to_owned(),
            began: jiff::Timestamp::now().strftime("%F %T UTC").to_string(),
            seconds: 0.0,
            complete: false,
            passed: 0,
            failed: 0,
            skipped: 0,
            sections: Vec::new(),
        }
    }

    /// Recounts the outcomes after `elapsed`.
    pub(crate) fn update(&mut self, elapsed: std::time::Duration) {
        self.seconds = elapsed.as_secs_f64();
        let of = |outcome| self.sections.iter().map(|s| s.count(outcome)).sum();
        (self.passed, self.failed, self.skipped) = (
            of(Outcome::Passed),
            of(Outcome::Failed),
            of(Outcome::Skipped),
        );
    }

    /// Writes the report to `path` and, as Markdown, beside it. Each file is replaced atomically, so that an
    /// interrupted run leaves a readable report.
    pub(crate) fn write(&self, path: &Path) -> Result<()> {
        files::write(
            path,
            format!("{}\n", serde_json::to_string_pretty(self)?).as_bytes(),
        )?;
        files::write(markdown_path(path), self.markdown().as_bytes())?;
        Ok(())
    }

    /// Returns the report as Markdown.
    pub(crate) fn markdown(&self) -> String {
        let mut text = format!(
            "# GPU check on {}\n\n{}, commit {}, {:.0} s{}.\n\n",
            self.device,
            self.began,
            self.commit.as_deref().unwrap_or("unknown"),
            self.seconds,
            if self.complete { "" } else { ", not complete" },
        );
        for line in summary::lines(self) {
            let _ = writeln!(text, "- {line}");
        }
        text.push('\n');
        text += "| section | passed | failed | skipped | s |\n|---|---|---|---|---|\n";
        for section in &self.sections {
            let _ = writeln!(
                text,
                "| {} | {} | {} | {} | {:.0} |",
                section.name,
                section.count(Outcome::Passed),
                section.count(Outcome::Failed),
                section.count(Outcome::Skipped),
                section.seconds
            );
        }
        let failures: Vec<String> = self
            .sections
            .iter()
            .flat_map(|section| {
                let failed = section.checks.iter();
                let failed = failed.filter(|check| check.finding.outcome == Outcome::Failed);
                failed.map(|check| {
                    format!(
                        "- {}: {}: {}\n",
                        section.name, check.name, check.finding.detail
                    )
                })
            })
            .collect();
        if !failures.is_empty() {
            let _ = write!(text, "\n## Failures\n\n{}", failures.concat());
        }
        for section in &self.sections {
            let _ = write!(
                text,
                "\n## {}\n\n{}\n\n{}{}",
                section.name,
                section.about,
                section
                    .own_kernels
                    .as_ref()
                    .map_or_else(String::new, KernelUse::text),
                table(section)
            );
        }
        text
    }
}

/// Returns the path of the Markdown beside the JSON.
pub(crate) fn markdown_path(path: &Path) -> PathBuf {
    path.with_extension("md")
}

/// Returns the checks of a section as a table with a column for each name of a figure.
fn table(section: &SectionReport) -> String {
    let mut columns: Vec<&str> = Vec::new();
    for figure in section
        .checks
        .iter()
        .flat_map(|check| &check.finding.figures)
    {
        if !columns.contains(&figure.name.as_str()) {
            columns.push(&figure.name);
        }
    }
    let mut text = String::from("| check | outcome |");
    for column in &columns {
        let _ = write!(text, " {column} |");
    }
    text += " remark | s |\n|---|---|";
    text += &"---|".repeat(columns.len() + 2);
    text.push('\n');
    for check in &section.checks {
        let outcome = match check.finding.outcome {
            Outcome::Passed => "passed",
            Outcome::Failed => "**failed**",
            Outcome::Skipped => "skipped",
        };
        let _ = write!(text, "| {} | {outcome} |", check.name);
        for column in &columns {
            let figure = check
                .finding
                .figures
                .iter()
                .find(|figure| figure.name == *column);
            let cell = figure.map_or_else(String::new, |figure| value_text(figure.value));
            let _ = write!(text, " {cell} |");
        }
        // A bar would end the cell.
        let detail = check.finding.detail.replace('|', "\\|").replace('\n', " ");
        let _ = writeln!(text, " {detail} | {:.1} |", check.seconds);
    }
    text
}

/// Returns a figure with four digits.
pub(crate) fn value_text(value: Option<f64>) -> String {
    match value {
        None => "not finite".to_owned(),
        Some(0.0) => "0".to_owned(),
        Some(value) if value.fract() == 0.0 && value.abs() < 1e15 => format!("{value:.0}"),
        Some(value) if value.abs() < 1e-2 => format!("{value:.1e}"),
        Some(value) if value.abs() < 10.0 => format!("{value:.3}"),
        Some(value) if value.abs() < 1000.0 => format!("{value:.1}"),
        Some(value) => format!("{value:.0}"),
    }
}
