//! Writes the report of a run from its metrics file; the run may still be running.
//!
//! ```text
//! cargo run --release -p overdrive-examples --example report -- runs/tiny-001
//! ```
//!
//! `metrics.html` and `metrics.svg` are written beside the metrics file. The report that a run writes at its end,
//! `report.html`, also has its configuration and samples.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Result;
use clap::Parser;
use overdrive::tracking::{Report, read_metrics};
use overdrive_examples::{print_line, run_main};

/// Writes the report of a run from its metrics file
#[derive(Parser)]
struct Flags {
    /// The folder of the run, or its metrics.jsonl
    metrics: PathBuf,
}

fn main() -> ExitCode {
    run_main(|| run(&Flags::parse()))
}

fn run(flags: &Flags) -> Result<()> {
    let path = &match flags.metrics.is_dir() {
        true => flags.metrics.join("metrics.jsonl"),
        false => flags.metrics.clone(),
    };
    let file = read_metrics(path)?;
    let mut report = Report {
        title: path.display().to_string(),
        metrics: file.records,
        ..Default::default()
    };
    if file.truncated.is_some() {
        report
            .notes
            .push("The last line of the metrics file is incomplete and was skipped.".into());
    }
    if let Some(first) = file.skipped_lines.first() {
        report.notes.push(format!(
            "{} lines of the metrics file are no records and were skipped; the first is line {first}.",
            file.skipped_lines.len()
        ));
    }
    for (extension, write) in [
        ("html", Report::write_html as fn(&Report, PathBuf) -> _),
        ("svg", Report::write_loss_svg),
    ] {
        let to = path.with_extension(extension);
        write(&report, to.clone())?;
        print_line(format_args!("wrote {}", to.display()));
    }
    Ok(())
}
