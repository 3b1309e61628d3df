//! Fine-tunes a sequence classifier (BERT, RoBERTa, ModernBERT) on a file of texts with labels, CSV or JSON Lines:
//!
//! ```text
//! cargo xtask example classify --model bert-base-uncased --data reviews.csv --out runs/reviews
//! cargo xtask example classify --data reviews.csv          # a small BERT from scratch, without a download
//! ```
//!
//! It trains on a part of the rows (`--lora 8`: adapters and the classifier only), prints the accuracy on the rest,
//! and writes a folder that transformers' `pipeline("text-classification")` loads.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Result;
use clap::Parser;
use overdrive::datasets::{
    LabeledTexts, Permutation, RowLayout, TokenizedExample, Tokenizer, collate, copy_tokenizer,
    encode_sequences, load_tokenizer, save_word_piece, train_word_piece,
};
use overdrive::lora::{
    AddOptions, LoraConfig, MergeOptions, TargetModules, add_adapter, merge_and_unload,
    trainable_parameters,
};
use overdrive::optim::{AdamW, AdamWConfig, ClipOptions, Optimizer, clip_grad_norm, decay_groups};
use overdrive::transformer::{
    EncoderConfig, EncoderFamily, EncoderInput, InitOptions, LoadOptions, SaveOptions,
    SequenceClassifier,
};
use overdrive_examples::{exit, print_line};
use tch::{Device, Kind, Tensor};

/// Fine-tunes a sequence classifier on texts with labels
#[derive(Parser)]
pub(crate) struct Flags {
    /// File of texts and labels: .csv, .tsv, .json or .jsonl
    #[arg(long, value_name = "FILE")]
    data: PathBuf,
    /// Folder of a BERT, RoBERTa or ModernBERT [default: a small BERT from scratch]
    #[arg(long, value_name = "DIR")]
    model: Option<PathBuf>,
    /// Column of the texts
    #[arg(long, default_value = "text")]
    text_column: String,
    /// Column of the labels
    #[arg(long, default_value = "label")]
    label_column: String,
    /// Share of the rows that only the accuracy is measured on
    #[arg(long, default_value_t = 0.2)]
    held_out: f64,
    #[arg(long, default_value_t = 3)]
    epochs: u64,
    #[arg(long, default_value_t = 16, value_parser = clap::value_parser!(u16).range(1..))]
    batch_size: u16,
    /// Learning rate [default: 5e-5; 1e-3 from scratch and with --lora]
    #[arg(long)]
    learning_rate: Option<f64>,
    /// Most tokens of a text; longer ones are cut
    #[arg(long, default_value_t = 128)]
    max_length: usize,
    /// Train adapters of this rank, and the classifier, in place of all weights
    #[arg(long, value_name = "RANK")]
    lora: Option<u32>,
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Output folder
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
}

#[allow(dead_code, reason = "the tests include this file")]
fn main() -> ExitCode {
    exit(|| run(&Flags::parse()).map(drop))
}

/// Trains, and returns the accuracy on the held-out texts.
pub(crate) fn run(flags: &Flags) -> Result<f64> {
    tch::manual_seed(flags.seed.cast_signed());
    let data = LabeledTexts::open(&flags.data, &flags.text_column, &flags.label_column, None)?;
    let (train, test) = data.split(flags.held_out, flags.seed)?;
    let (mut model, tokenizer) = load(flags, &data, &train)?;
    let longest = flags.max_length.min(model.config().context() as usize);
    let rows = encode_sequences(&tokenizer, &data.texts, longest)?;
    if let Some(rank) = flags.lora {
        let config = LoraConfig {
            r: rank.into(),
            target_modules: Some(TargetModules::AllLinear),
            modules_to_save: model.output_module().map(|module| vec![module.to_owned()]),
            ..LoraConfig::default()
        };
        add_adapter(&mut model, "default", &config, &AddOptions::default())?;
    } else {
        model.set_requires_grad(true)?;
    }
    let parameters = trainable_parameters(&mut model)?;
    let all: Vec<Tensor> = parameters
        .iter()
        .map(|(_, tensor)| tensor.shallow_clone())
        .collect();
    let fresh = flags.model.is_none() || flags.lora.is_some();
    let learning_rate = flags
        .learning_rate
        .unwrap_or(if fresh { 1e-3 } else { 5e-5 });
    let config = AdamWConfig {
        learning_rate,
        ..Default::default()
    };
    let mut optimizer = AdamW::new(decay_groups(parameters, 0.01), config)?;

    let size = usize::from(flags.batch_size);
    let steps = flags.epochs * train.len().div_ceil(size) as u64;
    let mut step = 0;
    model.set_training(true)?;
    for epoch in 0..flags.epochs {
        let order = Permutation::new(train.len(), flags.seed, epoch);
        let order: Vec<usize> = (0..train.len()).map(|at| train[order.apply(at)]).collect();
        let mut total = 0.0;
        for batch in order.chunks(size) {
            // Linear decay to zero, as transformers' default schedule.
            let rate = learning_rate * (1.0 - step as f64 / steps as f64);
            optimizer.set_learning_rates(&vec![rate; optimizer.learning_rates().len()])?;
            let (logits, classes) = forward(&model, &rows, &data, batch)?;
            let loss = model.loss_of_logits(&logits, &classes)?.mean()?;
            loss.f_backward()?;
            clip_grad_norm(&all, 1.0, ClipOptions::default())?;
            optimizer.step()?;
            optimizer.zero_grad()?;
            total += loss.f_double_value(&[])? * batch.len() as f64;
            step += 1;
        }
        print_line(format_args!(
            "epoch {}  loss {:.4}",
            epoch + 1,
            total / train.len() as f64
        ));
    }
    model.set_training(false)?;
    let accuracy = tch::no_grad(|| accuracy(&model, &rows, &data, &test, size))?;
    let (of, percent) = (test.len(), 100.0 * accuracy);
    print_line(format_args!(
        "{percent:.1}% of {of} held-out texts are classified correctly"
    ));
    if let Some(out) = &flags.out {
        if flags.lora.is_some() {
            merge_and_unload(&mut model, &MergeOptions::default())?;
        }
        model.save_pretrained(out, &SaveOptions::default())?;
        match &flags.model {
            Some(folder) => drop(copy_tokenizer(folder, out)?),
            None => save_word_piece(out, &tokenizer, model.config().context() as usize)?,
        }
        print_line(format_args!("written {}", out.display()));
    }
    Ok(accuracy)
}

/// Loads the model with the classes of the data, or makes a small one with a tokenizer for the texts to train on.
fn load(
    flags: &Flags,
    data: &LabeledTexts,
    train: &[usize],
) -> Result<(SequenceClassifier, Tokenizer)> {
    let device = Device::cuda_if_available();
    if let Some(folder) = &flags.model {
        let config = EncoderConfig::from_dir(folder)?.with_labels(&data.labels);
        let options = LoadOptions {
            device,
            ..LoadOptions::default()
        };
        let model =
            SequenceClassifier::from_pretrained_with(folder, &config, &options, flags.seed)?;
        return Ok((model, load_tokenizer(folder)?));
    }
    let texts: Vec<&str> = train.iter().map(|&index| &*data.texts[index]).collect();
    let tokenizer = train_word_piece(&texts, 4096)?;
    let mut config = EncoderConfig::new(EncoderFamily::Bert).with_labels(&data.labels);
    config.vocab_size = tokenizer.get_vocab_size(true) as i64;
    (config.hidden_size, config.intermediate_size) = (64, 256);
    (config.num_hidden_layers, config.num_attention_heads) = (2, 4);
    let options = InitOptions {
        device,
        seed: flags.seed,
        ..InitOptions::default()
    };
    Ok((SequenceClassifier::new(&config, &options)?, tokenizer))
}

/// Returns the logits and the classes of the texts `batch`.
fn forward(
    model: &SequenceClassifier,
    rows: &[TokenizedExample],
    data: &LabeledTexts,
    batch: &[usize],
) -> Result<(Tensor, Tensor)> {
    let (device, pad) = (model.device(), model.config().pad_token_id.unwrap_or(0));
    let layout = RowLayout::Padded {
        pad_token: pad as u32,
        multiple_of: 1,
    };
    let members: Vec<&[TokenizedExample]> = batch
        .iter()
        .map(|&index| std::slice::from_ref(&rows[index]))
        .collect();
    let tokens = collate(&members, layout)?;
    tokens.check_ids(model.config().vocab_size)?;
    let ids = tokens.input_ids.f_to_device(device)?;
    let mut input = EncoderInput::new(&ids);
    input.attention_mask = tokens.attention_mask.as_ref();
    let classes: Vec<i64> = batch.iter().map(|&index| data.classes[index]).collect();
    let classes = Tensor::f_from_slice(&classes)?.f_to_device(device)?;
    Ok((model.forward(input)?, classes))
}

/// Returns the share of the texts `test` whose class has the largest logit.
fn accuracy(
    model: &SequenceClassifier,
    rows: &[TokenizedExample],
    data: &LabeledTexts,
    test: &[usize],
    size: usize,
) -> Result<f64> {
    let mut right = 0;
    for batch in test.chunks(size) {
        let (logits, classes) = forward(model, rows, data, batch)?;
        let named = logits.f_argmax(-1, false)?.f_eq_tensor(&classes)?;
        right += named.f_sum(Kind::Int64)?.f_int64_value(&[])?;
    }
    Ok(right as f64 / test.len() as f64)
}
