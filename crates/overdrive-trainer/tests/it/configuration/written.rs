//! Configurations that are written, and read again.

use std::path::PathBuf;

use overdrive_optim::{LrSchedulerType, ScheduleOptions};
use overdrive_trainer::{
    ConfigFormat, GradientCheckpointingArguments, Layers, ModelArguments, Preset, ReportTo,
    TrainingArguments,
};
use overdrive_transformer::{AttentionImplementation, SavePolicy, Schedule};
use proptest::prelude::*;

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
        "cannot write the configuration as TOML: a key has no value here but one in the preset \
         `tiny`, and TOML has no `null`; write JSON or YAML"
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
        // Without colons: a path that ends with one and a number has a weight.
        data in prop::collection::vec("[ -9;-~]{1,20}", 0..3),
        output_dir in prop::option::of("[^\\x00]{1,12}"),
        eval_steps in prop_oneof![0.01_f64..0.99, (1_u32..500).prop_map(f64::from)],
        report in any::<bool>(),
        attn_implementation in prop::sample::select(AttentionImplementation::ALL.to_vec()),
        recompute in prop::option::of(prop::sample::select(vec![
            Schedule::EveryBlock, Schedule::EveryNth(2), Schedule::Segments(3), Schedule::SqrtSegments,
        ])),
        fused_kernels in any::<bool>(),
        flush_denormals in any::<bool>(),
    ) -> TrainingArguments {
        TrainingArguments {
            model, seed, max_steps, learning_rate, warmup_ratio, tf32, threads,
            attn_implementation, fused_kernels, flush_denormals,
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
