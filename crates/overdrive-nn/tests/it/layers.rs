//! Linear layers and embeddings, dense and quantized.

use overdrive_nn::{Embedding, Linear, LinearWeight, joint_forward};
use overdrive_quantization::{InputObserver, QuantizedWeight, Scheme, observe_inputs};
use overdrive_sys::autocast;
use tch::nn::Module;
use tch::{Device, Kind, Tensor};

/// Elements in [-1, 1) that do not depend on libtorch's generator.
fn numbers(salt: i64, shape: &[i64]) -> Tensor {
    let count: i64 = shape.iter().product();
    let wild =
        ((Tensor::arange(count, (Kind::Double, Device::Cpu)) * 12.9898 + salt).sin()) * 43758.5453;
    ((&wild - wild.floor()) * 2.0 - 1.0)
        .reshape(shape)
        .to_kind(Kind::Float)
}

/// The largest difference by the largest expected magnitude.
fn error(found: &Tensor, expected: &Tensor) -> f64 {
    let most = expected.abs().max().double_value(&[]);
    (found - expected).abs().max().double_value(&[]) / most
}

#[test]
fn layers_take_the_place_of_those_of_tch() {
    let store = tch::nn::VarStore::new(Device::Cpu);
    let dense = tch::nn::linear(store.root(), 128, 64, tch::nn::LinearConfig::default());
    let layer = Linear::from_dense(&dense, Scheme::Int8WeightOnly).unwrap();
    let x = numbers(28, &[3, 128]);
    assert!(error(&Module::forward(&layer, &x), &dense.forward(&x)) < 2e-2);
    assert_eq!(layer.parameters(), 128 * 64 + 64);
    assert_eq!(layer.bytes(), 128 * 64 + 64 * 4 + 64 * 4);
    assert_eq!(layer.weight().size(), [64, 128]);
    assert!(layer.bias().is_some());

    let table = tch::nn::embedding(store.root(), 30, 64, tch::nn::EmbeddingConfig::default());
    let embedding = Embedding::from_dense(&table, Scheme::Int8WeightOnly).unwrap();
    let ids = Tensor::from_slice(&[0_i64, 29, 7, 7]).view([2, 2]);
    let vectors = Module::forward(&embedding, &ids);
    assert_eq!(vectors.size(), [2, 2, 64]);
    assert!(error(&vectors, &table.forward(&ids)) < 1e-2);
    assert!(embedding.forward(&Tensor::from_slice(&[30_i64])).is_err());
    // A tied head reads the same memory.
    let head = Linear::new(embedding.as_linear_weight(), None).unwrap();
    assert_eq!(
        (head.parameters(), embedding.parameters()),
        (30 * 64, 30 * 64)
    );
    assert_eq!(head.forward(&vectors).unwrap().size(), [2, 2, 30]);
}

#[test]
fn shapes_that_do_not_fit_are_named() {
    let weight =
        || QuantizedWeight::quantize(&numbers(25, &[9, 128]), Scheme::Int8Dynamic).unwrap();
    let found = Linear::quantized(weight(), Some(numbers(27, &[8]))).unwrap_err();
    assert_eq!(
        found.to_string(),
        "`bias` has shape [8]; it must be (9,), the outputs of the weight"
    );
    let found = Linear::dense(numbers(1, &[2, 3, 4]), None).unwrap_err();
    assert_eq!(
        found.to_string(),
        "`weight` has shape [2, 3, 4]; it must be (O, I)"
    );
    let mut layer = Linear::quantized(weight(), None).unwrap();
    let other = || LinearWeight::Dense {
        weight: numbers(2, &[128, 9]),
        transposed: false,
    };
    for found in [
        layer.replace_weight(other()).map(drop),
        layer.move_weight(other()),
    ] {
        assert_eq!(
            found.unwrap_err().to_string(),
            "`weight` has shape [128, 9]; it must be (9, 128), as the weight that it replaces"
        );
    }
    assert!(
        layer
            .replace_weight(LinearWeight::Dense {
                weight: numbers(2, &[128, 9]),
                transposed: true
            })
            .is_ok()
    );
    let found = Embedding::dense(numbers(1, &[4])).unwrap_err();
    assert_eq!(
        found.to_string(),
        "`table` has shape [4]; it must be (V, D)"
    );
    let found = Embedding::quantized(weight(), Kind::Int64).unwrap_err();
    assert_eq!(
        found.to_string(),
        "`kind` is Int64; it must be Float, Double, Half or BFloat16"
    );
}

#[test]
fn a_joint_forward_pass_equals_the_layers_one_by_one() {
    let x = numbers(1, &[2, 5, 64]);
    let dense = |outputs: i64, bias: bool| {
        let bias = bias.then(|| numbers(outputs, &[outputs]));
        Linear::dense(numbers(2 + outputs, &[outputs, 64]), bias).unwrap()
    };
    let quantized = |outputs: i64| {
        Linear::quantize(&numbers(outputs, &[outputs, 64]), None, Scheme::Int8Dynamic).unwrap()
    };
    let conv1d = Linear::new(
        LinearWeight::Dense {
            weight: numbers(9, &[64, 8]),
            transposed: true,
        },
        None,
    );
    for layers in [
        vec![dense(8, false), dense(4, false)],
        vec![dense(8, true), dense(4, true)],
        vec![dense(8, true), dense(4, false)],
        vec![quantized(8), quantized(16)],
        vec![quantized(8), dense(4, false)],
        vec![conv1d.unwrap(), dense(4, false)],
    ] {
        let layers: Vec<&Linear> = layers.iter().collect();
        let joint = joint_forward(&x, &layers).unwrap();
        let each: Vec<Tensor> = layers
            .iter()
            .map(|layer| layer.forward(&x).unwrap())
            .collect();
        assert!(error(&joint, &Tensor::cat(&each, -1)) < 1e-6);
    }
}

#[test]
fn the_weight_of_a_plain_layer_is_lent_as_it_is() {
    let weight = numbers(3, &[8, 4]);
    let layer = Linear::dense(weight.shallow_clone(), None).unwrap();
    assert_eq!(layer.dense_weight().unwrap().data_ptr(), weight.data_ptr());
    assert_eq!(
        layer.weight().to_dense(Kind::Float).unwrap().data_ptr(),
        weight.data_ptr()
    );
    let biased = Linear::dense(weight.shallow_clone(), Some(numbers(4, &[8]))).unwrap();
    assert!(biased.dense_weight().is_none());
    let transposed = LinearWeight::Dense {
        weight,
        transposed: true,
    };
    assert_eq!(transposed.size(), [4, 8]);
    assert!(
        Linear::new(transposed, None)
            .unwrap()
            .dense_weight()
            .is_none()
    );
}

/// Records the names that are reported.
struct Names(Vec<String>);

impl InputObserver for Names {
    fn observe(&mut self, name: &str, _: &Tensor) -> overdrive_quantization::Result<()> {
        self.0.push(name.to_owned());
        Ok(())
    }
}

#[test]
fn a_named_layer_reports_each_input_once() {
    let layer = |name: &str| {
        let layer = Linear::dense(numbers(3, &[8, 4]), None).unwrap();
        layer.with_name(name)
    };
    let (query, key, unnamed) = (layer("q"), layer("k"), layer(""));
    let x = numbers(5, &[3, 4]);
    let (names, passed) = observe_inputs(Names(Vec::new()), || {
        let _y = query.forward(&x)?;
        let _y = unnamed.forward(&x)?;
        joint_forward(&x, &[&query, &key])
    });
    assert_eq!(passed.unwrap().size(), [3, 16]);
    assert_eq!(names.0, ["q", "q", "k"]);
}

#[test]
fn a_layer_without_fp8_stays_without_it_in_a_joint_pass() {
    let layer = |salt| Linear::dense(numbers(salt, &[32, 64]), None).unwrap();
    let x = numbers(5, &[16, 64]);
    let fp8 = autocast::State {
        enabled: true,
        dtype: Kind::BFloat16,
        fp8: true,
    };
    let _region = autocast::Region::enter(Device::Cpu, fp8, false).unwrap();
    let (gate, up) = (layer(3).without_fp8(), layer(4));
    let joint = joint_forward(&x, &[&gate, &up]).unwrap();
    let alone = gate.forward(&x).unwrap();
    let in_fp8 = layer(3).forward(&x).unwrap();
    assert!(error(&in_fp8, &alone) > 1e-3);
    assert!(error(&joint.narrow(-1, 0, 32), &alone) < 1e-6);
}
