#![allow(clippy::unwrap_used, reason = "a test may panic")]

use overdrive_core::random::Generator;
use tch::{Kind, Tensor};

use super::{cpu, operators};
use crate::{QuantizedWeight, Scheme};

/// Returns numbers of the standard normal distribution, the same ones in every run.
fn normal(seed: u64, size: &[i64]) -> Tensor {
    let mut generator = Generator::new(seed, 0);
    let numbers: Vec<f64> = (0..size.iter().product())
        .map(|_| generator.normal())
        .collect();
    Tensor::from_slice(&numbers).to_kind(Kind::Float).view(size)
}

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
        let dense = normal(1, &[72, 64]);
        let weight = QuantizedWeight::quantize(&dense, scheme).unwrap();
        let bias = normal(2, &[72]);
        for rows in [1, 9, 40] {
            for kind in [Kind::Float, Kind::BFloat16] {
                let x = normal(3, &[rows, 64]).to_kind(kind);
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
                // activations that lie between two integers may go either way. The kernels of 4 bits
                // round activations to 8 bits, half a step of about 3 / 127, which the operators do not.
                let four_bits = matches!(scheme, Scheme::Grouped(_) | Scheme::Nf4(_));
                let tolerance = match kind {
                    Kind::Float if four_bits => 0.3,
                    Kind::Float => 0.06,
                    _ => 0.3,
                };
                assert!(error < tolerance, "{scheme} {rows} {kind:?}: {error}");
            }
        }
    }
}
