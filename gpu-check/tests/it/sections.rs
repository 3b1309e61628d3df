//! The sections with small sizes.

use std::time::Duration;

use overdrive_gpu_check::finding::{Check, Outcome};
use overdrive_gpu_check::peer::without_figures;
use overdrive_gpu_check::sections::{Kind, SECTIONS, Section, Target, batch_for, share};

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
fn the_checks_of_the_kernels_run_without_them() {
    let checks = passes("own_kernels");
    assert!(checks.len() > 100);
    let loaded = &checks[0];
    assert_eq!(loaded.name, "every image for this GPU is loaded");
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

/// Returns a figure of a check.
fn figure(checks: &[Check], check: &str, figure: &str) -> f64 {
    let found = checks.iter().find(|found| found.name == check);
    let mut figures = found.unwrap().figures.iter();
    let found = figures.find(|found| found.name == figure);
    found.and_then(|found| found.value).unwrap()
}

#[test]
fn an_adapter_over_weights_of_4_bits_is_trained_with_and_without_checkpoints() {
    let checks = passes("finetune");
    for name in ["QLoRA", "QLoRA, every block recomputed"] {
        assert!(figure(&checks, name, "tokens/s") > 0.0);
    }
    // The weights of the two blocks take half a byte each, those of embedding and head four.
    let [blocks, tables] = [
        2 * (2 * 128 * 128 + 2 * 64 * 128 + 3 * 256 * 128),
        2 * 1000 * 128,
    ];
    let dense = f64::from(4 * (blocks + tables)) / f64::from(1 << 30);
    let packed = f64::from(blocks / 2 + 4 * tables) / f64::from(1 << 30);
    let weights = figure(&checks, "QLoRA", "weights GiB");
    assert!(weights > packed && weights < 0.9 * dense, "{weights}");
}

#[test]
fn the_phases_of_a_start_add_up() {
    let checks = passes("start");
    for (name, last) in [
        ("from the file to the first token", "first token s"),
        ("from the file to the first step", "first step s"),
    ] {
        let of = |name_of: &str| figure(&checks, name, name_of);
        let phases: f64 = ["libraries s", "file s", "kernels s", last]
            .map(of)
            .iter()
            .sum();
        // The second time may be slower than the first, which then has loaded nothing.
        assert!(of("s") <= phases + 1e-9 && of("file s") > 0.0, "{checks:?}");
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
    let at = |name: &str| SECTIONS.iter().position(|section| section.name == name);
    assert_eq!(at("own_kernels"), Some(1));
    let first_figure = SECTIONS.iter().position(|s| s.kind == Kind::Figures);
    let mut after = SECTIONS.iter().skip(first_figure.unwrap());
    assert!(after.all(|section| section.kind == Kind::Figures));
}

const BUDGET: Duration = Duration::from_secs(9 * 60);

/// Returns the time of each section of a run in which each takes this part of its time.
fn times(budget: Duration, part: f64) -> Vec<Duration> {
    let sections: Vec<&Section> = SECTIONS.iter().collect();
    let mut left = budget;
    let times = (0..sections.len()).map(|index| {
        let time = share(&sections[index..], Target::Cuda, left);
        left = left.saturating_sub(time.mul_f64(part));
        time
    });
    times.collect()
}

#[test]
fn the_plans_fit_nine_minutes_and_those_of_correctness_four() {
    let planned = |kind: Option<Kind>| -> u64 {
        let sections = SECTIONS
            .iter()
            .filter(|s| kind.is_none_or(|kind| s.kind == kind));
        sections.map(|section| section.planned().as_secs()).sum()
    };
    assert!(planned(None) <= 9 * 60, "{}", planned(None));
    assert!(planned(Some(Kind::Correctness)) <= 4 * 60);
}

/// The guide says how long each section may take.
#[test]
fn the_plans_are_those_of_the_guide() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/src/gpu-check.md");
    let guide = std::fs::read_to_string(path).unwrap();
    for section in SECTIONS {
        let (planned, limit) = (section.planned(), section.limit(Target::Cuda));
        let row = guide
            .lines()
            .find(|line| line.starts_with(&format!("| `{}` |", section.name)));
        let row = row.unwrap_or_else(|| panic!("{} has no row", section.name));
        let times = format!("| {} | {} |", planned.as_secs(), limit.as_secs());
        assert!(row.ends_with(&times), "{row} does not end with {times}");
    }
}

#[test]
fn each_section_gets_its_plan_though_all_before_it_take_their_time() {
    let limits = SECTIONS.iter().map(|section| section.limit(Target::Cuda));
    let all: Duration = limits.clone().sum();
    assert!(all > BUDGET, "there is nothing to share");
    let worst = times(BUDGET, 1.0);
    for (time, (limit, section)) in worst.iter().zip(limits.clone().zip(SECTIONS)) {
        assert!(
            *time >= section.planned() && *time <= limit,
            "{}",
            section.name
        );
    }
    let taken: Duration = worst.iter().sum();
    assert!(taken <= BUDGET, "{taken:?}");
    // Where the sections end early, the last ones have their whole limit.
    let (early, limits) = (times(BUDGET, 0.4), limits.collect::<Vec<_>>());
    let last = SECTIONS.len() - 6;
    assert_eq!(early[last..], limits[last..]);
    // Of a shorter run each gets its part.
    assert!(
        times(Duration::from_secs(180), 1.0)
            .iter()
            .all(|time| !time.is_zero())
    );
}

#[test]
fn the_batch_of_the_training_step_fits_the_memory_of_the_gpu() {
    let gigabytes = [24, 40, 48, 80, 85, 96, 141, 180];
    let batches = gigabytes.map(|gigabytes| batch_for(gigabytes * 1_000_000_000));
    assert_eq!(batches, [1, 1, 2, 4, 4, 8, 8, 8]);
}

#[test]
fn a_baseline_that_ran_out_of_memory_is_a_failure_and_another_one_a_skip() {
    let error = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 3.91 GiB.";
    let found = without_figures("exit status: 1", error);
    assert_eq!(found.outcome, Outcome::Failed);
    assert!(found.detail.contains("3.91 GiB"), "{}", found.detail);
    let error = "ModuleNotFoundError: No module named 'torch'";
    let found = without_figures("exit status: 1", error);
    assert_eq!((found.outcome, found.allowed), (Outcome::Skipped, true));
}
