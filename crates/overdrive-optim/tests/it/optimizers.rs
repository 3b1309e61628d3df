//! SGD, Lion, Adafactor and Muon compared with their originals.

use crate::common::{Run, cpu, difference, fixture, one_group, with_gradient};
use overdrive_optim::{
    Adafactor, AdafactorConfig, Lion, LionConfig, Muon, MuonConfig, MuonPrecision, MuonRate,
    Optimizer, Sgd, SgdConfig,
};
use tch::{Kind, Tensor};

const NAMES: &[&str] = &["proj.weight", "proj.bias", "conv.weight", "gain"];
const MATRICES: &[&str] = &["wide.weight", "tall.weight", "square.weight"];

fn sgd(case: &str, config: SgdConfig) -> f64 {
    let fixture = fixture("optimizers");
    let run = Run::new(&fixture, NAMES, Kind::Float);
    let config = SgdConfig {
        learning_rate: 1e-2,
        ..config
    };
    let mut optimizer = Sgd::new(run.groups(), config).unwrap();
    run.worst_difference(&mut optimizer, case, |part| {
        (part == "momentum_buffer").then_some("momentum_buffer")
    })
}

#[test]
fn sgd_equals_torch() {
    let momentum = |momentum| SgdConfig {
        momentum,
        ..SgdConfig::default()
    };
    assert!(sgd("sgd_plain", momentum(0.0)) <= 1e-6);
    let dampened = SgdConfig {
        dampening: 0.2,
        ..momentum(0.9)
    };
    assert!(sgd("sgd_momentum", dampened) <= 1e-6);
    let nesterov = SgdConfig {
        nesterov: true,
        ..momentum(0.8)
    };
    assert!(sgd("sgd_nesterov", nesterov) <= 1e-6);
    let maximize = SgdConfig {
        maximize: true,
        ..momentum(0.9)
    };
    assert!(sgd("sgd_maximize", maximize) <= 1e-6);
}

#[test]
fn sgd_updates_strided_views_as_dense_parameters() {
    let values = Tensor::arange(12, cpu(Kind::Float)).view([4, 3]);
    let whole = values.repeat([1, 2]);
    let gradient = values.sin();
    let config = SgdConfig {
        learning_rate: 0.1,
        momentum: 0.9,
        nesterov: true,
        weight_decay: 0.3,
        ..SgdConfig::default()
    };
    let strided = whole.narrow(1, 0, 3).detach().set_requires_grad(true);
    overdrive_sys::grad::set(&strided, &gradient).unwrap();
    let dense = with_gradient(&values, &gradient);
    let mut optimizers =
        [&strided, &dense].map(|p| Sgd::new(one_group("w", p), config.clone()).unwrap());
    for _ in 0..3 {
        optimizers.iter_mut().for_each(|o| o.step().unwrap());
    }
    assert!(difference(&strided, &dense) <= 1e-6);
    assert!(
        whole.narrow(1, 3, 3).equal(&values),
        "the neighbours are untouched"
    );
}

/// libtorch's fused kernel for CPUs leaves whole vectors of half precision as they are.
#[test]
fn sgd_in_half_precision_is_that_in_fp32_with_parameters_and_momentum_rounded_once() {
    let config = SgdConfig {
        learning_rate: 0.1,
        momentum: 0.9,
        nesterov: true,
        weight_decay: 0.3,
        ..SgdConfig::default()
    };
    for kind in [Kind::BFloat16, Kind::Half] {
        // Whole vectors and a rest.
        let values = (Tensor::arange(99, cpu(Kind::Float)) * 0.37).sin();
        let values = values.to_kind(kind);
        let gradient = (Tensor::arange(99, cpu(Kind::Float)) * 7.3)
            .cos()
            .to_kind(kind);
        let parameter = with_gradient(&values, &gradient);
        let mut optimizer = Sgd::new(one_group("w", &parameter), config.clone()).unwrap();
        let wide = |tensor: &Tensor| tensor.detach().to_kind(Kind::Float);
        let (mut expected, mut momentum) = (values.copy(), Tensor::zeros_like(&values));
        for step in 0..4 {
            optimizer.step().unwrap();
            let sum = wide(&gradient) + wide(&expected) * 0.3;
            let kept = match step {
                0 => sum.copy(),
                _ => wide(&momentum) * 0.9 + &sum,
            };
            expected = (wide(&expected) - (sum + &kept * 0.9) * 0.1).to_kind(kind);
            momentum = kept.to_kind(kind);
        }
        assert!(
            difference(&wide(&parameter), &wide(&values)) > 0.1,
            "{kind:?}"
        );
        assert_eq!(
            difference(&wide(&parameter), &wide(&expected)),
            0.0,
            "{kind:?}"
        );
    }
}

#[test]
fn lion_equals_bitsandbytes() {
    let fixture = fixture("optimizers");
    let run = Run::new(&fixture, NAMES, Kind::Float);
    let config = LionConfig {
        learning_rate: 1e-2,
        ..LionConfig::default()
    };
    let mut optimizer = Lion::new(run.groups(), config).unwrap();
    let worst = run.worst_difference(&mut optimizer, "lion", |_| Some("state1"));
    assert!(worst <= 1e-6);
}

#[test]
fn lion_steps_every_kind_and_layout_alike() {
    let values = (Tensor::arange(600, cpu(Kind::Float)) * 0.37)
        .sin()
        .view([20, 30]);
    let gradient = (&values * 7.3).cos();
    let config = LionConfig {
        learning_rate: 0.125,
        weight_decay: 0.5,
        ..LionConfig::default()
    };
    let run = |values: &Tensor, gradient: &Tensor| {
        let parameter = with_gradient(values, gradient);
        let mut optimizer = Lion::new(one_group("w", &parameter), config.clone()).unwrap();
        (0..4).for_each(|_| optimizer.step().unwrap());
        parameter.detach()
    };
    let expected = run(&values, &gradient);
    for (kind, tolerance) in [
        (Kind::Double, 1e-6),
        (Kind::BFloat16, 1e-2),
        (Kind::Half, 2e-3),
    ] {
        let found = run(&values.to_kind(kind), &gradient.to_kind(kind));
        assert_eq!(found.kind(), kind);
        assert!(difference(&found, &expected) <= tolerance, "{kind:?}");
    }
    let column_major = with_gradient(&values.tr().contiguous(), &gradient.tr().contiguous());
    let transposed = column_major.detach().tr().set_requires_grad(true);
    assert!(!transposed.is_contiguous());
    overdrive_sys::grad::set(&transposed, &gradient).unwrap();
    let mut optimizer = Lion::new(one_group("w", &transposed), config.clone()).unwrap();
    (0..4).for_each(|_| optimizer.step().unwrap());
    assert!(difference(&transposed, &expected) <= 1e-6);
}

fn adafactor(case: &str, config: AdafactorConfig, kind: Kind) -> f64 {
    let fixture = fixture("optimizers");
    let run = Run::new(&fixture, NAMES, kind);
    let mut optimizer = Adafactor::new(run.groups(), config).unwrap();
    run.worst_difference(&mut optimizer, case, |part| match part {
        "exp_avg" => Some("exp_avg"),
        "exp_avg_sq" => Some("exp_avg_sq"),
        "exp_avg_sq_row" => Some("exp_avg_sq_row"),
        "exp_avg_sq_col" => Some("exp_avg_sq_col"),
        _ => None,
    })
}

#[test]
fn adafactor_equals_transformers() {
    let rate = AdafactorConfig::with_learning_rate(1e-2);
    let scaled = AdafactorConfig {
        scale_parameter: true,
        clip_threshold: 0.5,
        ..rate.clone()
    };
    let warmup = AdafactorConfig {
        warmup_init: true,
        ..AdafactorConfig::default()
    };
    let beta1 = AdafactorConfig {
        beta1: Some(0.9),
        ..AdafactorConfig::default()
    };
    for (case, config) in [
        ("adafactor_default", AdafactorConfig::default()),
        ("adafactor_warmup", warmup),
        ("adafactor_rate", rate),
        ("adafactor_scaled", scaled),
        ("adafactor_beta1", beta1),
    ] {
        // Float64 takes the path through operators, float32 matrices the loop.
        for kind in [Kind::Float, Kind::Double] {
            assert!(
                adafactor(case, config.clone(), kind) <= 1e-5,
                "{case} {kind:?}"
            );
        }
    }
}

fn muon(case: &str, config: MuonConfig) -> (f64, f64) {
    let fixture = fixture("optimizers");
    let run = Run::with_prefix(&fixture, "matrix.", MATRICES, Kind::Float);
    let config = MuonConfig {
        learning_rate: 2e-2,
        ..config
    };
    let mut optimizer = Muon::new(run.groups(), config).unwrap();
    let mut worst = 0f64;
    for t in 0..crate::common::STEPS {
        run.step(&mut optimizer, t);
    }
    for name in MATRICES {
        let expected = &fixture[&format!("{case}.20.{name}")];
        let change = (expected - &fixture[&format!("matrix.initial.{name}")])
            .abs()
            .max();
        let apart = (&run.parameters[name] - expected).abs().max() / change;
        worst = worst.max(apart.double_value(&[]));
    }
    let momentum = &optimizer.state_dict().unwrap().tensors["wide.weight.momentum_buffer"];
    let expected = &fixture[&format!("{case}.state.wide.weight.momentum_buffer")];
    println!("{case}: {worst:.1e}");
    (worst, difference(momentum, expected))
}

#[test]
fn muon_equals_torch() {
    let bfloat16 = MuonConfig {
        precision: MuonPrecision::BFloat16,
        ..MuonConfig::default()
    };
    let plain = MuonConfig {
        nesterov: false,
        ns_steps: 3,
        ..bfloat16.clone()
    };
    let rms = MuonConfig {
        adjust_lr_fn: MuonRate::MatchRmsAdamw,
        ..bfloat16.clone()
    };
    for (case, config) in [("muon", bfloat16), ("muon_plain", plain), ("muon_rms", rms)] {
        let (parameters, momentum) = muon(case, config);
        assert!(parameters <= 3e-2 && momentum <= 1e-6, "{case}");
    }
    let float32 = MuonConfig {
        precision: MuonPrecision::Float32,
        ..MuonConfig::default()
    };
    let (parameters, momentum) = muon("muon_float32", float32);
    assert!(parameters <= 1e-4 && momentum <= 1e-6);
}

#[test]
fn the_error_of_muon_for_a_parameter_that_is_not_a_matrix_names_the_remedy() {
    let bias = Tensor::zeros([3], cpu(Kind::Float)).set_requires_grad(true);
    let error = Muon::new(one_group("proj.bias", &bias), MuonConfig::default()).unwrap_err();
    assert_eq!(
        error.to_string(),
        "parameter `proj.bias` has shape [3], but Muon updates matrices only; \
         pass this parameter to an AdamW beside it, as norms, biases, embeddings and output layers"
    );
}

#[test]
fn the_error_of_an_option_out_of_its_range_names_it() {
    let message = |result: Result<(), overdrive_optim::Error>| result.unwrap_err().to_string();
    let nesterov = SgdConfig {
        nesterov: true,
        ..SgdConfig::default()
    };
    assert_eq!(
        message(nesterov.validate()),
        "`nesterov` is true; it must be false unless the momentum is positive and the dampening is 0"
    );
    let warmup = AdafactorConfig {
        warmup_init: true,
        ..AdafactorConfig::with_learning_rate(1.0)
    };
    assert!(message(warmup.validate()).starts_with("`warmup_init` is true"));
    let lion = LionConfig {
        betas: (0.9, 1.0),
        ..LionConfig::default()
    };
    assert!(message(lion.validate()).contains("is 1; it must be at least 0 and below 1"));
    let muon = MuonConfig {
        ns_steps: 100,
        ..MuonConfig::default()
    };
    assert_eq!(
        message(muon.validate()),
        "`ns_steps` is 100; it must be below 100"
    );
    let unknown = serde_json::from_str::<LionConfig>(r#"{"lr": 1}"#).unwrap_err();
    assert!(unknown.to_string().contains("unknown field `lr`"));
}

#[test]
fn empty_parameters_and_parameters_without_gradient_do_not_change() {
    let empty = Tensor::zeros([0, 4], cpu(Kind::Float)).set_requires_grad(true);
    let still = Tensor::ones([2, 2], cpu(Kind::Float)).set_requires_grad(true);
    overdrive_sys::grad::set(&empty, &empty.detach()).unwrap();
    let group = || {
        let named = vec![
            ("empty".to_string(), empty.shallow_clone()),
            ("still".to_string(), still.shallow_clone()),
        ];
        vec![overdrive_optim::ParamGroup::new("all", named)]
    };
    let mut optimizers: Vec<Box<dyn Optimizer>> = vec![
        Box::new(Sgd::new(group(), SgdConfig::default()).unwrap()),
        Box::new(Lion::new(group(), LionConfig::default()).unwrap()),
        Box::new(Adafactor::new(group(), AdafactorConfig::default()).unwrap()),
        Box::new(Muon::new(group(), MuonConfig::default()).unwrap()),
    ];
    for optimizer in &mut optimizers {
        optimizer.step().unwrap();
        assert!(still.equal(&still.ones_like()));
    }
}
