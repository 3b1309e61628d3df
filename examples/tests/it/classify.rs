//! The example `classify` learns from a file, from scratch and from a folder, and writes one that transformers loads.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use clap::Parser;
use overdrive::datasets::{
    DataLoader, DataLoaderOptions, Dataset, RowLayout, TokenMasking, TokenMaskingOptions,
    collate_masked, copy_tokenizer,
};
use overdrive::optim::{AdamW, AdamWConfig, Optimizer, decay_groups};
use overdrive::transformer::{
    EncoderConfig, EncoderFamily, EncoderInput, InitOptions, MaskedLm, SequenceClassifier,
};

use crate::alone;
use crate::classify_example::{Flags, run};
use crate::on_python::python;

/// Writes 240 sentences whose verb decides the label.
fn write_data(path: &Path) {
    let good = ["loved", "enjoyed", "praised", "admired"];
    let bad = ["hated", "disliked", "mocked", "left"];
    let things = [
        "the film",
        "this book",
        "that song",
        "our meal",
        "the play",
        "her talk",
    ];
    let people = ["We", "They", "My friends", "Most people", "The critics"];
    let mut text = "text,label\n".to_owned();
    for (verbs, label) in [(good, "good"), (bad, "bad")] {
        for verb in verbs {
            for thing in things {
                for who in people {
                    text += &format!("\"{who} {verb} {thing}, as you know.\",{label}\n");
                }
            }
        }
    }
    fs::write(path, text).unwrap();
}

fn flags(data: &Path, out: &Path, more: &[&str]) -> Flags {
    let paths = [
        "--data",
        data.to_str().unwrap(),
        "--out",
        out.to_str().unwrap(),
    ];
    Flags::parse_from(["classify"].iter().chain(&paths).chain(more))
}

/// Trains a classifier from scratch, and that one on by LoRA; returns the folders of both.
fn classifiers(dir: &Path) -> [PathBuf; 2] {
    let _alone = alone();
    let (data, first) = (dir.join("rows.csv"), dir.join("first"));
    write_data(&data);
    let accuracy = run(&flags(&data, &first, &["--epochs", "12"])).unwrap();
    assert!(accuracy > 0.95, "{accuracy}");
    // The same flags give the same weights.
    let again = dir.join("again");
    assert_eq!(
        run(&flags(&data, &again, &["--epochs", "12"])).unwrap(),
        accuracy
    );
    let weights = |out: &Path| fs::read(out.join("model.safetensors")).unwrap();
    assert!(weights(&first) == weights(&again));
    let config = EncoderConfig::from_dir(&first).unwrap();
    assert_eq!(config.id2label, ["bad", "good"]);

    // The folder is a model that LoRA starts from, and what it writes is a plain model again.
    let second = dir.join("second");
    let more = [
        "--model",
        first.to_str().unwrap(),
        "--lora",
        "4",
        "--epochs",
        "1",
    ];
    let accuracy = run(&flags(&data, &second, &more)).unwrap();
    assert!(accuracy > 0.95, "{accuracy}");
    let merged = SequenceClassifier::from_pretrained(&second, &Default::default()).unwrap();
    assert_eq!(merged.load_report(), &Default::default());
    assert!(weights(&second) != weights(&first));
    [first, second]
}

#[test]
fn a_classifier_learns_from_scratch_and_by_lora() {
    classifiers(tempfile::tempdir().unwrap().path());
}

#[test]
#[ignore = "needs Python with torch and transformers"]
fn the_pipeline_of_transformers_names_the_classes_of_two_sentences_on_python() {
    let python = python(&["torch", "transformers"]);
    let dir = tempfile::tempdir().unwrap();
    let script = r#"
import sys, transformers
for folder in sys.argv[1:]:
    pipe = transformers.pipeline("text-classification", model=folder)
    names = [result["label"] for result in pipe(["They praised the film, as you know.", "We hated it."], batch_size=2)]
    assert names == ["good", "bad"], names
"#;
    let output = Command::new(python)
        .arg("-c")
        .arg(script)
        .args(classifiers(dir.path()))
        .output()
        .unwrap();
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
}

#[test]
fn lora_trains_both_layers_of_robertas_classifier() {
    let _alone = alone();
    let dir = tempfile::tempdir().unwrap();
    let (data, bert) = (dir.path().join("rows.csv"), dir.path().join("bert"));
    write_data(&data);
    // A BERT of one epoch, for its tokenizer.
    run(&flags(&data, &bert, &["--epochs", "1"])).unwrap();
    let base = EncoderConfig::from_dir(&bert).unwrap();
    let mut config = EncoderConfig::new(EncoderFamily::Roberta).with_labels(&base.id2label);
    config.vocab_size = base.vocab_size;
    (config.hidden_size, config.intermediate_size) = (32, 64);
    (config.num_hidden_layers, config.num_attention_heads) = (1, 4);
    let folder = dir.path().join("roberta");
    SequenceClassifier::new(&config, &InitOptions::default())
        .unwrap()
        .save_pretrained(&folder, &Default::default())
        .unwrap();
    copy_tokenizer(&bert, &folder).unwrap();
    let out = dir.path().join("out");
    let model = folder.to_str().unwrap();
    let more = ["--model", model, "--lora", "4", "--epochs", "1"];
    run(&flags(&data, &out, &more)).unwrap();
    let trained = SequenceClassifier::from_pretrained(&out, &Default::default()).unwrap();
    for (name, parameter) in trained.named_parameters() {
        // Biases begin as zeros, and adapters have none.
        if name.starts_with("classifier.") && name.ends_with(".bias") {
            let largest = parameter.abs().max().double_value(&[]);
            assert!(largest > 0.0, "{name}");
        }
    }
}

#[test]
fn a_file_that_does_not_fit_is_refused() {
    let _alone = alone();
    let dir = tempfile::tempdir().unwrap();
    let data = dir.path().join("rows.csv");
    fs::write(&data, "title,label\nx,1\n").unwrap();
    let error = run(&flags(&data, dir.path(), &[])).unwrap_err().to_string();
    assert!(
        error.contains("`text_column` is text; it must be one of title, label"),
        "{error}"
    );
}

/// Sequences `[CLS] n n+1 … [SEP]`, of which every masked token follows from the others.
struct Rising;

impl Dataset for Rising {
    type Item = Vec<i64>;

    fn len(&self) -> usize {
        64
    }

    fn get(&self, index: usize) -> overdrive::datasets::Result<Vec<i64>> {
        let start = 5 + (index % 16) as i64;
        let length = 6 + (index % 3) as i64;
        Ok([2]
            .into_iter()
            .chain(start..start + length)
            .chain([3])
            .collect())
    }
}

#[test]
fn masked_tokens_from_a_loader_are_learned() {
    let _alone = alone();
    // Many masked tokens: two of twelve would make many steps necessary.
    let options = TokenMaskingOptions {
        mlm_probability: 0.3,
        ..TokenMaskingOptions::default()
    };
    let masking = TokenMasking::new(4, 30, 0..5, options).unwrap();
    let options = DataLoaderOptions {
        batch_size: 32,
        shuffle: true,
        num_workers: 1,
        ..DataLoaderOptions::default()
    };
    let batches = options.batches(Rising.len()).unwrap();
    let collate = move |epoch: u64, rows: Vec<(usize, Vec<i64>)>| {
        collate_masked(&masking, epoch, &rows, RowLayout::default())
    };
    let mut loader = DataLoader::with_indices(Rising, batches, collate, options.workers()).unwrap();
    for family in EncoderFamily::ALL {
        let mut config = EncoderConfig::new(family);
        (
            config.vocab_size,
            config.hidden_size,
            config.intermediate_size,
        ) = (30, 32, 64);
        (config.num_hidden_layers, config.num_attention_heads) = (2, 2);
        config.pad_token_id = Some(0);
        (config.hidden_dropout, config.attention_dropout) = (0.0, 0.0);
        let model = MaskedLm::new(&config, &InitOptions::default()).unwrap();
        model.set_requires_grad(true).unwrap();
        let config = AdamWConfig {
            learning_rate: 3e-3,
            ..AdamWConfig::default()
        };
        let groups = decay_groups(model.named_parameters(), 0.01);
        let mut optimizer = AdamW::new(groups, config).unwrap();
        let mut losses = Vec::new();
        for _ in 0..70 {
            let (mut sum, mut count) = (0.0, 0);
            for batch in loader.epoch() {
                let batch = batch.unwrap();
                let mut input = EncoderInput::new(&batch.input_ids);
                input.attention_mask = batch.attention_mask.as_ref();
                let loss = model.loss(input, &batch.labels).unwrap();
                assert_eq!(loss.tokens().unwrap(), batch.label_count as i64);
                sum += loss.sum.double_value(&[]);
                count += batch.label_count;
                loss.mean().unwrap().backward();
                optimizer.step().unwrap();
                optimizer.zero_grad().unwrap();
            }
            losses.push(sum / count as f64);
        }
        // The first is the logarithm of the vocabulary; it falls to the half in 140 steps.
        let (first, last) = (losses[0], losses[69]);
        println!("{family:?}: {first:.2} to {last:.2}");
        assert!(first > 3.0 && last < 2.0, "{family:?}: {losses:?}");
    }
}
