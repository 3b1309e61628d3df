//! The overhead of adapters: forward and backward of q, k, v and of one 4x wider linear layer, with and without.
//!
//! `cargo run --release -p overdrive-benches --bin adapter_overhead`
#![allow(clippy::unwrap_used, reason = "a benchmark may panic")]

use std::sync::Arc;
use std::time::Instant;

use overdrive::lora::{AddOptions, LoraConfig, LoraLinear};
use overdrive::nn::{Linear, joint_forward};
use overdrive::sys::memory;
use tch::{Device, Kind, Tensor};

const WIDTH: i64 = 768;
const F32: (Kind, Device) = (Kind::Float, Device::Cpu);

/// The results: milliseconds of the best pass, and the peak of the additional memory in MiB.
fn measure(mut pass: impl FnMut()) -> (f64, f64) {
    pass();
    let before = memory::stats(Device::Cpu).unwrap().allocated_bytes;
    memory::reset_peak(Device::Cpu).unwrap();
    let mut best = f64::INFINITY;
    let begin = Instant::now();
    while begin.elapsed().as_secs_f64() < 1.0 {
        let start = Instant::now();
        pass();
        best = best.min(start.elapsed().as_secs_f64());
    }
    let peak = memory::stats(Device::Cpu).unwrap().peak_allocated_bytes;
    (
        best * 1e3,
        (peak.saturating_sub(before)) as f64 / f64::from(1 << 20),
    )
}

fn layers(scheme: Option<&str>, config: Option<&LoraConfig>, outputs: &[i64]) -> Vec<Linear> {
    let make = |outputs: &i64| {
        let weight = Tensor::randn([*outputs, WIDTH], F32) * 0.02;
        let mut layer = match scheme {
            None => Linear::dense(weight, None).unwrap(),
            Some(scheme) => Linear::quantize(&weight, None, scheme.parse().unwrap()).unwrap(),
        };
        if let Some(config) = config {
            let config = Arc::new(config.clone());
            layer
                .add_adapter("layer", "a", &config, &AddOptions::default())
                .unwrap();
            layer.set_active_adapters(&["a"]);
            layer.set_training(true);
        }
        layer
    };
    outputs.iter().map(make).collect()
}

fn main() {
    let lora = LoraConfig {
        r: 16,
        ..LoraConfig::default()
    };
    let dora = LoraConfig {
        use_dora: true,
        ..lora.clone()
    };
    let dropout = LoraConfig {
        lora_dropout: 0.05,
        ..lora.clone()
    };
    let kinds = [
        ("base", None),
        ("LoRA", Some(&lora)),
        ("dropout", Some(&dropout)),
        ("DoRA", Some(&dora)),
    ];
    println!(
        "{:6} {:>5} {:>8} {:8} {:>11} {:>8} {:>13} {:>10}",
        "weight",
        "rows",
        "outputs",
        "adapter",
        "forward ms",
        "of base",
        "with backward",
        "peak MiB"
    );
    for scheme in [None, Some("nf4")] {
        for (rows, outputs) in [
            (1, vec![768, 256, 256]),
            (512, vec![768, 256, 256]),
            (512, vec![3072]),
        ] {
            let mut base = 1.0;
            for (name, config) in kinds {
                let layers = layers(scheme, config, &outputs);
                let layers: Vec<&Linear> = layers.iter().collect();
                let x = Tensor::randn([rows, WIDTH], F32);
                let (forward, _) = measure(|| {
                    let _y = tch::no_grad(|| joint_forward(&x, &layers).unwrap());
                });
                if config.is_none() {
                    base = forward;
                }
                let x = x.set_requires_grad(true);
                let (both, peak) = measure(|| {
                    joint_forward(&x, &layers)
                        .unwrap()
                        .sum(Kind::Float)
                        .backward()
                });
                println!(
                    "{:6} {rows:5} {:8} {name:8} {forward:11.3} {:7.2}x {both:13.3} {peak:10.1}",
                    scheme.unwrap_or("fp32"),
                    outputs.iter().sum::<i64>(),
                    forward / base
                );
            }
        }
    }
}
