//! The text that `data` names, in any supported file format.

use std::path::{Path, PathBuf};

use overdrive_datasets::{
    BpeOptions, BuildOptions, BuildReport, BuiltTokens, Corpus, CorpusOptions, Dataset,
    DeduplicateOptions, Deduplicated, MapCache, RecordFormat, Selection, Sha256Digest, TextFormat,
    TokenStore, Tokenizer, TrainedBpe, build_dataset_tokens, build_dataset_tokens_to, build_tokens,
    build_tokens_to, find_files, sample_texts, train_bpe_cached,
};

use overdrive_core::units::counted;

use super::text_records::{RecordKind, TextRecords};
use crate::arguments::{SampleBy, TrainingArguments};
use crate::error::invalid;
use crate::{Error, Result};

/// The number of bytes of Cargo's registry that are read if `data` is not set.
const DEFAULT_CORPUS_BYTES: u64 = 24 << 20;
/// The number of bytes of text on which a tokenizer is trained: a larger sample hardly improves the vocabulary.
const SAMPLE_BYTES: u64 = 16 << 20;

/// The documents of a training run.
#[derive(Debug)]
pub(crate) enum TextSource {
    /// Files that are one document each, possibly with JSON Lines among them.
    Files(Corpus),
    /// Records of files of one format.
    Records(TextRecords),
    /// Records without duplicates.
    Unique(Deduplicated<TextRecords>),
}

impl TextSource {
    /// Finds the files, determines their format by their extensions, and removes duplicates if
    /// `remove_duplicates` is set.
    pub(crate) fn open(arguments: &TrainingArguments) -> Result<Self> {
        if arguments.data.is_empty() {
            return Ok(Self::Files(Corpus::cargo_registry(DEFAULT_CORPUS_BYTES)?));
        }
        // One by one, so that each must have files.
        let files = arguments.data.iter().map(|path| find_files([path], &[]));
        let files = files
            .collect::<overdrive_datasets::Result<Vec<_>>>()?
            .concat();
        let files = without_descriptions(files, &arguments.data);
        let Some(kind) = kind_of(&files, arguments)? else {
            return Self::of_files(files, arguments);
        };
        let records = TextRecords::open(files, kind, &arguments.dataset_text_field)?;
        if !arguments.remove_duplicates {
            return Ok(Self::Records(records));
        }
        // Documents are equal if all bytes are equal; near duplicates are kept.
        let key = |text: &String| text.clone().into_bytes();
        let options = DeduplicateOptions::default();
        Ok(Self::Unique(Selection::deduplicate(
            records, key, &options,
        )?))
    }

    fn of_files(files: Vec<PathBuf>, arguments: &TrainingArguments) -> Result<Self> {
        let options = CorpusOptions {
            skip_duplicates: arguments.remove_duplicates,
            text_field: arguments.dataset_text_field.clone(),
            ..CorpusOptions::default()
        };
        // The names of documents are relative to a given folder, so folders are passed on unexpanded.
        let is_pattern = |path: &PathBuf| !path.exists();
        let corpus = match arguments.data.iter().any(is_pattern) {
            true => Corpus::from_paths(&files, &options)?,
            false => Corpus::from_paths(&arguments.data, &options)?,
        };
        let lines = |format| format == TextFormat::JsonLines;
        if arguments.remove_duplicates && corpus.files().iter().any(|file| lines(file.format)) {
            let expected = "false for text files together with JSON Lines, whose records are not compared; \
                            give the JSON Lines alone";
            return invalid("remove_duplicates", true, expected);
        }
        Ok(Self::Files(corpus))
    }

    /// Logs the files and records that were found.
    pub(crate) fn describe(
        &self,
        arguments: &TrainingArguments,
        say: &mut dyn FnMut(&str),
    ) -> Result<()> {
        let megabytes = |bytes: u64| bytes as f64 / 1e6;
        let records = match self {
            Self::Files(corpus) => {
                // The fingerprint distinguishes runs on different texts: Cargo's registry grows over time.
                say(&format!(
                    "corpus      {}, {:.1} MB, fingerprint {:.12}",
                    counted(corpus.files().len(), "file"),
                    megabytes(corpus.total_bytes()),
                    corpus.digest().to_string(),
                ));
                if arguments.data.is_empty() {
                    say("            Rust source that Cargo keeps on this machine");
                }
                let skipped = corpus.skipped();
                if arguments.remove_duplicates {
                    say(&format!(
                        "            {} equal to an earlier one removed",
                        counted(skipped.duplicates, "file")
                    ));
                }
                let others = match arguments.remove_duplicates {
                    true => skipped.total() - skipped.duplicates,
                    false => skipped.total(),
                };
                if others > 0 && !arguments.data.is_empty() {
                    say(&format!("            {} skipped", counted(others, "file")));
                }
                return Ok(());
            }
            Self::Records(records) => records,
            Self::Unique(unique) => unique.records.dataset(),
        };
        say(&format!(
            "corpus      {} of {}, {:.1} MB, fingerprint {:.12}",
            counted(records.len(), "record"),
            counted(records.files(), "file"),
            megabytes(records.total_bytes()),
            records.fingerprint()?.to_string(),
        ));
        if let Self::Unique(unique) = self {
            say(&format!(
                "            {} equal to an earlier one removed",
                counted(unique.duplicates, "record")
            ));
        }
        Ok(())
    }

    /// Returns a byte-level BPE, trained on documents of all sources or read from the cache.
    pub(crate) fn train_tokenizer(
        sources: &[&Self],
        arguments: &TrainingArguments,
        cache: &Path,
    ) -> Result<TrainedBpe> {
        let options = BpeOptions {
            vocab_size: usize::try_from(arguments.vocab_size).unwrap_or(usize::MAX),
            ..BpeOptions::default()
        };
        if sources
            .iter()
            .all(|source| source.records().is_some_and(Dataset::is_empty))
        {
            let expected = "files with at least one record that has text";
            return invalid("data", "without records", expected);
        }
        let bytes = SAMPLE_BYTES / sources.len() as u64;
        let mut key = format!("samples of {bytes} bytes");
        for source in sources {
            key += &format!(", {}", source.fingerprint(arguments)?);
        }
        let key = Sha256Digest::of(key.as_bytes());
        let texts = sources.iter().flat_map(|source| source.sample(bytes));
        Ok(train_bpe_cached(texts, key, &options, cache)?)
    }

    /// Returns the records; `None` for files that are one document each.
    fn records(&self) -> Option<&dyn Dataset<Item = String>> {
        match self {
            Self::Files(_) => None,
            Self::Records(records) => Some(records),
            Self::Unique(unique) => Some(&unique.records),
        }
    }

    fn sample(
        &self,
        bytes: u64,
    ) -> Box<dyn Iterator<Item = overdrive_datasets::Result<String>> + Send + '_> {
        match self {
            Self::Files(corpus) => Box::new(corpus.sample(bytes)),
            Self::Records(records) => Box::new(sample_texts(records, bytes)),
            Self::Unique(unique) => Box::new(sample_texts(&unique.records, bytes)),
        }
    }

    /// Returns a digest of all documents, in their order.
    fn fingerprint(&self, arguments: &TrainingArguments) -> Result<Sha256Digest> {
        let (records, name) = match self {
            Self::Files(corpus) => return Ok(corpus.digest()),
            Self::Records(records) => (records, "texts"),
            Self::Unique(unique) => (unique.records.dataset(), "different texts"),
        };
        // The column is part of the key: different columns of the same files give different tokens.
        let name = format!("{name} of {}", arguments.dataset_text_field);
        let cache = MapCache {
            input: records.fingerprint()?,
            name: &name,
            version: 1,
        };
        Ok(cache.fingerprint())
    }

    /// Returns the tokens of all documents, built now or read from the cache.
    pub(crate) fn build(
        &self,
        arguments: &TrainingArguments,
        tokenizer: &Tokenizer,
        cache: &Path,
    ) -> Result<BuiltTokens> {
        let options = BuildOptions::default();
        let key = self.fingerprint(arguments)?;
        Ok(match self {
            Self::Files(corpus) => build_tokens(corpus, tokenizer, &options, cache)?,
            Self::Records(records) => {
                build_dataset_tokens(records, key, tokenizer, &options, cache)?
            }
            Self::Unique(unique) => {
                build_dataset_tokens(&unique.records, key, tokenizer, &options, cache)?
            }
        })
    }

    /// Writes the tokens of all documents into a store at `path`.
    pub(crate) fn build_to(
        &self,
        path: &Path,
        tokenizer: &Tokenizer,
        options: &BuildOptions,
    ) -> Result<(TokenStore, BuildReport)> {
        Ok(match self {
            Self::Files(corpus) => build_tokens_to(path, corpus, tokenizer, options)?,
            Self::Records(records) => build_dataset_tokens_to(path, records, tokenizer, options)?,
            Self::Unique(unique) => {
                build_dataset_tokens_to(path, &unique.records, tokenizer, options)?
            }
        })
    }

    /// Returns the lengths of the documents in `length_column_name`, if `group_by_length` needs them and the
    /// column exists.
    pub(crate) fn column_lengths(&self, arguments: &TrainingArguments) -> Result<Option<Vec<u32>>> {
        use crate::arguments::DEFAULT_LENGTH_COLUMN;
        let column = &arguments.length_column_name;
        let is_default = column == DEFAULT_LENGTH_COLUMN;
        if !arguments.group_by_length {
            return Ok(None);
        }
        match self {
            Self::Records(records) if !is_default || records.has_column(column)? => {
                let flag = "--length-column-name";
                records.expect_column(column, "length_column_name", flag)?;
                Ok(Some(records.numbers(column)?))
            }
            _ if is_default => Ok(None),
            Self::Unique(_) => Err(unusable(
                column,
                "with `remove_duplicates`, which drops records",
            )),
            _ => Err(unusable(column, "for text files, which have no columns")),
        }
    }
}

fn unusable(column: &str, reason: &str) -> Error {
    let expected = format!("left out {reason}; drop it, the tokens are counted instead");
    overdrive_core::Error::option("length_column_name", column, expected).into()
}

/// The names of files that accompany the records of a dataset: in a repository on the hub, and in a folder that
/// `save_to_disk` of `datasets` writes.
const DESCRIPTIONS: [&str; 8] = [
    "readme.md",
    "readme.txt",
    "license",
    "license.md",
    "license.txt",
    "dataset_info.json",
    "dataset_infos.json",
    "state.json",
];

/// Leaves out the files that describe a dataset, if all other files hold records in the same format.
fn without_descriptions(files: Vec<PathBuf>, named: &[PathBuf]) -> Vec<PathBuf> {
    let describes = |file: &PathBuf| {
        let name = file.file_name().unwrap_or_default().to_string_lossy();
        !named.contains(file) && DESCRIPTIONS.contains(&name.to_ascii_lowercase().as_str())
    };
    let data = || files.iter().filter(|file| !describes(file));
    let mut kinds = data().map(|file| RecordKind::of(file));
    let first = kinds.next().flatten();
    match first.is_some() && kinds.all(|kind| kind == first) {
        true => data().cloned().collect(),
        false => files,
    }
}

/// Returns the common format of the files; `None` for text files, each of which is a document.
fn kind_of(files: &[PathBuf], arguments: &TrainingArguments) -> Result<Option<RecordKind>> {
    let mut kinds: Vec<Option<RecordKind>> = Vec::new();
    for file in files {
        let kind = RecordKind::of(file);
        if !kinds.contains(&kind) {
            kinds.push(kind);
        }
    }
    match kinds.as_slice() {
        [None] if arguments.sample_by == SampleBy::Line => Ok(Some(RecordKind::Lines)),
        [kind] => Ok(*kind),
        _ => {
            // A folder of text may contain other files, but an explicitly named file must be read in its own format.
            let named = |file: &&PathBuf| arguments.data.contains(file);
            let table = files.iter().filter(named).find_map(|file| {
                let kind = RecordKind::of(file)?;
                (kind != RecordKind::Format(RecordFormat::Json)).then_some((file, kind))
            });
            match table {
                Some((file, kind)) => Err(Error::MixedData {
                    path: file.clone(),
                    kind: kind.name(),
                }),
                None => Ok(None),
            }
        }
    }
}

/// Tokenizes the text that `arguments` name into a token store at `path`, and passes log lines about the text to `say`.
/// The keys `data`, `dataset_text_field`, `sample_by` and `remove_duplicates` count, as in a training run on the text; a
/// run on the store has the same tokens.
///
/// # Errors
/// An error if there is no text, if it cannot be read, if the tokenizer does not have the tokens that `options` name, or
/// if the store cannot be written.
pub fn tokenize(
    arguments: &TrainingArguments,
    tokenizer: &Tokenizer,
    options: &BuildOptions,
    path: &Path,
    mut say: impl FnMut(&str),
) -> Result<(TokenStore, BuildReport)> {
    let source = TextSource::open(arguments)?;
    source.describe(arguments, &mut say)?;
    source.build_to(path, tokenizer, options)
}
