//! The program on a CPU: its sections, and what it does with checks that fail in every way.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::process::{Command, Output};

use serde_json::Value;

fn program() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_gpu-check"));
    command.env_remove("OVERDRIVE_REQUIRE_GPU");
    command
}

/// Runs sections on a device, and returns the program's output and its report.
fn gpu_check(device: &str, sections: &[&str], further: &[&str]) -> (Output, Value) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("report.json");
    let output = program()
        .args(["--device", device, "--report"])
        .arg(&path)
        .args(further)
        .arg("--section")
        .args(sections)
        .output()
        .unwrap();
    let text = std::fs::read(&path).unwrap_or_default();
    let report = serde_json::from_slice(&text).unwrap_or_else(|error| {
        panic!("{error}: {}", String::from_utf8_lossy(&output.stderr));
    });
    assert!(path.with_extension("md").is_file());
    (output, report)
}

fn text<'a>(check: &'a Value, key: &str) -> &'a str {
    check[key].as_str().unwrap_or_default()
}

/// Returns names, outcomes and details of the checks of a section.
fn checks(report: &Value, section: usize) -> Vec<[&str; 3]> {
    let checks = report["sections"][section]["checks"].as_array().unwrap();
    let texts = |check| ["name", "outcome", "detail"].map(|key| text(check, key));
    checks.iter().map(texts).collect()
}

/// Runs a section, and requires at least `least` checks, none of which fails.
fn passes(section: &str, least: usize) {
    let (output, report) = gpu_check("cpu", &[section], &["--minutes", "9"]);
    let checks = checks(&report, 0);
    let failed: Vec<_> = checks.iter().filter(|check| check[1] == "failed").collect();
    assert!(failed.is_empty(), "{failed:#?}");
    assert!(output.status.success());
    assert!(checks.len() >= least, "{section}: {} checks", checks.len());
}

#[test]
fn the_machine_is_described_and_its_devices_work() {
    passes("doctor", 5);
}

#[test]
fn attention_is_that_of_f64() {
    passes("attention", 60);
}

#[test]
fn fused_operators_are_those_of_f64() {
    passes("fused", 80);
}

#[test]
fn the_decode_kernel_has_checks_that_run_without_it() {
    passes("decode_kernel", 100);
}

#[test]
fn the_checks_of_the_kernels_run_without_them() {
    passes("own_kernels", 100);
}

#[test]
fn quantized_layers_are_those_of_their_weights() {
    passes("quantized", 100);
}

#[test]
fn the_small_model_trains_generates_and_resumes() {
    passes("tiny", 30);
}

#[test]
fn graphs_caches_and_optimizers_are_compared() {
    passes("graphs", 2);
    passes("caches", 8);
    passes("optimizers", 28);
}

#[test]
fn memory_is_exhausted_and_used_again_and_steps_are_traced() {
    passes("memory", 4);
    passes("profiler", 1);
    passes("reads", 9);
}

#[test]
fn two_processes_train() {
    passes("distributed", 1);
}

/// The checks that the lines at the end compare are found by their names.
#[test]
fn figures_are_measured_and_summed_up_at_the_end() {
    let sections = ["train_step", "decode", "ablation", "finetune", "start"];
    let sections = [&sections[..], &["backends", "kernels"]].concat();
    let (output, report) = gpu_check("cpu", &sections, &["--minutes", "9"]);
    for (index, section) in sections.iter().enumerate() {
        for check in report["sections"][index]["checks"].as_array().unwrap() {
            assert_ne!(check["outcome"], "failed", "{section}: {check:#}");
        }
    }
    let printed = String::from_utf8_lossy(&output.stdout).into_owned();
    let (_, summary) = printed.rsplit_once(" ==\n").unwrap();
    assert_eq!(summary.lines().count(), 8, "{summary}");
    let is_missing = |line: &str| line.ends_with("not measured") && !line.contains(';');
    assert!(!summary.lines().any(is_missing), "{summary}");
}

#[test]
fn a_check_that_ends_its_process_fails_and_the_next_ones_run() {
    let (output, report) = gpu_check("cpu", &["machinery"], &[]);
    assert!(!output.status.success() && report["complete"] == true);
    let checks = checks(&report, 0);
    let found: Vec<_> = checks.iter().map(|[name, is, _]| (*name, *is)).collect();
    let expected = [
        ("is not a number", "passed"),
        ("is wrong", "failed"),
        ("returns an error", "failed"),
        ("panics", "failed"),
        ("causes a warning of libtorch", "passed"),
        ("is skipped", "skipped"),
        ("ends the process", "failed"),
        ("runs after it", "passed"),
        ("no warning of libtorch", "failed"),
    ];
    assert_eq!(found, expected);
    let said = |at: usize, words: &str| assert!(checks[at][2].contains(words), "{checks:?}");
    said(2, "the cause");
    said(3, "out of the blue");
    // Signal 6 is SIGABRT.
    said(6, "signal 6");
    said(6, "the last words");
    said(8, "is_pinned() is deprecated");
}

/// However slow the machine is: the time is over while the first section hangs, so that none is left for the second.
#[test]
fn a_check_that_hangs_is_stopped_and_sections_without_time_say_so() {
    let (output, report) = gpu_check(
        "cpu",
        &["machinery-hang", "machinery"],
        &["--minutes", "0.1"],
    );
    assert!(!output.status.success());
    let [[_, outcome, detail]] = checks(&report, 0)[..] else {
        panic!("{report:#}");
    };
    assert!(
        outcome == "failed" && detail.contains("stopped"),
        "{detail}"
    );
    assert_eq!(checks(&report, 1), [["all", "skipped", "no time left"]]);
}

#[test]
fn without_a_gpu_the_check_of_one_fails() {
    if tch::Cuda::is_available() {
        return;
    }
    let (output, report) = gpu_check("cuda", &["doctor", "fused"], &[]);
    assert!(!output.status.success());
    // What does not need the device is still told, and every other section has one line.
    assert_eq!(checks(&report, 0)[0][..2], ["machine", "passed"]);
    let [[name, outcome, _]] = checks(&report, 1)[..] else {
        panic!("{report:#}");
    };
    assert_eq!((name, outcome), ("device", "failed"));
}

#[test]
fn options_that_contradict_each_other_and_unknown_sections_are_named() {
    for (arguments, required, word) in [
        (&["--device", "cpu"][..], "1", "OVERDRIVE_REQUIRE_GPU"),
        (
            &["--device", "cpu", "--section", "nothing"],
            "0",
            "attention",
        ),
        (&["--device", "cpu", "--minutes", "0"], "0", "--minutes"),
    ] {
        let mut command = program();
        command.args(arguments);
        let output = command.env("OVERDRIVE_REQUIRE_GPU", required).output();
        let output = output.unwrap();
        let error = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(!output.status.success() && error.contains(word), "{error}");
    }
}

/// The guide says how long each section may take.
#[test]
fn the_times_of_the_sections_are_those_of_the_guide() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/src/gpu-check.md");
    let guide = std::fs::read_to_string(path).unwrap();
    let listed = program().arg("--list").output().unwrap();
    let listed = String::from_utf8_lossy(&listed.stdout).into_owned();
    assert!(listed.lines().count() > 20, "{listed}");
    for line in listed.lines() {
        let [name, planned, limit] = [0, 1, 2].map(|at| line.split_whitespace().nth(at).unwrap());
        let mut rows = guide.lines();
        let row = rows.find(|row| row.starts_with(&format!("| `{name}` |")));
        let times = format!("| {planned} | {limit} |");
        assert!(
            row.is_some_and(|row| row.ends_with(&times)),
            "{row:?}, {times}"
        );
    }
}
