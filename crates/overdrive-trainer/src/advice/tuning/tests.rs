//! The search over laws that are given, so that no test measures a time.

use overdrive_accumulation::BatchPlan;

use super::*;
use crate::arguments::Preset;

type Law = fn(&TuneCandidate) -> f64;

fn arguments(effective: u64) -> TrainingArguments {
    let micro_batch = if effective.is_multiple_of(8) { 8 } else { 1 };
    TrainingArguments {
        per_device_train_batch_size: micro_batch,
        gradient_accumulation_steps: effective / micro_batch,
        ..Preset::Tiny.arguments()
    }
}

fn shape() -> DecoderShape {
    arguments(64).memory_plan(4096, Precision::Fp32).shape
}

fn estimate(effective: u64, micro: u64, checkpointing: bool) -> u64 {
    let arguments = TrainingArguments {
        gradient_checkpointing: checkpointing,
        ..arguments(effective)
    };
    let plan = BatchPlan::from_micro_batch(effective, micro, 1).unwrap();
    arguments
        .estimated_peak(shape(), Precision::Fp32, plan, None)
        .unwrap()
}

/// Searches where the peak is `factor` times the estimate and the rate follows `law`. Returns the result and the number
/// of trials.
fn tune(effective: u64, options: &TuneOptions, factor: f64, law: Law) -> (Tuning, usize) {
    let arguments = arguments(effective);
    let mut trials = 0;
    let tuning = arguments.tune(shape(), options, |candidate| {
        trials += 1;
        let changed = candidate.of(&arguments);
        changed.validate()?;
        let peak = changed.estimated_peak(shape(), candidate.precision, candidate.batch, None)?;
        Ok::<_, Error>(TuneOutcome::Measured(Trial {
            peak_bytes: (peak as f64 * factor) as u64,
            tokens_per_second: law(candidate),
            data_share: 0.0,
        }))
    });
    (tuning.unwrap(), trials)
}

fn micro(candidate: &TuneCandidate) -> f64 {
    candidate.batch.micro_batch() as f64
}

/// Returns a rate that rises with the micro-batch, by less and less; checkpointing costs two fifths of it.
fn rising(candidate: &TuneCandidate) -> f64 {
    let recomputes = if candidate.gradient_checkpointing {
        0.6
    } else {
        1.0
    };
    recomputes * 4000.0 * micro(candidate) / (micro(candidate) + 8.0)
}

/// Returns the rate of a CPU, which has its peak at 8 sequences.
fn peaked(candidate: &TuneCandidate) -> f64 {
    4000.0 / (1.0 + 0.1 * (micro(candidate).log2() - 3.0).powi(2))
}

fn options(limit_bytes: u64) -> TuneOptions {
    TuneOptions::new(limit_bytes, vec![Precision::Fp32])
}

#[test]
fn the_largest_micro_batch_within_the_limit_is_found() {
    for largest in [4, 16, 64] {
        let options = options(estimate(64, largest, false));
        let (tuning, _) = tune(64, &options, 1.0, rising);
        let best = tuning.best().unwrap();
        // Larger micro-batches fit only with checkpointing, and have three fifths of the speed.
        if largest > 4 {
            assert_eq!(best.candidate.batch.micro_batch(), largest);
            assert!(!best.candidate.gradient_checkpointing);
        }
        let tried = tuning.rows.iter().filter(|row| row.measured().is_some());
        let tried = tried.filter(|row| !row.candidate.gradient_checkpointing);
        let most = tried.map(|row| row.candidate.batch.micro_batch()).max();
        assert_eq!(most, Some(largest));
    }
}

#[test]
fn the_fastest_is_found_within_five_percent_for_any_effective_batch() {
    for effective in [1, 12, 48, 64, 360] {
        for law in [rising as Law, peaked] {
            let options = options(u64::MAX);
            let (tuning, _) = tune(effective, &options, 1.0, law);
            let divisors = (1..=effective).filter(|size| effective % size == 0);
            let most = divisors
                .map(|size| {
                    law(&TuneCandidate {
                        batch: BatchPlan::from_micro_batch(effective, size, 1).unwrap(),
                        precision: Precision::Fp32,
                        gradient_checkpointing: false,
                        dataloader_num_workers: 1,
                    })
                })
                .fold(0.0, f64::max);
            let found = tuning.best().unwrap().measured().unwrap();
            assert!(
                found.tokens_per_second >= 0.95 * most,
                "{effective}: {found:?}, {most}"
            );
        }
    }
}

#[test]
fn a_row_above_the_limit_is_not_chosen_whatever_the_estimate_says() {
    // Peaks are 15% above the estimate.
    let options = options(estimate(64, 16, false));
    let (tuning, _) = tune(64, &options, 1.15, rising);
    let best = tuning.best().unwrap();
    assert!(best.measured().unwrap().peak_bytes <= options.limit_bytes);
    assert!(tuning.rows.iter().any(|row| {
        row.candidate.batch.micro_batch() == 16 && matches!(row.outcome, TuneOutcome::OverLimit(_))
    }));
    let table = tuning.markdown();
    assert!(
        table.contains("over the limit") && table.contains("| chosen |"),
        "{table}"
    );
}

#[test]
fn the_slower_precision_is_tried_once_and_left_out_with_a_reason() {
    let options = TuneOptions::new(u64::MAX, vec![Precision::Bf16, Precision::Fp32]);
    let law: Law = |candidate| match candidate.precision {
        Precision::Bf16 => 1.5 * rising(candidate),
        _ => rising(candidate),
    };
    let (tuning, _) = tune(64, &options, 1.0, law);
    assert_eq!(tuning.best().unwrap().candidate.precision, Precision::Bf16);
    let fp32 = tuning
        .rows
        .iter()
        .filter(|row| row.candidate.precision == Precision::Fp32);
    let (tried, left): (Vec<_>, Vec<_>) = fp32.partition(|row| row.measured().is_some());
    assert_eq!(tried.len(), 1);
    let reported = |row: &&TuneRow| matches!(&row.outcome, TuneOutcome::LeftOut(why) if why.contains("slower than bf16"));
    assert!(left.len() > 6 && left.iter().all(reported));
    // The reverse case: a CPU that multiplies fp32 faster.
    let (tuning, _) = tune(64, &options, 1.0, |candidate| match candidate.precision {
        Precision::Bf16 => 0.5 * rising(candidate),
        _ => rising(candidate),
    });
    assert_eq!(tuning.best().unwrap().candidate.precision, Precision::Fp32);
}

#[test]
fn out_of_memory_is_a_row_and_not_an_error() {
    let arguments = arguments(16);
    let tuning = arguments
        .tune(shape(), &options(u64::MAX), |candidate| {
            Ok::<_, Error>(match candidate.batch.micro_batch() > 4 {
                true => TuneOutcome::OutOfMemory("CUDA out of memory".to_owned()),
                false => TuneOutcome::Measured(Trial {
                    peak_bytes: 1,
                    tokens_per_second: rising(candidate),
                    data_share: 0.0,
                }),
            })
        })
        .unwrap();
    assert_eq!(tuning.best().unwrap().candidate.batch.micro_batch(), 4);
    assert!(
        tuning
            .markdown()
            .contains("out of memory: CUDA out of memory")
    );
}

#[test]
fn workers_are_tried_only_where_data_loading_takes_time() {
    let arguments = arguments(16);
    let search = |data_share| {
        let tuning = arguments.tune(shape(), &options(u64::MAX), |candidate| {
            let workers = candidate.dataloader_num_workers as f64;
            Ok::<_, Error>(TuneOutcome::Measured(Trial {
                peak_bytes: 1,
                tokens_per_second: rising(candidate) * (1.0 + 0.1 * workers),
                data_share,
            }))
        });
        tuning
            .unwrap()
            .best()
            .unwrap()
            .candidate
            .dataloader_num_workers
    };
    assert_eq!(search(0.2), 4);
    assert_eq!(search(0.001), arguments.dataloader_num_workers);
}

#[test]
fn nothing_that_fits_is_no_choice_and_the_number_of_trials_is_bounded() {
    let (tuning, trials) = tune(64, &options(1), 1.0, rising);
    assert_eq!((tuning.best(), trials), (None, 0));
    let few = TuneOptions {
        max_trials: 2,
        ..options(u64::MAX)
    };
    let (tuning, trials) = tune(64, &few, 1.0, rising);
    assert_eq!(trials, 2);
    assert!(tuning.markdown().contains("all 2 trials are used up"));
}
