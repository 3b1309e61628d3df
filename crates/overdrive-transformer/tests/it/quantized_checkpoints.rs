//! Quantized folders of other libraries with tensors beside the weights. `fixtures/gen_quantized.py` makes them.

use std::path::Path;

use crate::common::{
    copy_of, edit_config, expected, fixture, max_difference, max_magnitude, warnings_of,
};
use overdrive_quantization::Activations;
use overdrive_transformer::{CausalLm, Error, ForwardInput, LoadOptions};
use serde_json::{Value, json};
use tch::{Kind, Tensor};

/// Loads the folder, and returns the warnings that were logged.
fn load(dir: &Path) -> (CausalLm, Vec<String>) {
    warnings_of(|| CausalLm::from_pretrained(dir, &LoadOptions::default()).unwrap())
}

/// The largest difference of the logits to the expected ones, relative to the largest logit.
fn difference(model: &CausalLm, case: &str) -> f64 {
    let want = expected(case);
    let input = ForwardInput::new(&want["input_ids"]);
    let got = tch::no_grad(|| model.forward(input)).unwrap();
    max_difference(&got, &want["logits"]) / max_magnitude(&want["logits"])
}

#[test]
fn static_scales_of_activations_and_the_cache_are_left_with_a_warning() {
    let case = "llama_static_scales";
    let (mut model, warnings) = load(&fixture(case));
    // 14 layers with a scale and a zero point, and a key and a value scale in each of 2 blocks.
    assert_eq!(warnings.len(), 1, "{warnings:?}");
    assert!(
        warnings[0].starts_with(
            "32 static scales and zero points of the checkpoint \
             (model.layers.0.mlp.down_proj.input_scale, ...) are not used: activations are quantized dynamically per token"
        ),
        "{warnings:?}"
    );
    let rounded = difference(&model, case);
    assert!(rounded > 0.0 && rounded < 0.05, "{rounded}");

    // The folder that is written says how it is computed.
    let dir = tempfile::tempdir().unwrap();
    model
        .save_pretrained(dir.path(), &Default::default())
        .unwrap();
    let text = std::fs::read_to_string(dir.path().join("config.json")).unwrap();
    let written: Value = serde_json::from_str(&text).unwrap();
    let written = &written["quantization_config"];
    let activations = &written["config_groups"]["group_0"]["input_activations"];
    assert_eq!(activations["dynamic"], json!(true));
    assert_eq!(activations["strategy"], json!("token"));
    assert_eq!(activations["symmetric"], json!(true));
    assert_eq!(written["kv_cache_scheme"], Value::Null);
    let (again, warnings) = load(dir.path());
    assert_eq!(warnings, Vec::<String>::new());
    assert_eq!(difference(&again, case), rounded);

    model.set_activations(Activations::Float).unwrap();
    let exact = difference(&model, case);
    assert!(exact < 1e-5, "{exact}");
}

#[test]
fn weights_in_fp8_with_one_scale_each_stay_packed_and_are_written_by_row() {
    let case = "llama_fp8";
    let (mut model, warnings) = load(&fixture(case));
    assert!(model.is_quantized());
    assert_eq!(warnings.len(), 1, "{warnings:?}");
    let expected = "14 static scales and zero points of the checkpoint (model.layers.0.mlp.down_proj.activation_scale, ...)";
    assert!(warnings[0].starts_with(expected), "{warnings:?}");
    let rounded = difference(&model, case);
    assert!(rounded > 0.0 && rounded < 0.1, "{rounded}");

    let dir = tempfile::tempdir().unwrap();
    model
        .save_pretrained(dir.path(), &Default::default())
        .unwrap();
    let (again, warnings) = load(dir.path());
    assert_eq!(warnings, Vec::<String>::new());
    assert_eq!(difference(&again, case), rounded);

    model.set_activations(Activations::Float).unwrap();
    let exact = difference(&model, case);
    assert!(exact < 1e-5, "{exact}");
}

#[test]
fn biases_of_zeros_that_autogptq_adds_are_dropped() {
    let case = "llama_gptq_biases";
    let (mut model, _) = load(&fixture(case));
    model.set_activations(Activations::Float).unwrap();
    assert!(
        model
            .named_parameters()
            .iter()
            .all(|(name, _)| !name.ends_with("bias"))
    );
    let exact = difference(&model, case);
    assert!(exact < 1e-5, "{exact}");
}

#[test]
fn a_bias_that_is_not_zero_is_refused_unless_the_configuration_has_it() {
    let case = "llama_gptq_biases";
    let dir = copy_of(case);
    let path = dir.path().join("model.safetensors");
    let name = "model.layers.1.self_attn.v_proj.bias";
    let mut tensors = Tensor::read_safetensors(&path).unwrap();
    for (own, tensor) in &mut tensors {
        if own == name {
            let _same = tensor.narrow(0, 3, 1).fill_(0.5);
        }
    }
    std::fs::remove_file(&path).unwrap();
    Tensor::write_safetensors(&tensors, &path).unwrap();
    let error = CausalLm::from_pretrained(dir.path(), &LoadOptions::default()).unwrap_err();
    let Error::Checkpoint { problems, .. } = &error else {
        panic!("{error}");
    };
    assert_eq!(problems.nonzero_biases, [name]);
    assert!(problems.unexpected.is_empty());
    let message = error.to_string();
    assert!(
        message.contains("`attention_bias` and `mlp_bias`"),
        "{message}"
    );
    assert!(message.contains(name), "{message}");

    // Where the configuration has the biases, they are parameters.
    edit_config(dir.path(), |config| {
        config.insert("attention_bias".to_owned(), true.into());
    });
    let options = LoadOptions {
        kind: Some(Kind::Float),
        ..LoadOptions::default()
    };
    let mut model = CausalLm::from_pretrained(dir.path(), &options).unwrap();
    model.set_activations(Activations::Float).unwrap();
    assert!(model.named_parameters().iter().any(|(own, _)| own == name));
    assert!(difference(&model, case) > 1e-3);
}
