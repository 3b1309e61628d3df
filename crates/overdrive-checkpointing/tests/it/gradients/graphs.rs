//! Checkpoints in graphs that are used twice, retained, or differentiated again.

use super::*;

#[test]
fn gradients_accumulate_over_double_use_and_micro_batches() {
    let _generator = generator();
    let (blocks, x) = (blocks(1), input());
    let options = CheckpointOptions::default();
    let run = |checkpointed: bool| {
        for parameter in blocks[0].parameters() {
            overdrive_sys::grad::clear(parameter).unwrap();
        }
        overdrive_sys::grad::clear(&x).unwrap();
        tch::manual_seed(3);
        for _ in 0..3 {
            let mut y = x.shallow_clone();
            for _ in 0..2 {
                y = if checkpointed {
                    owned(&blocks, &y, &options)
                } else {
                    plain(&blocks, &y)
                };
            }
            y.square().sum(Kind::Float).backward();
        }
        let weights = blocks[0].parameters().map(|p| p.grad().copy());
        (weights, x.grad().copy())
    };
    assert_eq!(run(true), run(false));
}

#[test]
fn a_retained_graph_can_be_run_backward_again_with_every_policy() {
    let _generator = generator();
    let (blocks, x) = (blocks(2), input());
    let weights: Vec<&Tensor> = blocks.iter().flat_map(Block::parameters).collect();
    let retain = GradOptions {
        retain_graph: Some(true),
        ..GradOptions::default()
    };
    for options in all_options() {
        tch::manual_seed(5);
        let loss = owned(&blocks, &x, &options).square().sum(Kind::Float);
        let first = grad(&[&loss], &weights, &retain).unwrap();
        let second = grad(&[&loss], &weights, &retain).unwrap();
        assert_eq!(first, second);
        let last = grad(&[&loss], &weights, &GradOptions::default()).unwrap();
        assert_eq!(first, last);
        let error = grad(&[&loss], &weights, &GradOptions::default()).unwrap_err();
        assert!(error.to_string().contains("second time"), "{error}");
    }
}

#[test]
fn second_derivatives_go_through_a_checkpoint() {
    let _generator = crate::generator();
    let x = Tensor::from_slice(&[0.5f64, 1.5]).set_requires_grad(true);
    let second = |y: &Tensor| {
        let create = GradOptions {
            create_graph: true,
            ..GradOptions::default()
        };
        let first = grad(&[&y.sum(Kind::Double)], &[&x], &create).unwrap();
        let first = first[0].as_ref().unwrap().sum(Kind::Double);
        grad(&[&first], &[&x], &GradOptions::default())
            .unwrap()
            .remove(0)
            .unwrap()
    };
    let f = |x: &Tensor| (x * x).exp().sin();
    let expected = second(&f(&x));
    let y = checkpoint_with(&[&x], &CheckpointOptions::default(), move |inputs| {
        Ok((&inputs[0] * &inputs[0]).f_exp()?.f_sin()?)
    })
    .unwrap();
    assert_eq!(second(&y), expected);
}

#[test]
fn under_no_grad_and_without_anything_to_differentiate_the_closure_just_runs() {
    let _generator = crate::generator();
    let x = Tensor::ones([2], F32);
    let y = no_grad(|| {
        checkpoint_with(&[&x], &CheckpointOptions::default(), |inputs| {
            Ok(inputs[0].f_exp()?)
        })
        .unwrap()
    });
    assert!(!y.requires_grad());
    let y = checkpoint_with(&[&x], &CheckpointOptions::default(), |inputs| {
        Ok(inputs[0].f_exp()?)
    })
    .unwrap();
    assert!(!y.requires_grad());
}

#[test]
fn inputs_without_gradients_and_outputs_that_are_not_differentiable_pass_through() {
    let _generator = generator();
    let table = Tensor::randn([10, 4], F32).set_requires_grad(true);
    let tokens = Tensor::from_slice(&[1i64, 3, 3]);
    let captured = table.shallow_clone();
    let (embedded, mask, count) =
        checkpoint_with(&[&tokens], &CheckpointOptions::default(), move |inputs| {
            let embedded = Tensor::f_embedding(&captured, &inputs[0], -1, false, false)?.f_exp()?;
            let mask = inputs[0].f_gt(2)?;
            Ok((embedded, mask, 3usize))
        })
        .unwrap();
    assert!(embedded.requires_grad() && !mask.requires_grad());
    assert_eq!(count, 3);
    embedded.sum(Kind::Float).backward();
    let row = |i| table.grad().get(i).sum(Kind::Float).double_value(&[]);
    assert_eq!(row(0), 0.0);
    assert!(row(1) > 0.0);
    assert_eq!(table.grad().get(3), (table.get(3).exp() * 2.0).detach());
}

#[test]
fn several_outputs_may_be_run_backward_one_after_another() {
    let _generator = crate::generator();
    let x = Tensor::from_slice(&[1f32, 2.0]).set_requires_grad(true);
    let [a, b] = checkpoint_with(&[&x], &CheckpointOptions::default(), |inputs| {
        Ok([inputs[0].f_exp()?, inputs[0].f_sin()?])
    })
    .unwrap();
    a.sum(Kind::Float).backward();
    assert_eq!(x.grad(), x.exp().detach());
    overdrive_sys::grad::clear(&x).unwrap();
    b.sum(Kind::Float).backward();
    assert_eq!(x.grad(), x.cos().detach());
}
