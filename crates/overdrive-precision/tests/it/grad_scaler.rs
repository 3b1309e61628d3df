//! GradScaler against `torch.amp.GradScaler`: fixtures/gen_grad_scaler.py.

use std::collections::HashMap;
use std::path::Path;

use overdrive_optim::{
    AdamW, AdamWConfig, Implementation, Optimizer, ParamGroup, TchOptimizer, clip_grad_value,
};
use overdrive_precision::{Error, GradScaler, GradScalerConfig, GradScalerState, StepOutcome};
use tch::nn::{self, OptimizerConfig};
use tch::{Device, Kind, Tensor};

type TestResult = Result<(), Box<dyn std::error::Error>>;

const F32: (Kind, Device) = (Kind::Float, Device::Cpu);

fn fixture() -> HashMap<String, Tensor> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/grad_scaler.safetensors");
    Tensor::read_safetensors(&path)
        .unwrap_or_else(|error| panic!("{error}: run tests/fixtures/gen_grad_scaler.py"))
        .into_iter()
        .collect()
}

/// Two leaf parameters and the optimizer of each.
struct Setup {
    parameters: [Tensor; 2],
    optimizers: [Box<dyn Optimizer>; 2],
}

fn starts() -> [Tensor; 2] {
    [
        Tensor::linspace(-1, 1, 4, F32),
        Tensor::linspace(2, 3, 3, F32),
    ]
}

fn sgd() -> Result<Setup, Box<dyn std::error::Error>> {
    let mut parameters = Vec::new();
    let mut optimizers: Vec<Box<dyn Optimizer>> = Vec::new();
    for (start, (lr, momentum)) in starts().into_iter().zip([(0.1, 0.0), (0.01, 0.9)]) {
        let store = nn::VarStore::new(Device::Cpu);
        let parameter = store.root().var_copy("p", &start);
        let sgd = nn::Sgd {
            momentum,
            ..nn::Sgd::default()
        }
        .build(&store, lr)?;
        // The store may go: parameter and optimizer share its tensor.
        optimizers.push(Box::new(TchOptimizer::new(sgd, lr)?));
        parameters.push(parameter);
    }
    Ok(Setup {
        parameters: two(parameters),
        optimizers: two(optimizers),
    })
}

fn adamw(implementation: Implementation) -> Result<Setup, Box<dyn std::error::Error>> {
    let mut parameters = Vec::new();
    let mut optimizers: Vec<Box<dyn Optimizer>> = Vec::new();
    for (start, (lr, weight_decay)) in starts().into_iter().zip([(0.1, 0.01), (0.01, 0.1)]) {
        let parameter = start.set_requires_grad(true);
        let group = ParamGroup::new("all", vec![("p".to_owned(), parameter.shallow_clone())]);
        let config = AdamWConfig {
            learning_rate: lr,
            weight_decay,
            implementation,
            ..AdamWConfig::default()
        };
        optimizers.push(Box::new(AdamW::new(vec![group], config)?));
        parameters.push(parameter);
    }
    Ok(Setup {
        parameters: two(parameters),
        optimizers: two(optimizers),
    })
}

fn two<T>(items: Vec<T>) -> [T; 2] {
    items.try_into().unwrap_or_else(|_| panic!("two of them"))
}

/// Runs the 200 steps of the fixture and compares each.
fn follows_torch(kind: &str, setup: Setup, tolerance: f64) -> TestResult {
    let fixture = fixture();
    let get = |name: &str| &fixture[&format!("{kind}.{name}")];
    let [p, q] = &setup.parameters;
    let mut optimizers = setup.optimizers;
    let mut scaler = GradScaler::new(GradScalerConfig {
        init_scale: 1024.0,
        growth_interval: 7,
        ..GradScalerConfig::default()
    })?;
    let mut skips = 0;
    for step in 0..200 {
        for optimizer in &mut optimizers {
            optimizer.zero_grad()?;
        }
        let loss =
            (p * get("x").get(step)).sum(Kind::Float) + (q * get("y").get(step)).sum(Kind::Float);
        scaler.scale(&loss)?.backward();
        for (which, parameter) in [p, q].into_iter().enumerate() {
            let which = which as i64;
            let value = match get("inject").int64_value(&[step, which]) {
                1 => f64::INFINITY,
                2 => f64::NAN,
                _ => continue,
            };
            let _ = parameter.grad().get(which).fill_(value);
        }
        if step % 2 == 0 {
            scaler.unscale_(&optimizers[0])?;
            clip_grad_value(&[p.shallow_clone()], 0.5)?;
        }
        for (which, (parameter, optimizer)) in [p, q].into_iter().zip(&mut optimizers).enumerate() {
            let before = parameter.copy();
            let outcome = scaler.step(optimizer)?;
            let stepped = before != *parameter;
            let expected = get("stepped").int64_value(&[step, which as i64]) == 1;
            assert_eq!(stepped, expected, "step {step}, optimizer {which}");
            match outcome {
                StepOutcome::Stepped => assert!(stepped),
                StepOutcome::SkippedNonFinite => assert!(!stepped),
                _ => {
                    assert_eq!(scaler.found_inf(optimizer)?, !stepped);
                }
            }
            skips += i32::from(!stepped);
        }
        scaler.update()?;
        assert_eq!(
            scaler.get_scale()?,
            get("scale").double_value(&[step]),
            "step {step}"
        );
        let tracker = get("growth_tracker").int64_value(&[step]);
        assert_eq!(scaler.get_growth_tracker()?, tracker, "step {step}");
    }
    assert!(skips > 40, "the fixture must skip: {skips}");
    for (name, parameter) in [("p", p), ("q", q)] {
        let off = (get(name) - parameter).abs().max().double_value(&[]);
        assert!(off <= tolerance, "{name}: {off}");
    }
    Ok(())
}

#[test]
fn two_hundred_steps_of_sgd_equal_torch_to_the_bit() -> TestResult {
    follows_torch("sgd", sgd()?, 0.0)
}

#[test]
fn two_hundred_steps_of_fused_adamw_equal_torch_to_the_bit() -> TestResult {
    follows_torch("adamw", adamw(Implementation::Fused)?, 0.0)
}

#[test]
fn two_hundred_steps_of_plain_adamw_skip_where_torch_skips() -> TestResult {
    // Another order of operations: the trajectory of the scale is equal, the parameters are close.
    follows_torch("adamw", adamw(Implementation::Plain)?, 2e-5)
}

#[test]
fn a_disabled_scaler_passes_through() -> TestResult {
    let mut scaler = GradScaler::new(GradScalerConfig {
        enabled: false,
        ..Default::default()
    })?;
    let Setup {
        parameters: [p, _],
        optimizers: [mut optimizer, _],
    } = sgd()?;
    let loss = (&p * 3.0).sum(Kind::Float);
    assert_eq!(scaler.scale(&loss)?, loss);
    scaler.scale(&loss)?.backward();
    scaler.unscale_(&optimizer)?;
    assert_eq!(p.grad().double_value(&[0]), 3.0);
    assert_eq!(scaler.step(&mut optimizer)?, StepOutcome::Stepped);
    assert!((p.double_value(&[0]) - -1.3).abs() < 1e-6);
    scaler.update()?;
    assert_eq!(scaler.get_scale()?, 1.0);
    assert_eq!(scaler.state_dict()?, None);
    let state = GradScaler::new(GradScalerConfig::default())?
        .state_dict()?
        .unwrap();
    assert!(matches!(
        scaler.load_state_dict(&state),
        Err(Error::Disabled)
    ));
    Ok(())
}

#[test]
fn a_loaded_state_continues_where_it_was_saved() -> TestResult {
    let step = |scaler: &mut GradScaler, setup: &mut Setup| -> TestResult {
        setup.optimizers[0].zero_grad()?;
        scaler
            .scale(&setup.parameters[0].sum(Kind::Float))?
            .backward();
        scaler.step(&mut setup.optimizers[0])?;
        Ok(scaler.update()?)
    };
    let config = GradScalerConfig {
        growth_interval: 3,
        ..Default::default()
    };
    let (mut setup, mut scaler) = (sgd()?, GradScaler::new(config)?);
    step(&mut scaler, &mut setup)?;
    step(&mut scaler, &mut setup)?;
    let state = scaler.state_dict()?.unwrap();
    assert_eq!((state.scale, state.growth_tracker), (65536.0, 2));
    let json = serde_json::to_string(&state)?;
    assert!(json.contains("\"_growth_tracker\":2"), "{json}");

    // Into a fresh scaler, and into one that has been used.
    let mut used = GradScaler::new(GradScalerConfig::default())?;
    let _ = used.scale(&Tensor::ones([1], F32))?;
    for mut other in [GradScaler::new(GradScalerConfig::default())?, used] {
        other.load_state_dict(&serde_json::from_str::<GradScalerState>(&json)?)?;
        step(&mut other, &mut setup)?;
        assert_eq!(
            (other.get_scale()?, other.get_growth_tracker()?),
            (131_072.0, 0)
        );
    }
    let bad = GradScalerState {
        scale: f64::NAN,
        ..state
    };
    assert!(
        scaler
            .load_state_dict(&bad)
            .unwrap_err()
            .to_string()
            .contains("init_scale")
    );
    Ok(())
}

#[test]
fn the_order_of_calls_is_kept() -> TestResult {
    let mut scaler = GradScaler::new(GradScalerConfig::default())?;
    let Setup {
        parameters: [p, _],
        optimizers: [mut optimizer, _],
    } = sgd()?;
    assert!(matches!(
        scaler.unscale_(&optimizer),
        Err(Error::NotScaled { called: "unscale_" })
    ));
    assert!(matches!(
        scaler.update(),
        Err(Error::NotScaled { called: "update" })
    ));
    let loss = scaler.scale(&p.sum(Kind::Float))?;
    assert!(
        matches!(scaler.step(&mut optimizer), Err(Error::NoInfChecks { .. })),
        "no backward"
    );
    assert!(matches!(scaler.update(), Err(Error::NoInfChecks { .. })));
    loss.backward();
    scaler.update_to(1024.0)?;
    assert_eq!(scaler.get_scale()?, 1024.0);
    scaler.unscale_(&optimizer)?;
    assert!(matches!(
        scaler.unscale_(&optimizer),
        Err(Error::AlreadyUnscaled)
    ));
    scaler.step(&mut optimizer)?;
    assert!(matches!(
        scaler.step(&mut optimizer),
        Err(Error::AlreadyStepped)
    ));
    assert!(matches!(
        scaler.unscale_(&optimizer),
        Err(Error::UnscaleAfterStep)
    ));
    scaler.update()?;
    Ok(())
}

#[test]
fn fp16_gradients_are_refused_and_left_alone() -> TestResult {
    let p = Tensor::ones([2], (Kind::Half, Device::Cpu)).set_requires_grad(true);
    let group = ParamGroup::new("all", vec![("p".to_owned(), p.shallow_clone())]);
    let optimizer = AdamW::new(vec![group], AdamWConfig::default())?;
    let mut scaler = GradScaler::new(GradScalerConfig {
        init_scale: 8.0,
        ..Default::default()
    })?;
    scaler.scale(&p.sum(Kind::Half))?.backward();
    assert!(matches!(
        scaler.unscale_(&optimizer),
        Err(Error::HalfGradients)
    ));
    assert_eq!(p.grad().double_value(&[0]), 8.0);
    Ok(())
}

#[test]
fn options_out_of_range_are_named() {
    let default = GradScalerConfig::default();
    for (config, name) in [
        (
            GradScalerConfig {
                init_scale: 0.0,
                ..default
            },
            "init_scale",
        ),
        (
            GradScalerConfig {
                growth_factor: 1.0,
                ..default
            },
            "growth_factor",
        ),
        (
            GradScalerConfig {
                backoff_factor: 1.0,
                ..default
            },
            "backoff_factor",
        ),
        (
            GradScalerConfig {
                growth_interval: 0,
                ..default
            },
            "growth_interval",
        ),
    ] {
        let error = GradScaler::new(config).unwrap_err().to_string();
        assert!(error.starts_with(&format!("`{name}` is ")), "{error}");
    }
}
