//! DoRA: dropout, autocast, and the magnitude after changes.

use super::*;
use overdrive_optim::{AdamW, AdamWConfig, Optimizer, ParamGroup};
use overdrive_precision::Autocast;

#[test]
fn dora_under_autocast_has_the_dtypes_and_values_of_lora_under_autocast() {
    let _generator = crate::common::generator();
    for lora_dropout in [0.0, 0.25] {
        let mut host = host();
        let config = LoraConfig {
            use_dora: true,
            lora_dropout,
            ..all(4)
        };
        add_adapter(&mut host, "a", &config, &AddOptions::default()).unwrap();
        host.randomise("a");
        let x = numbers(&[7, 16], 2.0, F32).set_requires_grad(true);
        let layer = &mut host.layers[0].1;
        layer.set_training(true);
        let pass = |autocast: bool| {
            tch::manual_seed(11);
            let y = {
                let _autocast = Autocast::new(Device::Cpu)
                    .dtype(Kind::BFloat16)
                    .enabled(autocast)
                    .enter()
                    .unwrap();
                layer.forward(&x).unwrap()
            };
            y.sum(Kind::Float).backward();
            let adapter = lora_adapter(layer, "a").unwrap();
            let learn = [&x, adapter.a(), adapter.b(), adapter.magnitude().unwrap()];
            let gradients = learn.map(|tensor| {
                let gradient = tensor.grad().copy();
                let _ = tensor.grad().zero_();
                gradient
            });
            (y.detach(), gradients)
        };
        let (exact, exact_gradients) = pass(false);
        let (y, gradients) = pass(true);
        assert_eq!(y.kind(), Kind::BFloat16);
        // bf16 keeps 8 bits; sums of 16 products, scaled.
        assert!(distance(&y, &exact) < 0.02, "{lora_dropout}");
        for (got, expected) in gradients.iter().zip(&exact_gradients) {
            assert_eq!(got.kind(), Kind::Float);
            assert!(distance(got, expected) < 0.02, "{lora_dropout}");
        }
    }
}

#[test]
fn dropout_of_dora_falls_on_the_change_and_not_on_the_base() {
    // PEFT's: y = W x + b + (m/‖W + s B A‖ - 1) W d(x) + m/‖W + s B A‖ · s B A d(x).
    let _generator = crate::common::generator();
    let mut host = host();
    let config = LoraConfig {
        use_dora: true,
        lora_dropout: 0.5,
        ..all(4)
    };
    add_adapter(&mut host, "a", &config, &AddOptions::default()).unwrap();
    host.randomise("a");
    let x = numbers(&[7, 16], 2.0, F32);
    let layer = &mut host.layers[0].1;
    layer.set_training(true);
    tch::manual_seed(3);
    let y = layer.forward(&x).unwrap();
    tch::manual_seed(3);
    let dropped = x.dropout(0.5, true);
    let adapter = lora_adapter(layer, "a").unwrap();
    let (weight, bias) = (
        layer.weight().to_dense(Kind::Float).unwrap(),
        layer.bias().unwrap(),
    );
    let change = adapter.b().matmul(adapter.a()) * adapter.scale();
    let lengths = (&weight + &change)
        .square()
        .sum_dim_intlist(1, false, Kind::Float)
        .sqrt();
    let factor = adapter.magnitude().unwrap() / lengths;
    let expected = x.linear(&weight, Some(bias))
        + (&factor - 1.0) * dropped.linear(&weight, None::<Tensor>)
        + &factor * dropped.linear(&change, None::<Tensor>);
    assert!(distance(&y, &expected) < 1e-5);
    assert!(
        distance(&layer.forward(&x).unwrap(), &expected) > 1e-2,
        "another mask"
    );
}

#[test]
fn dora_follows_every_change_of_its_tensors() {
    let config = LoraConfig {
        use_dora: true,
        ..all(4)
    };
    let mut host = host();
    add_adapter(&mut host, "a", &config, &AddOptions::default()).unwrap();
    host.randomise("a");
    let x = numbers(&[7, 16], 2.0, F32);
    let explicit = |layer: &Linear| {
        let adapter = lora_adapter(layer, "a").unwrap();
        let weight = layer.dense_copy() + adapter.b().matmul(adapter.a()) * adapter.scale();
        let lengths = weight
            .square()
            .sum_dim_intlist([1i64].as_slice(), true, Kind::Float)
            .sqrt();
        let weight = weight / lengths * adapter.magnitude().unwrap().unsqueeze(1);
        x.linear(&weight, layer.bias())
    };
    let check = |layer: &Linear| {
        for _ in 0..2 {
            let y = layer.forward(&x).unwrap();
            assert!(distance(&y, &explicit(layer)) < 1e-5);
        }
    };
    let layer = host.layer("layers.0.q");
    check(layer);
    let change = |tensor: &Tensor| {
        tch::no_grad(|| {
            tensor
                .shallow_clone()
                .g_add_(&(numbers(&tensor.size(), 4.0, F32) * 0.1))
        })
    };
    for place in 0..3 {
        let adapter = lora_adapter(layer, "a").unwrap();
        let tensor = [adapter.a(), adapter.b(), adapter.magnitude().unwrap()][place];
        let _ = change(tensor);
        check(layer);
    }
    // libtorch's fused kernel, as the trainer steps.
    let adapter = lora_adapter(layer, "a").unwrap();
    let trained = [("a", adapter.a()), ("b", adapter.b())];
    let trained = trained.map(|(name, tensor)| (name.to_owned(), tensor.shallow_clone()));
    let config = AdamWConfig {
        learning_rate: 0.1,
        ..AdamWConfig::default()
    };
    let mut adamw = AdamW::new(vec![ParamGroup::new("lora", trained.into())], config).unwrap();
    for _ in 0..3 {
        let y = layer.forward(&x).unwrap();
        y.square().sum(Kind::Float).backward();
        adamw.step().unwrap();
        adamw.zero_grad().unwrap();
        check(layer);
    }
    if let overdrive_nn::LinearWeight::Dense { weight, .. } = layer.weight() {
        let _ = change(weight);
    }
    check(layer);
    set_adapter_scale(&mut host, "a", 2.0).unwrap();
    let layer = host.layer("layers.0.q");
    check(layer);
    let weight = overdrive_nn::LinearWeight::Dense {
        weight: numbers(&[12, 16], 8.0, F32),
        transposed: false,
    };
    layer.replace_weight(weight).unwrap();
    check(layer);
}
