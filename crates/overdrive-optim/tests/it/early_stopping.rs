//! Early stopping as transformers' EarlyStoppingCallback does it.

use overdrive_optim::{EarlyStopping, EarlyStoppingConfig};

fn stopping(patience: u32, threshold: f64, greater_is_better: bool) -> EarlyStopping {
    EarlyStopping::new(EarlyStoppingConfig {
        early_stopping_patience: patience,
        early_stopping_threshold: threshold,
        greater_is_better,
    })
    .unwrap()
}

fn counters(mut stopping: EarlyStopping, metrics: &[f64]) -> Vec<u32> {
    metrics
        .iter()
        .map(|&metric| {
            stopping.observe(metric);
            stopping.patience_counter()
        })
        .collect()
}

#[test]
fn patience_is_renewed_by_improvements_only() {
    assert_eq!(
        counters(stopping(9, 0.0, false), &[3.0, 3.0, 3.5, 2.9, 3.0]),
        [0, 1, 2, 0, 1]
    );
    assert_eq!(
        counters(stopping(9, 0.0, true), &[0.5, 0.4, 0.6]),
        [0, 1, 0]
    );
}

#[test]
fn small_improvements_move_the_best_metric_but_use_up_patience() {
    let mut stopping = stopping(2, 0.5, false);
    stopping.observe(3.0);
    let verdict = stopping.observe(2.8);
    assert!(verdict.improved && !verdict.stop);
    assert_eq!(stopping.best_metric(), Some(2.8));
    // Better than 3.0 by more than the threshold, but not than 2.8.
    let verdict = stopping.observe(2.4);
    assert!(verdict.improved && verdict.stop);
}

#[test]
fn a_diverged_evaluation_is_no_improvement() {
    assert_eq!(
        counters(
            stopping(9, 0.0, false),
            &[f64::NAN, f64::NAN, 3.0, f64::NAN]
        ),
        [0, 1, 0, 1]
    );
    let mut stopping = stopping(1, 0.0, true);
    stopping.observe(1.0);
    assert!(stopping.observe(f64::INFINITY).stop);
    assert_eq!(stopping.best_metric(), Some(1.0));
}

#[test]
fn the_state_survives_json() {
    let mut first = stopping(2, 0.1, false);
    first.observe(3.0);
    first.observe(3.1);
    let mut second: EarlyStopping =
        serde_json::from_str(&serde_json::to_string(&first).unwrap()).unwrap();
    assert_eq!(second, first);
    assert!(second.observe(3.1).stop);
    let fresh: EarlyStopping =
        serde_json::from_str(&serde_json::to_string(&stopping(2, 0.1, false)).unwrap()).unwrap();
    assert_eq!(fresh.best_metric(), None);
}

#[test]
fn a_patience_of_zero_is_refused() {
    let config = EarlyStoppingConfig {
        early_stopping_patience: 0,
        ..Default::default()
    };
    let error = EarlyStopping::new(config).unwrap_err().to_string();
    assert!(
        error.starts_with("early_stopping_patience is 0, expected at least 1"),
        "{error}"
    );
}
