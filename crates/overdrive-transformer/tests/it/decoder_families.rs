//! The special parts of Phi-2, Phi-3, Qwen2-MoE, SmolLM3, OLMo, Granite, GLM-4, Gemma 1 and the text of multimodal
//! Gemma 3; the tests of all families have their fixtures, too.

use std::collections::HashMap;
use std::path::Path;

use crate::common::{copy_of, edit_config, expected, fixture, generator, load, max_difference};
use overdrive_lora::{AddOptions, LoraConfig, MergeOptions, add_adapter, merge_adapters};
use overdrive_nn::AdapterHost;
use overdrive_transformer::{
    CausalLm, ForwardInput, InitOptions, LabelShift, LayerType, LlamaConfig, LlamaFamily,
    LoadOptions, ModelConfig, QuantizeOptions, RopeScaling,
};
use serde_json::{Value, json};
use tch::{Kind, Tensor};

fn parsed(text: Value) -> LlamaConfig {
    match ModelConfig::from_json(&text.to_string()).unwrap() {
        ModelConfig::Llama(config) => config,
        other => panic!("{other:?}"),
    }
}

fn refusal(text: Value) -> String {
    let error = ModelConfig::from_json(&text.to_string()).unwrap_err();
    error.to_string()
}

fn logits(model: &CausalLm, ids: &Tensor) -> Tensor {
    tch::no_grad(|| model.forward(ForwardInput::new(ids)).unwrap())
}

fn names(dir: &Path) -> Vec<String> {
    let tensors = Tensor::read_safetensors(dir.join("model.safetensors")).unwrap();
    let mut names: Vec<String> = tensors.into_iter().map(|(name, _)| name).collect();
    names.sort();
    names
}

/// In the names of files and of transformers 5, and with a head beside the model.
#[test]
fn the_text_of_a_multimodal_gemma3_is_read_and_saved_as_text_alone() {
    let case = "gemma3_multimodal";
    let dir = copy_of(case);
    let path = dir.path().join("model.safetensors");
    let want = expected(case);
    let stored = Tensor::read_safetensors(&path).unwrap();
    let renamed = |old: &str, new: &str, head: Option<&str>| {
        let mut tensors: Vec<(String, Tensor)> = stored
            .iter()
            .map(
                |(name, tensor)| match name.strip_prefix("language_model.") {
                    Some(rest) => (rest.replacen(old, new, 1), tensor.shallow_clone()),
                    None => (name.clone(), tensor.shallow_clone()),
                },
            )
            .collect();
        if let Some(head) = head {
            let (_, table) = stored
                .iter()
                .find(|(name, _)| name.ends_with("embed_tokens.weight"))
                .unwrap();
            tensors.push((head.to_owned(), table.shallow_clone()));
        }
        tensors
    };
    for tensors in [
        renamed("model.", "language_model.model.", None),
        renamed(
            "model.",
            "language_model.model.",
            Some("language_model.lm_head.weight"),
        ),
        renamed("model.", "model.language_model.", Some("lm_head.weight")),
    ] {
        Tensor::write_safetensors(&tensors, &path).unwrap();
        let model = CausalLm::from_pretrained(dir.path(), &LoadOptions::default()).unwrap();
        let difference = max_difference(&logits(&model, &want["input_ids"]), &want["logits"]);
        assert!(difference < 1e-5, "{difference}");
    }

    let model = load(case);
    // The special tokens beside the text replace those in it.
    assert_eq!(model.config().eos_token_ids(), [127, 126]);
    let out = tempfile::tempdir().unwrap();
    model
        .save_pretrained(out.path(), &Default::default())
        .unwrap();
    let written = names(out.path());
    let own: Vec<String> = model
        .named_parameters()
        .into_iter()
        .map(|(name, _)| name)
        .collect();
    assert_eq!(written.len(), own.len());
    assert!(written.iter().all(|name| own.contains(name)));
    let config = std::fs::read_to_string(out.path().join("config.json")).unwrap();
    let config: Value = serde_json::from_str(&config).unwrap();
    assert_eq!(config["model_type"], "gemma3_text");
    assert_eq!(config["architectures"], json!(["Gemma3ForCausalLM"]));
    assert_eq!(config.get("vision_config"), None);
    let again = CausalLm::from_pretrained(out.path(), &LoadOptions::default()).unwrap();
    assert_eq!(
        logits(&again, &want["input_ids"]),
        logits(&model, &want["input_ids"])
    );
    // What transformers loads from the first folder has this model inside.
    let layer = "model.layers.0.self_attn.q_proj";
    let original = "model.language_model.layers.0.self_attn.q_proj";
    assert_eq!(model.name_in_original(layer), original);
    assert_eq!(model.name_in_original("lm_head"), "lm_head");
    assert_eq!(again.name_in_original(layer), layer);
}

#[test]
fn the_text_of_a_multimodal_ministral3_is_read_and_saved_as_text_alone() {
    let case = "mistral3";
    let want = expected(case);
    let model = load(case);
    let difference = max_difference(&logits(&model, &want["input_ids"]), &want["logits"]);
    assert!(difference < 1e-5, "{difference}");
    let out = tempfile::tempdir().unwrap();
    model
        .save_pretrained(out.path(), &Default::default())
        .unwrap();
    let config = std::fs::read_to_string(out.path().join("config.json")).unwrap();
    let config: Value = serde_json::from_str(&config).unwrap();
    assert_eq!(config["model_type"], "ministral3");
    assert_eq!(config["rope_scaling"]["llama_4_scaling_beta"], 0.3);
    let again = CausalLm::from_pretrained(out.path(), &LoadOptions::default()).unwrap();
    assert_eq!(
        logits(&again, &want["input_ids"]),
        logits(&model, &want["input_ids"])
    );

    // transformers ties the head unless the file says otherwise; this file has one of its own, which is read.
    let dir = copy_of(case);
    edit_config(dir.path(), |config| {
        config.remove("tie_word_embeddings");
    });
    let untied = CausalLm::from_pretrained(dir.path(), &LoadOptions::default()).unwrap();
    assert_eq!(
        logits(&untied, &want["input_ids"]),
        logits(&model, &want["input_ids"])
    );
}

#[test]
fn the_factor_of_queries_is_checked_and_has_the_default_of_transformers() {
    let sizes = |rope: Value| {
        let mut config = json!({"model_type": "ministral3", "hidden_size": 64});
        config["rope_parameters"] = rope;
        ModelConfig::from_json(&config.to_string())
    };
    let beta = |rope: Value| {
        let config = sizes(rope).unwrap().to_json();
        config["rope_scaling"]["llama_4_scaling_beta"].as_f64()
    };
    let yarn =
        json!({"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 128});
    let mut own = yarn.clone();
    own["llama_4_scaling_beta"] = 0.25.into();
    assert_eq!(beta(Value::Null), Some(0.1));
    assert_eq!(beta(own.clone()), Some(0.25));
    assert_eq!(beta(yarn), Some(0.0));
    own["llama_4_scaling_beta"] = (-1).into();
    let message = sizes(own).unwrap_err().to_string();
    assert!(message.contains("at least 0"), "{message}");
    let plain = json!({"rope_type": "default", "llama_4_scaling_beta": 0.1});
    let message = sizes(plain).unwrap_err().to_string();
    assert!(message.contains("without rope_type yarn"), "{message}");
}

#[test]
fn a_multimodal_folder_without_its_text_is_refused_by_the_names_of_the_text() {
    let dir = copy_of("gemma3_multimodal");
    let path = dir.path().join("model.safetensors");
    let kept: Vec<(String, Tensor)> = Tensor::read_safetensors(&path)
        .unwrap()
        .into_iter()
        .filter(|(name, _)| !name.ends_with("language_model.model.norm.weight"))
        .chain([("audio_tower.weight".to_owned(), Tensor::from(1f32))])
        .collect();
    Tensor::write_safetensors(&kept, &path).unwrap();
    let error = CausalLm::from_pretrained(dir.path(), &LoadOptions::default()).unwrap_err();
    let message = error.to_string();
    for part in [
        "1 missing: model.norm.weight",
        "1 unexpected: audio_tower.weight",
    ] {
        assert!(message.contains(part), "{message}");
    }
}

/// The keys of Gemma 3 4B's file: all others are the defaults of transformers' `Gemma3TextConfig`.
#[test]
fn keys_that_the_text_of_a_multimodal_gemma3_lacks_have_the_defaults_of_transformers() {
    let config = parsed(json!({
        "model_type": "gemma3", "eos_token_id": [1, 106], "image_token_index": 262_144,
        "text_config": {
            "hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text",
            "num_hidden_layers": 34, "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
            "sliding_window": 1024,
        },
        "vision_config": {"hidden_size": 1152},
    }));
    let expected = LlamaConfig {
        hidden_size: 2560,
        intermediate_size: 10240,
        num_hidden_layers: 34,
        rope_scaling: RopeScaling::Linear { factor: 8.0 },
        sliding_window: Some(1024),
        eos_token_id: vec![1, 106],
        ..LlamaConfig::of(LlamaFamily::Gemma3)
    };
    assert_eq!(config, expected);
    assert_eq!((config.vocab_size, config.head_dim()), (262_208, 256));
    assert_eq!(
        (config.num_attention_heads, config.num_key_value_heads),
        (8, Some(4))
    );
    assert_eq!(config.rope_theta, 1e6);

    let other = json!({"model_type": "gemma3", "text_config": {"model_type": "llama"}});
    assert_eq!(
        refusal(other),
        "`text_config.model_type` is \"llama\", which is not supported; supported: gemma3_text"
    );
    let quantized = parsed(json!({
        "model_type": "gemma3", "quantization_config": {"quant_method": "bitsandbytes"},
        "text_config": {"layer_types": vec!["sliding_attention"; 26]},
    }));
    assert!(quantized.extra.contains_key("quantization_config"));
    assert_eq!(quantized.layer_types, Some(vec![LayerType::Sliding; 26]));
}

#[test]
fn gemmas_activation_is_the_approximation_as_in_transformers() {
    let activation = |keys: Value| {
        let mut config = json!({"model_type": "gemma"});
        config
            .as_object_mut()
            .unwrap()
            .extend(keys.as_object().unwrap().clone());
        let config = parsed(config);
        // Both versions of transformers read the same from what is written.
        let written = ModelConfig::from(config.clone()).to_json();
        assert_eq!(written["hidden_act"], written["hidden_activation"]);
        config.hidden_act
    };
    let approximation = "gelu_pytorch_tanh";
    assert_eq!(activation(json!({})), approximation);
    // The first files, those of transformers 4 and of 5.
    assert_eq!(activation(json!({"hidden_act": "gelu"})), approximation);
    let both = json!({"hidden_act": "gelu", "hidden_activation": null});
    assert_eq!(activation(both), approximation);
    let both = json!({"hidden_act": "gelu", "hidden_activation": "relu"});
    assert_eq!(activation(both), "relu");
    assert_eq!(activation(json!({"hidden_act": "silu"})), "silu");
}

#[test]
fn phi_configurations_that_cannot_be_computed_are_refused_with_the_way_out() {
    let phi = |model_type: &str, key: &str, value: Value| {
        let mut config = json!({"model_type": model_type});
        config[key] = value;
        refusal(config)
    };
    // 0.3 of 64 channels are 19.
    assert_eq!(
        phi("phi", "partial_rotary_factor", json!(0.3)),
        "`partial_rotary_factor` is 0.3; it must be above 0 and at most 1, with an even number of rotated \
         channels of the head's 64"
    );
    assert!(
        phi("phi3", "partial_rotary_factor", json!(1.5))
            .starts_with("`partial_rotary_factor` is 1.5")
    );
    assert!(phi("phi3", "partial_rotary_factor", json!(0.0)).contains("above 0"));
    assert_eq!(
        phi("phi", "resid_pdrop", json!(1.0)),
        "`resid_pdrop` is 1.0; it must be at least 0 and below 1"
    );
    assert_eq!(
        phi("phi3", "embd_pdrop", json!(-0.5)),
        "`embd_pdrop` is -0.5; it must be at least 0 and below 1"
    );
    assert_eq!(
        phi(
            "phi3",
            "rope_scaling",
            json!({"rope_type": "linear", "factor": 2.0})
        ),
        "`rope_scaling.rope_type` is \"linear\", which is not supported; supported: default, longrope"
    );
    assert_eq!(
        phi(
            "phi3",
            "rope_scaling",
            json!({"type": "su", "short_factor": [1.0], "long_factor": [1.0]})
        ),
        "`rope_scaling.short_factor` is \"1 numbers\"; it must be 48 numbers, one for each pair of rotated channels"
    );
    assert!(phi("phi", "qk_layernorm", json!("yes")).contains("true or false"));
    assert!(
        phi("phi", "layer_norm_eps", json!("tiny")).starts_with("`layer_norm_eps` is \"tiny\"")
    );
    assert!(phi("phi", "hidden_act", json!("selu")).contains("supported: silu, gelu"));
}

/// The keys of Phi-3's first files: `su` or `yarn`, the original context beside the scaling, no factor.
#[test]
fn the_long_context_of_phi3_is_read_from_each_form_of_its_files() {
    let factors = vec![1.5; 48];
    for (kind, key) in [
        ("su", "type"),
        ("yarn", "type"),
        ("longrope", "type"),
        ("longrope", "rope_type"),
    ] {
        let config = parsed(json!({
            "model_type": "phi3", "max_position_embeddings": 131_072, "original_max_position_embeddings": 8192,
            "rope_scaling": {key: kind, "short_factor": factors, "long_factor": factors},
        }));
        let RopeScaling::LongRope(long) = &config.rope_scaling else {
            panic!("{kind}: {:?}", config.rope_scaling);
        };
        assert_eq!(
            (long.original_max_position_embeddings, long.factor),
            (8192, 16.0),
            "{kind}"
        );
        let written = ModelConfig::from(config).to_json();
        assert_eq!(written["original_max_position_embeddings"], 8192);
        assert_eq!(
            ModelConfig::from_json(&Value::Object(written).to_string())
                .unwrap()
                .cache_restart(),
            Some(8192)
        );
    }
    // transformers' default of the key; it does not read the one in the scaling.
    let config = parsed(json!({
        "model_type": "phi3", "max_position_embeddings": 131_072,
        "rope_scaling": {
            "type": "longrope", "short_factor": factors, "long_factor": factors,
            "original_max_position_embeddings": 1024,
        },
    }));
    assert_eq!(ModelConfig::from(config).cache_restart(), Some(4096));
    assert_eq!(load("llama_longrope").config().cache_restart(), None);
}

#[test]
fn the_dropouts_of_phi_work_in_training_only() {
    let _generator = generator();
    let ids = Tensor::arange(8, (Kind::Int64, tch::Device::Cpu)).view([1, 8]);
    for (family, key, drops) in [
        (LlamaFamily::Phi, "resid_pdrop", true),
        (LlamaFamily::Phi, "embd_pdrop", true),
        (LlamaFamily::Phi3, "resid_pdrop", true),
        // transformers does not use it.
        (LlamaFamily::Phi3, "embd_pdrop", false),
    ] {
        let mut config = LlamaConfig {
            vocab_size: 32,
            hidden_size: 32,
            intermediate_size: 32,
            num_hidden_layers: 1,
            num_attention_heads: 2,
            ..LlamaConfig::of(family)
        };
        match key {
            "resid_pdrop" => config.resid_pdrop = 0.5,
            _ => config.embd_pdrop = 0.5,
        }
        let mut model = CausalLm::new(&config.into(), &InitOptions::default()).unwrap();
        let quiet = logits(&model, &ids);
        model.set_training(true).unwrap();
        tch::manual_seed(3);
        assert_eq!(logits(&model, &ids) != quiet, drops, "{family:?} {key}");
        model.set_training(false).unwrap();
        assert_eq!(logits(&model, &ids), quiet);
    }
}

/// One layer has the name that PEFT and bitsandbytes see in transformers: quantization and adapters are of the
/// fused projection, not of its parts.
#[test]
fn fused_projections_are_quantized_and_adapted_under_their_own_names() {
    let case = "phi3";
    let ids = &expected(case)["input_ids"];
    let mut model = load(case);
    let dense = logits(&model, ids);
    let options = AddOptions::default();
    // PEFT has no default for this architecture either.
    let error = add_adapter(&mut model, "a", &LoraConfig::default(), &options).unwrap_err();
    assert!(error.to_string().contains("target_modules"), "{error}");
    let config = LoraConfig {
        target_modules: Some(overdrive_lora::TargetModules::names([
            "qkv_proj",
            "gate_up_proj",
        ])),
        ..LoraConfig::default()
    };
    add_adapter(&mut model, "a", &config, &options).unwrap();
    let trainable = overdrive_lora::trainable_parameters(&mut model).unwrap();
    let shapes: HashMap<String, Vec<i64>> = trainable
        .iter()
        .map(|(name, t)| (name.clone(), t.size()))
        .collect();
    assert_eq!(shapes.len(), 8);
    let of = |part: &str| {
        let found = shapes
            .iter()
            .find(|(name, _)| name.contains("layers.1.") && name.contains(part));
        found
            .unwrap_or_else(|| panic!("{part}: {shapes:?}"))
            .1
            .clone()
    };
    // 4 heads of queries and twice 2 of keys and values, of 8 channels.
    assert_eq!(of("qkv_proj.lora_B"), [64, 8]);
    assert_eq!(of("gate_up_proj.lora_B"), [96, 8]);
    assert_eq!(
        logits(&model, ids),
        dense,
        "an adapter starts without an effect"
    );
    for (name, mut tensor) in trainable {
        if name.contains("lora_B") {
            let _same = tch::no_grad(|| tensor.fill_(0.02));
        }
    }
    let adapted = logits(&model, ids);
    assert!(max_difference(&adapted, &dense) > 1e-3);
    let loss = model.loss(ids, ids, LabelShift::HuggingFace).unwrap();
    loss.mean().unwrap().backward();
    merge_adapters(&mut model, None, &MergeOptions::default()).unwrap();
    assert!(max_difference(&logits(&model, ids), &adapted) < 1e-5);

    for scheme in ["int8", "nf4"] {
        let load = LoadOptions {
            quantization: Some(
                QuantizeOptions::new(scheme.parse().unwrap()).with_skip_modules(&["down_proj"]),
            ),
            ..LoadOptions::default()
        };
        let model = CausalLm::from_pretrained(fixture(case), &load).unwrap();
        let kept: Vec<String> = model
            .named_parameters()
            .into_iter()
            .map(|(name, _)| name)
            .collect();
        assert!(
            kept.iter()
                .all(|name| !name.contains("qkv_proj") && !name.contains("gate_up_proj"))
        );
        assert!(kept.iter().any(|name| name.contains("down_proj")));
    }
}

/// PEFT's default for Phi-2 is attention and the feed-forward block.
#[test]
fn phi2_takes_the_default_targets_of_peft() {
    let mut model = load("phi");
    let ids = &expected("phi")["input_ids"];
    add_adapter(
        &mut model,
        "a",
        &LoraConfig::default(),
        &AddOptions::default(),
    )
    .unwrap();
    let trainable = overdrive_lora::trainable_parameters(&mut model).unwrap();
    for part in ["q_proj", "v_proj", "fc1", "fc2"] {
        let count = trainable
            .iter()
            .filter(|(name, _)| name.contains(part))
            .count();
        assert_eq!(count, 4, "{part}");
    }
    assert_eq!(trainable.len(), 16);
    let loss = model.loss(ids, ids, LabelShift::HuggingFace).unwrap();
    loss.mean().unwrap().backward();
    assert!(trainable.iter().all(|(_, tensor)| tensor.grad().defined()));
}

/// The bias of the head is a part of the loss, which is else computed from the head's weight alone.
#[test]
fn a_head_with_a_bias_stays_one_when_it_is_quantized_or_tied() {
    for case in ["phi", "phi_qk_norm"] {
        let ids = &expected(case)["input_ids"];
        let mut model = load(case);
        let (_, mut bias) = model
            .named_parameters()
            .into_iter()
            .find(|(name, _)| name == "lm_head.bias")
            .unwrap();
        let before = logits(&model, ids);
        model
            .quantize(
                &QuantizeOptions::new("int8".parse().unwrap()).with_head("int8".parse().unwrap()),
            )
            .unwrap();
        let quantized = logits(&model, ids);
        assert!(max_difference(&quantized, &before) < 0.5, "{case}");
        let _same = tch::no_grad(|| bias.f_add_scalar_(3.0).unwrap());
        let moved = logits(&model, ids);
        assert!(
            (max_difference(&moved, &quantized) - 3.0).abs() < 1e-4,
            "{case}"
        );
        let dir = tempfile::tempdir().unwrap();
        model
            .save_pretrained(dir.path(), &Default::default())
            .unwrap();
        let again = CausalLm::from_pretrained(dir.path(), &LoadOptions::default()).unwrap();
        assert_eq!(logits(&again, ids), moved, "{case}");
    }
}

#[test]
fn a_folder_of_phi_with_a_number_for_another_family_is_refused_by_shape() {
    let dir = copy_of("phi3");
    edit_config(dir.path(), |config| {
        config.insert("num_key_value_heads".to_owned(), 4.into());
    });
    let error = CausalLm::from_pretrained(dir.path(), &LoadOptions::default()).unwrap_err();
    let message = error.to_string();
    assert!(
        message.contains(
            "model.layers.0.self_attn.qkv_proj.weight (found [64, 32], expected [96, 32])"
        ),
        "{message}"
    );
}

#[test]
fn layers_of_smollm3_without_rotary_positions_are_those_of_the_list_or_of_the_interval() {
    let without = |config: Value| {
        let config = parsed(config);
        let layers = (0..config.num_hidden_layers).filter(|&n| config.has_second_rotary(n));
        layers.collect::<Vec<i64>>()
    };
    let eight = |key: &str, value: Value| {
        let mut config = json!({"model_type": "smollm3", "num_hidden_layers": 8});
        config[key] = value;
        config
    };
    assert_eq!(without(eight("use_cache", json!(true))), [3, 7]);
    assert_eq!(without(eight("no_rope_layer_interval", json!(3))), [2, 5]);
    let listed = json!([0, 1, 1, 0, 1, 1, 1, 1, 0]); // it may be longer than the model
    assert_eq!(without(eight("no_rope_layers", listed)), [0, 3]);

    assert_eq!(
        refusal(eight("no_rope_layers", json!([1, 1, 2]))),
        "`no_rope_layers` is [1,1,2]; it must be a list with 0 for each layer without rotary positions, and 1 for \
         the others"
    );
    assert_eq!(
        refusal(eight("no_rope_layers", json!([1, 1, 0]))),
        "`no_rope_layers` is \"3 numbers\"; it must be a list with a number for each of num_hidden_layers (8)"
    );
    assert_eq!(
        refusal(eight("no_rope_layer_interval", json!(0))),
        "`no_rope_layer_interval` is 0; it must be a positive integer"
    );
}

/// The keys of transformers 4 set the base and the scaling of full layers alone, as transformers 5 reads them.
#[test]
fn the_rotary_positions_of_olmo3_are_read_from_each_form_of_its_files() {
    let yarn =
        json!({"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 8192});
    let old = parsed(json!({
        "model_type": "olmo3", "num_hidden_layers": 8, "rope_theta": 500000.0, "rope_scaling": yarn,
    }));
    let RopeScaling::Yarn(scaling) = &old.rope_scaling else {
        panic!("{:?}", old.rope_scaling);
    };
    assert_eq!(scaling.factor, 8.0);
    assert_eq!(old.rope_local_scaling, RopeScaling::Default);
    assert_eq!((old.rope_theta, old.rope_local_base_freq), (5e5, 5e5));
    let slides: Vec<bool> = (0..8).map(|layer| old.has_second_rotary(layer)).collect();
    assert_eq!(slides, [true, true, true, false, true, true, true, false]);
    let written = ModelConfig::from(old.clone()).to_json();
    assert_eq!(written["rope_scaling"]["factor"], 8.0);
    assert_eq!(
        parsed(Value::Object(written)).rope_scaling,
        old.rope_scaling
    );

    let new = parsed(json!({"model_type": "olmo3", "rope_parameters": {
        "full_attention": {"rope_type": "default", "rope_theta": 3e5},
        "sliding_attention": {"rope_type": "default", "rope_theta": 2e5},
    }}));
    assert_eq!((new.rope_theta, new.rope_local_base_freq), (3e5, 2e5));
    let again = parsed(Value::Object(ModelConfig::from(new).to_json()));
    assert_eq!((again.rope_theta, again.rope_local_base_freq), (3e5, 2e5));
    assert_eq!(
        refusal(json!({"model_type": "olmo3", "rope_parameters": {"rope_type": "default"}})),
        "`rope_parameters` is \"rope_type\", which is not supported; supported: full_attention, sliding_attention"
    );
    assert!(
        refusal(json!({"model_type": "olmo3", "layer_types": ["chunked_attention"]}))
            .contains("`layer_types` is \"chunked_attention\"")
    );
}

#[test]
fn factors_of_granite_must_be_positive() {
    for key in [
        "embedding_multiplier",
        "attention_multiplier",
        "residual_multiplier",
        "logits_scaling",
    ] {
        let mut config = json!({"model_type": "granite"});
        config[key] = json!(0);
        let expected = format!("`{key}` is 0.0; it must be a positive number");
        assert_eq!(refusal(config.clone()), expected);
        config[key] = json!("large");
        assert_eq!(
            refusal(config),
            format!("`{key}` is \"large\"; it must be a number")
        );
    }
}

#[test]
fn a_granite4_with_mamba_layers_or_experts_is_refused_by_the_key_that_says_so() {
    let granite4 = json!({
        "model_type": "granitemoehybrid", "num_hidden_layers": 2, "num_local_experts": 0,
        "layer_types": ["attention", "full_attention"],
    });
    // Without `position_embedding_type` there are no rotary positions, as in transformers.
    let config = parsed(granite4.clone());
    assert!((0..2).all(|layer| config.has_second_rotary(layer)));
    let mut rotary = granite4.clone();
    rotary["position_embedding_type"] = "rope".into();
    let config = parsed(rotary);
    assert!((0..2).all(|layer| !config.has_second_rotary(layer)));
    for (key, value, part) in [
        ("num_local_experts", json!(4), "`num_local_experts` is 4"),
        ("num_local_experts", Value::Null, "`num_local_experts` is 8"),
        (
            "layer_types",
            json!(["mamba", "attention"]),
            "without Mamba layers",
        ),
        ("layer_types", Value::Null, "`layer_types` is null"),
        (
            "layer_types",
            json!(["attention"]),
            "a list of num_hidden_layers (2) names",
        ),
    ] {
        let mut config = granite4.clone();
        config[key] = value;
        let message = refusal(config);
        assert!(message.contains(part), "{message}");
    }
}

#[test]
fn the_keys_of_qwen2_moe_are_those_of_transformers() {
    let config = parsed(json!({"model_type": "qwen2_moe", "qkv_bias": false, "sliding_window": 0}));
    assert_eq!(
        (config.attention_bias, config.sliding_window),
        (false, None)
    );
    let experts = config.experts.as_ref().unwrap();
    assert_eq!(experts.shared_expert_intermediate_size, Some(5632));
    assert_eq!((experts.num_experts, experts.num_experts_per_tok), (60, 4));
    let written = ModelConfig::from(config).to_json();
    assert_eq!(written["qkv_bias"], false);
    assert_eq!(written["shared_expert_intermediate_size"], 5632);
    assert_eq!(
        refusal(json!({"model_type": "qwen2_moe", "shared_expert_intermediate_size": -3})),
        "`shared_expert_intermediate_size` is -3; it must be a positive integer"
    );
    let slides = parsed(json!({
        "model_type": "qwen2_moe", "num_hidden_layers": 4, "use_sliding_window": true, "max_window_layers": 2,
        "vocab_size": 8, "hidden_size": 16, "intermediate_size": 8, "num_attention_heads": 2,
        "num_key_value_heads": 2, "num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 8,
        "shared_expert_intermediate_size": 8,
    }));
    let model = CausalLm::new(&slides.into(), &InitOptions::default()).unwrap();
    assert_eq!(model.layer_windows(), [Some(4096), None, None, None]);
}

/// QLoRA with the default targets, queries and values.
#[test]
fn adapters_are_trained_over_weights_of_4_bits() {
    for case in [
        "smollm3",
        "olmo2",
        "olmo3",
        "granite",
        "granite4",
        "glm4",
        "qwen2_moe",
        "gpt_oss",
    ] {
        let ids = &expected(case)["input_ids"];
        let quantize = QuantizeOptions::new("nf4".parse().unwrap());
        let load = LoadOptions {
            quantization: Some(quantize),
            ..LoadOptions::default()
        };
        let mut model = CausalLm::from_pretrained(fixture(case), &load).unwrap();
        assert!(model.is_quantized(), "{case}");
        let (config, options) = (LoraConfig::default(), AddOptions::default());
        add_adapter(&mut model, "a", &config, &options).unwrap();
        let loss = |model: &CausalLm| {
            let loss = model.loss(ids, ids, LabelShift::HuggingFace).unwrap();
            loss.mean().unwrap()
        };
        let before = loss(&model);
        before.backward();
        let trainable = overdrive_lora::trainable_parameters(&mut model).unwrap();
        // Two factors for two layers of each block.
        assert_eq!(trainable.len(), 4 * model.num_layers(), "{case}");
        tch::no_grad(|| {
            for (name, mut tensor) in trainable {
                assert!(tensor.grad().defined(), "{case}: {name}");
                let step = tensor.grad() * -0.1;
                let _same = tensor.f_add_(&step).unwrap();
            }
        });
        let after = loss(&model).double_value(&[]);
        assert!(after < before.double_value(&[]), "{case}: {after}");
    }
}
