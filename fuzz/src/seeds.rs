//! The valid inputs from which the search starts, made by the crates' own writers where there are some.

use std::collections::BTreeMap;
use std::io::Write;
use std::path::{Path, PathBuf};

use overdrive_datasets::Result;
use overdrive_optim::StateDict;
use overdrive_snapshot::{Contents, Scope, SnapshotManager, SnapshotOptions};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use tch::{Device, Kind, Tensor};

fn tensors() -> Vec<(String, Tensor)> {
    let numbers = Tensor::arange(6, (Kind::Float, Device::Cpu)).view([2, 3]);
    vec![
        ("a.weight".to_owned(), numbers.shallow_clone()),
        ("a.bias".to_owned(), numbers.to_kind(Kind::BFloat16)),
        ("mask".to_owned(), numbers.to_kind(Kind::Bool)),
        (
            "empty".to_owned(),
            Tensor::zeros([0, 4], (Kind::Half, Device::Cpu)),
        ),
    ]
}

fn texts(values: impl IntoIterator<Item = Value>) -> Vec<Vec<u8>> {
    values
        .into_iter()
        .map(|value| value.to_string().into_bytes())
        .collect()
}

pub(crate) fn safetensors(folder: &Path) -> Vec<Vec<u8>> {
    let path = folder.join("seed.safetensors");
    let metadata = BTreeMap::from([("format".to_owned(), "pt".to_owned())]);
    overdrive_safetensors::write(&path, &tensors(), &metadata).expect("a file");
    vec![std::fs::read(path).expect("the file")]
}

pub(crate) fn state_dict(folder: &Path) -> Vec<Vec<u8>> {
    let path = folder.join("seed_state.safetensors");
    let state = StateDict {
        tensors: tensors().into_iter().take(1).collect(),
        metadata: json!({"optimizer": "AdamW", "step": 3, "groups": [{"lr": 1e-3, "names": ["a"]}]}),
    };
    state.save(&path).expect("a file");
    vec![std::fs::read(path).expect("the file")]
}

/// Only Python writes these files: the fixtures of both formats.
pub(crate) fn pickle() -> Vec<Vec<u8>> {
    let now = include_bytes!("../../crates/overdrive-pickle/tests/fixtures/tensors.bin");
    let old = include_bytes!("../../crates/overdrive-pickle/tests/fixtures/tensors_old.bin");
    vec![now.to_vec(), old.to_vec()]
}

/// There is no writer of GGUF files: the fixture is the `gguf` package's.
pub(crate) fn gguf() -> Vec<Vec<u8>> {
    let types = include_bytes!("../../crates/overdrive-quantization/tests/fixtures/types.gguf");
    vec![types.to_vec()]
}

/// A file for each kind of tokenizer.
pub(crate) fn gguf_tokenizer() -> Vec<Vec<u8>> {
    macro_rules! file {
        ($name:literal) => {
            include_bytes!(concat!(
                "../../crates/overdrive-generation/tests/fixtures/gguf/",
                $name
            ))
            .to_vec()
        };
    }
    vec![
        file!("byte_level.gguf"),
        file!("sentencepiece.gguf"),
        file!("sentencepiece_no_prefix.gguf"),
        file!("unigram.gguf"),
        file!("word_piece.gguf"),
        file!("words.gguf"),
    ]
}

pub(crate) fn config() -> Vec<Vec<u8>> {
    texts([
        json!({"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 32,
            "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
            "num_key_value_heads": 2, "max_position_embeddings": 64, "rms_norm_eps": 1e-6,
            "rope_theta": 10000.0, "tie_word_embeddings": false, "hidden_act": "silu",
            "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
                "high_freq_factor": 4.0, "original_max_position_embeddings": 32},
            "bos_token_id": 1, "eos_token_id": [2, 3]}),
        json!({"model_type": "gpt2", "vocab_size": 32, "n_positions": 64, "n_embd": 16, "n_layer": 2,
            "n_head": 4, "activation_function": "gelu_new"}),
        json!({"model_type": "gemma2", "vocab_size": 32, "hidden_size": 16, "intermediate_size": 24,
            "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4,
            "sliding_window": 8, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0,
            "query_pre_attn_scalar": 4}),
        json!({"model_type": "qwen2", "vocab_size": 32, "hidden_size": 16, "intermediate_size": 24,
            "num_hidden_layers": 2, "num_attention_heads": 4, "use_sliding_window": true,
            "max_window_layers": 1, "rope_scaling": {"type": "yarn", "factor": 4.0}}),
        json!({"model_type": "qwen3_vl", "image_token_id": 30, "tie_word_embeddings": true,
            "text_config": {"model_type": "qwen3_vl_text", "vocab_size": 32, "hidden_size": 16, "intermediate_size": 24,
                "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16,
                "rope_scaling": {"mrope_section": [4, 2, 2], "mrope_interleaved": true}},
            "vision_config": {"depth": 2, "hidden_size": 8, "num_heads": 2, "intermediate_size": 16, "patch_size": 4,
                "out_hidden_size": 16, "num_position_embeddings": 4, "deepstack_visual_indexes": [0]}}),
        json!({"model_type": "mixtral", "vocab_size": 32, "hidden_size": 16, "intermediate_size": 24,
            "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4,
            "num_experts_per_tok": 2, "output_router_logits": true, "router_jitter_noise": 0.1}),
        json!({"model_type": "qwen3_moe", "vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 2, "num_experts": 4, "num_experts_per_tok": 2,
            "moe_intermediate_size": 8, "mlp_only_layers": [0], "decoder_sparse_step": 2}),
        json!({"model_type": "smollm3", "vocab_size": 32, "hidden_size": 16, "intermediate_size": 24,
            "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "no_rope_layers": [1, 0],
            "no_rope_layer_interval": 2, "use_sliding_window": true, "sliding_window": 4}),
        json!({"model_type": "olmo3", "vocab_size": 32, "hidden_size": 16, "intermediate_size": 24,
            "num_hidden_layers": 2, "num_attention_heads": 4, "sliding_window": 4,
            "layer_types": ["sliding_attention", "full_attention"],
            "rope_parameters": {"full_attention": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 10000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0}}}),
        json!({"model_type": "granite", "vocab_size": 32, "hidden_size": 16, "intermediate_size": 24,
            "num_hidden_layers": 2, "num_attention_heads": 4, "embedding_multiplier": 12.0,
            "attention_multiplier": 0.25, "residual_multiplier": 0.22, "logits_scaling": 8.0}),
        json!({"model_type": "granitemoehybrid", "vocab_size": 32, "hidden_size": 16, "shared_intermediate_size": 24,
            "num_hidden_layers": 2, "num_attention_heads": 4, "num_local_experts": 0,
            "layer_types": ["attention", "full_attention"], "position_embedding_type": "rope"}),
        json!({"model_type": "deepseek_v2", "vocab_size": 32, "hidden_size": 16, "intermediate_size": 24,
            "num_hidden_layers": 2, "num_attention_heads": 2, "q_lora_rank": null, "kv_lora_rank": 8,
            "qk_nope_head_dim": 4, "qk_rope_head_dim": 4, "v_head_dim": 4, "n_routed_experts": 4,
            "num_experts_per_tok": 2, "moe_intermediate_size": 8, "topk_method": "group_limited_greedy",
            "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1}),
        json!({"model_type": "deepseek_v3", "vocab_size": 32, "hidden_size": 16, "intermediate_size": 24,
            "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "q_lora_rank": 8,
            "kv_lora_rank": 8, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4, "v_head_dim": 6,
            "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "n_group": 2,
            "topk_group": 1, "routed_scaling_factor": 2.5, "rope_interleave": true}),
        json!({"model_type": "ministral3", "vocab_size": 32, "hidden_size": 16, "intermediate_size": 24,
            "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
            "rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 10000.0,
                "original_max_position_embeddings": 16, "llama_4_scaling_beta": 0.1}}),
        json!({"model_type": "glm4", "vocab_size": 32, "hidden_size": 16, "intermediate_size": 24,
            "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
            "partial_rotary_factor": 0.5, "attention_bias": true}),
        json!({"model_type": "qwen2_moe", "vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 2, "num_experts": 4, "num_experts_per_tok": 2,
            "moe_intermediate_size": 8, "shared_expert_intermediate_size": 8, "qkv_bias": false}),
        json!({"model_type": "gpt_oss", "vocab_size": 32, "hidden_size": 32, "intermediate_size": 32,
            "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
            "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8, "swiglu_limit": 7.0,
            "layer_types": ["sliding_attention", "full_attention"],
            "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}}),
    ])
}

pub(crate) fn adapter_config() -> Vec<Vec<u8>> {
    texts([
        json!({"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 8, "lora_alpha": 16, "lora_dropout": 0.1,
            "target_modules": ["q_proj", "v_proj"], "bias": "none", "use_rslora": true, "use_dora": false,
            "rank_pattern": {"q_proj": 4}, "alpha_pattern": {"^v": 3}, "modules_to_save": ["lm_head"],
            "layers_to_transform": [0, 1], "layers_pattern": "layers", "init_lora_weights": "gaussian",
            "base_model_name_or_path": "a", "inference_mode": true}),
        json!({"peft_type": "LORA", "r": 1, "lora_alpha": 1, "target_modules": "all-linear"}),
        json!({"peft_type": "LORA", "r": 1, "lora_alpha": 1, "target_modules": ".*\\.(q|k)_proj$"}),
    ])
}

pub(crate) fn generation_config() -> Vec<Vec<u8>> {
    texts([
        json!({"do_sample": true, "temperature": 0.7, "top_k": 20, "top_p": 0.8, "min_p": 0.05,
            "repetition_penalty": 1.05, "eos_token_id": [2, 3], "pad_token_id": 0, "max_new_tokens": 16,
            "num_beams": 1, "transformers_version": "5.0.0"}),
        json!({"bos_token_id": 1, "eos_token_id": 2, "max_length": 4096, "bad_words_ids": [[1, 2]],
            "suppress_tokens": [3], "no_repeat_ngram_size": 2, "num_return_sequences": 2}),
    ])
}

pub(crate) fn quantization_config() -> Vec<Vec<u8>> {
    texts([
        json!({"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": false, "sym": true}),
        json!({"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": true, "version": "gemm"}),
        json!({"quant_method": "bitsandbytes", "load_in_4bit": true, "bnb_4bit_quant_type": "nf4",
            "bnb_4bit_use_double_quant": true, "bnb_4bit_compute_dtype": "bfloat16"}),
        json!({"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups":
            {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "int",
            "symmetric": true, "strategy": "group", "group_size": 32}}}, "ignore": ["lm_head"]}),
        json!({"quant_method": "fp8", "weight_block_size": [128, 128]}),
    ])
}

pub(crate) fn tokenizer() -> Vec<Vec<u8>> {
    let trained =
        include_bytes!("../../crates/overdrive-datasets/tests/fixtures/tokenizer_fixture.json");
    let words = json!({"version": "1.0", "added_tokens": [{"id": 2, "content": "<s>", "single_word": false,
        "lstrip": true, "rstrip": true, "normalized": false, "special": true}],
        "normalizer": {"type": "Sequence", "normalizers": [{"type": "NFC"}, {"type": "Lowercase"}]},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "Whitespace"},
            {"type": "Split", "pattern": {"Regex": "\\d"}, "behavior": "Isolated", "invert": false}]},
        "post_processor": {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "<s>",
            "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}], "pair": [], "special_tokens":
            {"<s>": {"id": "<s>", "ids": [2], "tokens": ["<s>"]}}},
        "decoder": {"type": "ByteFallback"},
        "model": {"type": "WordLevel", "vocab": {"a": 0, "fn": 1}, "unk_token": "a"}});
    let pieces = json!({"version": "1.0", "added_tokens": [],
        "pre_tokenizer": {"type": "Metaspace", "replacement": "\u{2581}", "prepend_scheme": "always"},
        "decoder": {"type": "Metaspace", "replacement": "\u{2581}", "prepend_scheme": "always"},
        "model": {"type": "Unigram", "unk_id": 0, "byte_fallback": true,
            "vocab": [["<unk>", 0.0], ["\u{2581}f", -1.5], ["n", -2.0]]}});
    let mut all = texts([words, pieces]);
    all.push(trained.to_vec());
    all
}

pub(crate) fn chat_template() -> Vec<Vec<u8>> {
    [
        "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] | trim \
         }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
        "{% set ns = namespace(n=0) %}{% for m in messages %}{% if m.role == 'assistant' %}\
         {% generation %}{{ m.content }}{% endgeneration %}{% set ns.n = ns.n + 1 %}{% else %}\
         {{ m.content[:3] ~ ns.n }}{% endif %}{% if loop.last %}{% break %}{% endif %}{% endfor %}",
        "{% macro text(x, n=2) %}{{ x | upper * n }}{% endmacro %}{{ text(messages[0].content) }}\
         {{ messages | tojson(indent=2) }}{{ messages | length }}{{ strftime_now('%Y') }}\
         {% if tools is not none and not tools %}{{ raise_exception('no tools') }}{% endif %}",
        "{{ messages[0]['content'].split(' ') | join(',') | replace('e', 'i') }}{{ range(3) | list }}",
        "{% set a, b = 'x%5.2f', {'k': [1, -2.5, none]} %}{{ a % b.k[1] }}{{ '{:>8,}|{!r}'.format(2 ** 40, b) }}\
         {% for k, v in b.items() if v is sequence recursive %}{{ loop.index }}{{ v[::-1] }}{% else %}-{% endfor %}",
        "{% call(x) m(1, *[2], k=3) %}{{ x | indent(2) | wordwrap(9) | truncate(5) }}{% endcall %}\
         {% filter title %}{{ messages | map(attribute='role') | unique | sort(reverse=true) | batch(2) | list }}{% endfilter %}",
    ]
    .map(|text| text.as_bytes().to_vec())
    .to_vec()
}

pub(crate) fn package(folder: &Path) -> Vec<Vec<u8>> {
    use zip::write::SimpleFileOptions;
    use zip::{CompressionMethod, ZipWriter};
    let manifest = json!({"format_version": 1, "torch": "2.11.0", "kind": "logits",
        "inputs": [{"name": "x", "shape": [1, {"min": 1, "max": 8}], "dtype": "int64"}], "outputs": []});
    let metadata = json!({"AOTI_DEVICE_KEY": "cpu", "AOTI_MACHINE": "x86_64",
        "overdrive": manifest.to_string()});
    let model = "p/data/aotinductor/model";
    let entries = [
        (format!("{model}/a.wrapper.so"), b"no library".to_vec()),
        (
            format!("{model}/a.wrapper_metadata.json"),
            metadata.to_string().into_bytes(),
        ),
        ("p/archive_format".to_owned(), b"pt2".to_vec()),
        ("p/archive_version".to_owned(), b"0".to_vec()),
    ];
    let path = folder.join("seed.pt2");
    let seed = |method| {
        let mut writer = ZipWriter::new(std::fs::File::create(&path).expect("a file"));
        let options = SimpleFileOptions::default().compression_method(method);
        for (name, bytes) in &entries {
            writer.start_file(name.as_str(), options).expect("an entry");
            writer.write_all(bytes).expect("an entry");
        }
        writer.finish().expect("an archive");
        std::fs::read(&path).expect("the archive")
    };
    vec![
        seed(CompressionMethod::Stored),
        seed(CompressionMethod::Deflated),
    ]
}

/// Writes a snapshot and moves it to `folder`. The seed is its manifest.
pub(crate) fn snapshot(folder: &Path) -> Vec<Vec<u8>> {
    let run = folder.with_file_name("seed_run");
    for old in [&run, folder] {
        if old.exists() {
            std::fs::remove_dir_all(old).expect("a folder for temporary files");
        }
    }
    let mut manager = SnapshotManager::open(&run, SnapshotOptions::default()).expect("a folder");
    let mut contents = Contents::at(3);
    contents
        .tensors("model", Scope::Run, tensors())
        .expect("a name");
    contents.document("steps", Scope::Run, &3).expect("a name");
    contents.metric(0.5);
    manager.save(contents).expect("a snapshot");
    manager.wait().expect("a snapshot");
    std::fs::rename(run.join("checkpoint-3"), folder).expect("a snapshot");
    vec![std::fs::read(folder.join("manifest.json")).expect("the manifest")]
}

/// Returns the manifest with the right checksum, if it has the form of one.
pub(crate) fn with_checksum(bytes: &[u8]) -> Option<Vec<u8>> {
    let mut manifest: Value = serde_json::from_slice(bytes).ok()?;
    let number = |name: &str| manifest.get(name).and_then(Value::as_u64);
    let metric = manifest
        .get("metric")
        .and_then(Value::as_f64)
        .map(f64::to_bits);
    let (version, step, ranks) = (
        number("format_version")?,
        number("step")?,
        number("world_size")?,
    );
    let mut hasher = Sha256::new();
    hasher.update(format!("{version} {step} {ranks} {metric:?}\n"));
    for file in manifest.get("files")?.as_array()? {
        let (name, sum) = (file.get("name")?.as_str()?, file.get("sha256")?.as_str()?);
        hasher.update(format!("{name} {} {sum}\n", file.get("bytes")?.as_u64()?));
    }
    let sum = hasher.finalize();
    let sum: String = sum.iter().map(|byte| format!("{byte:02x}")).collect();
    manifest["checksum"] = sum.into();
    Some(manifest.to_string().into_bytes())
}

/// Writes a megabyte of lines into `folder`, since smaller files have no index, and lets `open` build the index.
/// Returns it and its path.
pub(crate) fn index(folder: &Path, open: impl Fn(&Path) -> Result<()>) -> (Vec<Vec<u8>>, PathBuf) {
    std::fs::create_dir_all(folder).expect("a folder for temporary files");
    let lines: String = (0..60_000)
        .map(|line| format!("line {line} of the data\n"))
        .collect();
    std::fs::write(folder.join("data.txt"), lines).expect("a file");
    open(folder).expect("an index");
    let found = overdrive_datasets::find_files([folder.join("indexes")], &["ovidx"]);
    let index = found.expect("an index").remove(0);
    (vec![std::fs::read(&index).expect("the index")], index)
}
