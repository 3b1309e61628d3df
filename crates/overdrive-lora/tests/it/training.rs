//! QLoRA: adapters over quantized weights, with checkpointing and a paged 8-bit optimizer.

use crate::common::{F32, Host, distance, numbers};
use overdrive_checkpointing::scope;
use overdrive_lora::{
    AddOptions, InitLoraWeights, LoraConfig, TargetModules, add_adapter, lora_adapter,
    trainable_parameters,
};
use overdrive_nn::Linear;
use overdrive_optim::{Optimizer, PagedAdamW, PagedAdamWConfig, ParamGroup, StateBits};
use overdrive_quantization::QuantizedWeight;
use tch::{Kind, Tensor};

fn nf4(outputs: i64, inputs: i64, salt: f64) -> QuantizedWeight {
    let weight = numbers(&[outputs, inputs], salt, F32) * (3.0 / inputs as f64).sqrt();
    QuantizedWeight::quantize(&weight, "nf4".parse().unwrap()).unwrap()
}

#[test]
fn gradients_over_nf4_are_those_over_its_dequantized_weight() {
    let _generator = crate::common::generator();
    let packed = nf4(96, 128, 1.0);
    let dense = packed.dequantize(Kind::Float).unwrap();
    for use_dora in [false, true] {
        let config = LoraConfig {
            use_dora,
            init_lora_weights: InitLoraWeights::Random,
            ..LoraConfig::default()
        };
        let run = |layer: Linear| {
            let host = Host::adapted(layer, &config);
            let layer = &host.layers[0].1;
            let x = numbers(&[40, 128], 2.0, F32).set_requires_grad(true);
            let y = layer.forward(&x).unwrap();
            (&y * numbers(&[40, 96], 3.0, F32))
                .sum(Kind::Float)
                .backward();
            let adapter = lora_adapter(layer, "a").unwrap();
            let mut all = vec![y.detach(), x.grad(), adapter.a().grad(), adapter.b().grad()];
            all.extend(adapter.magnitude().map(Tensor::grad));
            all
        };
        let found = run(Linear::quantized(packed.shallow_clone(), None).unwrap());
        let expected = run(Linear::dense(dense.shallow_clone(), None).unwrap());
        for (index, (found, expected)) in found.iter().zip(&expected).enumerate() {
            // Sums of 128 fp32 products in another order; a kernel may round x to 16-bit words.
            let apart = distance(found, expected);
            assert!(apart < 1e-3, "{index}: {apart:e}");
        }
    }
}

/// Two quantized layers with an activation between them.
fn model() -> Host {
    let layers = [("up", nf4(128, 64, 1.0)), ("down", nf4(64, 128, 2.0))];
    let mut host = Host {
        layers: layers
            .map(|(name, weight)| (name.to_owned(), Linear::quantized(weight, None).unwrap()))
            .into(),
        ..Host::default()
    };
    let config = LoraConfig {
        lora_dropout: 0.1,
        target_modules: Some(TargetModules::AllLinear),
        ..LoraConfig::default()
    };
    add_adapter(&mut host, "default", &config, &AddOptions::default()).unwrap();
    overdrive_lora::set_training(&mut host, true).unwrap();
    host
}

fn forward(host: &Host, x: &Tensor) -> overdrive_nn::Result<Tensor> {
    let up = host.layers[0].1.forward(x)?.f_gelu("none")?;
    host.layers[1].1.forward(&up)
}

#[test]
fn checkpointed_training_with_a_paged_8_bit_optimizer_is_bit_equal_and_learns() {
    let _generator = crate::common::generator();
    let train = |checkpointed: bool| {
        tch::manual_seed(11);
        let mut host = model();
        let parameters = trainable_parameters(&mut host).unwrap();
        assert_eq!(parameters.len(), 4);
        let config = PagedAdamWConfig {
            learning_rate: 1e-2,
            state_bits: StateBits::Eight,
            min_8bit_size: 0,
            ..PagedAdamWConfig::default()
        };
        let mut optimizer =
            PagedAdamW::new(vec![ParamGroup::new("adapters", parameters)], config).unwrap();
        let x = numbers(&[256, 64], 4.0, F32);
        let target = x.flip([1]);
        // A checkpoint needs an input that requires a gradient, and a matmul with weights of 4 bits that is part of no
        // graph rounds its activations: so both have one.
        let x = x.set_requires_grad(true);
        let mut losses = Vec::new();
        for _ in 0..30 {
            let loss = |y: &Tensor| (y - &target).square().mean(Kind::Float);
            let value = if checkpointed {
                let mut value = 0.0;
                scope(|scope| {
                    let y = scope.checkpoint(&x, |x| forward(&host, x))?;
                    let loss = loss(&y);
                    value = loss.double_value(&[]);
                    scope.backward(&[&loss])
                })
                .unwrap();
                value
            } else {
                let loss = loss(&forward(&host, &x).unwrap());
                loss.backward();
                loss.double_value(&[])
            };
            losses.push(value);
            optimizer.step().unwrap();
            optimizer.zero_grad().unwrap();
        }
        losses
    };
    let plain = train(false);
    assert!(plain[29] < 0.8 * plain[0], "{plain:?}");
    assert_eq!(train(true), plain);
}
