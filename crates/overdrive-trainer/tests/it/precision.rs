//! The precision of a run: by its keys, by recommendation, by the stored run that is resumed.

use overdrive_distributed::ProcessGroup;
use overdrive_precision::Precision;
use overdrive_sys::denormals::{flushes_denormals, flushing_denormals};
use overdrive_trainer::{
    ComputeDtype, FinetuneArguments, Layers, Preset, ResumeFromCheckpoint, RunFolder,
    TrainingArguments,
};
use serde_json::{Value, json};
use tch::Device;

fn choose(arguments: &mut TrainingArguments) -> Option<String> {
    let group = ProcessGroup::single();
    arguments.choose_precision(&group, Device::Cpu).unwrap()
}

#[test]
fn the_recommended_precision_is_taken_only_if_no_key_names_one() {
    let mut chosen = Preset::Tiny.arguments();
    assert!(chosen.auto_precision);
    let text = choose(&mut chosen).unwrap();
    let recommended = Precision::recommend(Device::Cpu);
    assert_eq!(chosen.apply().unwrap(), recommended.precision);
    assert_eq!(
        text,
        format!(
            "{} ({}; off: --no-auto-precision)",
            recommended.precision, recommended.reason
        )
    );
    let keys: [fn(&mut TrainingArguments); 5] = [
        |arguments| arguments.bf16 = true,
        |arguments| arguments.fp16 = true,
        |arguments| arguments.tf32 = Some(true),
        |arguments| arguments.tf32 = Some(false),
        |arguments| arguments.auto_precision = false,
    ];
    for set in keys {
        let mut given = Preset::Tiny.arguments();
        set(&mut given);
        let before = given.clone();
        assert_eq!(choose(&mut given), None);
        assert_eq!(given, before);
    }
}

#[test]
fn each_key_of_a_precision_selects_it() {
    let mut arguments = Preset::Tiny.arguments();
    assert!(!arguments.selects_precision());
    let precisions = [
        Precision::Bf16,
        Precision::Fp16,
        Precision::Fp8,
        Precision::Tf32,
    ];
    for precision in precisions {
        arguments.set_precision(precision);
        assert!(arguments.selects_precision(), "{precision}");
        assert_eq!(arguments.precision(), precision);
    }
}

#[test]
fn a_run_takes_subnormal_numbers_for_zero_unless_its_key_is_off() {
    let mut arguments = Preset::Tiny.arguments();
    arguments.apply().unwrap();
    // Nothing changes where the processor has no such mode.
    let has_mode = flushing_denormals(flushes_denormals);
    assert_eq!(flushes_denormals(), has_mode);
    let layers = Layers::new(Preset::Tiny).layer(json!({"flush_denormals": false}), "run.json");
    arguments = layers.unwrap().resolve().unwrap();
    arguments.apply().unwrap();
    assert!(!flushes_denormals());
}

#[test]
fn a_dtype_that_is_switched_off_or_named_is_not_replaced_by_the_recommended_one() {
    let of = |values: Value| {
        let layers = Layers::new(Preset::Tiny).layer(values, "run.json");
        layers.unwrap().resolve().unwrap().auto_precision
    };
    assert!(of(json!({"learning_rate": 1e-3})));
    assert!(of(json!({"dtype": "auto"})));
    for fp32 in [
        json!({"bf16": false}),
        json!({"fp16": false, "bf16": false}),
        json!({"dtype": "float32"}),
        json!({"mixed_precision": "no"}),
        json!({"use_amp": false}),
        json!({"auto_precision": false}),
    ] {
        assert!(!of(fp32.clone()), "{fp32}");
    }
    // The stored file of a run names the key.
    assert!(of(
        json!({"bf16": false, "fp16": false, "auto_precision": true})
    ));
}

#[test]
fn fp8_is_refused_where_no_tensor_core_multiplies_it() {
    let mut arguments = TrainingArguments {
        fp8: true,
        ..Preset::Tiny.arguments()
    };
    assert_eq!(arguments.precision(), Precision::Fp8);
    let group = ProcessGroup::single();
    let refused = arguments.choose_precision(&group, Device::Cpu);
    let message = refused.unwrap_err().to_string();
    assert!(
        message.contains("`precision` is fp8") && message.contains("8.9"),
        "{message}"
    );
    let both = TrainingArguments {
        bf16: true,
        ..arguments
    };
    let message = both.validate().unwrap_err().to_string();
    assert!(message.contains("`fp8` is true"), "{message}");
}

#[test]
fn a_resumed_run_keeps_the_precision_of_its_stored_arguments() {
    // On every machine at least two of these are not the recommended precision.
    for (bf16, fp16, tf32) in [
        (false, false, None),
        (true, false, None),
        (false, true, Some(false)),
    ] {
        let folder = tempfile::tempdir().unwrap();
        let fresh = TrainingArguments {
            output_dir: Some(folder.path().join("run")),
            ..Preset::Tiny.arguments()
        };
        let stored = TrainingArguments {
            bf16,
            fp16,
            tf32,
            ..fresh.clone()
        };
        RunFolder::create(&stored).unwrap();
        let mut resumed = TrainingArguments {
            resume_from_checkpoint: Some(ResumeFromCheckpoint::Latest(true)),
            ..fresh
        };
        let text = choose(&mut resumed).unwrap();
        assert!(text.ends_with("(as in the run that is resumed)"), "{text}");
        assert_eq!(
            (resumed.bf16, resumed.fp16, resumed.tf32),
            (bf16, fp16, tf32)
        );
    }
}

#[test]
fn the_compute_dtype_of_quantized_weights_is_the_precision_of_scaler_and_memory_plan() {
    let mut arguments = FinetuneArguments {
        load_in_4bit: true,
        bnb_4bit_compute_dtype: ComputeDtype::Float16,
        ..FinetuneArguments::default()
    };
    for (dtype, precision) in [
        (ComputeDtype::Float16, Precision::Fp16),
        (ComputeDtype::Bfloat16, Precision::Bf16),
        (ComputeDtype::Float32, Precision::Fp32),
    ] {
        arguments.bnb_4bit_compute_dtype = dtype;
        let applied = arguments.apply().unwrap();
        assert_eq!(applied, precision);
        let scaler = applied.new_scaler().unwrap();
        assert_eq!(scaler.is_some(), precision == Precision::Fp16);
        let memory = arguments.training.memory_plan(1000, applied);
        assert_eq!(memory.precision, precision);
    }
}
