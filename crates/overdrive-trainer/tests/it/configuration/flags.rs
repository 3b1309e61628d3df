//! The command line.

use clap::Parser;
use overdrive_trainer::IntervalStrategy;

use crate::configuration::{Flags, file, resolve};

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
fn a_list_is_given_at_once_or_value_by_value_and_a_section_as_json() {
    let at_once = resolve(&["--data", "a", "b"]).expect("valid");
    assert_eq!(
        at_once,
        resolve(&["--data", "a", "--data", "b"]).expect("valid")
    );
    let schedule = ["--lr-scheduler-kwargs", "{\"num_cycles\": 2}"];
    let arguments = resolve(&schedule).expect("valid");
    assert_eq!(arguments.lr_scheduler_kwargs.num_cycles, Some(2.0));
}
