//! Tests of batches whose rows choose their adapters.

use std::sync::Arc;

use overdrive_lora::{
    AddOptions, BiasMode, InitLoraWeights, LoraAdapter, LoraConfig, TargetModules, active_adapters,
    add_adapter, disable_adapters, enable_adapters, load_adapter_for_rows, lora_adapter,
    save_adapter, set_adapter, set_training,
};
use overdrive_nn::{AdapterRows, Linear, LinearWeight, RowChoice, joint_forward};
use overdrive_quantization::QuantizedWeight;
use tch::{Device, Kind, Tensor};

use crate::common::{F32, Host, distance, numbers};

fn config(dora: bool) -> LoraConfig {
    LoraConfig {
        r: 4,
        use_dora: dora,
        init_lora_weights: InitLoraWeights::Random,
        target_modules: Some(TargetModules::AllLinear),
        ..LoraConfig::default()
    }
}

/// Returns a host of three layers with the adapters `a`, `b` (on the first layer only) and, if wanted, `dora`.
fn host(dora: bool) -> Host {
    let mut host = Host::new(&["layers.0.q", "layers.0.k", "layers.0.v"], 12, 16);
    let options = |seed| AddOptions {
        seed,
        ..AddOptions::default()
    };
    add_adapter(&mut host, "a", &config(false), &options(1)).unwrap();
    let first = LoraConfig {
        target_modules: Some(TargetModules::Names(vec!["q".to_owned()])),
        ..config(false)
    };
    add_adapter(&mut host, "b", &first, &options(2)).unwrap();
    if dora {
        add_adapter(&mut host, "dora", &config(true), &options(3)).unwrap();
    }
    set_adapter(&mut host, &[]).unwrap();
    host
}

fn rows(names: &[(usize, Option<&str>)]) -> AdapterRows {
    AdapterRows::new(
        names
            .iter()
            .map(|(count, name)| (*count, name.map(Arc::from))),
    )
}

/// Computes the rows one run after another, each with its adapter active in the host.
fn one_by_one(
    host: &mut Host,
    x: &Tensor,
    names: &[(usize, Option<&str>)],
    compute: impl Fn(&Host, &Tensor) -> Tensor,
) -> Tensor {
    let mut start = 0;
    let mut parts = Vec::new();
    for (count, name) in names {
        set_adapter(host, name.as_slice()).unwrap();
        parts.push(compute(host, &x.narrow(1, start, *count as i64)));
        start += *count as i64;
    }
    set_adapter(host, &[]).unwrap();
    Tensor::cat(&parts, 1)
}

#[test]
fn each_row_is_computed_with_its_adapter() {
    let _no_grad = tch::no_grad_guard();
    for (dora, quantized) in [(false, false), (true, false), (false, true)] {
        let mut host = host(dora);
        if quantized {
            for (_, linear) in &mut host.layers {
                let LinearWeight::Dense { weight, .. } = linear.weight() else {
                    panic!("{linear:?}");
                };
                let weight = QuantizedWeight::quantize(weight, "int8".parse().unwrap()).unwrap();
                linear
                    .replace_weight(LinearWeight::Quantized(weight))
                    .unwrap();
            }
        }
        let last = if dora { "dora" } else { "a" };
        let names = [
            (2, None),
            (3, Some("a")),
            (1, Some("b")),
            (2, Some(last)),
            (1, None),
        ];
        let x = numbers(&[1, 9, 16], 3.0, F32);
        let joint = |host: &Host, x: &Tensor| {
            let layers: Vec<&Linear> = host.layers.iter().map(|(_, linear)| linear).collect();
            joint_forward(x, &layers).unwrap()
        };
        let single = |host: &Host, x: &Tensor| host.layers[0].1.forward(x).unwrap();
        let wanted_joint = one_by_one(&mut host, &x, &names, joint);
        let wanted = one_by_one(&mut host, &x, &names, single);
        assert!(
            distance(&wanted, &single(&host, &x)) > 0.01,
            "no adapter changes anything"
        );
        let scope = rows(&names).scope();
        assert!(distance(&single(&host, &x), &wanted) < 1e-6);
        assert!(distance(&joint(&host, &x), &wanted_joint) < 1e-6);
        drop(scope);
        // Outside of the scope the model is as before.
        assert!(distance(&single(&host, &x), &wanted) > 0.01);
    }
}

#[test]
fn adapters_that_the_device_chooses_are_those_of_runs() {
    let _no_grad = tch::no_grad_guard();
    let mut host = host(false);
    let biased = LoraConfig {
        r: 3,
        lora_alpha: 7.0,
        lora_bias: true,
        ..config(false)
    };
    add_adapter(&mut host, "c", &biased, &AddOptions::default()).unwrap();
    for (_, linear) in &host.layers {
        let bias = lora_adapter(linear, "c").and_then(LoraAdapter::bias);
        let _same = bias.unwrap().shallow_clone().fill_(0.25);
    }
    let x = numbers(&[1, 9, 16], 3.0, F32);
    let joint = |host: &Host| {
        let layers: Vec<&Linear> = host.layers.iter().map(|(_, linear)| linear).collect();
        joint_forward(&x, &layers).unwrap()
    };
    let single = |host: &Host| host.layers[1].1.forward(&x).unwrap();
    // The tensor of a graph keeps its address, and its values change.
    let numbers = Tensor::zeros([9], (Kind::Int64, Device::Cpu));
    let names: Vec<Arc<str>> = ["a", "b", "c"].map(Arc::from).to_vec();
    let choice = RowChoice::new(names, &numbers).unwrap();
    for active in [&[][..], &["b"], &["a", "c"]] {
        set_adapter(&mut host, active).unwrap();
        for chosen in [[0, 0, 3, 1, 2, 2, 3, 1, 0], [3, 2, 1, 0, 3, 2, 1, 0, 2]] {
            let name = |index: &i64| match index {
                3 => (1, None),
                _ => (1, Some(["a", "b", "c"][*index as usize])),
            };
            let runs = rows(&chosen.iter().map(name).collect::<Vec<_>>()).scope();
            let wanted = (joint(&host), single(&host));
            drop(runs);
            numbers.shallow_clone().copy_(&Tensor::from_slice(&chosen));
            let _scope = AdapterRows::from(choice.clone()).scope();
            assert!(distance(&joint(&host), &wanted.0) < 1e-6);
            assert!(distance(&single(&host), &wanted.1) < 1e-6);
        }
    }
}

#[test]
fn the_device_cannot_choose_dora() {
    let host = host(true);
    let x = numbers(&[1, 1, 16], 3.0, F32);
    let choice = Tensor::from_slice(&[0i64]);
    let choice = RowChoice::new(vec!["dora".into()], &choice).unwrap();
    let _scope = AdapterRows::from(choice).scope();
    let error = host.layers[0].1.forward(&x).unwrap_err().to_string();
    assert!(
        error.contains("`dora`") && error.contains("DoRA"),
        "{error}"
    );
}

#[test]
fn rows_that_do_not_fit_are_refused() {
    let mut host = host(false);
    let x = numbers(&[1, 4, 16], 3.0, F32);
    let scope = rows(&[(3, Some("a"))]).scope();
    let error = host.layers[0].1.forward(&x).unwrap_err().to_string();
    assert!(error.contains("3 rows"), "{error}");
    drop(scope);
    // A layer without any of the adapters does not look at the rows.
    let scope = rows(&[(3, Some("b"))]).scope();
    let _plain = host.layers[1].1.forward(&x).unwrap();
    drop(scope);
    set_training(&mut host, true).unwrap();
    let _scope = rows(&[(4, Some("a"))]).scope();
    let error = host.layers[0].1.forward(&x).unwrap_err().to_string();
    assert!(error.contains("`training` is true"), "{error}");
}

#[test]
fn scopes_are_nested() {
    assert!(AdapterRows::current().is_none());
    let outer = rows(&[(1, Some("a"))]).scope();
    let inner = rows(&[(2, None)]).scope();
    assert_eq!(AdapterRows::current().unwrap().len(), 2);
    drop(inner);
    assert_eq!(
        AdapterRows::current().unwrap().names().collect::<Vec<_>>(),
        ["a"]
    );
    drop(outer);
    assert!(AdapterRows::current().is_none());
}

#[test]
fn an_adapter_for_rows_is_not_active_and_replaces_nothing_of_the_model() {
    let folder = tempfile::tempdir().unwrap();
    let mut source = host(false);
    save_adapter(&mut source, folder.path(), "a").unwrap();
    let mut plain = Host::new(&["layers.0.q", "layers.0.k", "layers.0.v"], 12, 16);
    let options = Default::default();
    load_adapter_for_rows(&mut plain, folder.path(), "mine", &options).unwrap();
    assert!(active_adapters(&mut plain).unwrap().is_empty());
    let biased = LoraConfig {
        bias: BiasMode::All,
        ..config(false)
    };
    let pissa = LoraConfig {
        init_lora_weights: InitLoraWeights::Pissa,
        ..config(false)
    };
    for (key, config) in [("bias", biased), ("init_lora_weights", pissa)] {
        let folder = tempfile::tempdir().unwrap();
        let mut source = Host::new(&["layers.0.q", "layers.0.k", "layers.0.v"], 12, 16);
        add_adapter(&mut source, "x", &config, &AddOptions::default()).unwrap();
        save_adapter(&mut source, folder.path(), "x").unwrap();
        let error = load_adapter_for_rows(&mut plain, folder.path(), "x", &options).unwrap_err();
        assert!(
            error.to_string().starts_with(&format!("`{key}` is")),
            "{error}"
        );
    }
}

#[test]
fn adapters_stay_disabled_while_another_is_loaded_for_rows() {
    let folder = tempfile::tempdir().unwrap();
    let mut source = host(false);
    save_adapter(&mut source, folder.path(), "a").unwrap();
    let x = numbers(&[1, 4, 16], 3.0, F32);
    let y = |host: &Host| tch::no_grad(|| host.layers[0].1.forward(&x).unwrap());
    let plain = y(&source);
    set_adapter(&mut source, &["b"]).unwrap();
    let with = y(&source);
    assert!(distance(&with, &plain) > 0.01);
    disable_adapters(&mut source).unwrap();
    load_adapter_for_rows(&mut source, folder.path(), "mine", &Default::default()).unwrap();
    assert_eq!(y(&source), plain);
    enable_adapters(&mut source).unwrap();
    assert_eq!(y(&source), with);
}
