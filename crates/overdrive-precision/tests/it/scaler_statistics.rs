//! Overflow statistics and the collapse warning of the scaler, with real gradients.

use std::sync::{Arc, Mutex};

use overdrive_optim::{AdamW, AdamWConfig, ParamGroup};
use overdrive_precision::{
    CollapseKind, CollapseThresholds, GradScaler, GradScalerConfig, ScalerStatistics,
};
use tch::{Device, Kind, Tensor};
use tracing::field::{Field, Visit};
use tracing::{Event, Metadata, Subscriber, span};

struct Run {
    weight: Tensor,
    optimizer: AdamW,
    scaler: GradScaler,
}

impl Run {
    fn new(config: GradScalerConfig) -> Self {
        let weight = Tensor::ones([4], (Kind::Float, Device::Cpu)).set_requires_grad(true);
        let group = ParamGroup::new("all", vec![("w".to_owned(), weight.shallow_clone())]);
        Self {
            weight,
            optimizer: AdamW::new(vec![group], AdamWConfig::default()).unwrap(),
            scaler: GradScaler::new(config).unwrap(),
        }
    }

    fn step(&mut self, factor: f64) {
        let loss = (&self.weight * factor).sum(Kind::Float);
        self.scaler.scale(&loss).unwrap().backward();
        self.scaler.step(&mut self.optimizer).unwrap();
        self.scaler.update().unwrap();
        self.weight.zero_grad();
    }
}

#[test]
fn the_statistics_follow_the_scaler() {
    let mut run = Run::new(GradScalerConfig {
        init_scale: 1024.0,
        growth_interval: 2,
        ..GradScalerConfig::default()
    });
    for factor in [1.0, f64::INFINITY, f64::NAN, 1.0, 1.0, f64::INFINITY] {
        run.step(factor);
    }
    let statistics = run.scaler.statistics();
    assert_eq!((statistics.steps(), statistics.skipped()), (6, 3));
    assert_eq!(statistics.longest_skip_run(), 2);
    assert_eq!(statistics.consecutive_skips(), 1);
    assert_eq!(statistics.last_overflow_step(), Some(6));
    assert_eq!(statistics.overflow_rate(), 0.5);
    let changes: Vec<_> = statistics
        .scale_changes()
        .map(|c| (c.step, c.scale))
        .collect();
    assert_eq!(
        changes,
        [(0, 1024.0), (2, 512.0), (3, 256.0), (5, 512.0), (6, 256.0)]
    );
    assert_eq!(
        (statistics.min_scale(), statistics.max_scale()),
        (256.0, 1024.0)
    );
    assert_eq!(statistics.scale(), run.scaler.get_scale().unwrap());
    assert_eq!(run.scaler.collapse_warning(), None);
}

#[test]
fn a_scale_that_the_caller_sets_is_part_of_the_history() {
    let mut run = Run::new(GradScalerConfig::default());
    run.step(1.0);
    let loss = run.weight.sum(Kind::Float);
    run.scaler.scale(&loss).unwrap().backward();
    run.scaler.step(&mut run.optimizer).unwrap();
    run.scaler.update_to(32.0).unwrap();
    let statistics = run.scaler.statistics();
    assert_eq!((statistics.steps(), statistics.scale()), (2, 32.0));
    assert_eq!(statistics.min_scale(), 32.0);
}

#[test]
fn a_disabled_scaler_counts_nothing() {
    let mut run = Run::new(GradScalerConfig {
        enabled: false,
        ..GradScalerConfig::default()
    });
    run.step(1.0);
    assert_eq!(run.scaler.statistics().steps(), 0);
    assert_eq!(run.scaler.collapse_warning(), None);
}

#[test]
fn counting_resumes_from_saved_statistics() {
    let mut first = Run::new(GradScalerConfig::default());
    first.step(f64::INFINITY);
    let state = first.scaler.state_dict().unwrap().unwrap();
    let saved = serde_json::to_string(first.scaler.statistics()).unwrap();

    let mut second = Run::new(GradScalerConfig::default());
    second.scaler.load_state_dict(&state).unwrap();
    let statistics: ScalerStatistics = serde_json::from_str(&saved).unwrap();
    second.scaler.resume_statistics(statistics);
    first.step(f64::NAN);
    second.step(f64::NAN);
    assert_eq!(first.scaler.statistics(), second.scaler.statistics());
    assert_eq!(second.scaler.statistics().consecutive_skips(), 2);
}

/// The messages of the warnings.
#[derive(Clone, Default)]
struct Warnings(Arc<Mutex<Vec<String>>>);

struct Message<'a>(&'a mut String);

impl Visit for Message<'_> {
    fn record_debug(&mut self, field: &Field, value: &dyn std::fmt::Debug) {
        if field.name() == "message" {
            *self.0 = format!("{value:?}");
        }
    }
}

impl Subscriber for Warnings {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        *metadata.level() == tracing::Level::WARN
    }
    fn new_span(&self, _: &span::Attributes<'_>) -> span::Id {
        span::Id::from_u64(1)
    }
    fn record(&self, _: &span::Id, _: &span::Record<'_>) {}
    fn record_follows_from(&self, _: &span::Id, _: &span::Id) {}
    fn event(&self, event: &Event<'_>) {
        let mut text = String::new();
        event.record(&mut Message(&mut text));
        self.0.lock().unwrap().push(text);
    }
    fn enter(&self, _: &span::Id) {}
    fn exit(&self, _: &span::Id) {}
}

#[test]
fn a_collapse_is_logged_once_and_can_be_read_while_it_lasts() {
    let log = Warnings::default();
    tracing::subscriber::with_default(log.clone(), || {
        let mut run = Run::new(GradScalerConfig {
            init_scale: 4.0,
            ..GradScalerConfig::default()
        });
        for _ in 0..2 {
            run.step(f64::INFINITY);
            assert_eq!(run.scaler.collapse_warning(), None);
        }
        for _ in 0..3 {
            run.step(f64::INFINITY);
        }
        let warning = run.scaler.collapse_warning().unwrap();
        assert_eq!(warning.kind, CollapseKind::ScaleTooLow);
        assert_eq!((warning.step, warning.scale), (5, 0.125));

        run.scaler.set_collapse_thresholds(CollapseThresholds {
            min_scale: 0.01,
            ..CollapseThresholds::default()
        });
        assert_eq!(run.scaler.collapse_warning(), None);
    });
    let warnings = log.0.lock().unwrap();
    assert_eq!(warnings.len(), 1, "{warnings:?}");
    assert!(
        warnings[0].starts_with("the loss scale fell to 0.5 at step 3"),
        "{warnings:?}"
    );
    assert!(warnings[0].contains("bf16"), "{warnings:?}");
}
