//! Sources with their targets, for an encoder-decoder model.

use std::path::Path;

use overdrive_datasets::{
    CsvOptions, CsvRecords, DataLoader, DataLoaderOptions, Dataset, DeviceLoader,
    Error as DataError, InMemory, JsonOptions, JsonRecords, RecordFormat, Seq2SeqBatch,
    Seq2SeqExample, Seq2SeqPadding, Tokenizer, collate_seq2seq,
};
use overdrive_generation::{GenerationConfig, generate};
use overdrive_transformer::Seq2SeqLm;
use serde::Deserialize;
use tch::Device;

use crate::Result;
use crate::error::invalid;

/// A source and the target that a model learns to generate from it.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct Seq2SeqPair {
    /// The text that the encoder reads.
    pub source: String,
    /// The text that the decoder learns to generate.
    pub target: String,
}

impl Seq2SeqPair {
    /// Reads the pairs of a CSV file with the columns `source` and `target`, or of JSON Lines with these keys, by the
    /// extension ([`RecordFormat`]).
    ///
    /// # Errors
    /// An error if the file cannot be read, or lacks one of them.
    pub fn read(path: &Path) -> Result<Vec<Self>> {
        let format = RecordFormat::of(path);
        if format == Some(RecordFormat::Table) {
            let expected =
                "a CSV file or JSON Lines; convert Parquet and Arrow to JSON Lines first";
            return invalid("data", path.display(), expected);
        }
        if format == Some(RecordFormat::Csv) {
            let rows = CsvRecords::open([path], &CsvOptions::default())?;
            let pair = |number| -> Result<Self> {
                let row = rows.get(number)?;
                let field = |name: &str| row.get(name).map(str::to_owned);
                match (field("source"), field("target")) {
                    (Some(source), Some(target)) => Ok(Self { source, target }),
                    _ => invalid(
                        "data",
                        path.display(),
                        "a file with the columns `source` and `target`",
                    ),
                }
            };
            return (0..rows.len()).map(pair).collect();
        }
        let rows = JsonRecords::<Self>::open([path], &JsonOptions::default())?;
        let pair = |number| Ok(rows.get(number)?);
        (0..rows.len()).map(pair).collect()
    }

    /// Tokenizes both texts, with the special tokens that the tokenizer adds.
    ///
    /// # Errors
    /// An error of the tokenizer.
    pub fn encode(&self, tokenizer: &Tokenizer) -> Result<Seq2SeqExample> {
        let encode = |text: &str| -> Result<Vec<i64>> {
            let ids = tokenizer.encode(text, true);
            let ids = ids.map_err(|source| DataError::Tokenizer {
                action: format!("encode {text:?}"),
                source,
            })?;
            Ok(ids.get_ids().iter().map(|&id| id.into()).collect())
        };
        Ok(Seq2SeqExample {
            input_ids: encode(&self.source)?,
            labels: encode(&self.target)?,
        })
    }
}

/// Returns a loader of padded batches on `device`.
///
/// # Errors
/// An error of an option of the loader.
pub fn load_seq2seq(
    examples: &[Seq2SeqExample],
    pad_token: i64,
    options: DataLoaderOptions,
    device: Device,
) -> Result<DeviceLoader<Seq2SeqBatch>> {
    let padding = Seq2SeqPadding {
        pad_token,
        ..Seq2SeqPadding::default()
    };
    let collate = move |rows: Vec<Seq2SeqExample>| collate_seq2seq(&rows, padding);
    let batches = options.batches(examples.len())?;
    let loader = DataLoader::with(InMemory(examples.to_vec()), batches, collate, options)?;
    Ok(DeviceLoader::new(loader, device))
}

/// Returns the number of targets that the model generates exactly with greedy decoding.
///
/// # Errors
/// An error of the generation.
pub fn exact_matches(model: &Seq2SeqLm, examples: &[Seq2SeqExample]) -> Result<usize> {
    let longest = examples.iter().map(|example| example.labels.len()).max();
    let config = GenerationConfig {
        max_new_tokens: longest,
        eos_token_id: model.config().eos_token_ids().to_vec(),
        pad_token_id: model.config().pad_token_id(),
        ..GenerationConfig::default()
    };
    let mut exact = 0;
    for batch in examples.chunks(64) {
        let sources = batch.iter().map(|example| example.input_ids.clone());
        let sources: Vec<_> = sources.collect();
        let output = generate(model, &sources, &config)?;
        let same = |row: &usize| output.new_tokens(*row) == batch[*row].labels;
        exact += (0..batch.len()).filter(same).count();
    }
    Ok(exact)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pairs_are_read_in_the_format_that_the_name_tells() {
        let folder = tempfile::tempdir().unwrap();
        for (name, text) in [
            ("pairs.csv", "source,target\none,two\n"),
            ("pairs.CSV", "source,target\none,two\n"),
            ("pairs.tsv", "source\ttarget\none\ttwo\n"),
            (
                "pairs.jsonl",
                "{\"source\": \"one\", \"target\": \"two\"}\n",
            ),
            ("pairs", "{\"source\": \"one\", \"target\": \"two\"}\n"),
        ] {
            let path = folder.path().join(name);
            std::fs::write(&path, text).unwrap();
            let pairs = Seq2SeqPair::read(&path).unwrap();
            assert_eq!(pairs.len(), 1, "{name}");
            let pair = &pairs[0];
            assert_eq!((pair.source.as_str(), pair.target.as_str()), ("one", "two"));
        }
        let error = Seq2SeqPair::read(&folder.path().join("pairs.parquet")).unwrap_err();
        assert!(error.to_string().contains("convert Parquet"), "{error}");
    }
}
