//! Whole models with adapters against PEFT, in both directions, on the folders that
//! `overdrive-lora/tests/fixtures/gen_peft.py` makes.
//!
//! With `OVERDRIVE_PEFT_OUT=DIR` the folders that are written for PEFT stay in `DIR`, for
//! `overdrive-lora/tests/fixtures/check_peft.py DIR`.

use std::path::{Path, PathBuf};

use overdrive_lora::{
    AddOptions, BiasMode, InitLoraWeights, LoadAdapterOptions, LoraConfig, MergeOptions,
    TargetModules, add_adapter, delete_adapter, disable_adapters, enable_adapters, load_adapter,
    merge_adapters, parameter_counts, save_adapter, trainable_parameters, unmerge_adapters,
};
use overdrive_nn::AdapterHost;
use overdrive_safetensors::{MappedFile, write};
use overdrive_transformer::{CausalLm, Execution, ForwardInput, LoadOptions};
use serde_json::Value;
use tch::{Device, Kind, Tensor};

/// As in `parity.rs`: two layers of fp32 matmuls summed in another order, logits of about 0.5.
const TOLERANCE: f64 = 1e-5;

fn fixtures(family: &str) -> PathBuf {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR"))
        .join("../overdrive-lora/tests/fixtures/peft")
        .join(family);
    assert!(
        path.exists(),
        "{} is missing: run `python3 gen_peft.py` in overdrive-lora/tests/fixtures",
        path.display()
    );
    path
}

fn base(family: &str) -> CausalLm {
    CausalLm::from_pretrained(fixtures(family).join("base"), &LoadOptions::default()).unwrap()
}

fn expected(family: &str, name: &str) -> Tensor {
    let file = MappedFile::open(fixtures(family).join("expected.safetensors")).unwrap();
    file.tensor(name)
        .unwrap()
        .copy_to_tensor(None, Device::Cpu)
        .unwrap()
}

fn logits(model: &CausalLm, ids: &Tensor) -> Tensor {
    tch::no_grad(|| model.forward(ForwardInput::new(ids)).unwrap())
}

fn apart(one: &Tensor, other: &Tensor) -> f64 {
    (one - other).abs().max().double_value(&[])
}

fn adapters(family: &str) -> Vec<String> {
    let entries = std::fs::read_dir(fixtures(family)).unwrap();
    let mut names: Vec<String> = entries
        .map(|entry| entry.unwrap())
        .filter(|entry| entry.path().join("adapter_config.json").exists())
        .map(|entry| entry.file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

/// The folders of `gen_peft_init.py`.
#[test]
fn adapters_that_peft_initialized_from_weights_or_data_load() {
    let folder = fixtures("../peft_init");
    let file = MappedFile::open(folder.join("expected.safetensors")).unwrap();
    let tensor = |name: &str| {
        let stored = file.tensor(name).unwrap();
        stored.copy_to_tensor(None, Device::Cpu).unwrap()
    };
    let ids = tensor("input_ids");
    let options = |residual_base| LoadAdapterOptions {
        trainable: true,
        residual_base,
        ..LoadAdapterOptions::default()
    };
    for name in ["loftq", "loftq_8", "eva", "corda"] {
        let mut model = base("llama");
        if name == "corda" {
            // CorDA has changed the weights by data that the adapter does not hold.
            let before = logits(&model, &ids);
            let refused = load_adapter(&mut model, folder.join(name), "a", &options(false));
            let message = refused.unwrap_err().to_string();
            assert!(
                message.starts_with("`init_lora_weights` is \"corda\"")
                    && message.contains("residual_base"),
                "{message}"
            );
            assert_eq!(logits(&model, &ids), before);
            let left = folder.join("corda_base");
            model = CausalLm::from_pretrained(left, &LoadOptions::default()).unwrap();
        }
        let loaded = load_adapter(
            &mut model,
            folder.join(name),
            "a",
            &options(name == "corda"),
        )
        .unwrap();
        let off = apart(&logits(&model, &ids), &tensor(name));
        println!("{name}: {off:.1e}");
        assert!(off < TOLERANCE, "{name}: {off}");
        // It can be trained, and is saved as it was read.
        assert_eq!(trainable_parameters(&mut model).unwrap().len(), 12);
        let again = tempfile::tempdir().unwrap();
        save_adapter(&mut model, again.path(), "a").unwrap();
        let read = overdrive_lora::read_config(again.path()).unwrap();
        assert_eq!(
            read.init_lora_weights, loaded.config.init_lora_weights,
            "{name}"
        );
        // Merged, the model computes the same.
        merge_adapters(&mut model, None, &MergeOptions::default()).unwrap();
        let off = apart(&logits(&model, &ids), &tensor(name));
        assert!(off < TOLERANCE, "{name} merged: {off}");
    }
    // Only a new adapter cannot be initialized from data.
    for init in [InitLoraWeights::Eva, InitLoraWeights::Corda] {
        let config = LoraConfig {
            init_lora_weights: init,
            ..LoraConfig::default()
        };
        let mut model = base("llama");
        let refused = add_adapter(&mut model, "a", &config, &AddOptions::default());
        let message = refused.unwrap_err().to_string();
        assert!(
            message.contains("it must be another method for a new adapter"),
            "{message}"
        );
    }
}

/// Embeddings and norms, which a model offers by `AdapterHost::visit_parameters`.
fn needs_parameters(family: &str, name: &str) -> bool {
    name == "modules_to_save" || (family, name) == ("gpt2", "bias_all")
}

fn offers_parameters(model: &mut CausalLm) -> bool {
    let mut offered = 0;
    let mut count = |_: &str, _: &mut Tensor| {
        offered += 1;
        Ok(())
    };
    model.visit_parameters(&mut count).unwrap();
    offered > 0
}

#[test]
fn adapters_that_peft_saved_give_pefts_logits() {
    for family in ["llama", "gpt2"] {
        let ids = expected(family, "input_ids");
        let names = adapters(family);
        assert!(names.len() >= 3, "{names:?}");
        for name in names {
            let mut model = base(family);
            if needs_parameters(family, &name) && !offers_parameters(&mut model) {
                // Refused by name rather than loaded in part.
                let dir = fixtures(family).join(&name);
                let options = LoadAdapterOptions::default();
                let error = load_adapter(&mut model, &dir, "default", &options).unwrap_err();
                println!("not run: {family} {name}: {error}");
                continue;
            }
            let plain = logits(&model, &ids);
            assert!(apart(&plain, &expected(family, "base")) < TOLERANCE);
            let want = expected(family, &name);
            // An adapter that changes nothing would prove nothing.
            assert!(apart(&plain, &want) > 1e-3, "{family} {name}");
            let dir = fixtures(family).join(&name);
            let options = LoadAdapterOptions {
                trainable: true,
                ..LoadAdapterOptions::default()
            };
            load_adapter(&mut model, &dir, "default", &options)
                .unwrap_or_else(|error| panic!("{family} {name}: {error}"));
            for fused in [true, false] {
                let mut execution = Execution::default();
                execution.fused_kernels = fused;
                model.set_execution(execution);
                let difference = apart(&logits(&model, &ids), &want);
                assert!(
                    difference < TOLERANCE,
                    "{family} {name}, fused {fused}: {difference:e}"
                );
            }
            check_counts(&mut model, &dir);
            merge_adapters(&mut model, None, &MergeOptions::default()).unwrap();
            let difference = apart(&logits(&model, &ids), &want);
            assert!(
                difference < TOLERANCE,
                "{family} {name} merged: {difference:e}"
            );
            unmerge_adapters(&mut model).unwrap();
            disable_adapters(&mut model).unwrap();
            let trains_biases = name.starts_with("bias");
            let difference = apart(&logits(&model, &ids), &plain);
            // Trained biases stay, as in PEFT.
            assert_eq!(
                difference < TOLERANCE,
                !trains_biases,
                "{family} {name} disabled: {difference:e}"
            );
            enable_adapters(&mut model).unwrap();
            assert!(apart(&logits(&model, &ids), &want) < TOLERANCE);
        }
    }
}

/// Checks the names and the number of the trainable parameters against PEFT's.
fn check_counts(model: &mut CausalLm, dir: &Path) {
    let text = std::fs::read_to_string(dir.join("counts.json")).unwrap();
    let counts: Value = serde_json::from_str(&text).unwrap();
    let found = parameter_counts(model).unwrap();
    assert_eq!(
        Some(found.trainable),
        counts["trainable"].as_u64(),
        "{}",
        dir.display()
    );
    let mut names: Vec<String> = trainable_parameters(model)
        .unwrap()
        .into_iter()
        .map(|(name, _)| name)
        .collect();
    let mut want: Vec<String> = serde_json::from_value(counts["names"].clone()).unwrap();
    names.sort();
    want.sort();
    assert_eq!(names, want, "{}", dir.display());
}

fn configs(family: &str) -> Vec<(&'static str, LoraConfig)> {
    let names = |names: &[&str]| Some(TargetModules::names(names.iter().copied()));
    let plain = LoraConfig {
        r: 4,
        lora_alpha: 8.0,
        task_type: Some("CAUSAL_LM".to_owned()),
        fan_in_fan_out: family == "gpt2",
        ..LoraConfig::default()
    };
    let mut all = vec![
        ("default", plain.clone()),
        (
            "all_linear",
            LoraConfig {
                target_modules: Some(TargetModules::AllLinear),
                ..plain.clone()
            },
        ),
        (
            "rslora",
            LoraConfig {
                use_rslora: true,
                ..plain.clone()
            },
        ),
        (
            "dora",
            LoraConfig {
                use_dora: true,
                ..plain.clone()
            },
        ),
        (
            "lora_bias",
            LoraConfig {
                lora_bias: true,
                ..plain.clone()
            },
        ),
        (
            "bias_lora_only",
            LoraConfig {
                bias: BiasMode::LoraOnly,
                ..plain.clone()
            },
        ),
        (
            "pissa",
            LoraConfig {
                init_lora_weights: InitLoraWeights::Pissa,
                ..plain.clone()
            },
        ),
        (
            "pattern",
            LoraConfig {
                target_modules: Some(TargetModules::from(r".*(attn|mlp)\..*proj")),
                exclude_modules: Some(overdrive_lora::Names::Many(vec!["down_proj".to_owned()])),
                ..plain.clone()
            },
        ),
    ];
    if family == "llama" {
        all.push((
            "bias_all",
            LoraConfig {
                bias: BiasMode::All,
                ..plain.clone()
            },
        ));
        all.push((
            "olora",
            LoraConfig {
                init_lora_weights: InitLoraWeights::Olora,
                ..plain.clone()
            },
        ));
        all.push((
            "ranks",
            LoraConfig {
                target_modules: names(&["q_proj", "up_proj", "lm_head"]),
                rank_pattern: vec![(r"layers\.1\.mlp\.up_proj".to_owned(), 6)],
                alpha_pattern: vec![("q_proj".to_owned(), 2.0)],
                ..plain.clone()
            },
        ));
        all.push((
            "layers",
            LoraConfig {
                target_modules: names(&["o_proj"]),
                layers_to_transform: Some(overdrive_lora::LayerIndices::One(1)),
                ..plain
            },
        ));
    }
    all
}

/// Deterministic values of the shape `size`.
fn numbers(size: &[i64], salt: f64) -> Tensor {
    let count: i64 = size.iter().product();
    let wild =
        (Tensor::arange(count, (Kind::Double, Device::Cpu)) * 12.9898 + salt).sin() * 43758.5453;
    ((&wild - wild.floor()) * 0.4 - 0.2)
        .reshape(size)
        .to_kind(Kind::Float)
}

#[test]
fn adapters_saved_here_load_again_and_are_left_for_peft_to_check() {
    let kept = std::env::var_os("OVERDRIVE_PEFT_OUT").map(PathBuf::from);
    let scratch = tempfile::tempdir().unwrap();
    let out = kept.unwrap_or_else(|| scratch.path().to_path_buf());
    for family in ["llama", "gpt2"] {
        let ids = expected(family, "input_ids");
        for (name, config) in configs(family) {
            let mut model = base(family);
            let plain = logits(&model, &ids);
            add_adapter(
                &mut model,
                "mine",
                &config,
                &AddOptions {
                    seed: 3,
                    ..AddOptions::default()
                },
            )
            .unwrap();
            let parameters = trainable_parameters(&mut model).unwrap();
            tch::no_grad(|| {
                for (index, (_, parameter)) in parameters.iter().enumerate() {
                    let _ = parameter
                        .shallow_clone()
                        .g_add_(&numbers(&parameter.size(), index as f64));
                }
            });
            let got = logits(&model, &ids);
            assert!(apart(&got, &plain) > 1e-3, "{family} {name}");
            let dir = out.join(family).join(name);
            save_adapter(&mut model, &dir, "mine").unwrap();
            write(
                dir.join("expected.safetensors"),
                &[
                    ("input_ids".to_owned(), ids.shallow_clone()),
                    ("logits".to_owned(), got.shallow_clone()),
                ],
                &Default::default(),
            )
            .unwrap();
            let mut other = base(family);
            load_adapter(&mut other, &dir, "theirs", &LoadAdapterOptions::default()).unwrap();
            let difference = apart(&logits(&other, &ids), &got);
            assert!(difference < 1e-6, "{family} {name}: {difference:e}");
            delete_adapter(&mut other, "theirs").unwrap();
        }
    }
}
