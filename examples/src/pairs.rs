//! Source and target pairs: read from files, or words to reverse with a tokenizer of letters.

use std::path::Path;

use anyhow::{Context, Result, anyhow};
use overdrive::core::random::Generator;
use overdrive::datasets::{
    CsvOptions, CsvRecords, DataLoader, DataLoaderOptions, Dataset, InMemory, JsonOptions,
    JsonRecords, Seq2SeqBatch, Seq2SeqExample, Seq2SeqPadding, collate_seq2seq, load_tokenizer,
};
use overdrive::generation::{GenerationConfig, Tokenizer, generate};
use overdrive::transformer::{InitOptions, LoadOptions, Seq2SeqConfig, Seq2SeqLm, T5Config};
use serde::Deserialize;
use serde_json::{Map, json};
use tch::Device;

/// A source and the target that a model learns to generate from it.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct Pair {
    /// The text that the encoder reads.
    pub source: String,
    /// The text that the decoder learns to generate.
    pub target: String,
}

impl Pair {
    /// Tokenizes both texts, with the special tokens that the tokenizer adds.
    pub fn encode(&self, tokenizer: &Tokenizer) -> Result<Seq2SeqExample> {
        let encode = |text: &str| -> Result<Vec<i64>> {
            let ids = tokenizer
                .encode(text, true)
                .map_err(|error| anyhow!(error))?;
            Ok(ids.get_ids().iter().map(|&id| id.into()).collect())
        };
        Ok(Seq2SeqExample {
            input_ids: encode(&self.source)?,
            labels: encode(&self.target)?,
        })
    }
}

/// Reads pairs from a CSV file, or from JSON Lines.
pub fn read_pairs(path: &Path) -> Result<Vec<Pair>> {
    if path.extension().is_some_and(|extension| extension == "csv") {
        let rows = CsvRecords::open([path], &CsvOptions::default())?;
        let pair = |number| -> Result<Pair> {
            let row = rows.get(number)?;
            let field = |name: &str| row.get(name).map(str::to_owned);
            let pair = field("source").zip(field("target"));
            let (source, target) =
                pair.context("the file must have the columns `source` and `target`")?;
            Ok(Pair { source, target })
        };
        return (0..rows.len()).map(pair).collect();
    }
    let rows = JsonRecords::<Pair>::open([path], &JsonOptions::default())?;
    (0..rows.len())
        .map(|number| Ok(rows.get(number)?))
        .collect()
}

/// Returns a loader of padded batches, in a new order in each epoch.
pub fn load_pairs(
    examples: &[Seq2SeqExample],
    pad_token: i64,
    options: DataLoaderOptions,
) -> Result<DataLoader<Seq2SeqBatch>> {
    let padding = Seq2SeqPadding {
        pad_token,
        ..Seq2SeqPadding::default()
    };
    let collate = move |rows: Vec<Seq2SeqExample>| collate_seq2seq(&rows, padding);
    let batches = options.batches(examples.len())?;
    Ok(DataLoader::with(
        InMemory(examples.to_vec()),
        batches,
        collate,
        options,
    )?)
}

/// Makes words of two to five of the first eight letters, each with the same word reversed.
pub fn words_to_reverse(seed: u64, count: usize) -> Vec<Pair> {
    let mut random = Generator::named(seed, "words");
    let mut below = |bound: u8| (random.uniform() * f64::from(bound)) as u8;
    let mut word = || -> String {
        let length = 2 + below(4);
        (0..length).map(|_| char::from(b'a' + below(8))).collect()
    };
    let pair = |source: String| Pair {
        target: source.chars().rev().collect(),
        source,
    };
    (0..count).map(|_| pair(word())).collect()
}

/// The end-of-sequence token of the tokenizer of letters.
pub const END: &str = "</s>";

/// Returns a tokenizer of 29 tokens: padding, the end of sequence, an unknown letter, and the letters a to z.
fn letters() -> Result<Tokenizer> {
    let special = ["<pad>", END, "<unk>"];
    let letters = (b'a'..=b'z').map(|letter| char::from(letter).to_string());
    let tokens = special.iter().map(ToString::to_string).chain(letters);
    let vocab: Map<_, _> = tokens
        .zip(0..)
        .map(|(token, id)| (token, json!(id)))
        .collect();
    let added = |(id, token): (usize, &&str)| {
        json!({
            "id": id, "content": token, "single_word": false, "lstrip": false, "rstrip": false,
            "normalized": false, "special": true,
        })
    };
    let added: Vec<_> = special.iter().enumerate().map(added).collect();
    let text = json!({"Sequence": {"id": "A", "type_id": 0}});
    let end = json!({"SpecialToken": {"id": END, "type_id": 0}});
    Ok(serde_json::from_value(json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": added, "normalizer": null,
        "pre_tokenizer": {"type": "Split", "pattern": {"Regex": "."}, "behavior": "Isolated", "invert": false},
        "post_processor": {
            "type": "TemplateProcessing", "single": [text, end], "pair": [text, end],
            "special_tokens": {END: {"id": END, "ids": [1], "tokens": [END]}},
        },
        "decoder": {"type": "Fuse"},
        "model": {"type": "WordLevel", "vocab": vocab, "unk_token": "<unk>"},
    }))?)
}

/// Returns the configuration of a T5 of 0.2 million parameters for [`letters`].
fn small_config() -> Seq2SeqConfig {
    T5Config {
        vocab_size: 30,
        d_model: 64,
        d_kv: 16,
        d_ff: 128,
        num_layers: 2,
        num_heads: 4,
        relative_attention_num_buckets: 16,
        relative_attention_max_distance: 20,
        dropout_rate: 0.0,
        decoder_start_token_id: Some(0),
        ..T5Config::default()
    }
    .into()
}

/// Loads the model in `folder` with its tokenizer; without one, returns a small T5 of random weights
/// for a tokenizer of letters.
pub fn load_model(
    folder: Option<&Path>,
    seed: u64,
    device: Device,
) -> Result<(Seq2SeqLm, Tokenizer)> {
    let Some(folder) = folder else {
        let options = InitOptions {
            device,
            seed,
            ..InitOptions::default()
        };
        return Ok((Seq2SeqLm::new(&small_config(), &options)?, letters()?));
    };
    let options = LoadOptions {
        device,
        ..LoadOptions::default()
    };
    let model = Seq2SeqLm::from_pretrained(folder, &options)?;
    Ok((model, load_tokenizer(folder)?))
}

/// Returns the number of targets that the model generates exactly with greedy decoding.
pub fn exact_matches(model: &Seq2SeqLm, examples: &[Seq2SeqExample]) -> Result<usize> {
    let longest = examples
        .iter()
        .map(|example| example.labels.len())
        .max()
        .unwrap_or(0);
    let config = GenerationConfig {
        max_new_tokens: Some(longest),
        eos_token_id: model.config().eos_token_ids().to_vec(),
        pad_token_id: model.config().pad_token_id(),
        ..GenerationConfig::default()
    };
    let mut exact = 0;
    for batch in examples.chunks(64) {
        let sources: Vec<_> = batch
            .iter()
            .map(|example| example.input_ids.clone())
            .collect();
        let output = generate(model, &sources, &config)?;
        exact += (0..batch.len())
            .filter(|&row| output.new_tokens(row) == batch[row].labels)
            .count();
    }
    Ok(exact)
}
