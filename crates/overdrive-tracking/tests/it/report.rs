//! The report of a made-up run.

use std::fs;

use overdrive_profiling::{Machine, PhaseSeconds};
use overdrive_tracking::{Report, Sample, StepMetrics};
use serde_json::json;

/// A run of 600 steps that looks like one: falling loss, noise, warm-up and cosine.
fn metrics() -> Vec<StepMetrics> {
    let mut state = 0x2545_f491_4f6c_dd1d_u64;
    let mut noise = move || {
        // Xorshift (Marsaglia 2003): the test needs no better randomness, only the same each time.
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 11) as f64 / (1_u64 << 53) as f64 - 0.5
    };
    (1..=600_u64)
        .map(|step| {
            let at = step as f64;
            let curve = 3.6 + 4.7 * (-at / 60.0).exp() + 0.9 * (-at / 300.0).exp();
            let warm = (at / 30.0).min(1.0);
            let decay = 0.5 * (1.0 + (std::f64::consts::PI * (at - 30.0).max(0.0) / 570.0).cos());
            StepMetrics {
                step,
                loss: curve + 0.35 * noise(),
                learning_rate: 2e-3 * warm * decay,
                tokens_per_second: 3400.0 + 300.0 * noise()
                    - if step == 200 { 1500.0 } else { 0.0 },
                peak_memory_bytes: (640 << 20) + if step > 1 { 45 << 20 } else { 0 },
                grad_norm: Some(0.6 + 2.0 * (-at / 40.0).exp() + 0.2 * noise()),
                tokens_seen: Some(step * 2048),
                elapsed_seconds: Some(at * 0.6),
                eval_loss: step.is_multiple_of(100).then_some(curve + 0.12),
                eval_bits_per_byte: step.is_multiple_of(100).then_some((curve + 0.12) * 0.46),
                phase_seconds: Some(PhaseSeconds {
                    data: 0.004,
                    forward: 0.18 + 0.02 * noise(),
                    backward: 0.36 + 0.02 * noise(),
                    optimizer: 0.05,
                    other: 0.006,
                    ..Default::default()
                }),
                ..Default::default()
            }
        })
        .collect()
}

fn report() -> Report {
    Report {
        title: "Llama, 5.8M parameters".into(),
        description: "Trained from scratch on 34 MB of Rust sources, 600 steps of 2,048 tokens."
            .into(),
        metrics: metrics(),
        parameters: Some(5_795_072),
        configuration: json!({
            "preset": "tiny", "seed": 42, "learning_rate": 2e-3, "lr_scheduler_type": "cosine",
            "warmup_ratio": 0.05, "per_device_train_batch_size": 8, "context_length": 256,
            "data": ["src/lib.rs", "src/main.rs"], "tf32": null,
            "output_dir": "runs/tiny-001", "weight_decay": 0.1, "gradient_accumulation_steps": 1,
            "model": {"hidden_size": 256, "num_hidden_layers": 6, "num_attention_heads": 4},
        }),
        samples: vec![
            Sample {
                prompt: "pub fn new(".into(),
                completion: "path: &Path) -> Self {\n        Self {\n            path: path.to_path_buf(),\n            len: 0,\n        }\n    }".into(),
            },
            Sample { prompt: "impl<T> ".into(), completion: "From<Vec<T>> for Buffer<T> {".into() },
        ],
        machine: Some(Machine {
            cpu: "AMD EPYC 7763 64-Core Processor".into(),
            logical_cores: 2,
            threads: 2,
            memory_bytes: Some(8 << 30),
            system: "linux x86_64".into(),
            libtorch: "2.11.0".into(),
            ..Default::default()
        }),
        notes: vec![],
    }
}

#[test]
fn a_report_holds_figures_curves_breakdown_samples_configuration_and_machine() {
    let html = report().to_html().expect("draws");
    // For whoever changes the page and wants to see it: target/tmp/report.html.
    fs::write(concat!(env!("CARGO_TARGET_TMPDIR"), "/report.html"), &html).expect("writes");
    for part in [
        "<h1>Llama, 5.8M parameters</h1>",
        "Validation loss",
        "Bits per byte",
        "<dd>5.80M</dd>",
        "5,795,072",
        "685 MiB",
        "6m 00s",
        "Where a step&#39;s time goes",
        "Backward",
        "60.0%",
        "aria-label=\"Loss by step\"",
        "aria-label=\"Learning rate by step\"",
        "aria-label=\"Throughput by step\"",
        "aria-label=\"Peak memory by step\"",
        "aria-label=\"Gradient norm by step\"",
        "<b>pub fn new(</b>path: &amp;Path)",
        "From&lt;Vec&lt;T&gt;&gt;",
        "model.hidden_size",
        "AMD EPYC 7763",
        "prefers-color-scheme: dark",
    ] {
        let apostrophe = part.replace("&#39;", "'");
        assert!(
            html.contains(part) || html.contains(&apostrophe),
            "{part} is missing"
        );
    }
    assert!(!html.contains("NaN"), "no value is NaN");
    assert!(
        !html.contains("aria-label=\"Loss scale by step\""),
        "no scaler was used"
    );
    assert!(!html.contains("tf32"), "keys without a value are left out");
}

#[test]
fn a_report_needs_nothing_beside_it() {
    let html = report().to_html().expect("draws");
    for outside in [
        "http://", "https://", "src=", "url(", "@import", "<script", "<link",
    ] {
        assert!(!html.contains(outside), "{outside} in the page");
    }
    assert!(html.len() < 300_000, "{} bytes", html.len());
}

#[test]
fn text_from_the_model_is_shown_and_not_run() {
    let bad = "</pre><script>alert(1)</script><img src=x onerror=\"alert(2)\">";
    let html = Report {
        title: bad.into(),
        description: bad.into(),
        samples: vec![Sample {
            prompt: bad.into(),
            completion: bad.into(),
        }],
        configuration: json!({ bad: bad }),
        machine: Some(Machine {
            cpu: bad.into(),
            ..Default::default()
        }),
        notes: vec![bad.into()],
        ..report()
    }
    .to_html()
    .expect("draws");
    assert!(!html.contains("<script"), "a script got in");
    assert!(!html.contains("<img"), "an element got in");
    assert_eq!(html.matches("&lt;script&gt;alert(1)").count(), 9);
}

#[test]
fn an_empty_report_is_a_page_too() {
    let html = Report::default().to_html().expect("draws");
    assert!(html.contains("<h1>Training run</h1>"));
    assert!(!html.contains("<svg"));
    assert!(!html.contains("<dl"));
}

#[test]
fn a_run_that_blew_up_has_a_report_that_says_so() {
    let mut metrics = metrics();
    for step in &mut metrics[300..] {
        step.loss = f64::NAN;
        step.eval_loss = step.eval_loss.map(|_| f64::NAN);
    }
    let html = Report {
        metrics,
        ..report()
    }
    .to_html()
    .expect("draws");
    assert!(
        html.contains("The loss of 300 steps is not finite"),
        "no note"
    );
    assert!(html.contains("not finite</dd>"), "no figure");
}

#[test]
fn the_loss_curve_stands_alone() {
    let folder = tempfile::tempdir().expect("temporary folder");
    let path = folder.path().join("loss.svg");
    report().write_loss_svg(&path).expect("writes");
    fs::copy(&path, concat!(env!("CARGO_TARGET_TMPDIR"), "/loss.svg")).expect("copies");
    let svg = fs::read_to_string(&path).expect("read");
    assert!(
        svg.starts_with("<svg xmlns=\"http://www.w3.org/2000/svg\""),
        "{}",
        &svg[..80]
    );
    assert!(svg.trim_end().ends_with("</svg>"));
    for part in [
        "validation",
        "training, smoothed",
        "Loss",
        "<style>",
        "step",
    ] {
        assert!(svg.contains(part), "{part} is missing");
    }
    assert!(svg.len() < 100_000, "{} bytes", svg.len());
}

#[test]
fn a_report_that_cannot_be_written_names_the_file() {
    let error = report()
        .write_html("/nowhere/report.html")
        .expect_err("no such folder");
    assert!(
        error
            .to_string()
            .starts_with("cannot write /nowhere/report.html: "),
        "{error}"
    );
}
