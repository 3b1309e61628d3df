//! Models from GGUF files against transformers with the same weights.

use std::path::{Path, PathBuf};

use overdrive_quantization::{
    Activations, GgufArray, GgufFile, GgufTensorInfo, GgufType, GgufValue, GgufWriter, Scheme,
};
use overdrive_safetensors::MappedFile;
use overdrive_transformer::{
    CausalLm, Error, ForwardInput, GgufOptions, LlamaFamily, LoadOptions, ModelConfig,
    QuantizeOptions, RopeScaling,
};
use tch::{Device, Kind, Tensor};

use crate::common::{load, max_difference};

fn fixture(name: &str) -> PathBuf {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR"))
        .join("tests/fixtures/gguf")
        .join(name);
    assert!(path.exists(), "run tests/fixtures/gguf/gen_models.py");
    path
}

fn expected(name: &str) -> (Tensor, Tensor) {
    let file = MappedFile::open(fixture(&format!("{name}.safetensors"))).unwrap();
    let tensor = |name| {
        file.tensor(name)
            .unwrap()
            .copy_to_tensor(None, Device::Cpu)
            .unwrap()
    };
    (tensor("input_ids"), tensor("logits"))
}

fn config(name: &str) -> ModelConfig {
    let file = GgufFile::open(fixture(&format!("{name}.gguf"))).unwrap();
    ModelConfig::from_gguf(&file).unwrap()
}

/// The largest difference of logits, relative to the largest logit.
fn difference(model: &CausalLm, name: &str) -> f64 {
    let (ids, logits) = expected(name);
    let _no_grad = tch::no_grad_guard();
    let found = model.forward(ForwardInput::new(&ids)).unwrap();
    let largest = logits.abs().max().double_value(&[]);
    (found - logits).abs().max().double_value(&[]) / largest
}

#[test]
fn logits_of_every_architecture_equal_those_of_transformers() {
    for name in ["qwen3", "gemma2", "qwen3moe", "qwen35moe"] {
        let path = fixture(&format!("{name}.gguf"));
        let options = LoadOptions {
            kind: Some(Kind::Float),
            ..LoadOptions::default()
        };
        let model = CausalLm::from_pretrained(path, &options).unwrap();
        let difference = difference(&model, name);
        assert!(difference < 1e-4, "{name}: {difference:.1e}");
    }
}

#[test]
fn half_precision_weights_stay_as_they_are() {
    let kinds = [
        ("qwen3", Kind::BFloat16, 0.05),
        ("gemma2", Kind::Half, 0.01),
    ];
    for (name, kind, most) in kinds {
        let file = GgufFile::open(fixture(&format!("{name}.gguf"))).unwrap();
        let model = CausalLm::from_gguf(file.path(), &LoadOptions::default()).unwrap();
        // The norms, which are fp32 in the file, too.
        let all = model.named_parameters();
        assert!(
            all.iter().all(|(_, tensor)| tensor.kind() == kind),
            "{name}"
        );
        let (_, weight) = all
            .iter()
            .find(|(name, _)| name.ends_with("layers.1.mlp.up_proj.weight"))
            .unwrap();
        let stored = file.tensor("blk.1.ffn_up.weight").unwrap();
        let stored = stored.dequantize(None, kind, Device::Cpu).unwrap();
        assert_eq!(*weight, stored, "{name}");
        let difference = difference(&model, name);
        assert!(difference < most, "{name}: {difference:.1e}");
    }
    // A file with matrices of several types has no dtype of its own.
    let model = CausalLm::from_gguf(fixture("llama.gguf"), &LoadOptions::default()).unwrap();
    assert_eq!(model.kind(), Kind::Float);
}

#[test]
fn quantized_models_compute_with_the_values_of_their_file() {
    for name in [
        "llama",
        "qwen2",
        "yarn_attn_factor",
        "gemma3",
        "phi2",
        "phi2_fused",
        "phi3",
        "gemma",
        "mixtral",
        "smollm3",
        "olmo2",
        "olmo3",
        "granite",
        "granitehybrid",
        "glm4",
        "qwen2moe",
        "gemma3n",
        "gemma4",
        "gemma4_dense",
        "gemma4_moe",
        "qwen3next",
        "qwen35",
        "gpt-oss",
        "mistral3",
        "qwen3vl",
        "deepseek2",
        "deepseek2_sigmoid",
    ] {
        let path = fixture(&format!("{name}.gguf"));
        let mut model = CausalLm::from_gguf(path, &LoadOptions::default()).unwrap();
        // The kernels round activations to 8 bits otherwise.
        model.set_activations(Activations::Float).unwrap();
        // Norms, biases, convolutions, and routers with their coefficients are all that is dense.
        let dense = model.named_parameters();
        let small = |(name, tensor): &(String, Tensor)| {
            let ends = [
                "gate.weight",
                "router.weight",
                "router.proj.weight",
                "conv1d.weight",
                "kv_b_proj.weight",
            ];
            tensor.dim() == 1
                || ends.iter().any(|end| name.ends_with(end))
                || name.contains(".altup.")
        };
        assert!(dense.iter().all(small), "{name}");
        let difference = difference(&model, name);
        assert!(difference < 1e-4, "{name}: {difference:.1e}");
    }
}

/// `llama.gguf` in three files, which the gguf package wrote.
#[test]
fn a_split_model_is_opened_by_any_of_its_files() {
    for number in 1..=3 {
        let path = fixture(&format!("llama-split-{number:05}-of-00003.gguf"));
        let mut model = CausalLm::from_gguf(path, &LoadOptions::default()).unwrap();
        model.set_activations(Activations::Float).unwrap();
        let difference = difference(&model, "llama");
        assert!(difference < 1e-4, "file {number}: {difference:.1e}");
    }
}

#[test]
fn keys_of_yarn_are_read_as_llama_cpp_reads_them() {
    let ModelConfig::Llama(config) = config("yarn_attn_factor") else {
        panic!("a Qwen");
    };
    let RopeScaling::Yarn(yarn) = &config.rope_scaling else {
        panic!("{:?}", config.rope_scaling);
    };
    assert_eq!((yarn.beta_fast, yarn.beta_slow), (8.0, 2.0));
    // YaRN's own factor times `attn_factor`.
    let factor = yarn.attention_factor.unwrap();
    assert!((factor - 1.5 * (0.1 * 4f64.ln() + 1.0)).abs() < 1e-12);

    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    let bytes = std::fs::read(fixture("yarn_attn_factor.gguf")).unwrap();
    let offset = |text: &str| {
        let mut windows = bytes.windows(text.len());
        windows.position(|part| part == text.as_bytes()).unwrap()
    };
    // The type `yarn` becomes `none`, which has no attention factor here.
    let mut other = bytes.clone();
    let at = offset("rope.scaling.type") + "rope.scaling.type".len() + 4 + 8;
    assert_eq!(&other[at..at + 4], b"yarn");
    other[at..at + 4].copy_from_slice(b"none");
    std::fs::write(&path, other).unwrap();
    let error = ModelConfig::from_gguf(&GgufFile::open(&path).unwrap()).unwrap_err();
    assert_eq!(
        error.to_string(),
        "`qwen2.rope.scaling.attn_factor` is 1.5, which is not supported; supported: 1"
    );
    // Without a type a factor is one of linear scaling.
    let mut other = bytes.clone();
    for key in ["rope.scaling.type", "rope.scaling.attn_factor"] {
        other[offset(key)] = b'x';
    }
    std::fs::write(&path, other).unwrap();
    let ModelConfig::Llama(config) =
        ModelConfig::from_gguf(&GgufFile::open(&path).unwrap()).unwrap()
    else {
        panic!("a Qwen");
    };
    assert_eq!(config.rope_scaling, RopeScaling::Linear { factor: 4.0 });
}

#[test]
fn metadata_becomes_the_configuration() {
    let ModelConfig::Llama(llama) = config("llama") else {
        panic!("a Llama");
    };
    assert_eq!(llama.family, LlamaFamily::Llama);
    assert_eq!((llama.vocab_size, llama.hidden_size), (96, 64));
    assert_eq!(
        (
            llama.num_attention_heads,
            llama.kv_heads(),
            llama.head_dim()
        ),
        (4, 2, 16)
    );
    assert_eq!(
        (llama.bos_token_id, &*llama.eos_token_id),
        (Some(1), &[2][..])
    );
    assert!(!llama.tie_word_embeddings);
    assert!((llama.rms_norm_eps - 1e-5).abs() < 1e-10);
    assert_eq!(
        llama.rope_scaling,
        RopeScaling::Llama3 {
            factor: 8.0,
            low_freq_factor: 1.0,
            high_freq_factor: 4.0,
            original_max_position_embeddings: 8192
        }
    );
    let ModelConfig::Llama(qwen) = config("qwen2") else {
        panic!("a Qwen");
    };
    assert_eq!(qwen.family, LlamaFamily::Qwen2);
    assert!(qwen.tie_word_embeddings);
    let RopeScaling::Yarn(yarn) = &qwen.rope_scaling else {
        panic!("{:?}", qwen.rope_scaling);
    };
    assert_eq!(
        (yarn.factor, yarn.original_max_position_embeddings),
        (4.0, 16)
    );
    let ModelConfig::Llama(gemma) = config("gemma2") else {
        panic!("a Gemma");
    };
    assert_eq!(
        (gemma.attn_logit_softcapping, gemma.final_logit_softcapping),
        (Some(20.0), Some(10.0))
    );
    assert_eq!(
        (gemma.sliding_window, gemma.query_pre_attn_scalar),
        (Some(8), 16.0)
    );
}

#[test]
fn a_file_can_be_requantized_and_loaded_in_another_dtype() {
    let options = LoadOptions {
        kind: Some(Kind::BFloat16),
        quantization: Some(QuantizeOptions::new(Scheme::Int8WeightOnly)),
        ..LoadOptions::default()
    };
    let model = CausalLm::from_gguf(fixture("gemma2.gguf"), &options).unwrap();
    assert_eq!(model.kind(), Kind::BFloat16);
    let difference = difference(&model, "gemma2");
    assert!(difference < 0.05, "{difference}");
}

#[test]
fn missing_metadata_and_tensors_are_named() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    let bytes = std::fs::read(fixture("llama.gguf")).unwrap();
    let replaced = |from: &str, to: &str| {
        let offset = bytes
            .windows(from.len())
            .position(|part| part == from.as_bytes())
            .unwrap();
        let mut bytes = bytes.clone();
        bytes[offset..offset + to.len()].copy_from_slice(to.as_bytes());
        std::fs::write(&path, bytes).unwrap();
        CausalLm::from_gguf(&path, &LoadOptions::default()).unwrap_err()
    };
    let error = replaced("blk.1.attn_v.weight", "blk.1.attn_x.weight");
    let Error::Checkpoint { problems, .. } = &error else {
        panic!("{error}");
    };
    assert_eq!(problems.missing, ["blk.1.attn_v.weight"]);
    assert_eq!(problems.unexpected, ["blk.1.attn_x.weight"]);
    let error = replaced("llama.block_count", "llama.block_xount");
    assert_eq!(
        error.to_string(),
        "`llama.block_count` is missing; it must be a positive integer"
    );
    // The number of layers is a u32 after the key and the type; more layers than tensors are not listed one by one.
    for (layers, part) in [
        (
            u32::MAX,
            "`llama.block_count` is 4294967295; it must be a positive integer, at most 65536",
        ),
        (60_000, "`num_hidden_layers` is 60000; it must be at most"),
    ] {
        let key = b"llama.block_count";
        let mut windows = bytes.windows(key.len());
        let at = windows.position(|part| part == key).unwrap() + key.len() + 4;
        let mut bytes = bytes.clone();
        bytes[at..at + 4].copy_from_slice(&layers.to_le_bytes());
        std::fs::write(&path, bytes).unwrap();
        let error = CausalLm::from_gguf(&path, &LoadOptions::default()).unwrap_err();
        assert!(error.to_string().contains(part), "{error}");
    }
    // The architecture's name is the first string of that length.
    let error = replaced("llama", "lamma").to_string();
    assert_eq!(
        error,
        "`general.architecture` is \"lamma\", which is not supported; supported: llama, qwen2, \
         qwen3, qwen3moe, phi2, phi3, gemma, gemma2, gemma3, gemma3n, gemma4, smollm3, olmo2, granite, granitehybrid, glm4, qwen2moe, \
         qwen3next, qwen35, qwen35moe, gpt-oss, mistral3, qwen3vl, qwen3vlmoe, deepseek2, gemma-embedding"
    );
}

#[test]
fn a_granite_4_with_mamba_layers_is_refused() {
    let mut bytes = std::fs::read(fixture("granitehybrid.gguf")).unwrap();
    // The type, the type and the number of the elements of a list are before its elements.
    let first = after(&bytes, "granitehybrid.attention.head_count_kv") + 16;
    assert_eq!(bytes[first..first + 4], 1i32.to_le_bytes());
    bytes[first..first + 4].fill(0);
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("hybrid.gguf");
    std::fs::write(&path, bytes).unwrap();
    let error = CausalLm::from_gguf(&path, &LoadOptions::default()).unwrap_err();
    let expected = "`granitehybrid.attention.head_count_kv` is 0 for some layers";
    assert!(error.to_string().contains(expected), "{error}");
    assert!(
        error.to_string().contains("without Mamba layers"),
        "{error}"
    );
}

/// Returns the position after `key` in the bytes of a file.
fn after(bytes: &[u8], key: &str) -> usize {
    let mut windows = bytes.windows(key.len());
    let start = windows.position(|part| part == key.as_bytes());
    start.unwrap() + key.len()
}

#[test]
fn experts_of_a_file_are_those_of_its_metadata() {
    let ModelConfig::Llama(mixtral) = config("mixtral") else {
        panic!("a Mixtral");
    };
    assert_eq!(mixtral.family, LlamaFamily::Mixtral);
    let experts = mixtral.experts.unwrap();
    assert_eq!((experts.num_experts, experts.num_experts_per_tok), (4, 2));
    let ModelConfig::Llama(qwen) = config("qwen3moe") else {
        panic!("a Qwen");
    };
    let experts = qwen.experts.unwrap();
    assert_eq!((experts.num_experts, experts.num_experts_per_tok), (6, 3));
    assert_eq!(
        (experts.moe_intermediate_size, experts.norm_topk_prob),
        (32, true)
    );

    // Another number than the stacks have: each stack and router is named once.
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    let mut bytes = std::fs::read(fixture("mixtral.gguf")).unwrap();
    let at = after(&bytes, "llama.expert_count") + 4;
    bytes[at] = 3;
    std::fs::write(&path, &bytes).unwrap();
    let error = CausalLm::from_gguf(&path, &LoadOptions::default()).unwrap_err();
    let Error::Checkpoint { problems, .. } = &error else {
        panic!("{error}");
    };
    assert_eq!(problems.misshapen.len(), 2 * 4, "{error}");
    let gate = problems
        .misshapen
        .iter()
        .find(|m| m.name == "blk.0.ffn_gate_exps.weight");
    let gate = gate.unwrap();
    assert_eq!(
        (&*gate.found, &*gate.expected),
        (&[4, 64, 32][..], &[3, 64, 32][..])
    );
    // More of them for a token than there are.
    let mut bytes = std::fs::read(fixture("qwen3moe.gguf")).unwrap();
    let at = after(&bytes, "qwen3moe.expert_used_count") + 4;
    bytes[at] = 7;
    std::fs::write(&path, &bytes).unwrap();
    let error = CausalLm::from_gguf(&path, &LoadOptions::default()).unwrap_err();
    assert_eq!(
        error.to_string(),
        "`num_experts_per_tok` is 7; it must be at most num_experts (6)"
    );
}

/// Writes the tensors of `name` in f32 with other metadata, and one more tensor.
fn rewritten(name: &str, metadata: &[(&str, GgufValue)], more: &str, path: &Path) {
    let more = (
        more.to_owned(),
        Tensor::ones([2], (Kind::Float, Device::Cpu)),
    );
    rewritten_as(name, metadata, path, |mut tensors| {
        tensors.push(more);
        tensors
    });
}

/// Writes the tensors of `name` in f32 as `change` returns them, with other metadata.
fn rewritten_as(
    name: &str,
    metadata: &[(&str, GgufValue)],
    path: &Path,
    change: impl FnOnce(Vec<(String, Tensor)>) -> Vec<(String, Tensor)>,
) {
    let file = GgufFile::open(fixture(&format!("{name}.gguf"))).unwrap();
    let mut values = file.metadata().clone();
    let changed = metadata.iter().cloned();
    values.extend(changed.map(|(key, value)| (key.to_owned(), value)));
    let tensors = file.tensors().map(|tensor| {
        let numbers = tensor.dequantize(None, Kind::Float, Device::Cpu).unwrap();
        (tensor.name().to_owned(), numbers)
    });
    let tensors = change(tensors.collect());
    let info = |(name, tensor): &(String, Tensor)| GgufTensorInfo {
        name: name.clone(),
        shape: tensor.size(),
        tensor_type: GgufType::F32,
    };
    let infos = tensors.iter().map(info).collect();
    let mut writer = GgufWriter::create(path, &values, infos).unwrap();
    for (_, tensor) in &tensors {
        writer.write(tensor).unwrap();
    }
    writer.finish().unwrap();
}

#[test]
fn layers_that_predict_further_tokens_are_not_read_and_types_of_layers_may_be_listed() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    let further = [
        ("qwen35.block_count", GgufValue::U32(3)),
        ("qwen35.nextn_predict_layers", GgufValue::U32(1)),
        ("qwen35.full_attention_interval", GgufValue::U32(7)),
        (
            "qwen35.attention.recurrent_layers",
            GgufValue::Array(GgufArray::Bool(vec![true, false, false])),
        ),
    ];
    rewritten("qwen35", &further, "blk.2.nextn.enorm.weight", &path);
    let model = CausalLm::from_gguf(&path, &LoadOptions::default()).unwrap();
    assert_eq!(model.num_layers(), 2);
    let difference = difference(&model, "qwen35");
    assert!(difference < 1e-4, "{difference:.1e}");
    // In a layer that is read, another tensor is an error.
    rewritten("qwen35", &further, "blk.1.nextn.enorm.weight", &path);
    let error = CausalLm::from_gguf(&path, &LoadOptions::default()).unwrap_err();
    assert!(error.to_string().contains("blk.1.nextn"), "{error}");
    let short = GgufValue::Array(GgufArray::Bool(vec![true]));
    let short = [("qwen35.attention.recurrent_layers", short)];
    rewritten("qwen35", &short, "blk.2.nextn.enorm.weight", &path);
    let error = CausalLm::from_gguf(&path, &LoadOptions::default()).unwrap_err();
    assert!(error.to_string().contains("recurrent_layers"), "{error}");
}

#[test]
fn the_gate_of_a_shared_expert_may_be_a_matrix_of_one_row_as_the_converter_writes_it() {
    let folder = tempfile::tempdir().unwrap();
    for name in ["qwen2moe", "qwen3next", "qwen35moe"] {
        let path = folder.path().join(format!("{name}.gguf"));
        let mut gates = 0;
        rewritten_as(name, &[], &path, |tensors| {
            let row = |(name, tensor): (String, Tensor)| {
                if !name.ends_with("ffn_gate_inp_shexp.weight") {
                    return (name, tensor);
                }
                assert_eq!(tensor.dim(), 1);
                gates += 1;
                (name, tensor.unsqueeze(0))
            };
            tensors.into_iter().map(row).collect()
        });
        assert!(gates > 0, "{name}");
        let model = CausalLm::from_gguf(&path, &LoadOptions::default()).unwrap();
        let difference = difference(&model, name);
        assert!(difference < 1e-4, "{name}: {difference:.1e}");
    }
}

#[test]
fn frequencies_with_other_divisors_than_those_of_llama_3_are_read_as_they_were_written() {
    let model = load("llama3_rope");
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    let options = GgufOptions::new("f32".parse().unwrap());
    model.save_gguf(&path, &options).unwrap();
    let read = CausalLm::from_gguf(&path, &LoadOptions::default()).unwrap();
    let ids = Tensor::arange(40, (Kind::Int64, Device::Cpu)).view([1, 40]);
    let _no_grad = tch::no_grad_guard();
    let [wanted, found] = [&model, &read].map(|model| {
        let input = ForwardInput::new(&ids);
        model.forward(input).unwrap()
    });
    let difference = max_difference(&found, &wanted);
    assert!(difference < 1e-4, "{difference:.1e}");
}
