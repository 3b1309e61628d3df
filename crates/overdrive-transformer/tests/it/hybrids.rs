//! Qwen3-Next and Qwen3.5 (`fixtures/gen_hybrids.py`): layers with states over each kind of cache, packed sequences,
//! adapters, what their folders hold, and what is refused; the tests of all families have their fixtures, too.

use std::collections::BTreeMap;

use overdrive_attention::PackedLengths;
use overdrive_kv_cache::{CacheImplementation, CacheShape};
use overdrive_lora::{AddOptions, LoraConfig, TargetModules, add_adapter, trainable_parameters};
use overdrive_nn::{AdapterHost, LinearWeight};
use overdrive_quantization::Activations;
use overdrive_transformer::{
    CausalLm, Execution, ForwardInput, InitOptions, LabelShift, LlamaConfig, LlamaFamily,
    LoadOptions, ModelConfig, QuantizeOptions,
};
use serde_json::{Value, json};
use tch::{Device, Kind, Tensor};

use crate::common::{copy_of, edit_config, expected, fixture, load, max_difference, warnings_of};

const CASES: [&str; 4] = ["qwen3_next", "qwen3_next_dense", "qwen3_5", "qwen3_5_moe"];

fn logits(model: &CausalLm, ids: &Tensor) -> Tensor {
    tch::no_grad(|| model.forward(ForwardInput::new(ids)).unwrap())
}

fn over_a_cache(model: &CausalLm, ids: &Tensor, kind: CacheImplementation) -> Tensor {
    let shape = CacheShape {
        batch: 2,
        max_len: Some(12),
        window: (kind == CacheImplementation::Sliding).then_some(64),
        group_size: 16,
        ..model.cache_shape()
    };
    let mut cache = kind.build(&shape).unwrap();
    let mut parts = Vec::new();
    for tokens in [5, 1, 4, 2] {
        let part = ids.narrow(1, cache.len(), tokens);
        let input = ForwardInput::new(&part).with_cache(cache.as_mut());
        parts.push(tch::no_grad(|| model.forward(input).unwrap()));
        // A step of speculation: its tokens are not accepted.
        let rejected = ids.narrow(1, 0, 3);
        let held = cache.len();
        if held + 3 <= 12 {
            let input = ForwardInput::new(&rejected).with_cache(cache.as_mut());
            let _logits = tch::no_grad(|| model.forward(input).unwrap());
            cache.truncate(held).unwrap();
        }
    }
    Tensor::cat(&parts, 1)
}

#[test]
fn every_cache_of_a_hybrid_model_gives_its_logits() {
    for case in CASES {
        let (mut model, want) = (load(case), expected(case));
        for fused in [true, false] {
            let mut execution = Execution::default();
            execution.fused_kernels = fused;
            model.set_execution(execution);
            for kind in CacheImplementation::ALL {
                let found = over_a_cache(&model, &want["input_ids"], kind);
                let difference = max_difference(&found, &want["logits"]);
                // The quantized caches keep so few tokens in full precision.
                assert!(difference < 1e-5, "{case} {kind}: {difference}");
            }
        }
    }
}

#[test]
fn sequences_packed_in_one_row_equal_each_alone_with_their_gradients() {
    for case in CASES {
        let (model, ids) = (load(case), &expected(case)["input_ids"]);
        model.set_requires_grad(true).unwrap();
        let row = ids.reshape([1, 24]);
        let lengths = PackedLengths::from_lengths(&[7, 1, 16], Device::Cpu).unwrap();
        let input = ForwardInput::new(&row).with_sequences(&lengths);
        let packed = model.forward(input).unwrap();
        packed.square().sum(Kind::Float).backward();
        let gradients = |model: &CausalLm| -> BTreeMap<String, Tensor> {
            let named = model.named_parameters().into_iter();
            named
                .filter(|(_, parameter)| parameter.grad().defined())
                .map(|(name, mut parameter)| {
                    let gradient = parameter.grad().copy();
                    parameter.zero_grad();
                    (name, gradient)
                })
                .collect()
        };
        let of_packed = gradients(&model);
        let mut start = 0;
        for length in [7, 1, 16] {
            let alone = model
                .forward(ForwardInput::new(&row.narrow(1, start, length)))
                .unwrap();
            let difference = max_difference(&packed.narrow(1, start, length), &alone);
            assert!(difference < 1e-5, "{case}: {difference}");
            alone.square().sum(Kind::Float).backward();
            start += length;
        }
        for (name, gradient) in gradients(&model) {
            let scale = gradient.abs().max().double_value(&[]).max(1e-6);
            let relative = max_difference(&gradient, &of_packed[&name]) / scale;
            assert!(relative < 1e-4, "{case} {name}: {relative}");
        }
    }
}

#[test]
fn adapters_over_all_layers_are_trained_and_quantized_layers_stay_near() {
    for (case, scheme) in [
        ("qwen3_next", "nf4"),
        ("qwen3_5", "int8"),
        ("qwen3_5_moe", "nf4"),
    ] {
        let want = expected(case);
        let ids = &want["input_ids"];
        let options = LoadOptions {
            quantization: Some(QuantizeOptions::new(scheme.parse().unwrap())),
            ..LoadOptions::default()
        };
        let mut model = CausalLm::from_pretrained(fixture(case), &options).unwrap();
        // The kernels round activations to 8 bits otherwise.
        model.set_activations(Activations::Float).unwrap();
        let mut layers = BTreeMap::new();
        model
            .visit_linears(&mut |name, linear| {
                let quantized = matches!(linear.weight(), LinearWeight::Quantized(_));
                layers.insert(name.to_owned(), quantized);
                Ok(())
            })
            .unwrap();
        for part in ["in_proj_qkv", "out_proj", "self_attn.q_proj"] {
            let mut found = layers.iter().filter(|(name, _)| name.contains(part));
            assert!(found.clone().count() > 0, "{case} {part}");
            assert!(found.all(|(_, quantized)| *quantized), "{case} {part}");
        }
        let config = LoraConfig {
            target_modules: Some(TargetModules::AllLinear),
            ..LoraConfig::default()
        };
        add_adapter(&mut model, "a", &config, &AddOptions::default()).unwrap();
        let loss = model.loss(ids, ids, LabelShift::HuggingFace).unwrap();
        loss.mean().unwrap().backward();
        let trainable = trainable_parameters(&mut model).unwrap();
        assert!(
            trainable.iter().any(|(name, _)| name.contains("in_proj_")),
            "{case}"
        );
        let before = logits(&model, ids);
        tch::no_grad(|| {
            for (_, mut tensor) in trainable.into_iter() {
                let step = tensor.grad() * -0.1;
                let _same = tensor.f_add_(&step).unwrap();
            }
        });
        let after = logits(&model, ids);
        assert!(max_difference(&before, &after) > 1e-2, "{case}");
        let cached = over_a_cache(&model, ids, CacheImplementation::Dynamic);
        let difference = max_difference(&cached, &after);
        assert!(difference < 1e-4, "{case}: {difference}");
    }
}

#[test]
fn the_text_of_a_multimodal_qwen3_5_is_read_and_saved_as_text_alone() {
    let case = "qwen3_5_multimodal";
    let want = expected(case);
    let (model, warnings) = warnings_of(|| load(case));
    assert!(warnings[0].contains("supports only text"), "{warnings:?}");
    let difference = max_difference(&logits(&model, &want["input_ids"]), &want["logits"]);
    assert!(difference < 1e-5, "{difference}");
    let out = tempfile::tempdir().unwrap();
    model
        .save_pretrained(out.path(), &Default::default())
        .unwrap();
    let config = std::fs::read_to_string(out.path().join("config.json")).unwrap();
    let config: Value = serde_json::from_str(&config).unwrap();
    assert_eq!(config["model_type"], "qwen3_5_text");
    assert_eq!(config.get("vision_config"), None);
    let again = CausalLm::from_pretrained(out.path(), &LoadOptions::default()).unwrap();
    assert_eq!(
        logits(&again, &want["input_ids"]),
        logits(&model, &want["input_ids"])
    );
}

/// As in the published files of Qwen3.5 with experts, beside layers that predict several tokens at once.
#[test]
fn experts_in_one_tensor_a_layer_and_further_predictions_are_read_over() {
    let case = "qwen3_5_moe";
    let dir = copy_of(case);
    let path = dir.path().join("model.safetensors");
    let mut tensors: BTreeMap<String, Tensor> = Tensor::read_safetensors(&path)
        .unwrap()
        .into_iter()
        .collect();
    let mut packed = BTreeMap::new();
    for layer in 0..3 {
        let mut take = |expert: i64, part: &str| {
            let name = format!("model.layers.{layer}.mlp.experts.{expert}.{part}_proj.weight");
            tensors.remove(&name).unwrap()
        };
        let (mut gate_up, mut down) = (Vec::new(), Vec::new());
        for expert in 0..6 {
            gate_up.push(Tensor::cat(&[take(expert, "gate"), take(expert, "up")], 0));
            down.push(take(expert, "down"));
        }
        let name = |part: &str| format!("model.language_model.layers.{layer}.mlp.experts.{part}");
        packed.insert(name("gate_up_proj"), Tensor::stack(&gate_up, 0));
        packed.insert(name("down_proj"), Tensor::stack(&down, 0));
    }
    for (name, tensor) in tensors {
        let name = match name.strip_prefix("model.") {
            Some(rest) => format!("model.language_model.{rest}"),
            None => name,
        };
        packed.insert(name, tensor);
    }
    packed.insert(
        "mtp.fc.weight".to_owned(),
        Tensor::zeros([4, 4], (Kind::Float, Device::Cpu)),
    );
    let named: Vec<(&str, &Tensor)> = packed.iter().map(|(name, t)| (name.as_str(), t)).collect();
    Tensor::write_safetensors(&named, &path).unwrap();
    edit_config(dir.path(), |config| {
        let text = Value::Object(std::mem::take(config));
        config.insert("model_type".to_owned(), "qwen3_5_moe".into());
        config.insert("tie_word_embeddings".to_owned(), false.into());
        config.insert("text_config".to_owned(), text);
    });
    let (model, warnings) =
        warnings_of(|| CausalLm::from_pretrained(dir.path(), &LoadOptions::default()).unwrap());
    assert!(warnings.is_empty(), "{warnings:?}");
    let want = expected(case);
    let difference = max_difference(&logits(&model, &want["input_ids"]), &want["logits"]);
    assert!(difference < 1e-5, "{difference}");
}

/// The published files of Qwen3.5 have the norms and the speeds of decay of linear attention in fp32, and all else in bf16.
#[test]
fn a_folder_in_bf16_with_norms_of_linear_attention_in_fp32_is_computed() {
    let dir = copy_of("qwen3_5");
    let path = dir.path().join("model.safetensors");
    let mut tensors = Tensor::read_safetensors(&path).unwrap();
    for (name, tensor) in &mut tensors {
        let is_wide = [".linear_attn.norm.weight", ".A_log"]
            .iter()
            .any(|end| name.ends_with(end));
        if !is_wide {
            *tensor = tensor.to_kind(Kind::BFloat16);
        }
    }
    Tensor::write_safetensors(&tensors, &path).unwrap();
    let mut model = CausalLm::from_pretrained(dir.path(), &Default::default()).unwrap();
    let want = expected("qwen3_5");
    for fused in [true, false] {
        let mut execution = Execution::default();
        execution.fused_kernels = fused;
        model.set_execution(execution);
        let got = logits(&model, &want["input_ids"]);
        assert_eq!(got.kind(), Kind::BFloat16);
        let difference = max_difference(&got, &want["logits"]);
        assert!(difference < 0.2, "{difference}");
    }
}

#[test]
fn a_new_model_has_the_initial_speeds_of_decay_of_transformers() {
    let config = LlamaConfig {
        vocab_size: 64,
        hidden_size: 32,
        intermediate_size: 48,
        num_hidden_layers: 4,
        num_attention_heads: 2,
        num_key_value_heads: Some(1),
        head_dim: Some(16),
        ..LlamaConfig::of(LlamaFamily::Qwen35)
    };
    let model = CausalLm::new(&config.into(), &InitOptions::default()).unwrap();
    let parameters: BTreeMap<_, _> = model.named_parameters().into_iter().collect();
    let speeds = parameters["model.layers.0.linear_attn.A_log"].exp();
    assert_eq!(speeds.size(), [32]);
    let (least, most) = (
        speeds.min().double_value(&[]),
        speeds.max().double_value(&[]),
    );
    assert!((0.01..2.0).contains(&least), "{least}");
    assert!((12.0..=16.0).contains(&most), "{most}");
    let bias = &parameters["model.layers.0.linear_attn.dt_bias"];
    assert_eq!(bias, &Tensor::ones_like(bias));
    let norm = &parameters["model.layers.0.input_layernorm.weight"];
    assert_eq!(norm, &Tensor::zeros_like(norm));
    // Every fourth layer attends.
    assert!(parameters.contains_key("model.layers.3.self_attn.q_proj.weight"));
    assert_eq!(model.cache_shape().recurrent, [true, true, true, false]);
}

#[test]
fn configurations_of_hybrids_are_read_with_their_defaults_and_refused_by_their_keys() {
    let config = |family: &str, key: &str, value: Value| {
        let mut config = json!({"model_type": family, "num_hidden_layers": 8});
        config[key] = value;
        ModelConfig::from_json(&config.to_string())
    };
    let attending = |config: ModelConfig| match config {
        ModelConfig::Llama(config) => (0..8).filter(|layer| !config.is_linear(*layer)).collect(),
        _ => Vec::new(),
    };
    let multimodal = ModelConfig::from_json(r#"{"model_type": "qwen3_5"}"#).unwrap();
    assert!(!multimodal.tie_word_embeddings());
    let families = ["qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"];
    for family in families {
        let usual = config(family, "use_cache", true.into()).unwrap();
        assert_eq!(attending(usual), [3, 7], "{family}");
        let twice = config(family, "full_attention_interval", 2.into()).unwrap();
        assert_eq!(attending(twice), [1, 3, 5, 7], "{family}");
        for (key, value, part) in [
            ("attn_output_gate", json!(false), "attention with a gate"),
            (
                "layer_types",
                json!(["sliding_attention"]),
                "full_attention, linear_attention",
            ),
            (
                "layer_types",
                json!(vec!["linear_attention"; 8]),
                "full_attention for one layer",
            ),
            (
                "linear_num_value_heads",
                json!(24),
                "a multiple of linear_num_key_heads (16)",
            ),
            ("linear_conv_kernel_dim", json!(0), "a positive integer"),
            ("partial_rotary_factor", json!(0.001), "rotated channels"),
            (
                "rope_scaling",
                json!({"rope_type": "mrope"}),
                "default, linear",
            ),
        ] {
            let message = config(family, key, value).unwrap_err().to_string();
            assert!(message.contains(part), "{family} {key}: {message}");
        }
    }
    let linear = config("qwen3", "layer_types", json!(vec!["linear_attention"; 8])).unwrap_err();
    let message = linear.to_string();
    assert!(
        message.contains("full_attention, sliding_attention"),
        "{message}"
    );
}
