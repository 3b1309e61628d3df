//! State dicts of AdamW.

use super::*;

#[test]
fn a_resumed_run_is_bit_equal_to_one_that_was_not_interrupted() {
    let fixture = fixture("adamw");
    let new = |learning_rate| {
        let config = AdamWConfig {
            learning_rate,
            ..config()
        };
        start(&fixture, config, Kind::Float)
    };
    let (whole, mut whole_optimizer) = new(1e-2);
    for t in 0..20 {
        step(&whole, &mut whole_optimizer, t);
    }
    let (first, mut first_optimizer) = new(1e-2);
    for t in 0..10 {
        step(&first, &mut first_optimizer, t);
    }
    let state = first_optimizer.state_dict().unwrap();
    let (mut second, mut second_optimizer) = new(7.0);
    for (name, parameter) in &mut second.parameters {
        tch::no_grad(|| parameter.copy_(&first.parameters[name]));
    }
    second_optimizer.load_state_dict(&state).unwrap();
    assert_eq!(
        second_optimizer.learning_rates(),
        first_optimizer.learning_rates()
    );
    // The state was copied: continuing the first run must not change the second.
    step(&first, &mut first_optimizer, 10);
    for t in 10..20 {
        step(&second, &mut second_optimizer, t);
    }
    for &name in NAMES {
        assert!(
            second.parameters[name].equal(&whole.parameters[name]),
            "{name}"
        );
    }
}

#[test]
fn state_metadata_survives_json() {
    let fixture = fixture("adamw");
    let (run, mut optimizer) = start(&fixture, config(), Kind::Float);
    step(&run, &mut optimizer, 0);
    let state = optimizer.state_dict().unwrap();
    let text = serde_json::to_string(&state.metadata).unwrap();
    assert!(text.contains("\"without_state\":[\"proj.bias\"]"), "{text}");
    let metadata = serde_json::from_str(&text).unwrap();
    optimizer
        .load_state_dict(&StateDict { metadata, ..state })
        .unwrap();
}

fn state_error(damage: impl FnOnce(&mut StateDict)) -> String {
    let fixture = fixture("adamw");
    let (run, mut optimizer) = start(&fixture, config(), Kind::Float);
    step(&run, &mut optimizer, 1);
    let mut state = optimizer.state_dict().unwrap();
    damage(&mut state);
    let before = run.parameters["gain"].copy();
    let error = optimizer.load_state_dict(&state).unwrap_err();
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
