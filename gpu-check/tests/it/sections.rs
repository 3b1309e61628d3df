//! The sections with small sizes.

use overdrive_gpu_check::finding::{Check, Outcome};
use overdrive_gpu_check::sections::SECTIONS;

use crate::runner::gpu_check;

/// Runs a section and requires that every check of it passes, but for skips.
fn passes(section: &str) -> Vec<Check> {
    let folder = tempfile::tempdir().unwrap();
    let (output, mut report) = gpu_check(folder.path(), &["--section", section]);
    let section = report.sections.remove(0);
    let failed: Vec<&Check> = section
        .checks
        .iter()
        .filter(|check| check.outcome == Outcome::Failed)
        .collect();
    assert!(failed.is_empty(), "{failed:#?}");
    assert!(output.status.success());
    section.checks
}
