//! Results and gradients are those of transformers' Qwen3-Next: against a fixture.

use std::collections::HashMap;
use std::path::PathBuf;

use overdrive_linear_attention::{
    Backend, CausalConv1dOptions, ConvActivation, DeltaRuleInputs, DeltaRuleOptions, causal_conv1d,
    gated_delta_rule,
};
use tch::{Kind, Tensor};

use crate::common::difference;

/// The tensors of a case of the fixture.
struct Case {
    name: &'static str,
    tensors: HashMap<String, Tensor>,
}

impl Case {
    fn read(name: &'static str) -> Case {
        let path =
            PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/delta_rule.safetensors");
        assert!(
            path.exists(),
            "{} is missing: run gen_delta_rule.py there",
            path.display()
        );
        let tensors = Tensor::read_safetensors(path).unwrap().into_iter();
        let of_case = |(full, tensor): (String, Tensor)| {
            let what = full.strip_prefix(name)?.strip_prefix('.')?;
            Some((what.to_owned(), tensor))
        };
        let tensors: HashMap<_, _> = tensors.filter_map(of_case).collect();
        assert!(!tensors.is_empty(), "the fixture has no case {name}");
        Case { name, tensors }
    }

    fn get(&self, what: &str) -> Option<&Tensor> {
        self.tensors.get(what)
    }

    fn leaf(&self, what: &str, kind: Kind) -> Option<Tensor> {
        let copy = |x: &Tensor| x.to_kind(kind).detach().copy().set_requires_grad(true);
        self.get(what).map(copy)
    }

    /// Compares results, and the gradients of the leaves.
    fn check(
        &self,
        (output, state): (Tensor, Tensor),
        leaves: &[(&str, Option<Tensor>)],
        (forward, backward): (f64, f64),
    ) {
        let gradient = |what: &str| self.get(&format!("{what}_gradient")).unwrap();
        let kind = output.kind();
        let loss = (&output * gradient("output").to_kind(kind)).sum(kind)
            + (&state * gradient("final_state").to_kind(state.kind())).sum(kind);
        loss.backward();
        for (what, got) in [("output", output), ("final_state", state)] {
            let off = difference(&got, self.get(what).unwrap());
            assert!(off < forward, "{what} of {} is off by {off}", self.name);
        }
        for (what, leaf) in leaves {
            let Some(leaf) = leaf else { continue };
            let expected = self.get(&format!("d_{what}")).unwrap();
            let off = difference(&leaf.grad(), expected);
            // The largest gradients of these cases are about 10.
            assert!(off < backward, "d_{what} of {} is off by {off}", self.name);
        }
    }
}

const DELTA: [&str; 5] = [
    "delta.grouped",
    "delta.one_token",
    "delta.whole_chunks",
    "delta.strong_decay",
    "delta.without_norm",
];

fn check_delta(name: &'static str, options: DeltaRuleOptions, kind: Kind, tolerances: (f64, f64)) {
    let case = Case::read(name);
    let leaf = |what| case.leaf(what, kind);
    let [query, key, value, decay, beta] =
        ["query", "key", "value", "decay", "beta"].map(|what| leaf(what).unwrap());
    let state = leaf("state");
    let inputs = DeltaRuleInputs {
        query: &query,
        key: &key,
        value: &value,
        decay: &decay,
        beta: &beta,
    };
    let options = DeltaRuleOptions {
        qk_l2norm: name != "delta.without_norm",
        ..options
    };
    let results = gated_delta_rule(inputs, state.as_ref(), &options).unwrap();
    let leaves = [
        ("query", Some(query)),
        ("key", Some(key)),
        ("value", Some(value)),
        ("decay", Some(decay)),
        ("beta", Some(beta)),
        ("state", state),
    ];
    case.check(results, &leaves, tolerances);
}

fn of_backend(backend: Backend) -> DeltaRuleOptions {
    DeltaRuleOptions {
        backend,
        ..DeltaRuleOptions::default()
    }
}

#[test]
fn the_chunked_delta_rule_equals_transformers() {
    for name in DELTA {
        // The fixture is stored in f32.
        check_delta(name, of_backend(Backend::Math), Kind::Double, (1e-6, 4e-6));
        check_delta(name, of_backend(Backend::Math), Kind::Float, (1e-5, 1e-4));
    }
}

#[test]
fn the_kernel_of_the_delta_rule_equals_transformers() {
    for name in DELTA {
        check_delta(name, of_backend(Backend::Fused), Kind::Float, (1e-5, 1e-4));
    }
}

#[test]
fn the_size_of_a_chunk_changes_no_result() {
    for chunk_size in [1, 2, 7, 16, 128, 1000] {
        let options = DeltaRuleOptions {
            chunk_size,
            ..of_backend(Backend::Math)
        };
        check_delta("delta.grouped", options, Kind::Double, (1e-6, 4e-6));
    }
}

const CONV: [&str; 5] = [
    "conv.plain",
    "conv.bias",
    "conv.state",
    "conv.one_token",
    "conv.identity",
];

fn check_conv(name: &'static str, backend: Backend, kind: Kind, tolerances: (f64, f64)) {
    let case = Case::read(name);
    let leaf = |what| case.leaf(what, kind);
    let (x, weight) = (leaf("x").unwrap(), leaf("weight").unwrap());
    let (bias, state) = (leaf("bias"), leaf("state"));
    let options = CausalConv1dOptions {
        backend,
        activation: match name {
            "conv.identity" => ConvActivation::Identity,
            _ => ConvActivation::Silu,
        },
    };
    let results = causal_conv1d(&x, &weight, bias.as_ref(), state.as_ref(), &options).unwrap();
    let leaves = [
        ("x", Some(x)),
        ("weight", Some(weight)),
        ("bias", bias),
        ("state", state),
    ];
    case.check(results, &leaves, tolerances);
}

#[test]
fn the_convolution_of_libtorch_equals_transformers() {
    for name in CONV {
        check_conv(name, Backend::Math, Kind::Double, (1e-6, 4e-6));
        check_conv(name, Backend::Math, Kind::Float, (1e-5, 1e-4));
    }
}

#[test]
fn the_kernel_of_the_convolution_equals_transformers() {
    for name in CONV {
        check_conv(name, Backend::Fused, Kind::Float, (1e-5, 1e-4));
    }
}
