//! The text that `data` names, whatever its files are.

use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

use overdrive_datasets::{
    BpeOptions, BuildOptions, BuiltTokens, Corpus, CorpusOptions, Dataset, DeduplicateOptions,
    Deduplicated, MapCache, Selection, TextFormat, Tokenizer, TrainedBpe, build_dataset_tokens,
    build_tokens, find_files, train_bpe_cached,
};

use crate::text_records::{RecordKind, TextRecords};
use crate::{Error, Result, SampleBy, TrainingArguments};

/// How much of Cargo's registry is read where no data is named.
const DEFAULT_CORPUS_BYTES: u64 = 24 << 20;
/// How much of records a tokenizer is trained on.
const SAMPLE_BYTES: usize = 15 << 20;
/// From how many places of the records that is taken.
const SAMPLE_RUNS: usize = 64;

/// The documents of a run.
#[derive(Debug)]
pub(crate) enum TextSource {
    /// Files, each a document, and JSON Lines among them.
    Files(Corpus),
    /// Records of files of one kind.
    Records(TextRecords),
    /// The same, each text once.
    Unique(Deduplicated<TextRecords>),
}

impl TextSource {
    /// Finds the files, tells their kind by their names, and leaves duplicates out where that is asked
    /// for.
    pub(crate) fn open(arguments: &TrainingArguments) -> Result<Self> {
        if arguments.data.is_empty() {
            return Ok(Self::Files(Corpus::cargo_registry(DEFAULT_CORPUS_BYTES)?));
        }
        let files = files_of(&arguments.data)?;
        let Some(kind) = kind_of(&files, arguments)? else {
            return Self::of_files(files, arguments);
        };
        let records = TextRecords::open(files, kind, &arguments.dataset_text_field)?;
        if !arguments.remove_duplicates {
            return Ok(Self::Records(records));
        }
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
        // Names are relative to the folder that is given, so a folder is handed on as one.
        let is_pattern = |path: &PathBuf| !path.exists();
        let corpus = match arguments.data.iter().any(is_pattern) {
            true => Corpus::from_paths(&files, &options)?,
            false => Corpus::from_paths(&arguments.data, &options)?,
        };
        let lines = |format| format == TextFormat::JsonLines;
        if arguments.remove_duplicates && corpus.files().iter().any(|file| lines(file.format)) {
            return Err(Error::Invalid {
                key: "remove_duplicates",
                given: "true".to_owned(),
                problem:
                    "`data` holds text files beside JSON Lines, whose records are not compared \
                          then"
                        .to_owned(),
                way_out: "give the JSON Lines alone".to_owned(),
            });
        }
        Ok(Self::Files(corpus))
    }

    /// Lines about what was found.
    pub(crate) fn describe(&self, arguments: &TrainingArguments, say: &mut dyn FnMut(&str)) {
        let megabytes = |bytes: u64| bytes as f64 / 1e6;
        let records = match self {
            Self::Files(corpus) => {
                // The fingerprint tells two runs apart whose text was not the same: Cargo's registry
                // grows.
                say(&format!(
                    "corpus      {} files, {:.1} MB, fingerprint {:.12}",
                    corpus.files().len(),
                    megabytes(corpus.total_bytes()),
                    corpus.digest().to_string(),
                ));
                if arguments.data.is_empty() {
                    say("            Rust source that Cargo keeps on this machine");
                }
                let skipped = corpus.skipped();
                if arguments.remove_duplicates {
                    say(&format!(
                        "            {} files equal to an earlier one left out",
                        skipped.duplicates
                    ));
                }
                let others = match arguments.remove_duplicates {
                    true => skipped.total() - skipped.duplicates,
                    false => skipped.total(),
                };
                if others > 0 && !arguments.data.is_empty() {
                    say(&format!("            {others} files left out"));
                }
                return;
            }
            Self::Records(records) => records,
            Self::Unique(unique) => unique.records.dataset(),
        };
        say(&format!(
            "corpus      {} records of {} files, {:.1} MB, fingerprint {:.12}",
            records.len(),
            records.files(),
            megabytes(records.total_bytes()),
            records.fingerprint().to_string(),
        ));
        if let Self::Unique(unique) = self {
            say(&format!(
                "            {} records equal to an earlier one left out",
                unique.duplicates
            ));
        }
    }

    /// A byte-level BPE of this many tokens, trained on the documents or out of the cache.
    pub(crate) fn train_tokenizer(&self, vocab_size: usize, cache: &Path) -> Result<TrainedBpe> {
        let options = BpeOptions {
            vocab_size,
            ..BpeOptions::default()
        };
        let texts: &dyn Dataset<Item = String> = match self {
            Self::Files(corpus) => return Ok(train_bpe_cached(corpus, &options, cache)?),
            Self::Records(records) => records,
            Self::Unique(unique) => &unique.records,
        };
        // Tokenizers are trained on files.
        let folder =
            tempfile::tempdir().map_err(Error::io("create a folder in", std::env::temp_dir()))?;
        let sample = folder.path().join("sample.jsonl");
        write_sample(texts, &sample)?;
        let corpus = Corpus::from_paths([&sample], &CorpusOptions::default())?;
        Ok(train_bpe_cached(&corpus, &options, cache)?)
    }

    /// The tokens of all documents, made now or out of the cache.
    pub(crate) fn build(
        &self,
        arguments: &TrainingArguments,
        tokenizer: &Tokenizer,
        cache: &Path,
    ) -> Result<BuiltTokens> {
        let options = BuildOptions::default();
        let key = |records: &TextRecords, name| {
            let name = format!("{name} of {}", arguments.dataset_text_field);
            MapCache {
                input: records.fingerprint(),
                name: &name,
                version: 1,
            }
            .fingerprint()
        };
        Ok(match self {
            Self::Files(corpus) => build_tokens(corpus, tokenizer, &options, cache)?,
            Self::Records(records) => {
                let key = key(records, "texts");
                build_dataset_tokens(records, key, tokenizer, &options, cache)?
            }
            Self::Unique(unique) => {
                let key = key(unique.records.dataset(), "different texts");
                build_dataset_tokens(&unique.records, key, tokenizer, &options, cache)?
            }
        })
    }

    /// The lengths that `length_column_name` has for the documents, where it is asked for and there.
    pub(crate) fn column_lengths(&self, arguments: &TrainingArguments) -> Result<Option<Vec<u32>>> {
        use crate::training_arguments::DEFAULT_LENGTH_COLUMN;
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
            Self::Unique(_) => Err(unusable(column, "`remove_duplicates` has left records out")),
            _ => Err(unusable(column, "files of text have no columns")),
        }
    }
}

fn unusable(column: &str, problem: &str) -> Error {
    Error::Invalid {
        key: "length_column_name",
        given: format!("`{column}`"),
        problem: problem.to_owned(),
        way_out: "drop it: the tokens themselves are counted".to_owned(),
    }
}

/// The files that are named, and those in the folders among them, without hidden ones and links.
fn files_of(data: &[PathBuf]) -> Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    for path in data {
        match path.is_dir() {
            true => add_folder(path, &mut files)?,
            false => files.extend(find_files([path], &[])?),
        }
    }
    Ok(files)
}

fn add_folder(folder: &Path, files: &mut Vec<PathBuf>) -> Result<()> {
    let entries = std::fs::read_dir(folder).and_then(Iterator::collect::<std::io::Result<Vec<_>>>);
    let mut entries = entries.map_err(Error::io("read the folder", folder))?;
    entries.sort_by_key(std::fs::DirEntry::file_name);
    for entry in entries {
        let path = entry.path();
        let kind = entry.file_type().map_err(Error::io("read", &path))?;
        if entry.file_name().as_encoded_bytes().starts_with(b".") {
            continue;
        }
        if kind.is_dir() {
            add_folder(&path, files)?;
        } else if kind.is_file() {
            files.push(path);
        }
    }
    Ok(())
}

/// What the files are together; `None` for text of which each file is a document.
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
            // In a folder of text there may be anything; what is named must be read as it is.
            let named = |file: &&PathBuf| arguments.data.contains(file);
            let table = files.iter().filter(named).find_map(|file| {
                let kind = RecordKind::of(file)?;
                (kind != RecordKind::Json).then_some((file, kind))
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

/// JSON Lines of some of the texts, from places that lie evenly over all of them.
fn write_sample(texts: &dyn Dataset<Item = String>, path: &Path) -> Result<()> {
    let failed = || Error::io("write", path);
    let file = std::fs::File::create(path).map_err(failed())?;
    let mut file = BufWriter::new(file);
    let len = texts.len();
    for run in 0..SAMPLE_RUNS {
        let mut left = SAMPLE_BYTES / SAMPLE_RUNS;
        for index in len * run / SAMPLE_RUNS..len * (run + 1) / SAMPLE_RUNS {
            if left == 0 {
                break;
            }
            let text = texts.get(index)?;
            left = left.saturating_sub(text.len());
            let record = serde_json::json!({ "text": text });
            writeln!(file, "{record}").map_err(failed())?;
        }
    }
    file.flush().map_err(failed())
}
