use anyhow::Result;
use overdrive::optim::{
    Adafactor, AdafactorConfig, AdamW, AdamW8bit, AdamW8bitConfig, AdamWConfig, ClipOptions, Ema,
    EmaConfig, Implementation, Lion, LionConfig, Muon, MuonConfig, Optimizer, PagedAdamW,
    PagedAdamWConfig, PagingConfig, ParamGroup, Sgd, SgdConfig, StateBits, clip_grad_norm,
    clip_grad_value,
};
use overdrive::sys::grad;
use tch::{Device, Kind, Tensor};

use crate::context::Context;
use crate::finding::Finding;
use crate::parity::{copied, distance, name_of, tolerance};

type Build = fn(Vec<ParamGroup>) -> Result<Box<dyn Optimizer>>;

const STEPS: i64 = 6;

/// The optimizers, and the factor of the tolerance: states of 8 bits may be rounded to the next code.
const ALL: [(&str, f64, Build); 12] = [
    ("AdamW", 1.0, |groups| {
        Ok(Box::new(AdamW::new(groups, AdamWConfig::default())?))
    }),
    ("AdamW, plain", 1.0, |groups| {
        let config = AdamWConfig {
            implementation: Implementation::Plain,
            ..AdamWConfig::default()
        };
        Ok(Box::new(AdamW::new(groups, config)?))
    }),
    ("AdamW, amsgrad", 1.0, |groups| {
        let config = AdamWConfig {
            amsgrad: true,
            ..AdamWConfig::default()
        };
        Ok(Box::new(AdamW::new(groups, config)?))
    }),
    ("AdamW, capturable", 1.0, |groups| {
        let config = AdamWConfig {
            capturable: true,
            ..AdamWConfig::default()
        };
        Ok(Box::new(AdamW::new(groups, config)?))
    }),
    ("AdamW, master weights", 1.0, |groups| {
        let config = AdamWConfig {
            master_weights: true,
            ..AdamWConfig::default()
        };
        Ok(Box::new(AdamW::new(groups, config)?))
    }),
    ("AdamW8bit", 30.0, |groups| {
        Ok(Box::new(AdamW8bit::new(
            groups,
            AdamW8bitConfig::default(),
        )?))
    }),
    ("PagedAdamW, 32 bits", 1.0, |groups| {
        Ok(Box::new(PagedAdamW::new(
            groups,
            paged(StateBits::ThirtyTwo),
        )?))
    }),
    ("PagedAdamW, 8 bits", 30.0, |groups| {
        Ok(Box::new(PagedAdamW::new(groups, paged(StateBits::Eight))?))
    }),
    ("Lion", 30.0, |groups| {
        Ok(Box::new(Lion::new(groups, LionConfig::default())?))
    }),
    ("Adafactor", 1.0, |groups| {
        Ok(Box::new(Adafactor::new(
            groups,
            AdafactorConfig::with_learning_rate(1e-2),
        )?))
    }),
    ("Muon", 30.0, |groups| {
        Ok(Box::new(Muon::new(groups, MuonConfig::default())?))
    }),
    ("SGD", 1.0, |groups| {
        let config = SgdConfig {
            momentum: 0.9,
            nesterov: true,
            ..SgdConfig::default()
        };
        Ok(Box::new(Sgd::new(groups, config)?))
    }),
];

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
                let mut most = 0.0_f64;
                for (there, here) in there.iter().zip(&here) {
                    let far = distance(there, here)?;
                    most = if far.is_nan() { far } else { most.max(far) };
                }
                // Of the updates, which are far smaller than the parameters; in bf16 a parameter is rounded in each step.
                let allowed = factor * 10.0 * tolerance(kind);
                Ok(
                    Finding::judged(most <= allowed, "other updates than on the CPU")
                        .with("output error", most)
                        .with("tolerance", allowed),
                )
            })?;
        }
    }
    Ok(())
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
        let far = there.iter().zip(&here).map(|(a, b)| (a - b).abs() / b);
        let far = far.fold(0.0, f64::max);
        Ok(Finding::judged(far < 1e-5, "other norms")
            .with("output error", far)
            .with("tolerance", 1e-5))
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
        Ok(Finding::judged(far < 1e-6, "other averages")
            .with("output error", far)
            .with("tolerance", 1e-6))
    })
}

/// Returns matrices, one of which is large enough for states of 8 bits and paging. (Muon takes nothing else.)
fn parameters(device: Device, kind: Kind) -> Result<Vec<(String, Tensor)>> {
    [("small", [24, 40]), ("large", [96, 128])]
        .into_iter()
        .map(|(name, size)| {
            let values = Tensor::f_arange(size[0] * size[1], (Kind::Float, Device::Cpu))?;
            let values = (values * 0.37).f_sin()?.f_view(size)?;
            let tensor = copied(&values.f_to_kind(kind)?.f_to_device(device)?)?;
            Ok((name.to_owned(), tensor.f_set_requires_grad(true)?))
        })
        .collect()
}

fn set_gradients(parameters: &[(String, Tensor)], step: i64) -> Result<()> {
    for (_, parameter) in parameters {
        let numbers = Tensor::f_arange(parameter.numel() as i64, (Kind::Float, Device::Cpu))?;
        let numbers = ((numbers * 0.11) + step as f64).f_cos()? * 0.1;
        let gradient = numbers.f_view_as(&parameter.f_detach()?.f_to_device(Device::Cpu)?)?;
        let gradient = gradient.f_to_kind(parameter.kind())?;
        grad::set(parameter, &gradient.f_to_device(parameter.device())?)?;
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
    let mut optimizer = build(vec![group.with_learning_rate(1e-2)])?;
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
