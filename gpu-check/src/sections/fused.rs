use std::num::NonZeroUsize;

use anyhow::Result;
use overdrive::fused::{
    Activation, Convention, CrossEntropyOptions, Layout, LinearCrossEntropyOptions, QkvShape,
    Reduction, RotaryOptions, add_rms_norm, bias_activation, cross_entropy, glu, glu_pair,
    joint_linear, linear, linear_cross_entropy, rms_norm, rotary, split_qkv_rotary, swiglu,
    swiglu_pair,
};
use overdrive::precision::Precision;
use tch::{Device, Kind, Tensor};

use crate::context::Context;
use crate::finding::Finding;
use crate::parity::{Run, constant, largest, leaf};

pub(super) fn run(context: &mut Context) -> Result<()> {
    norms(context)?;
    mixed_norms(context)?;
    rotations(context)?;
    activations(context)?;
    linears(context)?;
    fp8_linears(context)?;
    losses(context)
}

/// Runs the checks of the operations for which overdrive-gpu has kernels.
pub(super) fn with_kernels(context: &mut Context) -> Result<()> {
    norms(context)?;
    mixed_norms(context)?;
    rotations(context)?;
    activations(context)?;
    fp8_linears(context)?;
    losses(context)
}

/// Compares layers in FP8 and their gradients with those of the CPU, whose tests compare them with torchao.
fn fp8_linears(context: &mut Context) -> Result<()> {
    let device = context.device();
    let (inputs, outputs) = (context.sized(2048, 64), context.sized(1024, 48));
    // 30 rows are filled up to 32 for the gradient of the weight.
    for (rows, kind) in [
        (256, Kind::BFloat16),
        (30, Kind::BFloat16),
        (64, Kind::Float),
    ] {
        context.check(format!("linear in FP8, {rows} rows in {kind:?}"), || {
            if device != Device::Cpu
                && let Err(refusal) = Precision::Fp8.check(device)
            {
                return Ok(Finding::skipped_allowed(refusal.to_string()));
            }
            let draw = |size: [i64; 2]| Tensor::f_randn(size, (Kind::Float, Device::Cpu));
            let given = [
                draw([rows, inputs])?.f_to_kind(kind)?,
                (draw([outputs, inputs])? / (inputs as f64).sqrt()),
            ];
            let dy = (draw([rows, outputs])? * 1e-4).f_to_kind(Kind::BFloat16)?;
            let on = |device: Device| -> Result<Vec<Tensor>> {
                let leaf = |tensor: &Tensor| -> Result<Tensor> {
                    Ok(tensor
                        .f_to_device(device)?
                        .f_detach()?
                        .f_set_requires_grad(true)?)
                };
                let (x, weight) = (leaf(&given[0])?, leaf(&given[1])?);
                let y = {
                    let _autocast = Precision::Fp8.autocast(device)?;
                    linear(&x, &weight, None)?
                };
                let loss = y.f_mul(&dy.f_to_device(device)?)?.f_sum(Kind::Float)?;
                let gradients = Tensor::f_run_backward(&[&loss], &[&x, &weight], false, false)?;
                let results = std::iter::once(y.f_detach()?).chain(gradients);
                let to_cpu = |tensor: Tensor| {
                    Ok(tensor.f_to_device(Device::Cpu)?.f_to_kind(Kind::Double)?)
                };
                results.map(to_cpu).collect()
            };
            let mut errors = Vec::new();
            for (found, expected) in on(device)?.iter().zip(on(Device::Cpu)?) {
                let most = expected.f_abs()?.f_max()?.f_double_value(&[])?;
                let error = found
                    .f_sub(&expected)?
                    .f_abs()?
                    .f_max()?
                    .f_double_value(&[])?;
                errors.push(error / most);
            }
            let worst = largest(errors);
            // The codes are equal; the sums are added in another order, those of the result with fewer digits.
            let finding = Finding::judged(worst < 1e-2, "other results than those of the CPU");
            Ok(finding.with("largest error", worst))
        })?;
    }
    Ok(())
}

fn norms(context: &mut Context) -> Result<()> {
    // 100 is no multiple of a vector, 4096 takes a block of threads more than one pass.
    for width in [100, context.sized(4096, 256)] {
        let rows = [leaf(&[3, 17, width]), leaf(&[width]).times(0.1).plus(1.0)];
        context.parity(&format!("RMSNorm of {width}"), &rows, |_, x| {
            Ok(vec![rms_norm(&x[0], &x[1], 1e-6)?])
        })?;
        let x = leaf(&[3, 17, width]);
        let rows = [x.clone(), x, leaf(&[width]).times(0.1).plus(1.0)];
        context.parity(&format!("add and RMSNorm of {width}"), &rows, |_, x| {
            let (normalised, sum) = add_rms_norm(&x[0], &x[1], &x[2], 1e-6)?;
            Ok(vec![normalised, sum])
        })?;
    }
    Ok(())
}

/// The dtypes of autocast.
const LOW: [Kind; 2] = [Kind::BFloat16, Kind::Half];

/// Runs `body` under autocast in the dtype of the run; the reference runs without.
fn mixed<T>(run: &Run, body: impl FnOnce() -> Result<T>) -> Result<T> {
    let precision = match run.kind {
        Kind::BFloat16 => Precision::Bf16,
        Kind::Half => Precision::Fp16,
        _ => return body(),
    };
    let _autocast = precision.autocast(run.device)?;
    body()
}

/// Returns a tensor as the masters of mixed precision are: in f32, or as it is for the reference.
fn wide(run: &Run, x: &Tensor) -> Result<Tensor> {
    match run.is_reference {
        true => Ok(x.shallow_clone()),
        false => Ok(x.f_to_kind(Kind::Float)?),
    }
}

/// Compares the norm of a residual stream in f32 to which the low-precision output of a layer is added.
fn mixed_norms(context: &mut Context) -> Result<()> {
    for width in [100, context.sized(2048, 256), context.sized(4096, 512)] {
        let x = leaf(&[3, 17, width]);
        let rows = [x.clone(), x, leaf(&[width]).times(0.1).plus(1.0)];
        context.parity_in(
            &format!("add and RMSNorm of {width}, mixed precision"),
            &LOW,
            &rows,
            |run, x| {
                mixed(run, || {
                    let (stream, weight) = (wide(run, &x[0])?, wide(run, &x[2])?);
                    // Models add the stream to the output of a layer, others the other way round.
                    let (first, sum) = add_rms_norm(&stream, &x[1], &weight, 1e-6)?;
                    let (second, other_sum) = add_rms_norm(&x[1], &stream, &weight, 1e-6)?;
                    Ok(vec![first, sum, second, other_sum])
                })
            },
        )?;
    }
    Ok(())
}

/// Returns cosines and sines `(tokens, rotated / 2)` on the device of the run, in f32 or in f64 for the reference.
fn tables(run: &Run, tokens: i64, rotated: i64) -> Result<(Tensor, Tensor)> {
    let cpu = (Kind::Double, Device::Cpu);
    let frequencies = (Tensor::f_arange(rotated / 2, cpu)? * -0.3).f_exp()?;
    let angles = Tensor::f_arange(tokens, cpu)?.f_outer(&frequencies)?;
    // Rounded for both, since the tables are given.
    let given = |table: Tensor| -> Result<Tensor> {
        let table = table.f_to_kind(Kind::Float)?;
        let kind = if run.is_reference {
            Kind::Double
        } else {
            Kind::Float
        };
        Ok(table.f_to_kind(kind)?.f_to_device(run.device)?)
    };
    Ok((given(angles.f_cos()?)?, given(angles.f_sin()?)?))
}

fn rotations(context: &mut Context) -> Result<()> {
    let (tokens, dim) = (context.sized(65, 9), context.sized(64, 16));
    let given = [leaf(&[2, 8, tokens, dim]), leaf(&[2, 2, tokens, dim])];
    let cases = [
        ("rotary", Convention::HalfSplit, dim),
        ("rotary, interleaved", Convention::Interleaved, dim),
        (
            "rotary of half the channels",
            Convention::HalfSplit,
            dim / 2,
        ),
    ];
    for (name, convention, rotated) in cases {
        context.parity(name, &given, |run, x| {
            let (cos, sin) = tables(run, tokens, rotated)?;
            let options = RotaryOptions {
                convention,
                layout: Layout::Bhtd,
            };
            let (query, key) = rotary(&x[0], &x[1], &cos, &sin, &options)?;
            Ok(vec![query, key])
        })?;
    }
    let shape = QkvShape {
        heads: 8,
        kv_heads: 2,
        head_dim: dim,
    };
    let joint = [leaf(&[2, tokens, shape.width()])];
    for (name, layout) in [
        ("split and rotary", Layout::Bhtd),
        ("split and rotary, (B, T, H, D)", Layout::Bthd),
    ] {
        context.parity(name, &joint, |run, x| {
            let (cos, sin) = tables(run, tokens, dim)?;
            let options = RotaryOptions {
                convention: Convention::HalfSplit,
                layout,
            };
            let (query, key, value) = split_qkv_rotary(&x[0], &cos, &sin, shape, &options)?;
            Ok(vec![query, key, value])
        })?;
    }
    Ok(())
}

fn activations(context: &mut Context) -> Result<()> {
    // 100 is no multiple of a vector, and no kernel of overdrive-gpu takes it.
    for width in [100, context.sized(1408, 112)] {
        gates(context, width)?;
    }
    Ok(())
}

fn gates(context: &mut Context, width: i64) -> Result<()> {
    let (joint, half) = (leaf(&[3, 17, 2 * width]), leaf(&[3, 17, width]));
    let joint = [joint];
    let pair = [half.clone(), half.clone()];
    let name = format!("SwiGLU of {width}");
    context.parity(&name, &joint, |_, x| Ok(vec![swiglu(&x[0])?]))?;
    context.parity(&format!("{name}, a pair"), &pair, |_, x| {
        Ok(vec![swiglu_pair(&x[0], &x[1])?])
    })?;
    let biased = [half, leaf(&[width])];
    let all = [
        ("SiLU", Activation::Silu),
        ("GELU", Activation::Gelu),
        ("GELU by tanh", Activation::GeluTanh),
        ("ReLU", Activation::Relu),
    ];
    for (name, activation) in all {
        let name = format!("{name} of {width}");
        context.parity(&format!("gate of {name}"), &joint, |_, x| {
            Ok(vec![glu(&x[0], activation)?])
        })?;
        context.parity(&format!("gate of {name}, a pair"), &pair, |_, x| {
            Ok(vec![glu_pair(&x[0], &x[1], activation)?])
        })?;
        context.parity(&format!("bias and {name}"), &biased, |_, x| {
            Ok(vec![bias_activation(&x[0], &x[1], activation)?])
        })?;
    }
    Ok(())
}

fn linears(context: &mut Context) -> Result<()> {
    let (inputs, outputs) = (context.sized(256, 48), context.sized(384, 40));
    let weight = leaf(&[outputs, inputs]).times(0.1);
    for rows in [1, 7, context.sized(200, 40)] {
        let given = [leaf(&[rows, inputs]), weight.clone(), leaf(&[outputs])];
        context.parity(&format!("linear with bias, {rows} rows"), &given, |_, x| {
            Ok(vec![linear(&x[0], &x[1], Some(&x[2]))?])
        })?;
    }
    let given = [leaf(&[2, 9, inputs]), weight.clone(), weight];
    context.parity("joint linear", &given, |_, x| {
        Ok(vec![joint_linear(&x[0], &[&x[1], &x[2]], None)?])
    })?;
    // Weights in f32 whose gradients the matmul writes in f32.
    for (name, layers) in [("linear", 1), ("joint linear", 2)] {
        context.parity_in(
            &format!("{name}, mixed precision"),
            &LOW,
            &given[..=layers],
            |run, x| {
                mixed(run, || {
                    let weights = x[1..].iter().map(|weight| wide(run, weight));
                    let weights = weights.collect::<Result<Vec<Tensor>>>()?;
                    let weights: Vec<&Tensor> = weights.iter().collect();
                    Ok(vec![joint_linear(&x[0], &weights, None)?])
                })
            },
        )?;
    }
    Ok(())
}

fn losses(context: &mut Context) -> Result<()> {
    let (rows, classes) = (context.sized(300, 40), context.sized(5003, 203));
    let width = context.sized(128, 24);
    let plain = CrossEntropyOptions::default();
    let cases = [
        ("plain", plain),
        (
            "as a sum",
            CrossEntropyOptions {
                reduction: Reduction::Sum,
                ..plain
            },
        ),
        (
            "label smoothing",
            CrossEntropyOptions {
                label_smoothing: 0.1,
                ..plain
            },
        ),
        (
            "z-loss",
            CrossEntropyOptions {
                z_loss: 1e-2,
                ..plain
            },
        ),
        (
            "softcap",
            CrossEntropyOptions {
                softcap: Some(3.0),
                ..plain
            },
        ),
    ];
    let labels = move |run: &Run| -> Result<Tensor> {
        let ids = Tensor::f_arange(rows, (Kind::Int64, Device::Cpu))?;
        let ids = (ids * 37).f_remainder(classes)?;
        // Every ninth row is ignored.
        let ignored = Tensor::f_arange(rows, (Kind::Int64, Device::Cpu))?
            .f_remainder(9_i64)?
            .f_eq(0_i64)?;
        Ok(ids
            .f_masked_fill(&ignored, -100_i64)?
            .f_to_device(run.device)?)
    };
    for (name, options) in cases {
        let logits = [leaf(&[rows, classes]).times(2.0)];
        context.parity(&format!("cross-entropy, {name}"), &logits, |run, x| {
            Ok(vec![cross_entropy(&x[0], &labels(run)?, &options)?.loss])
        })?;
        let given = [leaf(&[rows, width]), leaf(&[classes, width]).times(0.2)];
        context.parity(
            &format!("linear cross-entropy, {name}"),
            &given,
            |run, x| {
                let options = LinearCrossEntropyOptions {
                    loss: options,
                    chunk_rows: NonZeroUsize::new(64),
                    ..LinearCrossEntropyOptions::default()
                };
                let output = linear_cross_entropy(&x[0], &x[1], &labels(run)?, &options)?;
                Ok(vec![output.loss])
            },
        )?;
    }
    let given = [
        leaf(&[rows, width]),
        leaf(&[classes, width]).times(0.2),
        leaf(&[classes]),
    ];
    context.parity(
        "linear cross-entropy, bias, chunks of its own",
        &given,
        |run, x| {
            let options = LinearCrossEntropyOptions {
                bias: Some(&x[2]),
                ..LinearCrossEntropyOptions::default()
            };
            let output = linear_cross_entropy(&x[0], &x[1], &labels(run)?, &options)?;
            Ok(vec![output.loss])
        },
    )?;
    let logits = [constant(&[rows, classes])];
    context.parity("count of labels", &logits, |run, x| {
        let output = cross_entropy(&x[0], &labels(run)?, &plain)?;
        Ok(vec![output.count.f_to_kind(Kind::Double)?])
    })
}
