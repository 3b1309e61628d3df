//! Training with linear layers in FP8, and with a residual stream in bf16.

use overdrive_lora::{LoraConfig, TargetModules, add_lora};
use overdrive_precision::Precision;
use overdrive_transformer::{
    CausalLm, Execution, ExpertsConfig, ForwardInput, InitOptions, LabelShift, LlamaConfig,
    LlamaFamily,
};
use tch::{Device, Kind, Tensor};

use crate::common::generator;

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

/// Trains with SGD from one start, with a residual stream in fp32 or in bf16, and returns the losses.
fn losses(precision: Precision, fp32_residual_connection: bool, steps: u64) -> Vec<f64> {
    let mut model = model(config());
    let mut execution = Execution::default();
    execution.fp32_residual_connection = fp32_residual_connection;
    model.set_execution(execution);
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
    let last = |precision, fp32_residual_connection| {
        let losses = losses(precision, fp32_residual_connection, steps);
        let tail = &losses[losses.len() - 20..];
        (losses[0], tail.iter().sum::<f64>() / tail.len() as f64)
    };
    let (start, bf16) = last(Precision::Bf16, true);
    for (what, precision, fp32_residual_connection) in [
        ("FP8", Precision::Fp8, true),
        (
            "bf16 with a residual stream in bf16",
            Precision::Bf16,
            false,
        ),
        ("FP8 with a residual stream in bf16", Precision::Fp8, false),
    ] {
        let (_, found) = last(precision, fp32_residual_connection);
        println!(
            "loss {start:.4} to {found:.4} in {what} and {bf16:.4} in bf16 after {steps} steps"
        );
        assert!(found < 0.8 * start, "{what}: {start} {found}");
        assert!(
            (found / bf16 - 1.0).abs() < within,
            "{what}: {found} {bf16}"
        );
    }
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
    let _generator = generator();
    let model = model(config());
    let hidden = Tensor::randn([3, 64], (Kind::Float, Device::Cpu));
    let logits = |precision: Precision| {
        let _autocast = precision.autocast(Device::Cpu).unwrap();
        let ids = batch(0);
        let whole = model.forward(ForwardInput::new(&ids)).unwrap();
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

#[test]
fn a_residual_stream_in_bf16_has_the_gradients_of_one_in_fp32_but_for_rounding() {
    // Norms before and after the blocks, a gain of `1 + weight`, and norms of queries and keys.
    for family in [
        LlamaFamily::Llama,
        LlamaFamily::Gemma2,
        LlamaFamily::Olmo2,
        LlamaFamily::Qwen3,
    ] {
        let mut model = model(LlamaConfig { family, ..config() });
        let parameters = model.named_parameters();
        let ids = batch(1);
        let mut gradients = |fp32_residual_connection: bool| -> (Kind, Vec<Tensor>) {
            let mut execution = Execution::default();
            execution.fp32_residual_connection = fp32_residual_connection;
            model.set_execution(execution);
            let (hidden, loss) = {
                let _autocast = Precision::Bf16.autocast(Device::Cpu).unwrap();
                let hidden = model.hidden_states(ForwardInput::new(&ids)).unwrap();
                let loss = model.loss(&ids, &ids, LabelShift::HuggingFace).unwrap();
                (hidden, loss)
            };
            loss.mean().unwrap().backward();
            let take = |(_, parameter): &(String, Tensor)| {
                let gradient = parameter.grad().copy();
                parameter.shallow_clone().zero_grad();
                gradient
            };
            (hidden.kind(), parameters.iter().map(take).collect())
        };
        let (wide, expected) = gradients(true);
        let (narrow, found) = gradients(false);
        assert_eq!((wide, narrow), (Kind::Float, Kind::BFloat16), "{family:?}");
        for (((name, _), expected), found) in parameters.iter().zip(expected).zip(found) {
            let scale = expected.norm().double_value(&[]).max(1e-9);
            let error = (found - expected).norm().double_value(&[]) / scale;
            // bf16 has 8 bits.
            assert!(error < 0.05, "{family:?} {name}: {error}");
        }
    }
}
