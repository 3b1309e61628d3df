//! Fine-tuning of a sequence classifier on texts with labels.

use std::path::Path;

use overdrive_datasets::{
    Batch, DataLoader, DataLoaderOptions, DeviceLoader, InMemory, LabeledTexts, OnDevice,
    RowLayout, TokenizedExample, Tokenizer, collate, copy_tokenizer, encode_sequences,
    load_tokenizer, save_word_piece, train_word_piece,
};
use overdrive_lora::{
    AddOptions, LoraConfig, MergeOptions, TargetModules, add_adapter, merge_and_unload,
};
use overdrive_transformer::{
    EncoderConfig, EncoderFamily, EncoderInput, InitOptions, LoadOptions, SaveOptions,
    SequenceClassifier,
};
use tch::{Device, Kind, Tensor};

use crate::{Evaluation, MicroBatch, Result};

/// A sequence classifier, its tokenizer and its texts, ready for training.
#[derive(Debug)]
pub struct ClassificationTask {
    /// The model.
    pub model: SequenceClassifier,
    tokenizer: Tokenizer,
    data: LabeledTexts,
    rows: Vec<TokenizedExample>,
}

impl ClassificationTask {
    /// Loads the model in `folder` with the classes of `data`; `None` makes a small BERT of random weights and trains
    /// a tokenizer on the texts `train`. Texts are truncated to `max_length` tokens and to the model's context.
    ///
    /// # Errors
    /// An error if the folder cannot be read or holds no BERT, RoBERTa, XLM-RoBERTa or ModernBERT.
    pub fn load(
        folder: Option<&Path>,
        data: LabeledTexts,
        train: &[usize],
        max_length: usize,
        seed: u64,
        device: Device,
    ) -> Result<Self> {
        let (model, tokenizer) = match folder {
            Some(folder) => {
                let config = EncoderConfig::from_dir(folder)?.with_labels(&data.labels);
                let options = LoadOptions {
                    device,
                    ..LoadOptions::default()
                };
                let model =
                    SequenceClassifier::from_pretrained_with(folder, &config, &options, seed)?;
                (model, load_tokenizer(folder)?)
            }
            None => {
                let texts: Vec<&str> = train.iter().map(|&index| &*data.texts[index]).collect();
                let tokenizer = train_word_piece(&texts, 4096)?;
                let mut config = EncoderConfig::new(EncoderFamily::Bert).with_labels(&data.labels);
                config.vocab_size = tokenizer.get_vocab_size(true) as i64;
                (config.hidden_size, config.intermediate_size) = (64, 256);
                (config.num_hidden_layers, config.num_attention_heads) = (2, 4);
                let options = InitOptions {
                    device,
                    seed,
                    ..InitOptions::default()
                };
                (SequenceClassifier::new(&config, &options)?, tokenizer)
            }
        };
        let context = model.config().context().unsigned_abs() as usize;
        let rows = encode_sequences(&tokenizer, &data.texts, max_length.min(context))?;
        Ok(Self {
            model,
            tokenizer,
            data,
            rows,
        })
    }

    /// Makes all weights trainable or, with a rank, adapters of that rank and the output layer.
    ///
    /// # Errors
    /// An error if the rank is 0.
    pub fn make_trainable(&mut self, lora_rank: Option<u32>) -> Result<()> {
        let Some(rank) = lora_rank else {
            return Ok(self.model.set_requires_grad(true)?);
        };
        let config = LoraConfig {
            r: rank.into(),
            target_modules: Some(TargetModules::AllLinear),
            // PEFT's name for the head. RoBERTa's head has two layers, and a pretrained folder holds neither.
            modules_to_save: Some(vec!["classifier".to_owned()]),
            ..LoraConfig::default()
        };
        add_adapter(&mut self.model, "default", &config, &AddOptions::default())?;
        Ok(())
    }

    /// Returns a loader of the texts `indices` in batches of `size`, in a new order in each epoch.
    ///
    /// # Errors
    /// An error if the size is 0.
    pub fn loader(
        &self,
        indices: &[usize],
        size: usize,
        seed: u64,
    ) -> Result<DeviceLoader<LabeledBatch>> {
        let layout = RowLayout::Padded {
            pad_token: self.model.config().pad_token_id.unwrap_or(0).unsigned_abs() as u32,
            multiple_of: 1,
        };
        let options = DataLoaderOptions {
            batch_size: size,
            shuffle: true,
            seed,
            ..DataLoaderOptions::default()
        };
        let row = |&index: &usize| (self.rows[index].clone(), self.data.classes[index]);
        let rows: Vec<_> = indices.iter().map(row).collect();
        let collate = move |rows: Vec<(TokenizedExample, i64)>| {
            let (rows, classes): (Vec<_>, Vec<_>) = rows.into_iter().unzip();
            let rows: Vec<_> = rows.iter().map(std::slice::from_ref).collect();
            Ok(LabeledBatch {
                tokens: collate(&rows, layout)?,
                classes: Tensor::f_from_slice(&classes)?,
            })
        };
        let loader = DataLoader::with_collate(InMemory(rows), collate, options)?;
        Ok(DeviceLoader::new(loader, self.model.device()))
    }

    /// Returns the logits `(B, classes)` of a batch.
    ///
    /// # Errors
    /// An error of a token outside the vocabulary, or of libtorch.
    pub fn forward(&self, batch: &LabeledBatch) -> Result<Tensor> {
        batch.tokens.check_ids(self.model.config().vocab_size)?;
        let mut input = EncoderInput::new(&batch.tokens.input_ids);
        input.attention_mask = batch.tokens.attention_mask.as_ref();
        Ok(self.model.forward(input)?)
    }

    /// Returns the mean loss of a batch, a scalar.
    ///
    /// # Errors
    /// As [`forward`](Self::forward).
    pub fn loss(&self, batch: &LabeledBatch) -> Result<Tensor> {
        let logits = self.forward(batch)?;
        let loss = self.model.loss_of_logits(&logits, &batch.classes)?;
        Ok(loss.mean()?)
    }

    /// Returns the mean loss of the texts `test`, and as `accuracy` the fraction whose class has the largest logit, without
    /// dropout and in batches of `size`. The model is then in training mode.
    ///
    /// # Errors
    /// As [`forward`](Self::forward).
    pub fn evaluate(&mut self, test: &[usize], size: usize) -> Result<Evaluation> {
        let _no_grad = tch::no_grad_guard();
        self.model.set_training(false)?;
        let (mut loss, mut right) = (0.0, 0);
        for batch in self.loader(test, size, 0)? {
            let batch = batch?;
            let logits = self.forward(&batch)?;
            let losses = self.model.loss_of_logits(&logits, &batch.classes)?;
            loss += f64::try_from(losses.mean()?)? * batch.examples() as f64;
            let named = logits.f_argmax(-1, false)?.f_eq_tensor(&batch.classes)?;
            right += named.f_sum(Kind::Int64)?.f_int64_value(&[])?;
        }
        self.model.set_training(true)?;
        let count = test.len() as f64;
        Ok(Evaluation::new(loss / count).with_metric("accuracy", right as f64 / count))
    }

    /// Writes a folder that transformers loads, with the tokenizer of `folder` or its own. `merges` merges the adapters
    /// into the weights first.
    ///
    /// # Errors
    /// An error if a file cannot be written.
    pub fn save(&mut self, out: &Path, folder: Option<&Path>, merges: bool) -> Result<()> {
        if merges {
            merge_and_unload(&mut self.model, &MergeOptions::default())?;
        }
        self.model.save_pretrained(out, &SaveOptions::default())?;
        match folder {
            Some(folder) => drop(copy_tokenizer(folder, out)?),
            None => {
                let context = self.model.config().context().unsigned_abs() as usize;
                save_word_piece(out, &self.tokenizer, context)?;
            }
        }
        Ok(())
    }
}

/// Texts with their classes.
#[derive(Debug)]
pub struct LabeledBatch {
    /// The tokens of the texts.
    pub tokens: Batch,
    /// The class of each text, (B), Int64.
    pub classes: Tensor,
}

impl OnDevice for LabeledBatch {
    fn pinned(self) -> overdrive_datasets::Result<Self> {
        let (tokens, classes) = (self.tokens.pinned()?, self.classes.pinned()?);
        Ok(Self { tokens, classes })
    }

    fn on_device(self, device: Device, non_blocking: bool) -> overdrive_datasets::Result<Self> {
        let tokens = self.tokens.on_device(device, non_blocking)?;
        let classes = self.classes.on_device(device, non_blocking)?;
        Ok(Self { tokens, classes })
    }
}

impl MicroBatch for LabeledBatch {
    fn examples(&self) -> usize {
        self.classes.numel()
    }

    fn tokens(&self) -> usize {
        self.tokens.tokens
    }

    fn padded_tokens(&self) -> usize {
        self.tokens.padded_tokens()
    }
}
