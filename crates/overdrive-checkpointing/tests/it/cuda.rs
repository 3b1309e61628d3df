//! Tests on a GPU, where backward runs on libtorch's own threads.

use overdrive_checkpointing::{
    CheckpointOptions, OffloadOptions, SavePolicy, checkpoint, offload_saved_tensors, scope,
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
            checkpoint(&[x], &options, move |inputs| {
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
                .checkpoint(&[&x], &options, |inputs| {
                    Ok(inputs[0].f_exp()?.f_mul(&x)?)
                })
                .unwrap();
            let loss = y.sum(Kind::Float);
            match plain {
                true => loss.f_backward().unwrap(),
                false => scope.backward(&[&loss]).unwrap(),
            }
        });
        assert_eq!(
            x.grad(),
            x.exp().detach() * (&x.detach() + 1.0),
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
