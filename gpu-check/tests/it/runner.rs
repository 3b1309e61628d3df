//! A section's failures in all their forms, each in processes of their own.

use std::path::Path;
use std::process::{Command, Output};

use overdrive_gpu_check::finding::{NO_TIME, Outcome};
use overdrive_gpu_check::report::Report;

/// Runs the program on the CPU and returns its output and its report.
pub(crate) fn gpu_check(folder: &Path, arguments: &[&str]) -> (Output, Report) {
    let path = folder.join("report.json");
    let output = Command::new(env!("CARGO_BIN_EXE_gpu-check"))
        .args(["--device", "cpu", "--report"])
        .arg(&path)
        .args(arguments)
        .env_remove("OVERDRIVE_REQUIRE_GPU")
        .output()
        .unwrap();
    let text = std::fs::read(&path).unwrap_or_default();
    let report = serde_json::from_slice(&text).unwrap_or_else(|error| {
        panic!("{error}: {}", String::from_utf8_lossy(&output.stderr));
    });
    (output, report)
}

#[test]
fn a_check_that_ends_its_process_fails_and_the_next_ones_run() {
    let folder = tempfile::tempdir().unwrap();
    let (output, report) = gpu_check(folder.path(), &["--section", "machinery"]);
    assert!(!output.status.success());
    assert!(report.complete);
    let checks = &report.sections[0].checks;
    let found: Vec<(&str, Outcome)> = checks
        .iter()
        .map(|c| (c.name.as_str(), c.outcome))
        .collect();
    use Outcome::{Failed, Passed, Skipped};
    assert_eq!(
        found,
        [
            ("passes", Passed),
            ("is not a number", Passed),
            ("is wrong", Failed),
            ("returns an error", Failed),
            ("panics", Failed),
            ("causes a warning of libtorch", Passed),
            ("is skipped", Skipped),
            ("may be skipped", Skipped),
            ("ends the process", Failed),
            ("runs after it", Passed),
            ("no warning of libtorch", Failed),
        ]
    );
    let detail = |name: &str| &checks.iter().find(|c| c.name == name).unwrap().detail;
    assert!(detail("returns an error").contains("the cause"));
    assert!(detail("panics").contains("out of the blue"));
    let warning = detail("no warning of libtorch");
    assert!(warning.contains("is_pinned() is deprecated"), "{warning}");
    let words = detail("ends the process");
    // Signal 6 is SIGABRT.
    assert!(
        words.contains("signal 6") && words.contains("the last words"),
        "{words}"
    );
    assert_eq!((report.passed, report.failed, report.skipped), (4, 5, 2));
    let printed = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(printed.contains("FAILED panics"), "{printed}");
}

/// However slow the machine is: the time is over while the first section hangs, so that none is left for the second.
#[test]
fn a_check_that_hangs_is_stopped_and_sections_without_time_say_so() {
    let folder = tempfile::tempdir().unwrap();
    let arguments = [
        "--minutes",
        "0.1",
        "--section",
        "machinery-hang",
        "machinery",
    ];
    let (output, report) = gpu_check(folder.path(), &arguments);
    assert!(!output.status.success());
    let [hung, left_out] = &report.sections[..] else {
        panic!("{report:?}");
    };
    assert_eq!(hung.checks.len(), 1, "{hung:?}");
    assert_eq!(hung.checks[0].outcome, Outcome::Failed);
    assert!(hung.checks[0].detail.contains("stopped"), "{hung:?}");
    assert_eq!(left_out.checks.len(), 1, "{left_out:?}");
    assert_eq!(left_out.checks[0].detail, NO_TIME);
}

#[test]
fn options_that_contradict_each_other_and_unknown_sections_are_named() {
    let of = |arguments: &[&str], required: &str| {
        let output = Command::new(env!("CARGO_BIN_EXE_gpu-check"))
            .args(arguments)
            .env("OVERDRIVE_REQUIRE_GPU", required)
            .output()
            .unwrap();
        assert!(!output.status.success());
        String::from_utf8_lossy(&output.stderr).into_owned()
    };
    let error = of(&["--device", "cpu"], "1");
    assert!(error.contains("OVERDRIVE_REQUIRE_GPU"), "{error}");
    let error = of(&["--device", "cpu", "--section", "nothing"], "0");
    assert!(
        error.contains("nothing") && error.contains("attention"),
        "{error}"
    );
    let error = of(&["--device", "cpu", "--minutes", "0"], "0");
    assert!(error.contains("--minutes"), "{error}");
}

#[test]
fn without_a_gpu_the_check_of_one_fails() {
    if tch::Cuda::is_available() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("report.json");
    let output = Command::new(env!("CARGO_BIN_EXE_gpu-check"))
        .args([
            "--device",
            "cuda",
            "--section",
            "doctor",
            "fused",
            "--report",
        ])
        .arg(&path)
        .output()
        .unwrap();
    assert!(!output.status.success());
    let report: Report = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    let outcome = |section: usize, name: &str| {
        let mut checks = report.sections[section].checks.iter();
        checks.find(|check| check.name == name).map(|c| c.outcome)
    };
    // What does not need the device is still told, and every other section has one line.
    assert_eq!(outcome(0, "machine"), Some(Outcome::Passed));
    assert_eq!(outcome(0, "devices"), Some(Outcome::Failed));
    assert_eq!(outcome(1, "device"), Some(Outcome::Failed));
    assert_eq!(report.sections[1].checks.len(), 1);
}
