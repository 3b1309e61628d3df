//! Makes the report of a run from its metrics file, also while the run goes on.
//!
//! ```text
//! cargo run --release -p overdrive-examples --example report -- runs/tiny-001/metrics.jsonl
//! ```
//! writes `report.html` and `loss.svg` beside it.

use std::path::PathBuf;

use overdrive::profiling::{Report, read_metrics};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let Some(path) = std::env::args_os().nth(1).map(PathBuf::from) else {
        return Err("usage: report METRICS.jsonl".into());
    };
    let file = read_metrics(&path)?;
    let mut report = Report {
        title: path.display().to_string(),
        metrics: file.records,
        ..Default::default()
    };
    if file.truncated.is_some() {
        report
            .notes
            .push("The last line of the metrics file is cut off and left out.".into());
    }
    for (name, write) in [
        (
            "report.html",
            Report::write_html as fn(&Report, PathBuf) -> _,
        ),
        ("loss.svg", Report::write_loss_svg),
    ] {
        let to = path.with_file_name(name);
        write(&report, to.clone())?;
        println!("wrote {}", to.display());
    }
    Ok(())
}
