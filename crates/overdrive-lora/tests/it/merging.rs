//! Merging adapters into weights, and unmerging them.

use crate::common::{F32, Host, distance, numbers};
use overdrive_lora::{
    AddOptions, Error, InitLoraWeights, LoraConfig, MergeOptions, TargetModules, active_adapters,
    adapter_names, add_adapter, delete_adapter, disable_adapters, lora_adapter, merge_adapters,
    merge_and_unload, merge_obstacle, set_adapter, set_adapter_scale, unload, unmerge_adapters,
};
use overdrive_nn::{Linear, LinearWeight};
use overdrive_quantization::{Activations, QuantizedWeight};
use proptest::prelude::*;
use tch::{Device, Kind, Tensor};

fn config(use_dora: bool) -> LoraConfig {
    LoraConfig {
        r: 4,
        use_dora,
        target_modules: Some(TargetModules::AllLinear),
        ..LoraConfig::default()
    }
}

fn adapted(configs: &[LoraConfig]) -> Host {
    let mut host = Host::new(&["q", "v"], 12, 16);
    let names = ["a", "b"];
    for (name, config) in names.iter().zip(configs) {
        add_adapter(&mut host, name, config, &AddOptions::default()).unwrap();
        host.randomise(name);
    }
    set_adapter(&mut host, &names[..configs.len()]).unwrap();
    host
}

fn weight(host: &Host) -> Tensor {
    host.layers[0]
        .1
        .weight()
        .to_dense(Kind::Float)
        .unwrap()
        .copy()
}

fn forward(host: &Host) -> Tensor {
    tch::no_grad(|| {
        host.layers[0]
            .1
            .forward(&numbers(&[7, 16], 2.0, F32))
            .unwrap()
    })
}

#[test]
fn merged_layers_compute_the_same_and_unmerged_ones_are_what_they_were() {
    for configs in [
        vec![config(false)],
        vec![config(true)],
        vec![config(false), config(false)],
        vec![config(false), config(true)],
        vec![config(true), config(true)],
    ] {
        for keep_original in [false, true] {
            let mut host = adapted(&configs);
            let (before, y) = (weight(&host), forward(&host));
            let options = MergeOptions {
                keep_original,
                safe: keep_original,
            };
            let report = merge_adapters(&mut host, None, &options).unwrap();
            assert_eq!(report.layers.len(), 2);
            assert_eq!(report.layers[0].adapters.len(), configs.len());
            assert!(report.layers[0].requantized.is_none());
            // A second merge of the same adapter changes nothing.
            assert!(
                merge_adapters(&mut host, None, &options)
                    .unwrap()
                    .layers
                    .is_empty()
            );
            assert!(distance(&forward(&host), &y) < 1e-5);
            assert!(distance(&weight(&host), &before) > 0.01);
            unmerge_adapters(&mut host).unwrap();
            if keep_original {
                assert_eq!(weight(&host), before);
            } else {
                // One addition and one subtraction; DoRA divides, too.
                assert!(distance(&weight(&host), &before) < 1e-6);
            }
            assert!(distance(&forward(&host), &y) < 1e-5);
        }
    }
}

#[test]
fn weights_of_16_bits_are_merged_in_fp32_and_rounded_once() {
    let bf16 = (Kind::BFloat16, Device::Cpu);
    let mut host = adapted(&[config(false)]);
    host.layers[0]
        .1
        .replace_weight(overdrive_nn::LinearWeight::Dense {
            weight: numbers(&[12, 16], 1.0, bf16),
            transposed: false,
        })
        .unwrap();
    let before = weight(&host);
    let (a, b, scale) = {
        let adapter = lora_adapter(&host.layers[0].1, "a").unwrap();
        (adapter.a().detach(), adapter.b().detach(), adapter.scale())
    };
    let expected = (&before + b.matmul(&a) * scale)
        .to_kind(Kind::BFloat16)
        .to_kind(Kind::Float);
    merge_adapters(
        &mut host,
        None,
        &MergeOptions {
            keep_original: true,
            safe: false,
        },
    )
    .unwrap();
    // Products of rank 4 may round to the other side.
    assert!(distance(&weight(&host), &expected) < 1.0 / 128.0);
    unmerge_adapters(&mut host).unwrap();
    assert_eq!(weight(&host), before);
}

#[test]
fn quantized_weights_are_requantized_and_the_error_is_reported() {
    for (use_dora, scheme) in [
        (false, "int8-weight"),
        (true, "int8-weight"),
        (false, "nf4"),
    ] {
        let mut host = adapted(&[config(use_dora)]);
        let dense = numbers(&[12, 64], 1.0, F32);
        let packed = QuantizedWeight::quantize(&dense, scheme.parse().unwrap()).unwrap();
        let layer = Linear::quantized(packed, None).unwrap();
        host.layers = vec![("q".to_owned(), layer)];
        add_adapter(&mut host, "a", &config(use_dora), &AddOptions::default()).unwrap();
        host.randomise("a");
        let x = numbers(&[7, 64], 2.0, F32);
        let y = |host: &Host| tch::no_grad(|| host.layers[0].1.forward(&x).unwrap());
        let (before, with) = (weight(&host), y(&host));
        let report = merge_adapters(&mut host, None, &MergeOptions::default()).unwrap();
        let error = report.layers[0].requantized.unwrap();
        // Half a step of 8 and of 4 bits, relative to rows of uniform values.
        let bound = if scheme == "nf4" { 0.15 } else { 0.01 };
        assert!(error.error > 0.0 && error.error < bound, "{error:?}");
        assert!(error.error_of_change > error.error, "{error:?}");
        assert_eq!(report.worst_error(), error.error);
        assert!(distance(&y(&host), &with) < 3.0 * bound);
        unmerge_adapters(&mut host).unwrap();
        assert_eq!(weight(&host), before);
        assert_eq!(y(&host), with);
    }
}

#[test]
fn a_merged_adapter_is_part_of_the_weight_that_replaces_the_merged_one() {
    let mut host = adapted(&[config(false), config(true)]);
    set_adapter(&mut host, &["a"]).unwrap();
    merge_adapters(&mut host, None, &MergeOptions::default()).unwrap();
    let merged = forward(&host);
    for (_, layer) in &mut host.layers {
        let weight = layer.weight().shallow_clone();
        layer.replace_weight(weight).unwrap();
    }
    assert!(active_adapters(&mut host).unwrap().is_empty());
    assert_eq!(forward(&host), merged);
    // Nothing is merged any more, and the other adapter is computed as before.
    set_adapter(&mut host, &["b"]).unwrap();
    assert!(distance(&forward(&host), &merged) > 0.01);

    // Quantized, the error is that of the weight in 8 bits, not the adapter once more.
    let mut host = adapted(&[config(false)]);
    let (plain, with) = (weight(&host), forward(&host));
    merge_adapters(&mut host, None, &MergeOptions::default()).unwrap();
    assert!(distance(&weight(&host), &plain) > 0.05);
    let scheme = "int8-weight".parse().unwrap();
    let packed = QuantizedWeight::quantize(&weight(&host), scheme).unwrap();
    host.layers[0]
        .1
        .replace_weight(LinearWeight::Quantized(packed))
        .unwrap();
    assert!(distance(&forward(&host), &with) < 0.03);
}

#[test]
fn quantized_weights_keep_their_choice_of_activations() {
    let olora = LoraConfig {
        init_lora_weights: InitLoraWeights::Olora,
        ..config(false)
    };
    let dense = numbers(&[12, 64], 1.0, F32);
    let packed = QuantizedWeight::quantize(&dense, "int8".parse().unwrap()).unwrap();
    let packed = packed.with_activations(Activations::Float).unwrap();
    let layer = Linear::quantized(packed, None).unwrap();
    let mut host = Host {
        layers: vec![("q".to_owned(), layer)],
        ..Host::default()
    };
    let activations = |host: &Host| match host.layers[0].1.weight() {
        LinearWeight::Quantized(weight) => weight.activations(),
        LinearWeight::Dense { .. } => panic!("a quantized weight"),
    };
    // OLoRA quantizes the weight without the adapter, merging the weight with it.
    add_adapter(&mut host, "a", &olora, &AddOptions::default()).unwrap();
    assert_eq!(activations(&host), Activations::Float);
    merge_adapters(&mut host, None, &MergeOptions::default()).unwrap();
    assert_eq!(activations(&host), Activations::Float);
}

#[test]
fn biases_of_b_are_merged_into_the_layers_bias_or_refused_where_there_is_none() {
    let config = LoraConfig {
        lora_bias: true,
        ..config(false)
    };
    let mut host = adapted(std::slice::from_ref(&config));
    let y = forward(&host);
    merge_adapters(&mut host, None, &MergeOptions::default()).unwrap();
    assert!(distance(&forward(&host), &y) < 1e-5);
    unmerge_adapters(&mut host).unwrap();
    assert!(distance(&forward(&host), &y) < 1e-5);

    let layer = Linear::dense(numbers(&[12, 16], 1.0, F32), None).unwrap();
    let mut host = Host {
        layers: vec![("q".to_owned(), layer)],
        ..Host::default()
    };
    add_adapter(&mut host, "a", &config, &AddOptions::default()).unwrap();
    let error = merge_adapters(&mut host, None, &MergeOptions::default()).unwrap_err();
    assert!(
        error
            .to_string()
            .contains("since the layer has no bias to merge into"),
        "{error}"
    );
}

#[test]
fn adapters_that_cannot_be_merged_are_named_and_leave_the_model_as_it_is() {
    let biased = LoraConfig {
        lora_bias: true,
        ..config(false)
    };
    // The second layer has no bias; the first must not have been merged by then.
    let mut host = Host::new(&["q", "v"], 12, 16);
    host.layers[1].1 = Linear::dense(numbers(&[12, 16], 1.0, F32), None).unwrap();
    add_adapter(&mut host, "a", &biased, &AddOptions::default()).unwrap();
    host.randomise("a");
    let (before, y) = (weight(&host), forward(&host));
    let obstacle = merge_obstacle(&mut host).unwrap().unwrap().to_string();
    assert!(
        obstacle.starts_with("`lora_bias` is true for the adapter `a` of `v`"),
        "{obstacle}"
    );
    let error = merge_and_unload(&mut host, &MergeOptions::default()).unwrap_err();
    assert_eq!(error.to_string(), obstacle);
    assert_eq!(weight(&host), before);
    assert_eq!(forward(&host), y);

    // The weight of `v` is the embedding's, too.
    let mut host = adapted(&[config(false)]);
    let LinearWeight::Dense { weight, .. } = host.layers[1].1.weight() else {
        panic!("a dense weight");
    };
    let shared = weight.shallow_clone();
    host.parameters
        .push(("embedding.weight".to_owned(), shared));
    let error = merge_and_unload(&mut host, &MergeOptions::default()).unwrap_err();
    assert!(
        matches!(&error, Error::TiedAdapter { name, other } if name == "v.weight" && other == "embedding.weight"),
        "{error}"
    );
    host.parameters.clear();
    assert!(merge_obstacle(&mut host).unwrap().is_none());
}

#[test]
fn a_safe_merge_of_non_finite_elements_changes_nothing() {
    let mut host = adapted(&[config(false)]);
    let before = weight(&host);
    tch::no_grad(|| {
        let b = lora_adapter(&host.layers[1].1, "a").unwrap().b();
        let _ = b.narrow(0, 0, 1).fill_(f64::NAN);
    });
    let options = MergeOptions {
        safe: true,
        keep_original: true,
    };
    let error = merge_adapters(&mut host, None, &options).unwrap_err();
    assert!(
        matches!(&error, Error::NotFinite { layer, adapter } if layer == "v" && adapter == "a"),
        "{error}"
    );
    assert_eq!(weight(&host), before);
    // It would be refused if an adapter were merged.
    disable_adapters(&mut host).unwrap();
}

#[test]
fn operations_that_need_unmerged_weights_are_refused() {
    let mut host = adapted(&[config(false)]);
    merge_adapters(&mut host, None, &MergeOptions::default()).unwrap();
    let error = disable_adapters(&mut host).unwrap_err();
    assert_eq!(
        error.to_string(),
        "disabling adapters is not possible while adapters are merged into the weights (a); unmerge them first"
    );
    assert!(set_adapter(&mut host, &[]).is_err());
    assert!(add_adapter(&mut host, "c", &config(false), &AddOptions::default()).is_err());
    assert!(delete_adapter(&mut host, "a").is_err());
    assert!(set_adapter_scale(&mut host, "a", 0.0).is_err());
}

#[test]
fn unloading_gives_the_model_back_with_or_without_its_adapters() {
    let mut host = adapted(&[config(false)]);
    let (before, y) = (weight(&host), forward(&host));
    unload(&mut host).unwrap();
    assert_eq!(weight(&host), before);
    assert!(adapter_names(&mut host).unwrap().is_empty());
    let mut host = adapted(&[config(false)]);
    merge_and_unload(&mut host, &MergeOptions::default()).unwrap();
    assert!(distance(&forward(&host), &y) < 1e-5);
    assert!(adapter_names(&mut host).unwrap().is_empty());
    // A plain model takes a new adapter.
    add_adapter(&mut host, "a", &config(false), &AddOptions::default()).unwrap();
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    /// For any shape, rank and scale.
    #[test]
    fn merging_is_exact_to_rounding(
        outputs in 1i64..40, inputs in 1i64..40, r in 1i64..6, alpha in 0.1f64..32.0, dora: bool,
    ) {
        let mut host = Host::new(&["q"], outputs, inputs);
        let config = LoraConfig { r, lora_alpha: alpha, ..config(dora) };
        add_adapter(&mut host, "a", &config, &AddOptions::default()).unwrap();
        host.randomise("a");
        let x = numbers(&[3, inputs], 2.0, F32);
        let y = |host: &Host| tch::no_grad(|| host.layers[0].1.forward(&x).unwrap());
        let before = y(&host);
        merge_adapters(&mut host, None, &MergeOptions::default()).unwrap();
        prop_assert!(distance(&y(&host), &before) < 1e-4);
        unmerge_adapters(&mut host).unwrap();
        prop_assert!(distance(&y(&host), &before) < 1e-4);
    }
}
