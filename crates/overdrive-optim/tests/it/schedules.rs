//! Learning-rate schedules compared with the values of transformers.

use overdrive_optim::{
    AdamW, AdamWConfig, LrScheduler, LrSchedulerType, Optimizer, ParamGroup, Schedule,
    ScheduleLength, ScheduleOptions, Warmup,
};
use proptest::prelude::*;
use serde::Deserialize;
use tch::{Device, Kind, Tensor};

#[derive(Deserialize)]
struct Case {
    kind: LrSchedulerType,
    warmup_steps: u64,
    total_steps: u64,
    learning_rate: f64,
    options: ScheduleOptions,
    multipliers: Vec<f64>,
}

fn length(warmup_steps: u64, total_steps: u64) -> ScheduleLength {
    ScheduleLength {
        warmup_steps,
        total_steps,
    }
}

#[test]
fn schedules_equal_transformers() {
    let cases: Vec<Case> =
        serde_json::from_str(include_str!("../fixtures/schedules.json")).unwrap();
    for kind in LrSchedulerType::ALL {
        assert!(
            cases.iter().any(|case| case.kind == kind),
            "{kind} has no fixture"
        );
    }
    let mut worst = 0f64;
    for case in &cases {
        let length = length(case.warmup_steps, case.total_steps);
        let schedule = Schedule::new(case.kind, length, case.learning_rate, &case.options).unwrap();
        for (step, expected) in case.multipliers.iter().enumerate() {
            let difference = (schedule.multiplier(step as u64) - expected).abs();
            assert!(
                difference <= 1e-7,
                "{} {:?} step {step}",
                case.kind,
                case.options
            );
            worst = worst.max(difference);
        }
    }
    println!("{} schedules, largest difference {worst:.1e}", cases.len());
}

#[test]
fn names_are_those_of_transformers() {
    for kind in LrSchedulerType::ALL {
        assert_eq!(serde_json::to_string(&kind).unwrap(), format!("\"{kind}\""));
        assert_eq!(kind.name().parse::<LrSchedulerType>().unwrap(), kind);
    }
    let error = "cosin".parse::<LrSchedulerType>().unwrap_err().to_string();
    assert!(
        error.starts_with("`lr_scheduler_type` is `cosin`; it must be one of linear, cosine,"),
        "{error}"
    );
}

fn error(kind: LrSchedulerType, options: ScheduleOptions) -> String {
    Schedule::new(kind, length(10, 100), 1e-3, &options)
        .unwrap_err()
        .to_string()
}

#[test]
fn options_that_do_not_apply_are_an_error() {
    let options = ScheduleOptions {
        num_cycles: Some(2.0),
        ..Default::default()
    };
    assert_eq!(
        error(LrSchedulerType::Linear, options.clone()),
        "learning-rate schedule `linear`: option `num_cycles` does not apply; this schedule has none"
    );
    assert_eq!(
        error(LrSchedulerType::Polynomial, options),
        "learning-rate schedule `polynomial`: option `num_cycles` does not apply; this schedule has lr_end, power"
    );
}

#[test]
fn the_error_of_missing_or_contradictory_options_names_them() {
    let none = ScheduleOptions::default();
    let message = error(LrSchedulerType::WarmupStableDecay, none.clone());
    assert!(message.contains("`num_decay_steps` is needed"), "{message}");
    let message = error(LrSchedulerType::CosineWithMinLr, none.clone());
    assert!(
        message.contains("`min_lr` or min_lr_rate is needed"),
        "{message}"
    );
    let both = ScheduleOptions {
        min_lr: Some(0.1),
        min_lr_rate: Some(0.1),
        ..none.clone()
    };
    assert!(error(LrSchedulerType::CosineWithMinLr, both).contains("both set"));
    let long = ScheduleOptions {
        num_decay_steps: Some(95),
        ..none.clone()
    };
    let message = error(LrSchedulerType::WarmupStableDecay, long);
    assert!(
        message.contains("is 95, which with 10 warm-up steps exceeds the total of 100"),
        "{message}"
    );
    let end = ScheduleOptions {
        lr_end: Some(0.1),
        ..none.clone()
    };
    assert!(
        error(LrSchedulerType::Polynomial, end).contains("less than the learning rate (0.001)")
    );
    let half = ScheduleOptions {
        num_cycles: Some(1.5),
        ..none
    };
    assert!(error(LrSchedulerType::CosineWithRestarts, half).contains("an integer of at least 1"));
}

#[test]
fn warmup_steps_take_precedence_over_the_ratio() {
    let resolve = |warmup_steps, warmup_ratio| {
        Warmup {
            warmup_steps,
            warmup_ratio,
        }
        .resolve(1001)
        .map_err(|error| error.to_string())
    };
    assert_eq!(resolve(0.0, 0.0), Ok(0));
    assert_eq!(
        resolve(0.0, 0.1),
        Ok(101),
        "fractions of a step are rounded up"
    );
    assert_eq!(resolve(7.0, 0.1), Ok(7));
    assert_eq!(
        resolve(0.5, 0.1),
        Ok(501),
        "below 1 it is a fraction, as in transformers 5"
    );
    assert!(
        resolve(-1.0, 0.0)
            .unwrap_err()
            .starts_with("`warmup_steps` is -1")
    );
    assert!(
        resolve(0.0, 1.5)
            .unwrap_err()
            .starts_with("`warmup_ratio` is 1.5")
    );
}

fn optimizer() -> AdamW {
    let group = |name: &str, rate| {
        let weight = Tensor::zeros([1], (Kind::Float, Device::Cpu)).set_requires_grad(true);
        ParamGroup::new(name, vec![(name.to_string(), weight)]).with_learning_rate(rate)
    };
    AdamW::new(
        vec![group("body", 0.1), group("head", 0.4)],
        AdamWConfig::default(),
    )
    .unwrap()
}

fn linear() -> Schedule {
    Schedule::new(
        LrSchedulerType::Linear,
        length(2, 10),
        0.1,
        &Default::default(),
    )
    .unwrap()
}

#[test]
fn a_scheduler_scales_every_groups_own_rate() {
    let mut optimizer = optimizer();
    let mut scheduler = LrScheduler::new(linear(), &mut optimizer).unwrap();
    assert_eq!(optimizer.learning_rates(), [0.0, 0.0]);
    scheduler.step(&mut optimizer).unwrap();
    assert_eq!(optimizer.learning_rates(), [0.05, 0.2]);
    scheduler.step(&mut optimizer).unwrap();
    assert_eq!(optimizer.learning_rates(), [0.1, 0.4]);
    assert_eq!(scheduler.last_lr(), [0.1, 0.4]);
    assert_eq!(scheduler.last_step(), 2);
}

#[test]
fn a_scheduler_resumes_at_its_last_step() {
    let (mut first, mut second) = (optimizer(), optimizer());
    let mut scheduler = LrScheduler::new(linear(), &mut first).unwrap();
    for _ in 0..5 {
        scheduler.step(&mut first).unwrap();
    }
    let text = serde_json::to_string(&scheduler.state_dict()).unwrap();
    let mut resumed = LrScheduler::new(linear(), &mut second).unwrap();
    resumed
        .load_state_dict(&serde_json::from_str(&text).unwrap(), &mut second)
        .unwrap();
    assert_eq!(second.learning_rates(), first.learning_rates());
    scheduler.step(&mut first).unwrap();
    resumed.step(&mut second).unwrap();
    assert_eq!(second.learning_rates(), first.learning_rates());
}

#[test]
fn a_scheduler_state_of_other_groups_is_an_error() {
    let mut optimizer = optimizer();
    let mut scheduler = LrScheduler::new(linear(), &mut optimizer).unwrap();
    let mut state = scheduler.state_dict();
    state.base_learning_rates.pop();
    let error = scheduler
        .load_state_dict(&state, &mut optimizer)
        .unwrap_err()
        .to_string();
    assert!(
        error.starts_with("there are 1 learning rates for 2 parameter groups"),
        "{error}"
    );
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]
    #[test]
    fn multipliers_are_finite_and_between_zero_and_one(
        warmup_steps in 0u64..50,
        total_steps in 0u64..100,
        step in 0u64..200,
    ) {
        for kind in LrSchedulerType::ALL {
            let options = match kind {
                LrSchedulerType::WarmupStableDecay => ScheduleOptions {
                    num_decay_steps: Some(20),
                    num_stable_steps: Some(7),
                    ..Default::default()
                },
                LrSchedulerType::CosineWithMinLr | LrSchedulerType::CosineWarmupWithMinLr => {
                    ScheduleOptions { min_lr_rate: Some(0.1), ..Default::default() }
                }
                _ => ScheduleOptions::default(),
            };
            let length = length(warmup_steps, total_steps);
            let factor = Schedule::new(kind, length, 1e-3, &options).unwrap().multiplier(step);
            prop_assert!((0.0..=1.0 + 1e-12).contains(&factor), "{} {}", kind, factor);
        }
    }
}
