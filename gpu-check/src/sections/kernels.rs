use std::rc::Rc;

use anyhow::Result;
use overdrive::autograd::{GradOptions, grad as grad_of};
use overdrive::fused::{
    CrossEntropyOptions, LinearCrossEntropyOptions, QkvShape, RotaryOptions, add_rms_norm,
    cross_entropy, linear_cross_entropy, rms_norm, split_qkv_rotary, swiglu,
};
use overdrive::optim::{
    AdamW, AdamW8bit, AdamW8bitConfig, AdamWConfig, ClipOptions, Optimizer, ParamGroup,
    clip_grad_norm,
};
use overdrive::profiling::{OperatorCounts, ProfilerConfig};
use overdrive::quantization::{QuantizedWeight, linear};
use overdrive::sys::grad;
use tch::{Device, Kind, Tensor};

use crate::context::Context;
use crate::finding::Finding;
use crate::timing::{seconds, trace, with_own_kernels};

/// An operation and the bytes that it has to read and write at least.
struct Case {
    name: String,
    bytes: f64,
    work: Box<dyn FnMut() -> Result<()>>,
}

/// Makes cases that belong together.
type Group = fn(Sizes) -> Result<Vec<Case>>;

/// The sizes of the cases: rows of tokens, their width, the width of gates, classes.
#[derive(Clone, Copy)]
struct Sizes {
    device: Device,
    kind: Kind,
    rows: i64,
    width: i64,
    gates: i64,
    classes: i64,
}

pub(super) fn run(context: &mut Context) -> Result<()> {
    let sizes = Sizes {
        device: context.device(),
        kind: context.sized(Kind::BFloat16, Kind::Float),
        rows: context.sized(8192, 64),
        width: context.sized(4096, 128),
        gates: context.sized(14_336, 256),
        classes: context.sized(32_000, 300),
    };
    // A new kernel is one more entry here, or a function like these with its cases. The cases of a group are dropped
    // before those of the next one are made.
    let groups: [Group; 4] = [norms_and_gates, losses, products, optimizers];
    for group in groups {
        for mut case in group(sizes)? {
            context.check(case.name.clone(), || {
                let device = sizes.device;
                let off = overdrive_gpu::override_enabled(false);
                let [launches, time, rate] = measured(device, &mut case)?;
                drop(off);
                let finding = Finding::passed()
                    .with("launches", launches)
                    .with("ms", time)
                    .with("GB/s", rate);
                // The first call loads the kernels, if the operation has any.
                Ok(match with_own_kernels(device, || (case.work)())? {
                    None | Some(((), 0)) => finding,
                    Some(_) => {
                        let _on = overdrive_gpu::override_enabled(true);
                        let [launches, time, rate] = measured(device, &mut case)?;
                        finding
                            .with("launches, own kernels", launches)
                            .with("ms, own kernels", time)
                            .with("GB/s, own kernels", rate)
                    }
                })
            })?;
        }
    }
    Ok(())
}

/// Returns the launches, the milliseconds and the GB/s of a case.
fn measured(device: Device, case: &mut Case) -> Result<[f64; 3]> {
    (case.work)()?;
    let launches = launches(device, &mut case.work)?;
    let time = seconds(device, 5, 5, &mut case.work)?;
    Ok([launches as f64, time * 1e3, case.bytes / time / 1e9])
}

impl Sizes {
    fn random(self, shape: &[i64]) -> Result<Tensor> {
        let values = Tensor::f_randn(shape, (Kind::Float, self.device))?;
        Ok(values.f_to_kind(self.kind)?)
    }

    /// Returns the bytes of a number of elements.
    fn bytes(self, elements: i64) -> f64 {
        elements as f64 * self.kind.elt_size_in_bytes() as f64
    }
}

/// Returns the cases of an operation: forward alone, and with backward.
fn both(
    name: &str,
    bytes: [f64; 2],
    inputs: Vec<Tensor>,
    operation: impl Fn(&[Tensor]) -> Result<Vec<Tensor>> + 'static,
) -> Result<Vec<Case>> {
    let operation = Rc::new(operation);
    let leaves: Vec<Tensor> = inputs
        .iter()
        .map(|input| input.f_detach()?.f_set_requires_grad(true))
        .collect::<Result<_, _>>()?;
    let forward = Rc::clone(&operation);
    // Made once, so that only the operation and its backward are counted.
    let directions: Vec<Tensor> = tch::no_grad(|| operation(&inputs))?
        .iter()
        .map(Tensor::f_ones_like)
        .collect::<Result<_, _>>()?;
    Ok(vec![
        Case {
            name: format!("{name}, forward"),
            bytes: bytes[0],
            work: Box::new(move || {
                let _no_grad = tch::no_grad_guard();
                forward(&inputs).map(drop)
            }),
        },
        Case {
            name: format!("{name}, forward and backward"),
            bytes: bytes[1],
            work: Box::new(move || {
                let outputs = operation(&leaves)?;
                let outputs: Vec<&Tensor> = outputs.iter().collect();
                let leaves: Vec<&Tensor> = leaves.iter().collect();
                let directions: Vec<Option<&Tensor>> = directions.iter().map(Some).collect();
                let options = GradOptions {
                    gradients: &directions,
                    ..GradOptions::default()
                };
                let _gradients = grad_of(&outputs, &leaves, &options)?;
                Ok(())
            }),
        },
    ])
}

fn norms_and_gates(sizes: Sizes) -> Result<Vec<Case>> {
    let Sizes {
        rows, width, gates, ..
    } = sizes;
    let x = sizes.random(&[rows, width])?;
    let weight = sizes.random(&[width])?;
    let row = sizes.bytes(rows * width);
    let mut cases = both(
        "RMSNorm",
        [2.0 * row, 5.0 * row],
        vec![x.shallow_clone(), weight.shallow_clone()],
        |x| Ok(vec![rms_norm(&x[0], &x[1], 1e-6)?]),
    )?;
    cases.extend(both(
        "add and RMSNorm",
        [4.0 * row, 8.0 * row],
        vec![x.shallow_clone(), sizes.random(&[rows, width])?, weight],
        |x| {
            let (normalised, sum) = add_rms_norm(&x[0], &x[1], &x[2], 1e-6)?;
            Ok(vec![normalised, sum])
        },
    )?);
    let gate = sizes.bytes(rows * gates);
    cases.extend(both(
        "SwiGLU",
        [3.0 * gate, 8.0 * gate],
        vec![sizes.random(&[rows, 2 * gates])?],
        |x| Ok(vec![swiglu(&x[0])?]),
    )?);
    let shape = QkvShape {
        heads: width / 32,
        kv_heads: width / 128,
        head_dim: 32,
    };
    let options = (Kind::Float, sizes.device);
    let angles = Tensor::f_randn([rows, 16], options)?;
    let (cos, sin) = (angles.f_cos()?, angles.f_sin()?);
    let joint = sizes.bytes(rows * shape.width());
    cases.extend(both(
        "split and rotary",
        [2.0 * joint, 4.0 * joint],
        vec![sizes.random(&[1, rows, shape.width()])?],
        move |x| {
            let (query, key, value) =
                split_qkv_rotary(&x[0], &cos, &sin, shape, &RotaryOptions::default())?;
            Ok(vec![query, key, value])
        },
    )?);
    Ok(cases)
}

fn losses(sizes: Sizes) -> Result<Vec<Case>> {
    let Sizes {
        rows,
        width,
        classes,
        device,
        ..
    } = sizes;
    let labels = Tensor::f_randint(classes, [rows], (Kind::Int64, device))?;
    let options = CrossEntropyOptions {
        label_count: Some(rows),
        ..CrossEntropyOptions::default()
    };
    let logits = sizes.bytes(rows * classes);
    let given = labels.shallow_clone();
    let mut cases = both(
        "cross-entropy",
        [logits, 3.0 * logits],
        vec![sizes.random(&[rows, classes])?],
        move |x| Ok(vec![cross_entropy(&x[0], &given, &options)?.loss]),
    )?;
    // The weight and its gradient, the rows and theirs; the logits are not counted, since they need not be in memory.
    let weight = sizes.bytes(classes * width) + sizes.bytes(rows * width);
    cases.extend(both(
        "linear cross-entropy",
        [weight, 3.0 * weight],
        vec![
            sizes.random(&[rows, width])?,
            sizes.random(&[classes, width])?,
        ],
        move |x| {
            let options = LinearCrossEntropyOptions {
                loss: options,
                ..LinearCrossEntropyOptions::default()
            };
            Ok(vec![
                linear_cross_entropy(&x[0], &x[1], &labels, &options)?.loss,
            ])
        },
    )?);
    Ok(cases)
}

fn products(sizes: Sizes) -> Result<Vec<Case>> {
    let Sizes {
        width,
        gates,
        device,
        kind,
        ..
    } = sizes;
    let dense = Tensor::f_randn([gates, width], (Kind::Float, device))?;
    let mut cases = Vec::new();
    for scheme in [
        "int8-weight",
        "int8",
        "int8-g32",
        "int4-g128",
        "int4-g32-asym",
        "nf4",
        "fp8",
    ] {
        let weight = QuantizedWeight::quantize(&dense, scheme.parse()?)?;
        for rows in [1, 8, 16, 64] {
            let x = sizes.random(&[rows, width])?;
            let weight = weight.shallow_clone();
            cases.push(Case {
                name: format!("product with {scheme}, {rows} rows"),
                bytes: weight.bytes() as f64 + sizes.bytes(rows * (width + gates)),
                work: Box::new(move || {
                    let _no_grad = tch::no_grad_guard();
                    let _product = linear(&x, &weight, None)?;
                    Ok(())
                }),
            });
        }
    }
    let weight = dense.f_to_kind(kind)?;
    for rows in [1, 8, 16, 64] {
        let (x, weight) = (sizes.random(&[rows, width])?, weight.shallow_clone());
        cases.push(Case {
            name: format!("dense product, {rows} rows"),
            bytes: sizes.bytes(width * gates + rows * (width + gates)),
            work: Box::new(move || {
                let _no_grad = tch::no_grad_guard();
                let _product = overdrive::fused::linear(&x, &weight, None)?;
                Ok(())
            }),
        });
    }
    Ok(cases)
}

fn optimizers(sizes: Sizes) -> Result<Vec<Case>> {
    let Sizes {
        width,
        gates,
        device,
        ..
    } = sizes;
    let elements = (width * gates) as f64;
    let parameter = || -> Result<Vec<ParamGroup>> {
        let options = (Kind::Float, device);
        let tensor = Tensor::f_randn([gates, width], options)?.f_set_requires_grad(true)?;
        grad::set(&tensor, &Tensor::f_randn([gates, width], options)?)?;
        Ok(vec![ParamGroup::new("all", vec![("w".to_owned(), tensor)])])
    };
    let mut adamw = AdamW::new(parameter()?, AdamWConfig::default())?;
    let mut adamw8bit = AdamW8bit::new(parameter()?, AdamW8bitConfig::default())?;
    let clipped = adamw.parameters();
    Ok(vec![
        Case {
            name: "step of AdamW".to_owned(),
            bytes: elements * 28.0,
            work: Box::new(move || Ok(adamw.step()?)),
        },
        Case {
            name: "step of AdamW8bit".to_owned(),
            bytes: elements * 16.0,
            work: Box::new(move || Ok(adamw8bit.step()?)),
        },
        Case {
            name: "clipping".to_owned(),
            bytes: elements * 12.0,
            work: Box::new(move || {
                let _norm = clip_grad_norm(&clipped, 1.0, ClipOptions::default())?;
                Ok(())
            }),
        },
    ])
}

/// Counts the kernels and copies of `work` on a GPU; on a CPU the operators that would launch them.
fn launches(device: Device, work: &mut dyn FnMut() -> Result<()>) -> Result<usize> {
    if device == Device::Cpu {
        let counts = OperatorCounts::new();
        work()?;
        return Ok(counts.launches());
    }
    let ((), trace) = trace(device, ProfilerConfig::default(), work)?;
    let events = trace.events().iter();
    Ok(events.filter(|event| event.device_type != 0).count())
}
