//! Quantized folders of other libraries with tensors beside the weights. `fixtures/gen_quantized.py` makes them.

use std::collections::BTreeMap;
use std::path::Path;

use crate::common::{
    copy_of, dynamic_cache, edit_config, expected, fixture, generator, max_difference,
    max_magnitude, warnings_of,
};
use overdrive_nn::{AdapterHost, Linear, LinearWeight};
use overdrive_quantization::{Activations, Scheme};
use overdrive_safetensors::MappedFile;
use overdrive_transformer::{CausalLm, Error, ForwardInput, LoadOptions, QuantizeOptions};
use serde_json::{Value, json};
use tch::{Device, Kind, Tensor};

/// The key of the layout of quantized weights.
const LAYOUT: &str = "quantization_config";

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
fn weights_in_fp8_by_blocks_stay_packed_and_are_written_as_they_were_read() {
    // Experts and the projections of latent attention in the second.
    for (case, layers) in [("qwen3_fp8", 14), ("deepseek_v3_fp8", 28)] {
        let (mut model, warnings) = load(&fixture(case));
        assert_eq!(warnings, Vec::<String>::new(), "{case}");
        let mut packed = 0;
        let mut visit = |name: &str, linear: &mut Linear| {
            if let LinearWeight::Quantized(weight) = linear.weight() {
                assert_eq!(weight.scheme(), Scheme::Fp8Blocks, "{case}: {name}");
                packed += 1;
            }
            Ok(())
        };
        model.visit_linears(&mut visit).unwrap();
        assert_eq!(packed, layers, "{case}");
        let exact = difference(&model, case);
        assert!(exact < 1e-5, "{case}: {exact}");
        cached_steps_agree(&model, case);

        let dir = tempfile::tempdir().unwrap();
        model
            .save_pretrained(dir.path(), &Default::default())
            .unwrap();
        let config = |dir: &Path| -> Value {
            let text = std::fs::read_to_string(dir.join("config.json")).unwrap();
            serde_json::from_str(&text).unwrap()
        };
        let (read, written) = (config(&fixture(case)), config(dir.path()));
        for key in [
            "quant_method",
            "weight_block_size",
            "activation_scheme",
            "fmt",
        ] {
            assert_eq!(written[LAYOUT][key], read[LAYOUT][key], "{case}: {key}");
        }
        let kept = written[LAYOUT]["modules_to_not_convert"]
            .as_array()
            .unwrap();
        assert!(kept.contains(&"lm_head".into()), "{case}: {kept:?}");
        let tensors = |dir: &Path| -> BTreeMap<String, Tensor> {
            let file = MappedFile::open(dir.join("model.safetensors")).unwrap();
            let tensors = file.tensors().into_iter().map(|stored| {
                let tensor = stored.copy_to_tensor(None, Device::Cpu).unwrap();
                (stored.name().to_owned(), tensor)
            });
            tensors.collect()
        };
        let (read, written) = (tensors(&fixture(case)), tensors(dir.path()));
        assert!(read.keys().eq(written.keys()), "{case}");
        for (name, tensor) in &read {
            let numbers = |tensor: &Tensor| tensor.to_kind(Kind::Float);
            assert_eq!(numbers(&written[name]), numbers(tensor), "{case}: {name}");
        }

        model.dequantize().unwrap();
        let dense = difference(&model, case);
        assert!(dense < 1e-5, "{case}: {dense}");
    }
}

/// Compares the logits of a sequence that is computed token by token with those of the whole sequence.
fn cached_steps_agree(model: &CausalLm, case: &str) {
    let want = expected(case);
    let mut cache = dynamic_cache(model);
    for position in 0..want["input_ids"].size()[1] {
        let token = want["input_ids"].narrow(1, position, 1);
        let input = ForwardInput::new(&token).with_cache(&mut *cache);
        let got = tch::no_grad(|| model.forward(input));
        let logits = want["logits"].narrow(1, position, 1);
        let found = max_difference(&got.unwrap(), &logits) / max_magnitude(&logits);
        assert!(found < 1e-5, "{case} at {position}: {found}");
    }
}

#[test]
fn lists_of_compressed_tensors_with_the_names_of_a_multimodal_model_are_those_of_its_text() {
    let case = "mistral3";
    let mut dense = load(&fixture(case)).0;
    let scheme: Scheme = "int8".parse().unwrap();
    dense.quantize(&QuantizeOptions::new(scheme)).unwrap();
    let text = tempfile::tempdir().unwrap();
    let save = |model: &CausalLm, dir: &Path| model.save_pretrained(dir, &Default::default());
    save(&dense, text.path()).unwrap();

    // The tensors have their older names, and the lists those of transformers 5.
    let tensors = Tensor::read_safetensors(text.path().join("model.safetensors")).unwrap();
    let tensors: Vec<(String, Tensor)> = tensors
        .into_iter()
        .map(|(name, tensor)| (format!("language_model.{name}"), tensor))
        .collect();
    let folder = copy_of(case);
    let path = folder.path().join("model.safetensors");
    std::fs::remove_file(&path).unwrap();
    Tensor::write_safetensors(&tensors, &path).unwrap();
    let weights = json!({"num_bits": 8, "type": "int", "strategy": "channel"});
    let layout = json!({
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "config_groups": {
            "group_0": {
                "targets": [r"re:model\.language_model\.layers\.\d+\.mlp\..*_proj"],
                "weights": weights, "input_activations": {"num_bits": 8, "dynamic": true, "strategy": "token"},
            },
            "group_1": {"targets": ["re:.*self_attn.*"], "weights": weights},
        },
        "ignore": ["lm_head", "model.language_model.layers.9.mlp.up_proj", "re:model.vision_tower.*"],
    });
    edit_config(folder.path(), |config| {
        config.insert("quantization_config".to_owned(), layout);
    });
    let schemes = |model: &mut CausalLm| {
        let mut schemes = BTreeMap::new();
        let mut visit = |name: &str, linear: &mut Linear| {
            if let LinearWeight::Quantized(weight) = linear.weight() {
                schemes.insert(name.to_owned(), weight.scheme());
            }
            Ok(())
        };
        model.visit_linears(&mut visit).unwrap();
        schemes
    };
    let (mut model, _) = load(folder.path());
    let found = schemes(&mut model);
    assert_eq!(found.len(), 14);
    for (name, scheme) in &found {
        let expected = match name.contains(".mlp.") {
            true => Scheme::Int8Dynamic,
            false => Scheme::Int8WeightOnly,
        };
        assert_eq!(*scheme, expected, "{name}");
    }

    // The folder of the text alone has the names of its own modules, which transformers matches.
    let out = tempfile::tempdir().unwrap();
    save(&model, out.path()).unwrap();
    let config = std::fs::read_to_string(out.path().join("config.json")).unwrap();
    let config: Value = serde_json::from_str(&config).unwrap();
    let groups = &config["quantization_config"]["config_groups"];
    let blocks = ["down_proj", "gate_proj", "up_proj"];
    let own: Vec<String> = (0..2)
        .flat_map(|layer| blocks.map(|part| format!("model.layers.{layer}.mlp.{part}")))
        .collect();
    assert_eq!(groups["group_0"]["targets"], json!(own));
    assert_eq!(groups["group_1"]["targets"], json!(["re:.*self_attn.*"]));
    let (mut again, _) = load(out.path());
    assert_eq!(schemes(&mut again), found);
    let ids = &expected(case)["input_ids"];
    let logits = |model: &CausalLm| tch::no_grad(|| model.forward(ForwardInput::new(ids)));
    assert_eq!(logits(&again).unwrap(), logits(&model).unwrap());
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

#[test]
fn one_group_in_each_row_of_gptq_and_awq_is_written_as_channels() {
    let _generator = generator();
    for (layout, symmetric) in [
        (
            json!({"quant_method": "gptq", "bits": 4, "group_size": -1}),
            true,
        ),
        (
            json!({"quant_method": "gptq", "bits": 4, "group_size": -1, "sym": false}),
            false,
        ),
        (
            json!({"quant_method": "gptq", "bits": 8, "group_size": -1, "sym": false}),
            false,
        ),
        (
            json!({"quant_method": "awq", "bits": 4, "group_size": -1}),
            false,
        ),
    ] {
        let dir = copy_of("llama_gqa");
        let path = dir.path().join("model.safetensors");
        let file = MappedFile::open(&path).unwrap();
        let per_word = if layout["bits"] == 4 { 8 } else { 4 };
        let words = |shape: [i64; 2]| {
            Tensor::randint_low(-1 << 31, (1 << 31) - 1, shape, (Kind::Int, Device::Cpu))
        };
        tch::manual_seed(1);
        let mut tensors = Vec::new();
        for stored in file.tensors() {
            let dense = stored.copy_to_tensor(None, Device::Cpu).unwrap();
            let Some(module) = stored.name().strip_suffix("_proj.weight") else {
                tensors.push((stored.name().to_owned(), dense));
                continue;
            };
            let [outputs, inputs] = [0, 1].map(|axis| dense.size()[axis]);
            let codes = match layout["quant_method"] == "awq" {
                true => [inputs, outputs / 8],
                false => [inputs / per_word, outputs],
            };
            let zeros = match symmetric {
                // Sevens: the middle minus one.
                true => Tensor::full([1, outputs / 8], 0x7777_7777, (Kind::Int, Device::Cpu)),
                false => words([1, outputs / per_word]),
            };
            let scales = Tensor::rand([1, outputs], (Kind::Float, Device::Cpu)) * 0.02;
            for (part, tensor) in [
                ("qweight", words(codes)),
                ("qzeros", zeros),
                ("scales", scales.to_kind(Kind::Half)),
            ] {
                tensors.push((format!("{module}_proj.{part}"), tensor));
            }
        }
        drop(file);
        overdrive_safetensors::write(&path, &tensors, &Default::default()).unwrap();
        edit_config(dir.path(), |config| {
            config.insert("quantization_config".to_owned(), layout.clone());
        });
        let (model, _) = load(dir.path());
        let to = tempfile::tempdir().unwrap();
        model
            .save_pretrained(to.path(), &Default::default())
            .unwrap();
        let text = std::fs::read_to_string(to.path().join("config.json")).unwrap();
        let written: Value = serde_json::from_str(&text).unwrap();
        let weights = &written["quantization_config"]["config_groups"]["group_0"]["weights"];
        assert_eq!(weights["strategy"], "channel", "{layout}");
        assert_eq!(weights["symmetric"], symmetric, "{layout}");
        let (again, _) = load(to.path());
        let tokens = Tensor::from_slice(&[1_i64, 2, 3, 4]).view([1, 4]);
        let [wanted, found] = [&model, &again]
            .map(|model| tch::no_grad(|| model.forward(ForwardInput::new(&tokens)).unwrap()));
        assert!(found.equal(&wanted), "{layout}");
    }
}
