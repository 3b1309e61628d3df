//! Several optimizers that step together.

use overdrive_optim::{
    AdamW, AdamWConfig, CombinedOptimizer, Error, Muon, MuonConfig, Optimizer, ParamGroup,
    StateDict,
};
use tch::{Device, Kind, Tensor};

/// A matrix and a vector with values that depend on their position only.
fn weights() -> (Tensor, Tensor) {
    let wave = |size: &[i64]| {
        let count = size.iter().product::<i64>();
        let values = Tensor::arange(count, (Kind::Float, Device::Cpu)).sin();
        values.view(size).set_requires_grad(true)
    };
    (wave(&[6, 4]), wave(&[4]))
}

fn group(name: &str, tensor: &Tensor) -> Vec<ParamGroup> {
    let named = vec![(format!("{name}.weight"), tensor.shallow_clone())];
    vec![ParamGroup::new(name, named)]
}

fn muon(matrix: &Tensor) -> Box<dyn Optimizer> {
    Box::new(Muon::new(group("matrix", matrix), MuonConfig::default()).unwrap())
}

fn adamw(vector: &Tensor) -> Box<dyn Optimizer> {
    Box::new(AdamW::new(group("vector", vector), AdamWConfig::default()).unwrap())
}

fn combined(matrix: &Tensor, vector: &Tensor) -> CombinedOptimizer {
    let parts = [
        ("muon".to_owned(), muon(matrix)),
        ("adamw".to_owned(), adamw(vector)),
    ];
    CombinedOptimizer::new(parts).unwrap()
}

fn backward(matrix: &Tensor, vector: &Tensor) {
    matrix.matmul(vector).square().sum(Kind::Float).backward();
}

#[test]
fn a_step_is_that_of_each_optimizer_and_learning_rates_are_concatenated() {
    let (one, other) = (weights(), weights());
    let mut together = combined(&one.0, &one.1);
    let mut apart = [muon(&other.0), adamw(&other.1)];
    together.set_learning_rates(&[2e-2, 3e-3]).unwrap();
    apart[0].set_learning_rates(&[2e-2]).unwrap();
    apart[1].set_learning_rates(&[3e-3]).unwrap();
    for _ in 0..3 {
        backward(&one.0, &one.1);
        together.step().unwrap();
        together.zero_grad().unwrap();
        backward(&other.0, &other.1);
        for optimizer in &mut apart {
            optimizer.step().unwrap();
            optimizer.zero_grad().unwrap();
        }
    }
    assert_eq!(one, other);
    assert_eq!(together.learning_rates(), [2e-2, 3e-3]);
    assert_eq!(together.parameters().len(), 2);
    let error = together.set_learning_rates(&[0.1]).unwrap_err();
    assert!(
        matches!(
            error,
            Error::LearningRateCount {
                given: 1,
                groups: 2
            }
        ),
        "{error}"
    );
}

#[test]
fn the_state_of_each_optimizer_is_stored_and_loaded_under_its_name() {
    let (matrix, vector) = weights();
    let mut first = combined(&matrix, &vector);
    backward(&matrix, &vector);
    first.step().unwrap();
    first.zero_grad().unwrap();
    let state = first.state_dict().unwrap();
    assert!(
        state
            .tensors
            .contains_key("muon/matrix.weight.momentum_buffer")
    );
    assert!(state.tensors.contains_key("adamw/vector.weight.exp_avg"));

    let copy = |tensor: &Tensor| tensor.detach().copy().set_requires_grad(true);
    let (other_matrix, other_vector) = (copy(&matrix), copy(&vector));
    let mut second = combined(&other_matrix, &other_vector);
    second.load_state_dict(&state).unwrap();
    for (optimizer, (matrix, vector)) in [
        (&mut first, (&matrix, &vector)),
        (&mut second, (&other_matrix, &other_vector)),
    ] {
        backward(matrix, vector);
        optimizer.step().unwrap();
    }
    assert_eq!((matrix, vector), (other_matrix, other_vector));
}

#[test]
fn an_error_of_a_later_optimizer_leaves_the_earlier_ones_as_they_were() {
    let (matrix, vector) = weights();
    // AdamW comes first, and loads into the memory of its state if it is capturable.
    let capturable = AdamWConfig {
        capturable: true,
        ..AdamWConfig::default()
    };
    let first = AdamW::new(group("vector", &vector), capturable).unwrap();
    let optimizers: [(String, Box<dyn Optimizer>); 3] = [
        ("adamw".to_owned(), Box::new(first)),
        ("muon".to_owned(), muon(&matrix)),
        (
            "last".to_owned(),
            adamw(&Tensor::ones([2], (Kind::Float, Device::Cpu)).set_requires_grad(true)),
        ),
    ];
    let mut optimizer = CombinedOptimizer::new(optimizers).unwrap();
    optimizer.set_learning_rates(&[1e-2, 2e-2, 3e-2]).unwrap();
    let error = optimizer.set_learning_rates(&[0.1, 0.2, -1.0]).unwrap_err();
    assert!(error.to_string().contains("learning_rate"), "{error}");
    assert_eq!(optimizer.learning_rates(), [1e-2, 2e-2, 3e-2]);

    let fresh = optimizer.state_dict().unwrap();
    let fresh = StateDict {
        tensors: fresh
            .tensors
            .iter()
            .map(|(name, tensor)| (name.clone(), tensor.copy()))
            .collect(),
        metadata: fresh.metadata,
    };
    backward(&matrix, &vector);
    optimizer.step().unwrap();
    optimizer.zero_grad().unwrap();
    let values = |optimizer: &CombinedOptimizer| {
        let state = optimizer.state_dict().unwrap();
        let tensors = state.tensors.into_iter();
        let values = tensors.map(|(name, tensor)| {
            let numbers = Vec::<f32>::try_from(tensor.flatten(0, -1)).unwrap();
            (name, numbers)
        });
        (values.collect::<Vec<_>>(), state.metadata)
    };
    let before = values(&optimizer);
    // The states of the first two fit.
    let mut wrong = fresh;
    wrong.metadata["adamw"]["groups"][0]["learning_rate"] = 0.5.into();
    wrong.metadata["last"]["format_version"] = 99.into();
    let error = optimizer.load_state_dict(&wrong).unwrap_err();
    assert!(matches!(error, Error::StateMismatch { .. }), "{error}");
    assert_eq!(values(&optimizer), before);
    assert_eq!(optimizer.learning_rates(), [1e-2, 2e-2, 3e-2]);
}

#[test]
fn other_optimizers_and_names_that_are_not_unique_are_an_error() {
    let (matrix, vector) = weights();
    let state = combined(&matrix, &vector).state_dict().unwrap();
    let mut alone = CombinedOptimizer::new([("muon".to_owned(), muon(&matrix))]).unwrap();
    let error = alone.load_state_dict(&state).unwrap_err().to_string();
    assert!(error.contains("adamw"), "{error}");
    for names in [["a", "a"], ["a", "b/c"], ["", "b"]] {
        let parts = names.map(|name| (name.to_owned(), adamw(&vector)));
        assert!(CombinedOptimizer::new(parts).is_err(), "{names:?}");
    }
}
