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

#[test]
fn the_machine_is_described_and_its_devices_work() {
    let checks = passes("doctor");
    let find = |name: &str| checks.iter().find(|check| check.name == name).unwrap();
    assert!(find("libtorch").detail.contains("libtorch_cpu"));
    assert!(find("memory statistics").figures[0].value.is_some());
}

#[test]
fn attention_is_that_of_f64() {
    assert!(passes("attention").len() > 60);
}

#[test]
fn fused_operators_are_those_of_f64() {
    assert!(passes("fused").len() > 80);
}

#[test]
fn the_decode_kernel_has_checks_that_run_without_it() {
    assert!(passes("decode_kernel").len() > 100);
}

#[test]
fn quantized_layers_are_those_of_their_weights() {
    assert!(passes("quantized").len() > 100);
}

#[test]
fn the_small_model_trains_generates_and_resumes() {
    assert!(passes("tiny").len() > 30);
}

#[test]
fn steps_for_graphs_and_their_refusal_on_a_cpu() {
    passes("graphs");
}

#[test]
fn every_cache_and_every_optimizer_is_compared() {
    passes("caches");
    passes("optimizers");
}

#[test]
fn memory_is_exhausted_and_used_again() {
    passes("memory");
}

#[test]
fn steps_are_traced_and_their_reads_counted() {
    passes("profiler");
    passes("reads");
}

#[test]
fn two_processes_train() {
    passes("distributed");
}

#[test]
fn figures_are_measured() {
    for section in ["train_step", "decode", "ablation", "backends", "kernels"] {
        let checks = passes(section);
        let measured = checks.iter().filter(|check| !check.figures.is_empty());
        assert!(measured.count() >= 2, "{section}");
    }
}

/// A run has to tell at once what cannot work: figures come after it.
#[test]
fn the_machine_comes_first_and_names_are_unique() {
    assert_eq!(SECTIONS[0].name, "doctor");
    let mut names: Vec<&str> = SECTIONS.iter().map(|section| section.name).collect();
    names.sort_unstable();
    names.dedup();
    assert_eq!(names.len(), SECTIONS.len());
}
