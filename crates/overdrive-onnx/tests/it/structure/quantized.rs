//! Quantized weights: the operators that multiply them, and their values.

use super::*;

#[test]
fn each_scheme_is_written_for_the_operator_that_multiplies_it() {
    let attribute = |proto: &ModelProto, op: &str, name: &str| {
        let node = nodes(proto, op)[0];
        let found = node.attribute.iter().find(|own| own.name() == name);
        found.map(|own| own.i())
    };
    let name = "model.layers.0.mlp.up_proj";
    let part = |proto: &ModelProto, part: &str| {
        let tensor = initializer(proto, &format!("{name}.weight_{part}"));
        (tensor.dims.clone(), tensor.data_type())
    };
    let (_dir, proto) = exported(&mut quantized("int8"), &ExportOptions::default());
    assert_eq!(nodes(&proto, "MatMulInteger").len(), 14);
    // Query, key and value share codes, and so do gate and up: four for each layer.
    assert_eq!(nodes(&proto, "QuantizeLinear").len(), 8);
    assert_eq!(part(&proto, "quantized"), (vec![64, 128], data_type::INT8));

    let (_dir, proto) = exported(&mut quantized("int8-weight"), &ExportOptions::default());
    assert_eq!(nodes(&proto, "DequantizeLinear").len(), 14);
    assert_eq!(part(&proto, "quantized"), (vec![64, 128], data_type::INT8));
    assert_eq!(part(&proto, "scale"), (vec![128], data_type::FLOAT));

    let (_dir, proto) = exported(&mut quantized("int4-g32-asym"), &ExportOptions::default());
    assert_eq!(nodes(&proto, "MatMulNBits").len(), 14);
    assert_eq!(
        part(&proto, "quantized"),
        (vec![128, 2, 16], data_type::UINT8)
    );
    assert_eq!(part(&proto, "scale"), (vec![128, 2], data_type::FLOAT));
    assert_eq!(part(&proto, "zero_point"), (vec![128, 1], data_type::UINT8));
    assert_eq!(attribute(&proto, "MatMulNBits", "block_size"), Some(32));
    assert_eq!(attribute(&proto, "MatMulNBits", "accuracy_level"), None);
    let opsets: Vec<_> = proto
        .opset_import
        .iter()
        .map(|set| (set.domain(), set.version()))
        .collect();
    assert_eq!(opsets, [("", 21), ("com.microsoft", 1)]);
    let options = ExportOptions {
        activations: Activations::Int8,
        ..ExportOptions::default()
    };
    let (_dir, proto) = exported(&mut quantized("int4-g32"), &options);
    assert_eq!(attribute(&proto, "MatMulNBits", "accuracy_level"), Some(4));

    let (_dir, proto) = exported(&mut quantized("nf4"), &ExportOptions::default());
    assert_eq!(nodes(&proto, "MatMulBnb4").len(), 14);
    assert_eq!(
        part(&proto, "quantized"),
        (vec![128 * 64 / 2], data_type::UINT8)
    );
    assert_eq!(part(&proto, "absmax"), (vec![128], data_type::FLOAT));
    assert_eq!(attribute(&proto, "MatMulBnb4", "quant_type"), Some(1));

    let (_dir, proto) = exported(&mut quantized("fp8"), &ExportOptions::default());
    assert_eq!(
        part(&proto, "quantized"),
        (vec![64, 128], data_type::FLOAT8E4M3FN)
    );
    let metadata = proto
        .metadata_props
        .iter()
        .find(|entry| entry.key() == "overdrive.quantization");
    assert_eq!(metadata.unwrap().value(), "fp8");
}

#[test]
fn codes_and_zero_points_of_groups_give_the_weight_back() {
    let mut model = quantized("int4-g32-asym");
    let (dir, proto) = exported(&mut model, &ExportOptions::default());
    model.dequantize().unwrap();
    let name = "model.layers.1.mlp.down_proj.weight";
    let dense: std::collections::HashMap<_, _> = model.named_parameters().into_iter().collect();
    let part = |part: &str| bytes(dir.path(), initializer(&proto, &format!("{name}_{part}")));
    let (codes, zeros, scales) = (
        part("quantized"),
        part("zero_point"),
        floats(&part("scale")),
    );
    let (outputs, inputs, groups) = (64, 128, 4);
    let half = |bytes: &[u8], at: usize| f32::from(bytes[at / 2] >> (at % 2 * 4) & 15);
    let mut numbers = Vec::new();
    for output in 0..outputs {
        for input in 0..inputs {
            let group = input / 32;
            let code = half(&codes, output * inputs + input);
            let zero = half(&zeros[output * groups / 2..], group);
            numbers.push((code - zero) * scales[output * groups + group]);
        }
    }
    let written = Tensor::from_slice(&numbers).view([64, 128]);
    let difference = (written - &dense[name]).abs().max().double_value(&[]);
    // Offsets are kept in f16, of which the zero point is an exact multiple.
    assert!(difference < 1e-6, "{difference}");
}

#[test]
fn groups_that_no_operator_reads_are_refused_or_written_in_full() {
    use overdrive_nn::{AdapterHost, LinearWeight};
    use overdrive_quantization::{GroupedParts, QuantizedWeight};
    let mut model = quantized("int4-g32");
    model
        .visit_linears(&mut |name, linear| {
            if name == "model.layers.0.self_attn.o_proj" {
                let odd = QuantizedWeight::from_grouped(GroupedParts {
                    bits: 4,
                    codes: Tensor::ones([64, 32], (Kind::Uint8, tch::Device::Cpu)) * 0x35,
                    scales: Tensor::ones([64, 2], (Kind::Float, tch::Device::Cpu)) * 0.01,
                    // An offset of 7.3 steps: no integer code stands for 0.
                    offsets: Some(Tensor::ones([64, 2], (Kind::Float, tch::Device::Cpu)) * -0.073),
                    order: None,
                })?;
                let _before = linear.replace_weight(LinearWeight::Quantized(odd))?;
            }
            Ok(())
        })
        .unwrap();
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("m.onnx");
    let error = export(&mut model, &path, &ExportOptions::default())
        .unwrap_err()
        .to_string();
    let begins = "`model.layers.0.self_attn.o_proj.weight` is quantized in groups that no operator of ONNX Runtime reads";
    assert!(error.starts_with(begins), "{error}");
    assert!(error.contains("`dense_fallback`"), "{error}");
    let options = ExportOptions {
        dense_fallback: true,
        ..ExportOptions::default()
    };
    export(&mut model, &path, &options).unwrap();
    let proto = decoded(&path);
    let full = initializer(&proto, "model.layers.0.self_attn.o_proj.weight");
    assert_eq!(full.dims, [64, 64]);
    let numbers = floats(full.raw_data());
    // (5 − 7.3) · 0.01 and (3 − 7.3) · 0.01, by input.
    assert!((numbers[0] + 0.023).abs() < 1e-6 && (numbers[64] + 0.043).abs() < 1e-6);
}

#[test]
fn a_tied_quantized_table_is_written_once() {
    let config = overdrive_transformer::LlamaConfig {
        tie_word_embeddings: true,
        ..small(LlamaFamily::Llama)
    };
    for scheme in ["int4-g32", "int4-g64-asym", "int8-g32-asym", "nf4"] {
        let mut model = CausalLm::new(&config.clone().into(), &InitOptions::default()).unwrap();
        let scheme = scheme.parse().unwrap();
        model
            .quantize(&QuantizeOptions::new(scheme).with_head(scheme))
            .unwrap();
        let (_dir, proto) = exported(&mut model, &ExportOptions::default());
        let graph = proto.graph.as_ref().unwrap();
        let tables = graph
            .initializer
            .iter()
            .filter(|tensor| tensor.dims.iter().product::<i64>() >= 96 * 64 / 2)
            .map(TensorProto::name)
            .filter(|name| name.starts_with("lm_head") || name.contains("embed_tokens"));
        let tables: Vec<_> = tables.collect();
        assert_eq!(tables, ["lm_head.weight_quantized"], "{scheme}");
    }
}
