use std::ffi::OsString;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use overdrive::core::units;
use overdrive::tracking::{StepMetrics, read_metrics};
use serde::{Deserialize, Serialize};

use super::StageRuns;
use super::picture::draw;
use crate::{StepResult, median};

/// The tokens whose time is the work.
const TOKENS: f64 = 1e6;

/// The cost of a stage.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct StageCost {
    /// The seconds of the work, which is the same in all stages.
    pub seconds: f64,
    /// The peak memory of tensors in bytes.
    pub peak_memory_bytes: u64,
}

/// A stage: a change on top of those before it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Stage {
    /// The name; `+ …` for a change.
    pub name: String,
    /// The flags of the program, all of them; empty where there is no program.
    pub flags: Vec<String>,
    /// The medians.
    pub cost: StageCost,
}

/// A table of changes, of which each is on top of those before it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Stages {
    /// A description of the machine.
    pub machine: String,
    /// A description of the work.
    pub work: String,
    /// The stages, the first without any change.
    pub stages: Vec<Stage>,
    /// Notes under the table.
    pub notes: Vec<String>,
}

impl Stages {
    /// Returns the speed and the memory of each stage relative to the first.
    fn ratios(&self) -> Vec<(String, f64, f64)> {
        let Some(first) = self.stages.first().map(|stage| stage.cost) else {
            return Vec::new();
        };
        let ratio = |stage: &Stage| {
            let memory =
                stage.cost.peak_memory_bytes as f64 / first.peak_memory_bytes.max(1) as f64;
            (
                stage.name.clone(),
                first.seconds / stage.cost.seconds,
                memory,
            )
        };
        self.stages.iter().map(ratio).collect()
    }

    /// Returns the table as Markdown.
    pub fn markdown(&self) -> String {
        let mut text = format!("{}. {}.\n\n", self.machine, self.work);
        text += "| stage | time | speed | peak memory | of the first |\n|---|---|---|---|---|\n";
        for (stage, (name, speed, memory)) in self.stages.iter().zip(self.ratios()) {
            let seconds = stage.cost.seconds;
            let time = match seconds < 10.0 {
                true => format!("{seconds:.2} s"),
                false => units::seconds(seconds),
            };
            let _ = writeln!(
                text,
                "| {name} | {time} | {speed:.2}x | {} | {:.0}% |",
                units::bytes(stage.cost.peak_memory_bytes),
                100.0 * memory
            );
        }
        for note in &self.notes {
            let _ = write!(text, "\n{note}\n");
        }
        text
    }

    /// Writes `<name>.md`, `<name>.json` and `<name>.svg` into `folder`.
    ///
    /// # Errors
    /// An error if a file cannot be written.
    pub fn write(&self, folder: &Path, name: &str) -> StepResult<()> {
        std::fs::create_dir_all(folder)?;
        let file = |extension: &str| folder.join(format!("{name}.{extension}"));
        std::fs::write(file("md"), self.markdown())?;
        std::fs::write(file("json"), serde_json::to_string_pretty(self)?)?;
        let title = "Speed and peak memory, the first stage = 1";
        draw(title, &self.ratios(), &file("svg"))
    }
}

/// A program of the examples that writes `metrics.jsonl`.
#[derive(Debug)]
pub struct Program {
    path: PathBuf,
}

impl Program {
    /// Builds the example `name` beside this program.
    ///
    /// # Errors
    /// An error if Cargo cannot build it.
    pub fn build(name: &str) -> StepResult<Self> {
        let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
        let build = [
            "build",
            "--release",
            "-p",
            "overdrive-examples",
            "--example",
            name,
        ];
        println!("$ cargo {}", build.join(" "));
        // The current folder may be another project's; that of the workspace has Cargo's configuration, which names libtorch.
        let workspace = concat!(env!("CARGO_MANIFEST_DIR"), "/..");
        let status = Command::new(cargo)
            .args(build)
            .current_dir(workspace)
            .status()?;
        if !status.success() {
            return Err(format!(
                "`{name}` could not be built; run `cargo xtask setup` if libtorch is missing"
            )
            .into());
        }
        let here = std::env::current_exe()?;
        let folder = here
            .parent()
            .ok_or("the path of this program has no parent folder")?;
        let file = format!("{name}{}", std::env::consts::EXE_SUFFIX);
        Ok(Self {
            path: folder.join("examples").join(file),
        })
    }

    /// Runs the program with `flags` in a run folder `out`, and returns the metrics of its steps.
    ///
    /// # Errors
    /// An error with the output of the run if it fails.
    pub fn run(&self, flags: &[OsString], out: &Path) -> StepResult<Vec<StepMetrics>> {
        let output = Command::new(&self.path)
            .args(flags)
            .arg("--out")
            .arg(out)
            .output()?;
        if !output.status.success() {
            let text = String::from_utf8_lossy(&output.stderr);
            return Err(format!("{} failed:\n{text}", self.path.display()).into());
        }
        Ok(read_metrics(out.join("metrics.jsonl"))?.records)
    }

    /// Measures stages, given by their names and their flags, in turn: the time of a million tokens without padding.
    ///
    /// # Errors
    /// As [`run`](Self::run).
    pub fn stages(
        &self,
        runs: &StageRuns,
        shared: &[OsString],
        stages: &[(&str, Vec<&str>)],
    ) -> StepResult<Vec<Stage>> {
        let mut rounds = vec![Vec::new(); stages.len()];
        for round in 1..=runs.rounds {
            for ((name, own), measured) in stages.iter().zip(&mut rounds) {
                let folder = tempfile::tempdir()?;
                let mut flags = [&runs.flags(), shared].concat();
                flags.extend(own.iter().map(OsString::from));
                let records = self.run(&flags, &folder.path().join("run"))?;
                let cost = cost_of_tokens(&records, runs.warmup, TOKENS)?;
                println!("round {round}  {name:28} {:.1} s", cost.seconds);
                measured.push(cost);
            }
        }
        let stages = stages.iter().zip(&rounds);
        let stages = stages.map(|((name, flags), rounds)| Stage {
            name: (*name).to_owned(),
            flags: flags.iter().map(ToString::to_string).collect(),
            cost: median_cost(rounds),
        });
        Ok(stages.collect())
    }
}

/// Returns the seconds that `tokens` tokens (without padding) take at the rate of the median step after `warmup` steps,
/// and the peak.
fn cost_of_tokens(records: &[StepMetrics], warmup: usize, tokens: f64) -> StepResult<StageCost> {
    let seconds_per_token: Vec<f64> = records
        .windows(2)
        .skip(warmup.saturating_sub(1))
        .filter_map(|pair| {
            let trained = pair[1].tokens_seen? - pair[0].tokens_seen?;
            Some(pair[1].time_by_phase()?.total() / trained as f64)
        })
        .filter(|seconds| seconds.is_finite())
        .collect();
    if seconds_per_token.is_empty() {
        return Err("the run has no step after the warm-up: give more --steps".into());
    }
    let peaks = records.iter().map(|step| step.peak_memory_bytes);
    Ok(StageCost {
        seconds: tokens * median(seconds_per_token),
        peak_memory_bytes: peaks.max().unwrap_or(0),
    })
}

/// Returns the medians of the costs of several rounds.
pub fn median_cost(rounds: &[StageCost]) -> StageCost {
    let peaks = rounds.iter().map(|cost| cost.peak_memory_bytes as f64);
    StageCost {
        seconds: median(rounds.iter().map(|cost| cost.seconds).collect()),
        peak_memory_bytes: median(peaks.collect()) as u64,
    }
}
