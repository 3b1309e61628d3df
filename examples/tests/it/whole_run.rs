//! A complete small run: text, tokenizer, model, steps, evaluation, results.

use std::fs;
use std::path::Path;

use overdrive::datasets::{Batch, DeviceLoader};
use overdrive::distributed::ProcessGroup;
use overdrive::precision::Precision;
use overdrive::trainer::{
    RunFolder, RunOptions, RunSummary, TextData, TrainingArguments, TrainingRun, batch_loss,
    new_model, write_results,
};
use overdrive::transformer::CausalLm;
use tch::Device;

use crate::alone;
use crate::fit;

fn arguments(folder: &Path) -> TrainingArguments {
    let text = folder.join("text");
    fs::create_dir_all(&text).unwrap();
    for number in 0..40 {
        let line = format!("Document {number} says that the quick brown fox jumps over the dog.\n");
        fs::write(text.join(format!("{number:02}.txt")), line.repeat(12)).unwrap();
    }
    TrainingArguments {
        output_dir: Some(folder.join("run")),
        vocab_size: 320,
        max_steps: 30,
        max_eval_batches: Some(4),
        samples: 2,
        ..fit::tiny(text)
    }
}

fn evaluate(model: &CausalLm, batches: DeviceLoader<Batch>, precision: Precision) -> f64 {
    let group = ProcessGroup::single();
    overdrive::trainer::evaluate(model, batches, precision, &group).unwrap()
}

/// Trains on the text of `folder`; returns the validation losses before and after.
fn run(folder: &Path) -> (f64, f64, Vec<f64>) {
    let arguments = arguments(folder);
    let mut lines = Vec::new();
    let data = TextData::prepare_in(&folder.join("cache"), &arguments, |line| {
        lines.push(line.to_owned());
    })
    .unwrap();
    assert!(lines[0].contains("40 files"), "{lines:?}");

    let precision = arguments.apply().unwrap();
    let model = new_model(&arguments, &data, Device::Cpu).unwrap();
    assert_eq!(
        u64::try_from(model.num_parameters()).unwrap(),
        arguments.model.parameters(data.vocab_size())
    );
    let loss_now = || {
        let batches = data.validation_loader(&arguments, Device::Cpu).unwrap();
        evaluate(&model, batches, precision)
    };
    let before = loss_now();

    let run = RunFolder::create(&arguments).unwrap();
    let group = ProcessGroup::single();
    let mut loader = data.train_loader(&arguments, Device::Cpu).unwrap();
    let options = RunOptions {
        precision: Some(precision),
        folder: Some(run.clone()),
        silent: true,
        ..RunOptions::default()
    };
    let parameters = model.named_parameters();
    let mut training =
        TrainingRun::start(&arguments, &group, parameters, &mut loader, options).unwrap();
    while let Some(batches) = training.next_batches(&mut loader).unwrap() {
        for batch in &batches {
            let loss = training.forward(|| batch_loss(&model, batch)).unwrap();
            training.backward(&loss.sum).unwrap();
        }
        training.step().unwrap();
        training.save_if_due().unwrap();
    }
    let losses = training.finish().unwrap().0.losses;
    let after = loss_now();

    let results = write_results(
        &run,
        &arguments,
        &data,
        &model,
        &RunSummary::default(),
        None,
    )
    .unwrap();
    assert_eq!((results.steps, results.samples.len()), (30, 2));
    assert!(
        results.samples[0].prompt.starts_with("Document"),
        "{results}"
    );
    assert!(
        fs::read_to_string(run.report())
            .unwrap()
            .contains("Document")
    );
    assert!(run.loss().is_file() && run.model().join("tokenizer.json").is_file());
    let again = CausalLm::from_pretrained(run.model(), &Default::default()).unwrap();
    let batches = data.validation_loader(&arguments, Device::Cpu).unwrap();
    assert_eq!(evaluate(&again, batches, precision), after);
    (before, after, losses)
}

#[test]
fn a_small_run_learns_and_a_second_one_with_its_seed_is_equal() {
    let _alone = alone();
    let (first, second) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let (before, after, losses) = run(first.path());
    assert!(
        (before - 320f64.ln()).abs() < 0.3,
        "a fresh model knows nothing: {before}"
    );
    assert!(after < before - 2.0, "from {before} to {after}");
    assert_eq!(run(second.path()), (before, after, losses));
}

#[test]
fn text_too_short_for_a_window_is_refused_before_training() {
    let folder = tempfile::tempdir().unwrap();
    let short = TrainingArguments {
        context_length: 100_000,
        ..arguments(folder.path())
    };
    let error = TextData::prepare_in(&folder.path().join("cache"), &short, |_| {}).unwrap_err();
    assert!(error.to_string().contains("at least 100001"), "{error}");
}

#[test]
fn a_single_file_is_split_by_position() {
    let folder = tempfile::tempdir().unwrap();
    let mut one = arguments(folder.path());
    let book = folder.path().join("book.txt");
    fs::write(
        &book,
        "It was the best of times, it was the worst of times.\n".repeat(200),
    )
    .unwrap();
    one.data = vec![book];
    let data = TextData::prepare_in(&folder.path().join("cache"), &one, |_| {}).unwrap();
    let part = data.validation.len() as f64 / (data.train.len() + data.validation.len()) as f64;
    assert!((part - one.validation_fraction).abs() < 0.01, "{part}");
}
