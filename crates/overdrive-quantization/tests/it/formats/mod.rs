//! Quantized weights in files: those of the Python libraries, our own, and damaged ones.
//! `fixtures/gen_formats.py` makes the fixture; `fixtures/check_written.py` is the other direction.

mod damaged;

use std::collections::BTreeMap;

use overdrive_quantization::{
    BitsAndBytesConfig, CalibrationOptions, ClipOptions, GroupOptions, GroupScales,
    QuantizationConfig, QuantizedWeight, Scheme, quantize_calibrated,
};
use overdrive_safetensors::{MappedFile, write};
use serde_json::json;
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
fn every_layout_is_written_with_its_method_first() {
    let weights = json!({"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": true});
    let groups = json!({"group_0": {"targets": ["Linear"], "weights": weights}});
    let methods = [
        ("bitsandbytes", json!({"load_in_4bit": true})),
        ("compressed-tensors", json!({"config_groups": groups})),
        ("gptq", json!({"bits": 4, "group_size": 128})),
        ("awq", json!({"bits": 4, "group_size": 128})),
        ("mxfp4", json!({})),
        ("fp8", json!({})),
        ("modelopt", json!({"quant_algo": "FP8"})),
    ];
    for (method, mut given) in methods {
        given["quant_method"] = json!(method);
        let config = QuantizationConfig::from_json(&given).unwrap();
        assert_eq!(config.method(), method);
        let written = config.to_json().unwrap();
        let first = written.as_object().unwrap().iter().next().unwrap();
        assert_eq!(
            (first.0.as_str(), first.1.as_str()),
            ("quant_method", Some(method))
        );
        assert_eq!(serde_json::to_value(&config).unwrap(), written, "{method}");
        let back: QuantizationConfig = serde_json::from_value(written).unwrap();
        assert_eq!(back, config);
    }
}

#[test]
fn every_layout_is_read_as_the_python_libraries_read_it() {
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
        ("bnb_int8", "llm-int8-t5"),
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
}

/// MXFP4 and NVFP4: read, made and written as compressed-tensors does (`fixtures/gen_microscaling.py`).
#[test]
fn floats_of_four_bits_are_those_of_compressed_tensors() {
    let path = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/tests/fixtures/microscaling.safetensors"
    );
    let file = MappedFile::open(path).expect("gen_microscaling.py makes it");
    let tensor = |name: String| {
        file.tensor(&name)
            .unwrap()
            .copy_to_tensor(None, Device::Cpu)
            .unwrap()
    };
    for (module, bits) in [("mxfp4", 4.25), ("nvfp4", 4.5)] {
        let config = config_of(&file, module);
        assert_eq!(config.scheme().unwrap().unwrap().to_string(), module);
        let weight = config.read_weight(&file, module).unwrap();
        let expected = tensor(format!("expected.{module}"));
        assert_eq!(
            weight.dequantize(Kind::Float).unwrap(),
            expected,
            "{module}"
        );
        // Besides the codes and scales there are tables of a few hundred bytes.
        assert!(
            weight.bits_per_weight() < bits + 4.0,
            "{}",
            weight.bits_per_weight()
        );

        let dense = tensor(format!("dense.{module}"));
        let own = QuantizedWeight::quantize(&dense, weight.scheme()).unwrap();
        assert_eq!(own.dequantize(Kind::Float).unwrap(), expected, "{module}");
        let layout = QuantizationConfig::for_scheme(weight.scheme(), Vec::new());
        for written in [&config, &layout] {
            for (name, tensor_of_own) in written.write_weight(&own, module).unwrap() {
                let expected = tensor(name.clone());
                assert_eq!(tensor_of_own.kind(), expected.kind(), "{name}");
                let bytes = |tensor: &Tensor| tensor.contiguous().view_dtype(Kind::Uint8);
                assert_eq!(bytes(&tensor_of_own), bytes(&expected), "{name}");
            }
        }
    }
}

#[test]
fn experts_of_gpt_oss_are_written_as_they_were_read() {
    let config = json!({"quant_method": "mxfp4", "modules_to_not_convert": ["a.router"], "dequantize": false});
    let layout = QuantizationConfig::from_json(&config).unwrap();
    assert_eq!(
        (layout.method(), layout.to_json().unwrap()),
        ("mxfp4", config)
    );
    assert_eq!(layout.scheme().unwrap(), Some(Scheme::Mxfp4));
    for (module, is_quantized) in [
        ("a.experts.0", true),
        ("a.router", false),
        ("lm_head", false),
    ] {
        assert_eq!(
            layout.is_quantized(module).unwrap(),
            is_quantized,
            "{module}"
        );
    }
    let bytes: Vec<u8> = (0..4 * 2 * 16).map(|at| (at * 37 % 256) as u8).collect();
    let blocks = Tensor::from_slice(&bytes).view([4, 2, 16]);
    let scales = Tensor::from_slice(&[120u8, 121, 122, 123, 124, 125, 126, 127]).view([4, 2]);
    let path = std::env::temp_dir().join(format!(
        "overdrive-mxfp4-{}.safetensors",
        std::process::id()
    ));
    let tensors = [
        ("a.blocks".to_owned(), blocks),
        ("a.scales".to_owned(), scales),
    ];
    overdrive_safetensors::write(&path, &tensors, &Default::default()).unwrap();
    let file = MappedFile::open(&path).unwrap();
    assert!(layout.is_stored(&file, "a").unwrap() && !layout.is_stored(&file, "b").unwrap());
    let weight = layout.read_weight(&file, "a").unwrap();
    assert_eq!((weight.size(), weight.scheme()), ([4, 64], Scheme::Mxfp4));
    assert_eq!(layout.write_weight(&weight, "a").unwrap(), tensors);
    let dense = Tensor::ones([4, 64], (Kind::Float, Device::Cpu));
    let other = QuantizedWeight::quantize(&dense, "nf4".parse().unwrap()).unwrap();
    let refused = layout.write_weight(&other, "a").unwrap_err();
    assert!(refused.to_string().contains("must be mxfp4"), "{refused}");
    std::fs::remove_file(path).unwrap();
}

#[test]
fn scales_that_are_not_numbers_are_refused() {
    let codes = || Tensor::zeros([2, 32], (Kind::Uint8, Device::Cpu));
    let scales = |width, code: i64| Tensor::full([2, width], code, (Kind::Uint8, Device::Cpu));
    let error = QuantizedWeight::from_mxfp4(codes(), scales(2, 255)).unwrap_err();
    assert!(error.to_string().contains("`scales`"), "{error}");
    for nan in [0x7F, 0xFF] {
        let error = QuantizedWeight::from_nvfp4(codes(), scales(4, nan), 1.0).unwrap_err();
        assert!(error.to_string().contains("NaN"), "{error}");
    }
    for global in [0.0, -1.0, f32::NAN, 1e-45] {
        let error = QuantizedWeight::from_nvfp4(codes(), scales(4, 0), global).unwrap_err();
        assert!(error.to_string().contains("`global_scale`"), "{error}");
    }
    let error = QuantizedWeight::from_mxfp4(codes(), scales(3, 0)).unwrap_err();
    assert!(error.to_string().contains("`scales`"), "{error}");
    let dense = Tensor::ones([4, 48], (Kind::Float, Device::Cpu));
    let error = QuantizedWeight::quantize(&dense, Scheme::Mxfp4).unwrap_err();
    assert!(
        error
            .to_string()
            .contains("mxfp4 for a weight with 48 inputs"),
        "{error}"
    );
    assert!(QuantizedWeight::quantize(&dense, Scheme::Nvfp4).is_ok());
    // Zeros stay zeros, and numbers too small for a scale become zeros.
    for number in [0.0, 1e-42] {
        let dense = Tensor::full([4, 64], number, (Kind::Float, Device::Cpu));
        for scheme in [Scheme::Mxfp4, Scheme::Nvfp4] {
            let weight = QuantizedWeight::quantize(&dense, scheme).unwrap();
            let back = weight.dequantize(Kind::Float).unwrap();
            assert!(largest(&back) <= 2e-38, "{scheme} {number}");
        }
    }
}

const SCHEMES: [&str; 18] = [
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
    "mxfp4",
    "nvfp4",
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
            if name == "llm-int8" || name == "int8-g128-asym" {
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
fn weights_of_other_libraries_are_written_as_their_configuration_says() {
    let file = fixture();
    for (module, format, scales) in [
        ("ct_fp8_tensor", "float-quantized", [24, 1]),
        ("ct_fp8", "float-quantized", [24, 1]),
        ("ct_int8_tensor", "int-quantized", [24, 1]),
        ("ct_int8_packed", "pack-quantized", [24, 1]),
        ("ct_int8_asym", "pack-quantized", [24, 1]),
        ("ct_int8_group", "pack-quantized", [24, 4]),
        // 96 inputs are three groups of the kernels.
        ("ct_int4_channel", "pack-quantized", [24, 1]),
        ("ct_int4_asym", "pack-quantized", [21, 4]),
    ] {
        let config = config_of(&file, module);
        let weight = config.read_weight(&file, module).unwrap();
        // The name of the format of weights that are written in another one.
        let mut json = config.to_json().unwrap();
        json["format"] = "naive-quantized".into();
        let config = QuantizationConfig::from_json(&json).unwrap().for_writing();
        let json = config.to_json().unwrap();
        assert_eq!(json["format"], format, "{module}");
        assert_eq!(
            json["config_groups"]["group_0"]["format"], format,
            "{module}"
        );
        let (_folder, written) = written(&config, &weight);
        let stored = written.tensor("a.b.weight_scale").unwrap();
        assert_eq!(stored.shape(), scales, "{module}");
        let back = config.read_weight(&written, "a.b").unwrap();
        assert_eq!(back.scheme(), weight.scheme(), "{module}");
        let [found, expected] = [&back, &weight].map(|w| w.dequantize(Kind::Float).unwrap());
        assert!(largest(&(found - expected)) <= 1e-7, "{module}");
    }

    // All zero points of a weight may be the middle of the range.
    for (module, scheme) in [("ct_int4_asym", "int4-g32"), ("ct_int8_group", "int8-g32")] {
        let config = config_of(&file, module).for_writing();
        let weight =
            QuantizedWeight::quantize(&random([21, 128], 1), scheme.parse().unwrap()).unwrap();
        let (_folder, written) = written(&config, &weight);
        let back = config.read_weight(&written, "a.b").unwrap();
        let [found, expected] = [&back, &weight].map(|w| w.dequantize(Kind::Float).unwrap());
        assert_eq!(found, expected, "{module}");
    }

    // A weight that was quantized again has scales of its own in each group.
    let config = config_of(&file, "ct_int4_channel").for_writing();
    let again =
        QuantizedWeight::quantize(&random([24, 96], 1), "int4-g32".parse().unwrap()).unwrap();
    let error = config.write_weight(&again, "a.b").unwrap_err().to_string();
    assert!(
        error.contains("3 groups in a row, and its configuration has 1"),
        "{error}"
    );
}

#[test]
fn blocks_of_compressed_tensors_have_their_scales_and_are_written_again() {
    let layout = |structure: [i64; 2]| {
        let weights = json!({
            "num_bits": 8, "type": "float", "symmetric": true, "strategy": "block", "block_structure": structure,
        });
        let activations = json!({
            "num_bits": 8, "type": "float", "strategy": "group", "group_size": 128, "dynamic": true,
        });
        json!({
            "quant_method": "compressed-tensors", "format": "float-quantized", "ignore": ["lm_head"],
            "config_groups": {
                "group_0": {"targets": ["Linear"], "weights": weights, "input_activations": activations},
            },
        })
    };
    let config = QuantizationConfig::from_json(&layout([128, 128])).unwrap();
    assert_eq!(config.scheme().unwrap(), Some(Scheme::Fp8Blocks));
    let codes = (random([200, 300], 1) * 4000.0).to_kind(Kind::Float8e4m3fn);
    let scales = random([2, 3], 2);
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("weights.safetensors");
    let tensors = [
        ("a.b.weight".to_owned(), codes.shallow_clone()),
        ("a.b.weight_scale".to_owned(), scales.shallow_clone()),
    ];
    write(&path, &tensors, &BTreeMap::new()).unwrap();
    let weight = config
        .read_weight(&MappedFile::open(&path).unwrap(), "a.b")
        .unwrap();
    let by_element = scales
        .repeat_interleave_self_int(128, 0, None)
        .repeat_interleave_self_int(128, 1, None);
    let by_element = by_element.narrow(0, 0, 200).narrow(1, 0, 300);
    let expected = codes.to_kind(Kind::Float) * by_element;
    assert_eq!(weight.dequantize(Kind::Float).unwrap(), expected);

    let (_folder, again) = written(&config.for_writing(), &weight);
    for (name, tensor) in tensors {
        let stored = again
            .tensor(&name)
            .unwrap()
            .copy_to_tensor(None, Device::Cpu)
            .unwrap();
        assert_eq!(
            stored.to_kind(Kind::Float),
            tensor.to_kind(Kind::Float),
            "{name}"
        );
    }

    let error = QuantizationConfig::from_json(&layout([64, 128]))
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("8-bit float by block of 64 by 128"),
        "{error}"
    );
}

#[test]
fn scales_in_files_are_of_the_kind_they_were_made_in() {
    for symmetric in [true, false] {
        for (scales, bits) in [(GroupScales::Half, 4.5), (GroupScales::Float, 5.0)] {
            let options = GroupOptions {
                group_size: 32,
                symmetric,
                ..GroupOptions::default()
            };
            let dense = random([24, 256], 2);
            let weight = QuantizedWeight::quantize_groups(&dense, options, scales).unwrap();
            let config = QuantizationConfig::for_scheme(Scheme::Grouped(options), Vec::new());
            let (_folder, file) = written(&config, &weight);
            let stored = file.tensor("a.b.weight_scale").unwrap();
            let kind = match scales {
                GroupScales::Half => Kind::Half,
                GroupScales::Float => Kind::Float,
            };
            assert_eq!(stored.kind(), Some(kind));
            let back = config.read_weight(&file, "a.b").unwrap();
            let of_offsets = if symmetric { 0.0 } else { bits - 4.0 };
            assert_eq!(back.bits_per_weight(), bits + of_offsets);
        }
    }
}

/// bf16 has fewer significant bits than f16.
#[test]
fn scales_of_bf16_are_kept_in_f16_where_they_are_not_tiny() {
    let config = QuantizationConfig::for_scheme("int4-g32".parse().unwrap(), Vec::new());
    let weight = QuantizedWeight::quantize(&random([24, 256], 3), "int4-g32".parse().unwrap());
    let mut tensors = config.write_weight(&weight.unwrap(), "a.b").unwrap();
    let folder = tempfile::tempdir().unwrap();
    for (factor, bits) in [(1.0, 4.5), (1e-9, 5.0)] {
        for (name, tensor) in &mut tensors {
            if name == "a.b.weight_scale" {
                *tensor = (tensor.to_kind(Kind::Float) * factor).to_kind(Kind::BFloat16);
            }
        }
        let path = folder.path().join(format!("{factor}.safetensors"));
        write(&path, &tensors, &BTreeMap::new()).unwrap();
        let file = MappedFile::open(&path).unwrap();
        let back = config.read_weight(&file, "a.b").unwrap();
        assert_eq!(back.bits_per_weight(), bits);
        // Of ±8, 7 and so on steps: the largest tells the scale.
        let stored = file.tensor("a.b.weight_scale").unwrap();
        let scales = stored
            .copy_to_tensor(Some(Kind::Float), Device::Cpu)
            .unwrap();
        let steps = back.dequantize(Kind::Float).unwrap().view([24, 8, 32]) / scales.unsqueeze(-1);
        assert_eq!(steps, steps.round());
    }
}

#[test]
fn searched_ranges_leave_zero_points_that_files_hold() {
    let scheme: Scheme = "int4-g32-asym".parse().unwrap();
    let options = CalibrationOptions {
        clip: Some(ClipOptions::default()),
        ..CalibrationOptions::default()
    };
    let dense = random([24, 256], 4) + 0.03;
    let weight = quantize_calibrated(&dense, scheme, None, &options).unwrap();
    assert_eq!(weight.bits_per_weight(), 5.0);
    let config = QuantizationConfig::for_scheme(scheme, Vec::new());
    let (_folder, file) = written(&config, &weight);
    let back = config.read_weight(&file, "a.b").unwrap();
    assert_eq!(
        back.dequantize(Kind::Float).unwrap(),
        weight.dequantize(Kind::Float).unwrap()
    );
}

#[test]
fn an_infinite_threshold_is_written_as_bitsandbytes_zero() {
    let scheme = Scheme::LlmInt8 {
        threshold: f64::INFINITY,
    };
    let own = QuantizationConfig::BitsAndBytes(BitsAndBytesConfig {
        load_in_8bit: true,
        llm_int8_threshold: f64::INFINITY,
        llm_int8_skip_modules: Some(Vec::new()),
        ..BitsAndBytesConfig::default()
    });
    let zero = Scheme::LlmInt8 { threshold: 0.0 };
    for config in [QuantizationConfig::for_scheme(scheme, Vec::new()), own] {
        let json = config.to_json().unwrap();
        assert_eq!(json["llm_int8_threshold"], 0.0);
        assert_eq!(
            QuantizationConfig::from_json(&json).unwrap(),
            QuantizationConfig::for_scheme(zero, Vec::new())
        );
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
    let scheme = Scheme::LlmInt8 { threshold: 5.5 };
    assert_eq!(scheme.to_string().parse::<Scheme>().unwrap(), scheme);
    for name in [
        "int5",
        "llm-int8-t",
        "llm-int8-t-1",
        "fp8-blocks",
        "int4-g7",
        "int4-g12",
        "nf4-b48",
        "int4-g",
        "fp4-x",
        "",
    ] {
        assert!(name.parse::<Scheme>().is_err(), "{name}");
    }
}

#[test]
fn modules_in_the_lists_of_exceptions_are_not_quantized() {
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
fn a_target_of_compressed_tensors_that_names_a_module_is_no_class() {
    let scheme: Scheme = "int4-g32".parse().unwrap();
    let weight = QuantizedWeight::quantize(&random([24, 256], 5), scheme).unwrap();
    let one = QuantizationConfig::for_scheme(scheme, Vec::new());
    let (_folder, file) = written(&one, &weight);
    let group = one.to_json().unwrap()["config_groups"]["group_0"].clone();
    let with = |targets: &str| {
        let mut group = group.clone();
        group["targets"] = json!([targets]);
        group
    };
    let eight_bits = |targets: &str| {
        let weights = json!({"num_bits": 8, "type": "int", "strategy": "channel"});
        json!({"targets": [targets], "weights": weights})
    };
    for (first, second) in [
        ("lm_head", "Linear"),
        ("Embedding", "Linear"),
        ("LlamaAttention", "Linear"),
        ("lm_head", "LlamaMLP"),
        ("Embedding", "LlamaMLP"),
    ] {
        let config = json!({
            "quant_method": "compressed-tensors",
            "config_groups": {"group_0": eight_bits(first), "group_1": with(second)},
        });
        let config = QuantizationConfig::from_json(&config).unwrap();
        let back = config.read_weight(&file, "a.b").unwrap();
        assert_eq!(back.scheme(), scheme, "{first}, {second}");
        assert!(config.is_quantized("lm_head").unwrap());
    }
    // A module that no group describes is not quantized.
    let config = json!({
        "quant_method": "compressed-tensors",
        "config_groups": {"group_0": eight_bits("lm_head")},
    });
    let config = QuantizationConfig::from_json(&config).unwrap();
    assert!(!config.is_quantized("a.b").unwrap() && config.is_quantized("lm_head").unwrap());
}

#[test]
fn entries_of_lists_follow_the_new_names_of_the_modules_that_they_match() {
    let names = [
        (
            "model.language_model.layers.0.up_proj",
            "model.layers.0.up_proj",
        ),
        (
            "model.language_model.layers.1.up_proj",
            "model.layers.1.up_proj",
        ),
        // An older name of the same module.
        (
            "language_model.model.layers.0.up_proj",
            "model.layers.0.up_proj",
        ),
        ("lm_head", "lm_head"),
    ]
    .map(|(old, new)| (old.to_owned(), new.to_owned()));
    let both = json!(["model.layers.0.up_proj", "model.layers.1.up_proj"]);
    for (entry, expected) in [
        ("Linear", json!(["Linear"])),
        ("re:.*up_proj", json!(["re:.*up_proj"])),
        ("re:.*layers.1", json!(["re:.*layers.1"])),
        ("lm_head", json!(["lm_head"])),
        ("model.visual.blocks.0", json!(["model.visual.blocks.0"])),
        (
            "model.language_model.layers.1.up_proj",
            json!(["model.layers.1.up_proj"]),
        ),
        (
            "language_model.model.layers.0.up_proj",
            json!(["model.layers.0.up_proj"]),
        ),
        ("re:.*language_model.*", both.clone()),
        (r"re:model\.language_model\..*proj", both),
        // It matches no module of the multimodal model.
        ("re:model.layers", json!([])),
    ] {
        let group = json!({"targets": [entry], "weights": {"num_bits": 8}});
        let config = json!({
            "quant_method": "compressed-tensors", "config_groups": {"group_0": group}, "ignore": [entry],
        });
        let config = QuantizationConfig::from_json(&config).unwrap();
        let found = config.renamed(&names).unwrap().to_json().unwrap();
        assert_eq!(found["ignore"], expected, "{entry}");
        assert_eq!(
            found["config_groups"]["group_0"]["targets"], expected,
            "{entry}"
        );
    }
    let bad = json!({
        "quant_method": "compressed-tensors", "config_groups": {"g": {"targets": ["re:("], "weights": {}}},
    });
    let error = QuantizationConfig::from_json(&bad).unwrap().renamed(&names);
    assert!(
        error
            .unwrap_err()
            .to_string()
            .contains("regular expression")
    );
}

#[test]
fn configurations_that_cannot_be_read_are_refused_by_name() {
    for (config, expected) in [
        (
            json!({"quant_method": "aqlm"}),
            "one of bitsandbytes, compressed-tensors, gptq, awq, mxfp4, fp8, modelopt; use a copy of the model in bf16",
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
            "or false with load_in_8bit true",
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
            "4-bit float by group",
        ),
        (
            json!({"quant_method": "compressed-tensors", "config_groups": {"W8A8": ["Linear"]}}),
            "W8A8",
        ),
        (
            json!({"quant_method": "compressed-tensors", "config_groups": {"g": {"targets": ["Linear"], "weights": {}}},
                "sparsity_config": {"format": "sparse-24-bitmask"}}),
            "quantization_config.sparsity_config.format` is \"sparse-24-bitmask\"; it must be \"dense\"; use a copy",
        ),
        (
            json!({"quant_method": "compressed-tensors", "config_groups": {"g": {"targets": ["Linear"], "weights": {}}},
            "transform_config": {"config_groups": {"u": {"type": "hadamard", "apply": [
                {"targets": ["Linear"], "location": "weight_input"}, {"targets": ["Linear"], "location": "input"},
            ]}}}}),
            "apply.location` is \"input\"; it must be weight_input or weight_output",
        ),
        (
            json!({"quant_method": "modelopt", "quant_algo": "W4A16_AWQ"}),
            "quant_algo` is W4A16_AWQ; it must be one of FP8, FP8_PER_CHANNEL_PER_TOKEN, NVFP4, MIXED_PRECISION; use a",
        ),
        (
            json!({"quant_method": "modelopt"}),
            "missing field `quant_algo`",
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

/// The file of the tensors.
fn file_of(tensors: &[(String, Tensor)]) -> (tempfile::TempDir, MappedFile) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("weights.safetensors");
    write(&path, tensors, &BTreeMap::new()).unwrap();
    let file = MappedFile::open(&path).unwrap();
    (folder, file)
}

#[test]
fn fp8_with_a_scale_for_each_weight_or_row_is_read_in_the_layouts_of_autofp8_fbgemm_and_modelopt() {
    let configs = [
        json!({"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]}),
        json!({"quant_method": "fp8", "activation_scheme": "dynamic", "kv_cache_scheme": "static"}),
        json!({"quant_method": "fp8", "weight_block_size": null}),
        json!({"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0, "modules_to_not_convert": ["lm_head"]}),
        json!({"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head", "*.router"]}),
        json!({"quant_method": "modelopt", "quant_algo": "FP8_PER_CHANNEL_PER_TOKEN", "producer": {"name": "modelopt"}}),
    ];
    let codes = (random([24, 32], 1) * 4000.0).to_kind(Kind::Float8e4m3fn);
    let rows = random([24, 1], 2).abs() + 0.1;
    for config in configs {
        let config = QuantizationConfig::from_json(&config).unwrap();
        for shape in [&[][..], &[1], &[1, 1], &[24], &[24, 1]] {
            let count: i64 = shape.iter().product();
            let scales = rows.narrow(0, 0, count).reshape(shape);
            let tensors = [
                ("a.b.weight".to_owned(), codes.shallow_clone()),
                ("a.b.weight_scale".to_owned(), scales.shallow_clone()),
                ("a.b.input_scale".to_owned(), scales.shallow_clone()),
            ];
            let (_folder, file) = file_of(&tensors);
            assert!(config.is_stored(&file, "a.b").unwrap());
            let weight = config.read_weight(&file, "a.b").unwrap();
            assert_eq!(weight.scheme(), Scheme::Fp8);
            let by_row = scales.reshape([-1, 1]);
            let expected = codes.to_kind(Kind::Float) * by_row;
            assert_eq!(weight.dequantize(Kind::Float).unwrap(), expected);
            let known = [config.tensor_names("a.b"), config.static_scale_names("a.b")].concat();
            for (name, _) in &tensors {
                assert!(known.contains(name), "{name}");
            }
        }
        let tensors = [
            ("a.b.weight".to_owned(), codes.shallow_clone()),
            ("a.b.weight_scale".to_owned(), random([5, 1], 3)),
        ];
        let (_folder, file) = file_of(&tensors);
        let error = config.read_weight(&file, "a.b").unwrap_err().to_string();
        assert!(
            error.contains("`weight_scale` is [5, 1]; it must be [24, 1]"),
            "{error}"
        );
        assert!(config.is_quantized("model.up_proj").unwrap());
    }
}

#[test]
fn nvfp4_is_read_in_the_layout_of_modelopt() {
    let own = QuantizationConfig::for_scheme(Scheme::Nvfp4, Vec::new());
    let weight = QuantizedWeight::quantize(&random([24, 64], 1), Scheme::Nvfp4).unwrap();
    let rename = |(name, tensor): (String, Tensor)| match name.as_str() {
        "a.b.weight_packed" => ("a.b.weight".to_owned(), tensor),
        // A factor where compressed-tensors has a divisor.
        "a.b.weight_global_scale" => (
            "a.b.weight_scale_2".to_owned(),
            tensor.reciprocal().reshape(&[] as &[i64]),
        ),
        _ => (name, tensor),
    };
    let tensors = own.write_weight(&weight, "a.b").unwrap();
    let tensors: Vec<(String, Tensor)> = tensors.into_iter().map(rename).collect();
    let (_folder, file) = file_of(&tensors);
    for algorithm in ["NVFP4", "MIXED_PRECISION"] {
        let config = json!({"quant_method": "modelopt", "quant_algo": algorithm});
        let config = QuantizationConfig::from_json(&config).unwrap();
        let read = config.read_weight(&file, "a.b").unwrap();
        assert_eq!(read.scheme(), Scheme::Nvfp4);
        let [read, wanted] = [&read, &weight].map(|weight| weight.dequantize(Kind::Float).unwrap());
        assert!(read.allclose(&wanted, 1e-6, 0.0, false));
        // It is written in a layout that transformers reads.
        let error = config.write_weight(&weight, "a.b").unwrap_err();
        assert!(error.to_string().contains("modelopt"), "{error}");
    }
}
