//! Adapters of layers: switching, combining, dtypes and initial values.

mod dora;

use crate::common::{F32, Host, distance, numbers};
use overdrive_lora::{
    AddOptions, BiasMode, Combination, Error, InitLoraWeights, LoraConfig, TargetModules,
    active_adapters, adapter_names, add_adapter, add_weighted_adapter, delete_adapter,
    disable_adapters, enable_adapters, lora_adapter, merge_adapters, parameter_counts, set_adapter,
    set_adapter_scale, trainable_parameters, unmerge_adapters,
};
use overdrive_nn::{Linear, joint_forward};
use overdrive_precision::autocast;
use overdrive_quantization::QuantizedWeight;
use tch::{Device, Kind, Tensor};

fn all(r: i64) -> LoraConfig {
    LoraConfig {
        r,
        target_modules: Some(TargetModules::AllLinear),
        ..LoraConfig::default()
    }
}

fn host() -> Host {
    Host::new(&["layers.0.q", "layers.0.k", "layers.0.v"], 12, 16)
}

#[test]
fn a_new_adapter_changes_nothing_and_draws_within_the_bounds_of_kaiming() {
    let mut host = host();
    let x = numbers(&[5, 16], 9.0, F32);
    let before = host.layers[0].1.forward(&x).unwrap();
    add_adapter(&mut host, "a", &all(4), &AddOptions::default()).unwrap();
    assert_eq!(host.layers[0].1.forward(&x).unwrap(), before);
    let (a, b) = {
        let adapter = lora_adapter(&host.layers[0].1, "a").unwrap();
        (adapter.a().detach(), adapter.b().detach())
    };
    assert_eq!((a.size(), b.size()), (vec![4, 16], vec![12, 4]));
    assert_eq!(b.abs().max().double_value(&[]), 0.0);
    let largest = a.abs().max().double_value(&[]);
    assert!(largest <= 0.25 && largest > 0.2, "{largest}");
    // The same seed gives the same values; another layer or seed gives others.
    assert_ne!(
        a,
        lora_adapter(&host.layers[1].1, "a").unwrap().a().detach()
    );
    let mut again = self::host();
    add_adapter(&mut again, "other", &all(4), &AddOptions::default()).unwrap();
    assert_eq!(
        a,
        lora_adapter(&again.layers[0].1, "other")
            .unwrap()
            .a()
            .detach()
    );
}

#[test]
fn libtorchs_generator_is_left_as_it_is() {
    let _generator = crate::common::generator();
    let before = overdrive_autograd::random::state(Device::Cpu).unwrap();
    let config = LoraConfig {
        init_lora_weights: InitLoraWeights::Gaussian,
        ..all(4)
    };
    add_adapter(&mut host(), "a", &config, &AddOptions::default()).unwrap();
    assert_eq!(
        overdrive_autograd::random::state(Device::Cpu).unwrap(),
        before
    );
}

#[test]
fn adapters_are_switched_summed_disabled_and_deleted() {
    let mut host = host();
    let x = numbers(&[5, 16], 9.0, F32);
    let plain = host.layers[0].1.forward(&x).unwrap();
    for (name, r) in [("a", 2), ("b", 3)] {
        add_adapter(
            &mut host,
            name,
            &all(r),
            &AddOptions {
                seed: r as u64,
                ..AddOptions::default()
            },
        )
        .unwrap();
        host.randomise(name);
    }
    // The first adapter is active at once, the second is not.
    assert_eq!(active_adapters(&mut host).unwrap(), ["a"]);
    assert_eq!(adapter_names(&mut host).unwrap(), ["a", "b"]);
    let y = |host: &Host| tch::no_grad(|| host.layers[0].1.forward(&x).unwrap());
    let with_a = y(&host);
    assert!(distance(&with_a, &plain) > 0.01);
    let learning = |host: &mut Host| -> Vec<String> {
        trainable_parameters(host)
            .unwrap()
            .into_iter()
            .map(|(name, _)| name)
            .collect()
    };
    assert_eq!(
        learning(&mut host)[0],
        "base_model.model.layers.0.q.lora_A.a.weight"
    );
    assert_eq!(learning(&mut host).len(), 6);

    set_adapter(&mut host, &["b"]).unwrap();
    let with_b = y(&host);
    assert!(learning(&mut host).iter().all(|name| name.contains(".b.")));
    set_adapter(&mut host, &["a", "b"]).unwrap();
    let sum = &with_a + &with_b - &plain;
    assert!(distance(&y(&host), &sum) < 1e-6);
    assert_eq!(learning(&mut host).len(), 12);

    disable_adapters(&mut host).unwrap();
    assert_eq!(y(&host), plain);
    enable_adapters(&mut host).unwrap();
    assert!(distance(&y(&host), &sum) < 1e-6);

    delete_adapter(&mut host, "a").unwrap();
    assert_eq!(active_adapters(&mut host).unwrap(), ["b"]);
    assert_eq!(y(&host), with_b);
    set_adapter_scale(&mut host, "b", 0.0).unwrap();
    assert!(distance(&y(&host), &plain) < 1e-6);
    delete_adapter(&mut host, "b").unwrap();
    assert_eq!(y(&host), plain);

    let error = set_adapter(&mut host, &["c"]).unwrap_err();
    assert_eq!(
        error.to_string(),
        "there is no adapter `c`; the model has none"
    );
    let error = add_adapter(&mut host, "a.b", &all(2), &AddOptions::default()).unwrap_err();
    assert!(error.to_string().contains("it contains a dot"), "{error}");
    add_adapter(&mut host, "a", &all(2), &AddOptions::default()).unwrap();
    let error = add_adapter(&mut host, "a", &all(2), &AddOptions::default()).unwrap_err();
    assert_eq!(
        error.to_string(),
        "`a` cannot be the name of a new adapter: another adapter has it"
    );
}

#[test]
fn joint_layers_equal_the_layers_one_by_one() {
    let x = numbers(&[2, 5, 16], 9.0, F32);
    let dora = LoraConfig {
        use_dora: true,
        ..all(4)
    };
    for config in [all(4), dora] {
        let mut host = host();
        let config = LoraConfig {
            target_modules: Some(TargetModules::names(["q", "v"])),
            ..config
        };
        add_adapter(&mut host, "a", &config, &AddOptions::default()).unwrap();
        host.randomise("a");
        let layers: Vec<&Linear> = host.layers.iter().map(|(_, layer)| layer).collect();
        let joint = joint_forward(&x, &layers).unwrap();
        let each: Vec<Tensor> = layers
            .iter()
            .map(|layer| layer.forward(&x).unwrap())
            .collect();
        assert!(distance(&joint, &Tensor::cat(&each, -1)) < 1e-6);
    }
}

#[test]
fn beside_16_bit_weights_adapters_are_fp32_and_results_are_rounded_once() {
    let bf16 = (Kind::BFloat16, Device::Cpu);
    let weight = numbers(&[12, 16], 1.0, bf16);
    let x = numbers(&[7, 16], 2.0, bf16);
    let config = LoraConfig {
        init_lora_weights: InitLoraWeights::Random,
        ..LoraConfig::default()
    };
    let host = Host::adapted(
        Linear::dense(weight.shallow_clone(), None).unwrap(),
        &config,
    );
    let layer = &host.layers[0].1;
    let adapter = lora_adapter(layer, "a").unwrap();
    assert_eq!(adapter.a().kind(), Kind::Float);
    let y = layer.forward(&x).unwrap();
    assert_eq!(y.kind(), Kind::BFloat16);
    // PEFT: the base in bf16, plus the change in fp32, rounded.
    let change = x
        .to_kind(Kind::Float)
        .matmul(&adapter.a().tr())
        .matmul(&adapter.b().tr())
        * adapter.scale();
    let base = overdrive_fused::linear(&x, &weight, None).unwrap();
    let expected = (base.to_kind(Kind::Float) + change).to_kind(Kind::BFloat16);
    // One unit in the last of 8 bits, where fp32 sums round to the other side.
    assert!(distance(&y, &expected) < 1.0 / 128.0);
    y.to_kind(Kind::Float).sum(Kind::Float).backward();
    assert_eq!(adapter.a().grad().kind(), Kind::Float);

    let options = AddOptions {
        autocast_adapter_dtype: false,
        ..AddOptions::default()
    };
    let mut host = self::host();
    host.layers[0].1 = Linear::dense(weight, None).unwrap();
    add_adapter(&mut host, "a", &all(4), &options).unwrap();
    let adapter = lora_adapter(&host.layers[0].1, "a").unwrap();
    assert_eq!(adapter.a().kind(), Kind::BFloat16);
}

#[test]
fn under_autocast_matmuls_have_its_dtype_and_gradients_that_of_the_adapter() {
    let _generator = crate::common::generator();
    let mut host = host();
    add_adapter(&mut host, "a", &all(4), &AddOptions::default()).unwrap();
    host.randomise("a");
    let x = numbers(&[7, 16], 2.0, F32).set_requires_grad(true);
    let layer = &host.layers[0].1;
    let exact = layer.forward(&x).unwrap();
    exact.sum(Kind::Float).backward();
    let adapter = lora_adapter(layer, "a").unwrap();
    let (dx, da) = (x.grad().copy(), adapter.a().grad().copy());
    let _ = x.grad().zero_();
    let _ = adapter.a().grad().zero_();
    let y = {
        let _autocast = autocast(Device::Cpu, Kind::BFloat16).unwrap();
        layer.forward(&x).unwrap()
    };
    assert_eq!(y.kind(), Kind::BFloat16);
    y.sum(Kind::Float).backward();
    // bf16 keeps 8 bits, and each output is a sum of 16 products.
    assert!(distance(&y, &exact) < 0.02);
    assert_eq!(
        (x.grad().kind(), adapter.a().grad().kind()),
        (Kind::Float, Kind::Float)
    );
    assert!(distance(&x.grad(), &dx) < 0.02);
    assert!(distance(&adapter.a().grad(), &da) < 0.02);
}

#[test]
fn without_an_active_adapter_the_layer_computes_its_weight_alone() {
    let weight = numbers(&[12, 16], 1.0, F32);
    let layer = Linear::dense(weight.shallow_clone(), None).unwrap();
    let x = numbers(&[7, 16], 2.0, F32);
    let expected = overdrive_fused::linear(&x, &weight, None).unwrap();
    assert_eq!(layer.dense_weight().unwrap().data_ptr(), weight.data_ptr());
    let mut host = Host::adapted(layer, &LoraConfig::default());
    assert!(host.layer("layer").dense_weight().is_none());
    set_adapter(&mut host, &[]).unwrap();
    assert_eq!(host.layer("layer").forward(&x).unwrap(), expected);
    assert!(host.layer("layer").dense_weight().is_some());
}

#[test]
fn initialization_from_the_weight_keeps_the_output_of_the_layer() {
    let x = numbers(&[7, 16], 2.0, F32);
    for init in [
        InitLoraWeights::Pissa,
        InitLoraWeights::PissaFast(8),
        InitLoraWeights::Olora,
    ] {
        let mut host = host();
        let before = host.layers[0].1.forward(&x).unwrap();
        let weight = host.layers[0].1.dense_copy();
        let config = LoraConfig {
            init_lora_weights: init,
            ..all(4)
        };
        add_adapter(&mut host, "a", &config, &AddOptions::default()).unwrap();
        let y = tch::no_grad(|| host.layers[0].1.forward(&x).unwrap());
        assert!(distance(&y, &before) < 1e-5, "{init}");
        if init == InitLoraWeights::Olora {
            continue;
        }
        // PiSSA takes the largest singular values; the rest of the weight has the others.
        let (_, all, _) = weight.svd(true, true);
        let (_, rest, _) = host.layers[0].1.dense_copy().svd(true, true);
        let tail = all.narrow(0, 4, 8);
        // Subspace iteration is an approximation, the full decomposition is exact.
        let bound = if init == InitLoraWeights::Pissa {
            1e-4
        } else {
            0.05
        };
        assert!(distance(&rest.narrow(0, 0, 8), &tail) < bound, "{init}");
    }
}

#[test]
fn a_model_that_refuses_an_adapter_from_its_weights_keeps_every_bit_of_them() {
    let dense = |outputs| Linear::dense(numbers(&[outputs, 64], 4.0, F32), None).unwrap();
    let quantized = || {
        let weight = numbers(&[12, 64], 5.0, F32);
        let packed = QuantizedWeight::quantize(&weight, "int8-weight".parse().unwrap()).unwrap();
        Linear::quantized(packed, None).unwrap()
    };
    let host = |last: Linear| {
        let mut host = Host::new(&["layers.0.q", "layers.0.k"], 12, 64);
        host.layers.push(("layers.0.last".to_owned(), last));
        host
    };
    for init in [
        InitLoraWeights::Pissa,
        InitLoraWeights::Olora,
        InitLoraWeights::Loftq(Default::default()),
    ] {
        let by = LoraConfig {
            init_lora_weights: init,
            ..all(4)
        };
        let copied = LoraConfig {
            target_modules: Some(TargetModules::names(["q", "k"])),
            modules_to_save: Some(vec!["last".to_owned()]),
            ..by.clone()
        };
        // A rank that the last layer does not have, a copy that it cannot train, a weight that has no decomposition.
        let mut cases = vec![
            (host(dense(1)), &by, "`r` is 4 for `layers.0.last`"),
            (host(quantized()), &copied, "`modules_to_save` is"),
        ];
        if init != InitLoraWeights::Olora {
            cases.push((host(quantized()), &by, "`init_lora_weights` is"));
        }
        for (mut host, config, expected) in cases {
            let weights = |host: &Host| -> Vec<Tensor> {
                host.layers
                    .iter()
                    .map(|(_, own)| own.dense_copy())
                    .collect()
            };
            let before = weights(&host);
            let error = add_adapter(&mut host, "a", config, &AddOptions::default()).unwrap_err();
            assert!(error.to_string().starts_with(expected), "{init}: {error}");
            assert_eq!(weights(&host), before, "{init}: {expected}");
            assert!(adapter_names(&mut host).unwrap().is_empty());
        }
    }
}

#[test]
fn orthogonal_initialization_gives_a_zero_change() {
    let mut host = host();
    let config = LoraConfig {
        init_lora_weights: InitLoraWeights::Orthogonal,
        ..all(4)
    };
    add_adapter(&mut host, "a", &config, &AddOptions::default()).unwrap();
    let adapter = lora_adapter(&host.layers[0].1, "a").unwrap();
    let product = adapter.b().matmul(adapter.a()).detach();
    assert!(product.abs().max().double_value(&[]) < 1e-6);
    assert!(adapter.b().abs().max().double_value(&[]) > 0.01);
}

#[test]
fn weighted_sums_of_adapters() {
    let x = numbers(&[7, 16], 2.0, F32);
    let mut host = host();
    for (name, r) in [("a", 2), ("b", 3), ("c", 2)] {
        add_adapter(
            &mut host,
            name,
            &all(r),
            &AddOptions {
                seed: r as u64,
                ..AddOptions::default()
            },
        )
        .unwrap();
        host.randomise(name);
    }
    let y = |host: &mut Host, names: &[&str]| {
        set_adapter(host, names).unwrap();
        tch::no_grad(|| host.layers[0].1.forward(&x).unwrap())
    };
    let plain = y(&mut host, &[]);
    let (a, b) = (y(&mut host, &["a"]) - &plain, y(&mut host, &["b"]) - &plain);
    let expected = &plain + &a * 0.7 - &b * 0.4;
    let parts = [("a", 0.7), ("b", -0.4)];
    add_weighted_adapter(&mut host, "cat", &parts, Combination::Cat).unwrap();
    assert!(distance(&y(&mut host, &["cat"]), &expected) < 1e-5);
    // Rank 5 holds the sum of ranks 2 and 3.
    add_weighted_adapter(&mut host, "svd", &parts, Combination::Svd { rank: Some(5) }).unwrap();
    assert!(distance(&y(&mut host, &["svd"]), &expected) < 1e-5);
    // One adapter alone is exact; ranks must agree.
    add_weighted_adapter(&mut host, "linear", &[("a", 0.7)], Combination::Linear).unwrap();
    assert!(distance(&y(&mut host, &["linear"]), &(&plain + &a * 0.7)) < 1e-5);
    let error = add_weighted_adapter(&mut host, "l", &parts, Combination::Linear).unwrap_err();
    assert!(
        error
            .to_string()
            .contains("they have different ranks; use `Combination::Cat` or `Svd`"),
        "{error}"
    );
    let error = add_weighted_adapter(&mut host, "l", &[], Combination::Cat).unwrap_err();
    assert!(matches!(error, Error::NotCombinable { .. }), "{error}");
    let a = lora_adapter(&host.layers[0].1, "cat").unwrap();
    assert_eq!(
        (a.rank(), a.scale(), a.a().requires_grad()),
        (5, 1.0, false)
    );
}

#[test]
fn a_sum_that_fails_leaves_no_adapter_behind() {
    let small = Linear::dense(numbers(&[2, 16], 4.0, F32), None).unwrap();
    let mut host = host();
    host.layers.push(("layers.0.small".to_owned(), small));
    add_adapter(&mut host, "a", &all(2), &AddOptions::default()).unwrap();
    host.randomise("a");
    // The last layer has two singular values.
    let svd = Combination::Svd { rank: Some(3) };
    let error = add_weighted_adapter(&mut host, "sum", &[("a", 1.0)], svd).unwrap_err();
    let expected = "`rank` is 3; it must be at most 2 for `layers.0.small`";
    assert_eq!(error.to_string(), expected);
    assert_eq!(adapter_names(&mut host).unwrap(), ["a"]);

    // Only the last layer has a merged adapter.
    let mut last = Host {
        layers: host.layers.split_off(3),
        ..Host::default()
    };
    merge_adapters(&mut last, None, &Default::default()).unwrap();
    host.layers.append(&mut last.layers);
    let cat = Combination::Cat;
    let error = add_weighted_adapter(&mut host, "sum", &[("a", 1.0)], cat).unwrap_err();
    assert!(matches!(error, Error::Merged { .. }), "{error}");
    assert_eq!(adapter_names(&mut host).unwrap(), ["a"]);
    unmerge_adapters(&mut host).unwrap();
    add_weighted_adapter(&mut host, "sum", &[("a", 1.0)], cat).unwrap();
}

#[test]
fn biases_train_by_their_mode_and_are_counted() {
    let names = |bias| {
        let mut host = host();
        host.parameters
            .push(("norm.bias".to_owned(), Tensor::zeros([16], F32)));
        host.parameters
            .push(("norm.weight".to_owned(), Tensor::ones([16], F32)));
        let config = LoraConfig {
            bias,
            target_modules: Some(TargetModules::names(["q"])),
            ..LoraConfig::default()
        };
        add_adapter(&mut host, "a", &config, &AddOptions::default()).unwrap();
        let names = trainable_parameters(&mut host).unwrap();
        let counts = parameter_counts(&mut host).unwrap();
        let learning: i64 = names.iter().map(|(_, tensor)| tensor.numel() as i64).sum();
        assert_eq!(counts.trainable as i64, learning);
        assert_eq!(counts.all, 3 * (12 * 16 + 12) + 8 * (12 + 16) + 32);
        names
            .into_iter()
            .map(|(name, _)| name)
            .filter(|name| name.ends_with("bias"))
            .collect::<Vec<_>>()
    };
    assert!(names(BiasMode::None).is_empty());
    assert_eq!(
        names(BiasMode::LoraOnly),
        ["base_model.model.layers.0.q.base_layer.bias"]
    );
    assert_eq!(
        names(BiasMode::All),
        [
            "base_model.model.norm.bias",
            "base_model.model.layers.0.q.base_layer.bias",
            "base_model.model.layers.0.k.bias",
            "base_model.model.layers.0.v.bias"
        ]
    );
    let counts = overdrive_lora::ParameterCounts {
        trainable: 1_234,
        all: 5_678_901,
    };
    assert_eq!(
        counts.to_string(),
        "trainable params: 1,234 || all params: 5,678,901 || trainable%: 0.0217"
    );
}

#[test]
fn full_copies_replace_modules_while_their_adapter_is_active() {
    let mut host = host();
    let table = numbers(&[20, 16], 5.0, F32);
    host.parameters
        .push(("embed_tokens.weight".to_owned(), table.shallow_clone()));
    let config = LoraConfig {
        target_modules: Some(TargetModules::names(["q"])),
        modules_to_save: Some(vec!["embed_tokens".to_owned(), "layers.0.v".to_owned()]),
        ..LoraConfig::default()
    };
    add_adapter(&mut host, "a", &config, &AddOptions::default()).unwrap();
    let learning: Vec<String> = trainable_parameters(&mut host)
        .unwrap()
        .into_iter()
        .map(|(name, _)| name)
        .collect();
    assert_eq!(
        learning[0],
        "base_model.model.embed_tokens.modules_to_save.a.weight"
    );
    assert!(learning.contains(&"base_model.model.layers.0.v.modules_to_save.a.bias".to_owned()));
    assert_eq!(learning.len(), 2 + 2 + 1);
    let placed = |host: &Host| host.parameters[0].1.data_ptr() != table.data_ptr();
    assert!(placed(&host));
    // The copy is trained, the original is frozen.
    tch::no_grad(|| {
        let _ = host.parameters[0].1.fill_(3.0);
    });
    let x = numbers(&[7, 16], 2.0, F32);
    let with_copy = host.layers[2].1.forward(&x).unwrap();
    assert!(with_copy.requires_grad());
    disable_adapters(&mut host).unwrap();
    assert!(!placed(&host) && !host.layers[2].1.forward(&x).unwrap().requires_grad());
    enable_adapters(&mut host).unwrap();
    assert!(placed(&host));
    overdrive_lora::merge_and_unload(&mut host, &Default::default()).unwrap();
    assert!(!placed(&host));
    assert_eq!(table.min().double_value(&[]), 3.0);

    let config = LoraConfig {
        modules_to_save: Some(vec!["score".to_owned()]),
        ..config
    };
    let error = add_adapter(&mut host, "b", &config, &AddOptions::default()).unwrap_err();
    assert_eq!(
        error.to_string(),
        "no module matches `score` of `modules_to_save`; the model has layers.*.q, layers.*.k, layers.*.v, embed_tokens"
    );
}

#[test]
fn each_active_adapter_has_its_own_full_copies() {
    let mut host = host();
    for (name, salt) in [("embed_tokens.weight", 5.0), ("norm.weight", 6.0)] {
        let tensor = numbers(&[20, 16], salt, F32);
        host.parameters.push((name.to_owned(), tensor));
    }
    for (name, module) in [("a", "embed_tokens"), ("b", "norm")] {
        let config = LoraConfig {
            target_modules: Some(TargetModules::names(["q"])),
            modules_to_save: Some(vec![module.to_owned()]),
            ..LoraConfig::default()
        };
        add_adapter(&mut host, name, &config, &AddOptions::default()).unwrap();
    }
    set_adapter(&mut host, &[]).unwrap();
    let own: Vec<_> = host.parameters.iter().map(|(_, p)| p.data_ptr()).collect();
    let placed = |host: &Host| -> Vec<bool> {
        let now = host.parameters.iter().map(|(_, p)| p.data_ptr());
        now.zip(&own).map(|(now, own)| now != *own).collect()
    };
    set_adapter(&mut host, &["a", "b"]).unwrap();
    assert_eq!(placed(&host), [true, true]);
    assert_eq!(active_adapters(&mut host).unwrap(), ["a", "b"]);
    // Twice, as callers may: the copies come back all the same.
    disable_adapters(&mut host).unwrap();
    disable_adapters(&mut host).unwrap();
    assert_eq!(placed(&host), [false, false]);
    enable_adapters(&mut host).unwrap();
    assert_eq!(placed(&host), [true, true]);
    set_adapter(&mut host, &["b"]).unwrap();
    assert_eq!(placed(&host), [false, true]);
    set_adapter(&mut host, &["b", "a"]).unwrap();
    delete_adapter(&mut host, "a").unwrap();
    assert_eq!(placed(&host), [false, true]);
    disable_adapters(&mut host).unwrap();
    delete_adapter(&mut host, "b").unwrap();
    enable_adapters(&mut host).unwrap();
    assert_eq!(placed(&host), [false, false]);
    assert!(active_adapters(&mut host).unwrap().is_empty());
}

#[test]
fn quantized_weights_take_adapters() {
    let weight = numbers(&[32, 64], 1.0, F32);
    let packed = QuantizedWeight::quantize(&weight, "int8-weight".parse().unwrap()).unwrap();
    let dense = packed.dequantize(Kind::Float).unwrap();
    let config = LoraConfig {
        init_lora_weights: InitLoraWeights::Random,
        ..LoraConfig::default()
    };
    let hosts = [
        Linear::quantized(packed, None).unwrap(),
        Linear::dense(dense, None).unwrap(),
    ]
    .map(|layer| Host::adapted(layer, &config));
    let x = numbers(&[7, 64], 2.0, F32);
    let [y, expected] = hosts.map(|host| host.layers[0].1.forward(&x).unwrap());
    // Sums of fp32 products in another order.
    assert!(distance(&y, &expected) < 1e-5);
}

trait DenseCopy {
    fn dense_copy(&self) -> Tensor;
}

impl DenseCopy for Linear {
    fn dense_copy(&self) -> Tensor {
        self.weight().to_dense(Kind::Float).unwrap().copy()
    }
}
