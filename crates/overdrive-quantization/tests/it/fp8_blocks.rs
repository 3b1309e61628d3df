//! 8-bit floats with one scale for each block of 128 outputs and 128 inputs.

use std::collections::BTreeMap;

use overdrive_quantization::{
    Activations, QuantizationConfig, QuantizedWeight, Scheme, joint_linear_into, linear,
};
use overdrive_safetensors::{MappedFile, write};
use serde_json::{Value, json};
use tch::{Device, Kind, Tensor};

const FLOAT: (Kind, Device) = (Kind::Float, Device::Cpu);

fn numbers(seed: i64, size: &[i64]) -> Tensor {
    let count: i64 = size.iter().product();
    ((Tensor::arange(count, FLOAT) + seed) * 0.731)
        .sin()
        .view(size)
}

/// Returns codes `(O, I)`, scales for their blocks, and the dense weight by operators of libtorch.
fn parts(outputs: i64, inputs: i64) -> [Tensor; 3] {
    let codes = (numbers(1, &[outputs, inputs]) * 400.0).to_kind(Kind::Float8e4m3fn);
    let blocks = [(outputs + 127) / 128, (inputs + 127) / 128];
    let scales = (numbers(2, &blocks) + 1.5) / 500.0;
    let by_element = scales
        .repeat_interleave_self_int(128, 0, None)
        .repeat_interleave_self_int(128, 1, None);
    let by_element = by_element.narrow(0, 0, outputs).narrow(1, 0, inputs);
    let dense = codes.to_kind(Kind::Float) * by_element;
    [codes, scales, dense]
}

fn weight(outputs: i64, inputs: i64) -> (QuantizedWeight, Tensor) {
    let [codes, scales, dense] = parts(outputs, inputs);
    let weight = QuantizedWeight::from_fp8_blocks(codes, scales).unwrap();
    (weight, dense)
}

/// The largest error of f32 sums of up to 576 terms in another order, each of which may be rounded by 6e-8.
const SUMS: f64 = 4e-6;

fn error(a: &Tensor, b: &Tensor) -> f64 {
    let (a, b) = (a.to_kind(Kind::Double), b.to_kind(Kind::Double));
    (a - &b).abs().max().double_value(&[]) / b.abs().max().double_value(&[])
}

#[test]
fn every_element_has_the_scale_of_its_block() {
    for (outputs, inputs) in [(1, 1), (128, 256), (130, 300), (576, 130), (5, 128)] {
        let (weight, dense) = weight(outputs, inputs);
        assert_eq!(weight.scheme(), Scheme::Fp8Blocks);
        assert_eq!(weight.dequantize(Kind::Float).unwrap(), dense);
        let half = dense.to_kind(Kind::BFloat16);
        assert_eq!(weight.dequantize(Kind::BFloat16).unwrap(), half);
        let ids = Tensor::from_slice(&[outputs - 1, 0, outputs / 2]);
        let rows = weight.rows(&ids, Kind::Float).unwrap();
        assert_eq!(rows, dense.index_select(0, &ids));
    }
    // A scale of 32 bits for 128 elements of a row.
    assert_eq!(weight(256, 256).0.bits_per_weight(), 8.25);
}

#[test]
fn linear_layers_of_few_and_many_rows_are_those_of_the_dense_weight() {
    for (outputs, inputs) in [(130, 300), (576, 128), (9, 77)] {
        let (weight, dense) = weight(outputs, inputs);
        for rows in [1, 3, 8, 33, 70] {
            let x = numbers(3, &[rows, inputs]);
            let y = tch::no_grad(|| linear(&x, &weight, None)).unwrap();
            let found = error(&y, &x.matmul(&dense.tr()));
            assert!(found < SUMS, "{rows} rows {outputs} x {inputs}: {found}");
        }
        let x = numbers(4, &[2, inputs]).set_requires_grad(true);
        let dy = numbers(5, &[2, outputs]);
        (linear(&x, &weight, None).unwrap() * &dy)
            .sum(Kind::Float)
            .backward();
        let found = error(&x.grad(), &dy.matmul(&dense));
        assert!(found < SUMS, "gradient {outputs} x {inputs}: {found}");
    }
}

#[test]
fn decoders_multiply_them_on_slices() {
    let (weight, dense) = weight(130, 300);
    let x = numbers(6, &[1, 300]);
    let slice = Vec::<f32>::try_from(x.view([-1])).unwrap();
    let mut y = vec![0.0; 130];
    assert!(joint_linear_into(&slice, &[(&weight, None)], &mut y).unwrap());
    let found = error(&Tensor::from_slice(&y), &x.matmul(&dense.tr()).view([-1]));
    assert!(found < SUMS, "{found}");
}

#[test]
fn a_file_is_read_and_written_with_the_same_tensors() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("model.safetensors");
    let [codes, scales, dense] = parts(150, 260);
    for kind in [Kind::Float, Kind::BFloat16] {
        let scales = scales.to_kind(kind);
        let tensors = [
            ("a.weight".to_owned(), codes.shallow_clone()),
            ("a.weight_scale_inv".to_owned(), scales.shallow_clone()),
        ];
        write(&path, &tensors, &BTreeMap::new()).unwrap();
        let config = QuantizationConfig::from_json(&json!({"quant_method": "fp8"})).unwrap();
        assert_eq!(config.scheme().unwrap(), Some(Scheme::Fp8Blocks));
        let file = MappedFile::open(&path).unwrap();
        assert!(config.is_stored(&file, "a").unwrap());
        let weight = config.read_weight(&file, "a").unwrap();
        if kind == Kind::Float {
            assert_eq!(weight.dequantize(Kind::Float).unwrap(), dense);
        }
        for layout in [
            config,
            QuantizationConfig::for_scheme(weight.scheme(), Vec::new()),
        ] {
            let written = layout.write_weight(&weight, "a").unwrap();
            assert_eq!(written[0].0, "a.weight");
            let bytes = |tensor: &Tensor| tensor.view_dtype(Kind::Uint8);
            assert_eq!(bytes(&written[0].1), bytes(&codes));
            assert_eq!(written[1].0, "a.weight_scale_inv");
            assert_eq!(written[1].1, scales.to_kind(Kind::Float));
        }
    }
}

#[test]
fn the_configuration_is_kept_and_says_what_is_not_quantized() {
    let config = json!({
        "quant_method": "fp8", "weight_block_size": [128, 128], "ignored_layers": ["model.layers.3"],
        "activation_scheme": "dynamic", "fmt": "e4m3", "scale_fmt": "ue8m0", "modules_to_convert": null,
    });
    let layout = QuantizationConfig::from_json(&config).unwrap();
    assert_eq!(layout.to_json().unwrap(), config);
    let skipped = "model.layers.3.mlp.up_proj";
    assert!(!layout.is_quantized(skipped).unwrap() && !layout.is_quantized("lm_head").unwrap());
    assert!(layout.is_quantized("model.layers.30.mlp.up_proj").unwrap());
    let mut both = config.clone();
    both["modules_to_not_convert"] = json!([]);
    let layout = QuantizationConfig::from_json(&both).unwrap();
    assert!(layout.is_quantized(skipped).unwrap());
    let made = QuantizationConfig::for_scheme(Scheme::Fp8Blocks, vec!["lm_head".to_owned()]);
    assert_eq!(
        made.to_json().unwrap(),
        json!({
            "quant_method": "fp8", "weight_block_size": [128, 128], "modules_to_not_convert": ["lm_head"],
            "activation_scheme": "dynamic",
        })
    );
}

#[test]
fn options_that_would_change_the_result_are_refused_by_name() {
    for (key, value, expected) in [
        (
            "weight_block_size",
            json!([1, 32]),
            "weight_block_size` is [1, 32]; it must be [128, 128], or null",
        ),
        (
            "scale_fmt",
            json!("e5m2"),
            "scale_fmt` is e5m2; it must be float or ue8m0",
        ),
        ("fmt", json!("e5m2"), "fmt` is e5m2; it must be e4m3"),
        (
            "expert_dtype",
            json!("fp4"),
            "expert_dtype` is fp4; it must be fp8",
        ),
        (
            "modules_to_convert",
            json!(["embed"]),
            "modules_to_convert` is [\"embed\"]; it must be null",
        ),
        (
            "activation_scheme",
            json!("none"),
            "activation_scheme` is none",
        ),
        (
            "rotation",
            json!(true),
            "rotation` is true; it must be null",
        ),
    ] {
        let mut config = json!({"quant_method": "fp8"});
        config[key] = value;
        let error = QuantizationConfig::from_json(&config)
            .unwrap_err()
            .to_string();
        assert!(error.contains(expected), "{error}");
        config[key] = Value::Null;
        assert!(QuantizationConfig::from_json(&config).is_ok(), "{key}");
    }
}

#[test]
fn damaged_weights_are_refused_with_their_names() {
    let dir = tempfile::tempdir().unwrap();
    let [codes, scales, _] = parts(150, 260);
    let refused = |codes: Tensor, scales: Tensor| {
        let path = dir.path().join("model.safetensors");
        let tensors = [
            ("a.weight".to_owned(), codes),
            ("a.weight_scale_inv".to_owned(), scales),
        ];
        write(&path, &tensors, &BTreeMap::new()).unwrap();
        let config = QuantizationConfig::from_json(&json!({"quant_method": "fp8"})).unwrap();
        let file = MappedFile::open(&path).unwrap();
        config.read_weight(&file, "a").unwrap_err().to_string()
    };
    let found = refused(codes.shallow_clone(), scales.narrow(1, 0, 2).contiguous());
    assert!(found.contains("`a.weight_scale_inv` is [2, 2]"), "{found}");
    let found = refused(codes.shallow_clone(), scales.to_kind(Kind::Uint8));
    assert!(
        found.contains("of U8; it must be [2, 3] of Float"),
        "{found}"
    );
    let found = refused(codes.shallow_clone(), scales.full_like(f64::NAN));
    assert!(found.contains("a.weight"), "{found}");
    let bytes = codes.view_dtype(Kind::Uint8).copy();
    let _ = bytes.get(3).fill_(0x7F);
    let found = refused(bytes.view_dtype(Kind::Float8e4m3fn), scales.shallow_clone());
    assert!(found.contains("a code that is NaN"), "{found}");
}

#[test]
fn no_weight_is_quantized_by_blocks_and_no_activations_are_rounded() {
    let dense = numbers(7, &[128, 128]);
    let error = QuantizedWeight::quantize(&dense, Scheme::Fp8Blocks).unwrap_err();
    let text = error.to_string();
    assert!(text.contains("such as fp8"), "{text}");
    let (weight, _) = weight(128, 128);
    for (activations, name) in [(Activations::Int8, "int8"), (Activations::Float8, "float8")] {
        let error = weight
            .shallow_clone()
            .with_activations(activations)
            .unwrap_err();
        let expected =
            format!("{name} with a weight of scheme fp8-blocks; it must be auto or float");
        assert!(error.to_string().contains(&expected), "{error}");
    }
}
