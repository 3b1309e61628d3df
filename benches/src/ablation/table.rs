use std::fmt::Write as _;

use serde::{Deserialize, Serialize};

use super::Measurement;
use crate::median;

/// A row of the table: the medians of a configuration's rounds.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Row {
    /// The configuration.
    pub name: String,
    /// The flags of the trainer.
    pub flags: Vec<String>,
    /// The medians.
    pub measurement: Measurement,
    /// The steps per second relative to the default: the median of the rounds' ratios.
    pub speed: f64,
    /// The peak memory relative to the default.
    pub memory: f64,
}

/// The table, and the machine on which it was measured.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Table {
    /// A description of the machine.
    pub machine: String,
    /// A description of the training.
    pub run: String,
    /// The rows, the default first.
    pub rows: Vec<Row>,
    /// The configurations that were left out, with the reasons.
    pub notes: Vec<String>,
}

impl Row {
    /// Returns the medians over `rounds`, relative to those of the default in the same rounds.
    pub fn new(
        name: &str,
        flags: &[&str],
        rounds: &[Measurement],
        default: &[Measurement],
    ) -> Self {
        let ratios = |value: fn(&Measurement) -> f64| {
            let pairs = rounds.iter().zip(default);
            median(
                pairs
                    .map(|(this, base)| value(this) / value(base))
                    .collect(),
            )
        };
        let memory = median(rounds.iter().map(|m| m.peak_memory_bytes as f64).collect());
        Self {
            name: name.to_owned(),
            flags: flags.iter().map(ToString::to_string).collect(),
            measurement: Measurement {
                step_seconds: median(rounds.iter().map(|m| m.step_seconds).collect()),
                peak_memory_bytes: memory as u64,
                eval_loss: median(rounds.iter().map(|m| m.eval_loss).collect()),
            },
            speed: ratios(|m| 1.0 / m.step_seconds),
            memory: ratios(|m| m.peak_memory_bytes as f64),
        }
    }
}

impl Table {
    /// Returns the table as Markdown.
    pub fn markdown(&self) -> String {
        let mut text = format!("{}. {}.\n\n", self.machine, self.run);
        text += "| configuration | step | speed | peak memory | of default | validation loss |\n";
        text += "|---|---|---|---|---|---|\n";
        for row in &self.rows {
            let m = &row.measurement;
            let _ = writeln!(
                text,
                "| {} | {:.0} ms | {:.2}x | {:.0} MiB | {:.0}% | {:.3} |",
                row.name,
                m.step_seconds * 1e3,
                row.speed,
                m.peak_memory_bytes as f64 / f64::from(1 << 20),
                row.memory * 100.0,
                m.eval_loss
            );
        }
        for note in &self.notes {
            let _ = write!(text, "\n{note}\n");
        }
        text
    }
}
