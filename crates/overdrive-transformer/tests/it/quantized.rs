//! Models with quantized weights.

use overdrive_nn::AdapterHost;
use overdrive_quantization::{CheckpointOptions, Scheme, quantize_checkpoint};
use overdrive_transformer::{
    CausalLm, Error, Execution, ExpertsConfig, ForwardInput, Gpt2Config, InitOptions, LabelShift,
    LlamaConfig, LlamaFamily, LoadOptions, ModelConfig, QuantizeOptions, Schedule,
};
use tch::{Device, Kind, Tensor};

fn llama(tied: bool) -> ModelConfig {
    LlamaConfig {
        vocab_size: 128,
        hidden_size: 64,
        intermediate_size: 128,
        num_hidden_layers: 2,
        num_attention_heads: 4,
        num_key_value_heads: Some(2),
        tie_word_embeddings: tied,
        ..LlamaConfig::default()
    }
    .into()
}

/// A small model of a family whose layers differ from Llama's.
fn small(family: LlamaFamily) -> ModelConfig {
    LlamaConfig {
        vocab_size: 128,
        hidden_size: 64,
        intermediate_size: 128,
        num_hidden_layers: 2,
        num_attention_heads: 4,
        num_key_value_heads: Some(2),
        head_dim: Some(16),
        ..LlamaConfig::of(family)
    }
    .into()
}

fn mixtral() -> ModelConfig {
    let defaults = LlamaConfig::of(LlamaFamily::Mixtral);
    LlamaConfig {
        vocab_size: 128,
        hidden_size: 64,
        intermediate_size: 64,
        num_hidden_layers: 2,
        num_attention_heads: 4,
        num_key_value_heads: Some(2),
        experts: defaults.experts.clone().map(|experts| ExpertsConfig {
            num_experts: 3,
            ..experts
        }),
        ..defaults
    }
    .into()
}

fn gpt_oss() -> ModelConfig {
    let defaults = LlamaConfig::of(LlamaFamily::GptOss);
    LlamaConfig {
        vocab_size: 128,
        hidden_size: 64,
        intermediate_size: 64,
        num_hidden_layers: 2,
        num_attention_heads: 4,
        num_key_value_heads: Some(2),
        head_dim: Some(16),
        experts: defaults.experts.clone().map(|experts| ExpertsConfig {
            num_experts: 3,
            num_experts_per_tok: 2,
            ..experts
        }),
        ..defaults
    }
    .into()
}

fn gpt2() -> ModelConfig {
    Gpt2Config {
        vocab_size: 128,
        n_embd: 64,
        n_layer: 2,
        n_head: 4,
        n_positions: 64,
        ..Gpt2Config::default()
    }
    .into()
}

fn models() -> Vec<(&'static str, ModelConfig)> {
    vec![
        ("llama", llama(false)),
        ("tied llama", llama(true)),
        ("phi", small(LlamaFamily::Phi)),
        ("phi3", small(LlamaFamily::Phi3)),
        ("gemma", small(LlamaFamily::Gemma)),
        ("smollm3", small(LlamaFamily::SmolLm3)),
        ("olmo3", small(LlamaFamily::Olmo3)),
        ("granite", small(LlamaFamily::Granite)),
        ("granite4", small(LlamaFamily::GraniteMoeHybrid)),
        ("glm4", small(LlamaFamily::Glm4)),
        ("mixtral", mixtral()),
        ("gpt_oss", gpt_oss()),
        ("gpt2", gpt2()),
    ]
}

fn schemes() -> Vec<Scheme> {
    ["int8", "int8-weight", "int4-g32", "nf4", "fp4", "fp8"]
        .map(|name| name.parse().unwrap())
        .to_vec()
}

fn logits(model: &CausalLm) -> Tensor {
    let ids = Tensor::from_slice(&[3i64, 99, 7, 42, 42, 0, 127, 5]).view([2, 4]);
    tch::no_grad(|| model.forward(ForwardInput::new(&ids)).unwrap())
}

/// Root mean square of the difference over that of `whole`.
fn relative(part: &Tensor, whole: &Tensor) -> f64 {
    let rms = |t: &Tensor| t.square().mean(Kind::Double).double_value(&[]).sqrt();
    rms(&(part - whole)) / rms(whole)
}

#[test]
fn logits_stay_near_those_of_the_dense_model() {
    for (name, config) in models() {
        let dense = CausalLm::new(&config, &InitOptions::default()).unwrap();
        let wanted = logits(&dense);
        for scheme in schemes() {
            let mut model = CausalLm::new(&config, &InitOptions::default()).unwrap();
            let options = QuantizeOptions::new(scheme).with_head(scheme);
            model.quantize(&options).unwrap();
            let error = relative(&logits(&model), &wanted);
            let bound = match scheme {
                Scheme::Int8Dynamic | Scheme::Int8WeightOnly => 0.03,
                Scheme::Fp8 => 0.08,
                // Outputs of blocks are normalised and the embeddings are not, so that errors of blocks weigh more.
                _ if matches!(name, "olmo3" | "glm4") => 0.5,
                _ => 0.35,
            };
            assert!(error > 0.0 && error < bound, "{name} {scheme}: {error}");
        }
    }
}

#[test]
fn quantized_weights_leave_the_list_of_dense_parameters() {
    let mut model = CausalLm::new(&llama(true), &InitOptions::default()).unwrap();
    let (all, numbers) = (model.named_parameters().len(), model.num_parameters());
    model
        .quantize(&QuantizeOptions::new(Scheme::Int8Dynamic))
        .unwrap();
    assert_eq!(model.named_parameters().len(), all - 2 * 7);
    assert_eq!(model.num_parameters(), numbers);
    let packed = 2 * (64 * (64 + 2 * 32) + 64 * 64 + 3 * 64 * 128);
    let scales = 2 * 4 * (64 + 2 * 32 + 64 + 2 * 128 + 64);
    let dense = 4 * (128 * 64 + 5 * 64);
    assert_eq!(model.memory_footprint(), packed + scales + dense);
    assert!(
        model
            .named_parameters()
            .iter()
            .all(|(name, _)| !name.contains("_proj"))
    );

    // A tied head is quantized together with the embedding.
    let options = QuantizeOptions::new(Scheme::Int8Dynamic).with_head(Scheme::Int8Dynamic);
    model.quantize(&options).unwrap();
    let names: Vec<_> = model.named_parameters();
    assert!(names.iter().all(|(name, _)| name.contains("norm")));
    assert_eq!(model.kind(), Kind::Float);
    assert_eq!(model.device(), Device::Cpu);
}

#[test]
fn modules_that_are_skipped_stay_dense() {
    let mut model = CausalLm::new(&llama(false), &InitOptions::default()).unwrap();
    let options = QuantizeOptions::new(Scheme::Int8Dynamic)
        .with_skip_modules(&["down_proj", "model.layers.0.self_attn.q_proj"]);
    model.quantize(&options).unwrap();
    let kept: Vec<String> = model
        .named_parameters()
        .into_iter()
        .map(|(name, _)| name)
        .filter(|name| name.contains("_proj"))
        .collect();
    let expected = [
        "model.layers.0.self_attn.q_proj.weight",
        "model.layers.0.mlp.down_proj.weight",
        "model.layers.1.mlp.down_proj.weight",
    ];
    assert_eq!(kept, expected);
    // As in transformers: the beginning of a name, and a regular expression.
    for (entry, expected) in [
        ("model.layers.0", 7),
        ("model.layers.1.mlp", 3),
        ("model.layers.*.mlp", 6),
        ("layers.0", 0),
    ] {
        let mut model = CausalLm::new(&llama(false), &InitOptions::default()).unwrap();
        let options = QuantizeOptions::new(Scheme::Int8Dynamic).with_skip_modules(&[entry]);
        model.quantize(&options).unwrap();
        let names = model.named_parameters();
        let kept = names.iter().filter(|(name, _)| name.contains("_proj"));
        assert_eq!(kept.count(), expected, "{entry}");
    }
    let mut model = CausalLm::new(&llama(false), &InitOptions::default()).unwrap();
    let options = QuantizeOptions::new(Scheme::Int8Dynamic).with_skip_modules(&["*.mlp"]);
    let error = model.quantize(&options).unwrap_err().to_string();
    assert!(error.contains("`*.mlp`"), "{error}");
}

#[test]
fn quantizing_while_loading_equals_quantizing_what_was_loaded() {
    for (name, config) in models() {
        let dir = tempfile::tempdir().unwrap();
        let model = CausalLm::new(&config, &InitOptions::default()).unwrap();
        model
            .save_pretrained(dir.path(), &Default::default())
            .unwrap();
        for scheme in schemes() {
            let quantize = QuantizeOptions::new(scheme).with_head(scheme);
            let options = LoadOptions {
                quantization: Some(quantize.clone()),
                ..LoadOptions::default()
            };
            let streamed = CausalLm::from_pretrained(dir.path(), &options).unwrap();
            let mut loaded =
                CausalLm::from_pretrained(dir.path(), &LoadOptions::default()).unwrap();
            loaded.quantize(&quantize).unwrap();
            assert_eq!(logits(&streamed), logits(&loaded), "{name} {scheme}");
        }
    }
}

#[test]
fn a_loss_is_differentiated_through_frozen_quantized_layers() {
    for scheme in schemes() {
        let mut model = CausalLm::new(&llama(true), &InitOptions::default()).unwrap();
        model
            .quantize(&QuantizeOptions::new(scheme).with_head(scheme))
            .unwrap();
        model.set_requires_grad(true).unwrap();
        let ids = Tensor::from_slice(&[3i64, 99, 7, 42]).view([1, 4]);
        let loss = model.loss(&ids, &ids, LabelShift::HuggingFace).unwrap();
        loss.mean().unwrap().backward();
        for (name, parameter) in model.named_parameters() {
            let gradient = parameter.grad();
            assert!(gradient.defined(), "{scheme}: {name}");
            assert!(
                gradient.abs().max().double_value(&[]) > 0.0,
                "{scheme}: {name}"
            );
        }
    }
}

#[test]
fn linear_layers_are_visited_by_their_names() {
    let mut model = CausalLm::new(&llama(true), &InitOptions::default()).unwrap();
    let mut names = Vec::new();
    model
        .visit_linears(&mut |name, linear| {
            names.push(format!("{name} {:?}", linear.weight().size()));
            Ok(())
        })
        .unwrap();
    assert_eq!(names.len(), 2 * 7 + 1);
    assert_eq!(names[1], "model.layers.0.self_attn.k_proj [32, 64]");
    assert_eq!(names[14], "lm_head [128, 64]");
}

#[test]
fn a_quantized_model_is_written_and_read_without_a_change() {
    for (name, config) in models() {
        for scheme in schemes() {
            let mut model = CausalLm::new(&config, &InitOptions::default()).unwrap();
            model.quantize(&QuantizeOptions::new(scheme)).unwrap();
            let dir = tempfile::tempdir().unwrap();
            model
                .save_pretrained(dir.path(), &Default::default())
                .unwrap();
            let again = CausalLm::from_pretrained(dir.path(), &Default::default()).unwrap();
            // Some layouts keep scales in 16 bits.
            let error = relative(&logits(&again), &logits(&model));
            let bound = match scheme {
                Scheme::Nf4(_) | Scheme::Fp4(_) => 0.0,
                _ => 5e-3,
            };
            assert!(error <= bound, "{name} {scheme}: {error}");

            // From then on every save is the same.
            let copy = tempfile::tempdir().unwrap();
            again
                .save_pretrained(copy.path(), &Default::default())
                .unwrap();
            let third = CausalLm::from_pretrained(copy.path(), &Default::default()).unwrap();
            assert_eq!(logits(&third), logits(&again), "{name} {scheme}");
            assert_eq!(third.memory_footprint(), again.memory_footprint());
        }
    }
}

#[test]
fn a_folder_made_tensor_by_tensor_loads_as_the_model_quantized_in_memory() {
    for (name, config) in models() {
        let folder = tempfile::tempdir().unwrap();
        let (dense, packed) = (folder.path().join("dense"), folder.path());
        let model = CausalLm::new(&config, &InitOptions::default()).unwrap();
        model.save_pretrained(&dense, &Default::default()).unwrap();
        if name == "gpt_oss" {
            let (scheme, out) = (Scheme::Int8Dynamic, packed.join("refused"));
            let options = CheckpointOptions::default();
            let error = quantize_checkpoint(&dense, &out, scheme, &options).unwrap_err();
            assert!(
                error.to_string().contains("one tensor for all experts"),
                "{error}"
            );
            continue;
        }
        for scheme in schemes() {
            let out = packed.join(scheme.to_string());
            quantize_checkpoint(&dense, &out, scheme, &CheckpointOptions::default()).unwrap();
            let streamed = CausalLm::from_pretrained(&out, &Default::default()).unwrap();
            let mut model = CausalLm::new(&config, &InitOptions::default()).unwrap();
            model.quantize(&QuantizeOptions::new(scheme)).unwrap();
            let error = relative(&logits(&streamed), &logits(&model));
            assert!(error < 5e-3, "{name} {scheme}: {error}");
        }
    }
}

#[test]
fn a_tied_table_is_quantized_in_files_too() {
    let folder = tempfile::tempdir().unwrap();
    let (dense, packed) = (folder.path().join("dense"), folder.path().join("packed"));
    let model = CausalLm::new(&llama(true), &InitOptions::default()).unwrap();
    model.save_pretrained(&dense, &Default::default()).unwrap();
    let scheme: Scheme = "nf4".parse().unwrap();
    let options = CheckpointOptions {
        head: Some(scheme),
        ..CheckpointOptions::default()
    };
    quantize_checkpoint(&dense, &packed, scheme, &options).unwrap();
    let streamed = CausalLm::from_pretrained(&packed, &Default::default()).unwrap();
    let mut model = model;
    model
        .quantize(&QuantizeOptions::new(scheme).with_head(scheme))
        .unwrap();
    assert_eq!(logits(&streamed), logits(&model));
    assert_eq!(streamed.memory_footprint(), model.memory_footprint());
}

#[test]
fn dequantize_makes_quantized_weights_dense_again() {
    for (name, config) in models() {
        let mut model = CausalLm::new(&config, &InitOptions::default()).unwrap();
        let names = |model: &CausalLm| -> Vec<String> {
            let parameters = model.named_parameters().into_iter();
            parameters.map(|(name, _)| name).collect()
        };
        let before = names(&model);
        let scheme: Scheme = "nf4".parse().unwrap();
        model
            .quantize(&QuantizeOptions::new(scheme).with_head(scheme))
            .unwrap();
        let wanted = logits(&model);
        model.dequantize().unwrap();
        assert_eq!(names(&model), before, "{name}");
        // The kernel for quantized weights rounds activations to 8 bits.
        assert!(relative(&logits(&model), &wanted) < 0.03, "{name}");
        let dir = tempfile::tempdir().unwrap();
        model
            .save_pretrained(dir.path(), &Default::default())
            .unwrap();
        let again = CausalLm::from_pretrained(dir.path(), &Default::default()).unwrap();
        assert_eq!(logits(&again), logits(&model), "{name}");
    }
}

/// The second block, which is recomputed in backward, cannot be changed while the loss lives. The first one is dense by
/// then.
#[test]
fn dequantize_loses_no_weight_if_a_graph_needs_some_of_them() {
    let scheme: Scheme = "int8-weight".parse().unwrap();
    for tied in [false, true] {
        let fresh = || CausalLm::new(&llama(tied), &InitOptions::default()).unwrap();
        let before = fresh();
        let options = QuantizeOptions::new(scheme).with_head(scheme);
        let mut model = fresh();
        model.quantize(&options).unwrap();
        let mut wanted = fresh();
        wanted.quantize(&options).unwrap();
        wanted.dequantize().unwrap();

        model.set_requires_grad(true).unwrap();
        let mut execution = Execution::default();
        execution.checkpointing = Schedule::Chosen(vec![false, true]);
        model.set_execution(execution);
        let ids = Tensor::from_slice(&[1i64, 5, 9, 30, 2, 7]).view([1, 6]);
        let loss = model.loss(&ids, &ids, LabelShift::HuggingFace).unwrap();
        let error = model.dequantize().unwrap_err();
        assert!(
            matches!(error, Error::Nn(overdrive_nn::Error::InUse)),
            "{error}"
        );
        drop(loss);
        model.dequantize().unwrap();

        let all = wanted.named_parameters();
        assert_eq!(all.len(), before.named_parameters().len());
        assert_eq!(model.named_parameters(), all, "tied: {tied}");
        assert_eq!(model.memory_footprint(), wanted.memory_footprint());
        let dir = tempfile::tempdir().unwrap();
        model
            .save_pretrained(dir.path(), &Default::default())
            .unwrap();
        let again = CausalLm::from_pretrained(dir.path(), &Default::default()).unwrap();
        assert_eq!(again.named_parameters(), all, "tied: {tied}");
    }
}

#[test]
fn unsupported_quantization_is_refused_with_a_reason() {
    let dir = tempfile::tempdir().unwrap();
    let mut model = CausalLm::new(&llama(false), &InitOptions::default()).unwrap();
    let (int8, nf4): (Scheme, Scheme) = ("int8".parse().unwrap(), "nf4".parse().unwrap());
    model
        .quantize(&QuantizeOptions::new(nf4).with_head(int8))
        .unwrap();
    let error = model.save_pretrained(dir.path().join("two"), &Default::default());
    assert_eq!(
        error.unwrap_err().to_string(),
        "`quantization_config` is weights of several schemes (int8, nf4), which is not \
         supported; supported: one scheme per folder; call `CausalLm::dequantize` first"
    );

    let mut model = CausalLm::new(&llama(false), &InitOptions::default()).unwrap();
    model.quantize(&QuantizeOptions::new(nf4)).unwrap();
    let folder = dir.path().join("nf4");
    model.save_pretrained(&folder, &Default::default()).unwrap();
    let options = LoadOptions {
        quantization: Some(QuantizeOptions::new(int8)),
        ..LoadOptions::default()
    };
    let error = CausalLm::from_pretrained(&folder, &options).unwrap_err();
    assert!(
        error
            .to_string()
            .contains("for a checkpoint that is already quantized"),
        "{error}"
    );

    let path = folder.join("config.json");
    let text = std::fs::read_to_string(&path).unwrap();
    std::fs::write(&path, text.replace("bitsandbytes", "quanto")).unwrap();
    let error = CausalLm::from_pretrained(&folder, &Default::default()).unwrap_err();
    assert!(error.to_string().contains("`quanto`"), "{error}");
}

/// The head has a table of its own: each is dequantized to its own values.
#[test]
fn a_separate_table_and_head_are_dequantized_separately() {
    let dir = tempfile::tempdir().unwrap();
    for tied in [false, true] {
        let dense = CausalLm::new(&llama(tied), &InitOptions::default()).unwrap();
        let scheme: Scheme = "int8-weight".parse().unwrap();
        let options = CheckpointOptions {
            embedding: Some(scheme),
            head: Some(scheme),
            ..CheckpointOptions::default()
        };
        let folder = |part: &str| dir.path().join(format!("{part}-{tied}"));
        dense
            .save_pretrained(folder("dense"), &Default::default())
            .unwrap();
        quantize_checkpoint(folder("dense"), folder("packed"), scheme, &options).unwrap();
        let mut model =
            CausalLm::from_pretrained(folder("packed"), &LoadOptions::default()).unwrap();
        // An adapter that is merged into the head does not change the table.
        let lora = overdrive_lora::LoraConfig {
            r: 4,
            target_modules: Some(overdrive_lora::TargetModules::names(["lm_head"])),
            init_lora_weights: overdrive_lora::InitLoraWeights::Random,
            ..Default::default()
        };
        overdrive_lora::add_adapter(&mut model, "taught", &lora, &Default::default()).unwrap();
        let table = model.quantized_embedding().unwrap().dequantize(Kind::Float);
        overdrive_lora::merge_and_unload(&mut model, &Default::default()).unwrap();
        let before = logits(&model);
        let saved = |model: &CausalLm, part: &str| {
            let folder = folder(part);
            model.save_pretrained(&folder, &Default::default()).unwrap();
            let again = CausalLm::from_pretrained(&folder, &Default::default()).unwrap();
            assert_eq!(again.memory_footprint(), model.memory_footprint());
            logits(&again)
        };
        assert_eq!(saved(&model, "merged"), before, "tied: {tied}");
        model.dequantize().unwrap();
        assert!(model.quantized_embedding().is_none());
        assert!(!model.config().tie_word_embeddings());
        let after = logits(&model);
        assert!(after.allclose(&before, 1e-4, 1e-4, false), "tied: {tied}");
        assert_eq!(saved(&model, "again"), after, "tied: {tied}");
        let parameters = model.named_parameters();
        let found = parameters
            .iter()
            .find(|(name, _)| name == "model.embed_tokens.weight");
        assert!(found.unwrap().1.equal(&table.unwrap()), "tied: {tied}");
    }
}
