//! Sources with their targets, for an encoder-decoder model.

use std::path::Path;

use overdrive_datasets::{
    DataLoader, DataLoaderOptions, DeviceLoader, Error as DataError, FieldRecords, InMemory,
    Seq2SeqBatch, Seq2SeqExample, Seq2SeqPadding, Tokenizer, collate_seq2seq,
};
use overdrive_generation::{GenerationConfig, generate};
use overdrive_transformer::Seq2SeqLm;
use tch::Device;

use crate::Result;

/// A source and the target that a model learns to generate from it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Seq2SeqPair {
    /// The text that the encoder reads.
    pub source: String,
    /// The text that the decoder learns to generate.
    pub target: String,
}

impl Seq2SeqPair {
    /// Reads the pairs in the columns `source` and `target` of a file in one of the formats of [`FieldRecords`], by its
    /// extension.
    ///
    /// # Errors
    /// An error if the file cannot be read, or a row lacks one of them.
    pub fn read(path: &Path) -> Result<Vec<Self>> {
        let rows = FieldRecords::open([path])?;
        let pair = |index| {
            let row = rows.row(index)?;
            Ok(Self {
                source: row.required_text("source")?.into_owned(),
                target: row.required_text("target")?.into_owned(),
            })
        };
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
    let loader = DataLoader::with_collate(InMemory(examples.to_vec()), collate, options)?;
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
        let path = folder.path().join("pairs.csv");
        std::fs::write(&path, "source,goal\none,two\n").unwrap();
        let error = Seq2SeqPair::read(&path).unwrap_err().to_string();
        assert!(
            error.contains("pairs.csv, record 0 (byte 12): `target` is missing"),
            "{error}"
        );
    }
}
