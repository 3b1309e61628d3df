//! Saved tensors that are offloaded to a file and fetched back.

use overdrive_checkpointing::{
    CheckpointOptions, OffloadOptions, SavedTo, checkpoint_with, offload_saved_tensors,
};
use tch::{Device, Kind, Tensor};

const F32: (Kind, Device) = (Kind::Float, Device::Cpu);

fn to_disk(min_bytes: u64) -> OffloadOptions {
    OffloadOptions {
        to: SavedTo::Disk { folder: None },
        min_bytes,
        prefetch: 2,
    }
}

fn network(x: &Tensor, weight: &Tensor) -> Tensor {
    // Views, a permuted layout, bool and integer tensors, a tensor saved by two operators.
    let y = x.matmul(weight);
    let gated = y
        .masked_fill(&y.le(0.0), 0.0)
        .transpose(0, 1)
        .softmax(-1, Kind::Float);
    let picked = gated.index_select(0, &Tensor::from_slice(&[1i64, 0, 3]));
    (picked.exp() * picked.sin())
        .to_kind(Kind::BFloat16)
        .square()
        .to_kind(Kind::Float)
}

#[test]
fn gradients_through_a_file_equal_the_plain_run() {
    let _generator = crate::generator();
    let x = Tensor::randn([32, 16], F32).set_requires_grad(true);
    let weight = Tensor::randn([16, 16], F32).set_requires_grad(true);
    let run = |options: Option<&OffloadOptions>| {
        for leaf in [&x, &weight] {
            overdrive_sys::grad::clear(leaf).unwrap();
        }
        let (y, stats) = match options {
            Some(options) => {
                let guard = offload_saved_tensors(options, &[]).unwrap();
                let y = network(&x, &weight);
                (y, guard.stats())
            }
            None => (network(&x, &weight), Default::default()),
        };
        y.sum(Kind::Float).backward();
        (x.grad().copy(), weight.grad().copy(), stats)
    };
    let (x_grad, weight_grad, _) = run(None);
    for min_bytes in [0, 1500] {
        let (x_found, weight_found, stats) = run(Some(&to_disk(min_bytes)));
        assert_eq!((&x_found, &weight_found), (&x_grad, &weight_grad));
        assert!(
            stats.tensors > 0 && stats.bytes > 0 && stats.kept > 0,
            "{stats:?}"
        );
    }
}

#[test]
fn a_tensor_that_two_operators_save_is_offloaded_once_and_weights_stay() {
    let _generator = crate::generator();
    let weight = Tensor::randn([64, 64], F32).set_requires_grad(true);
    let frozen = Tensor::randn([64, 64], F32);
    let guard = offload_saved_tensors(&to_disk(0), &[&frozen]).unwrap();
    let x = Tensor::randn([8, 64], F32);
    let y = x.matmul(&weight); // x goes, the weight stays
    let z = y.matmul(&frozen.tr()); // the frozen weight stays; y is not needed
    let _out = z.exp() * z.sin(); // exp and its result, z, sin: exp's result is saved twice
    let stats = guard.stats();
    assert_eq!((stats.tensors, stats.shared), (4, 1), "{stats:?}");
    assert_eq!(stats.kept, 1, "{stats:?}");
    assert_eq!(stats.bytes, 4 * 8 * 64 * 4);
}

#[test]
fn reused_memory_is_not_mistaken_for_the_tensor_that_was_there_before() {
    let _generator = crate::generator();
    let scale = Tensor::from(2f32).set_requires_grad(true);
    let _guard = offload_saved_tensors(&to_disk(0), &[]).unwrap();
    // Each result is freed at once, so that the next most likely gets its memory.
    let losses: Vec<Tensor> = (1..20)
        .map(|k| (Tensor::full([256], f64::from(k), F32) * &scale).sum(Kind::Float))
        .collect();
    for (k, loss) in (1..20).zip(losses) {
        overdrive_sys::grad::clear(&scale).unwrap();
        loss.backward();
        assert_eq!(scale.grad().double_value(&[]), f64::from(k) * 256.0);
    }
}

#[test]
fn a_retained_graph_reads_the_file_again() {
    let _generator = crate::generator();
    let x = Tensor::randn([100], F32).set_requires_grad(true);
    let y = {
        let _guard = offload_saved_tensors(&to_disk(0), &[]).unwrap();
        x.exp().sum(Kind::Float)
    };
    let once = Tensor::f_run_backward(&[&y], &[&x], true, false).unwrap();
    let twice = Tensor::f_run_backward(&[&y], &[&x], false, false).unwrap();
    assert_eq!(once, twice);
}

#[test]
fn around_checkpoints_their_inputs_are_offloaded() {
    let _generator = crate::generator();
    let x = Tensor::randn([100, 8], F32).set_requires_grad(true);
    let hidden = &x * 2.0;
    let (y, stats) = {
        let guard = offload_saved_tensors(&to_disk(0), &[]).unwrap();
        let y = checkpoint_with(&[&hidden], &CheckpointOptions::default(), |inputs| {
            Ok(inputs[0].f_exp()?.f_sin()?.f_exp()?)
        })
        .unwrap();
        (y, guard.stats())
    };
    assert_eq!((stats.tensors, stats.bytes), (1, 100 * 8 * 4));
    y.sum(Kind::Float).backward();
    let expected = {
        let leaf = x.detach().set_requires_grad(true);
        (&leaf * 2.0).exp().sin().exp().sum(Kind::Float).backward();
        leaf.grad()
    };
    assert_eq!(x.grad(), expected);
}

#[test]
fn an_in_place_change_of_a_tensor_that_stayed_is_an_error() {
    let _generator = crate::generator();
    let x = Tensor::ones([4], F32).set_requires_grad(true);
    let (y, mut saved) = {
        let _guard = offload_saved_tensors(&to_disk(1 << 20), &[]).unwrap();
        let saved = &x * 1.0;
        (saved.exp() * &saved, saved)
    };
    let _ = saved.f_zero_().unwrap();
    let error = y.sum(Kind::Float).f_backward().unwrap_err().to_string();
    assert!(
        error.contains("changed in place after an operator saved it"),
        "{error}"
    );
}

#[test]
fn tensors_on_the_cpu_stay_in_host_memory() {
    let _generator = crate::generator();
    let x = Tensor::ones([1 << 19], F32).set_requires_grad(true);
    let guard = offload_saved_tensors(&OffloadOptions::default(), &[]).unwrap();
    x.exp().sum(Kind::Float).backward();
    let stats = guard.stats();
    assert_eq!((stats.tensors, stats.kept), (0, 1));
}

#[test]
fn a_missing_folder_is_an_error() {
    let _generator = crate::generator();
    let options = OffloadOptions {
        to: SavedTo::Disk {
            folder: Some("/no/such/folder".into()),
        },
        ..OffloadOptions::default()
    };
    let error = offload_saved_tensors(&options, &[])
        .unwrap_err()
        .to_string();
    assert!(
        error.starts_with("cannot create a file for offloaded tensors in "),
        "{error}"
    );
}
