//! A mixture against the sum over its experts, one token and one expert at a time.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

use overdrive_core::random::Generator;
use tch::{Device, Kind, Tensor};

use super::dispatch::Dispatch;
use super::names::{ExpertModules, expert_modules, router_module};
use super::router::Router;
use super::{LoadBalance, MixtureOfExperts, Routing, grouped};
use crate::config::{ExpertsConfig, LlamaConfig, LlamaFamily};
use crate::parameters::{ModelTensors, ParameterMap};

const HIDDEN: i64 = 16;
const INNER: i64 = 24;

/// Returns normal numbers that depend on `seed` alone: libtorch's generator is shared by all tests.
fn normal(seed: u64, rows: i64, columns: i64) -> Tensor {
    let mut generator = Generator::new(seed, 0);
    let numbers: Vec<f32> = (0..rows * columns)
        .map(|_| generator.normal() as f32)
        .collect();
    Tensor::from_slice(&numbers).view([rows, columns])
}

/// Returns a layer of `count` experts of which a token has `per_token`, and its parameters.
fn layer(count: i64, per_token: i64, kind: Kind) -> (MixtureOfExperts, Vec<(String, Tensor)>) {
    let config = LlamaConfig {
        hidden_size: HIDDEN,
        intermediate_size: INNER,
        ..LlamaConfig::of(LlamaFamily::Mixtral)
    };
    let experts = ExpertsConfig {
        num_experts: count,
        num_experts_per_tok: per_token,
        ..config.experts.clone().unwrap()
    };
    let random = |seed, rows, columns| (normal(seed, rows, columns) * 0.3).to_kind(kind);
    // Adjacent, as a model allocates them.
    let inner = random(1, 2 * count * INNER, HIDDEN);
    let outer = random(2, count * HIDDEN, INNER);
    let router = router_module(LlamaFamily::Mixtral, "p");
    let mut parameters = vec![(format!("{router}.weight"), random(3, count, HIDDEN))];
    for expert in 0..count {
        let ExpertModules { joint, down } = expert_modules(LlamaFamily::Mixtral, "p", expert);
        for (name, half) in joint.iter().zip(2 * expert..) {
            let weight = inner.narrow(0, half * INNER, INNER);
            parameters.push((format!("{name}.weight"), weight));
        }
        let weight = outer.narrow(0, expert * HIDDEN, HIDDEN);
        parameters.push((format!("{down}.weight"), weight));
    }
    for (_, parameter) in &parameters {
        let _same = parameter.set_requires_grad(true);
    }
    let share = |(name, tensor): &(String, Tensor)| (name.clone(), tensor.shallow_clone());
    let tensors = ModelTensors {
        parameters: parameters.iter().map(share).collect(),
        ..ModelTensors::default()
    };
    let mut map = ParameterMap::new(tensors);
    let layer = MixtureOfExperts::take(&mut map, "p", &config, &experts).unwrap();
    (layer, parameters)
}

/// Returns the sum over the chosen experts of each token by a loop.
fn naive(layer: &MixtureOfExperts, x: &Tensor, routing: &Routing) -> Tensor {
    let rows = (0..x.size()[0]).map(|token| {
        let row = x.narrow(0, token, 1);
        let chosen = Vec::<i64>::try_from(&routing.experts.get(token)).unwrap();
        let outputs = chosen.iter().enumerate().map(|(k, &expert)| {
            let y = layer.experts[expert as usize].forward(&row, false).unwrap();
            y * routing.weights.get(token).get(k as i64)
        });
        outputs.reduce(|a, b| a + b).unwrap()
    });
    Tensor::cat(&rows.collect::<Vec<_>>(), 0)
}

/// Returns the choices of `tokens` tokens: random ones, all the same, or those of a few experts only.
fn routing(case: u64, tokens: i64, count: i64, per_token: i64) -> Routing {
    let mut random = Generator::new(case, 1);
    let mut experts = Vec::new();
    for _ in 0..tokens {
        let usable = match case % 3 {
            // All tokens to the same experts, the others without any.
            0 => per_token,
            1 => (per_token + 1).min(count),
            _ => count,
        };
        let mut all: Vec<i64> = (0..usable).collect();
        for index in (1..all.len()).rev() {
            all.swap(index, random.below(index as u64 + 1) as usize);
        }
        experts.extend(
            all.into_iter()
                .take(per_token as usize)
                .map(|e| count - 1 - e),
        );
    }
    let experts = Tensor::from_slice(&experts).view([tokens, per_token]);
    let weights = normal(case, tokens, per_token).sigmoid();
    let probabilities = normal(case, tokens, count).softmax(-1, Kind::Float);
    Routing {
        experts,
        weights: weights.set_requires_grad(true),
        probabilities,
    }
}

fn difference(a: &Tensor, b: &Tensor) -> f64 {
    let scale = b.abs().max().double_value(&[]).max(1e-30);
    (a - b).abs().max().double_value(&[]) / scale
}

#[test]
fn sorted_by_expert_equals_the_sum_over_experts_for_random_routings() {
    // The two add the same fp32 products in another order.
    const TOLERANCE: f64 = 1e-5;
    for case in 0..24u64 {
        let (count, per_token) = [(1, 1), (4, 2), (9, 3), (6, 6)][case as usize % 4];
        let tokens = [1, 2, 7, 40][case as usize / 4 % 4];
        let (layer, parameters) = layer(count, per_token, Kind::Float);
        let routing = routing(case, tokens, count, per_token);
        let x = normal(case + 100, tokens, HIDDEN).set_requires_grad(true);
        let upstream = normal(case + 200, tokens, HIDDEN);
        let leaves = || {
            let mut all = vec![x.shallow_clone(), routing.weights.shallow_clone()];
            all.extend(parameters[1..].iter().map(|(_, p)| p.shallow_clone()));
            all
        };
        let gradients = |y: &Tensor| {
            (y * &upstream).sum(Kind::Float).backward();
            let mut all = Vec::new();
            for mut leaf in leaves() {
                let gradient = leaf.grad();
                all.push(match gradient.defined() {
                    true => gradient.copy(),
                    false => leaf.zeros_like(),
                });
                leaf.zero_grad();
            }
            all
        };
        let expected = naive(&layer, &x, &routing);
        let expected_gradients = gradients(&expected);
        for fused in [true, false] {
            let y = layer.compute(&x, &routing, fused).unwrap();
            let worst = difference(&y, &expected);
            assert!(worst < TOLERANCE, "case {case}, fused {fused}: {worst:.1e}");
            let found = gradients(&y);
            for (index, (found, expected)) in found.iter().zip(&expected_gradients).enumerate() {
                let worst = difference(found, expected);
                assert!(worst < TOLERANCE, "case {case}, leaf {index}: {worst:.1e}");
            }
            // The same again, bit for bit.
            let again = layer.compute(&x, &routing, fused).unwrap();
            assert_eq!(again, y, "case {case}");
            assert_eq!(gradients(&again), found, "case {case}");
            // Every expert has a gradient, those without tokens, too.
            assert!(parameters[1..].iter().all(|(_, p)| p.grad().defined()));
        }
    }
}

#[test]
fn grouped_matmuls_equal_one_matmul_for_each_expert() {
    for (case, kind, tolerance) in [
        (2, Kind::Float, 1e-5),
        (3, Kind::Float, 1e-5),
        // bf16 has 8 bits, and three results of it follow one another.
        (5, Kind::BFloat16, 0.02),
    ] {
        let (layer, parameters) = layer(6, 2, kind);
        let routing = routing(case, 30, 6, 2);
        let dispatch = Dispatch::new(&routing, 6).unwrap();
        let x = normal(case, 60, HIDDEN).to_kind(kind);
        let x = x.set_requires_grad(true);
        let gradients = |y: &Tensor| {
            (y * y).sum(Kind::Float).backward();
            let leaves = std::iter::once(&x).chain(parameters[1..].iter().map(|(_, p)| p));
            let mut all = Vec::new();
            for leaf in leaves {
                let mut leaf = leaf.shallow_clone();
                all.push(leaf.grad().to_kind(Kind::Float));
                leaf.zero_grad();
            }
            all
        };
        assert_eq!(dispatch.counts().unwrap().iter().sum::<i64>(), 60);
        let expected = layer.one_by_one(&x, &dispatch, true).unwrap();
        let expected_gradients = gradients(&expected);
        let found = grouped::feed_forward(&layer.experts, &x, &dispatch.ends).unwrap();
        let found = found.expect("dense, adjacent and aligned weights");
        let worst = difference(&found.to_kind(Kind::Float), &expected.to_kind(Kind::Float));
        assert!(worst < tolerance, "{kind:?}: {worst:.1e}");
        for (found, expected) in gradients(&found).iter().zip(&expected_gradients) {
            let worst = difference(found, expected);
            assert!(worst < tolerance, "{kind:?}: {worst:.1e}");
        }
    }
}

#[test]
fn rows_in_slices_equal_tensors_and_read_the_chosen_experts_alone() {
    let _no_grad = tch::no_grad_guard();
    let (layer, parameters) = layer(5, 2, Kind::Float);
    for tokens in [1, 3, 16] {
        let x = normal(4, tokens, HIDDEN);
        let balance = LoadBalance::default();
        let (expected, _) = layer.forward(&x, true, &balance).unwrap();
        let rows = Vec::<f32>::try_from(x.view([-1])).unwrap();
        let mut y = vec![f32::NAN; rows.len()];
        layer
            .forward_rows(&rows, &mut Vec::new(), &mut Vec::new(), &mut y)
            .unwrap();
        let y = Tensor::from_slice(&y).view([tokens, HIDDEN]);
        assert!(difference(&y, &expected) < 1e-5, "{tokens}");
    }
    // One token: the weights of all other experts may be anything.
    let x = normal(5, 1, HIDDEN);
    let (expected, _) = layer.forward(&x, true, &LoadBalance::default()).unwrap();
    let routing = layer.router.route(&x, true).unwrap();
    let chosen = Vec::<i64>::try_from(routing.experts.view([-1])).unwrap();
    for (index, (_, parameter)) in (0..).zip(&parameters[1..]) {
        if !chosen.contains(&(index / 3)) {
            let _same = parameter.shallow_clone().fill_(f64::NAN);
        }
    }
    let rows = Vec::<f32>::try_from(x.view([-1])).unwrap();
    let mut y = vec![0.0; rows.len()];
    layer
        .forward_rows(&rows, &mut Vec::new(), &mut Vec::new(), &mut y)
        .unwrap();
    let y = Tensor::from_slice(&y).view([1, HIDDEN]);
    assert!(difference(&y, &expected) < 1e-5);
    let (again, _) = layer.forward(&x, true, &LoadBalance::default()).unwrap();
    assert_eq!(again, expected);
}

#[test]
fn scores_of_deepseeks_experts_are_not_rounded_to_16_bits() {
    let family = LlamaFamily::DeepseekV2;
    let config = LlamaConfig::of(family);
    let experts = ExpertsConfig {
        num_experts: 2,
        num_experts_per_tok: 1,
        ..config.experts.clone().unwrap()
    };
    // The scores are 1 and 1 + 2^-10, of which bf16 makes 1.
    let weight = Tensor::from_slice(&[1f32, 0.0, 1.0, 1.0 / 1024.0]).view([2, 2]);
    let name = format!("{}.weight", router_module(family, "p"));
    let mut map = ParameterMap::new(ModelTensors {
        parameters: vec![(name, weight.to_kind(Kind::BFloat16))],
        ..ModelTensors::default()
    });
    let router = Router::take(&mut map, "p", &config, &experts).unwrap();
    let x = Tensor::ones([1, 2], (Kind::BFloat16, Device::Cpu));
    let routing = router.route(&x, true).unwrap();
    assert_eq!(routing.experts.int64_value(&[0, 0]), 1);
    assert!(routing.probabilities.double_value(&[0, 1]) > 0.5);
}
