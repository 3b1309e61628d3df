//! Small runs of the example `dpo`: the margin between the answers grows, with adapters and with all weights.

use std::f64::consts::LN_2;
use std::fmt::Write as _;
use std::path::Path;

use overdrive::distributed::ProcessGroup;
use overdrive::lora::{LoadAdapterOptions, load_adapter};
use overdrive::trainer::{
    DpoArguments, DpoConfig, FinetuneArguments, Finetuned, IntervalStrategy, PreferenceData,
    RewardMetrics, dpo_loss, preference_log_probs,
};
use overdrive::transformer::{CausalLm, LoadOptions};
use tch::Device;

use crate::alone;
use crate::dpo_example::train;
use crate::finetune::prepare;

/// Creates a small model and preferences of sums over apologies.
fn preferences(folder: &Path) -> FinetuneArguments {
    let mut arguments = prepare(folder, 1);
    let data = folder.join("preferences.jsonl");
    let mut text = String::new();
    for number in 0..40 {
        let (a, b) = (number % 8, number / 8);
        let (sum, other) = (a + b, ["Ask me later", "No idea"][number % 2]);
        let record =
            format!(r#"{{"prompt": "{a}+{b}=", "chosen": "{sum}", "rejected": "{other}"}}"#);
        writeln!(text, "{record}").unwrap();
    }
    std::fs::write(&data, text).unwrap();
    arguments.training.data = vec![data];
    arguments.training.max_steps = 30;
    // The matrices are too small to share.
    arguments.training.threads = Some(1);
    arguments.training.learning_rate = 1e-3;
    arguments.training.eval_strategy = IntervalStrategy::Steps;
    arguments.training.eval_steps = Some(30.0);
    arguments.training.validation_fraction = 0.2;
    arguments
}

fn with_defaults(finetune: &FinetuneArguments) -> DpoArguments {
    DpoArguments {
        finetune: finetune.clone(),
        ..DpoArguments::default()
    }
}

fn run(arguments: &FinetuneArguments) -> (Finetuned, String) {
    let mut lines = String::new();
    let mut say = |line: &str| lines += &format!("{line}\n");
    let mut arguments = with_defaults(arguments);
    let tuned = train(&mut arguments, &ProcessGroup::single(), &mut say).unwrap();
    (tuned, lines)
}

fn load(folder: &Path) -> CausalLm {
    CausalLm::from_pretrained(folder, &LoadOptions::default()).unwrap()
}

/// Returns the rewards of the held-out answers.
fn held_out(policy: &CausalLm, arguments: &FinetuneArguments) -> RewardMetrics {
    let _no_grad = tch::no_grad_guard();
    let reference = load(&arguments.model_name_or_path);
    let data = PreferenceData::prepare(arguments, &[], |_| {}).unwrap();
    let mut batches = data
        .validation_loader(arguments, Device::Cpu)
        .unwrap()
        .unwrap();
    let batch = batches.next().unwrap().unwrap();
    assert_eq!(batch.pairs, 8);
    let log_probs = |model| preference_log_probs(model, &batch).unwrap();
    let (policy, reference) = (log_probs(policy), log_probs(&reference));
    let output = dpo_loss(&policy, &reference, &DpoConfig::default()).unwrap();
    let mut rewards = output.rewards;
    rewards.take_mean(&ProcessGroup::single()).unwrap()
}

fn assert_learned(tuned: &Finetuned) {
    let losses = &tuned.summary.losses;
    assert_eq!(losses.len(), 30);
    // Before the first step the policy is the reference.
    assert!((losses[0] - LN_2).abs() < 1e-5, "{losses:?}");
    assert!(losses[29] < 0.5 * LN_2, "{losses:?}");
    let held_out = tuned.summary.evaluation.as_ref().unwrap().loss;
    assert!(held_out < 0.5 * LN_2, "{held_out}");
}

#[test]
fn the_margin_of_held_out_answers_grows_and_the_adapter_is_read_again() {
    let _alone = alone();
    let folder = tempfile::tempdir().unwrap();
    let mut arguments = preferences(folder.path());
    // Off, as in TRL: the first loss is that of the reference.
    arguments.lora_dropout = 0.5;
    // The adapter is switched off and on again between the graphs of two micro-batches.
    arguments.training.gradient_checkpointing = true;
    let (tuned, lines) = run(&arguments);
    assert_learned(&tuned);
    for expected in [
        "8 held out",
        "of 8 pairs per epoch",
        "the model without its adapter",
    ] {
        assert!(lines.contains(expected), "{expected}: {lines}");
    }
    let evaluation = tuned.summary.evaluation.as_ref().unwrap().loss;
    let written = tuned.write("base").unwrap().unwrap();
    assert!(written.samples[0].prompt.ends_with('='));

    let run_folder = folder.path().join("run");
    // The metrics of a step have its rewards under TRL's names, and the arguments TRL's keys.
    let metrics = std::fs::read_to_string(run_folder.join("metrics.jsonl")).unwrap();
    let last: serde_json::Value = serde_json::from_str(metrics.lines().last().unwrap()).unwrap();
    let reward = |name: &str| last[format!("rewards/{name}")].as_f64().unwrap();
    assert!((reward("chosen") - reward("rejected") - reward("margins")).abs() < 1e-9);
    assert_eq!(reward("accuracies"), 1.0);
    assert_eq!(last["eval_rewards/accuracies"].as_f64(), Some(1.0));
    let stored = std::fs::read_to_string(run_folder.join("training_args.json")).unwrap();
    let stored: serde_json::Value = serde_json::from_str(&stored).unwrap();
    assert_eq!(
        (&stored["beta"], &stored["loss_type"]),
        (&0.1.into(), &"sigmoid".into())
    );
    let mut policy = load(&arguments.model_name_or_path);
    let options = LoadAdapterOptions::default();
    load_adapter(&mut policy, &run_folder, "default", &options).unwrap();
    let rewards = held_out(&policy, &arguments);
    assert!(
        rewards.margins > 1.0 && rewards.accuracies == 1.0,
        "{rewards}"
    );
    assert!(rewards.chosen > rewards.rejected, "{rewards}");
    // The loss of a pair is convex in its margin, so the mean loss is at least that of the mean margin.
    assert!(
        evaluation >= (-rewards.margins).exp().ln_1p() - 1e-6,
        "{evaluation} {rewards}"
    );
}

#[test]
fn all_weights_are_compared_with_a_second_copy_and_saved_as_a_model() {
    let _alone = alone();
    let folder = tempfile::tempdir().unwrap();
    let mut arguments = preferences(folder.path());
    arguments.use_peft = false;
    let (tuned, lines) = run(&arguments);
    assert!(lines.contains("a second copy of the model"), "{lines}");
    assert_learned(&tuned);
    tuned.write("base").unwrap().unwrap();
    let policy = load(&folder.path().join("run/model"));
    let rewards = held_out(&policy, &arguments);
    assert!(rewards.margins > 1.0, "{rewards}");
}

#[test]
fn trained_biases_are_refused() {
    let _alone = alone();
    let folder = tempfile::tempdir().unwrap();
    let mut arguments = preferences(folder.path());
    arguments.bias = overdrive::lora::BiasMode::All;
    let group = ProcessGroup::single();
    let error = train(&mut with_defaults(&arguments), &group, &mut |_| {}).unwrap_err();
    let error = error.to_string();
    assert!(
        error.starts_with("`bias` is all") && error.contains("`none`"),
        "{error}"
    );
}
