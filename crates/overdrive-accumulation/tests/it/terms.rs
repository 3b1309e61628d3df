//! Losses that are means, and losses of several terms.

use overdrive_accumulation::{AccumulationConfig, Error, GradientAccumulator, Window};
use overdrive_optim::{ParamGroup, Sgd, SgdConfig};
use tch::{Kind, Tensor};

fn weight() -> Tensor {
    Tensor::from_slice(&[0.5f32, -1.0]).set_requires_grad(true)
}

fn accumulator() -> GradientAccumulator {
    GradientAccumulator::new(AccumulationConfig::default()).unwrap()
}

fn optimizer(weight: &Tensor) -> Sgd {
    let group = ParamGroup::new("all", vec![("weight".into(), weight.shallow_clone())]);
    Sgd::new(vec![group], SgdConfig::default()).unwrap()
}

/// Micro-batches of uneven sizes: inputs for a sum over tokens, and for a sum over pairs.
fn micro_batches() -> [(Vec<f32>, Vec<f32>); 3] {
    [
        (vec![1.0, 2.0, 3.0], vec![4.0]),
        (vec![-1.0], vec![]),
        (vec![0.25, 8.0], vec![1.5, 2.5, -3.5]),
    ]
}

fn tokens_loss(weight: &Tensor, inputs: &[f32]) -> Tensor {
    (weight.get(0) * Tensor::from_slice(inputs))
        .square()
        .sum(Kind::Float)
}

fn pairs_loss(weight: &Tensor, inputs: &[f32]) -> Tensor {
    (weight.get(1) * weight.get(0) * Tensor::from_slice(inputs)).sum(Kind::Float)
}

#[test]
fn each_term_is_divided_by_its_own_count_as_in_one_large_batch() {
    let all: (Vec<f32>, Vec<f32>) =
        micro_batches()
            .into_iter()
            .fold((Vec::new(), Vec::new()), |mut all, (tokens, pairs)| {
                all.0.extend(tokens);
                all.1.extend(pairs);
                all
            });
    let large = weight();
    let loss = tokens_loss(&large, &all.0) / all.0.len() as f64
        + pairs_loss(&large, &all.1) * 0.1 / all.1.len() as f64;
    loss.backward();

    let small = weight();
    let mut accumulator = accumulator();
    let counts = micro_batches().map(|(tokens, pairs)| [tokens.len() as u64, pairs.len() as u64]);
    accumulator.open(Window::of_terms(counts)).unwrap();
    for (tokens, pairs) in micro_batches() {
        let language = tokens_loss(&small, &tokens);
        let contrast = pairs_loss(&small, &pairs) * 0.1;
        accumulator.backward_terms(&[&language, &contrast]).unwrap();
    }
    let (a, b) = (small.grad(), large.grad());
    assert!(a.allclose(&b, 1e-6, 1e-6, false), "{a:?} {b:?}");
    let step = accumulator.step(&mut optimizer(&small)).unwrap();
    assert!((step.loss().unwrap() - loss.double_value(&[])).abs() < 1e-5);
    assert_eq!((step.tokens, step.total_tokens), (6, 6));
}

#[test]
fn means_have_the_same_weight_whatever_they_are_means_of() {
    let weight = weight();
    let mut accumulator = accumulator();
    accumulator.open(Window::of_means(3)).unwrap();
    for (tokens, _) in micro_batches() {
        let mean = (weight.get(0) * Tensor::from_slice(&tokens)).mean(Kind::Float);
        accumulator.backward(&mean).unwrap();
    }
    // (2 - 1 + 4.125) / 3
    let grad = Vec::<f32>::try_from(weight.grad()).unwrap();
    assert!(
        (grad[0] - 5.125 / 3.0).abs() < 1e-6 && grad[1] == 0.0,
        "{grad:?}"
    );
    let step = accumulator.step(&mut optimizer(&weight)).unwrap();
    assert!((step.loss().unwrap() - 0.5 * 5.125 / 3.0).abs() < 1e-6);
}

#[test]
fn terms_that_do_not_fit_the_window_are_an_error() {
    let weight = weight();
    let loss = tokens_loss(&weight, &[1.0]);
    let terms = [&loss, &loss];
    let mut accumulator = accumulator();
    let error = accumulator.backward_terms(&terms).unwrap_err();
    assert!(matches!(error, Error::NotAnnounced), "{error}");

    let uneven = Window::of_terms([vec![1, 1], vec![1]]);
    let error = accumulator.open(uneven).unwrap_err();
    assert!(
        matches!(
            error,
            Error::Terms {
                position: 1,
                expected: 2,
                given: 1
            }
        ),
        "{error}"
    );
    accumulator.open(Window::new([1])).unwrap();
    assert!(accumulator.backward_terms(&[]).is_err());
    let error = accumulator.backward_terms(&terms).unwrap_err();
    assert!(
        matches!(
            error,
            Error::Terms {
                position: 0,
                expected: 1,
                given: 2
            }
        ),
        "{error}"
    );
    accumulator.backward_terms(&terms[..1]).unwrap();
}
