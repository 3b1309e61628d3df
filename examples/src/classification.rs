//! The model and the data of the example `classify`.

use std::path::Path;

use anyhow::Result;
use overdrive::datasets::{
    LabeledTexts, RowLayout, TokenizedExample, Tokenizer, collate, copy_tokenizer,
    encode_sequences, load_tokenizer, save_word_piece, train_word_piece,
};
use overdrive::lora::{
    AddOptions, LoraConfig, MergeOptions, TargetModules, add_adapter, merge_and_unload,
};
use overdrive::transformer::{
    EncoderConfig, EncoderFamily, EncoderInput, InitOptions, LoadOptions, SaveOptions,
    SequenceClassifier,
};
use tch::{Device, Kind, Tensor};

/// A sequence classifier, its tokenizer and its texts.
#[derive(Debug)]
pub struct Classification {
    /// The model.
    pub model: SequenceClassifier,
    tokenizer: Tokenizer,
    data: LabeledTexts,
    rows: Vec<TokenizedExample>,
}

impl Classification {
    /// Loads the model in `folder` with the classes of `data`; `None` makes a small BERT of random weights and trains
    /// a tokenizer on the texts `train`. Texts are cut to `max_length` tokens and to the model's context.
    pub fn load(
        folder: Option<&Path>,
        data: LabeledTexts,
        train: &[usize],
        max_length: usize,
        seed: u64,
    ) -> Result<Self> {
        let device = Device::cuda_if_available();
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
                config.vocab_size = i64::try_from(tokenizer.get_vocab_size(true))?;
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
        let context = usize::try_from(model.config().context())?;
        let rows = encode_sequences(&tokenizer, &data.texts, max_length.min(context))?;
        Ok(Self {
            model,
            tokenizer,
            data,
            rows,
        })
    }

    /// Makes all weights trainable, or, with a rank, adapters of it and the output layer.
    pub fn make_trainable(&mut self, lora_rank: Option<u32>) -> Result<()> {
        let Some(rank) = lora_rank else {
            return Ok(self.model.set_requires_grad(true)?);
        };
        let config = LoraConfig {
            r: rank.into(),
            target_modules: Some(TargetModules::AllLinear),
            // As PEFT names it. RoBERTa's has two layers, and a pretrained folder holds neither.
            modules_to_save: Some(vec!["classifier".to_owned()]),
            ..LoraConfig::default()
        };
        add_adapter(&mut self.model, "default", &config, &AddOptions::default())?;
        Ok(())
    }

    /// Returns the logits `(B, classes)` of the texts `batch`, and their classes `(B,)`.
    pub fn forward(&self, batch: &[usize]) -> Result<(Tensor, Tensor)> {
        let (device, config) = (self.model.device(), self.model.config());
        let layout = RowLayout::Padded {
            pad_token: u32::try_from(config.pad_token_id.unwrap_or(0))?,
            multiple_of: 1,
        };
        let one = |&index: &usize| std::slice::from_ref(&self.rows[index]);
        let tokens = collate(&batch.iter().map(one).collect::<Vec<_>>(), layout)?;
        tokens.check_ids(config.vocab_size)?;
        let ids = tokens.input_ids.f_to_device(device)?;
        let mut input = EncoderInput::new(&ids);
        input.attention_mask = tokens.attention_mask.as_ref();
        let classes: Vec<i64> = batch
            .iter()
            .map(|&index| self.data.classes[index])
            .collect();
        let classes = Tensor::f_from_slice(&classes)?.f_to_device(device)?;
        Ok((self.model.forward(input)?, classes))
    }

    /// Returns the share of the texts `test` whose class has the largest logit, in batches of `size`.
    pub fn accuracy(&self, test: &[usize], size: usize) -> Result<f64> {
        let _no_grad = tch::no_grad_guard();
        let mut right = 0;
        for batch in test.chunks(size) {
            let (logits, classes) = self.forward(batch)?;
            let named = logits.f_argmax(-1, false)?.f_eq_tensor(&classes)?;
            right += named.f_sum(Kind::Int64)?.f_int64_value(&[])?;
        }
        Ok(right as f64 / test.len() as f64)
    }

    /// Merges adapters, and writes a folder that transformers loads, with the tokenizer of `folder` or its own.
    pub fn save(&mut self, out: &Path, folder: Option<&Path>, merges: bool) -> Result<()> {
        if merges {
            merge_and_unload(&mut self.model, &MergeOptions::default())?;
        }
        self.model.save_pretrained(out, &SaveOptions::default())?;
        match folder {
            Some(folder) => drop(copy_tokenizer(folder, out)?),
            None => {
                let context = usize::try_from(self.model.config().context())?;
                save_word_piece(out, &self.tokenizer, context)?;
            }
        }
        Ok(())
    }
}
