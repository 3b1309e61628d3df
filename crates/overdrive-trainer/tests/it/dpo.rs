//! The losses of preference pairs, compared with TRL's, and the records that they are made of.

use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};

use overdrive_datasets::{Dataset, OnBadRecord, TokenizedExample};
use overdrive_distributed::ProcessGroup;
use overdrive_trainer::{
    DpoConfig, DpoLossType, FinetuneArguments, IntervalStrategy, MicroBatch, PreferenceBatch,
    PreferenceData, PreferenceExample, PreferenceLogProbs, collate_preferences, dpo_loss,
    preference_log_probs,
};
use overdrive_transformer::{CausalLm, Execution, InitOptions, ModelConfig};
use serde::Deserialize;
use serde_json::Value;
use tch::{Device, Tensor};

/// That of `gen_dpo.py`, with its reason.
const TOLERANCE: f64 = 1e-5;

#[derive(Deserialize)]
struct Expected {
    config: Value,
    pairs: Vec<Pair>,
    gradients: Vec<String>,
    cases: Vec<Case>,
}

#[derive(Deserialize)]
struct Pair {
    prompt_ids: Vec<i64>,
    chosen_ids: Vec<i64>,
    rejected_ids: Vec<i64>,
}

#[derive(Deserialize)]
struct Case {
    loss_type: DpoLossType,
    beta: f64,
    label_smoothing: f64,
    loss: f64,
    metrics: BTreeMap<String, f64>,
}

impl Case {
    fn config(&self) -> DpoConfig {
        DpoConfig {
            beta: self.beta,
            loss_type: self.loss_type,
            label_smoothing: self.label_smoothing,
            ..DpoConfig::default()
        }
    }
}

fn fixture(name: &str) -> PathBuf {
    let path = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/fixtures")
        .join(name);
    assert!(path.exists(), "make it: python3 tests/fixtures/gen_dpo.py");
    path
}

fn expected() -> (Expected, HashMap<String, Tensor>) {
    let text = std::fs::read_to_string(fixture("dpo.json")).unwrap();
    let tensors = Tensor::read_safetensors(fixture("dpo.safetensors")).unwrap();
    (
        serde_json::from_str(&text).unwrap(),
        tensors.into_iter().collect(),
    )
}

/// Returns the model whose weights have the prefix `name` in the fixture.
fn model(name: &str, config: &Value, tensors: &HashMap<String, Tensor>) -> CausalLm {
    let config = ModelConfig::try_from(config.clone()).unwrap();
    let model = CausalLm::new(&config, &InitOptions::default()).unwrap();
    for (key, mut parameter) in model.named_parameters() {
        let _no_grad = tch::no_grad_guard();
        parameter.copy_(&tensors[&format!("{name}.{key}")]);
    }
    model
}

fn row(prompt: &[i64], answer: &[i64]) -> TokenizedExample {
    TokenizedExample {
        input_ids: [prompt, answer].concat(),
        labels: [&vec![-100; prompt.len()], answer].concat(),
        truncated: false,
    }
}

fn batch(pairs: &[Pair]) -> PreferenceBatch {
    let pairs: Vec<PreferenceExample> = pairs
        .iter()
        .map(|pair| PreferenceExample {
            chosen: row(&pair.prompt_ids, &pair.chosen_ids),
            rejected: row(&pair.prompt_ids, &pair.rejected_ids),
        })
        .collect();
    collate_preferences(&pairs, 0, 1).unwrap()
}

fn assert_close(found: &Tensor, expected: &Tensor, what: &str) {
    assert_eq!(found.size(), expected.size(), "{what}");
    let close = found.allclose(expected, TOLERANCE, TOLERANCE, false);
    assert!(close, "{what}\n{found:?} {expected:?}");
}

fn assert_near(found: f64, expected: f64, what: &str) {
    let close = (found - expected).abs() <= TOLERANCE * (1.0 + expected.abs());
    assert!(close, "{what}: {found}, and TRL has {expected}");
}

#[test]
fn a_batch_of_pairs_is_that_of_trl() {
    let (expected, tensors) = expected();
    let batch = batch(&expected.pairs);
    assert_eq!(batch.rows.input_ids, tensors["input_ids"]);
    let mask = batch.rows.labels.not_equal(-100).to_kind(tch::Kind::Int64);
    assert_eq!(mask, tensors["completion_mask"]);
    assert_eq!((batch.examples(), batch.label_count()), (3, None));
}

#[test]
fn losses_gradients_and_rewards_equal_those_of_trl() {
    let (expected, tensors) = expected();
    let batch = batch(&expected.pairs);
    let reference = model("reference", &expected.config, &tensors);
    let reference = tch::no_grad(|| preference_log_probs(&reference, &batch)).unwrap();
    assert_eq!(expected.cases.len(), 8);
    for fused_kernels in [false, true] {
        let mut policy = model("policy", &expected.config, &tensors);
        let mut execution = Execution::default();
        execution.fused_kernels = fused_kernels;
        policy.set_execution(execution);
        policy.set_requires_grad(true).unwrap();
        let parameters: HashMap<String, Tensor> = policy.named_parameters().into_iter().collect();
        for (number, case) in expected.cases.iter().enumerate() {
            let name = format!(
                "{:?} {} {}",
                case.loss_type, case.beta, case.label_smoothing
            );
            let log_probs = preference_log_probs(&policy, &batch).unwrap();
            for (logps, of) in [(&log_probs, "policy"), (&reference, "reference")] {
                let rejected = &tensors[&format!("{of}_logps.rejected")];
                assert_close(
                    &logps.chosen,
                    &tensors[&format!("{of}_logps.chosen")],
                    &name,
                );
                assert_close(&logps.rejected, rejected, &name);
            }
            let mut output = dpo_loss(&log_probs, &reference, &case.config()).unwrap();
            assert_near(output.loss.double_value(&[]), case.loss, &name);
            output.loss.backward();
            for key in &expected.gradients {
                let mut gradient = parameters[key].grad();
                assert_close(&gradient, &tensors[&format!("{number}.{key}")], &name);
                let _ = gradient.zero_();
            }
            let rewards = output.rewards.take_mean(&ProcessGroup::single()).unwrap();
            for (key, found) in [
                ("rewards/chosen", rewards.chosen),
                ("rewards/rejected", rewards.rejected),
                ("rewards/accuracies", rewards.accuracies),
                ("rewards/margins", rewards.margins),
            ] {
                assert_near(found, case.metrics[key], &format!("{name} {key}"));
            }
        }
    }
}

#[test]
fn rewards_of_several_batches_are_means_over_pairs() {
    let log_probs = |chosen: &[f32], rejected: &[f32]| PreferenceLogProbs {
        chosen: Tensor::from_slice(chosen),
        rejected: Tensor::from_slice(rejected),
        chosen_tokens: Tensor::from_slice(&vec![1_f32; chosen.len()]),
        rejected_tokens: Tensor::from_slice(&vec![1_f32; chosen.len()]),
    };
    let config = DpoConfig {
        beta: 0.5,
        ..DpoConfig::default()
    };
    let output = |chosen: &[f32], rejected: &[f32]| {
        let zeros = vec![0.0; chosen.len()];
        dpo_loss(
            &log_probs(chosen, rejected),
            &log_probs(&zeros, &zeros),
            &config,
        )
        .unwrap()
    };
    let mut totals = output(&[1.0, 2.0], &[3.0, -1.0]).rewards;
    totals.add(&output(&[6.0], &[1.0]).rewards).unwrap();
    let group = ProcessGroup::single();
    let mean = totals.take_mean(&group).unwrap();
    assert_eq!((mean.chosen, mean.rejected, mean.margins), (1.5, 0.5, 1.0));
    assert_near(mean.accuracies, 2.0 / 3.0, "accuracies");
    // Taken.
    assert!(totals.take_mean(&group).unwrap().chosen.is_nan());
}

#[test]
fn an_option_without_effect_is_refused_with_the_remedy() {
    let refused = |config: DpoConfig| config.validate().unwrap_err().to_string();
    let smoothed = |loss_type, label_smoothing| DpoConfig {
        loss_type,
        label_smoothing,
        ..DpoConfig::default()
    };
    // TRL ignores it.
    let error = refused(smoothed(DpoLossType::Sigmoid, 0.1));
    assert!(error.contains("`robust`"), "{error}");
    let error = refused(smoothed(DpoLossType::Robust, 0.5));
    assert!(error.contains("below 0.5"), "{error}");
    let error = refused(DpoConfig {
        beta: 0.0,
        ..DpoConfig::default()
    });
    assert!(error.starts_with("`beta` is 0"), "{error}");
}

/// Writes records, and a folder with a tokenizer, and returns the arguments to read them.
fn arguments(folder: &Path, records: &[&str]) -> FinetuneArguments {
    let base = folder.join("base");
    std::fs::create_dir_all(&base).unwrap();
    let tokenizer = fixture("chat_labels/tokenizer.json");
    std::fs::copy(tokenizer, base.join("tokenizer.json")).unwrap();
    std::fs::write(
        base.join("tokenizer_config.json"),
        r#"{"eos_token": "</s>"}"#,
    )
    .unwrap();
    let data = folder.join("pairs.jsonl");
    std::fs::write(&data, records.join("\n")).unwrap();
    let mut arguments = FinetuneArguments {
        model_name_or_path: base,
        ..FinetuneArguments::default()
    };
    arguments.training.data = vec![data];
    arguments.training.per_device_train_batch_size = 2;
    arguments
}

#[test]
fn the_answers_of_a_record_stay_a_pair_when_others_are_left_out() {
    let folder = tempfile::tempdir().unwrap();
    let long = "x".repeat(80);
    let too_long = format!(r#"{{"prompt": "{long}", "chosen": "a", "rejected": "b"}}"#);
    let records = [
        r#"{"prompt": "1+1=", "chosen": "2", "rejected": "33"}"#,
        r#"{"prompt": "1+2=", "chosen": "3"}"#,
        too_long.as_str(),
        r#"{"prompt": "2+2=", "chosen": "4", "rejected": "55"}"#,
        r#"{"prompt": "1+1=", "chosen": "2", "rejected": "33"}"#,
        r#"{"prompt": "2+3=", "chosen": "5", "rejected": "66"}"#,
    ];
    let mut arguments = arguments(folder.path(), &records);
    let read = |arguments: &FinetuneArguments| {
        PreferenceData::prepare_in(&folder.path().join("cache"), arguments, &[], |_| {})
    };
    let error = read(&arguments).unwrap_err().to_string();
    assert!(
        error.contains("line 2") && error.contains("no `rejected`"),
        "{error}"
    );

    arguments.on_bad_record = OnBadRecord::Skip;
    arguments.training.context_length = 16;
    arguments.training.remove_duplicates = true;
    arguments.training.eval_strategy = IntervalStrategy::No;
    let data = read(&arguments).unwrap();
    let (chosen, rejected) = (&data.chosen.train, &data.rejected.train);
    assert_eq!((chosen.len(), rejected.len()), (3, 3));
    for (index, record) in [0, 3, 5].into_iter().enumerate() {
        assert_eq!(chosen.record_number(index).unwrap(), record);
        assert_eq!(rejected.record_number(index).unwrap(), record);
        let learned = [chosen, rejected].map(|answers| answers.get(index).unwrap());
        // An answer of one or two characters, and the end of text.
        assert_eq!(learned.map(|row| row.learned_tokens()), [2, 3]);
    }

    arguments.training.group_by_length = true;
    let mut batches = data.train_loader(&arguments, Device::Cpu).unwrap();
    let batch = batches.next_batches(1).unwrap().remove(0);
    assert_eq!((batch.pairs, batch.rows.input_ids.size()[0]), (2, 4));
    assert_eq!(batch.targets.numel(), 2 * 2 + 2 * 3);

    // Both splits hold out the same records.
    arguments.training.eval_strategy = IntervalStrategy::Steps;
    arguments.training.validation_fraction = 0.4;
    let data = read(&arguments).unwrap();
    let held = [&data.chosen, &data.rejected].map(|answers| {
        let held = answers.validation.as_ref().unwrap();
        (held.len(), held.record_number(0).unwrap())
    });
    assert_eq!(held[0], held[1]);
    let batches = data.validation_loader(&arguments, Device::Cpu).unwrap();
    assert_eq!(batches.unwrap().count(), 1);
}

#[test]
fn options_that_do_not_fit_pairs_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let record = r#"{"prompt": "1+1=", "chosen": "2", "rejected": "33"}"#;
    let plain = arguments(folder.path(), &[record]);
    let refused = |change: fn(&mut FinetuneArguments)| {
        let mut arguments = plain.clone();
        change(&mut arguments);
        let read = PreferenceData::prepare_in(folder.path(), &arguments, &[], |_| {});
        read.unwrap_err().to_string()
    };
    let error = refused(|arguments| arguments.training.packing = true);
    assert!(error.starts_with("`packing` is true"), "{error}");
    let error = refused(|arguments| arguments.training.padding_free = true);
    assert!(error.starts_with("`padding_free` is true"), "{error}");
    let error = refused(|arguments| arguments.completion_only_loss = false);
    assert!(
        error.starts_with("`completion_only_loss` is false"),
        "{error}"
    );
}
