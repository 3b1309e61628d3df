//! Gradients of checkpointed regions, compared bit for bit with those without checkpoints.

mod graphs;

use overdrive_autograd::{
    GradOptions, backward_stays_on_this_thread, grad, no_grad, register_hook,
};
use overdrive_checkpointing::{
    CheckpointOptions, DeterminismCheck, Error, RegionResult, SavePolicy, Shared, checkpoint,
    checkpoint_with, scope,
};
use overdrive_precision::autocast;
use tch::{Device, Kind, Tensor};

use crate::generator;

const F32: (Kind, Device) = (Kind::Float, Device::Cpu);
const DIM: i64 = 16;

/// A pre-norm attention and MLP block with dropout in both.
struct Block {
    qkv: Tensor,
    out: Tensor,
    up: Tensor,
    down: Tensor,
    norm: Tensor,
}

impl Block {
    fn new() -> Self {
        let weight = |rows, columns| {
            (Tensor::randn([rows, columns], F32) * 0.2)
                .detach()
                .set_requires_grad(true)
        };
        Self {
            qkv: weight(3 * DIM, DIM),
            out: weight(DIM, DIM),
            up: weight(4 * DIM, DIM),
            down: weight(DIM, 4 * DIM),
            norm: Tensor::ones([DIM], F32).set_requires_grad(true),
        }
    }

    fn parameters(&self) -> [&Tensor; 5] {
        [&self.qkv, &self.out, &self.up, &self.down, &self.norm]
    }

    fn shallow_clone(&self) -> Self {
        Self {
            qkv: self.qkv.shallow_clone(),
            out: self.out.shallow_clone(),
            up: self.up.shallow_clone(),
            down: self.down.shallow_clone(),
            norm: self.norm.shallow_clone(),
        }
    }

    /// `(B, T, D)` to the same, four heads.
    fn forward(&self, x: &Tensor) -> RegionResult<Tensor> {
        let (b, t, _) = x.size3()?;
        let none = None::<&Tensor>;
        let normed = x.f_layer_norm([DIM], Some(&self.norm), none, 1e-5, false)?;
        let qkv = normed
            .f_linear(&self.qkv, none)?
            .f_view([b, t, 3, 4, DIM / 4])?;
        let parts = qkv.f_permute([2, 0, 3, 1, 4])?.f_unbind(0)?;
        let attended = Tensor::f_scaled_dot_product_attention(
            &parts[0], &parts[1], &parts[2], none, 0.0, true, None, false,
        )?;
        let attended = attended.f_transpose(1, 2)?.f_reshape([b, t, DIM])?;
        let x = x.f_add(&attended.f_linear(&self.out, none)?.f_dropout(0.2, true)?)?;
        let normed = x.f_layer_norm([DIM], Some(&self.norm), none, 1e-5, false)?;
        let hidden = normed
            .f_linear(&self.up, none)?
            .f_gelu("none")?
            .f_dropout(0.2, true)?;
        Ok(x.f_add(&hidden.f_linear(&self.down, none)?)?)
    }
}

fn blocks(n: usize) -> Vec<Block> {
    tch::manual_seed(7);
    (0..n).map(|_| Block::new()).collect()
}

fn input() -> Tensor {
    tch::manual_seed(11);
    Tensor::randn([2, 6, DIM], F32).set_requires_grad(true)
}

/// The gradients of every weight and of the input, for a loss over what `run` makes.
fn gradients(blocks: &[Block], x: &Tensor, run: impl FnOnce(&Tensor) -> Tensor) -> Vec<Tensor> {
    tch::manual_seed(23);
    let loss = run(x).to_kind(Kind::Float).square().mean(Kind::Float);
    let mut inputs: Vec<&Tensor> = blocks.iter().flat_map(Block::parameters).collect();
    inputs.push(x);
    let found = grad(&[&loss], &inputs, &GradOptions::default()).unwrap();
    found.into_iter().map(Option::unwrap).collect()
}

fn plain(blocks: &[Block], x: &Tensor) -> Tensor {
    blocks
        .iter()
        .fold(x.shallow_clone(), |x, block| block.forward(&x).unwrap())
}

fn owned(blocks: &[Block], x: &Tensor, options: &CheckpointOptions) -> Tensor {
    blocks.iter().fold(x.shallow_clone(), |x, block| {
        let block = block.shallow_clone();
        checkpoint_with(&[&x], options, move |inputs| block.forward(&inputs[0])).unwrap()
    })
}

fn all_options() -> Vec<CheckpointOptions> {
    let policies = [
        SavePolicy::Nothing,
        SavePolicy::Matmuls,
        SavePolicy::Attention,
        SavePolicy::MatmulsAndAttention,
        SavePolicy::Operators(vec![
            "aten::gelu".to_owned(),
            "aten::native_layer_norm".to_owned(),
        ]),
        SavePolicy::custom(|call| call.occurrence % 2 == 0),
    ];
    let mut all = Vec::new();
    for policy in policies {
        for early_stop in [true, false] {
            for debug in [true, false] {
                all.push(CheckpointOptions {
                    policy: policy.clone(),
                    early_stop,
                    debug,
                    ..CheckpointOptions::default()
                });
            }
        }
    }
    all
}

#[test]
fn gradients_with_dropout_equal_the_plain_run_with_every_option() {
    let _generator = generator();
    let (blocks, x) = (blocks(3), input());
    let expected = gradients(&blocks, &x, |x| plain(&blocks, x));
    for options in all_options() {
        let found = gradients(&blocks, &x, |x| owned(&blocks, x, &options));
        assert_eq!(found, expected, "{options:?}");
    }
}

#[test]
fn gradients_under_bf16_autocast_equal_the_plain_run_under_it() {
    let _generator = generator();
    let (blocks, x) = (blocks(2), input());
    let in_bf16 = |run: &dyn Fn(&Tensor) -> Tensor, x: &Tensor| {
        let _autocast = autocast(Device::Cpu, Kind::BFloat16).unwrap();
        run(x)
    };
    let expected = gradients(&blocks, &x, |x| in_bf16(&|x| plain(&blocks, x), x));
    let fp32 = gradients(&blocks, &x, |x| plain(&blocks, x));
    assert_ne!(expected, fp32, "autocast was off");
    for options in all_options() {
        let found = gradients(&blocks, &x, |x| {
            in_bf16(&|x| owned(&blocks, x, &options), x)
        });
        assert_eq!(found, expected, "{options:?}");
    }
    // Backward inside of the region too, where the casts of weights are still cached.
    let found = {
        let _autocast = autocast(Device::Cpu, Kind::BFloat16).unwrap();
        gradients(&blocks, &x, |x| {
            owned(&blocks, x, &CheckpointOptions::default())
        })
    };
    let expected = {
        let _autocast = autocast(Device::Cpu, Kind::BFloat16).unwrap();
        gradients(&blocks, &x, |x| plain(&blocks, x))
    };
    assert_eq!(found, expected);
}

#[test]
fn nested_checkpoints_equal_the_plain_run() {
    let _generator = generator();
    let (blocks, x) = (blocks(4), input());
    let expected = gradients(&blocks, &x, |x| plain(&blocks, x));
    for options in all_options() {
        let inner_options = options.clone();
        let found = gradients(&blocks, &x, |x| {
            blocks.chunks(2).fold(x.shallow_clone(), |x, pair| {
                let pair: Vec<Block> = pair.iter().map(Block::shallow_clone).collect();
                let inner_options = inner_options.clone();
                checkpoint_with(&[&x], &options, move |inputs| {
                    let mut x = inputs[0].shallow_clone();
                    for block in &pair {
                        let block = block.shallow_clone();
                        x = checkpoint_with(&[&x], &inner_options, move |inputs| {
                            let block = block.shallow_clone();
                            checkpoint_with(
                                &[&inputs[0]],
                                &CheckpointOptions::default(),
                                move |inputs| block.forward(&inputs[0]),
                            )
                            .map_err(Into::into)
                        })?;
                    }
                    Ok(x)
                })
                .unwrap()
            })
        });
        assert_eq!(found, expected, "{options:?}");
    }
}

#[test]
fn a_scope_lends_layers_and_nests() {
    let _generator = generator();
    let (blocks, x) = (blocks(2), input());
    let expected = gradients(&blocks, &x, |x| plain(&blocks, x));
    let found = scope(|scope| {
        gradients(&blocks, &x, |x| {
            blocks.iter().fold(x.shallow_clone(), |x, block| {
                scope
                    .checkpoint(&x, move |x| scope.checkpoint(x, |x| block.forward(x)))
                    .unwrap()
            })
        })
    });
    assert_eq!(found, expected);
}

#[test]
fn a_shared_layer_is_lent_to_its_checkpoint() {
    let _generator = generator();
    let (blocks, x) = (blocks(2), input());
    let expected = gradients(&blocks, &x, |x| plain(&blocks, x));
    let handles = blocks.iter().map(Block::shallow_clone).map(Shared::new);
    let shared: Vec<Shared<Block>> = handles.collect();
    let found = gradients(&blocks, &x, |x| {
        shared.iter().fold(x.shallow_clone(), |x, block| {
            block.checkpoint(&x, |block, x| block.forward(x)).unwrap()
        })
    });
    assert_eq!(found, expected);
}

#[test]
fn the_short_form_takes_closures_with_and_without_a_result() {
    let _generator = generator();
    let x = Tensor::from_slice(&[1f32, 2.0]).set_requires_grad(true);
    let y = checkpoint(&x, |x| x.exp()).unwrap();
    let z = checkpoint(&y, |y| y.f_exp()).unwrap();
    z.sum(Kind::Float).backward();
    assert_eq!(x.grad(), (x.exp().exp() * x.exp()).detach());
    let wrong_shape = Tensor::ones([3], F32);
    let error = checkpoint(&x, move |x| x.f_add(&wrong_shape)).unwrap_err();
    assert!(matches!(error, Error::Closure(_)), "{error}");
}

#[test]
fn backward_after_its_scope_is_an_error_that_says_so() {
    let _generator = generator();
    let blocks = blocks(1);
    let x = input();
    let y = scope(|scope| scope.checkpoint(&x, |x| blocks[0].forward(x)).unwrap());
    let error = y.sum(Kind::Float).f_backward().unwrap_err().to_string();
    assert!(error.contains("called after its scope ended"), "{error}");
}

#[test]
fn without_preserving_the_random_state_dropout_differs_and_with_it_the_generator_goes_on() {
    let _generator = generator();
    let x = Tensor::ones([1000], F32).set_requires_grad(true);
    let run = |preserve_rng_state| {
        tch::manual_seed(1);
        overdrive_sys::grad::clear(&x).unwrap();
        let options = CheckpointOptions {
            preserve_rng_state,
            ..CheckpointOptions::default()
        };
        let y = checkpoint_with(
            &[&x],
            &options,
            |inputs| Ok(inputs[0].f_dropout(0.5, true)?),
        )
        .unwrap();
        y.sum(Kind::Float).backward();
        let after = Tensor::rand([1], F32);
        (x.grad() == y.detach(), after)
    };
    let (same, after) = run(true);
    assert!(same);
    assert!(!run(false).0);
    tch::manual_seed(1);
    let _ = x.dropout(0.5, true);
    assert_eq!(
        Tensor::rand([1], F32),
        after,
        "the recomputation moved the generator"
    );
}

#[test]
fn a_closure_may_run_backward_itself() {
    let _generator = crate::generator();
    let x = Tensor::from_slice(&[1f32, 2.0]).set_requires_grad(true);
    let y = checkpoint_with(&[&x], &CheckpointOptions::default(), |inputs| {
        let inner = inputs[0].f_square()?.f_exp()?.f_sum(Kind::Float)?;
        let create = GradOptions {
            create_graph: true,
            ..GradOptions::default()
        };
        let slope = grad(&[&inner], &[&inputs[0]], &create)?
            .remove(0)
            .ok_or("no gradient")?;
        Ok(slope.f_square()?)
    })
    .unwrap();
    let found = grad(&[&y.sum(Kind::Float)], &[&x], &GradOptions::default()).unwrap();
    let plain = {
        let inner = x.square().exp().sum(Kind::Float);
        let create = GradOptions {
            create_graph: true,
            ..GradOptions::default()
        };
        let slope = grad(&[&inner], &[&x], &create).unwrap().remove(0).unwrap();
        grad(
            &[&slope.square().sum(Kind::Float)],
            &[&x],
            &GradOptions::default(),
        )
        .unwrap()
    };
    assert_eq!(found, plain);
}

#[test]
fn another_thread_may_run_backward_over_an_owned_checkpoint_and_not_over_a_lent_one() {
    let _generator = crate::generator();
    let x = Tensor::from_slice(&[1f32, 2.0]).set_requires_grad(true);
    let y = checkpoint(&x, |x| x.f_exp()).unwrap();
    std::thread::spawn(move || y.sum(Kind::Float).backward())
        .join()
        .unwrap();
    assert_eq!(x.grad(), x.exp().detach());
    let error = scope(|scope| {
        let y = scope.checkpoint(&x, |x| x.f_exp()).unwrap();
        std::thread::spawn(move || y.sum(Kind::Float).f_backward())
            .join()
            .unwrap()
    });
    let error = error.unwrap_err().to_string();
    assert!(error.contains("BackwardOnThisThread"), "{error}");
}

#[test]
fn backward_of_any_kind_stays_on_the_thread_of_a_scope() {
    let _generator = crate::generator();
    let x = Tensor::from_slice(&[1f32, 2.0]).set_requires_grad(true);
    let stays = || {
        let (send, receive) = std::sync::mpsc::channel();
        let y = x.exp();
        // Runs inside the backward pass.
        register_hook(&y, move |_| {
            send.send(backward_stays_on_this_thread())?;
            Ok(None)
        })
        .unwrap();
        // As an accumulator and data parallel training call it, which do not know the scope.
        y.sum(Kind::Float).f_backward().unwrap();
        receive.recv().unwrap()
    };
    assert!(!stays());
    scope(|_| {
        assert!(stays());
        scope(|_| assert!(stays()));
        assert!(stays());
    });
    assert!(!stays());
    let panicked = std::panic::catch_unwind(|| scope(|_| panic!("inside")));
    assert!(panicked.is_err() && !stays());
}

#[test]
fn options_round_trip_through_json_and_refuse_unknown_keys() {
    let _generator = crate::generator();
    let options = CheckpointOptions {
        determinism_check: DeterminismCheck::None,
        policy: SavePolicy::MatmulsAndAttention,
        ..CheckpointOptions::default()
    };
    let text = serde_json::to_string(&options).unwrap();
    assert!(
        text.contains(r#""policy":"matmuls_and_attention""#),
        "{text}"
    );
    assert_eq!(
        serde_json::from_str::<CheckpointOptions>(&text).unwrap(),
        options
    );
    assert!(serde_json::from_str::<CheckpointOptions>(r#"{"polcy": "nothing"}"#).is_err());
}
