//! Training with linear layers in FP8.

use overdrive_lora::{LoraConfig, TargetModules, add_lora};
use overdrive_precision::Precision;
use overdrive_transformer::{
    CausalLm, ExpertsConfig, InitOptions, LabelShift, LlamaConfig, LlamaFamily,
};
use tch::{Device, Kind, Tensor};

fn config() -> LlamaConfig {
    LlamaConfig {
        vocab_size: 64,
        hidden_size: 64,
        intermediate_size: 96,
        num_hidden_layers: 2,
        num_attention_heads: 4,
        num_key_value_heads: Some(2),
        max_position_embeddings: 64,
        ..LlamaConfig::default()
    }
}

fn model(config: LlamaConfig) -> CausalLm {
    let model = CausalLm::new(&config.into(), &InitOptions::default()).unwrap();
    model.set_requires_grad(true).unwrap();
    model
}

/// Returns batch `step` of sequences in which a token mostly follows from the one before.
fn batch(step: u64) -> Tensor {
    let mut state = step + 1;
    let mut draw = move |below: u64| {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1);
        (state >> 33) % below
    };
    let mut ids: Vec<i64> = Vec::new();
    for _ in 0..8 {
        let mut token = draw(64);
        for _ in 0..32 {
            ids.push(token as i64);
            token = if draw(4) > 0 {
                (7 * token + 3) % 64
            } else {
                draw(64)
            };
        }
    }
    Tensor::from_slice(&ids).view([8, 32])
}

/// Trains with SGD from one start and returns the losses.
fn losses(precision: Precision, steps: u64) -> Vec<f64> {
    let model = model(config());
    let mut velocities: Vec<Tensor> = Vec::new();
    let mut losses = Vec::new();
    for step in 0..steps {
        let ids = batch(step);
        let loss = {
            let _autocast = precision.autocast(Device::Cpu).unwrap();
            model.loss(&ids, &ids, LabelShift::HuggingFace).unwrap()
        };
        let mean = loss.mean().unwrap();
        losses.push(mean.double_value(&[]));
        mean.backward();
        let _no_grad = tch::no_grad_guard();
        let parameters = model.named_parameters();
        velocities.resize_with(parameters.len(), || Tensor::from(0.0f32));
        for ((_, mut parameter), velocity) in parameters.into_iter().zip(&mut velocities) {
            *velocity = &*velocity * 0.9 + parameter.grad();
            let _ = parameter.f_sub_(&(&*velocity * 0.1)).unwrap();
            parameter.zero_grad();
        }
    }
    losses
}

fn assert_learns_like_bf16(steps: u64, within: f64) {
    let last = |precision| {
        let losses = losses(precision, steps);
        let tail = &losses[losses.len() - 20..];
        (losses[0], tail.iter().sum::<f64>() / tail.len() as f64)
    };
    let ((start, fp8), (_, bf16)) = (last(Precision::Fp8), last(Precision::Bf16));
    println!("loss {start:.4} to {fp8:.4} in FP8 and {bf16:.4} in bf16 after {steps} steps");
    assert!(fp8 < 0.8 * start, "{start} {fp8}");
    assert!((fp8 / bf16 - 1.0).abs() < within, "{fp8} {bf16}");
}

#[test]
fn the_loss_falls_as_in_bf16() {
    assert_learns_like_bf16(100, 0.02);
}

#[test]
#[ignore = "1,000 steps take minutes"]
fn the_loss_after_1000_steps_is_that_of_bf16() {
    assert_learns_like_bf16(1000, 0.01);
}

#[test]
fn heads_stay_in_bf16() {
    let model = model(config());
    let hidden = Tensor::randn([3, 64], (Kind::Float, Device::Cpu));
    let logits = |precision: Precision| {
        let _autocast = precision.autocast(Device::Cpu).unwrap();
        let ids = batch(0);
        let whole = model
            .forward(overdrive_transformer::ForwardInput::new(&ids))
            .unwrap();
        (model.logits(&hidden).unwrap(), whole)
    };
    let (bf16, fp8) = (logits(Precision::Bf16), logits(Precision::Fp8));
    assert_eq!(bf16.0, fp8.0);
    assert_ne!(bf16.1, fp8.1);
}

#[test]
fn mixtures_and_adapters_train_in_fp8() {
    let experts = LlamaConfig::of(LlamaFamily::Mixtral);
    let mixture = LlamaConfig {
        experts: experts.experts.clone().map(|experts| ExpertsConfig {
            num_experts: 16,
            ..experts
        }),
        family: experts.family,
        ..config()
    };
    let lora = LoraConfig {
        target_modules: Some(TargetModules::AllLinear),
        r: 16,
        ..LoraConfig::default()
    };
    for (config, with_adapters) in [(mixture, false), (config(), true)] {
        let mut model = model(config);
        let parameters = match with_adapters {
            true => add_lora(&mut model, &lora).unwrap(),
            false => model.named_parameters(),
        };
        let gradients = |precision: Precision| -> Vec<(String, Tensor)> {
            let ids = batch(1);
            let loss = {
                let _autocast = precision.autocast(Device::Cpu).unwrap();
                model.loss(&ids, &ids, LabelShift::HuggingFace).unwrap()
            };
            loss.mean().unwrap().backward();
            let take = |(name, parameter): &(String, Tensor)| {
                let gradient = parameter.grad().copy();
                parameter.shallow_clone().zero_grad();
                (name.clone(), gradient)
            };
            parameters.iter().map(take).collect()
        };
        for ((name, fp8), (_, fp32)) in gradients(Precision::Fp8)
            .iter()
            .zip(gradients(Precision::Fp32))
        {
            let scale = fp32.norm().double_value(&[]).max(1e-9);
            let error = (fp8 - &fp32).norm().double_value(&[]) / scale;
            // An expert of the mixture may get other tokens.
            assert!(
                error < 0.5 || name.contains("expert") || name.contains("gate"),
                "{name}: {error}"
            );
        }
    }
}
