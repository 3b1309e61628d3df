use anyhow::Result;
use overdrive::optim::{
    Adafactor, AdafactorConfig, AdamW, AdamW8bit, AdamW8bitConfig, AdamWConfig, ClipOptions, Ema,
    EmaConfig, Implementation, Lion, LionConfig, Muon, MuonConfig, MuonPrecision, Optimizer,
    PagedAdamW, PagedAdamWConfig, PagingConfig, ParamGroup, Sgd, SgdConfig, StateBits,
    clip_grad_norm, clip_grad_value,
};
use overdrive::sys::grad;
use tch::{Device, Kind, Tensor};

use crate::context::Context;
use crate::finding::Finding;
use crate::parity::{copied, distance, furthest, largest, name_of, tolerance};

/// Makes an optimizer of these groups.
type Build = fn(Vec<ParamGroup>) -> Result<Box<dyn Optimizer>>;

const STEPS: i64 = 6;
/// The factor of the tolerance of arithmetic in bf16, whatever the dtype of the parameters.
const IN_BF16: f64 = 4.0 / 256.0 / 1e-5;

/// The optimizers, and the factor of the tolerance: states of 8 bits may be rounded to the next code.
const ALL: [(&str, f64, Build); 13] = [
    ("AdamW", 1.0, |groups| adamw(groups, |_| ())),
    ("AdamW, plain", 1.0, |groups| {
        adamw(groups, |config| {
            config.implementation = Implementation::Plain
        })
    }),
    ("AdamW, amsgrad", 1.0, |groups| {
        adamw(groups, |config| config.amsgrad = true)
    }),
    ("AdamW, capturable", 1.0, |groups| {
        adamw(groups, |config| config.capturable = true)
    }),
    ("AdamW, master weights", 1.0, |groups| {
        adamw(groups, |config| config.master_weights = true)
    }),
    ("AdamW8bit", 30.0, |groups| {
        boxed(AdamW8bit::new(groups, AdamW8bitConfig::default()))
    }),
    ("PagedAdamW, 32 bits", 1.0, |groups| {
        boxed(PagedAdamW::new(groups, paged(StateBits::ThirtyTwo)))
    }),
    ("PagedAdamW, 8 bits", 30.0, |groups| {
        boxed(PagedAdamW::new(groups, paged(StateBits::Eight)))
    }),
    ("Lion", 30.0, |groups| {
        boxed(Lion::new(groups, LionConfig::default()))
    }),
    ("Adafactor", 1.0, |groups| {
        boxed(Adafactor::new(
            groups,
            AdafactorConfig::with_learning_rate(1e-2),
        ))
    }),
    // The default iterates in bf16 on a GPU and in f32 on a CPU, so each side is told.
    ("Muon, iterating in f32", 30.0, |groups| {
        boxed(Muon::new(groups, muon(MuonPrecision::Float32)))
    }),
    ("Muon, iterating in bf16", IN_BF16, |groups| {
        boxed(Muon::new(groups, muon(MuonPrecision::BFloat16)))
    }),
    ("SGD", 1.0, |groups| {
        let config = SgdConfig {
            momentum: 0.9,
            nesterov: true,
            ..SgdConfig::default()
        };
        boxed(Sgd::new(groups, config))
    }),
];

fn boxed<O: Optimizer + 'static>(made: overdrive::optim::Result<O>) -> Result<Box<dyn Optimizer>> {
    Ok(Box::new(made?))
}

fn adamw(groups: Vec<ParamGroup>, change: fn(&mut AdamWConfig)) -> Result<Box<dyn Optimizer>> {
    let mut config = AdamWConfig::default();
    change(&mut config);
    boxed(AdamW::new(groups, config))
}

fn muon(precision: MuonPrecision) -> MuonConfig {
    MuonConfig {
        precision,
        ..MuonConfig::default()
    }
}

fn paged(state_bits: StateBits) -> PagedAdamWConfig {
    PagedAdamWConfig {
        state_bits,
        paging: PagingConfig {
            max_resident_bytes: 1 << 20,
            min_paged_elements: 1000,
            ..PagingConfig::default()
        },
        ..PagedAdamWConfig::default()
    }
}

/// Runs the checks of the optimizers for which overdrive-gpu has a kernel.
pub(super) fn with_kernels(context: &mut Context) -> Result<()> {
    steps(context, |name| name.contains('8'))
}

fn steps(context: &mut Context, is_wanted: impl Fn(&str) -> bool) -> Result<()> {
    let device = context.device();
    for (name, factor, build) in ALL {
        if !is_wanted(name) {
            continue;
        }
        for kind in [Kind::Float, Kind::BFloat16] {
            context.check(format!("{name} in {}", name_of(kind)), || {
                let there = updates(build, device, kind)?;
                let here = updates(build, Device::Cpu, kind)?;
                let most = furthest(&there, &here)?;
                let allowed = allowed(factor, kind);
                Ok(Finding::within(
                    most,
                    allowed,
                    "the updates differ from the CPU's",
                ))
            })?;
        }
    }
    Ok(())
}

/// Returns the allowed distance between the updates: in bf16 a parameter is rounded in each step. It never exceeds a
/// sixth, because a step with a different rate, momentum or decay would then pass.
fn allowed(factor: f64, kind: Kind) -> f64 {
    (factor * 10.0 * tolerance(kind)).min(10.0 * tolerance(Kind::BFloat16))
}

pub(super) fn run(context: &mut Context) -> Result<()> {
    let device = context.device();
    steps(context, |_| true)?;
    context.check("gradient clipping and its norm", || {
        let norms = [device, Device::Cpu].map(|device| -> Result<[f64; 2]> {
            let parameters = parameters(device, Kind::Float)?;
            set_gradients(&parameters, 1)?;
            let tensors: Vec<Tensor> = parameters.iter().map(|(_, t)| t.shallow_clone()).collect();
            let norm = clip_grad_norm(&tensors, 0.5, ClipOptions::default())?;
            clip_grad_value(&tensors, 1e-3)?;
            let after = overdrive::optim::grad_norm(&tensors, ClipOptions::default())?;
            Ok([norm.f_double_value(&[])?, after.f_double_value(&[])?])
        });
        let [there, here] = norms;
        let (there, here) = (there?, here?);
        let far = largest(there.iter().zip(&here).map(|(a, b)| (a - b).abs() / b));
        Ok(Finding::within(far, 1e-5, "the norms differ"))
    })?;
    context.check("averages of weights", || {
        let averages = [device, Device::Cpu].map(|device| -> Result<Tensor> {
            let parameters = parameters(device, Kind::Float)?;
            let first = parameters[0].1.shallow_clone();
            let mut ema = Ema::new(parameters, EmaConfig::default())?;
            let _same = tch::no_grad(|| first.shallow_clone().f_mul_scalar_(2.0))?;
            ema.update()?;
            ema.copy_to_model()?;
            Ok(first.f_detach()?)
        });
        let [there, here] = averages;
        let far = distance(&there?, &here?)?;
        Ok(Finding::within(far, 1e-6, "the averages differ"))
    })
}

/// As large as the updates, so that bf16 can represent these.
const SCALE: f64 = 0.02;
const LEARNING_RATE: f64 = 0.1;

/// Returns the gradient of a parameter in a step: drawn, and so of full rank, because Muon's iteration makes rounding in the
/// other directions as large as the update.
fn gradient(parameter: &Tensor, step: i64) -> Result<Tensor> {
    let size = parameter.size();
    tch::manual_seed(1000 * step + size[0]);
    let numbers = Tensor::f_randn(&size, (Kind::Float, Device::Cpu))? * 0.1;
    let gradient = numbers.f_to_kind(parameter.kind())?;
    Ok(gradient.f_to_device(parameter.device())?)
}

/// Returns matrices, one of which is large enough for states of 8 bits and paging. (Muon takes nothing else.)
fn parameters(device: Device, kind: Kind) -> Result<Vec<(String, Tensor)>> {
    [("small", [24, 40]), ("large", [96, 128])]
        .into_iter()
        .map(|(name, size)| {
            let values = Tensor::f_arange(size[0] * size[1], (Kind::Float, Device::Cpu))?;
            let values = (values * 0.37).f_sin()?.f_view(size)? * SCALE;
            let tensor = copied(&values.f_to_kind(kind)?.f_to_device(device)?)?;
            Ok((name.to_owned(), tensor.f_set_requires_grad(true)?))
        })
        .collect()
}

fn set_gradients(parameters: &[(String, Tensor)], step: i64) -> Result<()> {
    for (_, parameter) in parameters {
        grad::set(parameter, &gradient(parameter, step)?)?;
    }
    Ok(())
}

/// Returns how far a few steps move the parameters.
fn updates(build: Build, device: Device, kind: Kind) -> Result<Vec<Tensor>> {
    let parameters = parameters(device, kind)?;
    let before: Vec<Tensor> = parameters
        .iter()
        .map(|(_, tensor)| copied(&tensor.f_detach()?))
        .collect::<Result<_>>()?;
    let shared = parameters.iter();
    let shared = shared.map(|(name, tensor)| (name.clone(), tensor.shallow_clone()));
    let group = ParamGroup::new("all", shared.collect()).with_weight_decay(0.1);
    let mut optimizer = build(vec![group.with_learning_rate(LEARNING_RATE)])?;
    for step in 0..STEPS {
        set_gradients(&parameters, step)?;
        optimizer.step()?;
    }
    parameters
        .iter()
        .zip(&before)
        .map(|((_, after), before)| {
            let after = after.f_detach()?.f_to_kind(Kind::Float)?;
            Ok(after.f_sub(&before.f_to_kind(Kind::Float)?)?)
        })
        .collect()
}
