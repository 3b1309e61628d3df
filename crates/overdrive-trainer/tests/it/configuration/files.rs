//! Presets, files in three formats, and one over the other.

use std::path::PathBuf;

use overdrive_optim::{LrSchedulerType, ScheduleOptions};
use overdrive_trainer::{IntervalStrategy, ModelArguments, Preset, ReportTo, TrainingArguments};

use crate::configuration::{error, file, resolve};

const JSON: &str = r#"{
    "preset": "small",
    "learning_rate": 1e-3,
    "max_steps": 20,
    "bf16": true,
    "tf32": false,
    "data": ["a.txt", "folder"],
    "lr_scheduler_type": "polynomial",
    "lr_scheduler_kwargs": {"power": 2},
    "eval_strategy": "epoch",
    "report_to": "none",
    "model": {"num_hidden_layers": 4, "num_key_value_heads": 2}
}"#;

const YAML: &str = "
preset: small
learning_rate: 1e-3   # PyYAML would read a text here
max_steps: 20
bf16: true
tf32: false
data:
  - a.txt
  - folder
lr_scheduler_type: polynomial
lr_scheduler_kwargs:
  power: 2
eval_strategy: epoch
report_to: none
model:
  num_hidden_layers: 4
  num_key_value_heads: 2
";

const TOML: &str = r#"
preset = "small"
learning_rate = 1e-3
max_steps = 20
bf16 = true
tf32 = false
data = ["a.txt", "folder"]
lr_scheduler_type = "polynomial"
eval_strategy = "epoch"
report_to = "none"

[lr_scheduler_kwargs]
power = 2

[model]
num_hidden_layers = 4
num_key_value_heads = 2
"#;

#[test]
fn the_three_formats_give_the_same_configuration() {
    let expected = TrainingArguments {
        learning_rate: 1e-3,
        max_steps: 20,
        bf16: true,
        tf32: Some(false),
        data: vec![PathBuf::from("a.txt"), PathBuf::from("folder")],
        lr_scheduler_type: LrSchedulerType::Polynomial,
        lr_scheduler_kwargs: ScheduleOptions {
            power: Some(2.0),
            ..Default::default()
        },
        eval_strategy: IntervalStrategy::Epoch,
        report_to: vec![],
        model: ModelArguments {
            num_hidden_layers: 4,
            num_key_value_heads: Some(2),
            ..Preset::Small.arguments().model
        },
        ..Preset::Small.arguments()
    };
    for (name, text) in [
        ("c.json", JSON),
        ("c.yaml", YAML),
        ("c.yml", YAML),
        ("c.TOML", TOML),
        // As editors on Windows save them.
        (
            "bom.json",
            &format!("\u{feff}{}", JSON.replace('\n', "\r\n")),
        ),
        (
            "bom.yaml",
            &format!("\u{feff}{}", YAML.replace('\n', "\r\n")),
        ),
        (
            "bom.toml",
            &format!("\u{feff}{}", TOML.replace('\n', "\r\n")),
        ),
    ] {
        let (_folder, path) = file(name, text);
        assert_eq!(
            resolve(&["--config", &path]).expect(name),
            expected,
            "{name}"
        );
    }
}

#[test]
fn flags_stand_over_the_file_and_the_file_over_the_preset() {
    let (_folder, path) = file("c.toml", "learning_rate = 1e-4\nseed = 7\n");
    let arguments = resolve(&["--config", &path, "--seed", "8"]).expect("valid");
    assert_eq!(arguments.seed, 8);
    assert_eq!(arguments.learning_rate, 1e-4);
    assert_eq!(
        arguments.weight_decay,
        Preset::Tiny.arguments().weight_decay
    );
}

#[test]
fn the_presets_flag_stands_over_the_files_preset() {
    let (_folder, path) = file("c.toml", "preset = 'small'\n");
    assert_eq!(
        resolve(&["--config", &path]).expect("valid"),
        Preset::Small.arguments()
    );
    let tiny = resolve(&["--config", &path, "--preset", "tiny"]).expect("valid");
    assert_eq!(tiny, Preset::Tiny.arguments());
    assert_eq!(resolve(&[]).expect("valid"), Preset::Tiny.arguments());
}

#[test]
fn an_upper_layer_pushes_out_what_would_contradict_it() {
    let (_folder, path) = file("c.yaml", "fp16: true\nwarmup_steps: 50\nmax_steps: 10\n");
    let arguments = resolve(&[
        "--config",
        &path,
        "--bf16",
        "--warmup-ratio",
        "0.1",
        "--epochs",
        "2",
    ])
    .expect("valid");
    assert!(arguments.bf16 && !arguments.fp16);
    assert_eq!((arguments.warmup_steps, arguments.warmup_ratio), (0.0, 0.1));
    assert_eq!((arguments.max_steps, arguments.num_train_epochs), (-1, 2.0));
    // In one layer nothing is pushed out: max_steps wins, as in transformers.
    let (_folder, path) = file("c.yaml", "num_train_epochs: 2\nmax_steps: 10\n");
    assert_eq!(resolve(&["--config", &path]).expect("valid").max_steps, 10);
}

#[test]
fn null_stands_for_the_default_and_not_for_the_preset() {
    let (_folder, path) = file(
        "c.json",
        r#"{"max_eval_batches": null, "adam_beta2": null, "lr_scheduler_kwargs": null,
            "model": {"num_key_value_heads": null}}"#,
    );
    let arguments = resolve(&["--config", &path]).expect("valid");
    assert_eq!(arguments.max_eval_batches, None);
    assert_eq!(arguments.adam_beta2, 0.999);
}

#[test]
fn one_path_may_stand_without_a_list_and_reports_have_short_names() {
    let (_folder, path) = file("c.yaml", "data: corpus.txt\nreport_to: all\n");
    let arguments = resolve(&["--config", &path]).expect("valid");
    assert_eq!(arguments.data, [PathBuf::from("corpus.txt")]);
    assert!(arguments.reports_to(ReportTo::TensorBoard));
    let (_folder, path) = file("c.yaml", "report_to: [tensorboard]\n");
    assert_eq!(
        resolve(&["--config", &path]).expect("valid").report_to,
        [ReportTo::TensorBoard]
    );
}

#[test]
fn other_names_of_a_key_are_known() {
    let (_folder, path) = file("c.yaml", "max_seq_length: 128\nevaluation_strategy: 'no'\n");
    let arguments = resolve(&["--config", &path]).expect("valid");
    assert_eq!(arguments.context_length, 128);
    assert_eq!(arguments.eval_strategy, IntervalStrategy::No);
    assert_eq!(
        error("max_seq_length: 128\ncontext_length: 64\n"),
        "run.yaml: `max_seq_length` and `context_length` are two names of the same key; remove one of them"
    );
}

#[test]
fn an_empty_file_changes_nothing() {
    for name in ["c.json", "c.yaml", "c.toml"] {
        let (_folder, path) = file(name, "\n");
        assert_eq!(
            resolve(&["--config", &path]).expect(name),
            Preset::Tiny.arguments()
        );
    }
}

#[test]
fn json_may_hold_comments_and_trailing_commas_and_nothing_else() {
    let text = r#"{
        // the preset below
        "preset": "small", /* its size */
        "data": ["a.txt", "folder", ],
        "learning_rate": 1e-3,
    }"#;
    let (_folder, path) = file("run.json", text);
    let arguments = resolve(&["--config", &path]).unwrap();
    assert_eq!(arguments.preset, Preset::Small);
    assert_eq!(arguments.data, [PathBuf::from("a.txt"), "folder".into()]);
    assert_eq!(arguments.learning_rate, 1e-3);

    for (wrong, place) in [
        ("{\n\"preset\": 'small'}", "line 2"),
        ("{\n\"bf16\": true\n\"fp16\": false}", "line 2"),
        ("{preset: \"small\"}", "line 1"),
        ("{\"learning_rate\": NaN}", "line 1"),
        (&"[".repeat(100_000), "line 1"),
    ] {
        let (_folder, path) = file("run.json", wrong);
        let error = resolve(&["--config", &path]).unwrap_err().to_string();
        assert!(error.contains(place) && error.contains("JSON"), "{error}");
    }
}
