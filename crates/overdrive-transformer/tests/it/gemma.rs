//! Gemma 3n and Gemma 4: layers that share keys and values over every cache, training, sizes of layers, and the text of
//! models with images and audio; the tests of all families have their fixtures, too.

use std::collections::BTreeMap;
use std::path::Path;

use overdrive_checkpointing::Schedule;
use overdrive_kv_cache::{
    AttendOptions, CacheImplementation, CacheShape, DynamicCache, Error, KvCache, KvView,
};
use overdrive_lora::{AddOptions, LoraConfig, TargetModules, add_adapter, trainable_parameters};
use overdrive_quantization::{Activations, GgufFile};
use overdrive_transformer::{
    CausalLm, Execution, ForwardInput, GgufOptions, LabelShift, LoadOptions, ModelConfig,
    QuantizeOptions, RopeScaling,
};
use serde_json::{Value, json};
use tch::{Device, Kind, Tensor};

use crate::common::{copy_of, edit_config, expected, fixture, generator, load, max_difference};

const CASES: [&str; 4] = ["gemma3n", "gemma4", "gemma4_dense", "gemma4_moe"];

fn logits(model: &CausalLm, ids: &Tensor) -> Tensor {
    tch::no_grad(|| model.forward(ForwardInput::new(ids)).unwrap())
}

fn over(model: &CausalLm, cache: &mut dyn KvCache, ids: &Tensor, steps: &[i64]) -> Tensor {
    let (mut parts, mut start) = (Vec::new(), 0);
    for &tokens in steps {
        let part = ids.narrow(1, start, tokens);
        let input = ForwardInput::new(&part).with_cache(cache);
        parts.push(tch::no_grad(|| model.forward(input).unwrap()));
        start += tokens;
    }
    Tensor::cat(&parts, 1)
}

fn shape(model: &CausalLm) -> CacheShape {
    CacheShape {
        windows: model.layer_windows(),
        batch: 2,
        max_len: Some(16),
        kv_heads: model.config().num_key_value_heads(),
        head_dim: model.config().head_dim(),
        layer_heads: model.cache_layer_heads(),
        // So short that tokens are quantized.
        group_size: 4,
        residual_length: 4,
        ..CacheShape::default()
    }
}

#[test]
fn every_cache_holds_the_keys_that_layers_share_as_long_as_they_are_read() {
    for case in CASES {
        let (model, want) = (load(case), expected(case));
        for implementation in CacheImplementation::ALL {
            for steps in [vec![12], vec![1; 12], vec![7, 5], vec![5, 4, 1, 1, 1]] {
                let mut cache = implementation.build(&shape(&model)).unwrap();
                let got = over(&model, &mut *cache, &want["input_ids"], &steps);
                let difference = max_difference(&got, &want["logits"]);
                // Quantized keys and values are rounded; a prompt that is processed in one step is exact.
                let bound = match implementation {
                    CacheImplementation::Int8 if steps.len() > 1 => 0.1,
                    CacheImplementation::Int4 if steps.len() > 1 => 1.0,
                    _ => 1e-5,
                };
                println!("{case} {implementation} {steps:?} {difference:.1e}");
                assert!(
                    difference < bound,
                    "{case} {implementation} {steps:?}: {difference}"
                );
            }
        }
    }
}

#[test]
fn a_cache_has_a_layer_for_each_layer_with_keys_of_its_own() {
    let heads = |case: &str| {
        let model = load(case);
        let heads = model.cache_layer_heads();
        let sizes = heads.iter().map(|own| (own.kv_heads, own.head_dim));
        (
            model.num_layers(),
            model.cache_layers(),
            sizes.collect::<Vec<_>>(),
        )
    };
    // Heads that are the same in all layers are those of the configuration.
    assert_eq!(heads("gemma3n"), (4, 2, vec![]));
    assert_eq!(heads("gemma4"), (4, 2, vec![(1, 8), (1, 16)]));
    assert_eq!(
        heads("gemma4_dense"),
        (3, 3, vec![(2, 8), (1, 16), (1, 16)])
    );
    assert_eq!(heads("gemma4_moe"), heads("gemma4_dense"));

    let model = load("gemma4");
    let ids = &expected("gemma4")["input_ids"];
    let mut cache = DynamicCache::new(model.num_layers());
    let input = ForwardInput::new(ids).with_cache(&mut cache);
    let error = model.forward(input).unwrap_err().to_string();
    assert!(error.contains("4") && error.contains("2"), "{error}");
}

#[test]
fn keys_of_an_earlier_layer_are_refused_before_it_has_attended() {
    let query = Tensor::zeros([1, 2, 1, 8], (Kind::Float, Device::Cpu));
    let model = load("gemma4");
    for implementation in CacheImplementation::ALL {
        let mut cache = implementation.build(&shape(&model)).unwrap();
        let error = cache.attend_shared(0, &query, &AttendOptions::default());
        assert!(
            matches!(error, Err(Error::NotKept { layer: 0 })),
            "{implementation}"
        );
    }
    /// A cache that knows nothing of shared keys.
    #[derive(Debug)]
    struct Own(DynamicCache);
    impl KvCache for Own {
        fn append(
            &mut self,
            layer: usize,
            keys: &Tensor,
            values: &Tensor,
        ) -> overdrive_kv_cache::Result<KvView> {
            self.0.append(layer, keys, values)
        }
        fn layers(&self) -> usize {
            self.0.layers()
        }
        fn len(&self) -> i64 {
            self.0.len()
        }
        fn truncate(&mut self, len: i64) -> overdrive_kv_cache::Result<()> {
            self.0.truncate(len)
        }
        fn reset(&mut self) {
            self.0.reset();
        }
        fn reorder(&mut self, rows: &Tensor) -> overdrive_kv_cache::Result<()> {
            self.0.reorder(rows)
        }
        fn fork(&self) -> overdrive_kv_cache::Result<Box<dyn KvCache>> {
            self.0.fork()
        }
        fn bytes(&self) -> u64 {
            self.0.bytes()
        }
        fn bytes_per_token(&self) -> f64 {
            self.0.bytes_per_token()
        }
        fn state(&self) -> overdrive_kv_cache::Result<Vec<(String, Tensor)>> {
            self.0.state()
        }
        fn load_state(&mut self, state: &[(String, Tensor)]) -> overdrive_kv_cache::Result<()> {
            self.0.load_state(state)
        }
    }
    let mut cache = Own(DynamicCache::new(model.cache_layers()));
    let ids = &expected("gemma4")["input_ids"];
    let input = ForwardInput::new(ids).with_cache(&mut cache);
    let error = tch::no_grad(|| model.forward(input).unwrap_err()).to_string();
    assert!(error.contains("attend_shared"), "{error}");
    // The failed step is undone.
    assert_eq!(cache.len(), 0);
}

/// The keys and values that layers share cross the borders of checkpoints, and their gradients do.
#[test]
fn checkpointing_changes_no_gradient() {
    for case in CASES {
        let mut model = load(case);
        let ids = &expected(case)["input_ids"];
        model.set_requires_grad(true).unwrap();
        let mut gradients = |checkpointing: Schedule| -> Vec<(String, Tensor)> {
            let mut execution = Execution::default();
            execution.checkpointing = checkpointing;
            model.set_execution(execution);
            let loss = model.loss(ids, ids, LabelShift::HuggingFace).unwrap();
            loss.mean().unwrap().backward();
            let parameters = model.named_parameters().into_iter();
            let trained = parameters.filter(|(_, parameter)| parameter.requires_grad());
            trained
                .map(|(name, mut parameter)| {
                    let gradient = parameter.grad().copy();
                    parameter.zero_grad();
                    (name, gradient)
                })
                .collect()
        };
        let plain = gradients(Schedule::Never);
        let recomputed = gradients(Schedule::EveryBlock);
        for ((name, one), (_, other)) in plain.iter().zip(&recomputed) {
            assert_eq!(one, other, "{case}: {name}");
        }
    }
}

#[test]
fn training_mode_bounds_the_coefficients_of_gemma3n_as_transformers_does() {
    let _generator = generator();
    let want = expected("gemma3n");
    for fused in [true, false] {
        let mut model = load("gemma3n");
        let mut execution = Execution::default();
        execution.fused_kernels = fused;
        model.set_execution(execution);
        model.set_training(true).unwrap();
        let got = logits(&model, &want["input_ids"]);
        let difference = max_difference(&got, &want["trained_logits"]);
        assert!(difference < 1e-5, "{difference}");
        assert!(max_difference(&got, &want["logits"]) > 1e-3);
    }
}

#[test]
fn adapters_over_all_layers_are_trained_and_count_over_a_cache() {
    let nf4 = Some(QuantizeOptions::new("nf4".parse().unwrap()));
    for (case, quantization) in [
        ("gemma3n", None),
        ("gemma3n", nf4.clone()),
        ("gemma4", None),
        ("gemma4", nf4.clone()),
        ("gemma4_dense", nf4.clone()),
        ("gemma4_moe", None),
        ("gemma4_moe", nf4),
    ] {
        let ids = &expected(case)["input_ids"];
        let options = LoadOptions {
            quantization,
            ..LoadOptions::default()
        };
        let mut model = CausalLm::from_pretrained(fixture(case), &options).unwrap();
        assert_eq!(model.is_quantized(), options.quantization.is_some());
        // The kernels round activations to 8 bits otherwise, those of few rows and of many in different ways.
        model.set_activations(Activations::Float).unwrap();
        let config = LoraConfig {
            target_modules: Some(TargetModules::AllLinear),
            ..LoraConfig::default()
        };
        add_adapter(&mut model, "a", &config, &AddOptions::default()).unwrap();
        let loss = model.loss(ids, ids, LabelShift::HuggingFace).unwrap();
        loss.mean().unwrap().backward();
        let trainable = trainable_parameters(&mut model).unwrap();
        let before = logits(&model, ids);
        tch::no_grad(|| {
            for (_, mut tensor) in trainable.into_iter() {
                let step = tensor.grad() * -1.0;
                let _same = tensor.f_add_(&step).unwrap();
            }
        });
        let after = logits(&model, ids);
        assert!(max_difference(&before, &after) > 1e-4, "{case}");
        let mut cache = DynamicCache::new(model.cache_layers());
        let cached = over(&model, &mut cache, ids, &[5, 1, 4, 2]);
        let difference = max_difference(&cached, &after);
        assert!(difference < 1e-5, "{case}: {difference}");
    }
}

#[test]
fn experts_of_gemma4_are_written_as_they_were_read_and_quantized_ones_one_by_one() {
    let case = "gemma4_moe";
    let (mut model, ids) = (load(case), &expected(case)["input_ids"]);
    let tensors = |dir: &Path| -> BTreeMap<String, Tensor> {
        let tensors = Tensor::read_safetensors(dir.join("model.safetensors")).unwrap();
        tensors.into_iter().collect()
    };
    let saved = |model: &CausalLm| {
        let dir = tempfile::tempdir().unwrap();
        let options = Default::default();
        model.save_pretrained(dir.path(), &options).unwrap();
        dir
    };
    assert_eq!(
        tensors(saved(&model).path()),
        tensors(&fixture(case)),
        "the tensors of the fixture"
    );
    let options = QuantizeOptions::new("int8".parse().unwrap());
    model.quantize(&options).unwrap();
    let dir = saved(&model);
    let name = "model.layers.2.experts.5.gate_up_proj.";
    let names = tensors(dir.path()).into_keys();
    assert!(names.into_iter().any(|own| own.starts_with(name)));
    let again = CausalLm::from_pretrained(dir.path(), &LoadOptions::default()).unwrap();
    assert_eq!(logits(&again, ids), logits(&model, ids));
}

#[test]
fn the_text_of_a_gemma4_with_images_and_audio_is_read_and_saved_as_text_alone() {
    let case = "gemma4_multimodal";
    let want = expected(case);
    let model = load(case);
    let difference = max_difference(&logits(&model, &want["input_ids"]), &want["logits"]);
    assert!(difference < 1e-5, "{difference}");
    assert_eq!(model.config().eos_token_ids(), [127, 126]);
    let out = tempfile::tempdir().unwrap();
    model
        .save_pretrained(out.path(), &Default::default())
        .unwrap();
    let config = std::fs::read_to_string(out.path().join("config.json")).unwrap();
    let config: Value = serde_json::from_str(&config).unwrap();
    assert_eq!(config["model_type"], "gemma4_text");
    assert_eq!(config["architectures"], json!(["Gemma4ForCausalLM"]));
    assert_eq!(config.get("audio_config"), None);
    let again = CausalLm::from_pretrained(out.path(), &LoadOptions::default()).unwrap();
    assert_eq!(
        logits(&again, &want["input_ids"]),
        logits(&model, &want["input_ids"])
    );
}

/// As published files of Gemma 3n are: with towers, and with keys of layers that share those of others.
#[test]
fn the_text_of_a_gemma3n_with_images_and_audio_is_read() {
    let dir = copy_of("gemma3n");
    let path = dir.path().join("model.safetensors");
    let stored = Tensor::read_safetensors(&path).unwrap();
    let renamed = |name: &str| match name.strip_prefix("model.") {
        Some(rest) => format!("model.language_model.{rest}"),
        None => name.to_owned(),
    };
    let mut tensors: Vec<(String, Tensor)> = stored
        .iter()
        .map(|(name, tensor)| (renamed(name), tensor.shallow_clone()))
        .collect();
    let one = || Tensor::ones([1], (Kind::Float, Device::Cpu));
    for name in [
        "model.vision_tower.timm_model.conv_stem.weight",
        "model.audio_tower.conformer.0.weight",
        "model.embed_vision.embedding.weight",
        "model.embed_audio.embedding.weight",
        "model.language_model.layers.2.self_attn.k_proj.weight",
        "model.language_model.layers.3.self_attn.v_proj.weight",
        "model.language_model.layers.3.self_attn.k_norm.weight",
    ] {
        tensors.push((name.to_owned(), one()));
    }
    Tensor::write_safetensors(&tensors, &path).unwrap();
    edit_config(dir.path(), |config| {
        let text = Value::Object(std::mem::take(config));
        config.insert("model_type".to_owned(), "gemma3n".into());
        config.insert("text_config".to_owned(), text);
        config.insert("audio_config".to_owned(), json!({}));
    });
    let model = CausalLm::from_pretrained(dir.path(), &LoadOptions::default()).unwrap();
    let want = expected("gemma3n");
    let difference = max_difference(&logits(&model, &want["input_ids"]), &want["logits"]);
    assert!(difference < 1e-5, "{difference}");
    // Those of a layer with keys of its own would be missed.
    tensors.push((
        "model.language_model.layers.0.self_attn.x.weight".to_owned(),
        one(),
    ));
    Tensor::write_safetensors(&tensors, &path).unwrap();
    let error = CausalLm::from_pretrained(dir.path(), &LoadOptions::default()).unwrap_err();
    assert!(error.to_string().contains("self_attn.x"), "{error}");
}

#[test]
fn configurations_that_cannot_be_computed_are_refused_by_their_keys() {
    let config = |family: &str, changes: Value| {
        let mut config = json!({
            "model_type": family, "num_hidden_layers": 6, "num_kv_shared_layers": 0, "layer_types": [
                "sliding_attention", "sliding_attention", "full_attention", "sliding_attention",
                "sliding_attention", "full_attention"
            ],
        });
        for (key, value) in changes.as_object().unwrap() {
            config[key] = value.clone();
        }
        ModelConfig::from_json(&config.to_string()).map_err(|error| error.to_string())
    };
    let (third, fourth) = ("gemma3n_text", "gemma4_text");
    for (family, changes, part) in [
        (
            fourth,
            json!({"enable_moe_block": true, "num_experts": 4, "moe_intermediate_size": 8}),
            "`top_k_experts` is null",
        ),
        (
            fourth,
            json!({
                "enable_moe_block": true, "num_experts": 4, "moe_intermediate_size": 8, "top_k_experts": 5
            }),
            "`top_k_experts` is 5; it must be at most num_experts (4)",
        ),
        (
            fourth,
            json!({"use_bidirectional_attention": "all"}),
            "null, \"vision\"",
        ),
        (
            third,
            json!({"use_bidirectional_attention": true}),
            "only Gemma 3",
        ),
        (
            third,
            json!({"num_kv_shared_layers": 6}),
            "`num_kv_shared_layers` is 6",
        ),
        // No layer without a window precedes those that would share its keys.
        (
            third,
            json!({"num_kv_shared_layers": 4}),
            "of each of their attention types",
        ),
        (
            third,
            json!({"intermediate_size": [8, 8]}),
            "one for each of num_hidden_layers (6)",
        ),
        (
            third,
            json!({"intermediate_size": [8, 0, 8, 8, 8, 8]}),
            "a positive integer",
        ),
        (
            third,
            json!({"activation_sparsity_pattern": [0.5]}),
            "one for each of num_hidden_layers (6)",
        ),
        (
            third,
            json!({"activation_sparsity_pattern": [0.5, 1.0, 0, 0, 0, 0]}),
            "below 1",
        ),
        (
            third,
            json!({"activation_sparsity_pattern": 0.5}),
            "a list with a number",
        ),
        (
            third,
            json!({"altup_active_idx": 4}),
            "below altup_num_inputs (4)",
        ),
        (
            third,
            json!({"altup_coef_clip": 0}),
            "null or a positive number",
        ),
        (third, json!({"altup_num_inputs": 0}), "a positive integer"),
        (third, json!({"laurel_rank": -1}), "a positive integer"),
        (
            third,
            json!({"hidden_size_per_layer_input": 0}),
            "`hidden_size_per_layer_input` is 0",
        ),
        (
            fourth,
            json!({"vocab_size_per_layer_input": 7}),
            "a row for each token",
        ),
        (fourth, json!({"global_head_dim": 7}), "even"),
        (
            fourth,
            json!({"attention_k_eq_v": true, "num_global_key_value_heads": 3}),
            "a divisor of num_attention_heads (8)",
        ),
        (
            fourth,
            json!({"per_layer_config": {"2": {"head_dim": 8}, "5": {"head_dim": 16}}}),
            "the same sizes",
        ),
        (
            fourth,
            json!({"per_layer_config": {"1": {"head_dim": 8}}}),
            "the layers without a window, [2, 5]",
        ),
        (
            fourth,
            json!({"per_layer_config": {"2": {"sliding_window": 8}, "5": {"sliding_window": 8}}}),
            "head_dim, num_key_value_heads",
        ),
        (
            fourth,
            json!({"per_layer_config": {"2": {"num_key_value_heads": 2}, "5": {"num_key_value_heads": 2}}}),
            "without attention_k_eq_v",
        ),
        (
            fourth,
            json!({"rope_parameters": {"full_attention": {"rope_type": "proportional", "partial_rotary_factor": 2}}}),
            "from 0 to 1",
        ),
        (
            "llama",
            json!({"partial_rotary_factor": 0.5}),
            "partial_rotary_factor",
        ),
    ] {
        let message = config(family, changes.clone()).unwrap_err();
        assert!(message.contains(part), "{family} {changes}: {message}");
    }
    let mut wrong = match config(third, json!({})).unwrap() {
        ModelConfig::Llama(config) => config,
        other => panic!("{other:?}"),
    };
    wrong.per_layer = None;
    let error = ModelConfig::from(wrong).validate().unwrap_err();
    assert!(error.to_string().contains("LlamaConfig::of"), "{error}");
}

#[test]
fn configurations_are_written_as_they_were_read() {
    for case in CASES.into_iter().chain(["gemma4_multimodal"]) {
        let config = ModelConfig::from_dir(fixture(case)).unwrap();
        let written = Value::Object(config.to_json());
        let again = ModelConfig::from_json(&written.to_string()).unwrap();
        assert_eq!(again, config, "{case}");
    }
    // The defaults of transformers, and no sizes of layers without a window in an older file.
    for (name, layers, cached) in [("gemma3n_text", 35, 20), ("gemma4_text", 30, 30)] {
        let config = json!({"model_type": name}).to_string();
        let ModelConfig::Llama(config) = ModelConfig::from_json(&config).unwrap() else {
            panic!("another family");
        };
        assert_eq!(
            (config.num_hidden_layers, config.cache_layers()),
            (layers, cached)
        );
        let global = if name == "gemma4_text" { 512 } else { 256 };
        assert_eq!(config.head_dim_of(layers - 1), global);
        assert_eq!(config.head_dim_of(0), 256);
    }
}

/// The keys of llama.cpp's converter, with one number for all layers and one for each.
#[test]
fn gguf_files_have_the_sizes_of_layers() {
    let config = |name: &str| {
        let path = fixture("gguf").join(format!("{name}.gguf"));
        match ModelConfig::from_gguf(&GgufFile::open(path).unwrap()).unwrap() {
            ModelConfig::Llama(config) => config,
            other => panic!("{other:?}"),
        }
    };
    let third = config("gemma3n");
    let own = third.per_layer.unwrap();
    assert_eq!((third.num_hidden_layers, own.num_kv_shared_layers), (4, 2));
    assert_eq!(own.intermediate_sizes, Some(vec![64, 32, 64, 64]));
    assert_eq!(
        (
            own.vocab_size_per_layer_input,
            own.hidden_size_per_layer_input
        ),
        (80, 32)
    );
    for (found, share) in own
        .activation_sparsity_pattern
        .unwrap()
        .into_iter()
        .zip([0.95, 0.5, 0.0, 0.0])
    {
        assert!((found - share).abs() < 1e-6, "{found} {share}");
    }
    assert_eq!(own.altup.unwrap().laurel_rank, 32);

    let fourth = config("gemma4");
    let kept = RopeScaling::Proportional {
        partial_rotary_factor: 0.25,
        factor: 1.0,
    };
    assert_eq!(
        (fourth.rope_scaling, fourth.rope_local_scaling),
        (kept, RopeScaling::Default)
    );
    assert_eq!((fourth.rope_theta, fourth.rope_local_base_freq), (1e6, 1e4));
    assert_eq!((fourth.head_dim, fourth.intermediate_size), (Some(16), 64));
    let own = fourth.per_layer.unwrap();
    assert!(own.use_double_wide_mlp && !own.attention_k_eq_v);
    assert_eq!(
        (own.global_head_dim, own.num_global_key_value_heads),
        (Some(32), None)
    );

    let dense = config("gemma4_dense");
    assert_eq!(dense.num_key_value_heads, Some(2));
    let own = dense.per_layer.unwrap();
    assert!(own.attention_k_eq_v && !own.use_double_wide_mlp);
    assert_eq!(
        (own.num_global_key_value_heads, own.num_kv_shared_layers),
        (Some(1), 0)
    );
    assert_eq!(own.hidden_size_per_layer_input, 0);

    let model = load("gemma3n");
    let path = tempfile::tempdir().unwrap();
    let options = GgufOptions::new("q8_0".parse().unwrap());
    let error = model
        .save_gguf(path.path().join("model.gguf"), &options)
        .unwrap_err();
    assert!(error.to_string().contains("gemma3n_text"), "{error}");
}
