//! Matmuls on a GPU against those on the CPU with the dequantized weight.

use overdrive_quantization::{Activations, QuantizedWeight, Scheme, linear};
use tch::{Device, Kind, Tensor};

/// Returns numbers that need no generator.
fn numbers(seed: i64, size: [i64; 2]) -> Tensor {
    let x = Tensor::arange(size[0] * size[1], (Kind::Double, Device::Cpu)) + seed * 1000;
    let x = (x * 12.9898).sin() * 43_758.545_3;
    ((&x - x.floor()) * 2 - 1).view(size)
}

const DEVICE: Device = Device::Cuda(0);

/// Returns the error of the linear layer on the GPU, relative to its largest output.
fn error(x: &Tensor, weight: &QuantizedWeight) -> f64 {
    let y = linear(x, weight, None).unwrap();
    assert_eq!((y.kind(), y.device()), (x.kind(), x.device()));
    let dense = weight.dequantize(Kind::Double).unwrap();
    let exact = x.to_kind(Kind::Double).matmul(&dense.tr());
    let difference = (y.to_kind(Kind::Double) - &exact).abs().max();
    difference.double_value(&[]) / exact.abs().max().double_value(&[])
}

/// Returns the tolerance relative to the largest output, for sums of 256 products.
fn tolerance(name: &str, kind: Kind) -> f64 {
    let of_activations = match name {
        "int8" | "llm-int8" => 1e-2,
        _ => 0.0,
    };
    // Results of bf16 have 8 digits; in it scales of 4 bits have no more.
    of_activations
        + match kind {
            Kind::BFloat16 => 1.6e-2,
            // Up to 64 rows are multiplied in bf16.
            Kind::Half if name.starts_with("int4") => 1.6e-2,
            Kind::Half => 2e-3,
            // Products in TF32 would have 1e-3, where they are allowed; by default they are not.
            _ => 1e-5,
        }
}

#[test]
#[ignore = "needs a CUDA GPU"]
fn outputs_on_a_gpu_are_those_of_the_dequantized_weight() {
    let device = DEVICE;
    let names = [
        "int8",
        "int8-weight",
        "llm-int8",
        "int4-g32",
        "int4-g64",
        "int4-g128",
        "int4-g32-asym",
        "int4-g128-asym",
        "int8-g32",
        "nf4",
        "fp4",
        "fp8",
    ];
    for size in [[96, 256], [1024, 512], [40, 384]] {
        for name in names {
            let dense = numbers(1, size).to_kind(Kind::Float).to_device(device);
            let weight = QuantizedWeight::quantize(&dense, name.parse().unwrap()).unwrap();
            for rows in [1, 3, 8, 17, 64, 65, 200] {
                for kind in [Kind::Float, Kind::BFloat16, Kind::Half] {
                    let x = numbers(2, [rows, size[1]]).to_kind(kind).to_device(device);
                    let found = error(&x, &weight);
                    let tolerance = tolerance(name, kind);
                    assert!(
                        found < tolerance,
                        "{name} {size:?} {rows} {kind:?}: {found}"
                    );
                }
            }
        }
    }
}

#[test]
#[ignore = "needs a CUDA GPU"]
fn codes_made_on_a_gpu_are_those_of_the_cpu() {
    let device = DEVICE;
    for name in Scheme::NAMES {
        let dense = numbers(3, [64, 256]).to_kind(Kind::Float);
        let scheme: Scheme = name.parse().unwrap();
        let here = QuantizedWeight::quantize(&dense, scheme).unwrap();
        let there = QuantizedWeight::quantize(&dense.to_device(device), scheme).unwrap();
        let [here, there] = [here, there].map(|w| w.dequantize(Kind::Float).unwrap());
        let difference = (here - there.to_device(Device::Cpu)).abs().max();
        // A quotient may be rounded otherwise there, and the mean of magnitudes summed otherwise.
        assert!(difference.double_value(&[]) < 1e-5, "{name}");
    }
}

#[test]
#[ignore = "needs a CUDA GPU"]
fn activations_in_8_bit_floats_on_a_gpu_lose_a_sixteenth_at_most() {
    let device = DEVICE;
    for size in [[96, 256], [1024, 512], [40, 384]] {
        let dense = numbers(4, size).to_kind(Kind::Float).to_device(device);
        let weight = QuantizedWeight::quantize(&dense, Scheme::Fp8).unwrap();
        let weight = weight.with_activations(Activations::Float8).unwrap();
        let dense = weight.dequantize(Kind::Double).unwrap();
        for rows in [1, 16, 33] {
            let x = numbers(5, [rows, size[1]]).to_device(device);
            let y = linear(&x.to_kind(Kind::BFloat16), &weight, None).unwrap();
            let bound = (x.abs() / 16 + 3e-6).matmul(&dense.abs().tr());
            let exact = x.matmul(&dense.tr());
            // And the rounding of x and of the result to bf16.
            let bound = bound * 1.01 + exact.abs() / 128 + x.abs().matmul(&dense.abs().tr()) / 256;
            let within = (y.to_kind(Kind::Double) - exact).abs().le_tensor(&bound);
            assert!(bool::try_from(within.all()).unwrap(), "{size:?} {rows}");
        }
    }
}

#[test]
#[ignore = "needs a CUDA GPU"]
fn gradients_on_a_gpu_are_those_of_the_dequantized_weight() {
    let device = DEVICE;
    for name in ["int8-weight", "int4-g32", "nf4", "fp8"] {
        let dense = numbers(6, [96, 256]).to_kind(Kind::Float).to_device(device);
        let weight = QuantizedWeight::quantize(&dense, name.parse().unwrap()).unwrap();
        let x = numbers(7, [5, 256])
            .to_kind(Kind::BFloat16)
            .to_device(device);
        let x = x.set_requires_grad(true);
        let y = linear(&x, &weight, None).unwrap();
        let dy = numbers(8, [5, 96])
            .to_kind(Kind::BFloat16)
            .to_device(device);
        (&y * &dy).sum(Kind::Float).backward();
        let exact = dy
            .to_kind(Kind::Double)
            .matmul(&weight.dequantize(Kind::Double).unwrap());
        let difference = (x.grad().to_kind(Kind::Double) - &exact).abs().max();
        let found = difference.double_value(&[]) / exact.abs().max().double_value(&[]);
        assert!(found < 1.6e-2, "{name}: {found}");
    }
}
