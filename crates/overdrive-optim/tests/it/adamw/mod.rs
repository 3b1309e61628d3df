//! AdamW compared with PyTorch's trajectories, and its invariants.

mod errors;
mod states;

use std::collections::BTreeMap;

use overdrive_optim::{
    AdamW, AdamWConfig, Error, GradScaling, Implementation, Optimizer, ParamGroup, StateDict,
};
use overdrive_sys::grad;
use tch::{Device, Kind, Tensor};

const NAMES: [&str; 4] = ["proj.weight", "proj.bias", "conv.weight", "gain"];
const DECAYED: [&str; 2] = ["proj.weight", "conv.weight"];
const BASES: i64 = 5;
const STEPS: i64 = 50;

type Tensors = BTreeMap<String, Tensor>;

fn fixture() -> Tensors {
    let path = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/tests/fixtures/adamw.safetensors"
    );
    Tensor::read_safetensors(path)
        .expect("run gen_optim.py in tests/fixtures to make adamw.safetensors")
        .into_iter()
        .collect()
}

fn leaf(tensor: &Tensor, kind: Kind) -> Tensor {
    tensor.copy().to_kind(kind).set_requires_grad(true)
}

fn groups_of(parameters: &BTreeMap<&'static str, Tensor>) -> Vec<ParamGroup> {
    let of = |decayed: bool| {
        let names = NAMES
            .iter()
            .filter(move |name| DECAYED.contains(name) == decayed);
        names
            .map(|&name| (name.to_string(), parameters[name].shallow_clone()))
            .collect::<Vec<_>>()
    };
    vec![
        ParamGroup::new("decay", of(true)).with_weight_decay(0.1),
        ParamGroup::new("no_decay", of(false)).with_weight_decay(0.0),
    ]
}

fn config() -> AdamWConfig {
    AdamWConfig {
        learning_rate: 1e-2,
        betas: (0.9, 0.95),
        ..Default::default()
    }
}

/// The run that gen_optim.py describes.
struct Run {
    fixture: Tensors,
    parameters: BTreeMap<&'static str, Tensor>,
    optimizer: AdamW,
    kind: Kind,
    scale: Option<f64>,
}

impl Run {
    fn new(config: AdamWConfig, kind: Kind) -> Self {
        let fixture = fixture();
        let parameters: BTreeMap<_, _> = NAMES
            .map(|name| (name, leaf(&fixture[&format!("initial.{name}")], kind)))
            .into();
        let optimizer = AdamW::new(groups_of(&parameters), config).unwrap();
        Self {
            fixture,
            parameters,
            optimizer,
            kind,
            scale: None,
        }
    }

    fn step(&mut self, t: i64) {
        self.optimizer
            .set_learning_rate(1e-2 * (1.0 - t as f64 / 60.0))
            .unwrap();
        for name in NAMES {
            let base = &self.fixture[&format!("base.{}.{name}", t % BASES)];
            let gradient = (base * (1.0 + t as f64 / 10.0)).to_kind(self.kind);
            let gradient = self
                .scale
                .map_or(gradient.shallow_clone(), |scale| gradient * scale);
            let parameter = &self.parameters[name];
            if name == "proj.bias" && t % 3 == 0 {
                grad::clear(parameter).unwrap();
            } else {
                grad::set(parameter, &gradient).unwrap();
            }
        }
        match self.scale {
            None => self.optimizer.step().unwrap(),
            Some(scale) => {
                let found_inf = Tensor::from(if t % 7 == 3 { 1f32 } else { 0.0 });
                let grad_scale = Tensor::from(scale as f32);
                let scaling = GradScaling {
                    grad_scale: Some(&grad_scale),
                    found_inf: &found_inf,
                };
                assert!(self.optimizer.step_scaled(&scaling).unwrap());
            }
        }
    }

    /// The largest difference over all checkpoints, relative to the largest value of the tensor.
    fn worst_difference(&mut self, case: &str) -> f64 {
        let mut worst = 0f64;
        for t in 0..STEPS {
            self.step(t);
            if [1, 10, STEPS].contains(&(t + 1)) {
                for name in NAMES {
                    let expected = &self.fixture[&format!("{case}.{}.{name}", t + 1)];
                    worst = worst.max(difference(&self.parameters[name], expected));
                }
            }
        }
        let state = self.optimizer.state_dict().unwrap().tensors;
        let prefix = format!("{case}.state.");
        let of_case = self
            .fixture
            .iter()
            .filter_map(|(key, t)| Some((key.strip_prefix(&prefix)?, t)));
        let mut compared = 0;
        for (key, expected) in of_case {
            worst = worst.max(difference(&state[key], expected));
            compared += 1;
        }
        assert_eq!(
            compared,
            state.len(),
            "{case}: as many state tensors as torch has"
        );
        println!("{case}: {worst:.1e}");
        worst
    }
}

fn difference(a: &Tensor, b: &Tensor) -> f64 {
    assert_eq!(a.size(), b.size());
    assert_eq!(a.kind(), b.kind());
    let (a, b) = (a.detach().to_kind(Kind::Double), b.to_kind(Kind::Double));
    let largest = b.abs().max().double_value(&[]).max(1e-30);
    (a - b).abs().max().double_value(&[]) / largest
}

#[test]
fn fused_adamw_equals_torch_fused() {
    assert!(Run::new(config(), Kind::Float).worst_difference("fused") <= 1e-6);
}

#[test]
fn fused_adamw_equals_torch_foreach() {
    assert!(Run::new(config(), Kind::Float).worst_difference("foreach") <= 1e-6);
}

#[test]
fn plain_adamw_equals_torch_foreach() {
    let config = AdamWConfig {
        implementation: Implementation::Plain,
        ..config()
    };
    assert!(Run::new(config, Kind::Float).worst_difference("foreach") <= 1e-6);
}

#[test]
fn plain_amsgrad_equals_torch_foreach() {
    let implementation = Implementation::Plain;
    let config = AdamWConfig {
        implementation,
        amsgrad: true,
        ..config()
    };
    assert!(Run::new(config, Kind::Float).worst_difference("amsgrad_foreach") <= 1e-6);
}

#[test]
fn fused_amsgrad_equals_torch() {
    let config = AdamWConfig {
        amsgrad: true,
        ..config()
    };
    assert!(Run::new(config, Kind::Float).worst_difference("amsgrad") <= 1e-6);
}

#[test]
fn maximize_equals_torch_on_both_paths() {
    for implementation in [Implementation::Fused, Implementation::Plain] {
        let config = AdamWConfig {
            maximize: true,
            implementation,
            ..config()
        };
        assert!(Run::new(config, Kind::Float).worst_difference("maximize") <= 1e-6);
    }
}

#[test]
fn double_parameters_equal_torch() {
    assert!(Run::new(config(), Kind::Double).worst_difference("double") <= 1e-12);
}

#[test]
fn bfloat16_parameters_equal_torch() {
    assert!(Run::new(config(), Kind::BFloat16).worst_difference("bfloat16") <= 1.0 / 256.0);
}

#[test]
fn scaled_steps_with_infinities_equal_torch() {
    let mut run = Run::new(config(), Kind::Float);
    run.scale = Some(1024.0);
    assert!(run.worst_difference("scaled") <= 1e-6);
}

#[test]
fn a_step_with_found_inf_changes_no_parameter_and_no_state() {
    let mut run = Run::new(config(), Kind::Float);
    run.step(1);
    let copies = |run: &Run| -> Vec<Tensor> {
        let state = run.optimizer.state_dict().unwrap();
        run.parameters
            .values()
            .chain(state.tensors.values())
            .map(Tensor::copy)
            .collect()
    };
    let before = copies(&run);
    let found_inf = Tensor::from(1f32);
    let scaling = GradScaling {
        grad_scale: None,
        found_inf: &found_inf,
    };
    assert!(run.optimizer.step_scaled(&scaling).unwrap());
    for (before, after) in before.iter().zip(copies(&run)) {
        assert!(before.equal(&after));
    }
}

#[test]
fn the_plain_path_declines_to_unscale_and_changes_nothing() {
    let config = AdamWConfig {
        implementation: Implementation::Plain,
        ..config()
    };
    let mut run = Run::new(config, Kind::Float);
    grad::set(&run.parameters["gain"], &Tensor::from(1f32)).unwrap();
    let before = run.parameters["gain"].copy();
    let found_inf = Tensor::from(0f32);
    let scaling = GradScaling {
        grad_scale: None,
        found_inf: &found_inf,
    };
    assert!(!run.optimizer.step_scaled(&scaling).unwrap());
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
    let mut run = Run::new(config(), Kind::Float);
    let error = run.optimizer.set_learning_rates(&[1.0]).unwrap_err();
    assert_eq!(
        error.to_string(),
        "there are 1 learning rates for 2 parameter groups; pass one for each group"
    );
    run.optimizer.set_learning_rates(&[0.1, 0.2]).unwrap();
    assert_eq!(run.optimizer.learning_rates(), [0.1, 0.2]);
    assert!(run.optimizer.group_names().eq(["decay", "no_decay"]));
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
