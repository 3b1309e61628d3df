//! The states of every optimizer and of averages in files; master weights; clipping by group.

use crate::common::{Run, cpu, difference, fixture, one_group, with_gradient};
use overdrive_optim::{
    Adafactor, AdafactorConfig, AdamW, AdamW8bit, AdamW8bitConfig, AdamWConfig, ClipOptions, Ema,
    EmaConfig, EmaWarmup, Error, Implementation, Lion, LionConfig, Muon, MuonConfig, Optimizer,
    OptimizerState, PagedAdamW, PagedAdamWConfig, PagingConfig, ParamGroup, Sgd, SgdConfig,
    StateBits, StateDict, clip_grad_norm_by_group,
};
use tch::{Kind, Tensor};

const NAMES: &[&str] = &["proj.weight", "embed.weight", "norm.weight"];
const MATRICES: &[&str] = &["proj.weight", "embed.weight"];

type Make = fn(Vec<ParamGroup>) -> Box<dyn Optimizer>;

/// Every optimizer, made in one line each.
fn all() -> Vec<(&'static str, Kind, Make)> {
    vec![
        ("adamw", Kind::Float, |groups| {
            Box::new(AdamW::new(groups, AdamWConfig::default()).unwrap())
        }),
        ("adamw with masters", Kind::BFloat16, |groups| {
            let config = AdamWConfig {
                master_weights: true,
                ..Default::default()
            };
            Box::new(AdamW::new(groups, config).unwrap())
        }),
        ("adamw 8-bit", Kind::Float, |groups| {
            Box::new(AdamW8bit::new(groups, AdamW8bitConfig::default()).unwrap())
        }),
        ("paged", Kind::Float, |groups| {
            Box::new(PagedAdamW::new(groups, paged(StateBits::ThirtyTwo)).unwrap())
        }),
        ("paged 8-bit", Kind::BFloat16, |groups| {
            Box::new(PagedAdamW::new(groups, paged(StateBits::Eight)).unwrap())
        }),
        ("sgd", Kind::Float, |groups| {
            let config = SgdConfig {
                momentum: 0.9,
                ..Default::default()
            };
            Box::new(Sgd::new(groups, config).unwrap())
        }),
        ("lion", Kind::Float, |groups| {
            Box::new(Lion::new(groups, LionConfig::default()).unwrap())
        }),
        ("adafactor", Kind::Float, |groups| {
            let config = AdafactorConfig {
                beta1: Some(0.5),
                ..Default::default()
            };
            Box::new(Adafactor::new(groups, config).unwrap())
        }),
        ("adafactor without beta1", Kind::Float, |groups| {
            Box::new(Adafactor::new(groups, AdafactorConfig::default()).unwrap())
        }),
    ]
}

fn paged(state_bits: StateBits) -> PagedAdamWConfig {
    PagedAdamWConfig {
        state_bits,
        paging: PagingConfig {
            max_resident_bytes: 1 << 20,
            min_paged_elements: 1000,
            ..Default::default()
        },
        ..Default::default()
    }
}

/// Ten steps, a file, ten more steps by another instance beside the first.
fn resumes(name: &str, kind: Kind, make: Make, names: &'static [&'static str]) {
    let fixture = fixture("adamw8bit");
    let runs = [(); 2].map(|()| Run::new(&fixture, names, kind));
    let mut whole = make(runs[0].groups());
    for t in 0..10 {
        whole.set_learning_rate(1e-3 * t as f64).unwrap();
        runs[0].step(&mut *whole, t);
    }
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("optimizer.safetensors");
    whole.save_state(&path).unwrap();
    // The temporary file got its name.
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1);

    for (name, parameter) in &runs[1].parameters {
        let mut parameter = parameter.shallow_clone();
        tch::no_grad(|| parameter.copy_(&runs[0].parameters[name]));
    }
    let mut resumed = make(runs[1].groups());
    resumed.set_learning_rate(7.0).unwrap();
    resumed.load_state(&path).unwrap();
    assert_eq!(resumed.learning_rates(), whole.learning_rates(), "{name}");
    for t in 10..20 {
        runs[0].step(&mut *whole, t);
        runs[1].step(&mut *resumed, t);
    }
    for parameter in names {
        let [one, two] = [&runs[0], &runs[1]].map(|run| &run.parameters[parameter]);
        assert!(one.equal(two), "{name}: {parameter}");
        let start = fixture[&format!("initial.{parameter}")].to_kind(kind);
        assert!(!one.equal(&start), "{name}: {parameter} moved");
    }
    let (one, two) = (whole.state_dict().unwrap(), resumed.state_dict().unwrap());
    assert_eq!(one.metadata, two.metadata, "{name}");
    for (key, tensor) in &one.tensors {
        assert!(tensor.equal(&two.tensors[key]), "{name}: {key}");
    }
}

#[test]
fn every_optimizer_resumes_bit_equal_through_a_file() {
    for (name, kind, make) in all() {
        resumes(name, kind, make, NAMES);
    }
    resumes(
        "muon",
        Kind::Float,
        |groups| Box::new(Muon::new(groups, MuonConfig::default()).unwrap()),
        MATRICES,
    );
}

#[test]
fn the_error_of_a_state_of_another_optimizer_or_shape_names_the_tensors() {
    let fixture = fixture("adamw8bit");
    let run = Run::new(&fixture, NAMES, Kind::Float);
    let mut lion = Lion::new(run.groups(), LionConfig::default()).unwrap();
    let mut sgd = Sgd::new(run.groups(), SgdConfig::default()).unwrap();
    run.step(&mut lion, 1);
    let mut state = lion.state_dict().unwrap();
    let message = sgd.load_state_dict(&state).unwrap_err().to_string();
    assert_eq!(
        message,
        "the optimizer state does not fit: it is the state of `lion`, and this optimizer is `sgd`; load it into \
         `lion`, or train on without it"
    );
    // AdamW stores its options in another form.
    let mut adamw = AdamW::new(run.groups(), AdamWConfig::default()).unwrap();
    for message in [
        adamw.load_state_dict(&state).unwrap_err().to_string(),
        lion.load_state_dict(&adamw.state_dict().unwrap())
            .unwrap_err()
            .to_string(),
    ] {
        assert!(message.contains("fit: it is the state of `"), "{message}");
    }
    let wrong = Tensor::zeros([4], cpu(Kind::Float));
    state.tensors.remove("norm.weight.exp_avg");
    state.tensors.insert("proj.weight.exp_avg".into(), wrong);
    let before = lion.state_dict().unwrap().tensors["embed.weight.exp_avg"].copy();
    let message = lion.load_state_dict(&state).unwrap_err().to_string();
    assert_eq!(
        message,
        "the optimizer state does not fit: missing tensors: norm.weight.exp_avg; \
         misshapen tensors: proj.weight.exp_avg is Float [4] and must be Float [40, 110]"
    );
    assert!(lion.state_dict().unwrap().tensors["embed.weight.exp_avg"].equal(&before));
}

#[test]
fn codes_are_not_loaded_as_floats() {
    let fixture = fixture("adamw8bit");
    let run = Run::new(&fixture, NAMES, Kind::Float);
    let mut optimizer = AdamW8bit::new(run.groups(), AdamW8bitConfig::default()).unwrap();
    run.step(&mut optimizer, 1);
    let mut state = optimizer.state_dict().unwrap();
    let floats = state.tensors["proj.weight.exp_avg"].to_kind(Kind::Float);
    state.tensors.insert("proj.weight.exp_avg".into(), floats);
    let message = optimizer.load_state_dict(&state).unwrap_err().to_string();
    assert!(
        message.contains("proj.weight.exp_avg is Float [40, 110] and must be Uint8 [40, 110]"),
        "{message}"
    );
}

#[test]
fn damaged_and_foreign_files_are_an_error_and_a_failed_save_leaves_the_old_file() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("state.safetensors");
    let message = |path: &std::path::Path| StateDict::load(path).unwrap_err().to_string();
    assert!(message(&path).starts_with("cannot "), "{}", message(&path));
    Tensor::write_safetensors(&[("w", Tensor::zeros([2], cpu(Kind::Float)))], &path).unwrap();
    assert!(message(&path).contains("is not valid optimizer state: its header has no"));

    let parameter = with_gradient(
        &Tensor::ones([3], cpu(Kind::Float)),
        &Tensor::ones([3], cpu(Kind::Float)),
    );
    let mut optimizer = Lion::new(one_group("w", &parameter), LionConfig::default()).unwrap();
    optimizer.step().unwrap();
    optimizer.save_state(&path).unwrap();
    let bytes = std::fs::read(&path).unwrap();
    for length in [0, 4, 20, bytes.len() - 1] {
        std::fs::write(&path, &bytes[..length]).unwrap();
        let error = StateDict::load(&path).unwrap_err();
        let expected = matches!(
            error,
            Error::Common(overdrive_core::Error::Parse { .. } | overdrive_core::Error::Io { .. })
        );
        assert!(expected, "{error}");
    }
    std::fs::write(&path, &bytes).unwrap();
    let mut state = optimizer.state_dict().unwrap();
    state
        .tensors
        .insert("odd".into(), Tensor::zeros([1], cpu(Kind::Bool)));
    assert!(state.save(&path).is_err());
    assert_eq!(std::fs::read(&path).unwrap(), bytes);
    let nowhere = folder.path().join("no/such/folder/state.safetensors");
    let error = optimizer.save_state(&nowhere).unwrap_err().to_string();
    assert!(error.starts_with("cannot "), "{error}");
}

#[test]
fn master_weights_equal_float32_adamw_and_a_cast() {
    const OF_FIXTURE: &[&str] = &["proj.weight", "proj.bias", "conv.weight", "gain"];
    let fixture = fixture("optimizers");
    for implementation in [Implementation::Fused, Implementation::Plain] {
        let run = Run::new(&fixture, OF_FIXTURE, Kind::BFloat16);
        let config = AdamWConfig {
            learning_rate: 1e-2,
            master_weights: true,
            implementation,
            ..Default::default()
        };
        let mut optimizer = AdamW::new(run.groups(), config).unwrap();
        for t in 0..crate::common::STEPS {
            run.step(&mut optimizer, t);
        }
        let state = optimizer.state_dict().unwrap().tensors;
        for name in OF_FIXTURE {
            let master = &state[&format!("{name}.master")];
            assert_eq!(master.kind(), Kind::Float);
            assert!(difference(master, &fixture[&format!("master.20.{name}")]) <= 1e-6);
            assert!(run.parameters[name].equal(&master.to_kind(Kind::BFloat16)));
            let squares = &state[&format!("{name}.exp_avg_sq")];
            let expected = &fixture[&format!("master.state.{name}.exp_avg_sq")];
            assert!(difference(squares, expected) <= 1e-6);
        }
        // Twelve bytes a parameter and a step count each.
        let elements: usize = run.parameters.values().map(Tensor::numel).sum();
        assert_eq!(optimizer.state_bytes(), elements as u64 * 12 + 4 * 4);
    }
}

#[test]
fn small_changes_accumulate_with_master_weights_and_are_lost_without() {
    let moved = |master_weights| {
        let parameter = with_gradient(
            &Tensor::ones([4], cpu(Kind::BFloat16)),
            &Tensor::ones([4], cpu(Kind::BFloat16)),
        );
        let config = AdamWConfig {
            learning_rate: 1e-4,
            weight_decay: 0.0,
            master_weights,
            ..Default::default()
        };
        let mut optimizer = AdamW::new(one_group("w", &parameter), config).unwrap();
        (0..200).for_each(|_| optimizer.step().unwrap());
        1.0 - parameter.double_value(&[0])
    };
    assert_eq!(moved(false), 0.0);
    assert!((moved(true) - 0.02).abs() < 4e-3);
}

fn ema_weights() -> Vec<(String, Tensor)> {
    let leaf = |shape: &[i64]| Tensor::zeros(shape, cpu(Kind::Float)).set_requires_grad(true);
    vec![("a".into(), leaf(&[17, 33])), ("b".into(), leaf(&[33]))]
}

#[test]
fn averages_equal_torch() {
    const OF_FIXTURE: &[&str] = &["proj.weight", "proj.bias", "conv.weight", "gain"];
    let fixture = fixture("optimizers");
    let run = Run::new(&fixture, OF_FIXTURE, Kind::Float);
    let named: Vec<_> = run
        .parameters
        .iter()
        .map(|(name, tensor)| (name.to_string(), tensor.shallow_clone()))
        .collect();
    let config = EmaConfig {
        decay: 0.9,
        ..Default::default()
    };
    let mut ema = Ema::new(named, config).unwrap();
    for t in 0..4 {
        for (name, parameter) in &run.parameters {
            let mut parameter = parameter.shallow_clone();
            tch::no_grad(|| parameter.copy_(&fixture[&format!("base.{t}.{name}")]));
        }
        assert_eq!(ema.update().unwrap(), if t == 0 { 0.0 } else { 0.9 });
    }
    for (name, average) in ema.averages() {
        assert!(
            difference(&average, &fixture[&format!("ema.{name}")]) <= 1e-6,
            "{name}"
        );
    }
}

#[test]
fn the_warm_up_of_decays_equals_that_of_diffusers() {
    let fixture = fixture("optimizers");
    let power = EmaWarmup::Power {
        inv_gamma: 2.0,
        power: 0.75,
    };
    for (case, warmup) in [("ramp", EmaWarmup::Ramp), ("power", power)] {
        let config = EmaConfig {
            warmup,
            min_decay: 0.1,
            update_after_step: 2,
            ..Default::default()
        };
        let expected = Vec::<f64>::try_from(&fixture[&format!("decay.{case}")]).unwrap();
        for (updates, expected) in expected.into_iter().enumerate() {
            assert!(
                (config.decay_at(updates as u64) - expected).abs() < 1e-12,
                "{case} {updates}"
            );
        }
    }
}

#[test]
fn the_guard_restores_every_weight_that_it_can() {
    let [mut first, mut second] =
        [3, 4].map(|size| Tensor::ones([size], (Kind::Float, tch::Device::Cpu)));
    let named = vec![
        ("first".to_owned(), first.shallow_clone()),
        ("second".to_owned(), second.shallow_clone()),
    ];
    let mut ema = Ema::new(named, EmaConfig::default()).unwrap();
    let _ = second.fill_(5.0);
    let guard = ema.apply().unwrap();
    assert_eq!(second.double_value(&[0]), 1.0);
    let _ = first.resize_([7]);
    guard.restore().unwrap_err();
    assert_eq!(second.double_value(&[0]), 5.0);
}

#[test]
fn the_guard_restores_the_weights_also_after_a_panic() {
    let weights = ema_weights();
    let mut weight = weights[0].1.shallow_clone();
    let mut ema = Ema::new(weights, EmaConfig::default()).unwrap();
    let _ = tch::no_grad(|| weight.fill_(3.0));
    let average = |weight: &Tensor| weight.double_value(&[0, 0]);
    {
        let guard = ema.apply().unwrap();
        assert_eq!(average(&weight), 0.0);
        guard.restore().unwrap();
    }
    assert_eq!(average(&weight), 3.0);
    let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        let _guard = ema.apply().unwrap();
        assert_eq!(average(&weight), 0.0);
        panic!("in the middle of an evaluation");
    }));
    assert!(result.is_err());
    assert_eq!(average(&weight), 3.0);
    ema.copy_to_model().unwrap();
    assert_eq!(average(&weight), 0.0);
    assert!(weight.requires_grad());
}

#[test]
fn averages_round_trip_through_a_file() {
    let weights = ema_weights();
    let mut weight = weights[0].1.shallow_clone();
    let config = EmaConfig {
        decay: 0.5,
        warmup: EmaWarmup::Ramp,
        ..Default::default()
    };
    let mut ema = Ema::new(weights, config).unwrap();
    for value in [1.0, 2.0, 5.0] {
        let _ = tch::no_grad(|| weight.fill_(value));
        ema.update().unwrap();
    }
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("ema.safetensors");
    ema.save_state(&path).unwrap();
    let mut other = Ema::new(ema_weights(), EmaConfig::default()).unwrap();
    other.load_state(&path).unwrap();
    assert_eq!((other.updates(), other.config()), (3, ema.config()));
    for ((_, one), (_, two)) in ema.averages().zip(other.averages()) {
        assert!(one.equal(&two));
    }
    let mut fewer = Ema::new(ema_weights().split_off(1), EmaConfig::default()).unwrap();
    let message = fewer.load_state(&path).unwrap_err().to_string();
    assert_eq!(
        message,
        "the optimizer state does not fit: unexpected tensors: a"
    );
}

#[test]
fn averages_of_half_weights_are_kept_in_float32() {
    let mut weight = Tensor::ones([4], cpu(Kind::BFloat16)).set_requires_grad(true);
    let named = vec![("w".to_string(), weight.shallow_clone())];
    let mut ema = Ema::new(named, EmaConfig::default()).unwrap();
    ema.update().unwrap();
    let _ = tch::no_grad(|| weight.fill_(2.0));
    for _ in 0..100 {
        ema.update().unwrap();
    }
    let (_, average) = ema.averages().next().unwrap();
    let expected = 2.0 - 0.999f64.powi(100);
    assert!((average.double_value(&[0]) - expected).abs() < 1e-5);
    assert_eq!(average.kind(), Kind::Float);
}

#[test]
fn groups_are_clipped_by_their_own_norms() {
    let leaf = |gradient: &[f32]| {
        let gradient = Tensor::from_slice(gradient);
        with_gradient(&gradient.zeros_like(), &gradient)
    };
    let (body, head, free) = (leaf(&[3.0, 4.0]), leaf(&[0.3, 0.4]), leaf(&[100.0]));
    let group = |name: &str, tensor: &Tensor| {
        ParamGroup::new(name, vec![(name.into(), tensor.shallow_clone())])
    };
    let groups = vec![
        group("body", &body),
        group("head", &head),
        group("free", &free),
    ];
    let optimizer: Box<dyn Optimizer> = Box::new(Lion::new(groups, LionConfig::default()).unwrap());
    let bounds = [Some(1.0), Some(1.0), None];
    let norms = clip_grad_norm_by_group(&optimizer, &bounds, ClipOptions::default()).unwrap();
    let norms: Vec<f64> = norms.iter().map(|norm| norm.double_value(&[])).collect();
    for (norm, expected) in norms.iter().zip([5.0, 0.5, 100.0]) {
        assert!((norm - expected).abs() < 1e-6);
    }
    assert!((body.grad().double_value(&[0]) - 0.6).abs() < 1e-5);
    assert!((head.grad().double_value(&[0]) - 0.3).abs() < 1e-6);
    assert_eq!(free.grad().double_value(&[0]), 100.0);
    let message = clip_grad_norm_by_group(&optimizer, &[None], ClipOptions::default())
        .unwrap_err()
        .to_string();
    assert_eq!(
        message,
        "there are 1 norm limits for 3 parameter groups; pass one for each group, None for groups that are not clipped"
    );
    let bounds = [Some(1.0), Some(-1.0), None];
    assert!(clip_grad_norm_by_group(&optimizer, &bounds, ClipOptions::default()).is_err());
}
