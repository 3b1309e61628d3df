//! State dicts of AdamW.

use super::*;

#[test]
fn a_resumed_run_is_bit_equal_to_one_that_was_not_interrupted() {
    let (mut whole, mut first) = (
        Run::new(config(), Kind::Float),
        Run::new(config(), Kind::Float),
    );
    for t in 0..20 {
        whole.step(t);
    }
    for t in 0..10 {
        first.step(t);
    }
    let state = first.optimizer.state_dict().unwrap();
    let mut second = Run::new(
        AdamWConfig {
            learning_rate: 7.0,
            ..config()
        },
        Kind::Float,
    );
    for (name, parameter) in &mut second.parameters {
        tch::no_grad(|| parameter.copy_(&first.parameters[name]));
    }
    second.optimizer.load_state_dict(&state).unwrap();
    assert_eq!(
        second.optimizer.learning_rates(),
        first.optimizer.learning_rates()
    );
    // The state was copied: continuing the first run must not change the second.
    first.step(10);
    for t in 10..20 {
        second.step(t);
    }
    for name in NAMES {
        assert!(
            second.parameters[name].equal(&whole.parameters[name]),
            "{name}"
        );
    }
}

#[test]
fn state_metadata_survives_json() {
    let mut run = Run::new(config(), Kind::Float);
    run.step(0);
    let state = run.optimizer.state_dict().unwrap();
    let text = serde_json::to_string(&state.metadata).unwrap();
    assert!(text.contains("\"without_state\":[\"proj.bias\"]"), "{text}");
    let metadata = serde_json::from_str(&text).unwrap();
    run.optimizer
        .load_state_dict(&StateDict { metadata, ..state })
        .unwrap();
}

fn state_error(damage: impl FnOnce(&mut StateDict)) -> String {
    let mut run = Run::new(config(), Kind::Float);
    run.step(1);
    let mut state = run.optimizer.state_dict().unwrap();
    damage(&mut state);
    let before = run.parameters["gain"].copy();
    let error = run.optimizer.load_state_dict(&state).unwrap_err();
    assert!(matches!(error, Error::StateMismatch { .. }));
    assert!(run.parameters["gain"].equal(&before));
    error.to_string()
}

#[test]
fn the_error_of_missing_extra_or_misshapen_tensors_names_them() {
    let message = state_error(|state| {
        state.tensors.remove("gain.exp_avg");
        state.tensors.insert(
            "other.exp_avg".into(),
            Tensor::zeros([2], (Kind::Float, Device::Cpu)),
        );
        let wrong = Tensor::zeros([4], (Kind::Float, Device::Cpu));
        state.tensors.insert("proj.bias.exp_avg_sq".into(), wrong);
    });
    assert_eq!(
        message,
        "the optimizer state does not fit: missing tensors: gain.exp_avg; unexpected tensors: other.exp_avg; \
         misshapen tensors: proj.bias.exp_avg_sq is Float [4] and must be Float [33]"
    );
}

#[test]
fn the_error_of_other_parameters_or_groups_names_them() {
    let message = state_error(|state| {
        let no_decay = &mut state.metadata["groups"][1]["parameters"];
        *no_decay = serde_json::json!(["conv.weight", "gain", "bias2"]);
        state.metadata["groups"][0]["parameters"] = serde_json::json!(["proj.weight"]);
    });
    assert!(
        message.contains("parameters missing from it: proj.bias;"),
        "{message}"
    );
    assert!(message.contains("does not have: bias2;"), "{message}");
    assert!(
        message.contains("conv.weight (in `decay`, stored in `no_decay`)"),
        "{message}"
    );
    let message = state_error(|state| state.metadata["format_version"] = 9.into());
    assert!(
        message.contains("format 9 of `adamw`; it must have format 1"),
        "{message}"
    );
}

#[test]
fn state_takes_eight_bytes_a_float_parameter() {
    let parameter = leaf(
        &Tensor::ones([100], (Kind::Float, Device::Cpu)),
        Kind::Float,
    );
    let mut optimizer = one(parameter.shallow_clone()).unwrap();
    parameter.sum(Kind::Float).backward();
    optimizer.step().unwrap();
    assert_eq!(optimizer.state_bytes(), 804);
}
