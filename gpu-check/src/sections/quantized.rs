use anyhow::{Result, ensure};
use overdrive::quantization::{
    Activations, QuantizedWeight, Scheme, adjacent, joint_linear, linear,
};
use tch::{Device, Kind, Tensor};

use crate::context::Context;
use crate::finding::Finding;
use crate::parity::{KINDS, distance, name_of, tolerance};

/// The formats: the named schemes and groups of 8 bits.
fn schemes() -> Result<Vec<Scheme>> {
    let names = Scheme::NAMES
        .into_iter()
        .chain(["int8-g32", "int4-g32-asym", "nf4-b128"]);
    Ok(names.map(str::parse).collect::<Result<_, _>>()?)
}

pub(super) fn run(context: &mut Context) -> Result<()> {
    let device = context.device();
    let size = context.sized([768, 1024], [40, 128]);
    tch::manual_seed(5);
    let dense = Tensor::f_randn(size, (Kind::Float, Device::Cpu))? * 0.1;
    for scheme in schemes()? {
        context.check(format!("{scheme}: codes equal those of the CPU"), || {
            let here = QuantizedWeight::quantize(&dense, scheme)?;
            let there = QuantizedWeight::quantize(&dense.f_to_device(device)?, scheme)?;
            let there = there.dequantize(Kind::Float)?.f_to_device(Device::Cpu)?;
            let far = distance(&there, &here.dequantize(Kind::Float)?)?;
            // A quotient on the border of two codes may be rounded otherwise there.
            Ok(Finding::within(far, 1e-3, "the codes differ"))
        })?;
        for kind in KINDS {
            for rows in [1, 4, 8, 16, context.sized(64, 17), context.sized(200, 33)] {
                let name = format!("{scheme}: {rows} rows in {}", name_of(kind));
                context.check(name, || product(&dense, scheme, kind, rows, device))?;
            }
            // Neither the outputs nor the inputs fill the last block of a kernel.
            let name = format!("{scheme}: a ragged weight, 5 rows in {}", name_of(kind));
            let ragged = dense.f_narrow(0, 0, size[0] - 3)?;
            let width = size[1] - context.sized(128, 0);
            let ragged = ragged.f_narrow(1, 0, width)?.f_contiguous()?;
            context.check(name, || product(&ragged, scheme, kind, 5, device))?;
        }
        context.check(format!("{scheme}: gradient of the inputs in bf16"), || {
            gradient(&dense, scheme, device)
        })?;
        for rows in [1, context.sized(64, 17), context.sized(200, 33)] {
            let name = format!("{scheme}: {rows} rows by adjacent weights in bf16");
            context.check(name, || side_by_side(&dense, scheme, rows, device))?;
        }
    }
    context.check("fp8 with activations in fp8, bf16", || {
        let weight = QuantizedWeight::quantize(&dense.f_to_device(device)?, Scheme::Fp8)?;
        let weight = weight.with_activations(Activations::Float8)?;
        let x = input(64, size[1], Kind::BFloat16, device)?;
        let far = beside_dense(&x, &weight)?;
        // E4M3 has four significant bits: half a unit in the last place is a 16th at most.
        Ok(Finding::within(far, 1.0 / 16.0, "beyond the tolerance"))
    })
}

fn input(rows: i64, width: i64, kind: Kind, device: Device) -> Result<Tensor> {
    tch::manual_seed(rows);
    let values = Tensor::f_randn([rows, width], (Kind::Float, Device::Cpu))?;
    Ok(values.f_to_kind(kind)?.f_to_device(device)?)
}

/// Returns the distance of the layer's outputs from those of the dequantized weight in f64.
fn beside_dense(x: &Tensor, weight: &QuantizedWeight) -> Result<f64> {
    let y = linear(x, weight, None)?;
    ensure!(
        y.f_kind()? == x.f_kind()? && y.device() == x.device(),
        "the output is {:?} on {:?}",
        y.kind(),
        y.device()
    );
    let dense = weight.to_device(Device::Cpu)?.dequantize(Kind::Double)?;
    let exact = x
        .f_to_device(Device::Cpu)?
        .f_to_kind(Kind::Double)?
        .f_matmul(&dense.f_tr()?)?;
    distance(&y, &exact)
}

fn product(
    dense: &Tensor,
    scheme: Scheme,
    kind: Kind,
    rows: i64,
    device: Device,
) -> Result<Finding> {
    let mut weight = QuantizedWeight::quantize(&dense.f_to_device(device)?, scheme)?;
    let is_rounded = matches!(scheme, Scheme::Int8Dynamic | Scheme::LlmInt8 { .. });
    if !is_rounded {
        // A CPU would round activations to 8 bits for weights of 4.
        weight = weight.with_activations(Activations::Float)?;
    }
    let far = beside_dense(&input(rows, dense.size()[1], kind, device)?, &weight)?;
    let allowed = match scheme {
        _ if is_rounded => tolerance(kind) + 2e-2,
        // libtorch's kernel for 4 bits takes bf16 alone.
        Scheme::Grouped(_) => tolerance(kind).max(match kind {
            Kind::Half => tolerance(Kind::BFloat16),
            _ => 0.0,
        }),
        _ => tolerance(kind),
    };
    Ok(Finding::within(far, allowed, "beyond the tolerance"))
}

/// Compares layers of the same input whose weights lie next to one another with the same layers apart.
fn side_by_side(dense: &Tensor, scheme: Scheme, rows: i64, device: Device) -> Result<Finding> {
    // No part ends where a block of the kernel does.
    let half = dense.size()[0] / 16 * 8;
    let (dense, sizes) = match scheme.to_string().as_str() {
        // Scales of 8 bits are next to one another only in weights of 1,024 blocks or a multiple.
        "nf4" | "fp4" => {
            let wide = Tensor::f_randn([128, 4096], (Kind::Float, Device::Cpu))? * 0.1;
            (wide, [16, 48, 64])
        }
        _ => (dense.shallow_clone(), [half, 8, dense.size()[0] - half - 8]),
    };
    let quantized = |device: Device| -> Result<Vec<QuantizedWeight>> {
        let parts = dense.f_to_device(device)?;
        let parts = parts.f_split_with_sizes(sizes.as_slice(), 0)?;
        let parts = parts.iter();
        let parts = parts.map(|part| QuantizedWeight::quantize(part, scheme));
        Ok(parts.collect::<Result<_, _>>()?)
    };
    let here = quantized(Device::Cpu)?;
    let can_be_joint = adjacent(&here.iter().collect::<Vec<_>>())?.is_some();
    let apart = quantized(device)?;
    let apart: Vec<&QuantizedWeight> = apart.iter().collect();
    let Some(views) = adjacent(&apart)? else {
        let finding = Finding::judged(!can_be_joint, "adjacent on a CPU, and apart here");
        return Ok(finding.with("stay apart", 1.0));
    };
    let views: Vec<&QuantizedWeight> = views.iter().collect();
    let x = input(rows, dense.size()[1], Kind::BFloat16, device)?;
    let forward = |weights| joint_linear(&x, weights, &[None; 3]);
    let far = distance(&forward(&views)?, &forward(&apart)?)?;
    let allowed = tolerance(Kind::BFloat16);
    Ok(Finding::within(
        far,
        allowed,
        "the results differ from those of the layers apart",
    ))
}

fn gradient(dense: &Tensor, scheme: Scheme, device: Device) -> Result<Finding> {
    let weight = QuantizedWeight::quantize(&dense.f_to_device(device)?, scheme)?;
    let size = dense.size();
    let x = input(9, size[1], Kind::BFloat16, device)?.f_set_requires_grad(true)?;
    let direction = input(9, size[0], Kind::BFloat16, device)?;
    let y = linear(&x, &weight, None)?;
    y.f_mul(&direction)?.f_sum(Kind::Float)?.f_backward()?;
    let exact = direction
        .f_to_device(Device::Cpu)?
        .f_to_kind(Kind::Double)?
        .f_matmul(&weight.to_device(Device::Cpu)?.dequantize(Kind::Double)?)?;
    let far = distance(&x.f_grad()?, &exact)?;
    let allowed = tolerance(Kind::BFloat16);
    Ok(Finding::judged(far <= allowed, "beyond the tolerance")
        .with("gradient error", far)
        .with("tolerance", allowed))
}
