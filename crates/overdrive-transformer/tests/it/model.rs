//! Models from scratch: initialization, flags, and inputs that are refused.

use crate::common::{expected, generator, load};
use overdrive_kv_cache::{DynamicCache, KvCache};
use overdrive_transformer::{
    CausalLm, ForwardInput, Gpt2Config, Init, InitOptions, LabelShift, LlamaConfig, ModelConfig,
};
use tch::{Device, Kind, Tensor};

fn small() -> LlamaConfig {
    LlamaConfig {
        vocab_size: 500,
        hidden_size: 64,
        intermediate_size: 96,
        num_hidden_layers: 2,
        num_attention_heads: 4,
        max_position_embeddings: 32,
        ..LlamaConfig::default()
    }
}

fn model(config: impl Into<ModelConfig>, seed: u64) -> CausalLm {
    let options = InitOptions {
        seed,
        ..InitOptions::default()
    };
    CausalLm::new(&config.into(), &options).unwrap()
}

/// Ids below `vocab`, scattered, the same at every run.
fn tokens(size: [i64; 2], vocab: i64) -> Tensor {
    let index = Tensor::arange(size[0] * size[1], tch::kind::INT64_CPU);
    (&index * &index * 7919 + index * 104_729)
        .remainder(vocab)
        .view(size)
}

#[test]
fn a_seed_fixes_the_initial_model_whatever_the_global_generator_has_done() {
    let _generator = generator();
    let first = model(small(), 1);
    let _moves_the_global_generator = Tensor::randn([10], tch::kind::FLOAT_CPU);
    let again = model(small(), 1);
    let other = model(small(), 2);
    for (((name, a), (_, b)), (_, c)) in first
        .named_parameters()
        .into_iter()
        .zip(again.named_parameters())
        .zip(other.named_parameters())
    {
        assert_eq!(a, b, "{name}");
        assert_eq!(a == c, name.ends_with("norm.weight"), "{name}");
    }
}

#[test]
fn parameters_start_as_those_of_transformers() {
    let gpt2 = Gpt2Config {
        n_embd: 96,
        n_layer: 4,
        n_head: 4,
        vocab_size: 800,
        n_positions: 256,
        ..Gpt2Config::default()
    };
    for config in [ModelConfig::from(small()), gpt2.into()] {
        let made = CausalLm::new(&config, &InitOptions::default()).unwrap();
        for (spec, (name, value)) in config.parameters().iter().zip(made.named_parameters()) {
            assert_eq!((&spec.name, &spec.shape), (&name, &value.size()));
            let deviation = value
                .to_kind(Kind::Double)
                .square()
                .mean(Kind::Double)
                .sqrt();
            let deviation = deviation.double_value(&[]);
            let want = match spec.init {
                Init::Normal { std } => std,
                Init::Zeros => 0.0,
                _ => 1.0,
            };
            // Five standard errors of a standard deviation.
            let bound = 5.0 * want / (2.0 * value.numel() as f64).sqrt();
            assert!(
                (deviation - want).abs() <= bound,
                "{name}: {deviation} for {want}"
            );
        }
    }
    let names: Vec<_> = ModelConfig::from(Gpt2Config::default()).parameters();
    let residual = names
        .iter()
        .find(|p| p.name.ends_with("mlp.c_proj.weight"))
        .unwrap();
    assert_eq!(
        residual.init,
        Init::Normal {
            std: 0.02 / 24f64.sqrt()
        }
    );
    let total: i64 = names.iter().map(|p| p.numel()).sum();
    assert_eq!(total, 124_439_808, "GPT-2 small");
}

#[test]
fn the_loss_of_an_untrained_model_is_that_of_a_uniform_guess() {
    let model = model(small(), 0);
    let ids = tokens([4, 32], 500);
    let loss = model
        .loss(&ids, &ids, LabelShift::HuggingFace)
        .unwrap()
        .mean()
        .unwrap();
    assert!((loss.double_value(&[]) - 500f64.ln()).abs() < 0.1, "{loss}");
}

#[test]
fn steps_of_gradient_descent_on_the_named_parameters_change_the_model() {
    let model = model(
        LlamaConfig {
            tie_word_embeddings: true,
            ..small()
        },
        0,
    );
    model.set_requires_grad(true).unwrap();
    let ids = tokens([2, 32], 500);
    let mut losses = Vec::new();
    for _ in 0..10 {
        let loss = model
            .loss(&ids, &ids, LabelShift::HuggingFace)
            .unwrap()
            .mean()
            .unwrap();
        losses.push(loss.double_value(&[]));
        loss.backward();
        tch::no_grad(|| {
            for (_, mut parameter) in model.named_parameters() {
                let mut gradient = parameter.grad();
                let _ = parameter.g_add_(&(&gradient * -0.3));
                let _ = gradient.zero_();
            }
        });
    }
    assert!(losses[9] < losses[0] - 1.0, "{losses:?}");
    model.set_requires_grad(false).unwrap();
    assert!(
        model
            .named_parameters()
            .iter()
            .all(|(_, tensor)| !tensor.requires_grad())
    );
}

#[test]
fn dropout_works_in_training_only() {
    let _generator = generator();
    let config = Gpt2Config {
        n_embd: 32,
        n_layer: 2,
        n_head: 2,
        vocab_size: 100,
        ..Gpt2Config::default()
    };
    let mut model = model(config, 0);
    let ids = tokens([1, 16], 100);
    let logits = |model: &CausalLm| model.forward(ForwardInput::new(&ids)).unwrap();
    assert_eq!(logits(&model), logits(&model));
    let still = logits(&model);
    model.set_training(true).unwrap();
    assert_ne!(logits(&model), logits(&model));
    model.set_training(false).unwrap();
    assert_eq!(logits(&model), still);
}

#[test]
fn inputs_that_do_not_fit_are_refused_and_a_failed_step_is_undone() {
    let model = model(small(), 0);
    let ids = Tensor::ones([1, 5], tch::kind::INT64_CPU);
    let refused = |input: ForwardInput<'_>| model.forward(input).unwrap_err().to_string();
    assert!(refused(ForwardInput::new(&ids.view([5]))).contains("it must be (B, T)"));
    assert!(
        refused(ForwardInput::new(&ids.to_kind(Kind::Int)))
            .contains("`input_ids` is Int; it must be Int64")
    );
    assert!(refused(ForwardInput::new(&ids.narrow(1, 0, 0))).contains("at least one"));
    let mask = Tensor::ones([1, 4], tch::kind::INT64_CPU);
    assert!(
        refused(ForwardInput::new(&ids).with_attention_mask(&mask)).contains("it must be (1, 5)")
    );
    assert!(
        refused(ForwardInput::new(&ids).with_position_ids(&mask)).contains("it must be (1, 5)")
    );
    let negative = ids.neg();
    assert!(refused(ForwardInput::new(&ids).with_position_ids(&negative)).contains("negative"));
    let long = Tensor::ones([1, 33], tch::kind::INT64_CPU);
    assert!(refused(ForwardInput::new(&long)).contains("33 positions exceed the model's context"));
    let outside = ids.full_like(500);
    assert!(refused(ForwardInput::new(&outside)).contains("out of range"));
    let labels = ids.full_like(500);
    assert!(model.loss(&ids, &labels, LabelShift::Shifted).is_err());
    assert!(
        model
            .loss(&ids, &ids.narrow(1, 0, 4), LabelShift::Shifted)
            .is_err()
    );

    let mut cache = DynamicCache::new(3);
    assert!(refused(ForwardInput::new(&ids).with_cache(&mut cache)).contains("3 layers"));
    let mut cache = DynamicCache::new(2);
    let _ = model
        .forward(ForwardInput::new(&ids).with_cache(&mut cache))
        .unwrap();
    let two_rows = Tensor::ones([2, 1], tch::kind::INT64_CPU);
    assert!(
        refused(ForwardInput::new(&two_rows).with_cache(&mut cache))
            .contains("reset the cache before using it for another batch")
    );
    assert_eq!(cache.len(), 5);
    model.set_requires_grad(true).unwrap();
    assert!(refused(ForwardInput::new(&ids).with_cache(&mut cache)).contains("no_grad"));
}

#[test]
fn a_model_can_move_to_another_thread() {
    let (model, want) = (load("llama_gqa"), expected("llama_gqa"));
    let ids = want["input_ids"].shallow_clone();
    let sum = std::thread::spawn(move || {
        let logits = model.forward(ForwardInput::new(&ids)).unwrap();
        logits.sum(Kind::Double).double_value(&[])
    });
    let here = want["logits"].sum(Kind::Double).double_value(&[]);
    assert!((sum.join().unwrap() - here).abs() < 1e-3);
}

#[test]
fn a_device_that_this_process_does_not_have_is_named() {
    let options = InitOptions {
        device: Device::Cuda(100),
        ..InitOptions::default()
    };
    let error = CausalLm::new(&small().into(), &options)
        .unwrap_err()
        .to_string();
    let expected = "`device` is Cuda(100); it must be a device of this process";
    assert!(
        error.starts_with(expected) && !error.contains('\n'),
        "{error}"
    );
}
