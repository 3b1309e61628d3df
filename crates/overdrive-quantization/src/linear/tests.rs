#![allow(clippy::unwrap_used, reason = "a test may panic")]

use tch::{Device, Kind, Tensor};

use super::{cpu, operators};
use crate::{QuantizedWeight, Scheme};

/// GPUs use these operators; the test forces them on the CPU.
#[test]
fn operators_have_the_results_of_kernels() {
    let schemes = [
        Scheme::Int8Dynamic,
        Scheme::Int8WeightOnly,
        Scheme::LlmInt8 { threshold: 2.5 },
        Scheme::Fp8,
        "int4-g32".parse().unwrap(),
        "nf4".parse().unwrap(),
    ];
    for scheme in schemes {
        let dense = Tensor::randn([72, 64], (Kind::Float, Device::Cpu));
        let weight = QuantizedWeight::quantize(&dense, scheme).unwrap();
        let bias = Tensor::randn([72], (Kind::Float, Device::Cpu));
        for rows in [1, 9, 40] {
            for kind in [Kind::Float, Kind::BFloat16] {
                let x = Tensor::randn([rows, 64], (kind, Device::Cpu));
                let (weights, biases) = ([&weight, &weight], [Some(&bias), None]);
                let kernels = cpu::forward(&x, &weights, &biases, kind, false).unwrap();
                let operators = operators::forward(&x, &weights, &biases, kind, false).unwrap();
                assert_eq!(
                    (kernels.size(), kernels.kind()),
                    (operators.size(), operators.kind())
                );
                let error = (kernels - operators)
                    .to_kind(Kind::Float)
                    .abs()
                    .max()
                    .double_value(&[]);
                // Sums of 64 products up to 3 · 4, in f32; results in bf16 have 8 bits; codes of
                // activations that lie between two integers may go either way.
                let tolerance = if kind == Kind::Float { 0.06 } else { 0.3 };
                assert!(error < tolerance, "{scheme} {rows} {kind:?}: {error}");
            }
        }
    }
}
