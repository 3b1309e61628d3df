//! Folders in, folders out.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::rc::Rc;
use std::sync::{Arc, Mutex};

use overdrive_quantization::{
    CalibrationOptions, CheckpointOptions, Error, Filter, GptqOptions, GroupOptions,
    InputCollector, Migration, Moments, Progress, QuantizationConfig, QuantizedWeight, Scheme,
    check_checkpoint, observe_input, observe_inputs, quantize_checkpoint,
};
use overdrive_safetensors::{MappedFile, write};
use serde_json::{Value, json};
use tch::{Device, Kind, Tensor};

use crate::test_tensors;

const CPU: (Kind, Device) = (Kind::Float, Device::Cpu);
const WIDTH: i64 = 64;
const LAYERS: i64 = 3;

fn normal(shape: &[i64]) -> Tensor {
    test_tensors::normal(shape).to_kind(Kind::Float)
}

fn random(shape: &[i64]) -> Tensor {
    normal(shape) * 0.05
}

/// Returns the tensors of a small Llama model.
fn llama(tied: bool) -> Vec<(String, Tensor)> {
    let mut tensors = vec![
        ("model.embed_tokens.weight".to_owned(), random(&[96, WIDTH])),
        ("model.norm.weight".to_owned(), random(&[WIDTH]) + 1.0),
    ];
    for layer in 0..LAYERS {
        let maps = [
            ("self_attn.q_proj", [64, WIDTH]),
            ("self_attn.k_proj", [32, WIDTH]),
            ("self_attn.v_proj", [32, WIDTH]),
            ("self_attn.o_proj", [WIDTH, 64]),
            ("mlp.gate_proj", [128, WIDTH]),
            ("mlp.up_proj", [128, WIDTH]),
            ("mlp.down_proj", [WIDTH, 128]),
        ];
        for (name, shape) in maps {
            tensors.push((
                format!("model.layers.{layer}.{name}.weight"),
                random(&shape),
            ));
        }
        for name in ["input_layernorm", "post_attention_layernorm"] {
            let name = format!("model.layers.{layer}.{name}.weight");
            tensors.push((name, random(&[WIDTH]) + 1.0));
        }
    }
    if !tied {
        tensors.push(("lm_head.weight".to_owned(), random(&[96, WIDTH])));
    }
    tensors
}

fn save(dir: &Path, tensors: &[(String, Tensor)], config: &Value) {
    fs::create_dir_all(dir).unwrap();
    write(dir.join("model.safetensors"), tensors, &BTreeMap::new()).unwrap();
    fs::write(dir.join("config.json"), config.to_string()).unwrap();
    fs::write(dir.join("tokenizer.json"), "{\"version\": \"1.0\"}").unwrap();
    fs::write(dir.join("generation_config.json"), "{}").unwrap();
    fs::write(dir.join("pytorch_model.bin"), "stale").unwrap();
}

fn config(tied: bool) -> Value {
    json!({"model_type": "llama", "hidden_size": WIDTH, "tie_word_embeddings": tied, "own": [1, 2]})
}

fn read_config(dir: &Path) -> (Value, QuantizationConfig) {
    let config: Value =
        serde_json::from_str(&fs::read_to_string(dir.join("config.json")).unwrap()).unwrap();
    let quantization = QuantizationConfig::from_json(&config["quantization_config"]).unwrap();
    (config, quantization)
}

fn relative(found: &Tensor, expected: &Tensor) -> f64 {
    let difference = (found - expected).norm() / expected.norm();
    difference.double_value(&[])
}

#[test]
fn every_scheme_is_written_so_that_it_reads_back() {
    let folder = tempfile::tempdir().unwrap();
    let dir = folder.path().join("dense");
    let tensors = llama(false);
    save(&dir, &tensors, &config(false));
    for name in [
        "int8",
        "int8-weight",
        "llm-int8",
        "int4-g32",
        "int4-g64",
        "nf4",
        "nf4-single",
        "fp4",
        "fp8",
    ] {
        let scheme: Scheme = name.parse().unwrap();
        let out = folder.path().join(name);
        let report =
            quantize_checkpoint(&dir, &out, scheme, &CheckpointOptions::default()).unwrap();
        let file = MappedFile::open(out.join("model.safetensors")).unwrap();
        let (config, layout) = read_config(&out);
        assert_eq!(config["own"], json!([1, 2]));
        for (tensor, original) in &tensors {
            let module = tensor.strip_suffix(".weight").unwrap();
            if !tensor.contains("_proj") {
                let kept = file.tensor(tensor).unwrap();
                let kept = kept.copy_to_tensor(None, Device::Cpu).unwrap();
                assert!(kept.equal(original), "{name}: {tensor}");
                continue;
            }
            assert!(layout.is_quantized(module).unwrap(), "{name}: {module}");
            let packed = layout.read_weight(&file, module).unwrap();
            let expected = QuantizedWeight::quantize(original, scheme).unwrap();
            let difference = relative(
                &packed.dequantize(Kind::Float).unwrap(),
                &expected.dequantize(Kind::Float).unwrap(),
            );
            // Scales that a format keeps in half precision are rounded.
            assert!(difference < 1e-3, "{name}: {module}: {difference}");
        }
        assert!(!layout.is_quantized("lm_head").unwrap(), "{name}");
        assert!(out.join("tokenizer.json").exists() && out.join("generation_config.json").exists());
        assert!(!out.join("pytorch_model.bin").exists());
        let bytes = fs::metadata(out.join("model.safetensors")).unwrap().len();
        assert_eq!(report.file_bytes, bytes);
        assert_eq!(report.quantized().count(), 7 * LAYERS as usize);
        let numbers: i64 = tensors
            .iter()
            .map(|(_, tensor)| tensor.numel() as i64)
            .sum();
        assert_eq!(report.fp32_bytes(), 4 * numbers as u64);
        let bound = if name.contains('8') { 0.05 } else { 0.2 };
        assert!(
            (1e-4..bound).contains(&report.relative_error()),
            "{name}: {report}"
        );
        let text = report.to_string();
        assert!(text.contains("not quantized (9)"), "{text}");
        let json = serde_json::to_string(&report).unwrap();
        let again: overdrive_quantization::CheckpointReport = serde_json::from_str(&json).unwrap();
        assert_eq!(again.tensors.len(), report.tensors.len());
    }
    // Nothing else is left in the folder.
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 10);
}

#[test]
fn a_tied_embedding_can_be_quantized_and_then_the_whole_file_is_small() {
    let folder = tempfile::tempdir().unwrap();
    let dir = folder.path().join("dense");
    let mut tensors = vec![
        ("model.embed_tokens.weight".to_owned(), normal(&[1024, 512])),
        ("model.norm.weight".to_owned(), normal(&[512])),
    ];
    for map in ["q_proj", "k_proj", "v_proj", "o_proj"] {
        let name = format!("model.layers.0.self_attn.{map}.weight");
        tensors.push((name, normal(&[512, 512])));
    }
    save(&dir, &tensors, &config(true));
    for (name, ratio) in [("nf4", 7.2), ("int8", 3.9)] {
        let scheme: Scheme = name.parse().unwrap();
        let options = CheckpointOptions::default();
        let out = folder.path().join(format!("{name}-kept"));
        let report = quantize_checkpoint(&dir, &out, scheme, &options).unwrap();
        assert!(report.ratio() < ratio, "{name}: {}", report.ratio());
        let (_, layout) = read_config(&out);
        assert!(!layout.is_quantized("lm_head").unwrap());

        let options = CheckpointOptions {
            head: Some(scheme),
            ..CheckpointOptions::default()
        };
        let out = folder.path().join(name);
        let report = quantize_checkpoint(&dir, &out, scheme, &options).unwrap();
        assert!(report.ratio() > ratio, "{name}: {}", report.ratio());
        let (_, layout) = read_config(&out);
        let file = MappedFile::open(out.join("model.safetensors")).unwrap();
        assert!(layout.is_stored(&file, "model.embed_tokens").unwrap());
    }
}

#[test]
fn a_head_with_other_values_than_a_tied_embedding_is_one_of_its_own() {
    let folder = tempfile::tempdir().unwrap();
    let scheme: Scheme = "int8".parse().unwrap();
    let options = CheckpointOptions {
        head: Some(scheme),
        ..CheckpointOptions::default()
    };
    let tensors = llama(false);
    for (name, is_own) in [("own", true), ("copy", false)] {
        let dir = folder.path().join(name);
        let mut tensors: Vec<(String, Tensor)> = tensors
            .iter()
            .map(|(name, tensor)| (name.clone(), tensor.shallow_clone()))
            .collect();
        if !is_own {
            let table = tensors[0].1.shallow_clone();
            tensors.last_mut().unwrap().1 = table;
        }
        save(&dir, &tensors, &config(true));
        let out = folder.path().join(format!("{name}-int8"));
        quantize_checkpoint(&dir, &out, scheme, &options).unwrap();
        let (config, layout) = read_config(&out);
        assert_eq!(config["tie_word_embeddings"], json!(!is_own), "{name}");
        let file = MappedFile::open(out.join("model.safetensors")).unwrap();
        assert!(layout.is_stored(&file, "lm_head").unwrap(), "{name}");
        // Only a table that is the head gets the head's scheme.
        assert_eq!(
            layout.is_stored(&file, "model.embed_tokens").unwrap(),
            !is_own,
            "{name}"
        );
    }
}

#[test]
fn layers_stay_dense_by_name_and_by_filter_and_shards_have_an_index() {
    let folder = tempfile::tempdir().unwrap();
    let dir = folder.path().join("dense");
    save(&dir, &llama(false), &config(false));
    let seen = Arc::new(Mutex::new(Vec::new()));
    let calls = Arc::clone(&seen);
    let options = CheckpointOptions {
        skip_modules: ["down_proj", "model.layers.0.self_attn"]
            .map(str::to_owned)
            .to_vec(),
        filter: Some(Filter::new(|name| !name.starts_with("model.layers.2."))),
        max_shard_bytes: 20_000,
        progress: Some(Progress::new(move |done, all| {
            calls.lock().unwrap().push((done, all))
        })),
        ..CheckpointOptions::default()
    };
    let out = folder.path().join("out");
    let report = quantize_checkpoint(&dir, &out, "nf4".parse().unwrap(), &options).unwrap();
    assert_eq!(report.quantized().count(), 2 + 6);
    let (_, layout) = read_config(&out);
    for (module, quantized) in [
        ("model.layers.0.self_attn.q_proj", false),
        ("model.layers.1.self_attn.q_proj", true),
        ("model.layers.0.mlp.down_proj", false),
        ("model.layers.2.self_attn.q_proj", false),
    ] {
        assert_eq!(layout.is_quantized(module).unwrap(), quantized, "{module}");
    }
    let text = fs::read_to_string(out.join("model.safetensors.index.json")).unwrap();
    let index: Value = serde_json::from_str(&text).unwrap();
    let map = index["weight_map"].as_object().unwrap();
    let names: std::collections::BTreeSet<&str> =
        map.values().map(|v| v.as_str().unwrap()).collect();
    assert!(names.len() > 2, "{names:?}");
    let mut tensors = 0;
    for name in names {
        assert!(name.ends_with(&format!(
                "-of-{:05}.safetensors",
                map.values()
                    .map(|v| v.as_str().unwrap())
                    .collect::<std::collections::BTreeSet<_>>()
                    .len()
            )));
        let file = MappedFile::open(out.join(name)).unwrap();
        for stored in file.tensors() {
            assert_eq!(map[stored.name()], name);
            // Aligned, for readers that map.
            let size = stored.kind().unwrap().elt_size_in_bytes();
            assert_eq!(
                stored.data().as_ptr().align_offset(size),
                0,
                "{}",
                stored.name()
            );
            tensors += 1;
        }
    }
    assert_eq!(tensors, map.len());
    let seen = seen.lock().unwrap();
    assert_eq!(seen.first().unwrap().0, 0);
    let (done, all) = *seen.last().unwrap();
    assert_eq!(done, all);
    assert!(seen.is_sorted());

    // What was sharded can be read.
    let error = quantize_checkpoint(
        &out,
        folder.path().join("again"),
        Scheme::Int8Dynamic,
        &options,
    );
    let text = error.unwrap_err().to_string();
    assert!(
        text.ends_with("it is already quantized; use the original folder"),
        "{text}"
    );
}

#[test]
fn tables_of_tokens_positions_and_distances_stay_dense_in_every_architecture() {
    let folder = tempfile::tempdir().unwrap();
    let dir = folder.path().join("dense");
    let names = [
        ("bert.embeddings.word_embeddings", false),
        ("bert.embeddings.position_embeddings", false),
        ("bert.embeddings.token_type_embeddings", false),
        ("bert.encoder.layer.0.attention.self.query", true),
        ("electra.embeddings_project", true),
        ("shared", false),
        (
            "encoder.block.0.layer.0.SelfAttention.relative_attention_bias",
            false,
        ),
        ("encoder.block.0.layer.0.SelfAttention.q", true),
        ("model.decoder.embed_positions", false),
        ("model.decoder.layers.0.fc1", true),
        ("text_model.embeddings.position_embedding", false),
        ("gpt_neox.embed_in", false),
        ("embed_out", false),
    ];
    let values = (Tensor::arange(8 * WIDTH, CPU) * 0.7)
        .sin()
        .view([8, WIDTH]);
    let weight = |(name, _): &(&str, bool)| (format!("{name}.weight"), values.shallow_clone());
    let tensors: Vec<_> = names.iter().map(weight).collect();
    save(&dir, &tensors, &json!({"model_type": "bert"}));
    let out = folder.path().join("out");
    let scheme = Scheme::Int8Dynamic;
    let report = quantize_checkpoint(&dir, &out, scheme, &CheckpointOptions::default()).unwrap();
    for (name, quantized) in names {
        let name = format!("{name}.weight");
        let tensor = report.tensors.iter().find(|tensor| tensor.name == name);
        assert_eq!(
            tensor.unwrap().scheme,
            quantized.then_some(scheme),
            "{name}"
        );
    }
    // A head is a linear layer, which readers have to be told is dense.
    let (_, layout) = read_config(&out);
    assert!(!layout.is_quantized("embed_out").unwrap());
}

/// Returns statistics of the inputs of all layers, with some large channels.
fn collector(moments: Moments) -> InputCollector {
    let (mut collector, result) = observe_inputs(InputCollector::new(moments), || {
        for layer in 0..LAYERS {
            for (maps, width) in [
                (
                    &["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"][..],
                    WIDTH,
                ),
                (&["self_attn.o_proj"][..], WIDTH),
                (
                    &["mlp.gate_proj", "mlp.up_proj", "mlp.gate_up_proj"][..],
                    WIDTH,
                ),
                (&["mlp.down_proj"][..], 128),
            ] {
                let x = random(&[512, 16]).matmul(&random(&[16, width])) * 50.0;
                let _ = x.narrow(1, 3, 1).f_mul_scalar_(20.0)?;
                for map in maps {
                    observe_input(&format!("model.layers.{layer}.{map}"), &x)?;
                }
            }
        }
        overdrive_quantization::Result::Ok(())
    });
    result.unwrap();
    collector.finish();
    collector
}

#[test]
fn migration_divides_the_layer_before_and_multiplies_the_weight() {
    let folder = tempfile::tempdir().unwrap();
    let dir = folder.path().join("dense");
    let tensors: BTreeMap<String, Tensor> = llama(false).into_iter().collect();
    let listed: Vec<_> = tensors
        .iter()
        .map(|(name, t)| (name.clone(), t.shallow_clone()))
        .collect();
    save(&dir, &listed, &config(false));
    let mut options = CheckpointOptions {
        migration: Some(Migration::Strength(0.5)),
        ..CheckpointOptions::default()
    };
    let out = folder.path().join("out");
    let scheme = Scheme::Int8Dynamic;
    let error = quantize_checkpoint(&dir, &out, scheme, &options).unwrap_err();
    assert!(
        error
            .to_string()
            .starts_with("`migration` is enabled without statistics"),
        "{error}"
    );
    assert!(!out.exists());

    options.statistics = Some(Rc::new(collector(Moments::Full)));
    options.calibration = CalibrationOptions {
        gptq: Some(GptqOptions::default()),
        ..CalibrationOptions::default()
    };
    quantize_checkpoint(&dir, &out, scheme, &options).unwrap();
    let file = MappedFile::open(out.join("model.safetensors")).unwrap();
    let (_, layout) = read_config(&out);
    let dense = |name: &str| {
        file.tensor(name)
            .unwrap()
            .copy_to_tensor(None, Device::Cpu)
            .unwrap()
    };
    let packed = |name: &str| {
        let weight = layout.read_weight(&file, name).unwrap();
        weight.dequantize(Kind::Float).unwrap()
    };
    for layer in 0..LAYERS {
        let prefix = format!("model.layers.{layer}");
        let of = |name: &str| &tensors[&format!("{prefix}.{name}.weight")];
        let norm = dense(&format!("{prefix}.input_layernorm.weight"));
        assert!(relative(&norm, of("input_layernorm")) > 0.1);
        // Together they compute what they did.
        let q = packed(&format!("{prefix}.self_attn.q_proj")) * &norm;
        let expected = of("self_attn.q_proj") * of("input_layernorm");
        assert!(
            relative(&q, &expected) < 0.05,
            "{}",
            relative(&q, &expected)
        );
        let norm = dense(&format!("{prefix}.post_attention_layernorm.weight"));
        let (up, down) = (
            packed(&format!("{prefix}.mlp.up_proj")),
            packed(&format!("{prefix}.mlp.down_proj")),
        );
        let both = down.matmul(&(up * &norm));
        let expected =
            of("mlp.down_proj").matmul(&(of("mlp.up_proj") * of("post_attention_layernorm")));
        assert!(
            relative(&both, &expected) < 0.05,
            "{}",
            relative(&both, &expected)
        );
    }
}

/// Its gate and up are one layer, whose rows are not divided, so the inputs of the next layer stay.
#[test]
fn migration_of_glm4_divides_norms_alone() {
    let folder = tempfile::tempdir().unwrap();
    let dir = folder.path().join("dense");
    let mut tensors: BTreeMap<String, Tensor> = llama(false).into_iter().collect();
    for layer in 0..LAYERS {
        let name = |part: &str| format!("model.layers.{layer}.mlp.{part}_proj.weight");
        let parts = ["gate", "up"].map(|part| tensors.remove(&name(part)).unwrap());
        tensors.insert(name("gate_up"), Tensor::cat(&parts, 0));
    }
    let listed: Vec<_> = tensors
        .iter()
        .map(|(name, t)| (name.clone(), t.shallow_clone()))
        .collect();
    save(&dir, &listed, &json!({"model_type": "glm4"}));
    let options = CheckpointOptions {
        migration: Some(Migration::Strength(0.5)),
        statistics: Some(Rc::new(collector(Moments::Diagonal))),
        ..CheckpointOptions::default()
    };
    let out = folder.path().join("out");
    quantize_checkpoint(&dir, &out, Scheme::Int8Dynamic, &options).unwrap();
    let file = MappedFile::open(out.join("model.safetensors")).unwrap();
    let (_, layout) = read_config(&out);
    let dense = |name: &str| {
        let tensor = file.tensor(&format!("{name}.weight")).unwrap();
        tensor.copy_to_tensor(None, Device::Cpu).unwrap()
    };
    let packed = |name: &str| {
        let weight = layout.read_weight(&file, name).unwrap();
        weight.dequantize(Kind::Float).unwrap()
    };
    for layer in 0..LAYERS {
        let name = |part: &str| format!("model.layers.{layer}.{part}");
        let of = |part: &str| &tensors[&format!("{}.weight", name(part))];
        for (norm, map) in [
            ("input_layernorm", "self_attn.v_proj"),
            ("post_attention_layernorm", "mlp.gate_up_proj"),
        ] {
            assert!(relative(&dense(&name(norm)), of(norm)) > 0.1, "{norm}");
            let (both, expected) = (packed(&name(map)) * dense(&name(norm)), of(map) * of(norm));
            assert!(relative(&both, &expected) < 0.05, "{map}");
        }
        let down = packed(&name("mlp.down_proj"));
        assert!(relative(&down, of("mlp.down_proj")) < 0.05);
    }
}

#[test]
fn a_migration_that_finds_nothing_to_change_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let dir = folder.path().join("dense");
    // The names of a model of text and images.
    let renamed = llama(false).into_iter().map(|(name, tensor)| {
        let name = name
            .strip_prefix("model.")
            .map(str::to_owned)
            .unwrap_or(name);
        (format!("language_model.model.{name}"), tensor)
    });
    let config = json!({"model_type": "gemma3"});
    save(&dir, &renamed.collect::<Vec<_>>(), &config);
    let options = CheckpointOptions {
        migration: Some(Migration::Strength(0.5)),
        statistics: Some(Rc::new(collector(Moments::Diagonal))),
        ..CheckpointOptions::default()
    };
    let out = folder.path().join("out");
    let error = quantize_checkpoint(&dir, &out, Scheme::Int8Dynamic, &options).unwrap_err();
    let error = error.to_string();
    assert!(
        error.starts_with("`migration` is enabled for a model `gemma3`, in which it finds nothing"),
        "{error}"
    );
    assert!(!out.exists());
}

#[test]
fn towers_of_images_stay_dense_and_experts_in_one_tensor_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let [dense, out] = ["dense", "out"].map(|name| folder.path().join(name));
    let mut tensors = llama(false);
    for tower in [
        "model.visual.blocks.0.attn.qkv",
        "vision_tower.layers.0.fc1",
    ] {
        tensors.push((format!("{tower}.weight"), random(&[96, WIDTH])));
    }
    save(&dense, &tensors, &config(false));
    let quantize = || quantize_checkpoint(&dense, &out, Scheme::Fp8, &CheckpointOptions::default());
    quantize().unwrap();
    let file = MappedFile::open(out.join("model.safetensors")).unwrap();
    for (name, _) in &tensors[tensors.len() - 2..] {
        assert_eq!(
            file.tensor(name).unwrap().kind(),
            Some(Kind::Float),
            "{name}"
        );
    }
    for name in ["gpt_oss", "qwen3_vl_moe"] {
        save(&dense, &tensors, &json!({"model_type": name}));
        let error = quantize().unwrap_err().to_string();
        let expected = format!("a {name} has one tensor for all experts of a layer");
        assert!(error.contains(&expected), "{error}");
    }
}

#[test]
fn invalid_folders_and_schemes_are_refused_and_leave_no_files() {
    let folder = tempfile::tempdir().unwrap();
    let dir = folder.path().join("dense");
    save(&dir, &llama(false), &config(false));
    let out = folder.path().join("out");
    let options = CheckpointOptions::default;
    let text = |result: Result<_, Error>| -> String {
        let _: &overdrive_quantization::CheckpointReport = match &result {
            Ok(report) => report,
            Err(error) => return error.to_string(),
        };
        panic!("it worked");
    };
    // 64 inputs have no groups of 128.
    let found = text(quantize_checkpoint(
        &dir,
        &out,
        "int4".parse().unwrap(),
        &options(),
    ));
    assert!(
        found.starts_with("cannot quantize the tensor `model.layers.0."),
        "{found}"
    );
    assert!(found.contains("group_size"), "{found}");
    let mut head = options();
    head.head = Some(Scheme::Int8Dynamic);
    let found = text(quantize_checkpoint(
        &dir,
        &out,
        "nf4".parse().unwrap(),
        &head,
    ));
    assert!(
        found.starts_with("`head` is int8; it must be nf4, as for the other layers"),
        "{found}"
    );
    let nothing = folder.path().join("nothing");
    let found = text(quantize_checkpoint(
        &nothing,
        &out,
        Scheme::Int8Dynamic,
        &options(),
    ));
    assert!(
        found.starts_with("cannot read") && found.contains("config.json"),
        "{found}"
    );
    fs::create_dir_all(&nothing).unwrap();
    fs::write(nothing.join("config.json"), "{}").unwrap();
    let found = text(quantize_checkpoint(
        &nothing,
        &out,
        Scheme::Int8Dynamic,
        &options(),
    ));
    assert!(
        found.ends_with("it has neither model.safetensors nor model.safetensors.index.json"),
        "{found}"
    );
    let index = json!({"weight_map": {"a": "../dense/model.safetensors"}});
    fs::write(
        nothing.join("model.safetensors.index.json"),
        index.to_string(),
    )
    .unwrap();
    let found = text(quantize_checkpoint(
        &nothing,
        &out,
        Scheme::Int8Dynamic,
        &options(),
    ));
    assert!(
        found.contains("the name of a file in the same folder"),
        "{found}"
    );
    let found = text(quantize_checkpoint(
        &dir,
        &dir,
        Scheme::Int8Dynamic,
        &options(),
    ));
    assert!(
        found.ends_with("different from that of `dir`, which it would overwrite"),
        "{found}"
    );
    let bad = llama(false)
        .into_iter()
        .map(|(name, tensor)| match name.as_str() {
            "model.layers.1.mlp.up_proj.weight" => (name, tensor / 0.0),
            _ => (name, tensor),
        });
    let broken = folder.path().join("broken");
    save(&broken, &bad.collect::<Vec<_>>(), &config(false));
    let found = text(quantize_checkpoint(
        &broken,
        &out,
        Scheme::Int8Dynamic,
        &options(),
    ));
    assert!(
        found.starts_with("cannot quantize the tensor `model.layers.1.mlp.up_proj.weight`: "),
        "{found}"
    );
    let mut left: Vec<_> = fs::read_dir(folder.path())
        .unwrap()
        .map(|e| e.unwrap().file_name())
        .collect();
    left.sort();
    assert_eq!(left, ["broken", "dense", "nothing"], "no folder is left");
    // The shapes are checked without the values.
    check_checkpoint(&broken, Scheme::Int8Dynamic, &options()).unwrap();
    let groups = GroupOptions {
        group_size: 33,
        ..GroupOptions::default()
    };
    let found = check_checkpoint(&dir, Scheme::Grouped(groups), &options());
    let found = found.unwrap_err().to_string();
    assert!(
        found.contains("`group_size` is 33; it must be 16, 32, 64, 128 or 256"),
        "{found}"
    );
    // A folder that this program has written is written again.
    for scheme in [Scheme::Int8Dynamic, "nf4".parse().unwrap()] {
        quantize_checkpoint(&dir, &out, scheme, &options()).unwrap();
        assert!(out.join("model.safetensors").exists());
    }
}
