//! Reads damaged inputs with every reader of this crate for as long as one likes.
//!
//! ```text
//! cargo run --release -p overdrive-datasets --no-default-features --features speech \
//!     --example fuzz_parsers -- [SECONDS [SEED [TARGET]]]
//! ```
//!
//! By default 60 seconds, a seed from the clock, all targets in turn. A case that panics ends the run; its input
//! is kept in the folder for temporary files, and the same seed makes it again.

use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

#[path = "../tests/common/fuzz.rs"]
mod fuzz;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut arguments = std::env::args().skip(1);
    let seconds = arguments.next().map_or(Ok(60), |text| text.parse())?;
    let clock = SystemTime::now().duration_since(UNIX_EPOCH)?.as_secs();
    let seed = arguments.next().map_or(Ok(clock), |text| text.parse())?;
    let mut targets = fuzz::targets();
    if let Some(name) = arguments.next() {
        targets.retain(|target| target.name == name);
        if targets.is_empty() {
            return Err(format!("there is no target {name:?}").into());
        }
    }
    let dir = tempfile::tempdir()?;
    println!("seed {seed}");
    let share = Duration::from_secs(seconds) / u32::try_from(targets.len())?;
    for target in &targets {
        let started = Instant::now();
        let mut total = fuzz::Outcome::default();
        while started.elapsed() < share {
            let outcome = target.run(dir.path(), seed, total.cases, 50);
            total.cases += outcome.cases;
            total.errors += outcome.errors;
        }
        println!(
            "{:<20} {:>9} cases, {:>3.0}% errors, peak {} MiB",
            target.name,
            total.cases,
            100.0 * total.errors as f64 / total.cases.max(1) as f64,
            fuzz::peak_mib().map_or("?".to_owned(), |mib| mib.to_string()),
        );
    }
    Ok(())
}
