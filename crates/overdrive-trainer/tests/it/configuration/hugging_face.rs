//! Files that were written for transformers.

use std::path::Path;

use clap::Parser;
use overdrive_distributed::ProcessGroup;
use overdrive_lora::LoraConfig;
use overdrive_optim::Optimizer;
use overdrive_trainer::{
    DpoArgs, DpoArguments, DpoLossType, FinetuneArgs, IntervalStrategy, Layers, OptimizerName,
    SaveStrategy,
};
use overdrive_transformer::{
    AttentionImplementation, CausalLm, CheckpointOptions, InitOptions, LabelShift, LlamaConfig,
    SavePolicy, Schedule,
};
use serde_json::json;
use tch::{Device, Kind, Tensor};

use crate::configuration::{error, file, resolve};

#[test]
fn unsupported_features_of_hugging_face_are_refused_by_name() {
    for (text, expected) in [
        (
            "optim: galore_adamw",
            "run.yaml: `optim` is `galore_adamw`, which is not one of `adamw_torch`, `adamw_torch_fused`, `adamw_8bit`, `adamw_bnb_8bit`, `paged_adamw`, `paged_adamw_32bit`, `paged_adamw_8bit`, `lion`, `lion_32bit`, `adafactor`, `sgd`, `muon`",
        ),
        (
            "torch_compile: true",
            "run.yaml: `torch_compile: true` is not supported by overdrive-trainer; leave it out: `fused_kernels` (on by default) has the kernels that it would generate for training, and overdrive-packages runs packages of torch's compiler",
        ),
        (
            "save_only_model: true",
            "run.yaml: `save_only_model: true` is not supported by overdrive-trainer; a snapshot must hold all state to resume a run; the model alone is in `model/` at the end",
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
fn the_checkpointing_of_transformers_5_goes_by_its_names() {
    let read = |values| Layers::finetune().layer(values, "a file");
    let arguments = read(json!({
        "activation_checkpointing": true,
        "gradient_checkpointing": true,
        "activation_checkpointing_kwargs": { "every_n_layers": 2, "offload": false },
        "gradient_checkpointing_kwargs": null,
    }));
    let arguments = arguments.expect("loads").arguments().clone();
    assert!(arguments.training.gradient_checkpointing);
    let options = arguments.training.gradient_checkpointing_kwargs;
    assert_eq!(options.schedule, Schedule::EveryNth(2));
    let off = read(json!({ "activation_checkpointing": false })).expect("loads");
    assert!(!off.arguments().training.gradient_checkpointing);

    for (values, expected) in [
        (
            json!({ "activation_checkpointing_kwargs": { "offload": true } }),
            "`gradient_checkpointing_kwargs.offload: true` is not supported",
        ),
        (
            json!({ "activation_checkpointing_kwargs": { "every_n_layers": 2, "schedule": "sqrt_segments" } }),
            "gradient_checkpointing_kwargs.every_n_layers",
        ),
        (
            json!({ "activation_checkpointing": true, "gradient_checkpointing": false }),
            "activation_checkpointing",
        ),
    ] {
        let error = read(values).expect_err("an error").to_string();
        assert!(error.contains(expected), "{error}");
    }
}

#[test]
fn the_defaults_that_trl_writes_load_and_other_values_are_refused() {
    let read = |values| Layers::finetune().layer(values, "a file");
    let defaults = json!({
        "loss_type": "chunked_nll", "router_aux_loss_coef": 0.001, "debug": [], "fsdp": [], "local_rank": 0,
        "packing": true, "eval_packing": true, "model_revision": "main", "dataset_config": null,
        "dataset_train_split": "train", "dataset_test_split": "test", "dataset_streaming": false,
        "ignore_bias_buffers": false, "lora_target_parameters": ["mlp.experts.down_proj"],
        "accelerator_config": {
            "split_batches": false, "dispatch_batches": null, "even_batches": true, "use_seedable_sampler": true,
            "gradient_accumulation_kwargs": { "num_steps": null, "sync_each_batch": true },
        },
    });
    let layers = read(defaults).expect("loads");
    let targets = layers.arguments().target_parameters.as_deref();
    assert_eq!(targets, Some(&["mlp.experts.down_proj".to_owned()][..]));

    for (values, expected) in [
        // Preference training has no such loss.
        (
            json!({ "loss_type": "dft" }),
            "a file: `loss_type: dft` is not supported by overdrive-trainer; leave it out",
        ),
        (
            json!({ "eval_packing": true }),
            "a file: `eval_packing: true` is not supported by overdrive-trainer; leave it out: evaluation packs as training does (`packing`)",
        ),
        (
            json!({ "accelerator_config": { "split_batches": true } }),
            "a file: `accelerator_config.split_batches: true` is not supported by overdrive-trainer; leave it out, and set `per_device_train_batch_size` to the batch of one process",
        ),
        (
            json!({ "accelerator_config": { "gradient_accumulation_kwargs": { "num_steps": 4 } } }),
            "a file: `accelerator_config.gradient_accumulation_kwargs.num_steps: 4` is not supported by overdrive-trainer; set `gradient_accumulation_steps`",
        ),
        (
            json!({ "max_length": null }),
            "a file: `max_length: null` is not supported by overdrive-trainer; give the largest number of tokens; longer examples are truncated",
        ),
        (
            json!({ "model_revision": "v2" }),
            "a file: `model_revision: v2` is not supported by overdrive-trainer; give a folder with this revision as `model_name_or_path`",
        ),
    ] {
        assert_eq!(read(values).expect_err("an error").to_string(), expected);
    }
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
        "muon",
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
        let group = ProcessGroup::single();
        let parameters = model.named_parameters();
        let mut optimizer = arguments.new_optimizer(&group, parameters).expect(name);
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
fn the_configuration_of_an_adapter_loads_and_that_of_another_method_is_refused() {
    // As PEFT and `finetune` write it.
    let text = r#"{
        "alpha_pattern": {}, "auto_mapping": null, "base_model_name_or_path": "models/mine", "bias": "none",
        "fan_in_fan_out": false, "inference_mode": true, "init_lora_weights": true, "layers_pattern": null,
        "layers_to_transform": null, "loftq_config": {}, "lora_alpha": 16, "lora_dropout": 0.1,
        "megatron_config": null, "megatron_core": "megatron.core", "modules_to_save": null, "peft_type": "LORA",
        "r": 8, "rank_pattern": {}, "revision": null, "target_modules": ["q_proj"], "task_type": "CAUSAL_LM",
        "use_dora": false, "use_rslora": false, "data": "train.jsonl"
    }"#;
    let (_folder, path) = file("adapter_config.json", text);
    let layers = Layers::finetune().file(&path).expect("known keys");
    let arguments = layers.resolve().expect("valid");
    assert_eq!((arguments.lora_r, arguments.lora_dropout), (8, 0.1));
    assert_eq!(arguments.model_name_or_path, Path::new("models/mine"));
    for (key, value) in [
        ("peft_type", "IA3"),
        ("task_type", "SEQ_CLS"),
        ("dataset_name", "imdb"),
    ] {
        let layer = Layers::finetune().layer(json!({ key: value }), "the test");
        let error = layer.expect_err("not supported").to_string();
        assert!(error.contains(key) && error.contains(value), "{error}");
    }
}

#[test]
fn a_text_with_the_characters_of_a_regular_expression_is_one() {
    #[derive(Parser)]
    struct Flags {
        #[command(flatten)]
        finetune: FinetuneArgs,
    }
    let targets = |given: &[&str]| {
        let flags = [
            "finetune",
            "--model",
            "m",
            "--data",
            "d",
            "--target-modules",
        ];
        let flags = Flags::parse_from(flags.iter().chain(given));
        let arguments = flags.finetune.resolve().expect("valid");
        serde_json::to_value(arguments.target_modules).expect("values")
    };
    assert_eq!(targets(&[".*q_proj"]), json!(".*q_proj"));
    assert_eq!(targets(&["q_proj"]), json!(["q_proj"]));
    assert_eq!(targets(&["q_proj,v_proj"]), json!(["q_proj", "v_proj"]));
}

#[test]
fn an_unquoted_no_of_yaml_is_a_strategy() {
    let (_folder, path) = file("run.yaml", "eval_strategy: no\nsave_strategy: no\n");
    let arguments = resolve(&["--config", &path]).expect("loads");
    assert_eq!(arguments.eval_strategy, IntervalStrategy::No);
    assert_eq!(arguments.save_strategy, SaveStrategy::No);
}

#[test]
fn a_number_of_epochs_that_is_not_positive_is_an_error() {
    for epochs in ["0", "-1"] {
        let error = resolve(&["--epochs", epochs]).expect_err("no epochs");
        assert!(error.to_string().contains("`num_train_epochs`"), "{error}");
    }
}

#[test]
fn the_keys_of_peft_that_choose_layers_and_initial_values_reach_the_adapters() {
    let own = json!({
        "r": 8, "target_modules": ["q_proj", "v_proj"], "exclude_modules": ["layers.0.self_attn.v_proj"],
        "layers_to_transform": [0, 2], "layers_pattern": "layers", "rank_pattern": {"v_proj": 4, "q_proj": 2},
        "alpha_pattern": {"v_proj": 3.0}, "init_lora_weights": "orthogonal", "lora_bias": false,
        "lora_alpha": 16, "lora_dropout": 0.1, "base_model_name_or_path": "m", "task_type": "CAUSAL_LM",
    });
    let layers = Layers::finetune().layer(own.clone(), "the test");
    let config = layers.expect("known keys").arguments().lora_config();
    let expected = LoraConfig::from_json(&own.to_string()).expect("valid");
    assert_eq!(config, expected);
    for (key, value, expected) in [
        ("init_lora_weights", json!("pisa"), "\"pissa_niter_N\""),
        (
            "layers_to_transform",
            json!("all"),
            "an index or a list of indices",
        ),
        (
            "rank_pattern",
            json!({"q_proj": "4"}),
            "rank_pattern.q_proj",
        ),
    ] {
        let layer = Layers::finetune().layer(json!({ key: value }), "the test");
        let error = layer.expect_err("a wrong value").to_string();
        assert!(error.contains(key) && error.contains(expected), "{error}");
    }
}

#[derive(Parser)]
struct Preferences {
    #[command(flatten)]
    dpo: DpoArgs,
}

/// Resolves the flags of preference training.
fn preferences(flags: &[&str]) -> overdrive_trainer::Result<DpoArguments> {
    let flags = ["dpo", "--model", "m", "--data", "d"].iter().chain(flags);
    Preferences::parse_from(flags).dpo.resolve()
}

#[test]
fn preference_training_reads_the_keys_of_trls_dpo_config() {
    let text =
        "beta: 0.5\nloss_type: [ipo]\ndisable_dropout: false\nlora_r: 4\nlearning_rate: 1e-6\n";
    let (_folder, path) = file("run.yaml", text);
    let arguments = preferences(&["--config", &path, "--beta", "0.3"]).expect("loads");
    assert_eq!(arguments.dpo.beta, 0.3);
    assert_eq!(arguments.dpo.loss_type, DpoLossType::Ipo);
    assert!(!arguments.dpo.disable_dropout);
    assert_eq!(arguments.finetune.lora_r, 4);
    assert_eq!(arguments.finetune.training.learning_rate, 1e-6);

    for (text, expected) in [
        ("betta: 1", "unknown key `betta`; did you mean `beta`?"),
        ("beta: 0", "`beta` is 0; it must be positive"),
        (
            "loss_type: sft",
            "`loss_type` is `sft`, which is not one of `sigmoid`, `hinge`, `ipo`, `robust`",
        ),
        (
            "label_smoothing: 0.1",
            "`label_smoothing` is 0.1; it must be 0 with this `loss_type`",
        ),
        (
            "vocab_size: 10",
            "is not supported in preference training; leave it out: the tokenizer",
        ),
    ] {
        let (_folder, path) = file("run.yaml", text);
        let error = preferences(&["--config", &path])
            .expect_err(text)
            .to_string();
        assert!(error.contains(expected), "{error}");
    }
    // Fine-tuning accepts the defaults of TRL's files, and refuses a request that it does not read.
    let layers = Layers::finetune().layer(json!({ "beta": 0.1, "loss_type": "nll" }), "a file");
    assert!(layers.is_ok());
    let layers = Layers::finetune().layer(json!({ "loss_type": "ipo" }), "a file");
    let error = layers.expect_err("of preferences").to_string();
    assert!(
        error.contains("to train on preferences, run: ") && error.contains("--example dpo "),
        "{error}"
    );
}

#[test]
fn flags_without_effect_are_refused() {
    for flags in [
        ["--full", "--lora-r", "8"],
        ["--no-use-peft", "--target-modules", "q_proj"],
    ] {
        let error = preferences(&flags).expect_err("contradict").to_string();
        assert!(
            error.contains("it must be left out without `use_peft`"),
            "{error}"
        );
    }
    for (flags, needs) in [
        (["--bnb-4bit-quant-type", "nf4"], "load_in_4bit"),
        (["--llm-int8-threshold", "5"], "load_in_8bit"),
        (["--packing-strategy", "wrapped"], "packing"),
    ] {
        let error = preferences(&flags).expect_err("no effect").to_string();
        let expected = format!("it must be left out without `{needs}`, because it has no effect");
        assert!(error.ends_with(&expected), "{error}");
    }
    assert!(preferences(&["--qlora", "--bnb-4bit-compute-dtype", "bfloat16"]).is_ok());
    let contradiction = Preferences::try_parse_from(["dpo", "--full", "--use-peft"]);
    assert!(contradiction.is_err());
    // TRL writes all keys into its files.
    let (_folder, path) = file("run.yaml", "use_peft: false\nlora_r: 8\n");
    assert!(preferences(&["--config", &path]).is_ok());
    let error = preferences(&["--lora-r", "0"])
        .expect_err("too small")
        .to_string();
    assert_eq!(error, "`lora_r` is 0; it must be at least 1");
}
