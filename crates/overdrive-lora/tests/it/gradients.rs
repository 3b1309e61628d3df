//! Gradients of layers with adapters against finite differences, in fp64.

use crate::common::{F64, Host, numbers, transposed};
use overdrive_autograd::{FunctionResult, GradcheckOptions, gradcheck};
use overdrive_lora::{
    AddOptions, InitLoraWeights, LoraAdapter, LoraConfig, TargetModules, adapter_names,
    add_adapter, lora_adapter, set_adapter,
};
use overdrive_nn::{Linear, joint_forward};
use tch::Tensor;

fn layer(outputs: i64, biased: bool, conv1d: bool, configs: &[LoraConfig]) -> Linear {
    let salt = outputs as f64;
    let bias = biased.then(|| numbers(&[outputs], salt, F64));
    let layer = if conv1d {
        Linear::new(transposed(numbers(&[6, outputs], salt, F64)), bias).unwrap()
    } else {
        Linear::dense(numbers(&[outputs, 6], salt, F64), bias).unwrap()
    };
    adapted(layer, configs)
}

/// The layer with the active adapters `a0`, `a1`, ….
fn adapted(layer: Linear, configs: &[LoraConfig]) -> Linear {
    let mut host = Host {
        layers: vec![("layer".to_owned(), layer)],
        ..Host::default()
    };
    for (index, config) in configs.iter().enumerate() {
        let config = LoraConfig {
            init_lora_weights: InitLoraWeights::Random,
            target_modules: Some(TargetModules::AllLinear),
            ..config.clone()
        };
        let options = AddOptions {
            seed: index as u64,
            ..AddOptions::default()
        };
        add_adapter(&mut host, &format!("a{index}"), &config, &options).unwrap();
    }
    let names = adapter_names(&mut host).unwrap();
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    set_adapter(&mut host, &names).unwrap();
    host.layers.remove(0).1
}

fn adapters(layer: &Linear) -> impl Iterator<Item = &LoraAdapter> {
    let names = layer.adapter().map_or(Vec::new(), |own| own.names());
    let own = move |name| lora_adapter(layer, name);
    names.into_iter().filter_map(own)
}

/// The trainable tensors of a layer.
fn tensors(layer: &Linear) -> Vec<Tensor> {
    let mut tensors = Vec::new();
    for adapter in adapters(layer) {
        tensors.extend([adapter.a().shallow_clone(), adapter.b().shallow_clone()]);
        tensors.extend(adapter.bias().map(Tensor::shallow_clone));
        tensors.extend(adapter.magnitude().map(Tensor::shallow_clone));
    }
    tensors
}

/// x, and then all trainable tensors.
fn inputs(layers: &[&Linear]) -> Vec<Tensor> {
    let mut inputs = vec![numbers(&[2, 3, 6], 0.3, F64).set_requires_grad(true)];
    inputs.extend(layers.iter().flat_map(|layer| tensors(layer)));
    inputs
}

/// Another layer of the same base with the values of `inputs`, which are taken in the order of [`inputs`]; `None` if they are
/// the tensors of `layer` itself.
fn with(layer: &Linear, inputs: &mut std::slice::Iter<'_, Tensor>) -> Option<Linear> {
    let own = tensors(layer);
    let given: Vec<&Tensor> = inputs.take(own.len()).collect();
    let mut pairs = own.iter().zip(&given);
    if pairs.all(|(own, given)| own.data_ptr() == given.data_ptr()) {
        return None;
    }
    let bias = layer.bias().map(Tensor::shallow_clone);
    let made = Linear::new(layer.weight().shallow_clone(), bias).unwrap();
    let configs: Vec<LoraConfig> = adapters(layer).map(|own| own.config().clone()).collect();
    let mut made = adapted(made, &configs);
    made.set_training(layer.is_training());
    tch::no_grad(|| {
        for (mut own, given) in tensors(&made).into_iter().zip(given) {
            own.copy_(given);
        }
    });
    Some(made)
}

/// The output of the layer with the inputs of [`inputs`].
fn forward(layer: &Linear, inputs: &[Tensor]) -> FunctionResult<Vec<Tensor>> {
    let made = with(layer, &mut inputs[1..].iter());
    Ok(vec![made.as_ref().unwrap_or(layer).forward(&inputs[0])?])
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
            let check = |x: &[Tensor]| forward(&layer, x);
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
        let adapter = lora_adapter(&layer, "a0").unwrap();
        for tensor in [adapter.a(), adapter.b()] {
            let _ = tensor.set_requires_grad(false);
        }
        let check = |x: &[Tensor]| forward(&layer, x);
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
        let layers = [&q, &k, &v].map(|layer| (layer, with(layer, &mut rest)));
        let layers = layers
            .each_ref()
            .map(|(own, made)| made.as_ref().unwrap_or(own));
        Ok(vec![joint_forward(&x[0], &layers)?])
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
    let mut layer = layer(5, true, false, &[config.clone(), config]);
    layer.set_training(true);
    let check = |x: &[Tensor]| {
        tch::manual_seed(5);
        forward(&layer, x)
    };
    gradcheck(check, &inputs(&[&layer]), &GradcheckOptions::default()).unwrap();
}

#[test]
fn dropout_keeps_the_mean_and_drops_the_given_share() {
    let _generator = crate::common::generator();
    tch::manual_seed(1);
    let config = LoraConfig {
        r: 1,
        lora_alpha: 1.0,
        lora_dropout: 0.25,
        ..LoraConfig::default()
    };
    let layer = Linear::dense(Tensor::zeros([1, 1], F64), None).unwrap();
    let mut host = Host::adapted(layer, &config);
    let layer = host.layer("layer");
    layer.set_training(true);
    let adapter = lora_adapter(layer, "a").unwrap();
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
