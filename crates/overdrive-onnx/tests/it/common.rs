//! Helpers that the tests of this crate share.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use overdrive_kv_cache::DynamicCache;
use overdrive_onnx::proto::{ModelProto, NodeProto, TensorProto};
use overdrive_transformer::{CausalLm, ForwardInput, LlamaConfig, LlamaFamily};
use prost::Message;
use tch::{Kind, Tensor};

/// Every checkpoint that the fixtures of overdrive-transformer have, each of its architectures and
/// scalings of positions.
pub(crate) const CASES: [&str; 19] = [
    "gemma",
    "gemma2",
    "gemma3",
    "gpt2",
    "gpt2_scaled",
    "llama3_rope",
    "llama_dynamic_rope",
    "llama_gqa",
    "llama_linear_rope",
    "llama_longrope",
    "llama_tied_biases",
    "llama_yarn_rope",
    "mistral",
    "qwen2",
    "qwen2_sliding",
    "qwen3",
    "qwen3_yarn_rope",
    "smollm3",
    "smollm3_sliding",
];

pub(crate) fn fixture(case: &str) -> CausalLm {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR"))
        .join("../overdrive-transformer/tests/fixtures")
        .join(case);
    assert!(
        folder.is_dir(),
        "make the fixtures: python3 gen_checkpoints.py in overdrive-transformer/tests/fixtures"
    );
    CausalLm::from_pretrained(folder, &Default::default()).unwrap()
}

/// A Llama with groups of queries whose widths any scheme takes.
pub(crate) fn small(family: LlamaFamily) -> LlamaConfig {
    LlamaConfig {
        vocab_size: 96,
        hidden_size: 64,
        intermediate_size: 128,
        num_hidden_layers: 2,
        num_attention_heads: 4,
        num_key_value_heads: Some(2),
        head_dim: Some(16),
        max_position_embeddings: 64,
        // Random weights of the usual deviation give logits too near to one another to tell tokens.
        initializer_range: 0.12,
        ..LlamaConfig::of(family)
    }
}

/// Reads a graph back.
pub(crate) fn decoded(path: &Path) -> ModelProto {
    ModelProto::decode(fs::read(path).unwrap().as_slice()).unwrap()
}

pub(crate) fn initializer<'m>(model: &'m ModelProto, name: &str) -> &'m TensorProto {
    let all = &model.graph.as_ref().unwrap().initializer;
    let found = all.iter().find(|tensor| tensor.name() == name);
    found.unwrap_or_else(|| {
        let names: Vec<&str> = all.iter().map(TensorProto::name).collect();
        panic!("no {name} among {names:?}")
    })
}

pub(crate) fn nodes<'m>(model: &'m ModelProto, op: &str) -> Vec<&'m NodeProto> {
    let nodes = model.graph.as_ref().unwrap().node.iter();
    nodes.filter(|node| node.op_type() == op).collect()
}

/// An input that the model and ONNX Runtime both get.
#[derive(Debug)]
pub(crate) struct Scene {
    pub(crate) name: &'static str,
    pub(crate) ids: Tensor,
    pub(crate) mask: Tensor,
    pub(crate) positions: Tensor,
}

impl Scene {
    /// Rows of `tokens`, of which row `r` has `r · padding` positions of padding.
    pub(crate) fn new(
        name: &'static str,
        model: &CausalLm,
        [rows, tokens]: [i64; 2],
        padding: i64,
        on_the_left: bool,
    ) -> Scene {
        let places = Tensor::arange(rows * tokens, (Kind::Int64, tch::Device::Cpu));
        // Any sequence that repeats late.
        let ids = (&places * &places * 7 + &places * 31 + 5).remainder(model.config().vocab_size());
        let columns = Tensor::arange(tokens, (Kind::Int64, tch::Device::Cpu)).view([1, tokens]);
        let pads = Tensor::arange(rows, (Kind::Int64, tch::Device::Cpu)).view([rows, 1]) * padding;
        let mask = match on_the_left {
            true => columns.ge_tensor(&pads),
            false => columns.lt_tensor(&(tokens - pads)),
        }
        .to_kind(Kind::Int64);
        Scene {
            name,
            ids: ids.view([rows, tokens]),
            positions: (mask.cumsum(1, Kind::Int64) - 1).clamp_min(0),
            mask,
        }
    }

    /// The usual inputs: one sequence, a batch with padding on the left and on the right, one token.
    pub(crate) fn usual(model: &CausalLm) -> Vec<Scene> {
        vec![
            Scene::new("text", model, [1, 21], 0, true),
            Scene::new("left", model, [3, 12], 3, true),
            Scene::new("right", model, [2, 9], 4, false),
            Scene::new("token", model, [1, 1], 0, true),
        ]
    }

    pub(crate) fn logits(&self, model: &CausalLm) -> Tensor {
        let input = ForwardInput::new(&self.ids)
            .with_attention_mask(&self.mask)
            .with_position_ids(&self.positions);
        tch::no_grad(|| model.forward(input).unwrap()).to_kind(Kind::Float)
    }

    /// The tokens of a greedy continuation by `model`.
    pub(crate) fn greedy(&self, model: &CausalLm, count: usize) -> Tensor {
        let mut cache = DynamicCache::new(model.num_layers());
        let [mut ids, mut mask, mut positions] =
            [&self.ids, &self.mask, &self.positions].map(Tensor::shallow_clone);
        let mut tokens = Vec::new();
        for _ in 0..count {
            let input = ForwardInput::new(&ids)
                .with_attention_mask(&mask)
                .with_position_ids(&positions)
                .with_cache(&mut cache);
            let logits = tch::no_grad(|| model.forward(input).unwrap());
            ids = logits.select(1, -1).argmax(-1, true);
            mask = Tensor::cat(&[&mask, &ids.ones_like()], 1);
            positions = positions.narrow(1, positions.size()[1] - 1, 1) + 1;
            tokens.push(ids.shallow_clone());
        }
        Tensor::cat(&tokens, 1)
    }
}

/// The checks that a case of `check_onnx.py` must pass.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Promise {
    pub(crate) tolerance: f64,
    /// If `true`, the inputs are fed through the cache as well.
    pub(crate) parts: bool,
    pub(crate) greedy: bool,
    /// If `true`, several tokens of several rows may follow past ones.
    pub(crate) batches_continue: bool,
    /// If `true`, matmuls with 8-bit weights must equal those of floats.
    pub(crate) exact_products: bool,
}

impl Default for Promise {
    fn default() -> Promise {
        Promise {
            tolerance: 1e-4,
            parts: true,
            greedy: true,
            batches_continue: true,
            exact_products: true,
        }
    }
}

/// Writes the outputs of `reference` beside `model.onnx`.
pub(crate) fn write_case(folder: &Path, reference: &CausalLm, scenes: &[Scene], promise: Promise) {
    let mut tensors: Vec<(String, Tensor)> = Vec::new();
    let parts = |scene: &Scene| {
        let part = |part: &str, tensor: &Tensor| (format!("{}.{part}", scene.name), tensor.copy());
        vec![
            part("input_ids", &scene.ids),
            part("attention_mask", &scene.mask),
            part("position_ids", &scene.positions),
        ]
    };
    for scene in scenes {
        tensors.extend(parts(scene));
        tensors.push((format!("{}.logits", scene.name), scene.logits(reference)));
    }
    if promise.greedy {
        let scene = Scene::new("greedy", reference, [2, 6], 2, true);
        tensors.extend(parts(&scene));
        tensors.push(("greedy.tokens".to_owned(), scene.greedy(reference, 12)));
    }
    Tensor::write_npz(&tensors, folder.join("expected.npz")).unwrap();
    let names: Vec<&str> = scenes.iter().map(|scene| scene.name).collect();
    let spec = serde_json::json!({
        "tolerance": promise.tolerance,
        "parts": promise.parts,
        "batches_continue": promise.batches_continue,
        "exact_products": promise.exact_products,
        "scenes": names,
    });
    fs::write(folder.join("case.json"), spec.to_string()).unwrap();
}

/// Runs `check_onnx.py` over the cases in `root`.
pub(crate) fn check(python: &str, root: &Path, cases: usize) {
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/python/check_onnx.py");
    let output = Command::new(python).arg(script).arg(root).output().unwrap();
    let (out, err) = (
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr),
    );
    assert!(output.status.success(), "{out}\n{err}");
    println!("{out}");
    assert_eq!(out.lines().count(), cases, "{out}");
}
