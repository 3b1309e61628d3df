//! The lines at the end of a run.

use overdrive_gpu_check::finding::Finding;
use overdrive_gpu_check::report::{Report, SectionReport};
use overdrive_gpu_check::summary::lines;

use crate::runner::gpu_check;

fn section(name: &str, checks: Vec<(&str, Finding)>) -> SectionReport {
    SectionReport {
        name: name.to_owned(),
        about: String::new(),
        seconds: 1.0,
        checks: checks
            .into_iter()
            .map(|(name, finding)| finding.into_check(name.to_owned(), 0.5))
            .collect(),
        own_kernels: None,
    }
}

fn rate(tokens: f64) -> Finding {
    Finding::passed().with("tokens/s", tokens)
}

/// A run with the figures of 27 November 2026.
fn report() -> Report {
    let mut report = Report::new("cuda", None);
    let wrong = || Finding::failed("wrong");
    report.sections = vec![
        section("tiny", vec![("one", wrong()), ("two", wrong())]),
        section(
            "reads",
            vec![("three", wrong()), ("four", wrong()), ("five", rate(1.0))],
        ),
        section(
            "train_step",
            vec![
                ("Overdrive in bf16", rate(49276.0).with("peak GiB", 47.0)),
                ("PyTorch, eager", rate(53886.0)),
                ("PyTorch, compile", rate(68647.0)),
                ("PyTorch, liger", Finding::skipped_allowed("no liger")),
                (
                    "PyTorch, adamw-8bit",
                    Finding::failed("stopped").with("tokens/s", 1.0),
                ),
                ("Overdrive, own kernels in bf16", rate(67532.0)),
            ],
        ),
        section(
            "decode",
            vec![
                ("dense, 1 streams, generate", rate(83.1)),
                ("dense, 64 streams, engine", Finding::failed("no memory")),
                ("transformers, eager, 1 streams", rate(20.5)),
            ],
        ),
    ];
    report.update(std::time::Duration::from_secs(9));
    report
}

#[test]
fn failures_come_first_and_the_default_stands_beside_each_peer_as_a_ratio() {
    assert_eq!(
        lines(&report()),
        [
            "7 passed, 6 failed, 1 skipped",
            "failed: tiny: one; tiny: two; reads: three; and 3 more",
            "training step: 49276 tokens/s, 47 GiB; 0.91x PyTorch eager, 0.72x torch.compile, Liger not measured, \
             PyTorch with AdamW in 8 bits not measured, PyTorch with flash-attn not measured",
            "decode, 1 stream, generate: 83.1 tokens/s; 4.05x transformers, with torch.compile not measured",
            "decode, many streams, engine: not measured",
        ]
    );
}

#[test]
fn a_run_prints_its_lines_last_and_the_report_begins_with_them() {
    let folder = tempfile::tempdir().unwrap();
    let sections = ["train_step", "decode", "ablation", "finetune", "start"];
    let arguments: Vec<&str> = ["--section"].into_iter().chain(sections).collect();
    let (output, report) = gpu_check(folder.path(), &arguments);
    let lines = lines(&report);
    // One for the outcomes and one for each comparison: every check is found by its name.
    assert_eq!(lines.len(), 8, "{lines:#?}");
    assert!(
        !lines
            .iter()
            .any(|line| line.ends_with("not measured") && !line.contains(';'))
    );
    let printed = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(
        printed.ends_with(&format!("{}\n", lines.join("\n"))),
        "{printed}"
    );
    let markdown = std::fs::read_to_string(folder.path().join("report.md")).unwrap();
    assert!(
        markdown.contains(&format!("\n\n- {}\n", lines.join("\n- "))),
        "{markdown}"
    );
}

#[test]
fn there_are_at_most_ten_lines() {
    let mut report = report();
    let finding = || {
        rate(10.0)
            .with("s", 1.0)
            .with("speed", 11.1)
            .with("of default", 0.081)
    };
    report.sections.extend([
        section("ablation", vec![("all (bf16)", finding())]),
        section("finetune", vec![("QLoRA", finding())]),
        section(
            "start",
            vec![
                ("from the file to the first token", finding()),
                ("from the file to the first step", finding()),
            ],
        ),
    ]);
    let lines = lines(&report);
    assert_eq!(lines.len(), 9, "{lines:#?}");
    assert_eq!(
        lines[3],
        "all techniques: 11.1 times the default's speed, 0.081 of its memory"
    );
}
