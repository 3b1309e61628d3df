//! GGUF files that this crate writes, read again by it and by llama.cpp.

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::on_python::python;
use overdrive_core::files;
use overdrive_generation::{Error, GenerationConfig, ModelFiles, Tokenizer, export_gguf, generate};
use overdrive_lora::{
    LoraConfig, MergeOptions, TargetModules, add_lora, merge_and_unload, save_adapter,
};
use overdrive_quantization::{GgufFile, GgufType};
use overdrive_transformer::{
    CausalLm, ForwardInput, GgufFileType, GgufOptions, Gpt2Config, InitOptions, LayerType,
    LlamaConfig, LlamaFamily, LoadOptions, LongRope, ModelConfig, RopeScaling, SaveOptions, Yarn,
    save_gguf_adapter,
};
use serde_json::{Value, json};
use tch::Tensor;
use tokenizers::pre_tokenizers::byte_level::ByteLevel;

use LlamaFamily as F;

const TEXTS: [&str; 6] = [
    "the other theory, then",
    " leading and trailing  ",
    "It's 1234.5 %!",
    "größe\n\n\tnaïve 日本語 🙂",
    "<tool>the</tool> <|end|>",
    "",
];
const PROMPT: [i64; 5] = [40, 41, 90, 7, 60];

/// Returns the vocabulary of byte-level BPE: every byte, and what the merges make.
fn byte_level(patterns: &[Value], ignore_merges: bool) -> Value {
    let mut letters: Vec<String> = ByteLevel::alphabet().iter().map(char::to_string).collect();
    letters.sort();
    let merges = [
        ["t", "h"],
        ["th", "e"],
        ["Ġ", "the"],
        ["e", "r"],
        ["o", "ther"],
        ["o", "the"],
        ["othe", "r"],
        ["i", "n"],
        ["in", "g"],
    ];
    let joined = merges.iter().map(|pair| pair.concat());
    let texts = ["<|end|>", "<tool>", "</tool>"]
        .map(str::to_owned)
        .into_iter();
    let mut vocabulary = serde_json::Map::new();
    // `o ther` stands for a merge that can never happen: its parts are no tokens yet.
    for text in texts.chain(letters).chain(joined) {
        let id = vocabulary.len();
        vocabulary.entry(text).or_insert_with(|| id.into());
    }
    vocabulary.insert("ther".to_owned(), vocabulary.len().into());
    let mut steps = patterns.to_vec();
    let own_words = patterns.is_empty();
    steps.push(json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": own_words}));
    json!({
        "version": "1.0",
        "added_tokens": [added(0, "<|end|>", true), added(1, "<tool>", false), added(2, "</tool>", false)],
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps},
        "decoder": {"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true},
        "model": {"type": "BPE", "vocab": vocabulary, "merges": merges, "ignore_merges": ignore_merges},
    })
}

fn added(id: usize, content: &str, special: bool) -> Value {
    json!({"id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false,
        "normalized": false, "special": special})
}

/// Returns SentencePiece BPE as transformers converts it: all pairs of tokens whose union is a token are merges.
fn sentencepiece(prefix: bool) -> Value {
    let mut texts: Vec<String> = ["<unk>", "<s>", "</s>"].map(str::to_owned).to_vec();
    texts.extend((0..=255).map(|byte| format!("<0x{byte:02X}>")));
    let words = [
        "th", "▁t", "he", "▁th", "▁the", "er", "the", "ther", "▁other", "in", "ing", "▁o", "oth",
        "other",
    ];
    texts.extend(words.map(str::to_owned));
    texts.extend(
        "▁abcdefghijklmnopqrstuvwxyzI.,!'1234567890ö"
            .chars()
            .map(String::from),
    );
    let vocabulary: serde_json::Map<String, Value> = texts
        .iter()
        .enumerate()
        .map(|(id, text)| (text.clone(), id.into()))
        .collect();
    let mut merges = Vec::new();
    for word in words {
        for (middle, _) in word.char_indices().skip(1) {
            let (left, right) = word.split_at(middle);
            if vocabulary.contains_key(left) && vocabulary.contains_key(right) {
                merges.push([left, right]);
            }
        }
    }
    let mut steps = vec![json!({"type": "Replace", "pattern": {"String": " "}, "content": "▁"})];
    if prefix {
        steps.insert(0, json!({"type": "Prepend", "prepend": "▁"}));
    }
    json!({
        "version": "1.0",
        "added_tokens": [added(0, "<unk>", true), added(1, "<s>", true), added(2, "</s>", true)],
        "normalizer": {"type": "Sequence", "normalizers": steps},
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}},
        },
        "decoder": {"type": "Sequence", "decoders": [
            {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
            {"type": "ByteFallback"}, {"type": "Fuse"},
        ]},
        "model": {"type": "BPE", "vocab": vocabulary, "merges": merges, "unk_token": "<unk>",
            "byte_fallback": true, "fuse_unk": true},
    })
}

/// A model folder in a temporary one, and the model.
struct Made {
    folder: tempfile::TempDir,
    model: CausalLm,
}

impl Made {
    fn new(config: &ModelConfig, tokenizer: &Value) -> Made {
        let folder = tempfile::tempdir().unwrap();
        let options = InitOptions {
            seed: 3,
            ..InitOptions::default()
        };
        let model = CausalLm::new(config, &options).unwrap();
        {
            // Norms of 1 and biases of 0 would not show that they are exchanged.
            let _no_grad = tch::no_grad_guard();
            for (at, (_, tensor)) in model.named_parameters().into_iter().enumerate() {
                if tensor.dim() == 1 {
                    let wave =
                        Tensor::arange(tensor.numel() as i64, (tch::Kind::Float, tensor.device()));
                    let mut tensor = tensor;
                    let _same = tensor.f_add_(&((wave + at as i64).sin() * 0.2)).unwrap();
                }
            }
        }
        model
            .save_pretrained(folder.path(), &SaveOptions::default())
            .unwrap();
        let write = |name: &str, value: &Value| {
            files::write(folder.path().join(name), value.to_string().as_bytes()).unwrap();
        };
        write("tokenizer.json", tokenizer);
        let settings = json!({
            "eos_token": tokenizer["added_tokens"].as_array().unwrap().last().unwrap()["content"],
            "chat_template": "{{ messages[0].content }}",
        });
        write("tokenizer_config.json", &settings);
        Made { folder, model }
    }

    fn files(&self) -> ModelFiles {
        ModelFiles::open(self.folder.path()).unwrap()
    }

    fn export(&self, file_type: GgufFileType) -> PathBuf {
        let path = self.folder.path().join(format!("{file_type}.gguf"));
        export_gguf(&self.model, &self.files(), &path, file_type, None).unwrap();
        path
    }
}

fn small(family: LlamaFamily) -> LlamaConfig {
    let mut config = LlamaConfig {
        vocab_size: 300,
        hidden_size: 64,
        intermediate_size: 128,
        num_hidden_layers: 2,
        num_attention_heads: 4,
        num_key_value_heads: Some(2),
        head_dim: Some(16),
        max_position_embeddings: 256,
        // Random weights of the usual deviation give logits too near to one another to tell tokens.
        initializer_range: 0.12,
        bos_token_id: None,
        eos_token_id: vec![0],
        pad_token_id: None,
        query_pre_attn_scalar: 16.0,
        ..LlamaConfig::of(family)
    };
    if let Some(experts) = &mut config.experts {
        experts.num_experts = 4;
        experts.num_experts_per_tok = 2;
        experts.moe_intermediate_size = 96;
        experts.norm_topk_prob = family != F::Qwen2Moe;
        if let Some(shared) = &mut experts.shared_expert_intermediate_size {
            *shared = 160;
        }
    }
    if family.is_gemma() {
        config.tie_word_embeddings = true;
    }
    if let Some(sizes) = &mut config.per_layer {
        sizes.hidden_size_per_layer_input = 32;
        sizes.vocab_size_per_layer_input = config.vocab_size;
        sizes.num_kv_shared_layers = 2;
        sizes.use_double_wide_mlp = true;
        sizes.global_head_dim = Some(32);
        config.sliding_window = Some(128);
        config.num_hidden_layers = 4;
        let (slides, full) = (LayerType::Sliding, LayerType::Full);
        config.layer_types = Some(vec![slides, full, slides, full]);
    }
    if let Some(sizes) = &mut config.delta_net {
        config.partial_rotary_factor = 0.5;
        sizes.linear_key_head_dim = 16;
        sizes.linear_value_head_dim = 16;
        sizes.linear_num_key_heads = 2;
        sizes.linear_num_value_heads = 6;
        config.num_hidden_layers = 4;
    }
    if matches!(family, F::SmolLm3 | F::Olmo3) {
        config.num_hidden_layers = 4;
    }
    if family == F::Granite {
        config.embedding_multiplier = 4.0;
        config.attention_multiplier = 0.4;
        config.residual_multiplier = 0.5;
        config.logits_scaling = 2.0;
    }
    if family == F::Ministral3 {
        config.rope_scaling = RopeScaling::Yarn(Yarn {
            mscale: Some(1.0),
            mscale_all_dim: Some(1.0),
            ..Yarn::new(4.0, 4)
        });
    }
    if matches!(family, F::Olmo3 | F::GptOss) {
        config.sliding_window = Some(6);
    }
    if matches!(family, F::Gemma2 | F::Gemma3 | F::Mistral) {
        config.sliding_window = Some(128);
        config.num_hidden_layers = 6;
    }
    config
}

/// Every architecture, and every option that a file has a key for.
fn configurations() -> Vec<(&'static str, ModelConfig)> {
    let families = [
        ("llama", F::Llama),
        ("mistral", F::Mistral),
        ("mixtral", F::Mixtral),
        ("qwen2", F::Qwen2),
        ("qwen3", F::Qwen3),
        ("qwen3_moe", F::Qwen3Moe),
        ("phi", F::Phi),
        ("phi3", F::Phi3),
        ("gemma", F::Gemma),
        ("gemma2", F::Gemma2),
        ("gemma3", F::Gemma3),
        ("smollm3", F::SmolLm3),
        ("olmo2", F::Olmo2),
        ("olmo3", F::Olmo3),
        ("granite", F::Granite),
        ("glm4", F::Glm4),
        ("qwen2_moe", F::Qwen2Moe),
        ("qwen3_next", F::Qwen3Next),
        ("qwen3_5", F::Qwen35),
        ("qwen3_5_moe", F::Qwen35Moe),
        ("gemma4", F::Gemma4),
        ("gpt_oss", F::GptOss),
        ("ministral3", F::Ministral3),
    ];
    let mut all: Vec<_> = families
        .map(|(name, family)| (name, small(family).into()))
        .to_vec();
    let llama = |change: &dyn Fn(&mut LlamaConfig)| {
        let mut config = small(F::Llama);
        change(&mut config);
        ModelConfig::from(config)
    };
    all.push((
        "llama, tied, with biases",
        llama(&|config| {
            config.tie_word_embeddings = true;
            config.attention_bias = true;
            config.mlp_bias = true;
            config.rope_theta = 500_000.0;
        }),
    ));
    all.push((
        "llama, wide heads",
        llama(&|config| config.head_dim = Some(32)),
    ));
    all.push((
        "llama 3.1",
        llama(&|config| {
            config.rope_scaling = RopeScaling::Llama3 {
                factor: 8.0,
                low_freq_factor: 1.0,
                high_freq_factor: 4.0,
                original_max_position_embeddings: 8192,
            };
            config.max_position_embeddings = 65_536;
        }),
    ));
    all.push((
        "llama, linear",
        llama(&|config| config.rope_scaling = RopeScaling::Linear { factor: 4.0 }),
    ));
    all.push((
        "llama, yarn",
        llama(&|config| {
            config.rope_scaling = RopeScaling::Yarn(Yarn::new(4.0, 64));
        }),
    ));
    all.push(("gemma4, with experts", {
        let mut config = small(F::Gemma4);
        if let Some(sizes) = &mut config.per_layer {
            sizes.hidden_size_per_layer_input = 0;
            sizes.num_kv_shared_layers = 0;
            sizes.use_double_wide_mlp = false;
            sizes.attention_k_eq_v = true;
            sizes.num_global_key_value_heads = Some(1);
        }
        config.tie_word_embeddings = false;
        config.experts = small(F::Qwen3Moe).experts;
        config.into()
    }));
    all.push(("granite, tied, with biases", {
        let mut config = small(F::Granite);
        config.tie_word_embeddings = true;
        config.attention_bias = true;
        config.mlp_bias = true;
        config.into()
    }));
    all.push(("olmo3, yarn", {
        let mut config = small(F::Olmo3);
        config.rope_scaling = RopeScaling::Yarn(Yarn::new(4.0, 64));
        config.into()
    }));
    all.push(("phi3, long", {
        let mut config = small(F::Phi3);
        config.max_position_embeddings = 1024;
        config.rope_scaling = RopeScaling::LongRope(LongRope {
            short_factor: vec![1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7],
            long_factor: vec![2.0; 8],
            // As many as the comparison has: llama.cpp goes by the size of its cache, not of the text.
            original_max_position_embeddings: 512,
            factor: 2.0,
            attention_factor: None,
        });
        config.into()
    }));
    all
}

fn gpt2() -> ModelConfig {
    ModelConfig::Gpt2(Gpt2Config {
        vocab_size: 300,
        n_positions: 128,
        n_embd: 64,
        n_layer: 2,
        n_head: 4,
        initializer_range: 0.12,
        bos_token_id: None,
        eos_token_id: vec![0],
        ..Gpt2Config::default()
    })
}

fn logits(model: &CausalLm) -> Tensor {
    let _no_grad = tch::no_grad_guard();
    let ids = Tensor::from_slice(&PROMPT).unsqueeze(0);
    model.forward(ForwardInput::new(&ids)).unwrap()
}

fn tokens(model: &CausalLm, new: usize) -> Vec<i64> {
    let config = GenerationConfig {
        max_new_tokens: Some(new),
        ..GenerationConfig::default()
    };
    let output = generate(model, &[PROMPT.to_vec()], &config).unwrap();
    output.sequences[0][PROMPT.len()..].to_vec()
}

fn encoded(tokenizer: &Tokenizer) -> Vec<Vec<u32>> {
    TEXTS
        .map(|text| tokenizer.encode(text, true).unwrap().get_ids().to_vec())
        .to_vec()
}

#[test]
fn a_file_in_f32_is_the_same_model() {
    for (name, config) in configurations() {
        let made = Made::new(&config, &byte_level(&[], false));
        let path = made.export(GgufFileType::F32);
        let again = CausalLm::from_gguf(&path, &LoadOptions::default()).unwrap();
        let parameters = made.model.named_parameters();
        for ((own, before), (other, after)) in parameters.iter().zip(again.named_parameters()) {
            assert_eq!(own, &other, "{name}");
            let difference = (before - after).abs().max().double_value(&[]);
            // Gemma's norms are stored with 1 added.
            assert!(difference < 1e-6, "{name}: {own}");
        }
        let difference = (logits(&made.model) - logits(&again))
            .abs()
            .max()
            .double_value(&[]);
        assert!(difference < 1e-4, "{name}: {difference}");
        assert_eq!(tokens(&made.model, 8), tokens(&again, 8), "{name}");
    }
}

#[test]
fn matrices_have_the_type_that_was_asked_for() {
    let config = LlamaConfig {
        hidden_size: 256,
        intermediate_size: 512,
        head_dim: Some(64),
        ..small(F::Llama)
    };
    let made = Made::new(&config.into(), &byte_level(&[], false));
    let dense = logits(&made.model);
    use {GgufFileType as T, GgufType as G};
    for (file_type, matrix, most) in [
        (T::F16, G::F16, 0.005),
        (T::BF16, G::BF16, 0.05),
        (T::Q8_0, G::Q8_0, 0.08),
        (T::Q6_K, G::Q6_K, 0.15),
        (T::Q5_1, G::Q5_1, 0.3),
        (T::Q5_0, G::Q5_0, 0.3),
        (T::Q4_K_M, G::Q4_K, 0.6),
        (T::Q4_1, G::Q4_1, 0.6),
        (T::Q4_0, G::Q4_0, 0.6),
    ] {
        let path = made.export(file_type);
        let file = GgufFile::open(&path).unwrap();
        let of = |name: &str| file.tensor(name).unwrap().tensor_type();
        assert_eq!(of("blk.0.attn_q.weight"), matrix);
        assert_eq!(of("blk.0.attn_norm.weight"), G::F32);
        let again = CausalLm::from_gguf(&path, &LoadOptions::default()).unwrap();
        let error = (logits(&again).to_kind(tch::Kind::Float) - &dense)
            .square()
            .mean(tch::Kind::Float);
        let size = dense.square().mean(tch::Kind::Float);
        let relative = (error / size).sqrt().double_value(&[]);
        println!("{file_type}: {relative:.4}");
        assert!(relative < most, "{file_type}: {relative}");
    }
}

#[test]
fn tokenizers_and_templates_come_back() {
    let split = |regex: &str| json!({"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": false});
    let llama3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
    for (tokenizer, model, pre) in [
        (byte_level(&[], false), "gpt2", "gpt-2"),
        (byte_level(&[split(llama3)], true), "gpt2", "llama-bpe"),
        (sentencepiece(true), "llama", "default"),
        (sentencepiece(false), "llama", "default"),
    ] {
        let config = LlamaConfig {
            vocab_size: 330,
            ..small(F::Llama)
        };
        let made = Made::new(&config.into(), &tokenizer);
        let path = made.export(GgufFileType::F16);
        let files = ModelFiles::open(&path).unwrap();
        assert_eq!(
            encoded(&files.tokenizer().unwrap()),
            encoded(&made.files().tokenizer().unwrap()),
            "{pre}"
        );
        let file = GgufFile::open(&path).unwrap();
        let text = |key: &str| {
            file.value(key)
                .and_then(|value| value.as_str())
                .map(str::to_owned)
        };
        assert_eq!(text("tokenizer.ggml.model").as_deref(), Some(model));
        assert_eq!(text("tokenizer.ggml.pre").as_deref(), Some(pre));
        assert_eq!(
            text("tokenizer.chat_template").as_deref(),
            Some("{{ messages[0].content }}")
        );
        assert_eq!(text("general.name").as_deref(), Some("f16"));
        // Rows beyond the tokens.
        let names = file
            .value("tokenizer.ggml.tokens")
            .unwrap()
            .as_strings()
            .unwrap();
        assert_eq!((names.len(), names[329].as_str()), (330, "[PAD329]"));
        // The metadata of another file are taken over.
        let own = files.gguf_metadata(made.model.config()).unwrap();
        let kept = |key: &&String| key.starts_with("tokenizer.");
        assert!(
            file.metadata()
                .keys()
                .filter(kept)
                .all(|key| own.get(key) == file.value(key))
        );
    }
}

#[test]
fn what_a_file_cannot_hold_is_refused() {
    let refused = |config: LlamaConfig, tokenizer: &Value| {
        let made = Made::new(&config.into(), tokenizer);
        let path = made.folder.path().join("model.gguf");
        let error =
            export_gguf(&made.model, &made.files(), &path, GgufFileType::F32, None).unwrap_err();
        let left = std::fs::read_dir(made.folder.path()).unwrap();
        let left = left.filter(|entry| {
            entry
                .as_ref()
                .unwrap()
                .file_name()
                .to_string_lossy()
                .contains("gguf")
        });
        assert_eq!(left.count(), 0, "nothing is left behind");
        error
    };
    let words = byte_level(&[], false);
    let dynamic = LlamaConfig {
        rope_scaling: RopeScaling::Dynamic { factor: 2.0 },
        ..small(F::Llama)
    };
    let error = refused(dynamic, &words).to_string();
    assert!(error.contains("`rope_type` is dynamic"), "{error}");
    let biased = LlamaConfig {
        attention_bias: true,
        ..small(F::Qwen3)
    };
    assert!(
        refused(biased, &words)
            .to_string()
            .contains("`attention_bias` is true")
    );
    let mut layers = small(F::Gemma3);
    layers.layer_types = Some(vec![LayerType::Sliding; 6]);
    assert!(refused(layers, &words).to_string().contains("layer_types"));
    let few = LlamaConfig {
        vocab_size: 200,
        ..small(F::Llama)
    };
    assert!(
        refused(few, &words)
            .to_string()
            .contains("below 200, the number of rows")
    );
    let mut unknown = words.clone();
    unknown["pre_tokenizer"] = json!({"type": "Whitespace"});
    assert!(matches!(
        refused(small(F::Llama), &unknown),
        Error::UnwritableTokenizer { .. }
    ));
    let mut one_way = sentencepiece(true);
    one_way["model"]["merges"]
        .as_array_mut()
        .unwrap()
        .retain(|merge| merge[0] != "th");
    let error = refused(
        LlamaConfig {
            vocab_size: 330,
            ..small(F::Llama)
        },
        &one_way,
    )
    .to_string();
    assert!(error.contains("does not join `th` and"), "{error}");
}

/// The answer of llama.cpp.
#[derive(serde::Deserialize)]
struct Answer {
    /// The greedy continuation of the prompt.
    tokens: Vec<i64>,
    /// Tokens with their log-probabilities, without those that are part of a character.
    logprobs: Vec<(i64, f64)>,
    /// The tokens of the texts.
    texts: Vec<Vec<u32>>,
}

/// Runs a file in llama.cpp.
fn llama_cpp(path: &Path, lora: Option<&Path>, new: usize, texts: &[&str]) -> Answer {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/llama_cpp.py");
    let mut child = Command::new(python(&["xllamacpp"]))
        .arg(script)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let request = json!({"model": path, "lora": lora, "prompt": PROMPT, "n": new, "texts": texts});
    child
        .stdin
        .take()
        .unwrap()
        .write_all(request.to_string().as_bytes())
        .unwrap();
    let output = child.wait_with_output().unwrap();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{errors}");
    let answer = serde_json::from_slice(&output.stdout);
    answer.unwrap_or_else(|error| panic!("{error}: {errors}"))
}

/// Checks that llama.cpp continues the prompt as the model does, and with which probabilities.
fn compare(name: &str, made: &Made, file_type: GgufFileType, most: f64) {
    let path = made.export(file_type);
    let new = 12;
    let answer = llama_cpp(&path, None, new, &TEXTS);
    // This crate does not read GPT-2 from GGUF files.
    let read = match made.model.config() {
        ModelConfig::Gpt2(_) => None,
        _ => Some(CausalLm::from_gguf(&path, &LoadOptions::default()).unwrap()),
    };
    let model = read.as_ref().unwrap_or(&made.model);
    let own = self::tokens(model, new);
    // llama.cpp ends at the end of the text.
    let end = own.iter().position(|&token| token == 0);
    let own = &own[..end.map_or(own.len(), |end| end + 1)];
    assert_eq!(own, answer.tokens, "{name}");
    let all: Vec<i64> = PROMPT.iter().chain(own).copied().collect();
    let _no_grad = tch::no_grad_guard();
    let logits = model
        .forward(ForwardInput::new(&Tensor::from_slice(&all).unsqueeze(0)))
        .unwrap();
    let logits = logits
        .get(0)
        .to_kind(tch::Kind::Float)
        .log_softmax(-1, tch::Kind::Float);
    // Up to the first part of a character.
    let given = answer.logprobs.iter().zip(own).enumerate();
    let given = given.take_while(|(_, ((id, _), token))| id == *token);
    let difference = |(at, ((_, logprob), token)): (usize, (&(i64, f64), &i64))| {
        let own = logits.double_value(&[(PROMPT.len() + at) as i64 - 1, *token]);
        (own - logprob).abs()
    };
    let largest = given.map(difference).fold(0.0, f64::max);
    assert!(largest < most, "{name}: {largest}");
    println!("{name}: {largest:.1e}");
    assert_eq!(
        answer.texts,
        encoded(&made.files().tokenizer().unwrap()),
        "{name}"
    );
}

/// Trains nothing, but gives every second factor of a new adapter numbers.
fn adapter(model: &mut CausalLm, folder: &Path) {
    let config = LoraConfig {
        r: 4,
        lora_alpha: 6.0,
        target_modules: Some(TargetModules::AllLinear),
        ..LoraConfig::default()
    };
    let trained = add_lora(model, &config).unwrap();
    {
        let _no_grad = tch::no_grad_guard();
        for (at, (_, mut tensor)) in trained.into_iter().enumerate() {
            let wave = Tensor::arange(tensor.numel() as i64, (tch::Kind::Float, tensor.device()));
            tensor
                .f_copy_(&((wave + at as i64).sin() * 0.15).reshape(tensor.size()))
                .unwrap();
        }
    }
    save_adapter(model, folder, "default").unwrap();
}

/// Writes adapters alone; `check` gets the files of model and adapter, and the tokens with the adapter.
fn adapters_alone(check: impl Fn(&Path, &Path, &[i64])) {
    // The heads of values of the second are in another order in a file.
    for (family, layer) in [
        (F::Llama, "blk.1.attn_k.weight"),
        (F::Qwen35, "blk.3.attn_k.weight"),
    ] {
        let mut made = Made::new(&small(family).into(), &byte_level(&[], false));
        let folder = made.folder.path().join("adapter");
        adapter(&mut made.model, &folder);
        let error = made
            .model
            .save_gguf(folder.join("x.gguf"), &GgufOptions::new(GgufFileType::F32))
            .unwrap_err();
        assert!(
            error.to_string().contains("`adapter` is default"),
            "{error}"
        );
        let lora = folder.join("lora.gguf");
        save_gguf_adapter(made.model.config(), &folder, &lora).unwrap();
        let file = GgufFile::open(&lora).unwrap();
        let alpha = file.value("adapter.lora.alpha");
        assert_eq!(alpha.and_then(|value| value.as_f64()), Some(6.0));
        let factor = file.tensor(&format!("{layer}.lora_b")).unwrap();
        assert_eq!(factor.shape(), [32, 4]);
        let with = tokens(&made.model, 12);
        merge_and_unload(&mut made.model, &MergeOptions::default()).unwrap();
        let base = CausalLm::from_pretrained(made.folder.path(), &LoadOptions::default()).unwrap();
        assert_ne!(tokens(&base, 12), with, "the adapter changes the answer");
        let plain = Made {
            model: base,
            folder: made.folder,
        };
        check(&plain.export(GgufFileType::F32), &lora, &with);
    }
}

#[test]
fn an_adapter_is_written_alone() {
    adapters_alone(|_, _, _| ());
}

#[test]
#[ignore = "needs Python with xllamacpp"]
fn llama_cpp_applies_an_adapter_alone_on_python() {
    adapters_alone(|model, lora, with| {
        let answer = llama_cpp(model, Some(lora), 12, &[]);
        // llama.cpp ends at the end of the text.
        assert_eq!(
            answer.tokens,
            with[..answer.tokens.len()],
            "{}",
            model.display()
        );
    });
}

#[test]
#[ignore = "needs Python with xllamacpp"]
fn llama_cpp_computes_the_same_model_on_python() {
    let words = byte_level(&[], false);
    for (name, config) in configurations().into_iter().chain([("gpt2", gpt2())]) {
        let made = Made::new(&config, &words);
        compare(name, &made, GgufFileType::F32, 1e-3);
    }
}
