//! `--adapter`: merged where it can be, else kept beside the weights.

use std::path::Path;

use overdrive::lora::{
    AddOptions, LoraConfig, TargetModules, active_adapters, add_adapter, save_adapter,
    trainable_parameters,
};
use overdrive::transformer::{CausalLm, ForwardInput, InitOptions, LlamaConfig};
use overdrive_examples::ModelFlags;
use tch::{Kind, Tensor};

/// A model with a tied head and without biases.
fn model() -> CausalLm {
    let config = LlamaConfig {
        vocab_size: 64,
        hidden_size: 32,
        intermediate_size: 64,
        num_hidden_layers: 2,
        num_attention_heads: 4,
        tie_word_embeddings: true,
        ..LlamaConfig::default()
    };
    CausalLm::new(&config.into(), &InitOptions::default()).unwrap()
}

fn logits(model: &CausalLm) -> Tensor {
    let ids = Tensor::from_slice(&[3i64, 60, 7, 42]).view([1, 4]);
    let ids = ids.to_device(model.device());
    tch::no_grad(|| model.forward(ForwardInput::new(&ids))).unwrap()
}

/// Writes an adapter with values that matter, and returns the logits with it.
fn write_adapter(config: &LoraConfig, folder: &Path) -> Tensor {
    let mut model = model();
    add_adapter(&mut model, "a", config, &AddOptions::default()).unwrap();
    tch::no_grad(|| {
        for (_, parameter) in trainable_parameters(&mut model).unwrap() {
            let count = parameter.numel() as i64;
            let wave = (Tensor::arange(count, (Kind::Float, parameter.device())) * 0.7).sin();
            let _ = parameter
                .shallow_clone()
                .g_add_(&(wave * 0.05).view_as(&parameter));
        }
    });
    save_adapter(&mut model, folder, "a").unwrap();
    logits(&model)
}

#[test]
fn an_adapter_is_merged_where_it_can_be_and_kept_elsewhere() {
    let _alone = crate::alone();
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    model()
        .save_pretrained(path("model"), &Default::default())
        .unwrap();
    let plain = LoraConfig {
        r: 4,
        target_modules: Some(TargetModules::names(["q_proj", "v_proj"])),
        ..LoraConfig::default()
    };
    let copied = |module: &str| LoraConfig {
        modules_to_save: Some(vec![module.to_owned()]),
        ..plain.clone()
    };
    for (name, config, keep, kept) in [
        ("plain", plain.clone(), false, false),
        ("asked", plain.clone(), true, true),
        (
            "lora_bias",
            LoraConfig {
                lora_bias: true,
                ..plain.clone()
            },
            false,
            true,
        ),
        // The head is tied to the embedding: a merged copy or adapter would change both.
        ("embedding", copied("embed_tokens"), false, true),
        ("head", copied("lm_head"), false, true),
        (
            "head_adapter",
            LoraConfig {
                target_modules: Some(TargetModules::names(["lm_head", "q_proj"])),
                ..plain.clone()
            },
            false,
            true,
        ),
    ] {
        let want = write_adapter(&config, &path(name));
        let flags = ModelFlags {
            path: path("model"),
            tokenizer: None,
            adapter: Some(path(name)),
            keep_adapter: keep,
            bf16: false,
            quantize: None,
            quantize_head: None,
            batch_invariant: false,
        };
        let mut model = flags.load().unwrap();
        let got = logits(&model).to_device(want.device());
        let off = (got - &want).abs().max().double_value(&[]);
        assert!(off < 1e-5, "{name}: {off}");
        let active = active_adapters(&mut model).unwrap();
        assert_eq!(!active.is_empty(), kept, "{name}: {active:?}");
    }
}
