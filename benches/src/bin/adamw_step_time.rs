//! Times one AdamW step over the tensors of a 14M-parameter Llama, relative to its memory traffic.
//!
//! `cargo run --release -p overdrive-benches --bin adamw_step_time`
//!
//! Prints the fused and the plain implementation, tch's own AdamW, clipping, and the upper bound: the rate at
//! which this machine copies a tensor.

use std::time::Instant;

use overdrive::optim::{
    AdamW, AdamWConfig, ClipOptions, Implementation, Optimizer, Result, TchOptimizer,
    clip_grad_norm, decay_groups,
};
use overdrive::sys::grad;
use tch::nn::{self, OptimizerConfig};
use tch::{Device, Kind, Tensor};

const DIM: i64 = 384;
const HIDDEN: i64 = 1024;
const LAYERS: i64 = 6;
const VOCABULARY: i64 = 8192;
/// The bytes per parameter: parameter, gradient and two averages are read, all but the gradient written.
const BYTES_PER_PARAMETER: f64 = 28.0;

fn main() -> Result<()> {
    let device = Device::cuda_if_available();
    let (store, parameters) = parameters(device);
    let count: usize = parameters.iter().map(Tensor::numel).sum();
    println!(
        "{} tensors, {:.2}M parameters, {device:?}",
        parameters.len(),
        count as f64 / 1e6
    );
    let gigabytes = count as f64 * BYTES_PER_PARAMETER / 1e9;

    for implementation in [Implementation::Fused, Implementation::Plain] {
        let config = AdamWConfig {
            implementation,
            ..Default::default()
        };
        let mut optimizer = AdamW::new(decay_groups(store.variables(), 0.1), config)?;
        let seconds = time(device, 20, || optimizer.step())?;
        let label = format!("AdamW, {implementation:?}");
        println!(
            "{label:28} {:8.2} ms  {:6.1} GB/s",
            seconds * 1e3,
            gigabytes / seconds
        );
    }
    let mut optimizer = TchOptimizer::new(nn::AdamW::default().build(&store, 1e-3)?, 1e-3)?;
    let seconds = time(device, 20, || optimizer.step())?;
    println!(
        "{:28} {:8.2} ms  {:6.1} GB/s",
        "tch::nn::AdamW",
        seconds * 1e3,
        gigabytes / seconds
    );

    let options = ClipOptions::default();
    let clip = || clip_grad_norm(&parameters, 1e-9, options).map(|_| ());
    println!(
        "{:28} {:8.2} ms",
        "clip_grad_norm, scaling",
        time(device, 20, clip)? * 1e3
    );
    let clip = || clip_grad_norm(&parameters, 1e9, options).map(|_| ());
    println!(
        "{:28} {:8.2} ms",
        "clip_grad_norm, under bound",
        time(device, 20, clip)? * 1e3
    );

    let source = Tensor::f_ones([count as i64], (Kind::Float, device))?;
    let mut target = source.f_empty_like()?;
    let seconds = time(device, 20, || Ok(target.f_copy_(&source)?))?;
    let rate = count as f64 * 8.0 / 1e9 / seconds;
    println!(
        "{:28} {:8.2} ms  {rate:6.1} GB/s",
        "copy (the roof)",
        seconds * 1e3
    );
    Ok(())
}

/// Returns tensors of the shapes of the `small` preset, with gradients.
fn parameters(device: Device) -> (nn::VarStore, Vec<Tensor>) {
    let store = nn::VarStore::new(device);
    let root = store.root();
    let mut parameters = vec![root.randn_standard("embed", &[VOCABULARY, DIM])];
    for layer in 0..LAYERS {
        let path = &root / layer;
        for name in ["q", "k", "v", "o"] {
            parameters.push(path.randn_standard(name, &[DIM, DIM]));
        }
        for name in ["gate", "up"] {
            parameters.push(path.randn_standard(name, &[HIDDEN, DIM]));
        }
        parameters.push(path.randn_standard("down", &[DIM, HIDDEN]));
        for name in ["norm_1", "norm_2"] {
            parameters.push(path.ones(name, &[DIM]));
        }
    }
    parameters.push(root.ones("norm", &[DIM]));
    for parameter in &parameters {
        let gradient = parameter.randn_like() * 1e-3;
        grad::set(parameter, &gradient).expect("the gradient has the parameter's shape");
    }
    (store, parameters)
}

/// Returns the median of `repeats` calls in seconds, after two warm-up calls.
fn time(device: Device, repeats: usize, mut call: impl FnMut() -> Result<()>) -> Result<f64> {
    let mut seconds = Vec::new();
    for repeat in 0..repeats + 2 {
        let start = Instant::now();
        call()?;
        if let Device::Cuda(index) = device {
            tch::Cuda::synchronize(index as i64);
        }
        if repeat >= 2 {
            seconds.push(start.elapsed().as_secs_f64());
        }
    }
    seconds.sort_by(f64::total_cmp);
    Ok(seconds[seconds.len() / 2])
}
