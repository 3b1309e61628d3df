//! The findings for machines that are given, so that they do not depend on this one.

use std::path::Path;

use overdrive_checkpointing::Schedule;
use overdrive_precision::Precision;
use overdrive_profiling::free_memory;
use tch::Device;

use super::*;
use crate::arguments::{ModelArguments, SaveStrategy};

const GIB: u64 = 1 << 30;

/// Returns the arguments of a very small run on a text in `folder`.
fn arguments(folder: &Path) -> TrainingArguments {
    let text = folder.join("text.txt");
    let lines = (0..400).map(|number| format!("The quick brown fox says {number}.\n"));
    std::fs::write(&text, lines.collect::<String>()).unwrap();
    TrainingArguments {
        data: vec![text],
        use_cpu: true,
        auto_precision: false,
        vocab_size: 300,
        context_length: 16,
        validation_fraction: 0.2,
        max_steps: 20,
        per_device_train_batch_size: 2,
        output_dir: Some(folder.join("run")),
        model: ModelArguments {
            hidden_size: 32,
            intermediate_size: 64,
            num_hidden_layers: 1,
            num_attention_heads: 2,
            ..ModelArguments::default()
        },
        ..TrainingArguments::default()
    }
}

/// Returns a machine on which nothing is short.
fn facts(arguments: &TrainingArguments) -> MachineFacts {
    let mut facts = MachineFacts::detect(arguments, Device::Cpu).unwrap();
    facts.free_memory = Some(8 * GIB);
    facts.free_disk = Some(8 * GIB);
    facts.precision = Precision::Fp32;
    facts.recommended.precision = Precision::Fp32;
    facts.precision_warning = None;
    (facts.threads, facts.processors) = (4, 4);
    facts
}

/// Returns the findings of a subject that are not fine.
fn found(
    arguments: &TrainingArguments,
    facts: &MachineFacts,
    subject: &str,
    processes: usize,
) -> Vec<Finding> {
    let folder = tempfile::tempdir().unwrap();
    let data = TextData::prepare_in(folder.path(), arguments, |_| {});
    let check = arguments.check_with(facts, data, processes).unwrap();
    let of_subject = |finding: &Finding| finding.subject == subject;
    let findings = check.findings.into_iter();
    let findings =
        findings.filter(|finding| of_subject(finding) && finding.severity > Severity::Fine);
    findings.collect()
}

fn only(
    arguments: &TrainingArguments,
    facts: &MachineFacts,
    subject: &str,
    processes: usize,
) -> Finding {
    let found = found(arguments, facts, subject, processes);
    assert_eq!(found.len(), 1, "{found:?}");
    found[0].clone()
}

#[test]
fn a_run_with_room_has_no_failure() {
    let folder = tempfile::tempdir().unwrap();
    let arguments = arguments(folder.path());
    let facts = facts(&arguments);
    for subject in [
        "data",
        "tokenizer",
        "disk",
        "memory",
        "precision",
        "threads",
    ] {
        assert_eq!(found(&arguments, &facts, subject, 1), [], "{subject}");
    }
    // A test is not a release build; this is the only finding about speed.
    let speed = found(&arguments, &facts, "speed", 1);
    assert_eq!(
        speed.len(),
        usize::from(cfg!(debug_assertions)),
        "{speed:?}"
    );
    let check = arguments.check_run(Device::Cpu, 1).unwrap();
    assert!(check.findings.len() >= 6);
}

#[test]
fn data_that_cannot_be_read_or_is_too_short_fails_as_the_run_would() {
    let folder = tempfile::tempdir().unwrap();
    let mut arguments = arguments(folder.path());
    let facts = facts(&arguments);
    arguments.context_length = 100_000;
    let short = only(&arguments, &facts, "data", 1);
    assert_eq!(short.severity, Severity::Failure, "{short}");
    arguments.context_length = 16;
    arguments.data = vec![folder.path().join("absent.txt")];
    let absent = only(&arguments, &facts, "data", 1);
    assert!(absent.what.contains("absent.txt"), "{absent}");
    let check = arguments.check_run(Device::Cpu, 1).unwrap();
    assert_eq!(check.count(Severity::Failure), 1, "{check}");
    assert!(check.to_string().contains("the run would fail: 1 failure"));
}

#[test]
fn text_that_is_repeated_often_and_a_tokenizer_of_other_text_are_told() {
    let folder = tempfile::tempdir().unwrap();
    let mut arguments = arguments(folder.path());
    let facts = facts(&arguments);
    arguments.max_steps = 100_000;
    let passes = only(&arguments, &facts, "data", 1);
    assert_eq!(passes.severity, Severity::Warning);
    assert!(passes.remedy.contains("max_steps"), "{passes}");
    arguments.max_steps = 20;
    // A vocabulary of single bytes: one byte a token.
    arguments.vocab_size = 257;
    let bytes = only(&arguments, &facts, "tokenizer", 1);
    assert!(bytes.what.starts_with("1."), "{bytes}");
}

#[test]
fn snapshots_are_counted_and_fit_or_fail() {
    let folder = tempfile::tempdir().unwrap();
    let mut arguments = arguments(folder.path());
    arguments.save_steps = 5.0;
    let parameters = arguments.model.parameters(300);
    // Weights and two moments each, in four snapshots, and the model.
    let needed = 4 * 12 * parameters + 4 * parameters;
    let mut facts = facts(&arguments);
    facts.free_disk = Some(needed);
    assert_eq!(found(&arguments, &facts, "disk", 1), []);
    facts.free_disk = Some(needed - 1);
    let full = only(&arguments, &facts, "disk", 1);
    assert_eq!(full.severity, Severity::Failure);
    assert!(full.remedy.contains("save_total_limit"), "{full}");
    // A limit of two keeps three snapshots for a moment.
    arguments.save_total_limit = Some(2);
    assert_eq!(found(&arguments, &facts, "disk", 1), []);
    facts.free_disk = Some(3 * 12 * parameters + 4 * parameters - 1);
    assert!(
        only(&arguments, &facts, "disk", 1)
            .what
            .starts_with("3 snap")
    );
    // So does a limit of one with evaluations: the best is kept beside the newest.
    arguments.save_total_limit = Some(1);
    assert_eq!(found(&arguments, &facts, "disk", 1), []);
    arguments.eval_strategy = crate::IntervalStrategy::Steps;
    assert!(
        only(&arguments, &facts, "disk", 1)
            .what
            .starts_with("3 snap")
    );
    arguments.save_strategy = SaveStrategy::No;
    assert_eq!(found(&arguments, &facts, "disk", 1), []);
}

#[test]
fn blocks_that_the_model_does_not_have_are_a_failure_beside_the_other_findings() {
    let folder = tempfile::tempdir().unwrap();
    let mut arguments = arguments(folder.path());
    arguments.gradient_checkpointing = true;
    arguments.gradient_checkpointing_kwargs.schedule = Schedule::Segments(7);
    let facts = facts(&arguments);
    let data = TextData::prepare_in(folder.path(), &arguments, |_| {});
    let check = arguments.check_with(&facts, data, 1).unwrap();
    let subjects: Vec<_> = check.findings.iter().map(|found| found.subject).collect();
    assert!(subjects.contains(&"data"), "{check}");
    let memory = only(&arguments, &facts, "memory", 1);
    assert_eq!(memory.severity, Severity::Failure, "{memory}");
    assert!(memory.what.contains('7'), "{memory}");
}

#[test]
fn memory_that_does_not_suffice_fails_and_a_narrow_one_warns() {
    let folder = tempfile::tempdir().unwrap();
    let mut arguments = arguments(folder.path());
    arguments.per_device_train_batch_size = 64;
    let peak = arguments
        .memory_plan(300, Precision::Fp32)
        .estimate()
        .unwrap()
        .peak;
    let mut facts = facts(&arguments);
    facts.free_memory = Some(peak - 1);
    let short = only(&arguments, &facts, "memory", 1);
    assert_eq!(short.severity, Severity::Failure);
    assert!(short.remedy.contains("auto_find_batch_size"), "{short}");
    facts.free_memory = Some(peak + peak / 10);
    assert_eq!(
        only(&arguments, &facts, "memory", 1).severity,
        Severity::Warning
    );
    // Two processes on a CPU share its memory.
    facts.free_memory = Some(2 * peak - 1);
    assert_eq!(found(&arguments, &facts, "memory", 1), []);
    let two = only(&arguments, &facts, "memory", 2);
    assert_eq!(two.severity, Severity::Failure, "{two}");
    // The run divides the batch until it fits.
    arguments.auto_find_batch_size = true;
    let two = only(&arguments, &facts, "memory", 2);
    assert_eq!(two.severity, Severity::Warning, "{two}");
}

#[test]
fn another_precision_than_the_recommended_one_is_a_warning() {
    let folder = tempfile::tempdir().unwrap();
    let arguments = arguments(folder.path());
    let mut facts = facts(&arguments);
    facts.recommended.precision = Precision::Bf16;
    let other = only(&arguments, &facts, "precision", 1);
    assert!(other.what.contains("bf16 is recommended"), "{other}");
    facts.precision_warning = Some("it is emulated".to_owned());
    let slow = only(&arguments, &facts, "precision", 1);
    assert_eq!(slow.what, "fp32: it is emulated");
}

#[test]
fn more_threads_than_processors_and_idle_processors_are_warnings() {
    let folder = tempfile::tempdir().unwrap();
    let arguments = arguments(folder.path());
    let mut facts = facts(&arguments);
    let many = only(&arguments, &facts, "threads", 2);
    assert!(many.remedy.contains("--threads 2"), "{many}");
    facts.processors = 64;
    let idle = only(&arguments, &facts, "threads", 1);
    assert!(idle.what.contains("idle"), "{idle}");
}

#[test]
fn keys_that_slow_a_run_down_are_named() {
    let folder = tempfile::tempdir().unwrap();
    let arguments = TrainingArguments {
        attn_implementation: overdrive_transformer::AttentionImplementation::Eager,
        fused_kernels: false,
        gradient_checkpointing: true,
        sequences: Some(crate::SequenceMode::Documents),
        sample_by: crate::SampleBy::Line,
        eval_strategy: crate::IntervalStrategy::Steps,
        eval_steps: Some(1.0),
        ..arguments(folder.path())
    };
    let facts = facts(&arguments);
    let reported: String = found(&arguments, &facts, "speed", 1)
        .iter()
        .map(ToString::to_string)
        .collect();
    for part in [
        "attn_implementation: eager",
        "fused_kernels: false",
        "`gradient_checkpointing` computes blocks twice",
        "`packing: true`",
        "max_eval_batches",
    ] {
        assert!(reported.contains(part), "{part} is missing in {reported}");
    }
    let mut tight = facts;
    tight.free_memory = Some(1 << 10);
    let reported = found(&arguments, &tight, "speed", 1);
    assert!(
        !reported
            .iter()
            .any(|finding| finding.what.contains("twice"))
    );
}

#[test]
fn the_start_of_a_run_tells_only_what_is_to_be_changed() {
    let folder = tempfile::tempdir().unwrap();
    let mut arguments = arguments(folder.path());
    let data = TextData::prepare_in(folder.path(), &arguments, |_| {}).unwrap();
    let reported = arguments.start_warnings(&data, Device::Cpu, 1).unwrap();
    let of = |found: &[Finding], subject: &str| found.iter().any(|one| one.subject == subject);
    assert!(
        !of(&reported, "memory") && !of(&reported, "disk"),
        "{reported:?}"
    );
    if let Some(free) = free_memory(Device::Cpu) {
        // Not even one of these sequences fits.
        arguments.per_device_train_batch_size = 1 + free / 1024;
        let reported = arguments.start_warnings(&data, Device::Cpu, 1).unwrap();
        assert!(of(&reported, "memory"), "{reported:?}");
    }
}
