//! Runs of the optimizers that repeat those of the fixtures' scripts.

#![allow(
    clippy::unwrap_used,
    dead_code,
    reason = "a test may panic, and need not use everything"
)]

use std::collections::BTreeMap;

use overdrive_optim::{Optimizer, ParamGroup};
use overdrive_sys::grad;
use tch::{Device, Kind, Tensor};

pub(crate) type Tensors = BTreeMap<String, Tensor>;

pub(crate) const BASES: i64 = 5;
pub(crate) const STEPS: i64 = 20;

pub(crate) fn fixture(name: &str) -> Tensors {
    let path = format!(
        "{}/tests/fixtures/{name}.safetensors",
        env!("CARGO_MANIFEST_DIR")
    );
    Tensor::read_safetensors(path)
        .expect("run gen_optimizers.py in tests/fixtures to make the file")
        .into_iter()
        .collect()
}

/// Parameters that start as the fixture's, and its gradients.
pub(crate) struct Run<'a> {
    pub(crate) fixture: &'a Tensors,
    pub(crate) prefix: &'static str,
    pub(crate) names: &'static [&'static str],
    pub(crate) skipped: &'static str,
    pub(crate) steps: i64,
    pub(crate) parameters: BTreeMap<&'static str, Tensor>,
}

impl<'a> Run<'a> {
    pub(crate) fn new(fixture: &'a Tensors, names: &'static [&'static str], kind: Kind) -> Self {
        Self::with_prefix(fixture, "", names, kind)
    }

    pub(crate) fn with_prefix(
        fixture: &'a Tensors,
        prefix: &'static str,
        names: &'static [&'static str],
        kind: Kind,
    ) -> Self {
        let leaf = |name: &str| {
            let initial = &fixture[&format!("{prefix}initial.{name}")];
            initial.copy().to_kind(kind).set_requires_grad(true)
        };
        Self {
            fixture,
            prefix,
            names,
            skipped: "proj.bias",
            steps: STEPS,
            parameters: names.iter().map(|&name| (name, leaf(name))).collect(),
        }
    }

    /// Matrices with a weight decay of 0.1, the rest with none.
    pub(crate) fn groups(&self) -> Vec<ParamGroup> {
        let of = |matrices: bool| {
            let names = self.names.iter();
            names
                .filter(|name| (self.parameters[**name].dim() >= 2) == matrices)
                .map(|&name| (name.to_string(), self.parameters[name].shallow_clone()))
                .collect::<Vec<_>>()
        };
        let groups = vec![
            ParamGroup::new("decay", of(true)).with_weight_decay(0.1),
            ParamGroup::new("no_decay", of(false)).with_weight_decay(0.0),
        ];
        groups
            .into_iter()
            .filter(|g| !g.parameters.is_empty())
            .collect()
    }

    pub(crate) fn set_gradients(&self, t: i64) {
        for name in self.names {
            let base = &self.fixture[&format!("{}base.{}.{name}", self.prefix, t % BASES)];
            let parameter = &self.parameters[name];
            let gradient = (base * (1.0 + t as f64 / 10.0)).to_kind(parameter.kind());
            if *name == self.skipped && t % 3 == 0 {
                grad::clear(parameter).unwrap();
            } else {
                grad::set(parameter, &gradient.to_device(parameter.device())).unwrap();
            }
        }
    }

    pub(crate) fn step(&self, optimizer: &mut dyn Optimizer, t: i64) {
        self.set_gradients(t);
        optimizer.step().unwrap();
    }

    /// The largest difference from a case of the fixture over parameters and states, relative to the
    /// largest value of the tensor. `part` gives a state's name there, or none to leave it out.
    pub(crate) fn worst_difference(
        &self,
        optimizer: &mut dyn Optimizer,
        case: &str,
        part: impl Fn(&str) -> Option<&'static str>,
    ) -> f64 {
        self.worst_difference_by(optimizer, case, part, Self::step)
    }

    /// [`Run::worst_difference`] with other steps than [`Run::step`].
    pub(crate) fn worst_difference_by(
        &self,
        optimizer: &mut dyn Optimizer,
        case: &str,
        part: impl Fn(&str) -> Option<&'static str>,
        step: impl Fn(&Self, &mut dyn Optimizer, i64),
    ) -> f64 {
        let (mut worst, mut compared) = (0f64, 0);
        for t in 0..self.steps {
            step(self, optimizer, t);
            for name in self.names {
                let key = format!("{case}.{}.{name}", t + 1);
                if let Some(expected) = self.fixture.get(&key) {
                    worst = worst.max(difference(&self.parameters[name], expected));
                    compared += 1;
                }
            }
        }
        assert!(compared >= self.names.len(), "{case} is in the fixture");
        let mut states = 0;
        for (key, tensor) in optimizer.state_dict().unwrap().tensors {
            let (name, own) = key.rsplit_once('.').unwrap();
            let Some(theirs) = part(own) else { continue };
            let expected = &self.fixture[&format!("{case}.state.{name}.{theirs}")];
            worst = worst.max(difference(&tensor, expected));
            states += 1;
        }
        println!("{case}: {worst:.1e} over {compared} parameters and {states} states");
        worst
    }

    pub(crate) fn copies(&self) -> BTreeMap<&'static str, Tensor> {
        let copy = |(name, tensor): (&&'static str, &Tensor)| (*name, tensor.detach().copy());
        self.parameters.iter().map(copy).collect()
    }
}

pub(crate) fn difference(a: &Tensor, b: &Tensor) -> f64 {
    assert_eq!(a.size(), b.size());
    let (a, b) = (a.detach().to_kind(Kind::Double), b.to_kind(Kind::Double));
    let largest = b.abs().max().double_value(&[]).max(1e-30);
    (a - b).abs().max().double_value(&[]) / largest
}

/// A leaf with a gradient.
pub(crate) fn with_gradient(values: &Tensor, gradient: &Tensor) -> Tensor {
    let leaf = values.detach().copy().set_requires_grad(true);
    grad::set(&leaf, gradient).unwrap();
    leaf
}

pub(crate) fn one_group(name: &str, parameter: &Tensor) -> Vec<ParamGroup> {
    vec![ParamGroup::new(
        "all",
        vec![(name.into(), parameter.shallow_clone())],
    )]
}

pub(crate) fn cpu(kind: Kind) -> (Kind, Device) {
    (kind, Device::Cpu)
}
