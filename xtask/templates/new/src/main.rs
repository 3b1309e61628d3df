//! Trains the network on the GPU if there is one, in the recommended precision.
//!
//! ```text
//! cargo run
//! ```

use std::process::ExitCode;

use anyhow::Result;
use my_model::{Settings, train};
use overdrive_precision::Precision;
use overdrive_trainer::{RunEnd, run_main};
use tch::Device;

fn main() -> ExitCode {
    run_main(run) // Ctrl-C saves a checkpoint and ends with code 75
}

fn run() -> Result<RunEnd> {
    let device = Device::cuda_if_available();
    let precision = Precision::recommend(device).precision;
    println!("{device:?}, {precision}");
    let settings = Settings {
        precision,
        ..Default::default()
    };
    let summary = train(&settings, device)?;
    println!(
        "{:.1}% of the points are classified correctly; the checkpoints are in {}",
        100.0 * summary.accuracy,
        settings.out.display()
    );
    Ok(summary.end)
}
