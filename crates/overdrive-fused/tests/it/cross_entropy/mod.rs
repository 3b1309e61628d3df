//! The two cross-entropies against libtorch's operators in f64.

mod edge_cases;

use std::num::NonZeroUsize;

use crate::common::{assert_close, compare, labels, run, values};
use overdrive_autograd::{BackwardOptions, GradOptions, backward, grad};
use overdrive_fused::{
    CrossEntropyOptions, LinearCrossEntropyOptions, Reduction, cross_entropy, linear_cross_entropy,
};
use overdrive_precision::autocast;
use proptest::prelude::*;
use tch::{Device, Kind, Tensor};

/// The loss by its definition.
fn reference(logits: &Tensor, labels: &Tensor, options: &CrossEntropyOptions) -> Tensor {
    let logits = match options.softcap {
        Some(cap) => (logits / cap).tanh() * cap,
        None => logits.shallow_clone(),
    };
    let classes = logits.size()[logits.dim() - 1];
    let (logits, labels) = (logits.reshape([-1, classes]), labels.reshape([-1]));
    let counts = labels.ne(options.ignore_index);
    let log_p = logits.log_softmax(1, None);
    let target = labels.where_self(&counts, &labels.zeros_like());
    let nll = -log_p.gather(1, &target.unsqueeze(1), false).squeeze_dim(1);
    let smooth = -log_p.mean_dim([1i64].as_slice(), false, None::<Kind>);
    let lse = logits.logsumexp([1i64].as_slice(), false);
    let e = options.label_smoothing;
    let each = nll * (1.0 - e) + smooth * e + lse.square() * options.z_loss;
    let sum = (each * &counts).sum(Kind::Double);
    match options.reduction {
        Reduction::Sum => sum,
        Reduction::Mean => sum / counts.sum(Kind::Double),
    }
}

fn any_options() -> impl Strategy<Value = CrossEntropyOptions> {
    (any::<bool>(), 0u8..2, 0u8..2, 0u8..2).prop_map(|(sum, smooth, z, cap)| CrossEntropyOptions {
        reduction: if sum { Reduction::Sum } else { Reduction::Mean },
        label_smoothing: f64::from(smooth) * 0.1,
        z_loss: f64::from(z) * 1e-2,
        softcap: (cap == 1).then_some(3.0),
        ..CrossEntropyOptions::default()
    })
}

/// The loss in f32; in bf16 gradients of logits are rounded to 8 bits, and products of them too.
const KINDS: [(Kind, f64); 3] = [
    (Kind::Float, 5e-6),
    (Kind::BFloat16, 1.5e-2),
    (Kind::Half, 2e-3),
];

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn cross_entropy_and_its_gradient_equal_the_definition(
        rows in 1i64..40, classes in 1i64..300, every in 0usize..5, which in 0usize..3,
        options in any_options(), reuse in any::<bool>(), seed in 0u64..1000,
    ) {
        prop_assume!(every != 1);
        let (kind, tolerance) = KINDS[which];
        let labels = labels(&[rows], classes, every, seed);
        let options = CrossEntropyOptions { reuse_logits: reuse, ..options };
        let inputs = [values(&[rows, classes], seed) * 4.0];
        compare(&inputs, kind, tolerance,
            // Through a copy: backward may use the memory of what it is given.
            |x| vec![cross_entropy(&(&x[0] * 1.0), &labels, &options).unwrap().loss],
            |x| vec![reference(&x[0], &labels, &options)]);
    }

    #[test]
    fn linear_cross_entropy_and_its_gradients_equal_the_definition(
        rows in 1i64..60, classes in 1i64..200, width in 1i64..40, every in 0usize..5,
        chunk in 1usize..70, bias in any::<bool>(), which in 0usize..3,
        options in any_options(), seed in 0u64..1000,
    ) {
        prop_assume!(every != 1);
        // What f16 and bf16 products do depends on the machine; they have a test of their own.
        let (kind, tolerance) = if which == 2 { (Kind::Double, 1e-12) } else { KINDS[0] };
        let labels = labels(&[rows], classes, every, seed);
        let mut inputs = vec![values(&[rows, width], seed), values(&[classes, width], seed + 1)];
        if bias {
            inputs.push(values(&[classes], seed + 2));
        }
        compare(&inputs, kind, tolerance,
            |x| {
                let options = LinearCrossEntropyOptions {
                    loss: options, bias: x.get(2), chunk_rows: NonZeroUsize::new(chunk),
                    ..LinearCrossEntropyOptions::default()
                };
                vec![linear_cross_entropy(&x[0], &x[1], &labels, &options).unwrap().loss]
            },
            |x| vec![reference(&x[0].linear(&x[1], x.get(2)), &labels, &options)]);
    }
}

#[test]
fn a_real_vocabulary_in_several_chunks_equals_the_definition() {
    let labels = labels(&[3, 100], 5003, 7, 1);
    let inputs = [values(&[3, 100, 64], 1), values(&[5003, 64], 2) * 0.3];
    compare(
        &inputs,
        Kind::Float,
        5e-6,
        |x| {
            let options = LinearCrossEntropyOptions {
                chunk_rows: NonZeroUsize::new(64),
                ..LinearCrossEntropyOptions::default()
            };
            let output = linear_cross_entropy(&x[0], &x[1], &labels, &options).unwrap();
            assert_eq!(output.tokens().unwrap(), 258);
            vec![output.loss]
        },
        |x| {
            let logits = x[0].linear(&x[1], None::<&Tensor>);
            vec![reference(&logits, &labels, &CrossEntropyOptions::default())]
        },
    );
}

#[test]
fn low_precision_heads_are_within_the_rounding_of_their_logits() {
    let labels = labels(&[70], 90, 0, 1);
    let inputs = [values(&[70, 32], 1), values(&[90, 32], 2)];
    for chunk in [16, 70] {
        let options = LinearCrossEntropyOptions {
            chunk_rows: NonZeroUsize::new(chunk),
            ..LinearCrossEntropyOptions::default()
        };
        // Logits of a size around 5 are rounded to 8 bits: by 0.016 at most.
        compare(
            &inputs,
            Kind::BFloat16,
            1.6e-2,
            |x| {
                let loss = linear_cross_entropy(&x[0], &x[1], &labels, &options)
                    .unwrap()
                    .loss;
                assert_eq!(loss.kind(), Kind::Float);
                vec![loss]
            },
            |x| {
                let logits = x[0].linear(&x[1], None::<&Tensor>);
                vec![reference(&logits, &labels, &CrossEntropyOptions::default())]
            },
        );
    }
}

#[test]
fn autocast_decides_the_dtype_of_the_logits_as_it_does_for_linear() {
    let labels = labels(&[20], 30, 0, 1);
    let (hidden, weight) = (
        values(&[20, 16], 1),
        values(&[30, 16], 2).set_requires_grad(true),
    );
    let options = LinearCrossEntropyOptions::default();
    let exact = linear_cross_entropy(&hidden, &weight, &labels, &options)
        .unwrap()
        .loss;
    let (loss, composed) = {
        let _guard = autocast(Device::Cpu, Kind::BFloat16).unwrap();
        let loss = linear_cross_entropy(&hidden, &weight, &labels, &options)
            .unwrap()
            .loss;
        let logits = hidden.linear(&weight, None::<&Tensor>);
        assert_eq!(logits.kind(), Kind::BFloat16);
        (
            loss,
            logits.cross_entropy_loss(&labels, None::<&Tensor>, tch::Reduction::Mean, -100, 0.0),
        )
    };
    assert_close("loss", &loss, &composed, 1e-6);
    assert_ne!(loss.double_value(&[]), exact.double_value(&[]));
    loss.backward();
    assert_eq!(weight.grad().kind(), Kind::Float);
}

#[test]
fn the_loss_equals_libtorchs_for_every_reduction_and_smoothing() {
    let (logits, labels) = (values(&[50, 77], 1) * 3.0, labels(&[50], 77, 4, 2));
    for (reduction, theirs) in [
        (Reduction::Mean, tch::Reduction::Mean),
        (Reduction::Sum, tch::Reduction::Sum),
    ] {
        for label_smoothing in [0.0, 0.1, 1.0] {
            let options = CrossEntropyOptions {
                reduction,
                label_smoothing,
                ..CrossEntropyOptions::default()
            };
            let ours = cross_entropy(&logits, &labels, &options).unwrap();
            let theirs =
                logits.cross_entropy_loss(&labels, None::<&Tensor>, theirs, -100, label_smoothing);
            assert_close("loss", &ours.loss, &theirs, 1e-6);
            assert_eq!(ours.tokens().unwrap(), 38);
        }
    }
}

#[test]
fn frozen_heads_and_frozen_hidden_states_have_no_gradient() {
    let labels = labels(&[9], 20, 0, 1);
    let options = LinearCrossEntropyOptions::default();
    let both = [values(&[9, 6], 1), values(&[20, 6], 2)];
    let [_, exact] = run(&both, Kind::Float, |x| {
        vec![
            linear_cross_entropy(&x[0], &x[1], &labels, &options)
                .unwrap()
                .loss,
        ]
    });
    for frozen in 0..2 {
        let leaves: Vec<Tensor> = (0..2)
            .map(|index| both[index].copy().set_requires_grad(index != frozen))
            .collect();
        let loss = linear_cross_entropy(&leaves[0], &leaves[1], &labels, &options)
            .unwrap()
            .loss;
        (loss * values(&[], 99)).backward();
        assert!(!leaves[frozen].grad().defined());
        assert_close(
            "gradient",
            &leaves[1 - frozen].grad(),
            &exact[1 - frozen],
            1e-6,
        );
    }
    let plain = linear_cross_entropy(&both[0], &both[1], &labels, &options)
        .unwrap()
        .loss;
    assert!(!plain.requires_grad());
}

#[test]
fn the_gradient_is_scaled_by_what_comes_from_above() {
    let labels = labels(&[9], 20, 0, 1);
    let gradient = |by: f64| {
        let weight = values(&[20, 6], 2).set_requires_grad(true);
        let options = LinearCrossEntropyOptions::default();
        let loss = linear_cross_entropy(&values(&[9, 6], 1), &weight, &labels, &options)
            .unwrap()
            .loss;
        (loss * by).backward();
        weight.grad()
    };
    assert_eq!(gradient(4.0), gradient(1.0) * 4.0);
}

#[test]
fn a_second_backward_pass_works_only_where_it_was_asked_for() {
    let labels = labels(&[9], 20, 0, 1);
    let loss = |retain_graph| {
        let weight = values(&[20, 6], 2).set_requires_grad(true);
        let options = LinearCrossEntropyOptions {
            retain_graph,
            ..LinearCrossEntropyOptions::default()
        };
        let output = linear_cross_entropy(&values(&[9, 6], 1), &weight, &labels, &options).unwrap();
        (weight, output.loss * 2.0)
    };
    let keep = GradOptions {
        retain_graph: Some(true),
        ..GradOptions::default()
    };
    let (weight, kept) = loss(true);
    let first = grad(&[&kept], &[&weight], &keep)
        .unwrap()
        .remove(0)
        .unwrap();
    let second = grad(&[&kept], &[&weight], &keep)
        .unwrap()
        .remove(0)
        .unwrap();
    assert_eq!(first, second);

    let (weight, taken) = loss(false);
    grad(&[&taken], &[&weight], &keep).unwrap();
    let error = grad(&[&taken], &[&weight], &keep).unwrap_err().to_string();
    assert!(error.contains("a second backward pass"), "{error}");
    assert!(error.contains("set retain_graph to true"), "{error}");
}

#[test]
fn a_second_derivative_is_refused() {
    let labels = labels(&[9], 20, 0, 1);
    let weight = values(&[20, 6], 2).set_requires_grad(true);
    let options = LinearCrossEntropyOptions::default();
    let loss = linear_cross_entropy(&values(&[9, 6], 1), &weight, &labels, &options)
        .unwrap()
        .loss
        .square();
    let create = GradOptions {
        create_graph: true,
        ..GradOptions::default()
    };
    let first = grad(&[&loss], &[&weight], &create)
        .unwrap()
        .remove(0)
        .unwrap();
    let again = backward(&[&first.sum(Kind::Float)], &BackwardOptions::default());
    let error = again.unwrap_err().to_string();
    assert!(error.contains("linear_cross_entropy"), "{error}");
}

#[test]
fn labels_in_the_memory_of_the_logits_are_read_before_the_gradient_is_written_there() {
    let gradient = |reuse_logits: bool| {
        // The zeros of the first row are four labels of 64 bits.
        let logits = values(&[4, 8], 1);
        let _zeros = logits.get(0).zero_();
        let labels = logits.view(-1).view_dtype(Kind::Int64).narrow(0, 0, 4);
        let logits = logits.set_requires_grad(true);
        let options = CrossEntropyOptions {
            reuse_logits,
            ..CrossEntropyOptions::default()
        };
        let loss = cross_entropy(&logits, &labels, &options).unwrap().loss;
        loss.backward();
        logits.grad()
    };
    assert_eq!(gradient(true), gradient(false));
}

#[test]
fn reusing_the_logits_puts_the_gradient_into_their_memory() {
    let leaf = values(&[4, 20], 1).set_requires_grad(true);
    let logits = &leaf * 1.0;
    let options = CrossEntropyOptions {
        reuse_logits: true,
        ..CrossEntropyOptions::default()
    };
    let labels = labels(&[4], 20, 0, 1);
    let loss = cross_entropy(&logits, &labels, &options).unwrap().loss;
    loss.backward();
    assert_eq!(logits.detach(), leaf.grad());
}

#[test]
#[ignore = "needs a CUDA GPU"]
fn chunks_on_a_gpu_are_summed_in_f32() {
    let device = Device::Cuda(0);
    let (hidden, weight) = (values(&[1024, 64], 31), values(&[500, 64], 32));
    let labels = labels(&[1024], 500, 7, 33);
    let run = |kind: Kind, device: Device, chunk_rows| {
        let [hidden, weight] = [&hidden, &weight].map(|tensor| {
            let tensor = tensor.to_kind(kind).to_device(device);
            tensor.set_requires_grad(true)
        });
        let options = LinearCrossEntropyOptions {
            chunk_rows: NonZeroUsize::new(chunk_rows),
            ..LinearCrossEntropyOptions::default()
        };
        let labels = labels.to_device(device);
        let output = linear_cross_entropy(&hidden, &weight, &labels, &options).unwrap();
        output.loss.backward();
        let gradients = [hidden.grad(), weight.grad()];
        gradients.map(|gradient| gradient.to_device(Device::Cpu).to_kind(Kind::Double))
    };
    let exact = run(Kind::Double, Device::Cpu, 1024);
    for chunk_rows in [64, 1024] {
        let found = run(Kind::BFloat16, device, chunk_rows);
        for (found, exact) in found.iter().zip(&exact) {
            let error = (found - exact).abs().max() / exact.abs().max();
            let error = error.double_value(&[]);
            assert!(error < 1.6e-2, "{chunk_rows} rows: {error}");
        }
    }
}
