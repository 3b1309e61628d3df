//! The command line.

use clap::Parser;
use overdrive_optim::LrSchedulerType;
use overdrive_trainer::{IntervalStrategy, Preset, TrainingArguments};

use crate::configuration::{Flags, file, resolve};

#[test]
fn every_flag_reaches_its_key() {
    let arguments = resolve(&[
        "--preset",
        "small",
        "--out",
        "o",
        "--overwrite",
        "--seed",
        "1",
        "--data",
        "a",
        "b",
        "--tokenizer",
        "t.json",
        "--vocab-size",
        "300",
        "--context-length",
        "64",
        "--validation-fraction",
        "0.1",
        "--steps",
        "9",
        "--micro-batch-size",
        "2",
        "--gradient-accumulation-steps",
        "3",
        "--learning-rate",
        "0.5",
        "--lr-scheduler-type",
        "linear",
        "--warmup-ratio",
        "0.2",
        "--weight-decay",
        "0.3",
        "--max-grad-norm",
        "0",
        "--eval-steps",
        "4",
        "--samples",
        "0",
        "--bf16",
        "--tf32",
        "--cpu",
        "--threads",
        "2",
    ])
    .expect("valid");
    let expected = TrainingArguments {
        output_dir: Some("o".into()),
        overwrite_output_dir: true,
        seed: 1,
        data: vec!["a".into(), "b".into()],
        tokenizer: Some("t.json".into()),
        vocab_size: 300,
        context_length: 64,
        validation_fraction: 0.1,
        max_steps: 9,
        per_device_train_batch_size: 2,
        gradient_accumulation_steps: 3,
        learning_rate: 0.5,
        lr_scheduler_type: LrSchedulerType::Linear,
        warmup_ratio: 0.2,
        weight_decay: 0.3,
        max_grad_norm: 0.0,
        eval_steps: Some(4.0),
        samples: 0,
        bf16: true,
        tf32: Some(true),
        use_cpu: true,
        threads: Some(2),
        ..Preset::Small.arguments()
    };
    assert_eq!(arguments, expected);
}

#[test]
fn hugging_faces_names_of_flags_work_too() {
    let ours = [
        "--out",
        "o",
        "--steps",
        "5",
        "--micro-batch-size",
        "2",
        "--cpu",
    ];
    let theirs = [
        "--output-dir",
        "o",
        "--max-steps",
        "5",
        "--per-device-train-batch-size",
        "2",
        "--use-cpu",
    ];
    assert_eq!(
        resolve(&ours).expect("valid"),
        resolve(&theirs).expect("valid")
    );
}

#[test]
fn a_no_flag_takes_back_what_the_file_says_and_the_last_of_two_wins() {
    let (_folder, path) = file("c.yaml", "bf16: true\ntf32: true\n");
    let arguments = resolve(&["--config", &path, "--no-bf16", "--no-tf32"]).expect("valid");
    assert!(!arguments.bf16);
    assert_eq!(arguments.tf32, Some(false));
    assert!(resolve(&["--no-bf16", "--bf16"]).expect("valid").bf16);
    assert!(!resolve(&["--bf16", "--no-bf16"]).expect("valid").bf16);
}

#[test]
fn without_clipping_the_norm_is_measured_nevertheless() {
    let norm = |given: &str| {
        let arguments = resolve(&["--max-grad-norm", given]).expect("valid");
        arguments.accumulation().max_grad_norm
    };
    assert_eq!((norm("0"), norm("0.5")), (Some(f64::INFINITY), Some(0.5)));
}

#[test]
fn the_last_of_several_values_of_a_flag_counts_as_in_argparse() {
    let arguments = resolve(&[
        "--seed",
        "1",
        "--lr",
        "0.5",
        "--seed",
        "2",
        "--learning-rate",
        "0.25",
    ]);
    let arguments = arguments.expect("valid");
    assert_eq!((arguments.seed, arguments.learning_rate), (2, 0.25));
    // Those of a list are added up.
    let arguments = resolve(&["--data", "a", "--data", "b"]).expect("valid");
    assert_eq!(arguments.data.len(), 2);
}

#[test]
fn the_error_of_a_section_on_the_command_line_names_its_unknown_key() {
    let flags = ["train", "--lr-scheduler-kwargs", r#"{"num_cycle": 2}"#];
    let error = Flags::try_parse_from(flags)
        .err()
        .expect("a mistake")
        .to_string();
    assert!(
        error.contains("unknown key `lr_scheduler_kwargs.num_cycle`; did you mean"),
        "{error}"
    );
}

#[test]
fn no_evaluation_by_flag() {
    let arguments = resolve(&["--eval-steps", "0"]).expect("valid");
    assert_eq!(arguments.eval_strategy, IntervalStrategy::No);
}

#[test]
fn the_help_shows_every_presets_value() {
    use clap::CommandFactory;
    let help = Flags::command().render_long_help().to_string();
    for part in [
        "--preset <PRESET>",
        "Number of optimizer steps [default: tiny 600, small 1000]",
        "Seed of the weights, the order of the data and the samples [default: 42]",
        "Vocabulary size of the tokenizer that is trained [default: tiny 4096, small 8192]",
        "--no-auto-precision",
        "--gradient-accumulation-steps <N>",
    ] {
        assert!(help.contains(part), "{part} is missing in {help}");
    }
}

#[test]
fn every_key_has_a_flag_under_each_of_its_names() {
    let (_folder, path) = file("c.yaml", "packing: true\nmax_steps: 5\n");
    let config = ["--config", path.as_str()];
    let ours = [
        "--steps",
        "7",
        "--lr",
        "0.5",
        "--hidden-size",
        "128",
        "--no-packing",
    ];
    let theirs = [
        "--max_steps",
        "7",
        "--learning_rate",
        "0.5",
        "--hidden_size",
        "128",
        "--no-packing",
    ];
    let arguments = resolve(&[&config[..], &ours[..]].concat()).expect("valid");
    assert_eq!(
        arguments,
        resolve(&[&config[..], &theirs[..]].concat()).expect("valid")
    );
    assert_eq!((arguments.max_steps, arguments.model.hidden_size), (7, 128));
    assert!(!arguments.packing);
    // A list may be given at once or value by value.
    let at_once = resolve(&["--data", "a", "b"]).expect("valid");
    assert_eq!(
        at_once,
        resolve(&["--data", "a", "--data", "b"]).expect("valid")
    );
    let schedule = ["--lr-scheduler-kwargs", "{\"num_cycles\": 2}"];
    let arguments = resolve(&schedule).expect("valid");
    assert_eq!(arguments.lr_scheduler_kwargs.num_cycles, Some(2.0));
}
