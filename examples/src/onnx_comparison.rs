//! Compares the speed of a model in Overdrive and of its ONNX file in ONNX Runtime.

use std::fmt::Write;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};
use overdrive::generation::{GenerationConfig, generate};
use overdrive::sys::threads;
use overdrive::transformer::CausalLm;
use serde::Deserialize;

/// The options of the comparison, which decodes one sequence greedily.
#[derive(Debug, Clone)]
pub struct OnnxComparison {
    /// The number of prompt tokens.
    pub prompt: usize,
    /// The number of generated tokens.
    pub new: usize,
    /// The number of rounds; the medians are reported.
    pub rounds: usize,
}

/// The tokens per second, and the new tokens.
#[derive(Debug, Deserialize)]
struct Speeds {
    prefill: f64,
    decode: f64,
    tokens: Vec<i64>,
}

impl OnnxComparison {
    /// Runs both in turn on the same number of threads and returns a table of their speeds.
    pub fn run(&self, model: &CausalLm, file: &Path) -> Result<String> {
        let vocabulary = model.config().vocab_size();
        let id = |at: usize| (at as i64 * 7919 + 13) % vocabulary;
        let prompt: Vec<i64> = (0..self.prompt).map(id).collect();
        // The first run allocates memory and starts threads in both.
        self.ours(model, &prompt)?;
        let (mut ours, mut theirs) = (Vec::new(), Vec::new());
        for _ in 0..self.rounds {
            ours.push(self.ours(model, &prompt)?);
            theirs.push(self.theirs(file, &prompt)?);
        }
        let (Some(first), Some(other)) = (ours.first(), theirs.first()) else {
            bail!("--rounds is 0; it must be positive");
        };
        let mut pairs = first.tokens.iter().zip(&other.tokens);
        let differs = pairs.position(|(a, b)| a != b);

        let title = format!("tokens/s, {} threads", threads::intra_op());
        let mut table = format!(
            "{title:<22}{:>12}{:>15}{:>9}\n",
            "Overdrive", "ONNX Runtime", "ratio"
        );
        let median = |all: &[Speeds], which: fn(&Speeds) -> f64| {
            let mut speeds: Vec<f64> = all.iter().map(which).collect();
            speeds.sort_by(f64::total_cmp);
            speeds[speeds.len() / 2]
        };
        let mut row = |name: String, which: fn(&Speeds) -> f64| {
            let (a, b) = (median(&ours, which), median(&theirs, which));
            writeln!(table, "{name:<22}{a:>12.1}{b:>15.1}{:>8.2}x", a / b)
        };
        row(format!("prefill of {}", self.prompt), |speeds| {
            speeds.prefill
        })?;
        row(format!("decode of {}", self.new), |speeds| speeds.decode)?;
        match differs {
            None => writeln!(table, "the {} tokens are the same", first.tokens.len())?,
            Some(at) => writeln!(table, "the tokens differ from index {at} on")?,
        }
        Ok(table)
    }

    fn ours(&self, model: &CausalLm, prompt: &[i64]) -> Result<Speeds> {
        let config = GenerationConfig {
            max_new_tokens: Some(self.new),
            ..GenerationConfig::default()
        };
        let output = generate(model, &[prompt.to_vec()], &config)?;
        Ok(Speeds {
            prefill: output.timings.prefill_tokens_per_second(),
            decode: output.timings.decode_tokens_per_second(),
            tokens: output.sequences[0][prompt.len()..].to_vec(),
        })
    }

    fn theirs(&self, file: &Path, prompt: &[i64]) -> Result<Speeds> {
        let python = std::env::var("OVERDRIVE_PYTHON").unwrap_or_else(|_| "python3".to_owned());
        let ids: Vec<String> = prompt.iter().map(i64::to_string).collect();
        let output = Command::new(&python)
            .arg(concat!(env!("CARGO_MANIFEST_DIR"), "/python/onnx_speed.py"))
            .arg("--model")
            .arg(file)
            .args(["--prompt-ids", &ids.join(",")])
            .args(["--new", &self.new.to_string()])
            .args(["--threads", &threads::intra_op().to_string()])
            .output()
            .with_context(|| {
                format!("cannot run {python}; set OVERDRIVE_PYTHON to another interpreter")
            })?;
        if !output.status.success() {
            bail!(
                "{python}: {}",
                String::from_utf8_lossy(&output.stderr).trim()
            );
        }
        let speeds: Speeds = serde_json::from_slice(&output.stdout)?;
        let count = speeds.tokens.len();
        ensure!(
            count == self.new,
            "ONNX Runtime generated {count} tokens instead of {}",
            self.new
        );
        Ok(speeds)
    }
}
