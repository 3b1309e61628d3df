//! AdamW against torch's trajectories, and its own laws.

#![allow(clippy::unwrap_used)]

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
    // The state was copied: going on with the first run must not reach into the second.
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
fn a_state_with_missing_extra_or_misshapen_tensors_is_refused_by_name() {
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
         misshapen tensors: proj.bias.exp_avg_sq [4], expected [33]"
    );
}

#[test]
fn a_state_of_other_parameters_or_groups_is_refused_by_name() {
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
        message.contains("conv.weight (here `decay`, there `no_decay`)"),
        "{message}"
    );
    let message = state_error(|state| state.metadata["format_version"] = 9.into());
    assert!(
        message.contains("format 9 of `adamw`, expected format 1"),
        "{message}"
    );
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
fn a_parameter_with_holes_is_stepped_without_touching_its_neighbours() {
    let whole = Tensor::zeros([4, 4], (Kind::Float, Device::Cpu));
    let parameter = whole.narrow(1, 0, 2).detach().set_requires_grad(true);
    let ones = Tensor::ones([4, 2], (Kind::Float, Device::Cpu));
    grad::set(&parameter, &ones).unwrap();
    one(parameter.shallow_clone()).unwrap().step().unwrap();
    assert!((parameter.double_value(&[3, 1]) + 0.01).abs() < 1e-6);
    assert_eq!(whole.narrow(1, 2, 2).abs().max().double_value(&[]), 0.0);
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

#[test]
fn bad_parameters_are_refused_by_name() {
    let float = || Tensor::ones([3], (Kind::Float, Device::Cpu));
    let integers = Tensor::ones([3], (Kind::Int64, Device::Cpu));
    assert!(
        one(integers)
            .unwrap_err()
            .to_string()
            .starts_with("parameter `weight` is Int64;")
    );
    let complex = Tensor::ones([3], (Kind::ComplexFloat, Device::Cpu));
    assert!(
        one(complex)
            .unwrap_err()
            .to_string()
            .contains("floating-point parameters only")
    );
    let derived = float().set_requires_grad(true) * 2.0;
    assert!(one(derived).unwrap_err().to_string().contains("not a leaf"));

    let pair = |a: &str, b: &str, second: Tensor, first: Tensor| {
        let group = ParamGroup::new("all", vec![(a.into(), first), (b.into(), second)]);
        AdamW::new(vec![group], config()).unwrap_err().to_string()
    };
    assert!(pair("w", "w", float(), float()).contains("`w` is listed twice"));
    let tied = float();
    let message = pair("embed", "head", tied.shallow_clone(), tied);
    assert!(
        message.contains("`embed` and `head` share their memory"),
        "{message}"
    );
}

#[test]
fn bad_options_are_refused_with_their_range() {
    let error = |config: AdamWConfig| AdamW::new(vec![], config).unwrap_err().to_string();
    let message = error(AdamWConfig {
        betas: (0.9, 1.0),
        ..config()
    });
    assert_eq!(
        message,
        "betas is 1, expected two numbers from 0 to below 1"
    );
    let message = error(AdamWConfig {
        learning_rate: -1.0,
        ..config()
    });
    assert_eq!(
        message,
        "learning_rate is -1, expected a finite number from 0"
    );
    let unknown = serde_json::from_str::<AdamWConfig>(r#"{"beta1": 0.9}"#).unwrap_err();
    assert!(
        unknown.to_string().contains("unknown field `beta1`"),
        "{unknown}"
    );
}

#[test]
fn learning_rates_come_one_a_group() {
    let mut run = Run::new(config(), Kind::Float);
    let error = run.optimizer.set_learning_rates(&[1.0]).unwrap_err();
    assert_eq!(
        error.to_string(),
        "1 learning rates for 2 parameter groups; give one for each group"
    );
    run.optimizer.set_learning_rates(&[0.1, 0.2]).unwrap();
    assert_eq!(run.optimizer.learning_rates(), [0.1, 0.2]);
    assert!(run.optimizer.group_names().eq(["decay", "no_decay"]));
}

#[test]
fn a_converted_parameter_is_named_instead_of_stepped_wrongly() {
    let mut parameter = leaf(&Tensor::ones([3], (Kind::Float, Device::Cpu)), Kind::Float);
    let mut optimizer = one(parameter.shallow_clone()).unwrap();
    parameter.sum(Kind::Float).backward();
    optimizer.step().unwrap();
    grad::clear(&parameter).unwrap();
    parameter.set_data(&parameter.detach().to_kind(Kind::Double));
    parameter.sum(Kind::Double).backward();
    let message = optimizer.step().unwrap_err().to_string();
    assert!(
        message.contains("`weight` is Double on Cpu but its optimizer state is Float"),
        "{message}"
    );
}

#[test]
fn a_resized_or_relaid_parameter_is_never_walked_beyond_its_state() {
    let data = || Tensor::zeros([2, 3], (Kind::Float, Device::Cpu));
    let mut parameter = leaf(&data(), Kind::Float);
    let mut optimizer = one(parameter.shallow_clone()).unwrap();
    parameter.sum(Kind::Float).backward();
    optimizer.step().unwrap();
    optimizer.zero_grad().unwrap();

    // The same shape in column-major memory: still right.
    let column_major = data().tr().contiguous().tr();
    parameter.set_data(&column_major);
    let gradient = Tensor::from_slice(&[1f32, -1.0, 1.0, 1.0, -1.0, -1.0]).view([2, 3]) * 1e3;
    grad::set(&parameter, &gradient).unwrap();
    optimizer.step().unwrap();
    assert!(parameter.sign().equal(&-gradient.sign()));
    optimizer.zero_grad().unwrap();

    parameter.set_data(&Tensor::zeros([500, 3], (Kind::Float, Device::Cpu)));
    parameter.sum(Kind::Float).backward();
    let message = optimizer.step().unwrap_err().to_string();
    assert!(
        message.contains("`weight` is [500, 3] but its optimizer state is [2, 3]"),
        "{message}"
    );
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

/// A step on a GPU; says so where there is none.
#[test]
fn cuda_steps_equal_cpu_steps() {
    if !tch::Cuda::is_available() {
        eprintln!("no CUDA device: cuda_steps_equal_cpu_steps not run");
        return;
    }
    let start = Tensor::randn([1000], (Kind::Float, Device::Cpu));
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
