//! Early stopping compared with transformers' EarlyStoppingCallback.

use overdrive_optim::{EarlyStopping, EarlyStoppingConfig};

fn stopping(patience: u32, threshold: f64, greater_is_better: bool) -> EarlyStopping {
    EarlyStopping::new(EarlyStoppingConfig {
        early_stopping_patience: Some(patience),
        early_stopping_threshold: threshold,
        greater_is_better,
    })
    .unwrap()
}

fn counters(mut stopping: EarlyStopping, metrics: &[f64]) -> Vec<u32> {
    (1..)
        .zip(metrics)
        .map(|(step, &metric)| {
            stopping.observe(step, metric);
            stopping.patience_counter()
        })
        .collect()
}

#[test]
fn only_improvements_reset_the_patience_counter() {
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
    stopping.observe(10, 3.0);
    let verdict = stopping.observe(20, 2.8);
    assert!(verdict.improved && !verdict.stop);
    assert_eq!(
        (stopping.best_metric(), stopping.best_step()),
        (Some(2.8), Some(20))
    );
    // Better than 3.0 by more than the threshold, but not than 2.8.
    let verdict = stopping.observe(30, 2.4);
    assert!(verdict.improved && verdict.stop);
}

#[test]
fn a_diverged_evaluation_is_not_an_improvement() {
    assert_eq!(
        counters(
            stopping(9, 0.0, false),
            &[f64::NAN, f64::NAN, 3.0, f64::NAN]
        ),
        [0, 1, 0, 1]
    );
    let mut stopping = stopping(1, 0.0, true);
    stopping.observe(1, 1.0);
    assert!(stopping.observe(2, f64::INFINITY).stop);
    assert_eq!(stopping.best_metric(), Some(1.0));
}

#[test]
fn the_state_round_trips_through_json() {
    let mut first = stopping(2, 0.1, false);
    first.observe(1, 3.0);
    first.observe(2, 3.1);
    let text = serde_json::to_string(&first.state_dict()).unwrap();
    let mut second = stopping(2, 0.1, false);
    second.load_state_dict(serde_json::from_str(&text).unwrap());
    assert_eq!(second, first);
    assert!(second.observe(3, 3.1).stop);
}

#[test]
fn a_resumed_run_stops_by_the_patience_that_it_is_given() {
    let mut first = stopping(3, 0.0, false);
    for step in 1..=4 {
        first.observe(step, 1.0);
    }
    assert!(first.should_stop());
    let mut more_patient = stopping(10, 0.0, false);
    more_patient.load_state_dict(first.state_dict());
    assert!(!more_patient.should_stop());
    assert_eq!(more_patient.best_step(), Some(1));
    let mut without = EarlyStopping::new(EarlyStoppingConfig {
        early_stopping_patience: None,
        ..Default::default()
    })
    .unwrap();
    without.load_state_dict(first.state_dict());
    assert!(!without.observe(5, 1.0).stop);
    // Patience that is given late counts the evaluations of before.
    first.load_state_dict(without.state_dict());
    assert!(first.should_stop());
}

#[test]
fn a_patience_of_zero_is_an_error() {
    let config = EarlyStoppingConfig {
        early_stopping_patience: Some(0),
        ..Default::default()
    };
    let error = EarlyStopping::new(config).unwrap_err().to_string();
    assert!(
        error.starts_with("`early_stopping_patience` is 0; it must be at least 1"),
        "{error}"
    );
}
