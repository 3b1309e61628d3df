//! The contents of the files, without a runtime.

mod quantized;
mod refusals;

use std::fs;
use std::path::Path;

use crate::common::{CASES, decoded, fixture, initializer, nodes, small};
use overdrive_lora::{AddOptions, LoraConfig, TargetModules};
use overdrive_onnx::proto::{EXTERNAL, ModelProto, TensorProto, data_type};
use overdrive_onnx::{
    Activations, Attention, Error, ExportOptions, ExternalData, LogitsFor, Precision, export,
    export_pretrained,
};
use overdrive_transformer::{CausalLm, InitOptions, LlamaFamily, QuantizeOptions};
use tch::{Kind, Tensor};

fn exported(model: &mut CausalLm, options: &ExportOptions) -> (tempfile::TempDir, ModelProto) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("model.onnx");
    export(model, &path, options).unwrap();
    let model = decoded(&path);
    (dir, model)
}

fn model() -> CausalLm {
    CausalLm::new(&small(LlamaFamily::Llama).into(), &InitOptions::default()).unwrap()
}

fn quantized(scheme: &str) -> CausalLm {
    let mut model = model();
    model
        .quantize(&QuantizeOptions::new(scheme.parse().unwrap()))
        .unwrap();
    model
}

/// The bytes of a tensor, from the graph or from the file beside it.
fn bytes(dir: &Path, tensor: &TensorProto) -> Vec<u8> {
    if tensor.data_location != Some(EXTERNAL) {
        return tensor.raw_data().to_vec();
    }
    let entry = |key: &str| {
        let found = tensor.external_data.iter().find(|entry| entry.key() == key);
        found.unwrap().value().to_owned()
    };
    let file = fs::read(dir.join(entry("location"))).unwrap();
    let (offset, length): (usize, usize) = (
        entry("offset").parse().unwrap(),
        entry("length").parse().unwrap(),
    );
    file[offset..offset + length].to_vec()
}

fn floats(bytes: &[u8]) -> Vec<f32> {
    let (chunks, rest) = bytes.as_chunks::<4>();
    assert!(rest.is_empty());
    chunks
        .iter()
        .map(|bytes| f32::from_le_bytes(*bytes))
        .collect()
}

fn names(dir: &Path) -> Vec<String> {
    let mut names: Vec<String> = fs::read_dir(dir)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

#[test]
fn inputs_and_outputs_have_the_names_and_dimensions_of_hugging_faces_exporter() {
    let (_dir, proto) = exported(&mut model(), &ExportOptions::default());
    let graph = proto.graph.as_ref().unwrap();
    let described = |values: &[overdrive_onnx::proto::ValueInfoProto]| -> Vec<String> {
        let one = |value: &overdrive_onnx::proto::ValueInfoProto| {
            let of = value.r#type.as_ref().unwrap().tensor_type.as_ref().unwrap();
            let dims = of.shape.as_ref().unwrap().dim.iter();
            let dims: Vec<String> = dims
                .map(|dim| {
                    dim.dim_value
                        .map_or(dim.dim_param().to_owned(), |n| n.to_string())
                })
                .collect();
            format!("{} {} ({})", value.name(), of.elem_type(), dims.join(", "))
        };
        values.iter().map(one).collect()
    };
    let past = "past_sequence_length";
    assert_eq!(
        described(&graph.input),
        [
            "input_ids 7 (batch_size, sequence_length)".to_owned(),
            format!("attention_mask 7 (batch_size, {past} + sequence_length)"),
            "position_ids 7 (batch_size, sequence_length)".to_owned(),
            format!("past_key_values.0.key 1 (batch_size, 2, {past}, 16)"),
            format!("past_key_values.0.value 1 (batch_size, 2, {past}, 16)"),
            format!("past_key_values.1.key 1 (batch_size, 2, {past}, 16)"),
            format!("past_key_values.1.value 1 (batch_size, 2, {past}, 16)"),
        ]
    );
    let total = "past_sequence_length + sequence_length";
    assert_eq!(
        described(&graph.output),
        [
            "logits 1 (batch_size, sequence_length, 96)".to_owned(),
            format!("present.0.key 1 (batch_size, 2, {total}, 16)"),
            format!("present.0.value 1 (batch_size, 2, {total}, 16)"),
            format!("present.1.key 1 (batch_size, 2, {total}, 16)"),
            format!("present.1.value 1 (batch_size, 2, {total}, 16)"),
        ]
    );
    assert_eq!(
        (proto.producer_name(), proto.ir_version()),
        ("overdrive", 10)
    );
    let opsets: Vec<_> = proto
        .opset_import
        .iter()
        .map(|set| (set.domain(), set.version()))
        .collect();
    assert_eq!(opsets, [("", 21)]);
}

#[test]
fn the_signature_shows_a_missing_cache_and_the_last_logits() {
    let options = ExportOptions {
        use_cache: false,
        logits: LogitsFor::Last,
        ..ExportOptions::default()
    };
    let dir = tempfile::tempdir().unwrap();
    let report = export(&mut model(), dir.path().join("m.onnx"), &options).unwrap();
    let inputs: Vec<String> = report.inputs.iter().map(ToString::to_string).collect();
    assert_eq!(
        inputs,
        [
            "input_ids: int64 [batch_size, sequence_length]",
            "attention_mask: int64 [batch_size, sequence_length]",
            "position_ids: int64 [batch_size, sequence_length]",
        ]
    );
    let outputs: Vec<String> = report.outputs.iter().map(ToString::to_string).collect();
    assert_eq!(outputs, ["logits: float32 [batch_size, 1, 96]"]);
}

#[test]
fn every_input_of_a_node_is_produced_once_and_before_the_node() {
    for case in CASES {
        for opset in [18, 21, 23] {
            let options = ExportOptions {
                opset,
                ..ExportOptions::default()
            };
            let (_dir, proto) = exported(&mut fixture(case), &options);
            let graph = proto.graph.unwrap();
            let mut made: std::collections::HashSet<&str> = graph
                .input
                .iter()
                .map(|value| value.name())
                .chain(graph.initializer.iter().map(TensorProto::name))
                .collect();
            assert_eq!(
                made.len(),
                graph.input.len() + graph.initializer.len(),
                "{case}"
            );
            let mut used = std::collections::HashSet::new();
            for node in &graph.node {
                for input in node.input.iter().filter(|input| !input.is_empty()) {
                    assert!(
                        made.contains(input.as_str()),
                        "{case}: {input} of {}",
                        node.name()
                    );
                    used.insert(input.as_str());
                }
                for output in &node.output {
                    assert!(made.insert(output), "{case}: {output} is made twice");
                }
            }
            for value in &graph.output {
                assert!(made.contains(value.name()), "{case}: {}", value.name());
            }
            for value in graph.input.iter().map(|value| value.name()) {
                assert!(
                    used.contains(value),
                    "{case}: the input {value} is not used"
                );
            }
            for tensor in &graph.initializer {
                assert!(
                    used.contains(tensor.name()),
                    "{case}: {} is not used",
                    tensor.name()
                );
            }
        }
    }
}

#[test]
fn dense_weights_are_written_transposed_and_a_tied_head_once() {
    let mut model = fixture("llama_tied_biases");
    let parameters: std::collections::HashMap<_, _> =
        model.named_parameters().into_iter().collect();
    let (dir, proto) = exported(&mut model, &ExportOptions::default());
    let name = "model.layers.0.mlp.down_proj.weight";
    let tensor = initializer(&proto, name);
    let weight = &parameters[name];
    let mut turned = weight.size();
    turned.reverse();
    assert_eq!(tensor.dims, turned);
    let expected = Vec::<f32>::try_from(weight.tr().contiguous().view([-1])).unwrap();
    assert_eq!(floats(&bytes(dir.path(), tensor)), expected);
    // The file holds the embedding, and a node transposes it for the head.
    initializer(&proto, "model.embed_tokens.weight");
    let graph = proto.graph.as_ref().unwrap();
    assert!(
        !graph
            .initializer
            .iter()
            .any(|tensor| tensor.name().starts_with("lm_head"))
    );
    // GPT-2's weights are stored transposed already.
    let mut model = fixture("gpt2");
    let parameters: std::collections::HashMap<_, _> =
        model.named_parameters().into_iter().collect();
    let (_dir, proto) = exported(&mut model, &ExportOptions::default());
    let name = "transformer.h.0.attn.c_attn.weight";
    assert_eq!(initializer(&proto, name).dims, parameters[name].size());
}

#[test]
fn weights_in_a_separate_file_begin_at_pages_and_have_the_same_values() {
    let (inline_dir, inline) = exported(&mut model(), &ExportOptions::default());
    let options = ExportOptions {
        external_data: ExternalData::Always,
        ..ExportOptions::default()
    };
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("model.onnx");
    let report = export(&mut model(), &path, &options).unwrap();
    assert_eq!(names(dir.path()), ["model.onnx", "model.onnx_data"]);
    assert_eq!(report.bytes, fs::metadata(&path).unwrap().len());
    let data = dir.path().join("model.onnx_data");
    assert_eq!(report.data_bytes, fs::metadata(&data).unwrap().len());
    assert_eq!(report.data_path, Some(data));

    let proto = decoded(&path);
    let mut outside = 0;
    for tensor in &proto.graph.as_ref().unwrap().initializer {
        let twin = initializer(&inline, tensor.name());
        assert_eq!(
            (&tensor.dims, tensor.data_type),
            (&twin.dims, twin.data_type)
        );
        let numbers = bytes(dir.path(), tensor);
        assert_eq!(numbers, bytes(inline_dir.path(), twin), "{}", tensor.name());
        let apart = tensor.data_location == Some(EXTERNAL);
        assert_eq!(apart, numbers.len() >= 1024, "{}", tensor.name());
        if apart {
            outside += 1;
            let offset = &tensor.external_data[1];
            let at: u64 = offset.value().parse().unwrap();
            assert_eq!((offset.key(), at % 4096), ("offset", 0));
        }
    }
    assert!(outside > 10);

    let inside = ExportOptions {
        external_data: ExternalData::WhenLarge,
        ..ExportOptions::default()
    };
    export(&mut model(), &path, &inside).unwrap();
    assert_eq!(names(dir.path()), ["model.onnx"], "nothing is left over");
}

#[test]
fn a_gigabyte_scale_model_would_be_split_and_a_small_one_is_not() {
    let dir = tempfile::tempdir().unwrap();
    let report = export(
        &mut model(),
        dir.path().join("m.onnx"),
        &ExportOptions::default(),
    )
    .unwrap();
    assert_eq!((report.data_path, report.data_bytes), (None, 0));
    assert_eq!(names(dir.path()), ["m.onnx"]);
}

#[test]
fn fp16_halves_weights_and_caches_and_leaves_logits_in_fp32() {
    let options = ExportOptions {
        precision: Precision::Float16,
        ..ExportOptions::default()
    };
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("m.onnx");
    let report = export(&mut model(), &path, &options).unwrap();
    assert_eq!(report.inputs[3].element, "float16");
    assert_eq!(
        (report.outputs[0].element, report.outputs[1].element),
        ("float32", "float16")
    );
    let proto = decoded(&path);
    let tensor = initializer(&proto, "model.norm.weight");
    assert_eq!(tensor.data_type(), data_type::FLOAT16);
    assert_eq!(tensor.raw_data().len(), 64 * 2);
}

#[test]
fn newer_operator_sets_use_their_operators() {
    let count = |opset, attention, op: &str| {
        let options = ExportOptions {
            opset,
            attention,
            ..ExportOptions::default()
        };
        nodes(&exported(&mut fixture("qwen3"), &options).1, op).len()
    };
    assert_eq!(count(22, Attention::Composed, "RMSNormalization"), 0);
    assert_eq!(count(22, Attention::Composed, "RotaryEmbedding"), 0);
    let layers = fixture("qwen3").num_layers();
    // Two a block, one for queries, one for keys, and the last.
    assert_eq!(
        count(23, Attention::Composed, "RMSNormalization"),
        4 * layers + 1
    );
    assert_eq!(
        count(23, Attention::Composed, "RotaryEmbedding"),
        2 * layers
    );
    assert_eq!(count(23, Attention::Standard, "Attention"), layers);
    assert_eq!(
        count(21, Attention::GroupQuery, "GroupQueryAttention"),
        layers
    );
}

#[test]
fn an_exported_folder_has_the_files_that_optimum_reads() {
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path().join("new/folder");
    let mut model = fixture("qwen2");
    export_pretrained(&mut model, &folder, &ExportOptions::default()).unwrap();
    let text = fs::read_to_string(folder.join("config.json")).unwrap();
    let config: serde_json::Value = serde_json::from_str(&text).unwrap();
    assert_eq!(config["model_type"], "qwen2");
    assert!(folder.join("model.onnx").is_file());
    let expected = model.generation_config().is_some();
    assert_eq!(folder.join("generation_config.json").is_file(), expected);
    assert!(!names(&folder).iter().any(|name| name.ends_with(".tmp")));
}

#[test]
fn a_failed_export_leaves_the_older_one_and_nothing_else() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("model.onnx");
    let always = ExportOptions {
        external_data: ExternalData::Always,
        ..ExportOptions::default()
    };
    export(&mut model(), &path, &always).unwrap();
    let before = fs::read(&path).unwrap();
    let refused = ExportOptions {
        opset: 18,
        ..always.clone()
    };
    export(&mut quantized("fp8"), &path, &refused).unwrap_err();
    assert_eq!(fs::read(&path).unwrap(), before);
    assert_eq!(names(dir.path()), ["model.onnx", "model.onnx_data"]);
    // A folder with the name of the file: the rename fails.
    let taken = dir.path().join("taken");
    fs::create_dir_all(taken.join("inside")).unwrap();
    let error = export(&mut model(), &taken, &ExportOptions::default()).unwrap_err();
    assert!(
        matches!(error, Error::Common(overdrive_core::Error::Io { .. })),
        "{error}"
    );
    assert_eq!(
        names(dir.path()),
        ["model.onnx", "model.onnx_data", "taken"]
    );
    let nowhere = dir.path().join("missing/model.onnx");
    let error = export(&mut model(), &nowhere, &ExportOptions::default()).unwrap_err();
    assert!(error.to_string().starts_with("cannot write "), "{error}");
}
