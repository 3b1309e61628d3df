//! Tests on a GPU, where backward runs on libtorch's own threads.

use overdrive_attention::{AttentionOptions, Backend, attention};
use overdrive_checkpointing::{
    CheckpointOptions, OffloadOptions, SavePolicy, checkpoint_with, measure_blocks,
    offload_saved_tensors, scope,
};
use overdrive_sys::memory;
use tch::{Cuda, Device, Kind, Tensor};

const N: i64 = 1024;

const DEVICE: Device = Device::Cuda(0);

fn forward(x: &Tensor, weight: &Tensor) -> Result<Tensor, tch::TchError> {
    x.f_matmul(weight)?
        .f_gelu("none")?
        .f_dropout(0.2, true)?
        .f_tanh()
}

/// Gradients of the input and the weight for eight layers that `layer` runs.
fn gradients(device: Device, layer: impl Fn(&Tensor, &Tensor) -> Tensor) -> [Tensor; 2] {
    tch::manual_seed(3);
    let leaf = || {
        (Tensor::randn([N, N], (Kind::Float, device)) * 0.02)
            .detach()
            .set_requires_grad(true)
    };
    let (x, weight) = (leaf(), leaf());
    let y = (0..8).fold(x.shallow_clone(), |x, _| layer(&x, &weight));
    y.square().sum(Kind::Float).backward();
    [x.grad(), weight.grad()]
}

#[test]
#[ignore = "needs a CUDA GPU"]
fn on_a_gpu_gradients_equal_the_plain_run() {
    let _generator = crate::generator();
    let device = DEVICE;
    let expected = gradients(device, |x, weight| forward(x, weight).unwrap());
    for policy in [SavePolicy::Nothing, SavePolicy::Matmuls] {
        let options = CheckpointOptions::keeping(policy);
        let found = gradients(device, |x, weight| {
            let weight = weight.shallow_clone();
            checkpoint_with(&[x], &options, move |inputs| {
                Ok(forward(&inputs[0], &weight)?)
            })
            .unwrap()
        });
        assert_eq!(found, expected);
    }
}

#[test]
#[ignore = "needs a CUDA GPU"]
fn on_a_gpu_a_scope_runs_every_backward_on_its_own_thread() {
    let _generator = crate::generator();
    for plain in [false, true] {
        let x = Tensor::randn([N], (Kind::Float, DEVICE)).set_requires_grad(true);
        let options = CheckpointOptions::default();
        scope(|scope| {
            let y = scope
                .checkpoint_with(&[&x], &options, |inputs| {
                    Ok(inputs[0].f_exp()?.f_mul(&x)?)
                })
                .unwrap();
            let loss = y.sum(Kind::Float);
            match plain {
                true => loss.f_backward().unwrap(),
                false => scope.backward(&[&loss]).unwrap(),
            }
        });
        // Autograd adds x · exp(x) and exp(x), each of them rounded.
        let exact = x.exp().detach() * (&x.detach() + 1.0);
        assert!(
            x.grad().allclose(&exact, 1e-5, 1e-6, false),
            "plain: {plain}"
        );
    }
}

#[test]
#[ignore = "needs a CUDA GPU"]
fn on_a_gpu_offloaded_tensors_leave_its_memory_and_come_back() {
    let _generator = crate::generator();
    let device = DEVICE;
    let expected = gradients(device, |x, weight| forward(x, weight).unwrap());
    for pinned in [true, false] {
        for prefetch in [0, 3] {
            let options = OffloadOptions {
                to: overdrive_checkpointing::SavedTo::Host { pinned },
                prefetch,
                ..OffloadOptions::default()
            };
            let found = gradients(device, |x, weight| {
                let guard = offload_saved_tensors(&options, &[]).unwrap();
                let y = forward(x, weight).unwrap();
                assert!(guard.stats().bytes > 0);
                y
            });
            assert_eq!(found, expected);
        }
    }
    let held = |offload: bool| {
        let x = Tensor::randn([N, N], (Kind::Float, device)).set_requires_grad(true);
        let before = memory::stats(device).unwrap().allocated_bytes;
        let _guard =
            offload.then(|| offload_saved_tensors(&OffloadOptions::default(), &[]).unwrap());
        let y = (0..8).fold(x.shallow_clone(), |x, _| x.tanh());
        Cuda::synchronize(0);
        let held = memory::stats(device).unwrap().allocated_bytes - before;
        drop(y);
        held
    };
    // Eight results without, the last one with.
    assert!(held(true) * 3 < held(false));
}

#[test]
#[ignore = "needs a CUDA GPU"]
fn flash_attention_on_a_gpu_is_checkpointed_offloaded_and_measured() {
    let _generator = crate::generator();
    // Its kernel saves the random state as unsigned integers, which tch's dtypes lack.
    let flash = |x: &Tensor| {
        let options = AttentionOptions {
            dropout_p: 0.1,
            backend: Backend::Flash,
            ..AttentionOptions::causal()
        };
        attention(x, x, x, &options)
    };
    let run = |kind: Kind, forward: &dyn Fn(&Tensor) -> Tensor| {
        tch::manual_seed(5);
        let x = Tensor::randn([2, 4, 64, 64], (kind, DEVICE)).set_requires_grad(true);
        let y = forward(&x);
        y.square().sum(Kind::Float).backward();
        (y.detach(), x.grad())
    };
    for kind in [Kind::BFloat16, Kind::Half] {
        let (y, gradient) = run(kind, &|x| flash(x).unwrap());
        // Backward of flash attention adds up in no fixed order.
        let same = |(found, found_gradient): (Tensor, Tensor)| {
            assert_eq!(found, y);
            let apart = (found_gradient - &gradient).abs().max().double_value(&[]);
            assert!(
                apart < 0.05 * gradient.abs().max().double_value(&[]),
                "{apart}"
            );
        };
        for policy in [SavePolicy::Nothing, SavePolicy::Attention] {
            let options = CheckpointOptions::keeping(policy);
            same(run(kind, &|x| {
                checkpoint_with(&[x], &options, move |inputs| Ok(flash(&inputs[0])?)).unwrap()
            }));
        }
        let options = OffloadOptions {
            min_bytes: 1,
            ..OffloadOptions::default()
        };
        same(run(kind, &|x| {
            let _offload = offload_saved_tensors(&options, &[]).unwrap();
            flash(x).unwrap()
        }));
        let x = Tensor::randn([2, 4, 64, 64], (kind, DEVICE));
        let costs = measure_blocks(1, &x, |_, x| Ok(flash(x)?)).unwrap();
        assert!(costs[0].saved_bytes > 0);
    }
}
