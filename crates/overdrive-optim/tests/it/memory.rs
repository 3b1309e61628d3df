//! Parameters, gradients and states that share memory, and handles of states that are given other memory.

use crate::common::{cpu, one_group, with_gradient};
use overdrive_optim::{
    Adafactor, AdafactorConfig, AdamW, AdamW8bit, AdamW8bitConfig, AdamWConfig, Error, Lion,
    LionConfig, Optimizer, PagedAdamW, PagedAdamWConfig, PagingConfig, ParamGroup, StateBits,
};
use overdrive_sys::grad;
use tch::{Kind, Tensor};

type Make = fn(Vec<ParamGroup>) -> Box<dyn Optimizer>;

/// The optimizers with kernels of this crate, and AdamW.
const ALL: [(&str, Make); 6] = [
    ("adamw", |groups| {
        Box::new(AdamW::new(groups, AdamWConfig::default()).unwrap())
    }),
    ("adamw 8-bit", |groups| {
        let config = AdamW8bitConfig {
            min_8bit_size: 1,
            ..Default::default()
        };
        Box::new(AdamW8bit::new(groups, config).unwrap())
    }),
    ("paged", |groups| {
        Box::new(PagedAdamW::new(groups, paged(StateBits::ThirtyTwo)).unwrap())
    }),
    ("paged 8-bit", |groups| {
        Box::new(PagedAdamW::new(groups, paged(StateBits::Eight)).unwrap())
    }),
    ("lion", |groups| {
        Box::new(Lion::new(groups, LionConfig::default()).unwrap())
    }),
    ("adafactor", |groups| {
        Box::new(Adafactor::new(groups, AdafactorConfig::default()).unwrap())
    }),
];

fn paged(state_bits: StateBits) -> PagedAdamWConfig {
    PagedAdamWConfig {
        state_bits,
        paging: PagingConfig {
            max_resident_bytes: 1 << 20,
            min_paged_elements: 1000,
            ..Default::default()
        },
        ..Default::default()
    }
}

/// Values of a matrix whose paged state has several windows.
fn values() -> Tensor {
    (Tensor::arange(600 * 700, cpu(Kind::Float)) * 0.1)
        .cos()
        .view([600, 700])
}

#[test]
fn other_memory_for_the_handle_of_a_state_changes_neither_that_memory_nor_the_optimizer() {
    for (name, make) in ALL {
        let parameters = [(); 2].map(|()| with_gradient(&values(), &values()));
        let [mut expected, mut optimizer] = [0, 1].map(|i| make(one_group("w", &parameters[i])));
        expected.step().unwrap();
        optimizer.step().unwrap();
        let mut others = Vec::new();
        for (key, mut handle) in optimizer.state_dict().unwrap().tensors {
            // On the heap, and as large as the state: its pages would be dropped as those of a mapped file.
            let other = Tensor::ones(handle.size(), (handle.kind(), handle.device()));
            handle.set_data(&other);
            others.push((key, other));
        }
        expected.step().unwrap();
        optimizer.step().unwrap();
        for (key, other) in others {
            assert!(other.equal(&other.ones_like()), "{name}: {key}");
        }
        assert!(parameters[0].equal(&parameters[1]), "{name}");
    }
}

#[test]
fn a_step_counts_as_a_change_of_its_parameters_as_an_in_place_operator_does() {
    // The loops of this crate and libtorch's fused kernels write memory past libtorch.
    for (name, make) in ALL {
        let parameter = with_gradient(&values(), &values());
        let output = parameter.square().sum(Kind::Float);
        make(one_group("w", &parameter)).step().unwrap();
        let error = output.f_backward().unwrap_err().to_string();
        assert!(
            error.contains("modified by an inplace operation"),
            "{name}: {error}"
        );
    }
}

#[test]
fn a_gradient_in_the_memory_of_its_parameter_or_state_is_read_before_both_are_written() {
    // Not AdamW: libtorch's kernel reads the gradient as it goes, as in PyTorch.
    for (name, make) in ALL.into_iter().skip(1) {
        let base = (Tensor::arange(40 * 70 + 300, cpu(Kind::Float)) * 0.3).sin();
        let separate = with_gradient(
            &base.narrow(0, 300, 40 * 70).view([40, 70]),
            &base.narrow(0, 0, 40 * 70).view([40, 70]).copy(),
        );
        // Each element of the gradient lies 300 behind that of the parameter.
        let (values, gradient) = (base.narrow(0, 300, 40 * 70), base.narrow(0, 0, 40 * 70));
        let overlapping = values.view([40, 70]).detach().set_requires_grad(true);
        grad::set(&overlapping, &gradient.view([40, 70]).detach()).unwrap();
        for parameter in [&separate, &overlapping] {
            make(one_group("w", parameter)).step().unwrap();
        }
        assert!(separate.equal(&overlapping), "{name}");
    }
    let parameters = [(); 2].map(|()| with_gradient(&values(), &values()));
    let mut lions = [0, 1].map(|i| {
        let group = one_group("w", &parameters[i]);
        Lion::new(group, LionConfig::default()).unwrap()
    });
    for (lion, parameter) in lions.iter_mut().zip(&parameters) {
        lion.step().unwrap();
        grad::clear(parameter).unwrap();
    }
    let momenta = [0, 1].map(|i| {
        let state = lions[i].state_dict().unwrap();
        state.tensors["w.exp_avg"].shallow_clone()
    });
    grad::set(&parameters[0], &momenta[0].copy()).unwrap();
    grad::set(&parameters[1], &momenta[1]).unwrap();
    for lion in &mut lions {
        lion.step().unwrap();
    }
    assert!(parameters[0].equal(&parameters[1]));
}

#[test]
fn a_parameter_in_the_memory_of_its_state_is_refused_with_both_named() {
    let parameter = with_gradient(&values(), &values());
    let mut lion = Lion::new(one_group("w", &parameter), LionConfig::default()).unwrap();
    lion.step().unwrap();
    let state = lion.state_dict().unwrap().tensors["w.exp_avg"].shallow_clone();
    let before = state.copy();
    parameter.shallow_clone().set_data(&state);
    let error = lion.step().unwrap_err();
    assert!(matches!(error, Error::SharedState { .. }), "{error}");
    let message = error.to_string();
    assert!(
        message.contains("`w`") && message.contains("`exp_avg`"),
        "{message}"
    );
    assert!(state.equal(&before));
    parameter.shallow_clone().set_data(&values());
    lion.step().unwrap();
}
