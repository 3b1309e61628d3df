//! Saving and loading folders: their tensors, transformers' logits from them, and folders that are refused.

use std::collections::HashMap;
use std::fs;
use std::path::Path;
use std::process::Command;

use crate::common::{CASES, copy_of, edit_config, expected, fixture, load, max_difference};
use crate::on_python::python;
use overdrive_transformer::{
    CausalLm, ForwardInput, Gpt2Config, InitOptions, LlamaConfig, LlamaFamily, LoadOptions,
    ModelConfig, RopeScaling, SaveOptions,
};
use safetensors::SafeTensors;
use tch::{Kind, Tensor};

/// Raw bytes of every tensor in the weight files of a folder.
fn raw(dir: &Path) -> HashMap<String, (Vec<usize>, Vec<u8>)> {
    let mut tensors = HashMap::new();
    for entry in fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_str().unwrap();
        if name.starts_with("model") && name.ends_with(".safetensors") {
            let bytes = fs::read(&path).unwrap();
            for (name, view) in SafeTensors::deserialize(&bytes).unwrap().tensors() {
                tensors.insert(name, (view.shape().to_vec(), view.data().to_vec()));
            }
        }
    }
    tensors
}

fn refusal(dir: &Path) -> String {
    CausalLm::from_pretrained(dir, &LoadOptions::default())
        .unwrap_err()
        .to_string()
}

#[test]
fn a_checkpoint_saved_again_has_the_same_tensors_bit_for_bit() {
    for case in CASES {
        for shard in [u64::MAX, 20_000] {
            let dir = tempfile::tempdir().unwrap();
            let options = SaveOptions {
                max_shard_bytes: shard,
            };
            load(case).save_pretrained(dir.path(), &options).unwrap();
            assert_eq!(raw(dir.path()), raw(&fixture(case)), "{case}");
            let sharded = dir.path().join("model.safetensors.index.json").exists();
            assert_eq!(sharded, shard < u64::MAX, "{case}");
            let again = CausalLm::from_pretrained(dir.path(), &LoadOptions::default()).unwrap();
            assert_eq!(again.config(), &expected_after_a_round(case), "{case}");
            assert_eq!(
                again.generation_config(),
                load(case).generation_config(),
                "{case}"
            );
        }
    }
}

/// A configuration read, written and read again: sizes that were implied are now given.
fn expected_after_a_round(case: &str) -> ModelConfig {
    let mut config = load(case).config().clone();
    if let ModelConfig::Llama(llama) = &mut config
        && llama.mla.is_none()
    {
        llama.head_dim = Some(llama.head_dim());
        llama.num_key_value_heads = Some(llama.kv_heads());
    }
    config
}

#[test]
fn saving_over_another_checkpoint_leaves_none_of_its_weights() {
    let dir = tempfile::tempdir().unwrap();
    let shards = SaveOptions {
        max_shard_bytes: 20_000,
    };
    load("gpt2").save_pretrained(dir.path(), &shards).unwrap();
    load("qwen3")
        .save_pretrained(dir.path(), &SaveOptions::default())
        .unwrap();
    assert_eq!(raw(dir.path()), raw(&fixture("qwen3")));
    load("gpt2").save_pretrained(dir.path(), &shards).unwrap();
    assert_eq!(raw(dir.path()), raw(&fixture("gpt2")));
    let names: Vec<_> = fs::read_dir(dir.path())
        .unwrap()
        .map(|e| e.unwrap().file_name().into_string())
        .collect();
    assert!(
        names.iter().flatten().all(|name| !name.ends_with(".tmp")),
        "{names:?}"
    );
}

#[test]
fn saving_leaves_the_files_of_the_user() {
    let dir = tempfile::tempdir().unwrap();
    let merged = dir.path().join("model-merged.safetensors");
    fs::write(&merged, b"mine").unwrap();
    let folder = dir.path().join("model-00001-of-00002.safetensors");
    fs::create_dir(&folder).unwrap();
    load("qwen3")
        .save_pretrained(dir.path(), &SaveOptions::default())
        .unwrap();
    assert_eq!(fs::read(&merged).unwrap(), b"mine");
    assert!(folder.is_dir());
}

#[test]
fn low_precision_is_written_as_it_is_and_named_in_the_configuration() {
    let dir = tempfile::tempdir().unwrap();
    let options = LoadOptions {
        kind: Some(Kind::BFloat16),
        ..LoadOptions::default()
    };
    let model = CausalLm::from_pretrained(fixture("qwen2"), &options).unwrap();
    model
        .save_pretrained(dir.path(), &SaveOptions::default())
        .unwrap();
    let text = fs::read_to_string(dir.path().join("config.json")).unwrap();
    assert!(text.contains(r#""torch_dtype": "bfloat16""#), "{text}");
    let again = CausalLm::from_pretrained(dir.path(), &LoadOptions::default()).unwrap();
    assert_eq!(
        again.kind(),
        Kind::BFloat16,
        "the default is the kind in the file"
    );
    for ((name, a), (_, b)) in model
        .named_parameters()
        .iter()
        .zip(again.named_parameters())
    {
        assert_eq!(*a, b, "{name}");
    }
}

#[test]
#[ignore = "needs Python with torch, transformers and safetensors"]
fn transformers_loads_what_is_written_and_computes_the_same_on_python() {
    let python = python(&["transformers", "torch", "safetensors"]);
    let root = tempfile::tempdir().unwrap();
    let save = |name: &str, model: &CausalLm, ids: &Tensor, shard: u64| {
        let dir = root.path().join(name);
        let options = SaveOptions {
            max_shard_bytes: shard,
        };
        model.save_pretrained(&dir, &options).unwrap();
        let logits = model.forward(ForwardInput::new(ids)).unwrap().detach();
        Tensor::write_safetensors(&[("ids", ids), ("logits", &logits)], dir.join("ours.st"))
            .unwrap();
    };
    for case in CASES {
        let ids = &expected(case)["input_ids"];
        save(
            case,
            &load(case),
            ids,
            if case == "qwen3" { 30_000 } else { u64::MAX },
        );
    }
    // And one of each kind that was never a checkpoint.
    let ids = Tensor::from_slice(&[1i64, 5, 9, 30, 2, 7]).view([1, 6]);
    for (name, config) in fresh_configs() {
        save(
            name,
            &CausalLm::new(&config, &InitOptions::default()).unwrap(),
            &ids,
            u64::MAX,
        );
    }
    let script = r#"
import pathlib, sys, torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, GenerationConfig
for folder in sorted(pathlib.Path(sys.argv[1]).iterdir()):
    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    bad = {k: v for k, v in info.items() if v}
    assert not bad, (folder.name, bad)
    ours = load_file(folder / "ours.st")
    with torch.no_grad():
        theirs = model.eval()(ours["ids"]).logits
    difference = (theirs - ours["logits"]).abs().max().item()
    assert difference < 1e-5, (folder.name, difference)
    GenerationConfig.from_pretrained(folder)
    print(folder.name, type(model).__name__, f"{difference:.1e}")
"#;
    let output = Command::new(&python)
        .arg("-c")
        .arg(script)
        .arg(root.path())
        .output()
        .unwrap();
    let (out, err) = (
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr),
    );
    assert!(output.status.success(), "{out}\n{err}");
    println!("{out}");
    assert_eq!(
        out.lines().count(),
        CASES.len() + fresh_configs().len(),
        "{out}"
    );
}

fn small(family: LlamaFamily) -> LlamaConfig {
    LlamaConfig {
        vocab_size: 40,
        hidden_size: 24,
        intermediate_size: 20,
        num_hidden_layers: 3,
        num_attention_heads: 4,
        num_key_value_heads: Some(2),
        head_dim: None,
        // That of a family may be beyond so small a vocabulary, which transformers refuses.
        pad_token_id: None,
        ..LlamaConfig::of(family)
    }
}

fn fresh_configs() -> Vec<(&'static str, ModelConfig)> {
    let scaled = LlamaConfig {
        rope_scaling: RopeScaling::Llama3 {
            factor: 4.0,
            low_freq_factor: 1.0,
            high_freq_factor: 4.0,
            original_max_position_embeddings: 16,
        },
        rope_theta: 500_000.0,
        attention_bias: true,
        ..small(LlamaFamily::Llama)
    };
    let windowed = LlamaConfig {
        use_sliding_window: true,
        sliding_window: Some(3),
        max_window_layers: 2,
        tie_word_embeddings: true,
        ..small(LlamaFamily::Qwen3)
    };
    let gpt2 = Gpt2Config {
        vocab_size: 40,
        n_embd: 24,
        n_layer: 2,
        n_head: 3,
        n_positions: 16,
        ..Gpt2Config::default()
    };
    let glm4 = LlamaConfig {
        head_dim: Some(8),
        ..small(LlamaFamily::Glm4)
    };
    let mut gpt_oss = small(LlamaFamily::GptOss);
    if let Some(experts) = &mut gpt_oss.experts {
        experts.num_experts = 5;
    }
    vec![
        ("fresh_llama", scaled.into()),
        ("fresh_mistral", small(LlamaFamily::Mistral).into()),
        ("fresh_qwen2", small(LlamaFamily::Qwen2).into()),
        ("fresh_qwen3", windowed.into()),
        ("fresh_mixtral", small(LlamaFamily::Mixtral).into()),
        ("fresh_smollm3", small(LlamaFamily::SmolLm3).into()),
        ("fresh_olmo2", small(LlamaFamily::Olmo2).into()),
        ("fresh_olmo3", small(LlamaFamily::Olmo3).into()),
        ("fresh_granite", small(LlamaFamily::Granite).into()),
        (
            "fresh_granite4",
            small(LlamaFamily::GraniteMoeHybrid).into(),
        ),
        ("fresh_glm4", glm4.into()),
        ("fresh_gpt_oss", gpt_oss.into()),
        ("fresh_gpt2", gpt2.into()),
    ]
}

#[test]
fn names_without_the_prefix_of_the_decoder_are_read_as_well() {
    for case in ["gpt2", "llama_gqa"] {
        let dir = copy_of(case);
        let path = dir.path().join("model.safetensors");
        let renamed: Vec<(String, Tensor)> = Tensor::read_safetensors(&path)
            .unwrap()
            .into_iter()
            .map(|(name, tensor)| {
                let bare = name
                    .replacen("transformer.", "", 1)
                    .replacen("model.", "", 1);
                (bare, tensor)
            })
            .chain([
                // Buffers that older versions wrote beside the weights.
                (
                    "h.0.attn.bias".to_owned(),
                    Tensor::ones([1, 1, 64, 64], tch::kind::FLOAT_CPU),
                ),
                ("h.0.attn.masked_bias".to_owned(), Tensor::from(-1e4f32)),
            ])
            .collect();
        Tensor::write_safetensors(&renamed, &path).unwrap();
        let model = CausalLm::from_pretrained(dir.path(), &LoadOptions::default()).unwrap();
        let want = expected(case);
        let got = model
            .forward(ForwardInput::new(&want["input_ids"]))
            .unwrap();
        assert!(max_difference(&got, &want["logits"]) < 1e-5, "{case}");
    }
}

#[test]
fn a_tied_head_is_read_under_either_name() {
    let dir = copy_of("llama_tied_biases");
    let path = dir.path().join("model.safetensors");
    let original = Tensor::read_safetensors(&path).unwrap();
    let want = expected("llama_tied_biases");
    for both in [false, true] {
        let tensors: Vec<(String, Tensor)> = original
            .iter()
            .flat_map(|(name, tensor)| {
                let head = ("lm_head.weight".to_owned(), tensor.shallow_clone());
                let own = (name.clone(), tensor.shallow_clone());
                match (name == "model.embed_tokens.weight", both) {
                    (true, true) => vec![own, head],
                    (true, false) => vec![head],
                    (false, _) => vec![own],
                }
            })
            .collect();
        Tensor::write_safetensors(&tensors, &path).unwrap();
        let model = CausalLm::from_pretrained(dir.path(), &LoadOptions::default()).unwrap();
        let got = model
            .forward(ForwardInput::new(&want["input_ids"]))
            .unwrap();
        assert!(max_difference(&got, &want["logits"]) < 1e-5);
    }
}

#[test]
fn all_missing_unexpected_misshapen_and_unreadable_tensors_are_named() {
    let dir = copy_of("llama_gqa");
    let path = dir.path().join("model.safetensors");
    let tensors: Vec<(String, Tensor)> = Tensor::read_safetensors(&path)
        .unwrap()
        .into_iter()
        .filter(|(name, _)| name != "model.norm.weight" && !name.ends_with("1.mlp.up_proj.weight"))
        .map(|(name, tensor)| match name.as_str() {
            "lm_head.weight" => (name, tensor.narrow(0, 0, 100).contiguous()),
            "model.layers.0.input_layernorm.weight" => (name, tensor.to_kind(Kind::Int64)),
            _ => (name, tensor),
        })
        .chain([("model.surprise".to_owned(), Tensor::from(1f32))])
        .collect();
    Tensor::write_safetensors(&tensors, &path).unwrap();
    let message = refusal(dir.path());
    for part in [
        "2 missing: model.layers.1.mlp.up_proj.weight, model.norm.weight",
        "1 unexpected: model.surprise",
        "1 of another shape: lm_head.weight (found [100, 32], expected [128, 32])",
        "1 of an unreadable format: model.layers.0.input_layernorm.weight (I64",
    ] {
        assert!(message.contains(part), "{message}");
    }
}

#[test]
fn files_cut_short_damaged_or_absent_are_refused() {
    let dir = copy_of("gpt2");
    let path = dir.path().join("model.safetensors");
    let whole = fs::read(&path).unwrap();
    for keep in [0, 4, 8, 100, whole.len() / 2, whole.len() - 1] {
        fs::write(&path, &whole[..keep]).unwrap();
        let message = refusal(dir.path());
        assert!(
            message.contains("model.safetensors") && message.contains("complete"),
            "{message}"
        );
    }
    let mut damaged = whole.clone();
    damaged[10] = b'!';
    fs::write(&path, &damaged).unwrap();
    assert!(refusal(dir.path()).contains("not a complete safetensors file"));
    fs::write(&path, [&whole[..], b"more"].concat()).unwrap();
    assert!(refusal(dir.path()).contains("not a complete safetensors file"));
    fs::remove_file(&path).unwrap();
    assert!(refusal(dir.path()).contains("neither model.safetensors nor"));
    fs::remove_file(dir.path().join("config.json")).unwrap();
    assert!(refusal(dir.path()).contains("config.json"));

    let dir = copy_of("llama_sharded");
    fs::remove_file(dir.path().join("model-00002-of-00003.safetensors")).unwrap();
    assert!(refusal(dir.path()).contains("model-00002-of-00003.safetensors"));
    let index = dir.path().join("model.safetensors.index.json");
    fs::write(
        &index,
        r#"{"metadata": {}, "weight_map": {"a": "../elsewhere"}}"#,
    )
    .unwrap();
    assert!(refusal(dir.path()).contains("the name of a file in the same folder"));
    fs::write(&index, "{").unwrap();
    assert!(refusal(dir.path()).contains("not valid JSON"));
}

#[test]
fn configurations_that_cannot_be_computed_are_refused_with_the_way_out() {
    let check = |case: &str, key: &str, value: serde_json::Value, part: &str| {
        let dir = copy_of(case);
        edit_config(dir.path(), |config| {
            config.insert(key.to_owned(), value);
        });
        let message = refusal(dir.path());
        assert!(message.contains(part), "{message}");
    };
    use serde_json::json;
    check(
        "gpt2",
        "model_type",
        json!("mamba"),
        "supported: llama, mistral, qwen2, qwen3, phi, phi3, gemma, gemma2, gemma3_text, mixtral, qwen3_moe, smollm3, olmo2, olmo3, granite, glm4, qwen2_moe, gpt_oss, ministral3, granitemoehybrid, deepseek_v2, deepseek_v3, qwen3_next, qwen3_5_text, qwen3_5_moe_text, gemma3n_text, gemma4_text, gemma3, gemma3n, gemma4, mistral3, qwen3_5, qwen3_5_moe, qwen3_vl, qwen3_vl_moe, gpt2",
    );
    for (other, reader) in [
        ("t5", "Seq2SeqLm"),
        ("modernbert", "EncoderModel, MaskedLm or SequenceClassifier"),
    ] {
        let part = format!("; use {reader} for models of type {other}");
        check("gpt2", "model_type", json!(other), &part);
    }
    check("gpt2", "model_type", json!(null), "`model_type` is missing");
    check("gpt2", "n_head", json!(5), "a multiple of n_head (5)");
    // As gte-Qwen2 has it.
    check("qwen2", "is_causal", json!(false), "`is_causal` is false");
    // Sizes that no memory holds: each is refused before anything is reserved or counted to.
    let huge = || json!(4_611_686_018_427_387_904_i64);
    for (case, layers) in [("gpt2", "n_layer"), ("llama_gqa", "num_hidden_layers")] {
        let message =
            format!("`{layers}` is 4611686018427387904; it must be a positive integer, at most");
        check(case, layers, huge(), &message);
        check(
            case,
            layers,
            json!(u64::MAX),
            "is 18446744073709551615; it must be",
        );
        check(case, layers, json!(65_537), "at most 65536");
        check(
            case,
            layers,
            json!(60_000),
            "the number of tensors in the weight files",
        );
    }
    for key in [
        "vocab_size",
        "hidden_size",
        "head_dim",
        "max_position_embeddings",
    ] {
        check(
            "llama_gqa",
            key,
            huge(),
            &format!("`{key}` is 4611686018427387904; it must be"),
        );
    }
    check("gpt2", "n_embd", huge(), "`n_embd` is 4611686018427387904");
    check("gpt2", "n_inner", json!(i32::MAX), "of another shape");
    check(
        "qwen2_sliding",
        "sliding_window",
        huge(),
        "`sliding_window` is 46",
    );
    check(
        "gpt2",
        "n_layer",
        json!("2"),
        "`n_layer` is \"2\"; it must be a positive integer",
    );
    check(
        "gpt2",
        "add_cross_attention",
        json!(true),
        "a decoder without an encoder",
    );
    check(
        "llama_gqa",
        "hidden_act",
        json!("selu"),
        "supported: silu, gelu",
    );
    check(
        "llama_gqa",
        "num_key_value_heads",
        json!(3),
        "a divisor of num_attention_heads (4)",
    );
    check(
        "llama_gqa",
        "hidden_size",
        json!(-32),
        "`hidden_size` is -32",
    );
    check("llama_gqa", "hidden_size", json!(64), "of another shape");
    check(
        "llama_gqa",
        "rms_norm_eps",
        json!("tiny"),
        "`rms_norm_eps` is \"tiny\"",
    );
    check(
        "llama_gqa",
        "tie_word_embeddings",
        json!("yes"),
        "it must be true or false",
    );
    check("llama_gqa", "head_dim", json!(7), "even");
    let yarn = json!({"rope_type": "mrope", "factor": 4.0});
    check(
        "llama_gqa",
        "rope_parameters",
        yarn,
        "\"mrope\", which is not supported; supported: default",
    );
    let linear = json!({"rope_type": "linear"});
    check(
        "llama_gqa",
        "rope_parameters",
        linear,
        "`rope_parameters.factor` is missing",
    );
    check(
        "qwen2_sliding",
        "layer_types",
        json!(["full_attention"]),
        "num_hidden_layers (2)",
    );
    check(
        "qwen2_sliding",
        "layer_types",
        json!(["chunked_attention", "x"]),
        "sliding_attention",
    );
}

#[test]
fn sizes_whose_products_do_not_fit_are_refused_for_a_new_model_too() {
    let large = i64::from(i32::MAX) - 1;
    let llama = LlamaConfig {
        hidden_size: large,
        intermediate_size: large,
        vocab_size: large,
        num_attention_heads: large,
        head_dim: Some(large),
        ..LlamaConfig::default()
    };
    let gpt2 = Gpt2Config {
        n_embd: large,
        n_inner: Some(large),
        n_head: 1,
        ..Gpt2Config::default()
    };
    let deep = LlamaConfig {
        num_hidden_layers: 1 << 62,
        ..LlamaConfig::default()
    };
    let wide = Gpt2Config {
        n_embd: i64::MAX,
        ..Gpt2Config::default()
    };
    for (config, part) in [
        (
            ModelConfig::from(llama),
            "at most 1152921504606846975 parameters",
        ),
        (gpt2.into(), "at most 1152921504606846975 parameters"),
        (
            deep.into(),
            "`num_hidden_layers` is 4611686018427387904; it must be a positive integer, at most 65536",
        ),
        (
            wide.into(),
            "`n_embd` is 9223372036854775807; it must be a positive integer, at most 2147483647",
        ),
    ] {
        let error = CausalLm::new(&config, &InitOptions::default()).unwrap_err();
        assert!(error.to_string().contains(part), "{error}");
    }
}

#[test]
fn a_pattern_of_sliding_layers_is_not_listed_for_more_layers_than_there_may_be() {
    let json = r#"{"model_type": "gemma3_text", "sliding_window_pattern": 6, "num_hidden_layers": 4611686018427387904}"#;
    let error = ModelConfig::from_json(json).unwrap_err().to_string();
    assert!(
        error.contains("`num_hidden_layers` is 4611686018427387904"),
        "{error}"
    );
}

#[test]
fn rotary_scaling_of_transformers_4_is_read() {
    let parse = |text: &str| match ModelConfig::from_json(text).unwrap() {
        ModelConfig::Llama(config) => config,
        other => panic!("{other:?}"),
    };
    let old = parse(
        r#"{"model_type": "llama", "rope_theta": 500000.0, "rope_scaling": {"type": "linear", "factor": 2}}"#,
    );
    assert_eq!(
        (old.rope_theta, old.rope_scaling),
        (5e5, RopeScaling::Linear { factor: 2.0 })
    );
    let null = parse(r#"{"model_type": "llama", "rope_scaling": null, "my_own_key": [1, 2]}"#);
    assert_eq!(
        (null.rope_theta, null.rope_scaling.clone()),
        (1e4, RopeScaling::Default)
    );
    let written = ModelConfig::from(null).to_json();
    assert_eq!(
        written["my_own_key"],
        serde_json::json!([1, 2]),
        "unknown keys are kept"
    );
}
