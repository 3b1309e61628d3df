//! Helpers that the tests of this crate share.
#![allow(dead_code, reason = "each test uses a part of it")]

use std::collections::HashMap;
use std::fmt::Debug;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use overdrive_kv_cache::{CacheImplementation, KvCache};
use overdrive_transformer::CausalLm;
use tch::{Kind, Tensor};
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Level, Metadata, Subscriber, subscriber};

/// Takes libtorch's generator, which belongs to the process: tests that seed it or draw from it, as dropout does, run one at
/// a time.
pub(crate) fn generator() -> MutexGuard<'static, ()> {
    static LOCK: Mutex<()> = Mutex::new(());
    LOCK.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Every fixture checkpoint.
pub(crate) const CASES: [&str; 50] = [
    "llama_gqa",
    "llama_sharded",
    "llama_tied_biases",
    "llama3_rope",
    "llama_linear_rope",
    "mistral",
    "qwen2",
    "qwen2_sliding",
    "qwen3",
    "gpt2",
    "gpt2_scaled",
    "llama_dynamic_rope",
    "llama_yarn_rope",
    "qwen3_yarn_rope",
    "llama_longrope",
    "gemma2",
    "gemma3",
    "phi",
    "phi_qk_norm",
    "phi3",
    "phi3_longrope",
    "gemma",
    "mixtral",
    "qwen3_moe",
    "qwen3_moe_step",
    "smollm3",
    "smollm3_sliding",
    "olmo2",
    "olmo3",
    "granite",
    "granite4",
    "granite4_nope",
    "glm4",
    "phi4_mini",
    "mistral_small",
    "qwen2_moe",
    "gpt_oss",
    "ministral3",
    "deepseek_v2",
    "deepseek_v2_groups",
    "deepseek_v3",
    "deepseek_v3_halves",
    "qwen3_next",
    "qwen3_next_dense",
    "qwen3_5",
    "qwen3_5_moe",
    "gemma3n",
    "gemma4",
    "gemma4_dense",
    "gemma4_moe",
];

/// A copy of a fixture in a temporary folder, for tests that change it.
pub(crate) fn copy_of(case: &str) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    for entry in std::fs::read_dir(fixture(case)).unwrap() {
        let entry = entry.unwrap();
        if entry.path().is_file() {
            std::fs::copy(entry.path(), dir.path().join(entry.file_name())).unwrap();
        }
    }
    dir
}

/// Changes the text of `config.json`.
pub(crate) fn edit_config(
    dir: &Path,
    edit: impl FnOnce(&mut serde_json::Map<String, serde_json::Value>),
) {
    let path = dir.join("config.json");
    let mut config: serde_json::Value =
        serde_json::from_str(&std::fs::read_to_string(&path).unwrap()).unwrap();
    edit(config.as_object_mut().unwrap());
    std::fs::write(path, config.to_string()).unwrap();
}

/// An empty dynamic cache for a model.
pub(crate) fn dynamic_cache(model: &CausalLm) -> Box<dyn KvCache> {
    CacheImplementation::Dynamic
        .build(&model.cache_shape())
        .unwrap()
}

/// The folder of a fixture.
pub(crate) fn fixture(case: &str) -> PathBuf {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR"))
        .join("tests/fixtures")
        .join(case);
    assert!(
        folder.is_dir(),
        "make the fixtures: python3 tests/fixtures/gen_checkpoints.py"
    );
    folder
}

pub(crate) fn load(case: &str) -> CausalLm {
    CausalLm::from_pretrained(fixture(case), &Default::default()).unwrap()
}

/// All parameters but the buffers, which backward gives no gradient: the corrections of routers, and the factors of
/// layers.
pub(crate) fn trained_parameters(model: &CausalLm) -> Vec<(String, Tensor)> {
    let ends = [".e_score_correction_bias", ".layer_scalar"];
    let (buffers, trained) = model
        .named_parameters()
        .into_iter()
        .partition::<Vec<_>, _>(|(name, _)| ends.iter().any(|end| name.ends_with(end)));
    assert!(buffers.iter().all(|(_, tensor)| !tensor.requires_grad()));
    trained
}

/// The tensors that transformers computed.
pub(crate) fn expected(case: &str) -> HashMap<String, Tensor> {
    let path = fixture(case).join("expected.safetensors");
    Tensor::read_safetensors(path)
        .unwrap()
        .into_iter()
        .collect()
}

pub(crate) fn max_difference(a: &Tensor, b: &Tensor) -> f64 {
    assert_eq!(a.size(), b.size());
    (a.to_kind(Kind::Double) - b.to_kind(Kind::Double))
        .abs()
        .max()
        .double_value(&[])
}

pub(crate) fn max_magnitude(a: &Tensor) -> f64 {
    a.abs().max().double_value(&[])
}

/// Keeps the warnings of this crate.
#[derive(Clone, Default)]
struct Warnings(Arc<Mutex<Vec<String>>>);

impl Subscriber for Warnings {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        *metadata.level() == Level::WARN && metadata.target().starts_with("overdrive_transformer")
    }
    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }
    fn record(&self, _: &Id, _: &Record<'_>) {}
    fn record_follows_from(&self, _: &Id, _: &Id) {}
    fn event(&self, event: &Event<'_>) {
        let mut line = Line(String::new());
        event.record(&mut line);
        self.0.lock().unwrap().push(line.0);
    }
    fn enter(&self, _: &Id) {}
    fn exit(&self, _: &Id) {}
}

struct Line(String);

impl Visit for Line {
    fn record_debug(&mut self, _: &Field, value: &dyn Debug) {
        self.0 += &format!("{value:?}");
    }
}

/// Calls a function, and returns the warnings that it logged.
pub(crate) fn warnings_of<T>(call: impl FnOnce() -> T) -> (T, Vec<String>) {
    let warnings = Warnings::default();
    let result = subscriber::with_default(warnings.clone(), call);
    let lines = warnings.0.lock().unwrap().clone();
    (result, lines)
}
