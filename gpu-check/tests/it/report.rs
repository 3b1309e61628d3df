//! The report on its own.

use overdrive_gpu_check::finding::{Check, Finding, Outcome};
use overdrive_gpu_check::report::{KernelUse, Report, SectionReport, markdown_path, value_text};

fn report() -> Report {
    let check = |name: &str, finding: Finding| finding.into_check(name.to_owned(), 0.25);
    let mut report = Report::new("cpu", Some("abc".to_owned()));
    report.sections.push(SectionReport {
        name: "numbers".to_owned(),
        about: "Numbers.".to_owned(),
        seconds: 1.0,
        checks: vec![
            check(
                "right",
                Finding::passed().with("error", 1e-4).with("ms", 12.0),
            ),
            check("wrong", Finding::failed("a | b").with("error", f64::NAN)),
            check("left out", Finding::skipped("needs two GPUs")),
        ],
        own_kernels: Some(kernel_use(&[("adam8", 2), ("rotary_split", 3)])),
    });
    report.update(std::time::Duration::from_secs(3));
    report
}

fn kernel_use(launches: &[(&str, u64)]) -> KernelUse {
    let launches = launches.iter();
    KernelUse {
        switch: Some("1".to_owned()),
        target: Some("sm_90a".to_owned()),
        launches: launches
            .map(|(kernel, count)| ((*kernel).to_owned(), *count))
            .collect(),
    }
}

#[test]
fn the_use_of_overdrives_kernels_is_in_both_reports() {
    let json = serde_json::to_value(report()).unwrap();
    let expected = serde_json::json!({
        "switch": "1", "target": "sm_90a", "launches": {"adam8": 2, "rotary_split": 3},
    });
    assert_eq!(json["sections"][0]["own_kernels"], expected);
    let text = report().markdown();
    let expected = "Kernels of Overdrive for sm_90a, OVERDRIVE_GPU_KERNELS is 1; launches: adam8 2, rotary_split 3.\n";
    assert!(text.contains(expected), "{text}");
    // A section whose process ended early has the launches of two.
    let mut both = kernel_use(&[("adam8", 2)]);
    both.add(kernel_use(&[("adam8", 1), ("cross_entropy", 4)]));
    assert_eq!(both, kernel_use(&[("adam8", 3), ("cross_entropy", 4)]));
}

#[test]
fn the_markdown_has_a_column_for_each_figure_and_lists_the_failures_first() {
    let text = report().markdown();
    let expected = "\
| check | outcome | error | ms | remark | s |
|---|---|---|---|---|---|
| right | passed | 1.0e-4 | 12 |  | 0.2 |
| wrong | **failed** | not finite |  | a \\| b | 0.2 |
| left out | skipped |  |  | needs two GPUs | 0.2 |
";
    assert!(text.contains(expected), "{text}");
    assert!(text.contains("1 passed, 1 failed, 1 skipped"), "{text}");
    assert!(
        text.contains("## Failures\n\n- numbers: wrong: a | b\n"),
        "{text}"
    );
    assert!(text.contains("not complete"), "{text}");
}

#[test]
fn what_is_written_is_read_again() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("found.json");
    let report = report();
    report.write(&path).unwrap();
    let read: Report = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    assert_eq!(read, report);
    let beside = std::fs::read_to_string(markdown_path(&path)).unwrap();
    assert_eq!(beside, report.markdown());
}

#[test]
fn a_skip_is_a_failure_where_a_gpu_is_required_unless_it_is_allowed() {
    let required =
        |finding: Finding| -> Check { finding.into_check("x".to_owned(), 0.0).required() };
    let skipped = required(Finding::skipped("needs more"));
    assert_eq!(skipped.outcome, Outcome::Failed);
    assert!(skipped.detail.contains("needs more"), "{}", skipped.detail);
    let allowed = required(Finding::skipped_allowed("needs two GPUs"));
    assert_eq!(allowed.outcome, Outcome::Skipped);
    assert_eq!(required(Finding::passed()).outcome, Outcome::Passed);
}

#[test]
fn figures_keep_their_digits() {
    let cases = [
        (Some(0.0), "0"),
        (Some(123_456.7), "123457"),
        (Some(45.678), "45.7"),
        (Some(0.123_456), "0.123"),
        (Some(1.5e-5), "1.5e-5"),
        (Some(7.0), "7"),
        (None, "not finite"),
    ];
    for (value, text) in cases {
        assert_eq!(value_text(value), text);
    }
}
