//! Runs that stop at any step and resume from a snapshot.

use std::fs;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;

use anyhow::{Result, anyhow};
use overdrive::distributed::ProcessGroup;
use overdrive::optim::Ema;
use overdrive::snapshot::{Scope, Snapshot};
use overdrive::tracking::{StepMetrics, Tracker, Trackers, read_metrics};
use overdrive::trainer::{
    Evaluation, IntervalStrategy, OptimizerName, ResumeFromCheckpoint, RunFolder, RunOptions,
    RunSummary, SaveStrategy, TextData, TrainingArguments, model_flops, new_model, snapshot_files,
};
use overdrive::transformer::CausalLm;
use tch::Device;

use crate::alone;
use crate::fit;

pub(crate) fn arguments(folder: &Path) -> TrainingArguments {
    let text = folder.join("text");
    if !text.exists() {
        fs::create_dir_all(&text).unwrap();
        for number in 0..60 {
            let line = format!("Document {number} says that the quick brown fox jumps.\n");
            fs::write(
                text.join(format!("{number:02}.txt")),
                line.repeat(1 + number % 7),
            )
            .unwrap();
        }
    }
    TrainingArguments {
        max_steps: 12,
        save_steps: 5.0,
        max_eval_batches: Some(2),
        per_device_train_batch_size: 2,
        gradient_accumulation_steps: 2,
        logging_steps: 1.0,
        ..fit::tiny(text)
    }
}

/// More steps than any run has.
const TO_THE_END: u64 = u64::MAX;

/// A tracker that panics in the step after `left` steps, before its snapshot, and so ends the run as a kill does.
struct Killed {
    left: u64,
}

impl Tracker for Killed {
    fn log(&mut self, _metrics: &StepMetrics) -> overdrive::tracking::Result<()> {
        assert!(self.left > 0, "the run is killed");
        self.left -= 1;
        Ok(())
    }

    fn finish(&mut self) -> overdrive::tracking::Result<()> {
        Ok(())
    }
}

/// Trains in `run` as the example does, and is killed after `steps` steps. `evaluation` returns the result of
/// the evaluation after a number of steps.
pub(crate) fn train(
    folder: &Path,
    arguments: &TrainingArguments,
    run: &str,
    steps: u64,
    evaluation: &dyn Fn(u64) -> f64,
) -> (Result<RunSummary>, CausalLm) {
    let (trained, model) = fit(folder, arguments, run, steps, evaluation);
    (trained.map(|(summary, _)| summary), model)
}

/// Trains in `run` as [`train`] does, to the end.
pub(crate) fn train_whole(
    folder: &Path,
    arguments: &TrainingArguments,
    run: &str,
) -> (Result<RunSummary>, CausalLm) {
    train(folder, arguments, run, TO_THE_END, &|_| 0.0)
}

/// Trains as [`train`] does, and also returns the averaged weights at the end.
fn fit(
    folder: &Path,
    arguments: &TrainingArguments,
    run: &str,
    steps: u64,
    evaluation: &dyn Fn(u64) -> f64,
) -> (Result<(RunSummary, Option<Ema>)>, CausalLm) {
    let arguments = TrainingArguments {
        output_dir: Some(folder.join(run)),
        ..arguments.clone()
    };
    let data = TextData::prepare_in(&folder.join("cache"), &arguments, |_| {}).unwrap();
    fit_on(&data, &arguments, steps, evaluation)
}

fn fit_on(
    data: &TextData,
    arguments: &TrainingArguments,
    steps: u64,
    evaluation: &dyn Fn(u64) -> f64,
) -> (Result<(RunSummary, Option<Ema>)>, CausalLm) {
    let trackers = Trackers::new().with(Killed { left: steps });
    fit_with(data, arguments, trackers, evaluation)
}

pub(crate) fn fit_with(
    data: &TextData,
    arguments: &TrainingArguments,
    trackers: Trackers,
    evaluation: &dyn Fn(u64) -> f64,
) -> (Result<(RunSummary, Option<Ema>)>, CausalLm) {
    let precision = arguments.apply().unwrap();
    let mut model = new_model(arguments, data, Device::Cpu).unwrap();
    let group = ProcessGroup::single();
    let run_once = move |model: &mut CausalLm| -> Result<(RunSummary, Option<Ema>)> {
        let fingerprints = data.fingerprints(arguments, &group)?;
        let folder = RunFolder::open_or_create(&group, arguments)?;
        let options = RunOptions {
            precision: Some(precision),
            folder: Some(folder),
            files: snapshot_files(model, data, arguments)?,
            fingerprints: Some(fingerprints),
            flops: Some(model_flops(model, &model.named_parameters())),
            trackers,
            ..RunOptions::default()
        };
        let loader = data.train_loader(arguments, Device::Cpu)?;
        let mut evaluations = 0;
        fit::fit(arguments, &group, options, model, loader, &mut |_| {
            evaluations += 1;
            let loss = evaluation(evaluations);
            Ok(Evaluation::new(loss).with_metric("score", -loss))
        })
    };
    let run = AssertUnwindSafe(|| run_once(&mut model));
    let ended = catch_unwind(run).unwrap_or_else(|_| Err(anyhow!("the run was killed")));
    (ended, model)
}

pub(crate) fn losses(folder: &Path, run: &str) -> Vec<(u64, f64, f64)> {
    let metrics = read_metrics(folder.join(run).join("metrics.jsonl")).unwrap();
    let numbers = |step: &StepMetrics| (step.step, step.loss, step.learning_rate);
    metrics.records.iter().map(numbers).collect()
}

pub(crate) fn latest() -> Option<ResumeFromCheckpoint> {
    Some(ResumeFromCheckpoint::Latest(true))
}

#[test]
fn losses_after_a_kill_are_those_of_a_run_that_was_never_killed() {
    let _alone = alone();
    let plain = |folder: &Path| arguments(folder);
    type Change = fn(TrainingArguments) -> TrainingArguments;
    let changes: [Change; 6] = [
        |plain| plain,
        |plain| TrainingArguments {
            group_by_length: true,
            dataloader_num_workers: 2,
            optim: OptimizerName::Adamw8bit,
            ..plain
        },
        |plain| TrainingArguments {
            packing: true,
            optim: OptimizerName::Lion32bit,
            ..plain
        },
        |plain| TrainingArguments {
            bf16: true,
            optim: OptimizerName::PagedAdamw32bit,
            ..plain
        },
        |plain| TrainingArguments {
            optim: OptimizerName::Muon,
            ema_decay: Some(0.9),
            zero_stage: 1,
            ..plain
        },
        |plain| TrainingArguments {
            optim: OptimizerName::Adafactor,
            gradient_checkpointing: true,
            ..plain
        },
    ];
    for (number, change) in changes.into_iter().enumerate() {
        let dir = tempfile::tempdir().unwrap();
        let whole = change(plain(dir.path()));
        let (summary, uninterrupted) = train_whole(dir.path(), &whole, "whole");
        assert_eq!(summary.unwrap().losses.len(), 12);

        // Killed in step 8, and again before it has saved anything new.
        let resumed = TrainingArguments {
            resume_from_checkpoint: latest(),
            ..whole
        };
        for steps in [7, 2] {
            let (killed, _) = train(dir.path(), &resumed, "killed", steps, &|_| 0.0);
            let error = killed.unwrap_err().to_string();
            assert!(error.contains("killed"), "{error}");
        }
        let (summary, model) = train_whole(dir.path(), &resumed, "killed");
        let summary = summary.unwrap();
        assert_eq!((summary.resumed_step, summary.losses.len()), (5, 7));
        assert_eq!(
            losses(dir.path(), "killed"),
            losses(dir.path(), "whole"),
            "{number}"
        );
        fit::equal(&uninterrupted, &model);
    }
}

/// A snapshot has the options of the run that saved it, which once replaced those of the run that resumed.
#[test]
fn a_run_resumes_with_the_learning_rate_the_weight_decay_and_the_betas_of_its_own_arguments() {
    let _alone = alone();
    for (optim, zero_stage) in [
        (OptimizerName::AdamwTorchFused, 0),
        (OptimizerName::Lion32bit, 0),
        (OptimizerName::Muon, 1),
    ] {
        let dir = tempfile::tempdir().unwrap();
        let first = TrainingArguments {
            max_steps: 2,
            weight_decay: 0.1,
            ema_decay: Some(0.9),
            optim,
            zero_stage,
            ..arguments(dir.path())
        };
        train_whole(dir.path(), &first, "run").0.unwrap();
        let other = TrainingArguments {
            max_steps: 4,
            learning_rate: 4e-3,
            weight_decay: 0.3,
            adam_beta1: 0.8,
            ema_decay: Some(0.5),
            resume_from_checkpoint: latest(),
            ..first
        };
        let (summary, _) = train_whole(dir.path(), &other, "run");
        assert_eq!(summary.unwrap().resumed_step, 2);
        let rates: Vec<f64> = losses(dir.path(), "run")
            .iter()
            .map(|step| step.2)
            .collect();
        // Linear decays over 2 steps, and from the third one on over 4.
        assert_eq!(rates, [1e-2, 5e-3, 4e-3 * 0.5, 4e-3 * 0.25], "{optim:?}");
        let snapshot = Snapshot::open(dir.path().join("run/checkpoint-4")).unwrap();
        let scope = match zero_stage {
            0 => Scope::Run,
            _ => Scope::Rank,
        };
        let options = snapshot
            .state("optimizer", scope, 0)
            .unwrap()
            .metadata
            .to_string();
        for part in ["\"weight_decay\":0.3", "0.8"] {
            assert!(options.contains(part), "{part}: {options}");
        }
        for part in ["\"weight_decay\":0.1", "0.9,"] {
            assert!(!options.contains(part), "{part}: {options}");
        }
        let ema = snapshot
            .state("ema", Scope::Run, 0)
            .unwrap()
            .metadata
            .to_string();
        assert!(ema.contains("\"decay\":0.5"), "{ema}");
    }
}

#[test]
fn a_run_resumes_in_another_precision_with_a_new_loss_scaler_or_without_one() {
    let _alone = alone();
    let dir = tempfile::tempdir().unwrap();
    let step = |max_steps, fp16| {
        let arguments = TrainingArguments {
            max_steps,
            fp16,
            resume_from_checkpoint: latest(),
            ..arguments(dir.path())
        };
        let (summary, _) = train_whole(dir.path(), &arguments, "run");
        summary.unwrap().resumed_step
    };
    assert_eq!([step(1, true), step(2, false), step(3, true)], [0, 1, 2]);
    let has_scaler = |step| {
        let snapshot = Snapshot::open(dir.path().join(format!("run/checkpoint-{step}"))).unwrap();
        snapshot.has("scaler", Scope::Run, 0)
    };
    assert_eq!([1, 2, 3].map(has_scaler), [true, false, true]);
}

#[test]
fn the_last_step_of_an_epoch_has_the_rest_of_it_and_a_run_resumes_at_any_step() {
    let _alone = alone();
    let dir = tempfile::tempdir().unwrap();
    let epochs = TrainingArguments {
        max_steps: -1,
        num_train_epochs: 3.0,
        per_device_train_batch_size: 1,
        gradient_accumulation_steps: 16,
        save_steps: 1.0,
        eval_strategy: IntervalStrategy::Epoch,
        resume_from_checkpoint: latest(),
        ..arguments(dir.path())
    };
    let fresh = TrainingArguments {
        resume_from_checkpoint: None,
        ..epochs.clone()
    };
    let mut data = TextData::prepare_in(&dir.path().join("cache"), &fresh, |_| {}).unwrap();
    // 25 windows of 32 tokens.
    data.train = data.train.slice(0..25 * 32 + 1).unwrap();
    let run = |name: &str, steps| {
        let arguments = TrainingArguments {
            output_dir: Some(dir.path().join(name)),
            ..epochs.clone()
        };
        fit_on(&data, &arguments, steps, &|_| 0.0)
    };
    let (summary, uninterrupted) = run("whole", TO_THE_END);
    assert_eq!(summary.unwrap().0.losses.len(), 6);
    let records = read_metrics(dir.path().join("whole/metrics.jsonl"))
        .unwrap()
        .records;
    let epoch: Vec<f64> = records.iter().filter_map(|step| step.epoch).collect();
    assert_eq!(epoch, [0.64, 1.0, 1.64, 2.0, 2.64, 3.0]);
    let tokens: Vec<u64> = records.iter().filter_map(|step| step.tokens_seen).collect();
    let windows = [16, 25, 41, 50, 66, 75];
    assert_eq!(tokens, windows.map(|windows| windows * 32));
    let evaluated = records.iter().filter(|step| step.eval_loss.is_some());
    assert_eq!(
        evaluated.map(|step| step.step).collect::<Vec<_>>(),
        [2, 4, 6]
    );

    for steps in 1..6 {
        let name = format!("killed-{steps}");
        assert!(run(&name, steps).0.is_err());
        let (summary, model) = run(&name, TO_THE_END);
        assert_eq!(summary.unwrap().0.resumed_step, steps);
        assert_eq!(losses(dir.path(), &name), losses(dir.path(), "whole"));
        fit::equal(&uninterrupted, &model);
    }
}

#[test]
fn a_mixture_resumes_with_the_same_records_and_logs_the_epochs_of_its_sources() {
    let _alone = alone();
    let dir = tempfile::tempdir().unwrap();
    let text = arguments(dir.path()).data[0].clone();
    let lines = "{\"text\": \"The lazy dog sleeps.\"}\n".repeat(30);
    fs::write(dir.path().join("dog.jsonl"), lines).unwrap();
    let mixed = TrainingArguments {
        data: [(text, 0.7), (dir.path().join("dog.jsonl"), 0.3)]
            .map(|(path, weight)| format!("{}:{weight}", path.display()).into())
            .to_vec(),
        data_schedule: vec!["6:0,1".to_owned()],
        resume_from_checkpoint: latest(),
        ..arguments(dir.path())
    };
    let whole = train_whole(dir.path(), &mixed, "whole");
    whole.0.unwrap();
    assert!(train(dir.path(), &mixed, "killed", 8, &|_| 0.0).0.is_err());
    let resumed = train_whole(dir.path(), &mixed, "killed");
    assert_eq!(resumed.0.unwrap().resumed_step, 5);
    assert_eq!(losses(dir.path(), "killed"), losses(dir.path(), "whole"));

    let metrics = read_metrics(dir.path().join("whole/metrics.jsonl")).unwrap();
    let passes = |step: &StepMetrics| -> Vec<f64> {
        let sources = step
            .extra
            .iter()
            .filter(|(key, _)| key.starts_with("epoch/"));
        sources
            .map(|(_, passes)| passes.as_f64().unwrap())
            .collect()
    };
    let passes: Vec<Vec<f64>> = metrics.records.iter().map(passes).collect();
    // In the order of the names: `dog.jsonl`, which grows to the end, and `text`, which ends with step 6.
    assert!(passes.windows(2).all(|steps| steps[0][0] <= steps[1][0]));
    assert!(passes[5][1] > 0.0);
    assert_eq!(passes[11][1], passes[5][1]);

    // Other weights are another order of the data.
    let changed = TrainingArguments {
        data_schedule: Vec::new(),
        max_steps: 14,
        ..mixed
    };
    let changed = TrainingArguments {
        output_dir: Some(dir.path().join("whole")),
        ..changed
    };
    let data = TextData::prepare_in(&dir.path().join("cache"), &changed, |_| {}).unwrap();
    let error = data
        .fingerprints(&changed, &ProcessGroup::single())
        .unwrap_err();
    let error = error.to_string();
    assert!(
        error.contains("`mixture` was 0.7 0.3 of tokens, after 24 rows 0 1"),
        "{error}"
    );
}

#[test]
fn a_snapshot_is_the_folder_of_a_model() {
    let _alone = alone();
    let dir = tempfile::tempdir().unwrap();
    let (summary, model) = train_whole(dir.path(), &arguments(dir.path()), "run");
    summary.unwrap();
    let snapshot = dir.path().join("run/checkpoint-12");
    let loaded = CausalLm::from_pretrained(&snapshot, &Default::default()).unwrap();
    fit::equal(&model, &loaded);
    assert!(snapshot.join("tokenizer.json").is_file());
}

#[test]
fn a_fresh_run_begins_where_there_is_nothing_to_go_on_from() {
    let _alone = alone();
    let dir = tempfile::tempdir().unwrap();
    let resumed = TrainingArguments {
        resume_from_checkpoint: latest(),
        max_steps: 3,
        ..arguments(dir.path())
    };
    let (summary, _) = train_whole(dir.path(), &resumed, "run");
    assert_eq!(summary.unwrap().resumed_step, 0);
    // Killed before the first snapshot: the lines of its steps are not told twice.
    let (killed, _) = train(dir.path(), &resumed, "other", 2, &|_| 0.0);
    assert!(killed.is_err());
    train_whole(dir.path(), &resumed, "other").0.unwrap();
    assert_eq!(losses(dir.path(), "other"), losses(dir.path(), "run"));

    let nowhere = TrainingArguments {
        output_dir: None,
        ..resumed
    };
    let error = RunFolder::open_or_create(&ProcessGroup::single(), &nowhere)
        .unwrap_err()
        .to_string();
    assert!(error.contains("--out DIR"), "{error}");
}

#[test]
fn a_snapshot_of_another_model_is_refused_with_the_differences_named() {
    let _alone = alone();
    let dir = tempfile::tempdir().unwrap();
    let mut other = arguments(dir.path());
    train_whole(dir.path(), &other, "run").0.unwrap();
    other.model.intermediate_size = 48;
    other.resume_from_checkpoint = latest();
    for (resume_with_changes, expected) in [
        (false, "`model.intermediate_size` was 64 and is 48"),
        (
            true,
            "mlp.up_proj.weight` is [64, 32] in the snapshot and [48, 32] here",
        ),
    ] {
        other.resume_with_changes = resume_with_changes;
        let error = train_whole(dir.path(), &other, "run")
            .0
            .unwrap_err()
            .to_string();
        assert!(error.contains(expected), "{error}");
    }
}

#[test]
fn the_best_is_kept_and_patience_ends_the_run() {
    let _alone = alone();
    let dir = tempfile::tempdir().unwrap();
    let best = TrainingArguments {
        eval_strategy: IntervalStrategy::Steps,
        eval_steps: Some(2.0),
        save_steps: 2.0,
        save_total_limit: Some(1),
        load_best_model_at_end: true,
        early_stopping_patience: Some(3),
        ..arguments(dir.path())
    };
    // The second evaluation, after step 4, is the best; three worse ones follow.
    let found = |evaluation: u64| [3.0, 1.0, 2.0, 2.5, 2.2, 0.5][evaluation as usize - 1];
    let (summary, model) = train(dir.path(), &best, "run", TO_THE_END, &found);
    let summary = summary.unwrap();
    let best_of = |summary: &RunSummary| summary.best.as_ref().map(|best| (best.step, best.metric));
    assert_eq!(
        (summary.losses.len(), best_of(&summary)),
        (10, Some((4, 1.0)))
    );
    // The last evaluation is another one, and is not shown as that of these weights.
    let shown = summary.to_string();
    let line = "the weights are the best ones: eval_loss 1.000 at step 4\n";
    assert!(shown.ends_with(line), "{shown}");
    assert_eq!(summary.evaluation.as_ref().unwrap().loss, 2.2);
    let run = dir.path().join("run");
    let kept = |step: u64| run.join(format!("checkpoint-{step}")).exists();
    assert!(kept(4) && kept(10) && !kept(2) && !kept(6) && !kept(8));
    let stored = CausalLm::from_pretrained(run.join("checkpoint-4"), &Default::default()).unwrap();
    fit::equal(&model, &stored);
    // By a metric of the program, of which a greater value is better.
    let by_score = TrainingArguments {
        metric_for_best_model: Some("eval_score".to_owned()),
        ..best.clone()
    };
    let (by_score, _) = train(dir.path(), &by_score, "score", TO_THE_END, &found);
    assert_eq!(best_of(&by_score.unwrap()), Some((4, -1.0)));
    let metrics = read_metrics(dir.path().join("score/metrics.jsonl")).unwrap();
    assert_eq!(metrics.records[3].extra["eval_score"], -1.0);
    // It is over: going on does no step, and gives the best weights again.
    let again = TrainingArguments {
        resume_from_checkpoint: latest(),
        ..best.clone()
    };
    let (summary, _) = train(dir.path(), &again, "run", TO_THE_END, &found);
    let summary = summary.unwrap();
    assert_eq!(
        (summary.losses.len(), best_of(&summary)),
        (0, Some((4, 1.0)))
    );
    let only_best = TrainingArguments {
        save_strategy: SaveStrategy::Best,
        early_stopping_patience: None,
        save_total_limit: None,
        ..best
    };
    train(dir.path(), &only_best, "only", TO_THE_END, &found)
        .0
        .unwrap();
    let exists = |step: u64| dir.path().join(format!("only/checkpoint-{step}")).exists();
    assert!(exists(2) && exists(4) && exists(12) && !exists(6) && !exists(8) && !exists(10));
}

#[test]
fn rotation_keeps_the_best_also_if_it_is_not_loaded_at_the_end() {
    let _alone = alone();
    let dir = tempfile::tempdir().unwrap();
    let evaluated = TrainingArguments {
        eval_strategy: IntervalStrategy::Steps,
        eval_steps: Some(2.0),
        save_steps: 2.0,
        save_total_limit: Some(2),
        ..arguments(dir.path())
    };
    let only_best = TrainingArguments {
        save_strategy: SaveStrategy::Best,
        save_total_limit: Some(1),
        early_stopping_patience: Some(3),
        ..evaluated.clone()
    };
    // The second evaluation, after step 4, is the best.
    let found = |evaluation: u64| [3.0, 1.0, 2.0, 2.5, 2.2, 2.1][evaluation as usize - 1];
    for (arguments, name, last) in [(evaluated, "steps", 12), (only_best, "best", 10)] {
        let (summary, _) = train(dir.path(), &arguments, name, TO_THE_END, &found);
        summary.unwrap();
        let kept = Snapshot::list(dir.path().join(name)).unwrap();
        let steps: Vec<u64> = kept.iter().map(Snapshot::step).collect();
        assert_eq!(steps, [last, 4], "{name}");
    }
}

#[test]
fn the_averages_at_the_end_are_those_of_the_best_snapshot() {
    let _alone = alone();
    let dir = tempfile::tempdir().unwrap();
    let averaged = TrainingArguments {
        eval_strategy: IntervalStrategy::Steps,
        eval_steps: Some(2.0),
        save_steps: 2.0,
        max_steps: 6,
        load_best_model_at_end: true,
        ema_decay: Some(0.5),
        ..arguments(dir.path())
    };
    let found = |evaluation: u64| [3.0, 1.0, 2.0][evaluation as usize - 1];
    let (trained, _) = fit(dir.path(), &averaged, "run", TO_THE_END, &found);
    let (summary, ema) = trained.unwrap();
    assert_eq!(summary.best.unwrap().step, 4);
    let best = Snapshot::open(dir.path().join("run/checkpoint-4")).unwrap();
    let stored = best.state("ema", Scope::Run, 0).unwrap();
    for (name, average) in ema.unwrap().averages() {
        assert_eq!(average, stored.tensors[name], "{name}");
    }
}

#[test]
fn a_run_is_evaluated_before_its_first_step_where_that_is_asked_for() {
    let _alone = alone();
    let dir = tempfile::tempdir().unwrap();
    let plain = TrainingArguments {
        eval_on_start: true,
        max_steps: 2,
        ..arguments(dir.path())
    };
    let longer = TrainingArguments {
        max_steps: 3,
        resume_from_checkpoint: latest(),
        ..plain.clone()
    };
    // The second run resumes, and is not evaluated again.
    for arguments in [plain, longer] {
        let (summary, _) = train(dir.path(), &arguments, "run", TO_THE_END, &|_| 5.5);
        summary.unwrap();
    }
    let records = read_metrics(dir.path().join("run/metrics.jsonl"))
        .unwrap()
        .records;
    let steps: Vec<u64> = records.iter().map(|record| record.step).collect();
    assert_eq!(steps, [0, 1, 2, 3]);
    assert!(records[0].loss.is_nan() && records[1].loss.is_finite());
    let evaluations: Vec<_> = records.iter().map(|record| record.eval_loss).collect();
    assert_eq!(evaluations, [Some(5.5), None, None, None]);
}

#[test]
fn what_cannot_be_meant_is_refused_before_anything_is_loaded() {
    let refused = |change: fn(&mut TrainingArguments)| {
        let mut arguments = TrainingArguments::default();
        change(&mut arguments);
        arguments.validate().unwrap_err().to_string()
    };
    for (error, word) in [
        (
            refused(|a| a.save_total_limit = Some(0)),
            "save_total_limit",
        ),
        (refused(|a| a.save_steps = 0.0), "save_steps"),
        (
            refused(|a| a.load_best_model_at_end = true),
            "eval_strategy",
        ),
        (
            refused(|a| a.early_stopping_patience = Some(2)),
            "eval_strategy",
        ),
        (
            refused(|a| {
                a.load_best_model_at_end = true;
                a.eval_strategy = IntervalStrategy::Steps;
                a.eval_steps = Some(300.0);
            }),
            "multiple",
        ),
    ] {
        assert!(error.contains(word), "{error}");
    }
}
