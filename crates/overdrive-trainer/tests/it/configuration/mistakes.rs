//! The errors about wrong keys, types, choices, values and files.

use overdrive_trainer::{Evaluation, IntervalStrategy, Layers, TrainingArguments};

use crate::configuration::{error, file, resolve};

#[test]
fn the_error_of_an_unknown_key_names_the_nearest_one() {
    for (text, expected) in [
        (
            "learning_rat: 1",
            "run.yaml: unknown key `learning_rat`; did you mean `learning_rate`?",
        ),
        (
            "lr_schedular_type: x",
            "run.yaml: unknown key `lr_schedular_type`; did you mean `lr_scheduler_type`?",
        ),
        (
            "max_seq_lenght: 5",
            "run.yaml: unknown key `max_seq_lenght`; did you mean `max_seq_length`?",
        ),
        (
            "model: {hiden_size: 5}",
            "run.yaml: unknown key `model.hiden_size`; did you mean `model.hidden_size`?",
        ),
        (
            "hidden_size: 5",
            "run.yaml: unknown key `hidden_size`; did you mean `model.hidden_size`?",
        ),
        (
            "model: {vocab_size: 5}",
            "run.yaml: unknown key `model.vocab_size`; did you mean `vocab_size`?",
        ),
        (
            "lr_scheduler_kwargs: {num_cycle: 2}",
            "run.yaml: unknown key `lr_scheduler_kwargs.num_cycle`; did you mean `lr_scheduler_kwargs.num_cycles`?",
        ),
        (
            "temperature: 1",
            "run.yaml: unknown key `temperature`; no known key is similar, see `--help` for all keys",
        ),
    ] {
        assert_eq!(error(text), expected);
    }
    let keys = error("model: {experts: 8}");
    assert!(
        keys.contains("; the keys here are `model_type`, `hidden_size`, "),
        "{keys}"
    );
}

#[test]
fn the_error_of_a_wrong_type_names_the_value_and_the_expected_type() {
    for (text, expected) in [
        (
            "learning_rate: fast",
            "run.yaml: `learning_rate` is the string \"fast\", expected a number",
        ),
        (
            "seed: -1",
            "run.yaml: `seed` is the number -1, expected a non-negative integer",
        ),
        (
            "seed: 1.5",
            "run.yaml: `seed` is the number 1.5, expected a non-negative integer",
        ),
        (
            "bf16: 1",
            "run.yaml: `bf16` is the number 1, expected true or false",
        ),
        (
            "data: 5",
            "run.yaml: `data` is the number 5, expected a string or a list of strings",
        ),
        (
            "model: [1]",
            "run.yaml: `model` is a list, expected a section of keys",
        ),
        (
            "model: {hidden_size: wide}",
            "run.yaml: `model.hidden_size` is the string \"wide\", expected a non-negative integer",
        ),
        (
            "- 1",
            "run.yaml: `(the whole file)` is a list, expected a section of keys",
        ),
    ] {
        assert_eq!(error(text), expected);
    }
}

#[test]
fn the_error_of_a_wrong_choice_lists_the_choices() {
    assert_eq!(
        error("eval_strategy: step"),
        "run.yaml: `eval_strategy` is `step`, which is not one of `no`, `steps`, `epoch`; did you mean `steps`?"
    );
    let text = error("lr_scheduler_type: cosin");
    assert!(
        text.contains("is `cosin`, which is not one of `linear`, `cosine`, "),
        "{text}"
    );
    assert!(text.ends_with("; did you mean `cosine`?"), "{text}");
    assert_eq!(
        error("report_to: wand"),
        "run.yaml: `report_to` is `wand`, which is not one of `tensorboard`, `mlflow`, `wandb`, `all`, `none`; did you mean `wandb`?"
    );
    assert_eq!(
        error("eval_strategy: true"),
        "run.yaml: `eval_strategy` is `true`, which is not one of `no`, `steps`, `epoch`"
    );
    for mixed in ["[none, tensorboard]", "[all, tensorboard]"] {
        assert_eq!(
            error(&format!("report_to: {mixed}")),
            "run.yaml: `report_to` is a list, expected destinations, or `all` or `none` alone"
        );
    }
    assert_eq!(
        error("preset: large"),
        "run.yaml: `preset` is `large`, which is not one of `tiny`, `small`"
    );
}

#[test]
fn invalid_values_are_refused_with_the_allowed_ones() {
    for (text, expected) in [
        (
            "bf16: true\nfp16: true",
            "`bf16` is true; it must be false if `fp16` is true; drop one, or add `--no-fp16` or `--no-bf16`",
        ),
        (
            "trace: steps.json\nmax_steps: 5",
            "`max_steps` is 5; it must be at least 6 with `trace`, which records from step 6 on; give more steps, or leave `trace` out",
        ),
        (
            "per_device_train_batch_size: 0",
            "`per_device_train_batch_size` is 0; it must be at least 1",
        ),
        (
            "max_steps: 0",
            "`max_steps` is 0; it must be at least 1, or -1 to train for `num_train_epochs`",
        ),
        (
            "per_device_train_batch_size: 4294967296",
            "`per_device_train_batch_size` is 4294967296; it must be at most 2147483647",
        ),
        (
            "ddp_timeout: 1e20",
            "`ddp_timeout` is 100000000000000000000; it must be positive, and at most 1000000000 seconds (31 years)",
        ),
        (
            "dataloader_num_workers: 4611686018427387904",
            "`dataloader_num_workers` is 4611686018427387904; it must be at most 1024",
        ),
        (
            "threads: 9999",
            "`threads` is 9999; it must be from 1 to 1024",
        ),
        (
            "model: {num_hidden_layers: 4611686018427387904}",
            "`model.num_hidden_layers` is 4611686018427387904; it must be at most 2147483647",
        ),
        (
            "model: {num_hidden_layers: 65537}",
            "`model.num_hidden_layers` is 65537; it must be at most 65536",
        ),
        (
            "model: {hidden_size: 2147483646, num_attention_heads: 1, num_hidden_layers: 65536}",
            "`model` is of 18446744073709551615 parameters; it must be of at most 1152921504606846975 parameters; make `hidden_size` or `intermediate_size` smaller",
        ),
        (
            "learning_rate: -1",
            "`learning_rate` is -1; it must be positive",
        ),
        (
            "adam_beta2: 1",
            "`adam_beta2` is 1; it must be at least 0 and below 1",
        ),
        (
            "eval_steps: 2.5",
            "`eval_steps` is 2.5; it must be a whole number of steps, or a fraction of the run below 1",
        ),
        (
            "warmup_ratio: 100",
            "`warmup_ratio` is 100; it must be a fraction from 0 to 1; for a number of steps use `warmup_steps`",
        ),
        (
            "vocab_size: 100",
            "`vocab_size` is 100; it must be at least 257, because a byte-level tokenizer has a token for each of the 256 bytes and one for the end of a document; give 257 or more, or a `tokenizer`",
        ),
        (
            "validation_fraction: 1",
            "`validation_fraction` is 1; it must be above 0 and below 1; 0.05 is a good start",
        ),
        (
            "ema_decay: 1",
            "`ema_decay` is 1; it must be at least 0 and below 1",
        ),
        ("zero_stage: 2", "`zero_stage` is 2; it must be at most 1"),
        ("threads: 0", "`threads` is 0; it must be from 1 to 1024"),
        (
            "model: {num_attention_heads: 3}",
            "`model.hidden_size` is 256; it must be a multiple of `num_attention_heads` (3), unless `head_dim` is set",
        ),
        (
            "model: {num_key_value_heads: 3}",
            "`model.num_key_value_heads` is 3; it must be a divisor of `num_attention_heads` (4)",
        ),
        (
            "model: {head_dim: 7}",
            "`model.head_dim` is 7; it must be even, because rotary embeddings rotate pairs of features; give an even number, or change `hidden_size` or `num_attention_heads`",
        ),
        (
            "model: {max_position_embeddings: 100}",
            "`model.max_position_embeddings` is 100; it must be at least `context_length` (256); raise it or leave it out",
        ),
        (
            "model: {num_hidden_layers: 0}",
            "`model.num_hidden_layers` is 0; it must be at least 1",
        ),
        (
            "model: {model_type: gpt2}",
            "`model.model_type` is gpt2; it must be `llama`, the only architecture that can be trained from scratch",
        ),
    ] {
        assert_eq!(error(text), expected);
    }
}

#[test]
fn fine_tuning_refuses_evaluations_that_it_cannot_make() {
    let error = |keys: serde_json::Value| {
        let mut values = serde_json::json!({ "model": "base", "data": "records.jsonl" });
        for (key, value) in keys.as_object().expect("keys") {
            values[key] = value.clone();
        }
        let layers = Layers::finetune().layer(values, "the test").expect("keys");
        layers.resolve().map_err(|error| error.to_string())
    };
    // Nothing is held out.
    assert_eq!(
        error(serde_json::json!({ "eval_on_start": true })),
        Err(
            "`eval_on_start` is true; it must be false with `eval_strategy: no`, because no record is held out; set \
             `eval_strategy` (`--eval-steps N`)"
                .to_owned()
        )
    );
    error(serde_json::json!({ "eval_on_start": true, "eval_strategy": "epoch" }))
        .expect("held out");
}

#[test]
fn the_metric_of_the_best_model_is_one_of_the_evaluations() {
    let check = |metric: &str, others: &[&str]| {
        let arguments = TrainingArguments {
            metric_for_best_model: Some(metric.to_owned()),
            eval_strategy: IntervalStrategy::Epoch,
            ..TrainingArguments::default()
        };
        let checked = arguments.check_metric(others);
        checked.map_err(|error| error.to_string())
    };
    assert_eq!(
        check("eval_bits_per_byte", &[]),
        Err(
            "`metric_for_best_model` is bits_per_byte; it must be `loss` where the bytes of the text are not known: in \
             fine-tuning, and for files of tokens such as nanoGPT's"
                .to_owned()
        )
    );
    assert_eq!(
        check("acuracy", &["accuracy"]),
        Err(
            "`metric_for_best_model` is acuracy; it must be a metric of the evaluations: `loss`, `accuracy`"
                .to_owned()
        )
    );
    check("eval_accuracy", &["accuracy"]).expect("valid");
    check("loss", &[]).expect("valid");
}

#[test]
fn an_evaluation_without_the_metric_of_the_best_model_is_an_error() {
    let arguments = TrainingArguments {
        metric_for_best_model: Some("bits_per_byte".to_owned()),
        ..TrainingArguments::default()
    };
    let metric = |bits| {
        arguments.best_model_metric(&Evaluation::new(2.0).with_metric("bits_per_byte", bits))
    };
    assert_eq!(metric(Some(1.25)).expect("measured"), 1.25);
    let text = metric(None).expect_err("not measured").to_string();
    assert!(
        text.starts_with("`metric_for_best_model` is bits_per_byte; it must be `loss` where"),
        "{text}"
    );
    let loss = TrainingArguments::default().best_model_metric(&Evaluation::new(2.0));
    assert_eq!(loss.expect("measured"), 2.0);
}

#[test]
fn the_error_of_a_long_string_shows_its_beginning() {
    let text = "é".repeat(39) + "ab";
    assert_eq!(
        error(&format!("learning_rate: {text}")),
        format!(
            "run.yaml: `learning_rate` is the string \"{}a…\", expected a number",
            "é".repeat(39)
        )
    );
}

#[test]
fn errors_of_unreadable_files_name_the_cause() {
    let error = |path: &str| resolve(&["--config", path]).expect_err("wrong").to_string();
    let text = error("/nowhere/run.yaml");
    assert!(
        text.starts_with("cannot read /nowhere/run.yaml: "),
        "{text}"
    );
    let text = error("run.ini");
    assert_eq!(
        text,
        "the format of run.ini is unknown; its name must end in .json, .yaml, .yml or .toml"
    );
    for (name, format, content) in [
        ("c.json", "JSON", "{"),
        ("c.yaml", "YAML", "a: [1"),
        ("c.toml", "TOML", "a = "),
    ] {
        let (_folder, path) = file(name, content);
        let text = error(&path);
        assert!(
            text.starts_with(&format!("{path} is not valid {format}: ")),
            "{text}"
        );
    }
}

#[test]
fn the_error_of_a_file_that_is_no_yaml_names_the_line_and_no_option_of_the_parser() {
    let text = error("learning_rate: 1e-4\nlearning_rate: 2e-4");
    let expected = "run.yaml is not valid YAML: duplicate mapping key: learning_rate not allowed here at line 2, column 1";
    assert_eq!(text, expected);
}
