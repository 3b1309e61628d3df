//! AdamW compared with PyTorch's trajectories, and its invariants.

mod errors;
mod states;

use overdrive_optim::{
    AdamW, AdamWConfig, Error, GradScaling, Implementation, Optimizer, ParamGroup, StateDict,
};
use overdrive_sys::grad;
use tch::{Device, Kind, Tensor};

use crate::common::{Run, Tensors, difference, fixture};

const NAMES: &[&str] = &["proj.weight", "proj.bias", "conv.weight", "gain"];

fn leaf(tensor: &Tensor, kind: Kind) -> Tensor {
    tensor.copy().to_kind(kind).set_requires_grad(true)
}

fn config() -> AdamWConfig {
    AdamWConfig {
        learning_rate: 1e-2,
        betas: (0.9, 0.95),
        ..Default::default()
    }
}

/// The run that gen_optim.py describes.
fn start(fixture: &Tensors, config: AdamWConfig, kind: Kind) -> (Run<'_>, AdamW) {
    let mut run = Run::new(fixture, NAMES, kind);
    run.steps = 50;
    let optimizer = AdamW::new(run.groups(), config).unwrap();
    (run, optimizer)
}

fn step(run: &Run<'_>, optimizer: &mut dyn Optimizer, t: i64) {
    let rate = 1e-2 * (1.0 - t as f64 / 60.0);
    optimizer.set_learning_rate(rate).unwrap();
    run.step(optimizer, t);
}

/// A step of scaled gradients, every seventh of which are not finite.
fn scaled_step(run: &Run<'_>, optimizer: &mut dyn Optimizer, t: i64) {
    let rate = 1e-2 * (1.0 - t as f64 / 60.0);
    optimizer.set_learning_rate(rate).unwrap();
    run.set_gradients(t);
    for parameter in run.parameters.values() {
        let mut gradient = parameter.grad();
        if gradient.defined() {
            let _ = gradient.g_mul_scalar_(1024.0);
        }
    }
    let scaling = GradScaling {
        grad_scale: Some(&Tensor::from(1024f32)),
        found_inf: &Tensor::from(if t % 7 == 3 { 1f32 } else { 0.0 }),
    };
    assert!(optimizer.step_scaled(&scaling).unwrap());
}

#[test]
fn parameters_and_states_equal_those_of_torch() {
    let fixture = fixture("adamw");
    let plain = || AdamWConfig {
        implementation: Implementation::Plain,
        ..config()
    };
    let amsgrad = |config| AdamWConfig {
        amsgrad: true,
        ..config
    };
    let maximize = |config| AdamWConfig {
        maximize: true,
        ..config
    };
    for (case, config, kind, tolerance) in [
        ("fused", config(), Kind::Float, 1e-6),
        ("foreach", config(), Kind::Float, 1e-6),
        ("foreach", plain(), Kind::Float, 1e-6),
        ("amsgrad_foreach", amsgrad(plain()), Kind::Float, 1e-6),
        ("amsgrad", amsgrad(config()), Kind::Float, 1e-6),
        ("maximize", maximize(config()), Kind::Float, 1e-6),
        ("maximize", maximize(plain()), Kind::Float, 1e-6),
        ("double", config(), Kind::Double, 1e-12),
        ("bfloat16", config(), Kind::BFloat16, 1.0 / 256.0),
        ("scaled", config(), Kind::Float, 1e-6),
    ] {
        let implementation = config.implementation;
        let (run, mut optimizer) = start(&fixture, config, kind);
        let own = |part: &str| {
            let parts = ["step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"];
            parts.into_iter().find(|name| *name == part)
        };
        let step = if case == "scaled" { scaled_step } else { step };
        let worst = run.worst_difference_by(&mut optimizer, case, own, step);
        assert!(worst <= tolerance, "{case}, {implementation:?}: {worst}");
        let prefix = format!("{case}.state.");
        let theirs = fixture
            .keys()
            .filter(|key| key.starts_with(&prefix))
            .count();
        assert_eq!(
            optimizer.state_dict().unwrap().tensors.len(),
            theirs,
            "{case}"
        );
    }
}

#[test]
fn a_step_with_found_inf_changes_no_parameter_and_no_state() {
    let fixture = fixture("adamw");
    let (run, mut optimizer) = start(&fixture, config(), Kind::Float);
    step(&run, &mut optimizer, 1);
    let copies = |optimizer: &AdamW| -> Vec<Tensor> {
        let state = optimizer.state_dict().unwrap();
        run.parameters
            .values()
            .chain(state.tensors.values())
            .map(Tensor::copy)
            .collect()
    };
    let before = copies(&optimizer);
    let found_inf = Tensor::from(1f32);
    let scaling = GradScaling {
        grad_scale: None,
        found_inf: &found_inf,
    };
    assert!(optimizer.step_scaled(&scaling).unwrap());
    for (before, after) in before.iter().zip(copies(&optimizer)) {
        assert!(before.equal(&after));
    }
}

#[test]
fn the_plain_path_declines_to_unscale_and_changes_nothing() {
    let config = AdamWConfig {
        implementation: Implementation::Plain,
        ..config()
    };
    let fixture = fixture("adamw");
    let (run, mut optimizer) = start(&fixture, config, Kind::Float);
    grad::set(&run.parameters["gain"], &Tensor::from(1f32)).unwrap();
    let before = run.parameters["gain"].copy();
    let found_inf = Tensor::from(0f32);
    let scaling = GradScaling {
        grad_scale: None,
        found_inf: &found_inf,
    };
    assert!(!optimizer.step_scaled(&scaling).unwrap());
    assert!(run.parameters["gain"].equal(&before));
}

fn one(tensor: Tensor) -> Result<AdamW, Error> {
    AdamW::new(
        vec![ParamGroup::new("all", vec![("weight".into(), tensor)])],
        config(),
    )
}

#[test]
fn gradients_in_another_layout_are_applied_to_the_right_elements() {
    // torch's fused CPU kernel ignores strides; a transposed gradient must not be scrambled.
    let parameter = leaf(
        &Tensor::zeros([2, 3], (Kind::Float, Device::Cpu)),
        Kind::Float,
    );
    let gradient = Tensor::from_slice(&[1f32, -1.0, 1.0, 1.0, -1.0, -1.0])
        .view([3, 2])
        .tr();
    assert!(!gradient.is_contiguous());
    grad::set(&parameter, &gradient).unwrap();
    one(parameter.shallow_clone()).unwrap().step().unwrap();
    assert!(parameter.sign().equal(&-gradient));
}

#[test]
fn a_parameter_with_gaps_is_updated_without_changing_its_neighbours() {
    let whole = Tensor::zeros([4, 4], (Kind::Float, Device::Cpu));
    let parameter = whole.narrow(1, 0, 2).detach().set_requires_grad(true);
    let ones = Tensor::ones([4, 2], (Kind::Float, Device::Cpu));
    grad::set(&parameter, &ones).unwrap();
    one(parameter.shallow_clone()).unwrap().step().unwrap();
    assert!((parameter.double_value(&[3, 1]) + 0.01).abs() < 1e-6);
    assert_eq!(whole.narrow(1, 2, 2).abs().max().double_value(&[]), 0.0);
}

/// The ranks of a sharded optimizer have other parameters: if this depended on their memory, a gradient scaler would
/// issue other collectives on each of them.
#[test]
fn a_parameter_with_gaps_takes_scaled_steps_as_a_dense_one_does() {
    for kind in [Kind::Float, Kind::BFloat16] {
        let start = Tensor::arange(8, (kind, Device::Cpu)).view([4, 2]);
        let whole = Tensor::zeros([4, 4], (kind, Device::Cpu));
        whole.narrow(1, 0, 2).copy_(&start);
        let strided = whole.narrow(1, 0, 2).detach().set_requires_grad(true);
        let dense = leaf(&start, kind);
        let optimizer = |parameter: &Tensor| {
            let config = AdamWConfig {
                implementation: Implementation::Fused,
                master_weights: true,
                ..config()
            };
            let named = vec![("weight".into(), parameter.shallow_clone())];
            AdamW::new(vec![ParamGroup::new("all", named)], config).unwrap()
        };
        let mut optimizers = [optimizer(&strided), optimizer(&dense)];
        for t in 1..5 {
            let grad_scale = Tensor::from(4f32);
            let found_inf = Tensor::from(if t == 3 { 1f32 } else { 0.0 });
            let scaling = GradScaling {
                grad_scale: Some(&grad_scale),
                found_inf: &found_inf,
            };
            let gradient = (&start - 3.0) * f64::from(t);
            for (parameter, optimizer) in [&strided, &dense].into_iter().zip(&mut optimizers) {
                // A copy: the kernel unscales it in place.
                grad::set(parameter, &gradient.copy()).unwrap();
                assert!(optimizer.supports_step_scaled());
                assert!(optimizer.step_scaled(&scaling).unwrap());
            }
            assert!(strided.equal(&dense), "{kind:?}, step {t}");
        }
        for optimizer in optimizers {
            let state = optimizer.state_dict().unwrap();
            assert_eq!(state.tensors["weight.step"].double_value(&[]), 3.0);
        }
        assert!(!dense.equal(&start));
        assert_eq!(whole.narrow(1, 2, 2).abs().max().double_value(&[]), 0.0);
    }
}

#[test]
fn zero_grad_drops_the_gradients() {
    let parameter = leaf(&Tensor::ones([3], (Kind::Float, Device::Cpu)), Kind::Float);
    let mut optimizer = one(parameter.shallow_clone()).unwrap();
    parameter.sum(Kind::Float).backward();
    assert!(parameter.grad().defined());
    optimizer.zero_grad().unwrap();
    assert!(!parameter.grad().defined());
    // Nothing to step, nothing counted.
    optimizer.step().unwrap();
    assert_eq!(optimizer.state_bytes(), 0);
}

#[test]
fn there_is_one_learning_rate_per_group() {
    let fixture = fixture("adamw");
    let (_run, mut optimizer) = start(&fixture, config(), Kind::Float);
    let error = optimizer.set_learning_rates(&[1.0]).unwrap_err();
    assert_eq!(
        error.to_string(),
        "there are 1 learning rates for 2 parameter groups; pass one for each group"
    );
    optimizer.set_learning_rates(&[0.1, 0.2]).unwrap();
    assert_eq!(optimizer.learning_rates(), [0.1, 0.2]);
    assert!(optimizer.group_names().eq(["decay", "no_decay"]));
}

#[test]
fn half_parameters_step_alike_on_both_paths() {
    let gradient = Tensor::from_slice(&[0.5f32, -2.0, 3.0, 1e-3]).to_kind(Kind::Half);
    let mut results = Vec::new();
    for implementation in [Implementation::Fused, Implementation::Plain] {
        let start = Tensor::from_slice(&[1f32, 2.0, -3.0, 0.5]);
        let parameter = leaf(&start, Kind::Half);
        let group = ParamGroup::new("all", vec![("weight".into(), parameter.shallow_clone())]);
        let config = AdamWConfig {
            implementation,
            eps: 1e-4,
            ..config()
        };
        let mut optimizer = AdamW::new(vec![group], config).unwrap();
        for _ in 0..5 {
            grad::set(&parameter, &gradient).unwrap();
            optimizer.step().unwrap();
        }
        results.push(parameter.detach());
    }
    assert!(difference(&results[0], &results[1]) <= 1.0 / 512.0);
}

#[test]
fn added_groups_are_stepped_from_then_on() {
    let (first, second) = (
        Tensor::zeros([2], (Kind::Float, Device::Cpu)),
        Tensor::zeros([2], (Kind::Float, Device::Cpu)),
    );
    let (first, second) = (leaf(&first, Kind::Float), leaf(&second, Kind::Float));
    let mut optimizer = one(first.shallow_clone()).unwrap();
    let late = vec![("late".to_string(), second.shallow_clone())];
    optimizer
        .add_group(ParamGroup::new("late", late).with_learning_rate(0.5))
        .unwrap();
    (&first + &second).sum(Kind::Float).backward();
    optimizer.step().unwrap();
    assert!((first.double_value(&[0]) + 0.01).abs() < 1e-6);
    assert!((second.double_value(&[0]) + 0.5).abs() < 1e-6);
}

#[test]
#[ignore = "needs a CUDA GPU"]
fn steps_on_a_gpu_equal_cpu_steps() {
    let start = (Tensor::arange(1000, (Kind::Float, Device::Cpu)) * 0.37 + 0.1).sin() * 2.0;
    let mut results = Vec::new();
    for device in [Device::Cpu, Device::Cuda(0)] {
        let parameter = start.to_device(device).copy().set_requires_grad(true);
        let mut optimizer = one(parameter.shallow_clone()).unwrap();
        for t in 0..20 {
            (&parameter * f64::from(t))
                .cos()
                .sum(Kind::Float)
                .backward();
            let found_inf = Tensor::from(if t == 5 { 1f32 } else { 0.0 });
            let scaling = GradScaling {
                grad_scale: None,
                found_inf: &found_inf,
            };
            assert!(optimizer.step_scaled(&scaling).unwrap());
            optimizer.zero_grad().unwrap();
        }
        let step = optimizer.state_dict().unwrap().tensors["weight.step"].double_value(&[]);
        assert_eq!(step, 19.0);
        results.push(parameter.detach().to_device(Device::Cpu));
    }
    assert!(difference(&results[0], &results[1]) < 1e-4);
}
