//! Gradients of layers with adapters against finite differences, in fp64.

use std::sync::Arc;

use crate::common::{F64, numbers, transposed};
use overdrive_autograd::{GradcheckOptions, gradcheck};
use overdrive_lora::{AddOptions, InitLoraWeights, LoraAdapter, LoraConfig, LoraLinear};
use overdrive_nn::{Linear, joint_forward};
use tch::Tensor;

fn layer(outputs: i64, biased: bool, conv1d: bool, configs: &[LoraConfig]) -> Linear {
    let salt = outputs as f64;
    let bias = biased.then(|| numbers(&[outputs], salt, F64));
    let mut layer = if conv1d {
        Linear::new(transposed(numbers(&[6, outputs], salt, F64)), bias).unwrap()
    } else {
        Linear::dense(numbers(&[outputs, 6], salt, F64), bias).unwrap()
    };
    let names: Vec<String> = (0..configs.len())
        .map(|index| format!("a{index}"))
        .collect();
    for (name, config) in names.iter().zip(configs) {
        let config = Arc::new(LoraConfig {
            init_lora_weights: InitLoraWeights::Random,
            ..config.clone()
        });
        layer
            .add_adapter(
                &format!("layer{outputs}"),
                name,
                &config,
                &AddOptions::default(),
            )
            .unwrap();
    }
    layer.set_active_adapters(&names.iter().map(String::as_str).collect::<Vec<_>>());
    layer
}

/// x, and then all trainable tensors.
fn inputs(layers: &[&Linear]) -> Vec<Tensor> {
    let mut inputs = vec![numbers(&[2, 3, 6], 0.3, F64).set_requires_grad(true)];
    for layer in layers {
        for (_, adapter) in layer.lora_adapters() {
            inputs.extend([adapter.a().shallow_clone(), adapter.b().shallow_clone()]);
            inputs.extend(adapter.bias().map(Tensor::shallow_clone));
            inputs.extend(adapter.magnitude().map(Tensor::shallow_clone));
        }
    }
    inputs
}

/// Another layer of the same base with these tensors, taken in the order of [`inputs`].
fn with(layer: &Linear, tensors: &mut std::slice::Iter<'_, Tensor>) -> Linear {
    let bias = layer.bias().map(Tensor::shallow_clone);
    let mut made = Linear::new(layer.weight().shallow_clone(), bias).unwrap();
    for (name, adapter) in layer.lora_adapters() {
        let mut next = || tensors.next().unwrap().shallow_clone();
        let (a, b) = (next(), next());
        let bias = adapter.bias().map(|_| next());
        let magnitude = adapter.magnitude().map(|_| next());
        let config = Arc::new(adapter.config().clone());
        made.insert_adapter(
            name,
            LoraAdapter::new(config, a, b, bias, magnitude).unwrap(),
        )
        .unwrap();
    }
    made.set_active_adapters(&layer.active_adapters());
    made
}

fn plain(r: i64) -> LoraConfig {
    LoraConfig {
        r,
        lora_alpha: 3.0,
        ..LoraConfig::default()
    }
}

#[test]
fn gradients_of_one_layer_with_one_or_several_adapters() {
    let _generator = crate::common::generator();
    let biased = LoraConfig {
        lora_bias: true,
        ..plain(3)
    };
    for configs in [
        vec![plain(2)],
        vec![plain(2), plain(1)],
        vec![biased, plain(2)],
    ] {
        for (has_bias, conv1d) in [(false, false), (true, false), (true, true)] {
            let layer = layer(5, has_bias, conv1d, &configs);
            let check = |x: &[Tensor]| Ok(vec![with(&layer, &mut x[1..].iter()).forward(&x[0])?]);
            gradcheck(check, &inputs(&[&layer]), &GradcheckOptions::default()).unwrap();
        }
    }
}

#[test]
fn dora_differentiates_all_but_the_row_norms() {
    let _generator = crate::common::generator();
    // With constant norms the analytical gradients of A and B differ from finite differences; those of x
    // and of the magnitude agree.
    let config = LoraConfig {
        use_dora: true,
        ..plain(2)
    };
    for has_bias in [false, true] {
        let layer = layer(5, has_bias, false, std::slice::from_ref(&config));
        let adapter = layer.lora_adapter("a0").unwrap();
        for tensor in [adapter.a(), adapter.b()] {
            let _ = tensor.set_requires_grad(false);
        }
        let check = |x: &[Tensor]| Ok(vec![with(&layer, &mut x[1..].iter()).forward(&x[0])?]);
        gradcheck(check, &inputs(&[&layer]), &GradcheckOptions::default()).unwrap();
    }
}

#[test]
fn gradients_of_joint_layers_of_which_some_have_adapters() {
    let _generator = crate::common::generator();
    let (q, k, v) = (
        layer(4, true, false, &[plain(2), plain(1)]),
        layer(3, true, false, &[]),
        layer(5, true, false, &[plain(2)]),
    );
    let check = |x: &[Tensor]| {
        let mut rest = x[1..].iter();
        let [q, k, v] = [&q, &k, &v].map(|layer| with(layer, &mut rest));
        Ok(vec![joint_forward(&x[0], &[&q, &k, &v])?])
    };
    gradcheck(check, &inputs(&[&q, &k, &v]), &GradcheckOptions::default()).unwrap();
}

#[test]
fn dropout_masks_are_those_of_forward() {
    let _generator = crate::common::generator();
    let config = LoraConfig {
        lora_dropout: 0.4,
        ..plain(2)
    };
    let layer = layer(5, true, false, &[config.clone(), config]);
    let check = |x: &[Tensor]| {
        tch::manual_seed(5);
        let mut layer = with(&layer, &mut x[1..].iter());
        layer.set_training(true);
        Ok(vec![layer.forward(&x[0])?])
    };
    gradcheck(check, &inputs(&[&layer]), &GradcheckOptions::default()).unwrap();
}

#[test]
fn dropout_keeps_the_mean_and_drops_the_given_share() {
    let _generator = crate::common::generator();
    tch::manual_seed(1);
    let config = Arc::new(LoraConfig {
        r: 1,
        lora_alpha: 1.0,
        lora_dropout: 0.25,
        ..LoraConfig::default()
    });
    let mut layer = Linear::dense(Tensor::zeros([1, 1], F64), None).unwrap();
    layer
        .add_adapter("layer", "a", &config, &AddOptions::default())
        .unwrap();
    layer.set_active_adapters(&["a"]);
    layer.set_training(true);
    let adapter = layer.lora_adapter("a").unwrap();
    tch::no_grad(|| {
        let _ = adapter.a().shallow_clone().fill_(1.0);
        let _ = adapter.b().shallow_clone().fill_(1.0);
    });
    let y = tch::no_grad(|| layer.forward(&Tensor::ones([40_000, 1], F64)).unwrap());
    let kept = y
        .ne(0.0)
        .to_kind(tch::Kind::Double)
        .mean(tch::Kind::Double)
        .double_value(&[]);
    // Five standard errors of a share of 0.75 among 40,000 elements.
    assert!((kept - 0.75).abs() < 0.011, "{kept}");
    assert_eq!(y.max().double_value(&[]), 1.0 / 0.75);
    // There is no dropout outside training.
    layer.set_training(false);
    let y = tch::no_grad(|| layer.forward(&Tensor::ones([4, 1], F64)).unwrap());
    assert_eq!(y, Tensor::ones([4, 1], F64));
}
