//! Presets, files in three formats and flags, and what is said about wrong ones.

use std::fs;
use std::path::{Path, PathBuf};

use clap::Parser;
use overdrive_optim::{LrSchedulerType, Optimizer, ScheduleOptions};
use overdrive_trainer::{
    ConfigFormat, GradientCheckpointingArguments, IntervalStrategy, Layers, ModelArguments,
    OptimizerName, Preset, ReportTo, TrainArgs, TrainingArguments,
};
use overdrive_transformer::{
    AttentionImplementation, CausalLm, CheckpointOptions, InitOptions, LabelShift, LlamaConfig,
    SavePolicy, Schedule,
};
use proptest::prelude::*;
use tch::{Device, Kind, Tensor};

#[derive(Parser)]
struct Flags {
    #[command(flatten)]
    train: TrainArgs,
}

/// The configuration of a command line.
fn resolve(flags: &[&str]) -> overdrive_trainer::Result<TrainingArguments> {
    let flags = ["train"].iter().chain(flags);
    Flags::try_parse_from(flags)
        .expect("the flags parse")
        .train
        .resolve()
}

/// A configuration file in a folder that is removed again.
fn file(name: &str, text: &str) -> (tempfile::TempDir, String) {
    let folder = tempfile::tempdir().expect("temporary folder");
    let path = folder.path().join(name);
    fs::write(&path, text).expect("writes");
    let path = path.display().to_string();
    (folder, path)
}

/// The error of a YAML file, without the folder's name.
fn error(text: &str) -> String {
    let (_folder, path) = file("run.yaml", text);
    let error = resolve(&["--config", &path]).expect_err("the file is wrong");
    let folder = Path::new(&path)
        .parent()
        .expect("a folder")
        .display()
        .to_string();
    error.to_string().replace(&format!("{folder}/"), "")
}

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
fn no_evaluation_by_flag() {
    let arguments = resolve(&["--eval-steps", "0"]).expect("valid");
    assert_eq!(arguments.eval_strategy, IntervalStrategy::No);
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
        "run.yaml: `max_seq_length` and `context_length` are two names of one key; keep one of them"
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
fn an_unknown_key_is_told_with_the_nearest_one() {
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
            "run.yaml: unknown key `temperature`; no known key is near it, see `--help` and Hugging Face's TrainingArguments",
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
fn a_wrong_type_is_told_with_what_was_given_and_what_is_expected() {
    for (text, expected) in [
        (
            "learning_rate: fast",
            "run.yaml: `learning_rate` is the text \"fast\", expected a number",
        ),
        (
            "seed: -1",
            "run.yaml: `seed` is the number -1, expected a whole number from 0",
        ),
        (
            "seed: 1.5",
            "run.yaml: `seed` is the number 1.5, expected a whole number from 0",
        ),
        (
            "bf16: 1",
            "run.yaml: `bf16` is the number 1, expected true or false",
        ),
        (
            "data: 5",
            "run.yaml: `data` is the number 5, expected text or a list of texts",
        ),
        (
            "model: [1]",
            "run.yaml: `model` is a list, expected keys with values",
        ),
        (
            "model: {hidden_size: wide}",
            "run.yaml: `model.hidden_size` is the text \"wide\", expected a whole number from 0",
        ),
        (
            "- 1",
            "run.yaml: `(the whole file)` is a list, expected keys with values",
        ),
    ] {
        assert_eq!(error(text), expected);
    }
}

#[test]
fn a_wrong_choice_is_told_with_the_choices() {
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
        error("report_to: wandb"),
        "run.yaml: `report_to` is `wandb`, which is not one of `tensorboard`, `all`, `none`"
    );
    assert_eq!(
        error("preset: large"),
        "run.yaml: `preset` is `large`, which is not one of `tiny`, `small`"
    );
}

#[test]
fn what_hugging_face_can_and_we_cannot_is_refused_by_name() {
    for (text, expected) in [
        (
            "optim: galore_adamw",
            "run.yaml: `optim: galore_adamw` is not supported by overdrive-trainer; the optimizers there are: adamw_torch_fused, adamw_8bit, paged_adamw_32bit, paged_adamw_8bit, lion_32bit, adafactor, sgd",
        ),
        (
            "torch_compile: true",
            "run.yaml: `torch_compile: true` is not supported by overdrive-trainer; leave it out",
        ),
        (
            "save_steps: 500",
            "run.yaml: `save_steps: 500` is not supported by overdrive-trainer; the model is saved once, at the end",
        ),
    ] {
        assert_eq!(error(text), expected);
    }
}

#[test]
fn kernels_attention_checkpointing_and_optimizers_go_by_hugging_faces_names() {
    let text = "
optim: adamw_bnb_8bit
attn_implementation: sdpa
use_liger_kernel: true
gradient_checkpointing: true
gradient_checkpointing_kwargs:
  use_reentrant: false
  preserve_rng_state: false
  schedule:
    every_nth: 2
  policy: matmuls_and_attention
";
    let (_folder, path) = file("run.yaml", text);
    let arguments = resolve(&["--config", &path]).expect("loads");
    assert_eq!(arguments.optim, OptimizerName::Adamw8bit);
    let execution = arguments.execution();
    assert_eq!(execution.attention, AttentionImplementation::Sdpa);
    assert!(execution.fused_kernels);
    assert_eq!(execution.checkpointing, Schedule::EveryNth(2));
    assert_eq!(
        execution.checkpoint_options,
        CheckpointOptions {
            preserve_rng_state: false,
            ..CheckpointOptions::keeping(SavePolicy::MatmulsAndAttention)
        }
    );

    let flags = [
        "--config",
        &path,
        "--no-gradient-checkpointing",
        "--no-fused-kernels",
        "--optim",
        "lion",
    ];
    let arguments = resolve(&flags).expect("loads");
    assert_eq!(arguments.optim, OptimizerName::Lion32bit);
    assert_eq!(arguments.execution().checkpointing, Schedule::Never);
    assert!(!arguments.execution().fused_kernels);

    let text = error("attn_implementation: flash_atention_2");
    assert!(text.contains("did you mean `flash_attention_2`?"), "{text}");
    let text = error("optim: adamw_8bits");
    assert!(text.contains("did you mean `adamw_8bit`?"), "{text}");
    let text = error("gradient_checkpointing_kwargs:\n  use_rentrant: true");
    assert!(text.contains("use_reentrant"), "{text}");
}

#[test]
fn every_optimizer_that_can_be_named_trains() {
    for name in [
        "adamw_torch",
        "adamw_8bit",
        "paged_adamw",
        "paged_adamw_8bit",
        "lion",
        "adafactor",
        "sgd",
    ] {
        let arguments = resolve(&["--optim", name, "--learning-rate", "1e-3"]).expect(name);
        let config = LlamaConfig {
            vocab_size: 300,
            hidden_size: 64,
            intermediate_size: 96,
            num_hidden_layers: 1,
            num_attention_heads: 2,
            ..LlamaConfig::default()
        };
        let model = CausalLm::new(&config.into(), &InitOptions::default()).expect("a model");
        model.set_requires_grad(true).expect("leaves");
        let mut optimizer = arguments.new_optimizer(&model).expect(name);
        let ids = Tensor::arange(32, (Kind::Int64, Device::Cpu)).view([1, 32]);
        let mut losses = Vec::new();
        for _ in 0..5 {
            let loss = model
                .loss(&ids, &ids, LabelShift::HuggingFace)
                .expect("a loss");
            let loss = loss.mean().expect("a mean");
            loss.backward();
            optimizer.step().expect(name);
            optimizer.zero_grad().expect(name);
            losses.push(loss.double_value(&[]));
        }
        assert!(losses[4] < losses[0], "{name}: {losses:?}");
    }
}

#[test]
fn a_hugging_face_file_that_asks_for_nothing_more_loads_as_it_stands() {
    let text = "
output_dir: out
per_device_train_batch_size: 4
gradient_accumulation_steps: 8
num_train_epochs: 1
learning_rate: 2.0e-4
lr_scheduler_type: cosine
warmup_ratio: 0.03
weight_decay: 0.001
max_grad_norm: 0.3
max_seq_length: 256
optim: adamw_torch_fused
bf16: false
fp16: false
gradient_checkpointing: false
group_by_length: false
packing: false
dataloader_num_workers: 0
dataloader_pin_memory: true
save_strategy: 'no'
logging_steps: 25
report_to: tensorboard
push_to_hub: false
load_in_4bit: false
bnb_4bit_quant_type: nf4
label_smoothing_factor: 0.0
";
    let (_folder, path) = file("run.yaml", text);
    let arguments = resolve(&["--config", &path]).expect("loads");
    assert_eq!(arguments.sequences_per_step(), 32);
    assert_eq!(arguments.plan(100).expect("valid").total_steps, 13);
}

#[test]
fn values_that_make_no_sense_are_refused_with_the_way_out() {
    for (text, expected) in [
        (
            "bf16: true\nfp16: true",
            "`bf16` is true: `fp16` is true as well, and a run has one of them; drop one, or add `--no-fp16` or `--no-bf16`",
        ),
        (
            "trace: steps.json\nmax_steps: 5",
            "`max_steps` is 5: `trace` records from step 6 on; give more steps, or leave `trace` out",
        ),
        (
            "per_device_train_batch_size: 0",
            "`per_device_train_batch_size` is 0: it must be at least 1; give 1 or more",
        ),
        (
            "max_steps: 0",
            "`max_steps` is 0: a run has at least one step; give 1 or more, or -1 to train for `num_train_epochs`",
        ),
        (
            "learning_rate: -1",
            "`learning_rate` is -1: it must be a number above 0; give such a number, or leave the key out for the default",
        ),
        (
            "adam_beta2: 1",
            "`adam_beta2` is 1: it must be at least 0 and below 1; Hugging Face's default is a good one",
        ),
        (
            "eval_steps: 2.5",
            "`eval_steps` is 2.5: from 1 on it is a number of steps and must be whole; give a whole number, or a part of the run below 1",
        ),
        (
            "warmup_ratio: 100",
            "`warmup_ratio` is 100: it is a part, from 0 to 1; for a number of steps use `warmup_steps`",
        ),
        (
            "vocab_size: 100",
            "`vocab_size` is 100: a byte-level tokenizer has a token for each of the 256 bytes and one between documents; give 257 or more, or a `tokenizer`",
        ),
        (
            "validation_fraction: 1",
            "`validation_fraction` is 1: it is the part of the documents kept for validation, above 0 and below 1; 0.05 is a good start",
        ),
        (
            "threads: 0",
            "`threads` is 0: an operator needs a thread; give 1 or more, or leave it out",
        ),
        (
            "model: {num_attention_heads: 3}",
            "`model.hidden_size` is 256: it does not split into 3 heads; give a multiple of `num_attention_heads`, or `head_dim`",
        ),
        (
            "model: {num_key_value_heads: 3}",
            "`model.num_key_value_heads` is 3: 4 query heads cannot share them evenly; give a divisor of `num_attention_heads`",
        ),
        (
            "model: {head_dim: 7}",
            "`model.head_dim` is 7: rotary positions turn pairs of features; give an even number, or change `hidden_size` or `num_attention_heads`",
        ),
        (
            "model: {max_position_embeddings: 100}",
            "`model.max_position_embeddings` is 100: the context has 256 tokens; raise it to `context_length` or leave it out",
        ),
        (
            "model: {num_hidden_layers: 0}",
            "`model.num_hidden_layers` is 0: a model has at least one; give 1 or more",
        ),
        (
            "model: {model_type: gpt2}",
            "`model.model_type` is `gpt2`: only a Llama is trained from scratch; write `llama` or leave the key out",
        ),
    ] {
        assert_eq!(error(text), expected);
    }
}

#[test]
fn files_that_cannot_be_read_are_told_apart() {
    let error = |path: &str| resolve(&["--config", path]).expect_err("wrong").to_string();
    let text = error("/nowhere/run.yaml");
    assert!(
        text.starts_with("cannot read /nowhere/run.yaml: "),
        "{text}"
    );
    let text = error("run.ini");
    assert_eq!(
        text,
        "cannot tell the format of run.ini from its name; it must end in .json, .yaml, .yml or .toml"
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
fn the_help_shows_every_presets_value() {
    use clap::CommandFactory;
    let help = Flags::command().render_long_help().to_string();
    for part in [
        "--preset <PRESET>",
        "Optimizer steps [default: tiny 600, small 1000]",
        "Seed of weights, order of the data and samples [default: 42]",
        "Tokens of the tokenizer that is trained [default: tiny 4096, small 8192]",
        "--no-fp16",
        "--gradient-accumulation-steps <N>",
    ] {
        assert!(help.contains(part), "{part} is missing in {help}");
    }
}

#[test]
fn plain_serde_reads_what_was_written() {
    let arguments = Preset::Small.arguments();
    let text = arguments.to_text(ConfigFormat::Json).expect("JSON");
    let again: TrainingArguments = serde_json::from_str(&text).expect("reads");
    assert_eq!(again, arguments);
}

#[test]
fn what_toml_cannot_say_is_an_error_and_not_another_configuration() {
    let arguments = TrainingArguments {
        max_eval_batches: None,
        ..Preset::Tiny.arguments()
    };
    let error = arguments.to_text(ConfigFormat::Toml).expect_err("no null");
    assert_eq!(
        error.to_string(),
        "cannot write the configuration as TOML: a key that the preset `tiny` gives a value has \
         none here, and TOML has no `null`; write JSON or YAML"
    );
    assert!(arguments.to_text(ConfigFormat::Yaml).is_ok());
}

prop_compose! {
    fn any_model()(
        heads in 1_u64..9,
        head_dim in prop::option::of(1_u64..65),
        kv in any::<bool>(),
        layers in 1_u64..40,
        rope_theta in 1.0_f64..1e7,
        flags in any::<[bool; 3]>(),
    ) -> ModelArguments {
        ModelArguments {
            hidden_size: heads * 32,
            num_attention_heads: heads,
            num_key_value_heads: kv.then_some(1),
            head_dim: head_dim.map(|half| half * 2),
            num_hidden_layers: layers,
            rope_theta,
            tie_word_embeddings: flags[0],
            attention_bias: flags[1],
            mlp_bias: flags[2],
            ..Default::default()
        }
    }
}

prop_compose! {
    fn any_arguments()(
        model in any_model(),
        // TOML has no whole numbers above this.
        seed in 0..=i64::MAX as u64,
        max_steps in prop_oneof![Just(-1_i64), 1_i64..1_000_000],
        learning_rate in 1e-8_f64..10.0,
        warmup_ratio in 0.0_f64..=1.0,
        scheduler in prop::sample::select(LrSchedulerType::ALL.to_vec()),
        num_cycles in prop::option::of(0.1_f64..5.0),
        precision in 0..3,
        tf32 in any::<Option<bool>>(),
        threads in prop::option::of(1_usize..64),
        data in prop::collection::vec("[ -~]{1,20}", 0..3),
        output_dir in prop::option::of("[^\\x00]{1,12}"),
        eval_steps in prop_oneof![0.01_f64..0.99, (1_u32..500).prop_map(f64::from)],
        report in any::<bool>(),
        attn_implementation in prop::sample::select(AttentionImplementation::ALL.to_vec()),
        recompute in prop::option::of(prop::sample::select(vec![
            Schedule::EveryBlock, Schedule::EveryNth(2), Schedule::Segments(3), Schedule::SqrtSegments,
        ])),
        fused_kernels in any::<bool>(),
    ) -> TrainingArguments {
        TrainingArguments {
            model, seed, max_steps, learning_rate, warmup_ratio, tf32, threads,
            attn_implementation, fused_kernels,
            gradient_checkpointing: recompute.is_some(),
            gradient_checkpointing_kwargs: GradientCheckpointingArguments {
                schedule: recompute.unwrap_or_default(),
                policy: SavePolicy::Matmuls,
                ..Default::default()
            },
            eval_steps: Some(eval_steps),
            lr_scheduler_type: scheduler,
            lr_scheduler_kwargs: ScheduleOptions { num_cycles, ..Default::default() },
            bf16: precision == 1,
            fp16: precision == 2,
            data: data.into_iter().map(PathBuf::from).collect(),
            output_dir: output_dir.map(PathBuf::from),
            report_to: if report { vec![ReportTo::TensorBoard] } else { vec![] },
            ..Preset::Small.arguments()
        }
    }
}

proptest! {
    #[test]
    fn a_configuration_survives_every_format(arguments in any_arguments()) {
        arguments.validate().expect("made to be valid");
        let folder = tempfile::tempdir().expect("temporary folder");
        for name in ["a.json", "a.yaml", "a.toml"] {
            let path = folder.path().join(name);
            arguments.write(&path).expect(name);
            // Over another preset: the file holds every key, so nothing of it is left.
            let again = Layers::new(Preset::Tiny).file(&path).expect(name).resolve().expect(name);
            prop_assert_eq!(&again, &arguments, "{}", name);
        }
    }
}
