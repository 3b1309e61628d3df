//! The memory and the progress of loading, and shards that do not fit. One test reads the memory statistics of
//! the process, so the tests of this file run one at a time.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

#[path = "it/common.rs"]
mod common;

use std::fs;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use common::{copy_of, expected, max_difference};
use overdrive_sys::memory;
use overdrive_transformer::{
    CausalLm, ForwardInput, InitOptions, LlamaConfig, LlamaFamily, LoadOptions, LoadProgress,
    SaveOptions,
};
use tch::{Device, Kind, Tensor};

fn alone() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Returns the model, and the peak and the final tensor memory of `make`, both beyond the memory before it.
fn measured(make: impl FnOnce() -> CausalLm) -> (CausalLm, u64, u64) {
    let before = memory::stats(Device::Cpu).unwrap().allocated_bytes;
    memory::reset_peak(Device::Cpu).unwrap();
    let model = make();
    let after = memory::stats(Device::Cpu).unwrap();
    let (peak, live) = (after.peak_allocated_bytes, after.allocated_bytes);
    (model, peak - before, live - before)
}

#[test]
fn loading_takes_the_memory_of_the_model_and_no_copy_beside_it() {
    let _turn = alone();
    // 4.3 million parameters, 30% of them in one tensor, the rest in joint projections mostly.
    let config = LlamaConfig {
        vocab_size: 5000,
        hidden_size: 256,
        intermediate_size: 768,
        num_hidden_layers: 4,
        num_attention_heads: 8,
        num_key_value_heads: Some(2),
        head_dim: None,
        tie_word_embeddings: true,
        ..LlamaConfig::of(LlamaFamily::Qwen2)
    };
    let config = config.into();
    let (model, peak, live) = measured(|| CausalLm::new(&config, &InitOptions::default()).unwrap());
    let parameters = model.num_parameters() as u64;
    // Beside the model: a part of 2^20 random numbers, in made; tables of positions, in neither.
    println!("made:   peak {peak}, model {}", 4 * parameters);
    assert!(live < 4 * parameters + 100_000, "{live}");
    assert!(peak < 4 * parameters + (4 << 20) + 100_000, "{peak}");

    let dir = tempfile::tempdir().unwrap();
    let options = SaveOptions {
        max_shard_bytes: 8 << 20,
    };
    model.save_pretrained(dir.path(), &options).unwrap();
    drop(model);
    for (kind, size) in [
        (None, 4),
        (Some(Kind::BFloat16), 2),
        (Some(Kind::Double), 8),
    ] {
        let options = LoadOptions {
            kind,
            ..LoadOptions::default()
        };
        let load = || CausalLm::from_pretrained(dir.path(), &options).unwrap();
        let (_model, peak, live) = measured(load);
        println!("{kind:?}: peak {peak}, model {}", size * parameters);
        assert!(live >= size * parameters);
        // The rest is headers of allocations: not one tensor, and no shard.
        assert!(peak < size * parameters + 10_000, "{kind:?}: {peak}");
    }
}

#[test]
fn progress_is_reported_from_zero_to_all_bytes() {
    let _turn = alone();
    let seen: Arc<Mutex<Vec<(u64, u64)>>> = Arc::default();
    let told = seen.clone();
    let options = LoadOptions {
        progress: Some(LoadProgress::new(move |done, all| {
            told.lock().unwrap().push((done, all));
        })),
        // The bytes that are read count, whatever the dtype in memory.
        kind: Some(Kind::Half),
        ..LoadOptions::default()
    };
    let model = CausalLm::from_pretrained(common::fixture("llama_sharded"), &options).unwrap();
    let seen = seen.lock().unwrap();
    let all = 4 * model.num_parameters() as u64;
    assert_eq!(seen.len(), model.named_parameters().len() + 1);
    assert_eq!((seen[0], seen[seen.len() - 1]), ((0, all), (all, all)));
    assert!(
        seen.windows(2)
            .all(|pair| pair[0].0 < pair[1].0 && pair[1].1 == all)
    );
}

fn refusal(dir: &Path) -> String {
    CausalLm::from_pretrained(dir, &LoadOptions::default())
        .unwrap_err()
        .to_string()
}

const SECOND: &str = "model-00002-of-00003.safetensors";

#[test]
fn a_missing_shard_is_named_with_what_should_be_in_it() {
    let _turn = alone();
    let dir = copy_of("llama_sharded");
    fs::remove_file(dir.path().join(SECOND)).unwrap();
    let message = refusal(dir.path());
    assert!(
        message.ends_with(
            "model-00002-of-00003.safetensors is missing, but model.safetensors.index.json lists 10 tensors in it; fetch it again"
        ),
        "{message}"
    );
}

#[test]
fn a_shard_cut_short_or_of_another_format_is_named() {
    let _turn = alone();
    let dir = copy_of("llama_sharded");
    let path = dir.path().join(SECOND);
    let whole = fs::read(&path).unwrap();
    let pointer: &[u8] = b"version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 5\n";
    for (bytes, part) in [
        (&whole[..whole.len() - 1], "not a complete safetensors file"),
        (&whole[..whole.len() / 2], "not a complete safetensors file"),
        (&[], "not a complete safetensors file"),
        (b"<!DOCTYPE html><html>", "not a complete safetensors file"),
        (pointer, "a Git LFS pointer and not the file itself"),
    ] {
        fs::write(&path, bytes).unwrap();
        let message = refusal(dir.path());
        assert!(
            message.contains(SECOND) && message.contains(part),
            "{message}"
        );
    }
}

#[test]
fn a_shard_that_contradicts_the_index_is_refused() {
    let _turn = alone();
    let dir = copy_of("llama_sharded");
    let path = dir.path().join(SECOND);
    let original = Tensor::read_safetensors(&path).unwrap();
    // One tensor less than the index says, one of another shape, one of another format.
    let names: Vec<&String> = original.iter().map(|(name, _)| name).collect();
    let changed = |at: usize| -> Vec<(String, Tensor)> {
        let tensors = original.iter().enumerate();
        tensors
            .filter(|(place, _)| at != 0 || *place != 0)
            .map(|(place, (name, tensor))| match (at, place) {
                (1, 1) => (name.clone(), tensor.unsqueeze(0)),
                (2, 2) => (name.clone(), tensor.to_kind(Kind::Int)),
                _ => (name.clone(), tensor.shallow_clone()),
            })
            .collect()
    };
    for (at, what) in [
        "1 missing",
        "1 of another shape",
        "1 of an unreadable format",
    ]
    .into_iter()
    .enumerate()
    {
        Tensor::write_safetensors(&changed(at), &path).unwrap();
        let message = refusal(dir.path());
        assert!(
            message.contains(&format!("{what}: {}", names[at])),
            "{message}"
        );
    }
}

#[test]
fn a_tensor_in_two_shards_is_taken_from_the_one_that_the_index_names() {
    let _turn = alone();
    let dir = copy_of("llama_sharded");
    let path = dir.path().join(SECOND);
    let first = Tensor::read_safetensors(dir.path().join("model-00001-of-00003.safetensors"));
    let (name, tensor) = first.unwrap().remove(0);
    let mut second = Tensor::read_safetensors(&path).unwrap();
    second.push((name, tensor.zeros_like()));
    Tensor::write_safetensors(&second, &path).unwrap();
    let model = CausalLm::from_pretrained(dir.path(), &LoadOptions::default()).unwrap();
    let want = expected("llama_sharded");
    let got = model
        .forward(ForwardInput::new(&want["input_ids"]))
        .unwrap();
    assert!(max_difference(&got, &want["logits"]) < 1e-5);
}

#[test]
fn parameters_of_several_dtypes_keep_their_dtypes() {
    let _turn = alone();
    let dir = copy_of("llama_gqa");
    let path = dir.path().join("model.safetensors");
    let mixed: Vec<(String, Tensor)> = Tensor::read_safetensors(&path)
        .unwrap()
        .into_iter()
        .map(|(name, tensor)| match name.contains("k_proj") {
            true => (name, tensor.to_kind(Kind::Double)),
            false => (name, tensor),
        })
        .collect();
    Tensor::write_safetensors(&mixed, &path).unwrap();
    let model = CausalLm::from_pretrained(dir.path(), &LoadOptions::default()).unwrap();
    for (name, tensor) in model.named_parameters() {
        let (_, stored) = mixed.iter().find(|(other, _)| *other == name).unwrap();
        assert_eq!((tensor.kind(), &tensor), (stored.kind(), stored), "{name}");
    }
    let options = LoadOptions {
        kind: Some(Kind::Float),
        ..LoadOptions::default()
    };
    let model = CausalLm::from_pretrained(dir.path(), &options).unwrap();
    let want = expected("llama_gqa");
    let got = model
        .forward(ForwardInput::new(&want["input_ids"]))
        .unwrap();
    assert!(max_difference(&got, &want["logits"]) < 1e-5);
}
