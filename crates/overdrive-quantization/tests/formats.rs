//! Quantized weights in files: those of the Python libraries, our own, and damaged ones.
//! `fixtures/gen_formats.py` makes the fixture; `fixtures/check_written.py` is the other direction.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::collections::BTreeMap;

use overdrive_quantization::{QuantizationConfig, QuantizedWeight, Scheme};
use overdrive_safetensors::{MappedFile, write};
use proptest::prelude::*;
use serde_json::{Value, json};
use tch::{Device, Kind, Tensor};

fn fixture() -> MappedFile {
    let path = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/tests/fixtures/formats.safetensors"
    );
    MappedFile::open(path).expect("gen_formats.py makes it")
}

fn config_of(file: &MappedFile, module: &str) -> QuantizationConfig {
    let text = &file.metadata()[&format!("config.{module}")];
    QuantizationConfig::from_json(&serde_json::from_str(text).unwrap()).unwrap()
}

fn modules(file: &MappedFile) -> Vec<String> {
    let names = file.metadata().keys();
    names
        .filter_map(|key| key.strip_prefix("config.").map(str::to_owned))
        .collect()
}

fn largest(tensor: &Tensor) -> f64 {
    tensor.abs().max().double_value(&[])
}

#[test]
fn every_layout_of_the_python_world_is_read_as_it_reads_it() {
    let file = fixture();
    let modules = modules(&file);
    assert_eq!(modules.len(), 22);
    for module in modules {
        let config = config_of(&file, &module);
        assert!(config.is_stored(&file, &module).unwrap(), "{module}");
        let weight = config.read_weight(&file, &module).unwrap();
        let expected = file.tensor(&format!("expected.{module}")).unwrap();
        let expected = expected.copy_to_tensor(None, Device::Cpu).unwrap();
        // In the kind that the library dequantizes to.
        let kind = match module.as_str() {
            "bnb_nf4_single" => Kind::BFloat16,
            "bnb_fp4" => Kind::Half,
            _ => Kind::Float,
        };
        let found = weight.dequantize(kind).unwrap().to_kind(Kind::Float);
        let zero_points = ["asym", "act", "v2", "group", "row", "awq"];
        if zero_points.iter().any(|part| module.contains(part)) {
            let difference = largest(&(&found - &expected));
            assert!(
                difference <= 1e-7 * largest(&expected).max(1.0),
                "{module}: {difference:e}"
            );
        } else {
            assert_eq!(found, expected, "{module}");
        }
        // All tensors of the file are accounted for.
        let names = config.tensor_names(&module);
        for tensor in file.tensors() {
            if tensor.name().starts_with(&format!("{module}.")) {
                assert!(
                    names.iter().any(|name| name == tensor.name()),
                    "{}",
                    tensor.name()
                );
            }
        }
        // Rows one by one are the rows of the whole.
        let ids = Tensor::from_slice(&[3i64, 0, 20]);
        assert_eq!(weight.rows(&ids, Kind::Float).unwrap(), {
            weight
                .dequantize(Kind::Float)
                .unwrap()
                .index_select(0, &ids)
        });
    }
}

#[test]
fn schemes_of_files_are_the_schemes_of_their_configurations() {
    let file = fixture();
    for (module, scheme) in [
        ("bnb_nf4", "nf4"),
        ("bnb_nf4_single", "nf4-single"),
        ("bnb_fp4", "fp4"),
        ("bnb_int8", "llm-int8"),
        ("ct_int8", "int8"),
        ("ct_int8_packed", "int8-weight"),
        ("ct_int4", "int4-g32"),
        ("ct_int4_asym", "int4-g32-asym"),
        ("ct_fp8", "fp8"),
        ("gptq_4", "int4-g32"),
        ("gptq_8", "int8-g32"),
        ("awq_4", "int4-g32-asym"),
    ] {
        let config = config_of(&file, module);
        let weight = config.read_weight(&file, module).unwrap();
        assert_eq!(weight.scheme().to_string(), scheme, "{module}");
        assert_eq!(
            config.scheme().unwrap().unwrap().to_string(),
            scheme,
            "{module}"
        );
    }
    let config = config_of(&file, "bnb_int8");
    let weight = config.read_weight(&file, "bnb_int8").unwrap();
    assert_eq!(weight.scheme(), Scheme::LlmInt8 { threshold: 5.0 });
}

const SCHEMES: [&str; 16] = [
    "int8",
    "int8-weight",
    "llm-int8",
    "int4",
    "int4-g16",
    "int4-g32",
    "int4-g64-asym",
    "int8-g32",
    "int8-g128-asym",
    "nf4",
    "nf4-single",
    "nf4-b128",
    "fp4",
    "fp4-b32-single",
    "fp8",
    "int4-asym",
];

fn random(shape: [i64; 2], seed: i64) -> Tensor {
    // A generator of its own: tests run at once.
    let count = shape[0] * shape[1];
    let phase = Tensor::arange(count, (Kind::Double, Device::Cpu)) * 12.9898 + seed as f64;
    let noise = (phase.sin() * 43758.5453).frac();
    (noise * 0.1).to_kind(Kind::Float).view(shape)
}

fn written(
    config: &QuantizationConfig,
    weight: &QuantizedWeight,
) -> (tempfile::TempDir, MappedFile) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("weights.safetensors");
    let tensors = config.write_weight(weight, "a.b").unwrap();
    write(&path, &tensors, &BTreeMap::new()).unwrap();
    (folder, MappedFile::open(&path).unwrap())
}

#[test]
fn weights_come_back_from_files_as_they_were() {
    for name in SCHEMES {
        let scheme: Scheme = name.parse().unwrap();
        for shape in [[24, 256], [13, 128]] {
            let weight = QuantizedWeight::quantize(&random(shape, 1), scheme).unwrap();
            let config = QuantizationConfig::for_scheme(scheme, vec!["lm_head".to_owned()]);
            // As it would be read from config.json.
            let text = config.to_json().unwrap().to_string();
            let config: QuantizationConfig = serde_json::from_str(&text).unwrap();
            let (_folder, file) = written(&config, &weight);
            let back = config.read_weight(&file, "a.b").unwrap();
            assert_eq!(back.size(), shape);
            assert_eq!(back.scheme(), scheme, "{name}");
            assert_eq!(back.bytes(), weight.bytes(), "{name}");
            let [found, expected] = [&back, &weight].map(|w| w.dequantize(Kind::Float).unwrap());
            if name == "llm-int8" || name.contains("asym") {
                // The largest magnitude is written and divided by 127 again; zero points are written, and
                // multiplied with the scale again.
                assert!(largest(&(found - expected)) <= 1e-7, "{name}");
            } else {
                assert_eq!(found, expected, "{name}");
            }
        }
    }
}

#[test]
fn names_of_schemes_are_read_back() {
    for name in SCHEMES.iter().chain(Scheme::NAMES.iter()) {
        let scheme: Scheme = name.parse().unwrap();
        assert_eq!(
            scheme.to_string().parse::<Scheme>().unwrap(),
            scheme,
            "{name}"
        );
    }
    for name in [
        "int5", "int4-g7", "int4-g12", "nf4-b48", "int4-g", "fp4-x", "",
    ] {
        assert!(name.parse::<Scheme>().is_err(), "{name}");
    }
}

#[test]
fn exceptions_are_those_of_the_lists() {
    let config = QuantizationConfig::for_scheme("nf4".parse().unwrap(), vec!["lm_head".into()]);
    assert!(!config.is_quantized("lm_head").unwrap());
    assert!(config.is_quantized("model.layers.0.mlp.up_proj").unwrap());
    let config = QuantizationConfig::for_scheme(Scheme::Int8Dynamic, vec!["re:.*head".into()]);
    assert!(!config.is_quantized("lm_head").unwrap());
    assert!(config.is_quantized("model.layers.0.mlp.up_proj").unwrap());
    let config =
        QuantizationConfig::from_json(&json!({"quant_method": "gptq", "bits": 4})).unwrap();
    assert!(!config.is_quantized("lm_head").unwrap());
}

#[test]
fn configurations_that_cannot_be_read_are_refused_by_name() {
    for (config, expected) in [
        (
            json!({"quant_method": "aqlm"}),
            "one of bitsandbytes, compressed-tensors, gptq, awq",
        ),
        (json!({"bits": 4}), "is absent"),
        (json!({"quant_method": "gptq", "bits": 3}), "4 or 8"),
        (
            json!({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}),
            "gptq_v2",
        ),
        (json!({"quant_method": "gptq"}), "missing field `bits`"),
        (json!({"quant_method": "awq", "version": "gemv"}), "gemm"),
        (
            json!({"quant_method": "bitsandbytes"}),
            "one of the two to be true",
        ),
        (
            json!({"quant_method": "bitsandbytes", "load_in_4bit": true, "bnb_4bit_quant_type": "af4"}),
            "nf4 or fp4",
        ),
        (
            json!({"quant_method": "compressed-tensors", "config_groups": {}}),
            "at least one",
        ),
        (
            json!({"quant_method": "compressed-tensors", "config_groups": {"g": {
                "targets": ["Linear"], "weights": {"num_bits": 4, "type": "float", "strategy": "group",
                "group_size": 16}}}}),
            "4 bits of float by group",
        ),
        (
            json!({"quant_method": "compressed-tensors", "config_groups": {"W8A8": ["Linear"]}}),
            "W8A8",
        ),
        (json!(3), "is absent"),
    ] {
        let error = QuantizationConfig::from_json(&config)
            .unwrap_err()
            .to_string();
        assert!(error.contains(expected), "{error}");
    }
    // Before there were other methods, transformers wrote no name.
    let config = json!({"load_in_4bit": true, "bnb_4bit_quant_type": "nf4"});
    let config = QuantizationConfig::from_json(&config).unwrap();
    assert_eq!(config.method(), "bitsandbytes");
}

/// Writes what a good file has after `change`, and returns what reading says.
fn reading(module: &str, change: impl Fn(&mut BTreeMap<String, Tensor>, &mut Value)) -> String {
    let file = fixture();
    let mut config: Value =
        serde_json::from_str(&file.metadata()[&format!("config.{module}")]).unwrap();
    let mut tensors: BTreeMap<String, Tensor> = file
        .tensors()
        .into_iter()
        .filter_map(|tensor| {
            let part = tensor
                .name()
                .strip_prefix(&format!("{module}."))?
                .to_owned();
            Some((part, tensor.copy_to_tensor(None, Device::Cpu).unwrap()))
        })
        .collect();
    change(&mut tensors, &mut config);
    let tensors: Vec<(String, Tensor)> = tensors
        .into_iter()
        .map(|(part, tensor)| (format!("{module}.{part}"), tensor))
        .collect();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("damaged.safetensors");
    write(&path, &tensors, &BTreeMap::new()).unwrap();
    let file = MappedFile::open(&path).unwrap();
    match QuantizationConfig::from_json(&config) {
        Ok(config) => match config.read_weight(&file, module) {
            Ok(weight) => {
                drop(weight.dequantize(Kind::Float).unwrap());
                "read".to_owned()
            }
            Err(error) => error.to_string(),
        },
        Err(error) => error.to_string(),
    }
}

fn state(tensors: &mut BTreeMap<String, Tensor>, change: impl Fn(&mut Value)) {
    let name = "weight.quant_state.bitsandbytes__nf4";
    let bytes = Vec::<u8>::try_from(&tensors[name]).unwrap();
    let mut state: Value = serde_json::from_slice(&bytes).unwrap();
    change(&mut state);
    let bytes = state.to_string().into_bytes();
    tensors.insert(name.to_owned(), Tensor::from_slice(&bytes));
}

#[test]
fn lying_files_are_refused_with_the_reason() {
    type Change = fn(&mut BTreeMap<String, Tensor>, &mut Value);
    let cases: [(&str, Change, &str); 22] = [
        (
            "bnb_nf4",
            |t, _| state(t, |s| s["blocksize"] = json!(128)),
            "[24]",
        ),
        (
            "bnb_nf4",
            |t, _| state(t, |s| s["blocksize"] = json!(48)),
            "power of two from 32",
        ),
        (
            "bnb_nf4",
            |t, _| state(t, |s| s["shape"] = json!([24, 256])),
            "[3072]",
        ),
        (
            "bnb_nf4",
            |t, _| state(t, |s| s["shape"] = json!([i64::MAX, 2])),
            "positive numbers",
        ),
        (
            "bnb_nf4",
            |t, _| state(t, |s| s["shape"] = json!([-24, -128])),
            "positive numbers",
        ),
        (
            "bnb_nf4",
            |t, _| state(t, |s| s["shape"] = json!([3072])),
            "(O, I) was expected",
        ),
        (
            "bnb_nf4",
            |t, _| state(t, |s| s["quant_type"] = json!("fp4")),
            "says fp4",
        ),
        (
            "bnb_nf4",
            |t, _| state(t, |s| s["nested_blocksize"] = json!(64)),
            "blocks of 256",
        ),
        (
            "bnb_nf4",
            |t, _| state(t, |s| s["nested_offset"] = Value::Null),
            "about None",
        ),
        (
            "bnb_nf4",
            |t, _| drop(t.remove("weight.absmax")),
            "no tensor `bnb_nf4.weight.absmax`",
        ),
        (
            "bnb_nf4",
            |t, _| {
                drop(
                    t.get("weight.nested_absmax")
                        .unwrap()
                        .shallow_clone()
                        .fill_(f64::NAN),
                )
            },
            "NaN at place 0",
        ),
        (
            "bnb_nf4",
            |t, _| {
                drop(
                    t.get("weight.quant_map")
                        .unwrap()
                        .shallow_clone()
                        .fill_(0.5),
                )
            },
            "its book of numbers has 0.5",
        ),
        (
            "bnb_nf4",
            |t, _| {
                t.insert(
                    "weight.quant_state.bitsandbytes__nf4".into(),
                    Tensor::from_slice(b"{}"),
                );
            },
            "no JSON of bitsandbytes",
        ),
        ("bnb_int8", |t, _| drop(t.remove("SCB")), "not quantized"),
        (
            "bnb_int8",
            |t, _| drop(t.get("SCB").unwrap().shallow_clone().fill_(f64::INFINITY)),
            "inf at place 0",
        ),
        (
            "ct_int4",
            |t, _| {
                t.insert("weight_shape".into(), Tensor::from_slice(&[24i64, 1 << 40]));
            },
            "do not hold",
        ),
        (
            "ct_int4",
            |_, c| c["config_groups"]["group_0"]["weights"]["group_size"] = json!(64),
            "[24, 2]",
        ),
        (
            "ct_int4_asym",
            |t, _| drop(t.remove("weight_zero_point")),
            "weight_zero_point",
        ),
        (
            "ct_fp8",
            |t, _| {
                drop(
                    t.get("weight")
                        .unwrap()
                        .view_dtype(Kind::Uint8)
                        .get(0)
                        .fill_(0x7F),
                )
            },
            "NaN among them",
        ),
        (
            "gptq_4_act",
            |t, _| drop(t.get("g_idx").unwrap().shallow_clone().fill_(1)),
            "does not give each",
        ),
        (
            "gptq_4_act",
            |t, _| drop(t.get("g_idx").unwrap().get(0).fill_(-5)),
            "does not give each",
        ),
        (
            "awq_4",
            |t, _| {
                t.insert("qzeros".into(), Tensor::from_slice(&[1i32; 9]).view([3, 3]));
            },
            "[4, 3]",
        ),
    ];
    for (module, change, expected) in cases {
        let found = reading(module, change);
        assert!(
            found.contains(expected),
            "{module}: {found}, expected {expected}"
        );
    }
}

/// One of the ways in which a tensor can be wrong.
#[derive(Debug, Clone)]
enum Damage {
    Remove,
    Bytes(Vec<u8>),
    Shorter(usize),
    Shape(Vec<i64>),
    Kind(usize),
}

fn damage() -> impl Strategy<Value = Damage> {
    prop_oneof![
        Just(Damage::Remove),
        prop::collection::vec(any::<u8>(), 1..40).prop_map(Damage::Bytes),
        (1usize..200).prop_map(Damage::Shorter),
        prop::collection::vec(0i64..40, 0..4).prop_map(Damage::Shape),
        (0usize..6).prop_map(Damage::Kind),
    ]
}

fn damaged(tensor: &Tensor, damage: &Damage) -> Option<Tensor> {
    let kind = tensor.kind();
    let size = kind.elt_size_in_bytes();
    let flat = tensor.contiguous().flatten(0, -1);
    let mut bytes = Vec::<u8>::try_from(flat.view_dtype(Kind::Uint8)).unwrap();
    let mut shape = tensor.size();
    match damage {
        Damage::Remove => return None,
        Damage::Bytes(noise) => {
            for (at, byte) in noise.iter().enumerate() {
                let place = (at * 7919 + usize::from(*byte) * 31) % bytes.len().max(1);
                if let Some(slot) = bytes.get_mut(place) {
                    *slot = *byte;
                }
            }
        }
        Damage::Shorter(by) => {
            bytes.truncate(bytes.len().saturating_sub(*by) / size * size);
            shape = vec![(bytes.len() / size) as i64];
        }
        Damage::Shape(new) => {
            let count: i64 = new.iter().product();
            bytes.resize(count.unsigned_abs() as usize * size, 0x5A);
            shape.clone_from(new);
        }
        Damage::Kind(index) => {
            let kinds = [
                Kind::Uint8,
                Kind::Int8,
                Kind::Int,
                Kind::Float,
                Kind::Half,
                Kind::Int64,
            ];
            return Some(tensor.to_kind(kinds[*index]));
        }
    }
    Some(Tensor::from_data_size(&bytes, &shape, kind))
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, ..ProptestConfig::default() })]

    #[test]
    fn damaged_files_are_read_or_refused_without_a_panic(
        module in any::<prop::sample::Index>(),
        target in any::<prop::sample::Index>(),
        damage in damage(),
    ) {
        let names = modules(&fixture());
        let module = module.get(&names);
        reading(module, |tensors, _| {
            let parts: Vec<String> = tensors.keys().cloned().collect();
            let part = target.get(&parts);
            let tensor = tensors.remove(part).unwrap();
            if let Some(tensor) = damaged(&tensor, &damage) {
                tensors.insert(part.clone(), tensor);
            }
        });
    }

    #[test]
    fn lying_states_are_read_or_refused_without_a_panic(
        block in prop_oneof![Just(64i64), any::<i64>(), 0i64..5000],
        shape in prop::collection::vec(prop_oneof![any::<i64>(), 0i64..4000], 0..4),
        offset in any::<f64>(),
        nested in prop_oneof![Just(256i64), any::<i64>()],
    ) {
        reading("bnb_nf4", |tensors, _| {
            state(tensors, |state| {
                state["blocksize"] = json!(block);
                state["shape"] = json!(shape);
                state["nested_offset"] = json!(offset);
                state["nested_blocksize"] = json!(nested);
            });
        });
    }

    #[test]
    fn lying_configurations_are_read_or_refused_without_a_panic(
        module in any::<prop::sample::Index>(),
        bits in any::<u8>(),
        group in prop_oneof![-2i64..300, any::<i64>()],
        strategy in prop_oneof![Just("group"), Just("channel"), Just("tensor"), Just("block")],
        symmetric in any::<bool>(),
    ) {
        let names = modules(&fixture());
        let module: &String = module.get(&names);
        reading(module, |_, config| {
            match config["quant_method"].as_str() {
                Some("compressed-tensors") => {
                    let weights = &mut config["config_groups"]["group_0"]["weights"];
                    weights["num_bits"] = json!(if bits % 2 == 0 { 4 } else { 8 });
                    weights["group_size"] = json!(group);
                    weights["strategy"] = json!(strategy);
                    weights["symmetric"] = json!(symmetric);
                }
                _ => {
                    config["group_size"] = json!(group);
                    config["bits"] = json!(if symmetric { 4 } else { bits });
                }
            }
        });
    }
}
