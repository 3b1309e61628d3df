//! gpt-oss: experts in MXFP4 (`fixtures/gen_experts.py`), adapters over them, and what its folders hold.

use std::collections::BTreeMap;
use std::path::Path;

use overdrive_kv_cache::{CacheImplementation, CacheShape};
use overdrive_lora::{AddOptions, LoraConfig, TargetModules, add_adapter, trainable_parameters};
use overdrive_nn::{AdapterHost, LinearWeight};
use overdrive_quantization::{Activations, Scheme};
use overdrive_transformer::{
    CausalLm, ForwardInput, GgufFileType, GgufOptions, LabelShift, LlamaFamily, LoadOptions,
    ModelConfig, QuantizeOptions, RopeScaling, SaveOptions,
};
use serde_json::json;
use tch::{Kind, Tensor};

use crate::common::{copy_of, edit_config, expected, fixture, load, max_difference};

fn packed() -> CausalLm {
    let mut model = load("gpt_oss_mxfp4");
    // The kernels round activations to 8 bits otherwise.
    model.set_activations(Activations::Float).unwrap();
    model
}

fn logits(model: &CausalLm, ids: &Tensor) -> Tensor {
    tch::no_grad(|| model.forward(ForwardInput::new(ids)).unwrap())
}

fn tensors(dir: &Path) -> BTreeMap<String, Tensor> {
    let tensors = Tensor::read_safetensors(dir.join("model.safetensors")).unwrap();
    tensors.into_iter().collect()
}

/// Returns the names of the layers in MXFP4.
fn layers_in_mxfp4(model: &mut CausalLm) -> Vec<String> {
    let mut names = Vec::new();
    let mut visit = |name: &str, linear: &mut overdrive_nn::Linear| {
        if let LinearWeight::Quantized(weight) = linear.weight() {
            assert_eq!(weight.scheme(), Scheme::Mxfp4, "{name}");
            names.push(name.to_owned());
        }
        Ok(())
    };
    model.visit_linears(&mut visit).unwrap();
    names
}

#[test]
fn experts_in_mxfp4_stay_packed_and_give_the_logits_of_the_dequantized_weights() {
    let (mut model, want) = (packed(), expected("gpt_oss_mxfp4"));
    let names = layers_in_mxfp4(&mut model);
    assert_eq!(names.len(), 2 * 4 * 2);
    assert!(
        names.iter().all(|name| name.contains(".mlp.experts.")),
        "{names:?}"
    );
    let difference = max_difference(&logits(&model, &want["input_ids"]), &want["logits"]);
    assert!(difference < 1e-5, "{difference}");
    // Rounded activations stay near.
    let rounded = logits(&load("gpt_oss_mxfp4"), &want["input_ids"]);
    let difference = max_difference(&rounded, &want["logits"]);
    assert!(difference < 0.1, "{difference}");
    model.dequantize().unwrap();
    assert!(!model.is_quantized());
    let difference = max_difference(&logits(&model, &want["input_ids"]), &want["logits"]);
    assert!(difference < 1e-5, "{difference}");
}

/// transformers ran with its end-of-text token, 127, excluded.
#[test]
fn the_most_likely_tokens_are_those_of_transformers() {
    for (case, model) in [("gpt_oss", load("gpt_oss")), ("gpt_oss_mxfp4", packed())] {
        let want = &expected(case)["greedy"];
        let mut ids = want.narrow(1, 0, 8);
        for _ in 0..24 {
            let last = logits(&model, &ids).narrow(1, -1, 1).narrow(2, 0, 127);
            ids = Tensor::cat(&[&ids, &last.argmax(-1, false)], 1);
        }
        assert_eq!(&ids, want, "{case}");
    }
}

#[test]
fn experts_in_mxfp4_are_written_as_they_were_read() {
    let dir = tempfile::tempdir().unwrap();
    packed()
        .save_pretrained(dir.path(), &SaveOptions::default())
        .unwrap();
    assert_eq!(tensors(dir.path()), tensors(&fixture("gpt_oss_mxfp4")));
    let config = std::fs::read_to_string(dir.path().join("config.json")).unwrap();
    let config: serde_json::Value = serde_json::from_str(&config).unwrap();
    let quantization = &config["quantization_config"];
    assert_eq!(quantization["quant_method"], "mxfp4");
    assert_eq!(
        quantization["modules_to_not_convert"]
            .as_array()
            .unwrap()
            .len(),
        4
    );
    // Dense again, they are one tensor for all experts of a layer.
    let mut model = packed();
    model.dequantize().unwrap();
    model
        .save_pretrained(dir.path(), &SaveOptions::default())
        .unwrap();
    let names = |tensors: BTreeMap<String, Tensor>| tensors.into_keys().collect::<Vec<_>>();
    assert_eq!(
        names(tensors(dir.path())),
        names(tensors(&fixture("gpt_oss")))
    );
    let again = CausalLm::from_pretrained(dir.path(), &LoadOptions::default()).unwrap();
    let ids = &expected("gpt_oss")["input_ids"];
    assert_eq!(logits(&again, ids), logits(&model, ids));
}

/// The layouts of other libraries describe modules, so each expert has its own tensors in them.
#[test]
fn experts_in_other_schemes_are_written_one_by_one() {
    let ids = &expected("gpt_oss")["input_ids"];
    for scheme in ["nf4", "int8", "mxfp4"] {
        let mut model = load("gpt_oss");
        let options = QuantizeOptions::new(scheme.parse().unwrap());
        model.quantize(&options).unwrap();
        let dir = tempfile::tempdir().unwrap();
        model
            .save_pretrained(dir.path(), &SaveOptions::default())
            .unwrap();
        let has_parts = tensors(dir.path())
            .keys()
            .any(|name| name.contains(".experts.3.down_proj."));
        assert!(has_parts, "{scheme}");
        let again = CausalLm::from_pretrained(dir.path(), &LoadOptions::default()).unwrap();
        assert_eq!(logits(&again, ids), logits(&model, ids), "{scheme}");
    }
}

#[test]
fn adapters_are_trained_over_packed_experts_and_attention() {
    let (mut model, want) = (packed(), expected("gpt_oss_mxfp4"));
    let ids = &want["input_ids"];
    let names = ["q_proj", "v_proj", "gate_up_proj", "down_proj"];
    let config = LoraConfig {
        r: 2,
        target_modules: Some(TargetModules::names(names.to_vec())),
        ..LoraConfig::default()
    };
    let added = add_adapter(&mut model, "a", &config, &AddOptions::default()).unwrap();
    // Queries and values, and two layers of four experts.
    assert_eq!(added.len(), 2 * (2 + 2 * 4), "{added:?}");
    let loss = |model: &CausalLm| {
        model
            .loss(ids, ids, LabelShift::HuggingFace)
            .unwrap()
            .mean()
            .unwrap()
    };
    let before = loss(&model);
    before.backward();
    tch::no_grad(|| {
        for (name, mut tensor) in trainable_parameters(&mut model).unwrap() {
            assert!(tensor.grad().defined(), "{name}");
            let step = tensor.grad() * -0.1;
            let _same = tensor.f_add_(&step).unwrap();
        }
    });
    assert!(loss(&model).double_value(&[]) < before.double_value(&[]));
    assert_eq!(layers_in_mxfp4(&mut model).len(), 2 * 4 * 2);
}

/// The steps over each cache, the sinks of whose attention would be left out or counted twice unseen in a comparison of
/// caches with one another.
#[test]
fn every_cache_has_the_sinks_of_a_pass_without_one() {
    let (model, want) = (load("gpt_oss"), expected("gpt_oss"));
    let ids = &want["input_ids"];
    for implementation in CacheImplementation::ALL {
        for tokens in [vec![12], vec![5, 4, 1, 1, 1], vec![1; 12]] {
            let mut cache = implementation
                .build(&CacheShape {
                    windows: model.layer_windows(),
                    batch: 2,
                    max_len: Some(16),
                    kv_heads: 2,
                    head_dim: 16,
                    ..CacheShape::default()
                })
                .unwrap();
            let mut parts = Vec::new();
            let mut start = 0;
            for count in tokens {
                let part = ids.narrow(1, start, count);
                let input = ForwardInput::new(&part).with_cache(&mut *cache);
                parts.push(tch::no_grad(|| model.forward(input).unwrap()));
                start += count;
            }
            let difference = max_difference(&Tensor::cat(&parts, 1), &want["logits"]);
            // Quantized keys and values are rounded.
            let bound = match implementation {
                CacheImplementation::Int8 => 0.02,
                CacheImplementation::Int4 => 0.5,
                _ => 1e-5,
            };
            assert!(difference < bound, "{implementation:?}: {difference}");
        }
    }
}

#[test]
fn sinks_take_part_in_the_softmax() {
    let (model, want) = (load("gpt_oss"), expected("gpt_oss"));
    tch::no_grad(|| {
        for (name, mut parameter) in model.named_parameters() {
            if name.ends_with("sinks") {
                let _same = parameter.fill_(-1e4);
            }
        }
    });
    let without = logits(&model, &want["input_ids"]);
    assert!(max_difference(&without, &want["logits"]) > 0.01);
}

#[test]
fn the_default_scaling_of_positions_is_that_of_the_published_models() {
    let read = |json: serde_json::Value| match ModelConfig::from_json(&json.to_string()).unwrap() {
        ModelConfig::Llama(config) => config,
        other => panic!("{other:?}"),
    };
    let config = read(json!({"model_type": "gpt_oss", "num_hidden_layers": 4}));
    assert_eq!(config.family, LlamaFamily::GptOss);
    let RopeScaling::Yarn(yarn) = &config.rope_scaling else {
        panic!("{:?}", config.rope_scaling);
    };
    assert_eq!(
        (yarn.factor, yarn.original_max_position_embeddings),
        (32.0, 4096)
    );
    assert_eq!((yarn.truncate, config.rope_theta), (false, 150_000.0));
    // No scaling is written as such, since an absent key is the default one.
    let plain = read(json!({"model_type": "gpt_oss", "rope_parameters": {"rope_type": "default"}}));
    assert_eq!(plain.rope_scaling, RopeScaling::Default);
    let written = ModelConfig::from(plain).to_json();
    assert_eq!(written["rope_scaling"], json!({"rope_type": "default"}));
    assert_eq!(read(written.into()).rope_scaling, RopeScaling::Default);
}

#[test]
fn a_file_with_other_experts_is_refused_by_name() {
    let dir = copy_of("gpt_oss_mxfp4");
    edit_config(dir.path(), |config| {
        config.insert("num_local_experts".to_owned(), 5.into());
    });
    let refused = CausalLm::from_pretrained(dir.path(), &LoadOptions::default()).unwrap_err();
    let message = refused.to_string();
    for part in [
        "40 missing: model.layers.0.mlp.experts.0.gate_up_proj.weight",
        "model.layers.0.mlp.experts.down_proj_blocks",
    ] {
        assert!(message.contains(part), "{message}");
    }
    let options = LoadOptions {
        kind: Some(Kind::Float),
        quantization: Some(QuantizeOptions::new("nf4".parse().unwrap())),
        ..LoadOptions::default()
    };
    let refused = CausalLm::from_pretrained(fixture("gpt_oss_mxfp4"), &options).unwrap_err();
    assert!(
        refused.to_string().contains("already quantized"),
        "{refused}"
    );
}

#[test]
fn experts_of_a_gguf_file_stay_in_mxfp4() {
    let dir = copy_of("gpt_oss_mxfp4");
    let path = dir.path().join("model.gguf");
    let options = GgufOptions::new(GgufFileType::MXFP4_MOE);
    let refused = packed().save_gguf(&path, &options).unwrap_err();
    let message = "`swiglu_limit` is 0.5, which is not supported; supported: 7, in GGUF files of the architecture \
        `gpt-oss`";
    assert_eq!(refused.to_string(), message);
    assert!(!path.exists());
    edit_config(dir.path(), |config| {
        config.insert("swiglu_limit".to_owned(), 7.into());
    });
    let mut model = CausalLm::from_pretrained(dir.path(), &LoadOptions::default()).unwrap();
    model.save_gguf(&path, &options).unwrap();
    let mut again = CausalLm::from_gguf(&path, &LoadOptions::default()).unwrap();
    assert_eq!(layers_of_experts(&mut again), layers_of_experts(&mut model));
    // A file in fp32 has the same elements in other types.
    let options = GgufOptions::new(GgufFileType::F32);
    model.save_gguf(&path, &options).unwrap();
    let again = CausalLm::from_gguf(&path, &LoadOptions::default()).unwrap();
    assert!(!again.is_quantized());
    model.dequantize().unwrap();
    let ids = &expected("gpt_oss_mxfp4")["input_ids"];
    let difference = max_difference(&logits(&again, ids), &logits(&model, ids));
    assert!(difference < 1e-5, "{difference}");
}

/// Returns the elements of the layers in MXFP4, by name.
fn layers_of_experts(model: &mut CausalLm) -> BTreeMap<String, Tensor> {
    let mut layers = BTreeMap::new();
    let mut visit = |name: &str, linear: &mut overdrive_nn::Linear| {
        if let LinearWeight::Quantized(weight) = linear.weight()
            && weight.scheme() == Scheme::Mxfp4
        {
            layers.insert(name.to_owned(), weight.dequantize(Kind::Float).unwrap());
        }
        Ok(())
    };
    model.visit_linears(&mut visit).unwrap();
    assert_eq!(layers.len(), 2 * 4 * 2);
    layers
}
