//! The table of models in the guide (`docs/src/models.md`): each of its cells is the outcome of an attempt with a
//! tiny model.
#![cfg(feature = "full")]
#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use overdrive::generation::{
    Engine, EngineConfig, GenerationConfig, GenerationModel, Request, generate,
};
use overdrive::lora::{AddOptions, LoraConfig, TargetModules, add_adapter, trainable_parameters};
use overdrive::nn::AdapterHost;
use overdrive::onnx::{ExportOptions, export};
use overdrive::quantization::GgufFile;
use overdrive::transformer::{
    CausalLm, EmbeddingModel, EncoderConfig, EncoderInput, EncoderModel, ForwardInput, ImageTokens,
    InitOptions, LabelShift, LoadOptions, LossOutput, MaskedLm, ModelConfig, QuantizeOptions,
    Reranker, Seq2SeqConfig, Seq2SeqLm, SequenceClassifier, TokenSequence,
};
use serde_json::json;
use tch::{Device, Kind, Tensor};

const PAGE: &str = include_str!("../../../docs/src/models.md");

/// The columns of the table after `model_type` and the names of the models.
const COLUMNS: [&str; 8] = [
    "safetensors",
    "GGUF",
    "trains",
    "quantizes",
    "LoRA",
    "generates",
    "engine",
    "ONNX",
];

type Outcome = Result<(), String>;

/// Returns the rows of the table: the `model_type`, and the cells of [`COLUMNS`].
fn table() -> Vec<(String, Vec<String>)> {
    let cells = |line: &str| -> Vec<String> {
        let inner = line.trim().trim_start_matches('|').trim_end_matches('|');
        inner
            .split('|')
            .map(|cell| cell.trim().to_owned())
            .collect()
    };
    let mut lines = PAGE
        .lines()
        .skip_while(|line| !line.starts_with("| `model_type`"));
    let header = cells(lines.next().unwrap());
    assert_eq!(header[2..], COLUMNS);
    let rows = lines.skip(1).take_while(|line| line.starts_with('|'));
    rows.map(|line| {
        let mut cells = cells(line);
        let own = cells.split_off(2);
        (cells[0].trim_matches('`').to_owned(), own)
    })
    .collect()
}

/// Returns the values that an error lists after `supported: `.
fn supported(message: &str) -> Vec<String> {
    let (_, list) = message.rsplit_once("supported: ").unwrap();
    list.split(", ").map(str::to_owned).collect()
}

/// Returns the `config.json` of a tiny model: keys that a family does not know change nothing.
fn tiny(model_type: &str) -> serde_json::Value {
    let sizes = json!({
        "model_type": model_type, "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64,
        "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16,
        "max_position_embeddings": 64, "initializer_range": 0.2, "eos_token_id": null, "pad_token_id": 0,
        // GPT-2's names.
        "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64,
        // T5's and BART's.
        "d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 2, "decoder_start_token_id": 0,
        "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 2, "decoder_attention_heads": 2,
        "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "init_std": 0.2,
        // Mixtures of experts.
        "num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32,
    });
    // The second layer attends to the keys and values of the first one.
    let shared_keys = |mut sizes: serde_json::Value| {
        let own = json!({
            "layer_types": ["full_attention", "full_attention"], "num_kv_shared_layers": 1,
            "hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": 64, "laurel_rank": 8,
            "activation_sparsity_pattern": [0.5, 0.0], "global_head_dim": 32, "use_double_wide_mlp": true,
        });
        for (key, value) in own.as_object().into_iter().flatten() {
            sizes[key] = value.clone();
        }
        sizes
    };
    // The first layer has states.
    let hybrid = |mut sizes: serde_json::Value| {
        let own = json!({
            "layer_types": ["linear_attention", "full_attention"], "partial_rotary_factor": 0.5,
            "linear_key_head_dim": 16, "linear_value_head_dim": 16, "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
        });
        for (key, value) in own.as_object().into_iter().flatten() {
            sizes[key] = value.clone();
        }
        sizes
    };
    match model_type {
        "gemma3n_text" | "gemma4_text" => shared_keys(sizes),
        "qwen3_next" | "qwen3_5_text" | "qwen3_5_moe_text" => hybrid(sizes),
        "gemma3" | "gemma3n" | "gemma4" | "mistral3" | "qwen3_5" | "qwen3_5_moe" => {
            let (own, mut text) = match model_type {
                "gemma3" => ("gemma3_text", sizes),
                "gemma3n" => ("gemma3n_text", shared_keys(sizes)),
                "gemma4" => ("gemma4_text", shared_keys(sizes)),
                "qwen3_5" => ("qwen3_5_text", hybrid(sizes)),
                "qwen3_5_moe" => ("qwen3_5_moe_text", hybrid(sizes)),
                _ => ("ministral3", sizes),
            };
            text["model_type"] = own.into();
            json!({"model_type": model_type, "text_config": text, "vision_config": {}})
        }
        "qwen3_vl" | "qwen3_vl_moe" => {
            let mut text = sizes;
            text["model_type"] = format!("{model_type}_text").into();
            text["rope_parameters"] = json!({"rope_type": "default", "mrope_section": [4, 2, 2]});
            let tower = json!({
                "depth": 2, "hidden_size": 16, "num_heads": 2, "intermediate_size": 32, "patch_size": 4,
                "out_hidden_size": 32, "num_position_embeddings": 16, "deepstack_visual_indexes": [0],
                "initializer_range": 0.2,
            });
            json!({"model_type": model_type, "text_config": text, "vision_config": tower, "image_token_id": 60})
        }
        "deepseek_v2" | "deepseek_v3" => {
            let mut latent = sizes;
            let own = json!({
                "q_lora_rank": 24, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
                "v_head_dim": 16, "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
            });
            for (key, value) in own.as_object().into_iter().flatten() {
                latent[key] = value.clone();
            }
            latent
        }
        "granitemoehybrid" => {
            let mut dense = sizes;
            dense["num_local_experts"] = 0.into();
            dense["layer_types"] = json!(["attention", "attention"]);
            dense["position_embedding_type"] = "rope".into();
            dense
        }
        _ => sizes,
    }
}

fn ids() -> Tensor {
    Tensor::from_slice(&[3i64, 9, 27, 17, 51, 25, 11, 33]).view([1, 8])
}

/// A model that the columns are tried with.
trait Model: AdapterHost + Sized {
    fn save(&self, dir: &Path) -> Outcome;
    fn load(dir: &Path, options: &LoadOptions) -> Result<Self, String>;
    fn outputs(&self) -> Tensor;
    fn mean_loss(&self) -> Result<Tensor, String>;
    fn parameters(&self) -> Vec<(String, Tensor)>;
    fn train_all(&self) -> Outcome;
    fn has_quantized_weights(&self) -> bool;
}

/// Implements [`Model`] for a type by its outputs and its loss.
macro_rules! model {
    ($model:ty, $outputs:expr, $loss:expr) => {
        impl Model for $model {
            fn save(&self, dir: &Path) -> Outcome {
                self.save_pretrained(dir, &Default::default()).map_err(text)
            }

            fn load(dir: &Path, options: &LoadOptions) -> Result<Self, String> {
                <$model>::from_pretrained(dir, options).map_err(text)
            }

            fn outputs(&self) -> Tensor {
                let _no_grad = tch::no_grad_guard();
                $outputs(self).unwrap()
            }

            fn mean_loss(&self) -> Result<Tensor, String> {
                $loss(self).and_then(|loss| loss.mean()).map_err(text)
            }

            fn parameters(&self) -> Vec<(String, Tensor)> {
                self.named_parameters()
            }

            fn train_all(&self) -> Outcome {
                self.set_requires_grad(true).map_err(text)
            }

            fn has_quantized_weights(&self) -> bool {
                self.is_quantized()
            }
        }
    };
}

model!(
    CausalLm,
    |model: &CausalLm| model.forward(ForwardInput::new(&ids())),
    causal_loss
);
model!(
    MaskedLm,
    |model: &MaskedLm| model.forward(EncoderInput::new(&ids())),
    |model: &MaskedLm| model.loss(EncoderInput::new(&ids()), &ids())
);
model!(
    Seq2SeqLm,
    |model: &Seq2SeqLm| model.forward(&ids(), None, &ids()),
    |model: &Seq2SeqLm| model.loss(&ids(), None, &ids())
);

/// Computes the loss of a text; of a text with an image for a model that sees images.
fn causal_loss(model: &CausalLm) -> overdrive::transformer::Result<LossOutput> {
    let Some(vision) = model.config().vision() else {
        return model.loss(&ids(), &ids(), LabelShift::HuggingFace);
    };
    let grids = [[2, 4]];
    let tokens = vision.expand(&[5, vision.image_token_id, 9, 3], &grids)?;
    let pixels = Tensor::arange(8 * vision.patch_width(), (Kind::Float, Device::Cpu)).sin();
    let images = ImageTokens {
        indices: Tensor::from_slice(&[1_i64, 2]),
        features: model.encode_images(&pixels.view([8, -1]), &grids)?,
    };
    let positions = vision.positions(&tokens, &grids)?.to_tensor(Device::Cpu)?;
    let ids = Tensor::from_slice(&tokens).view([1, -1]);
    let input = ForwardInput::new(&ids)
        .with_position_ids(&positions)
        .with_images(&images);
    model.loss_of(input, &ids, LabelShift::HuggingFace)
}

fn fresh(config: &ModelConfig) -> CausalLm {
    let options = InitOptions {
        seed: 1,
        ..InitOptions::default()
    };
    CausalLm::new(config, &options).unwrap()
}

fn text(error: impl std::fmt::Display) -> String {
    error.to_string()
}

fn check(holds: bool, what: &str) -> Outcome {
    if holds { Ok(()) } else { Err(what.to_owned()) }
}

/// Makes the folder of a model without images one with images.
fn add_images(dir: &Path, model_type: &str) {
    let path = dir.join("model.safetensors");
    let mut tensors = Tensor::read_safetensors(&path).unwrap();
    for (name, _) in &mut tensors {
        *name = format!("language_model.{name}");
    }
    tensors.push(("vision_tower.patch.weight".to_owned(), Tensor::from(1f32)));
    Tensor::write_safetensors(&tensors, &path).unwrap();
    std::fs::write(dir.join("config.json"), tiny(model_type).to_string()).unwrap();
}

fn saves_and_loads<M: Model>(model_type: &str, model: &M) -> Outcome {
    let dir = tempfile::tempdir().unwrap();
    model.save(dir.path())?;
    if ["gemma3", "gemma3n", "gemma4"].contains(&model_type) {
        add_images(dir.path(), model_type);
    }
    let again = M::load(dir.path(), &LoadOptions::default())?;
    check(again.outputs() == model.outputs(), "other outputs")
}

fn trains(model: &impl Model) -> Outcome {
    model.train_all()?;
    let first = model.mean_loss()?;
    first.f_backward().map_err(text)?;
    let _no_grad = tch::no_grad_guard();
    // Corrections of routers (DeepSeek-V3) and factors of layers (Gemma 4) are not trained.
    let trained = |(_, parameter): &(String, Tensor)| parameter.requires_grad();
    let parameters: Vec<_> = model.parameters().into_iter().filter(trained).collect();
    let mut squares = 0.0;
    for (name, parameter) in &parameters {
        let gradient = parameter.grad();
        check(gradient.defined(), &format!("{name} has no gradient"))?;
        squares += gradient.square().sum(Kind::Double).double_value(&[]);
    }
    // Along a line, the loss would fall by 0.2: gradients of some models are so large that a fixed step goes too far.
    for (_, mut parameter) in parameters {
        let step = parameter.grad() * (-0.2 / squares);
        let _same = parameter.f_add_(&step).map_err(text)?;
    }
    let fell = model.mean_loss()?.double_value(&[]) < first.double_value(&[]);
    check(fell, "the loss did not fall")
}

/// Quantizes the weights as they are read; the outputs may differ by `bound`.
fn quantizes<M: Model>(model: &M, bound: f64) -> Outcome {
    let dir = tempfile::tempdir().unwrap();
    model.save(dir.path())?;
    let options = LoadOptions {
        quantization: Some(QuantizeOptions::new("int8".parse().unwrap())),
        ..LoadOptions::default()
    };
    let quantized = M::load(dir.path(), &options)?;
    check(quantized.has_quantized_weights(), "no weight is quantized")?;
    let dense = model.outputs();
    let error = (quantized.outputs() - &dense).norm().double_value(&[]);
    let error = error / dense.norm().double_value(&[]);
    check(
        error > 0.0 && error < bound,
        &format!("a relative error of {error}"),
    )
}

fn takes_adapters(mut model: impl Model) -> Outcome {
    let lora = LoraConfig {
        target_modules: Some(TargetModules::AllLinear),
        ..LoraConfig::default()
    };
    add_adapter(&mut model, "tiny", &lora, &AddOptions::default()).map_err(text)?;
    model.mean_loss()?.f_backward().map_err(text)?;
    for (name, tensor) in trainable_parameters(&mut model).map_err(text)? {
        check(tensor.grad().defined(), &format!("{name} has no gradient"))?;
    }
    Ok(())
}

fn greedy(use_cache: bool) -> GenerationConfig {
    GenerationConfig {
        max_new_tokens: Some(8),
        use_cache,
        ..GenerationConfig::default()
    }
}

fn generates(model: &impl GenerationModel) -> Result<Vec<i64>, String> {
    let prompt = [vec![5, 9, 3]];
    let cached = generate(model, &prompt, &greedy(true)).map_err(text)?;
    let whole = generate(model, &prompt, &greedy(false)).map_err(text)?;
    check(
        cached.sequences == whole.sequences,
        "other tokens over a cache",
    )?;
    Ok(cached.new_tokens(0).to_vec())
}

fn is_served(config: &ModelConfig, expected: &[i64]) -> Outcome {
    let model = fresh(config);
    let mut engine = Engine::new(&model, EngineConfig::default()).map_err(text)?;
    for _ in 0..2 {
        let request = Request::new(vec![5, 9, 3], greedy(true));
        engine.submit(request).map_err(text)?;
    }
    for (_, completions) in engine.run_to_end().map_err(text)? {
        let completions = completions.map_err(text)?;
        check(completions[0].tokens == expected, "other tokens")?;
    }
    Ok(())
}

fn exports(config: &ModelConfig) -> Outcome {
    let (dir, mut model) = (tempfile::tempdir().unwrap(), fresh(config));
    let path = dir.path().join("model.onnx");
    export(&mut model, &path, &ExportOptions::default()).map_err(text)?;
    check(path.is_file(), "no file")
}

/// Returns the cells of a decoder, and why some of them say no; `None` if it is not a decoder that is read.
fn decoder(
    model_type: &str,
    architectures: &BTreeMap<String, BTreeSet<String>>,
) -> Option<(Vec<String>, Vec<String>)> {
    let config = ModelConfig::from_json(&tiny(model_type).to_string()).ok()?;
    let read_as = config.to_json()["model_type"].as_str().unwrap().to_owned();
    let gguf = architectures
        .get(&read_as)
        .map_or("no".to_owned(), |names| {
            let names: Vec<String> = names.iter().map(|name| format!("`{name}`")).collect();
            names.join(", ")
        });
    let tokens = generates(&fresh(&config));
    let served = tokens
        .clone()
        .and_then(|tokens| is_served(&config, &tokens));
    // A router may choose another expert, which changes a token by much.
    let bound = match model_type {
        "mixtral" | "qwen2_moe" | "qwen3_moe" | "gpt_oss" | "qwen3_next" => 0.25,
        "qwen3_5_moe" | "qwen3_5_moe_text" | "qwen3_vl_moe" => 0.25,
        _ => 0.1,
    };
    let outcomes = [
        saves_and_loads(model_type, &fresh(&config)),
        trains(&fresh(&config)),
        quantizes(&fresh(&config), bound),
        takes_adapters(fresh(&config)),
        tokens.map(drop),
        served,
        exports(&config),
    ];
    Some(cells(outcomes, gguf))
}

/// Returns the cells of outcomes and of the column of GGUF files, and the reasons of those that say no.
fn cells(outcomes: [Outcome; 7], gguf: String) -> (Vec<String>, Vec<String>) {
    let mut cells: Vec<String> = outcomes
        .iter()
        .map(|outcome| if outcome.is_ok() { "yes" } else { "no" }.to_owned())
        .collect();
    cells.insert(1, gguf);
    let reasons = outcomes.into_iter().filter_map(Result::err);
    (cells, reasons.collect())
}

/// Returns the outcome of a column that a kind of model has no interface for.
fn not_offered() -> Outcome {
    Err("there is no call for it".to_owned())
}

/// Returns the cells of an encoder; `None` for another type.
fn encoder(model_type: &str) -> Option<(Vec<String>, Vec<String>)> {
    let config = EncoderConfig::from_json(&tiny(model_type).to_string()).ok()?;
    let fresh = || MaskedLm::new(&config, &InitOptions::default()).unwrap();
    let outcomes = [
        saves_and_loads(model_type, &fresh()),
        trains(&fresh()),
        quantizes(&fresh(), 0.1),
        takes_adapters(fresh()),
        not_offered(),
        not_offered(),
        not_offered(),
    ];
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("model.gguf");
    let architecture = match model_type {
        "modernbert" => "modern-bert",
        other => other,
    };
    std::fs::write(&path, gguf(architecture, &[])).unwrap();
    // The file has no tensors.
    let error = EncoderModel::from_gguf(path, &LoadOptions::default()).unwrap_err();
    let gguf = match error.to_string().contains("general.architecture") {
        true => "no".to_owned(),
        false => format!("`{architecture}`"),
    };
    Some(cells(outcomes, gguf))
}

/// Returns the cells of an encoder-decoder model; `None` for another type.
fn encoder_decoder(model_type: &str) -> Option<(Vec<String>, Vec<String>)> {
    let config = Seq2SeqConfig::from_json(&tiny(model_type).to_string()).ok()?;
    let fresh = || Seq2SeqLm::new(&config, &InitOptions::default()).unwrap();
    let outcomes = [
        saves_and_loads(model_type, &fresh()),
        trains(&fresh()),
        quantizes(&fresh(), 0.1),
        takes_adapters(fresh()),
        generates(&fresh()).map(drop),
        not_offered(),
        not_offered(),
    ];
    Some(cells(outcomes, "no".to_owned()))
}

/// Returns the bytes of a GGUF file without tensors.
fn gguf(architecture: &str, extra: &[(&str, u32)]) -> Vec<u8> {
    let (mut count, mut pairs) = (0u64, Vec::new());
    let string = |bytes: &mut Vec<u8>, text: &str| {
        bytes.extend((text.len() as u64).to_le_bytes());
        bytes.extend(text.as_bytes());
    };
    let mut put = |key: &str, kind: u32, value: &dyn Fn(&mut Vec<u8>)| {
        string(&mut pairs, key);
        pairs.extend(kind.to_le_bytes());
        value(&mut pairs);
        count += 1;
    };
    put("general.architecture", 8, &|bytes| {
        string(bytes, architecture)
    });
    let sizes = [
        ("context_length", 64),
        ("embedding_length", 32),
        ("block_count", 2),
        ("feed_forward_length", 64),
        ("attention.head_count", 2),
        ("vocab_size", 64),
        // Layers of linear attention.
        ("ssm.conv_kernel", 4),
        ("ssm.state_size", 16),
        ("ssm.group_count", 2),
        ("ssm.time_step_rank", 2),
        ("ssm.inner_size", 32),
        ("full_attention_interval", 2),
    ];
    for (key, number) in sizes.iter().chain(extra) {
        let key = format!("{architecture}.{key}");
        put(&key, 4, &|bytes| bytes.extend(number.to_le_bytes()));
    }
    for (key, number) in [
        ("attention.layer_norm_rms_epsilon", 1e-5f32),
        ("attention.layer_norm_epsilon", 1e-5),
        ("logit_scale", 2.0),
        ("attention.temperature_scale", 0.0),
    ] {
        let key = format!("{architecture}.{key}");
        put(&key, 6, &|bytes| bytes.extend(number.to_le_bytes()));
    }
    let mut file = b"GGUF".to_vec();
    file.extend(3u32.to_le_bytes());
    file.extend(0u64.to_le_bytes());
    file.extend(count.to_le_bytes());
    file.extend(pairs);
    file
}

/// Returns the architectures of GGUF files by the `model_type` that they are read as.
fn architectures() -> BTreeMap<String, BTreeSet<String>> {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("model.gguf");
    let read = |architecture: &str, extra: &[(&str, u32)]| {
        std::fs::write(&path, gguf(architecture, extra)).unwrap();
        ModelConfig::from_gguf(&GgufFile::open(&path).unwrap())
    };
    let all = supported(&read("nobody", &[]).unwrap_err().to_string());
    assert!(all.len() > 5, "{all:?}");
    // Architectures of several families differ by a key.
    let plain: &[(&str, u32)] = &[];
    let windows: &[(&str, u32)] = &[("attention.sliding_window", 8)];
    let experts: &[(&str, u32)] = &[
        ("expert_count", 4),
        ("expert_used_count", 2),
        ("expert_feed_forward_length", 32),
    ];
    let latent = [
        ("expert_shared_count", 1),
        ("attention.kv_lora_rank", 32),
        ("attention.key_length", 48),
        ("attention.value_length", 32),
        ("rope.dimension_count", 16),
    ];
    let latent = [experts, &latent].concat();
    let sigmoid = [&latent[..], &[("expert_gating_func", 2)]].concat();
    let mut found: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for architecture in &all {
        let read_as =
            [plain, windows, experts, &latent, &sigmoid].map(|extra| read(architecture, extra));
        assert!(
            read_as.iter().any(Result::is_ok),
            "{architecture}: {read_as:?}"
        );
        for config in read_as.into_iter().flatten() {
            let model_type = config.to_json()["model_type"].as_str().unwrap().to_owned();
            found
                .entry(model_type)
                .or_default()
                .insert(architecture.clone());
        }
    }
    found
}

/// The outcome of every attempt is in the message, so that a cell that is out of date can be copied from it.
#[test]
fn the_table_of_models_says_what_the_crates_do() {
    tch::manual_seed(1);
    let (rows, architectures) = (table(), architectures());
    let mut wrong = Vec::new();
    for (model_type, cells) in &rows {
        let (found, reasons) = decoder(model_type, &architectures)
            .or_else(|| encoder(model_type))
            .or_else(|| encoder_decoder(model_type))
            .unwrap_or_else(|| panic!("`{model_type}` is read by no configuration"));
        if found != *cells {
            wrong.push(format!(
                "`{model_type}` | {} |\n    {reasons:?}",
                found.join(" | ")
            ));
        }
    }
    assert!(
        wrong.is_empty(),
        "docs/src/models.md should say:\n{}",
        wrong.join("\n")
    );
}

fn sequence() -> [TokenSequence; 1] {
    [TokenSequence::new(vec![3, 9, 27, 17, 51])]
}

/// Embeds with the model of a folder.
fn embeds(dir: &Path) -> Result<Tensor, String> {
    let model = EmbeddingModel::from_pretrained(dir, &LoadOptions::default()).map_err(text)?;
    let vectors = model.embed(&sequence()).map_err(text)?;
    let norm = vectors.norm().double_value(&[]);
    check(
        vectors.size() == [1, 32] && (norm - 1.0).abs() < 1e-5,
        "no unit vector",
    )?;
    Ok(vectors)
}

fn scores(model: &Reranker) -> Outcome {
    let score = model.scores(&sequence()).map_err(text)?.double_value(&[0]);
    check(0.0 < score && score < 1.0, "no probability")
}

fn decoder_scores(dir: &Path) -> Outcome {
    let model = CausalLm::from_pretrained(dir, &LoadOptions::default()).map_err(text)?;
    scores(&Reranker::with_answers(model, [1, 2]).map_err(text)?)
}

fn encoder_scores(config: &EncoderConfig) -> Outcome {
    let config = config.clone().with_labels(&["relevant"]);
    let model = SequenceClassifier::new(&config, &InitOptions::default()).map_err(text)?;
    let dir = tempfile::tempdir().unwrap();
    model
        .save_pretrained(dir.path(), &Default::default())
        .map_err(text)?;
    scores(&Reranker::from_pretrained(dir.path(), &LoadOptions::default()).map_err(text)?)
}

#[test]
fn the_table_of_embeddings_and_scores_says_what_the_crates_do() {
    let lines = PAGE
        .lines()
        .skip_while(|line| !line.starts_with("| type |"));
    let own: Vec<String> = lines
        .skip(2)
        .take_while(|line| line.starts_with('|'))
        .map(str::to_owned)
        .collect();
    assert_eq!(own.len(), 6);
    let cell = |outcome: Outcome| if outcome.is_ok() { "yes" } else { "no" };
    let shown = |name: &str, embeds: Outcome, scores: Outcome| {
        let line = own
            .iter()
            .find(|line| line.starts_with(&format!("| `{name}` |")));
        let why = format!("{name}: {embeds:?} {scores:?}");
        let cells = format!("| {} | {} |", cell(embeds), cell(scores));
        assert!(line.unwrap().ends_with(&cells), "{why}");
    };
    for name in ["bert", "roberta", "xlm-roberta", "modernbert"] {
        let config = EncoderConfig::from_json(&tiny(name).to_string()).unwrap();
        let dir = tempfile::tempdir().unwrap();
        let model = MaskedLm::new(&config, &InitOptions::default()).unwrap();
        model
            .save_pretrained(dir.path(), &Default::default())
            .unwrap();
        shown(name, embeds(dir.path()).map(drop), encoder_scores(&config));
    }
    for (name, _) in table() {
        let Ok(config) = ModelConfig::from_json(&tiny(&name).to_string()) else {
            continue;
        };
        let dir = tempfile::tempdir().unwrap();
        let model = fresh(&config);
        model
            .save_pretrained(dir.path(), &Default::default())
            .unwrap();
        let vectors = embeds(dir.path()).unwrap_or_else(|error| panic!("{name}: {error}"));
        let scored = decoder_scores(dir.path());
        assert!(scored.is_ok(), "{name}: {scored:?}");
        match name.as_str() {
            "qwen3" => shown(&name, Ok(()), scored),
            "gemma3_text" => {
                let path = dir.path().join("config.json");
                let mut config: serde_json::Value =
                    serde_json::from_str(&std::fs::read_to_string(&path).unwrap()).unwrap();
                config["use_bidirectional_attention"] = true.into();
                std::fs::write(&path, config.to_string()).unwrap();
                let both_ways = embeds(dir.path());
                assert!(
                    both_ways
                        .as_ref()
                        .is_ok_and(|both_ways| *both_ways != vectors)
                );
                shown(&name, both_ways.map(drop), decoder_scores(dir.path()));
            }
            _ => {}
        }
    }
}

#[test]
fn every_model_type_and_architecture_that_is_read_has_a_row() {
    let rows = table();
    let unknown = ModelConfig::from_json(r#"{"model_type": "nobody"}"#).unwrap_err();
    let all = supported(&unknown.to_string());
    assert!(all.len() > 5, "{all:?}");
    for model_type in all {
        let own = rows.iter().filter(|(name, _)| *name == model_type).count();
        assert_eq!(own, 1, "rows of `{model_type}` in docs/src/models.md");
    }
    for names in architectures().into_values() {
        for name in names {
            let name = format!("`{name}`");
            let has = |cell: &String| cell.split(", ").any(|own| own == name);
            assert!(
                rows.iter().any(|(_, cells)| has(&cells[1])),
                "{name} has no row"
            );
        }
    }
}
