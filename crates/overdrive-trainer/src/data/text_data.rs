//! The data of a training run: text, tokenizer, token store, split.

use std::path::{Path, PathBuf};

use overdrive_core::Error as CommonError;
use overdrive_datasets::{
    Batch, Dataset, DeviceLoader, LastWindow, RowLayout, SequentialWindows, SplitBy, SplitOptions,
    TokenView, Tokenizer, cache_dir, load_tokenizer, save_tokenizer,
};
use tch::Device;

use super::document_rows::DocumentRows;
use super::loading::Loading;
use super::mixture::{MixedText, TextMixture};
use super::shard::DataShard;
use super::text_source::TextSource;
use super::token_files::TokenFiles;
use crate::Result;
use crate::arguments::{BITS_PER_BYTE, SequenceMode, TrainingArguments};
use crate::error::invalid;

/// The number of tokens of a prompt of the samples.
const PROMPT_TOKENS: usize = 24;

/// The text of a run: tokenized, cached, and split by document.
///
/// `data` may also name files of tokens: a store of Overdrive, or `.bin` files of nanoGPT and llm.c.
///
/// Without `data` it is the Rust source code that Cargo keeps on this machine. Without `tokenizer` a run that
/// resumes uses that of its snapshot, and for a new run a byte-level BPE of `vocab_size` tokens is trained on the
/// text. Both are cached (`tokens` of `overdrive_datasets::cache_dir`), so the next run on the same text reuses them.
///
/// With weights in `data` (`a.jsonl:0.7`, `b.parquet:0.3`) each path is a source of a mixture, which is tokenized,
/// cached and split by itself. Each source has the share of its weight in the training data, and epochs of its own; the
/// validation data holds the documents that each source holds out.
#[derive(Debug)]
pub struct TextData {
    /// The tokenizer; `None` for files of tokens without one.
    pub tokenizer: Option<Tokenizer>,
    /// The documents to train on.
    pub train: TokenView,
    /// The documents that are held out for validation.
    pub validation: TokenView,
    vocab_size: u64,
    /// The beginnings of validation documents that the samples continue. They are read together with the data,
    /// because the files may change before the run ends.
    prompts: Vec<Vec<u32>>,
    /// The rows of documents, if a sequence is a document and there is no mixture.
    rows: Option<DocumentRows>,
    /// The sources, if `data` has weights.
    pub(crate) mixture: Option<TextMixture>,
}

/// What `data`, or one source of a mixture, names.
enum Input {
    Text(Box<TextSource>),
    Tokens(TokenFiles),
}

/// Text as tokens.
struct OpenedText {
    train: TokenView,
    validation: TokenView,
    /// The size of the vocabulary of a file of tokens.
    vocab_size: Option<u64>,
    /// The lengths of the documents in a column.
    lengths: Option<Vec<u32>>,
    was_cached: bool,
}

impl Input {
    fn find(arguments: &TrainingArguments, say: &mut dyn FnMut(&str)) -> Result<Self> {
        if let Some(files) = TokenFiles::of(&arguments.data)? {
            files.check(arguments)?;
            return Ok(Self::Tokens(files));
        }
        let source = TextSource::open(arguments)?;
        source.describe(arguments, say)?;
        Ok(Self::Text(Box::new(source)))
    }

    fn open(
        &self,
        arguments: &TrainingArguments,
        tokenizer: Option<&Tokenizer>,
        cache: &Path,
        say: &mut dyn FnMut(&str),
    ) -> Result<OpenedText> {
        match (self, tokenizer) {
            (Self::Text(source), Some(tokenizer)) => {
                let built = source.build(arguments, tokenizer, cache)?;
                let was_cached = built.was_cached();
                let (train, validation) = split(&TokenView::new(built.store), arguments)?;
                Ok(OpenedText {
                    train,
                    validation,
                    vocab_size: None,
                    lengths: source.column_lengths(arguments)?,
                    was_cached,
                })
            }
            (Self::Text(_), None) => {
                Err(CommonError::internal("there is text without a tokenizer").into())
            }
            (Self::Tokens(files), tokenizer) => {
                let opened = files.open(tokenizer, arguments)?;
                opened.describe(say);
                let train = TokenView::new(opened.train);
                let (train, validation) = match opened.validation {
                    Some(validation) => (train, TokenView::new(validation)),
                    None => split(&train, arguments)?,
                };
                Ok(OpenedText {
                    train,
                    validation,
                    vocab_size: Some(opened.vocab_size),
                    lengths: None,
                    was_cached: false,
                })
            }
        }
    }
}

/// Returns the tokenizer of the run: that of `arguments`, of the snapshot from which the run resumes, or of the folder
/// of a file of tokens; else one that is trained on the text. Only files of tokens can do without.
fn tokenizer(
    inputs: &[Input],
    arguments: &TrainingArguments,
    cache: &Path,
    say: &mut dyn FnMut(&str),
) -> Result<Option<Tokenizer>> {
    let mut texts = Vec::new();
    let mut files = Vec::new();
    for input in inputs {
        match input {
            Input::Text(text) => texts.push(text.as_ref()),
            Input::Tokens(tokens) => files.push(tokens),
        }
    }
    if let Some(path) = &arguments.tokenizer {
        return Ok(Some(load_tokenizer(path)?));
    }
    if let Some((snapshot, tokenizer)) = tokenizer_of_snapshot(arguments)? {
        if !texts.is_empty() {
            let tokens = tokenizer.get_vocab_size(true);
            let snapshot = snapshot.display();
            say(&format!("tokenizer   that of {snapshot}, {tokens} tokens"));
        }
        return Ok(Some(tokenizer));
    }
    for files in &files {
        if let Some(tokenizer) = files.tokenizer()? {
            return Ok(Some(tokenizer));
        }
    }
    if texts.is_empty() {
        return Ok(None);
    }
    if !files.is_empty() {
        let expected = "the tokenizer.json that made the files of tokens, since there is text beside them; give it with \
                        `--tokenizer FILE`";
        return invalid("tokenizer", "not set", expected);
    }
    let bpe = TextSource::train_tokenizer(&texts, arguments, cache)?;
    say(&format!(
        "tokenizer   byte-level BPE, {} tokens{}",
        bpe.vocab_size,
        if bpe.was_cached { " (cached)" } else { "" },
    ));
    Ok(Some(bpe.tokenizer))
}

impl TextData {
    /// Reads, tokenizes and splits the text that `arguments` name, and passes log lines about it to `say`.
    ///
    /// # Errors
    /// [`crate::Error::Data`] if there is no text, if it cannot be read, or if a split is shorter than one
    /// window of `context_length`.
    pub fn prepare(arguments: &TrainingArguments, say: impl FnMut(&str)) -> Result<Self> {
        Self::prepare_in(&cache_dir("tokens")?, arguments, say)
    }

    /// As [`prepare`](Self::prepare), with a cache folder of the caller's choice.
    ///
    /// # Errors
    /// As [`prepare`](Self::prepare).
    pub fn prepare_in(
        cache: &Path,
        arguments: &TrainingArguments,
        mut say: impl FnMut(&str),
    ) -> Result<Self> {
        let mixture = arguments.mixture_sources()?;
        let of_path = |path: &PathBuf| TrainingArguments {
            data: vec![path.clone()],
            ..arguments.clone()
        };
        let parts: Vec<TrainingArguments> = match mixture.is_empty() {
            true => vec![arguments.clone()],
            false => mixture.iter().map(|(path, _)| of_path(path)).collect(),
        };
        let mut inputs = Vec::with_capacity(parts.len());
        for part in &parts {
            inputs.push(Input::find(part, &mut say)?);
        }
        let tokenizer = tokenizer(&inputs, arguments, cache, &mut say)?;
        let mut opened = Vec::with_capacity(parts.len());
        for (part, input) in parts.iter().zip(&inputs) {
            opened.push(input.open(part, tokenizer.as_ref(), cache, &mut say)?);
        }
        let of_files = opened.iter().filter_map(|text| text.vocab_size).max();
        let vocab_size = match (&tokenizer, of_files) {
            (Some(tokenizer), _) => tokenizer.get_vocab_size(true) as u64,
            (None, of_files) => of_files.unwrap_or(arguments.vocab_size),
        };
        if of_files.is_some() {
            say(&match tokenizer.is_some() {
                true => format!("tokenizer   {vocab_size} tokens"),
                false => format!(
                    "tokenizer   none: a vocabulary of {vocab_size} tokens, and no samples; `--tokenizer` gives one"
                ),
            });
        }
        let views = |side: fn(&OpenedText) -> &TokenView| {
            TokenView::concat(
                &opened
                    .iter()
                    .map(|text| side(text).clone())
                    .collect::<Vec<_>>(),
            )
        };
        let mut data = Self {
            tokenizer,
            train: views(|text| &text.train),
            validation: views(|text| &text.validation),
            vocab_size,
            prompts: Vec::new(),
            rows: None,
            mixture: None,
        };
        let cached = match opened.iter().all(|text| text.was_cached) {
            true => " (cached)",
            false => "",
        };
        if mixture.is_empty() {
            let lengths = opened.into_iter().next().and_then(|text| text.lengths);
            return data.prepared(lengths.as_deref(), cached, arguments, &mut say);
        }
        let sources = mixture.into_iter().zip(opened);
        let sources = sources.map(|((path, weight), text)| MixedText {
            name: path.display().to_string(),
            weight,
            train: text.train,
            rows: None,
        });
        data.mixture = Some(TextMixture {
            sources: sources.collect(),
        });
        data.prepared(None, cached, arguments, &mut say)
    }

    /// Makes the rows and both loaders, and logs the numbers of tokens.
    fn prepared(
        mut self,
        lengths: Option<&[u32]>,
        cached: &str,
        arguments: &TrainingArguments,
        say: &mut dyn FnMut(&str),
    ) -> Result<Self> {
        say(&format!(
            "tokens      {:.2}M to train on, {:.2}M for validation{cached}",
            millions(self.train.len()),
            millions(self.validation.len()),
        ));
        // Padding is never attended to nor labelled, so any token will do.
        let pad_token = self.end_of_text().unwrap_or(0);
        let documents = arguments.sequence_mode() == SequenceMode::Documents;
        if let Some(mixture) = &mut self.mixture {
            mixture.describe(say);
            for source in mixture.sources.iter_mut().filter(|_| documents) {
                let rows = DocumentRows::to_train(&source.train, None, pad_token, arguments)?;
                rows.describe(Loading::new(arguments, Device::Cpu, true), say)?;
                source.rows = Some(rows);
            }
        } else if documents {
            let rows = DocumentRows::to_train(&self.train, lengths, pad_token, arguments)?;
            rows.describe(Loading::new(arguments, Device::Cpu, true), say)?;
            if lengths.is_some() {
                say(&format!(
                    "            grouped by the column `{}`",
                    arguments.length_column_name
                ));
            }
            self.rows = Some(rows);
        }
        // Builds both loaders once, so that a split that is too short is an error now and not at the first
        // evaluation.
        self.train_loader(arguments, Device::Cpu)?;
        self.validation_loader(arguments, Device::Cpu)?;
        if arguments.best_metric() == BITS_PER_BYTE && self.validation.bits_per_byte(1.0).is_none()
        {
            arguments.check_metric(&[])?;
        }
        // Tokens without a tokenizer have no text.
        if self.tokenizer.is_some() {
            self.prompts = prompts(&self.validation, arguments)?;
        }
        Ok(self)
    }

    /// Returns the beginnings of evenly spaced validation documents, at most `samples` of them.
    pub(crate) fn prompts(&self) -> &[Vec<u32>] {
        &self.prompts
    }

    /// Returns the size of the vocabulary.
    pub fn vocab_size(&self) -> u64 {
        self.vocab_size
    }

    /// Writes the tokenizer, if there is one, into a Hugging Face folder, for a model with the context of `arguments`.
    ///
    /// # Errors
    /// An error if the folder cannot be written.
    pub fn save_tokenizer(
        &self,
        folder: impl AsRef<Path>,
        arguments: &TrainingArguments,
    ) -> Result<()> {
        let Some(tokenizer) = &self.tokenizer else {
            return Ok(());
        };
        let end = self.end_of_text().and_then(|id| tokenizer.id_to_token(id));
        save_tokenizer(folder, tokenizer, end.as_deref(), arguments.context())?;
        Ok(())
    }

    /// Returns the token that ends a document.
    pub fn end_of_text(&self) -> Option<u32> {
        self.train.stores().first()?.end_of_document()
    }

    /// Returns an endless loader of the training data: windows or documents, prepared by
    /// `dataloader_num_workers` threads. Each epoch has each of them once, in an order that the seed and the
    /// number of the epoch determine. `shard` is a device for all of the data, or the [`DataShard`] of one process
    /// among several.
    ///
    /// # Errors
    /// [`crate::Error::Data`] if the training data is shorter than a window; [`crate::Error::Common`] if it
    /// has no full batch and `dataloader_drop_last` is set.
    pub fn train_loader(
        &self,
        arguments: &TrainingArguments,
        shard: impl Into<DataShard>,
    ) -> Result<DeviceLoader<Batch>> {
        let how = Loading::new(arguments, shard, true);
        if let Some(mixture) = &self.mixture {
            return mixture.load(how);
        }
        match &self.rows {
            Some(rows) => rows.load(how),
            // All windows have the same length, so the layout pads nothing.
            None => how.of_rows(windows(&self.train, arguments)?, RowLayout::default(), None),
        }
    }

    /// Returns a loader of the validation data, of at most `max_eval_batches` batches over all processes:
    /// windows in order, or documents without padding.
    ///
    /// # Errors
    /// [`crate::Error::Data`] if the validation data is shorter than a window.
    pub fn validation_loader(
        &self,
        arguments: &TrainingArguments,
        shard: impl Into<DataShard>,
    ) -> Result<DeviceLoader<Batch>> {
        let how = Loading::new(arguments, shard, false);
        if arguments.sequence_mode() == SequenceMode::Documents {
            return DocumentRows::to_evaluate(&self.validation, arguments)?.load(how);
        }
        let mut windows = windows(&self.validation, arguments)?;
        if arguments.max_eval_batches.is_some() {
            windows = windows.at_most(arguments.max_eval_rows())?;
        }
        how.of_rows(windows, RowLayout::default(), None)
    }

    /// Returns the number of micro-batches of all processes in an epoch.
    pub fn micro_batches_per_epoch(&self, arguments: &TrainingArguments) -> u64 {
        if let Some(mixture) = &self.mixture {
            return mixture.micro_batches(arguments);
        }
        if let Some(rows) = &self.rows {
            return rows.micro_batches(arguments);
        }
        // Text without a window has no loader either.
        let windows = windows(&self.train, arguments).map_or(0, |windows| windows.len());
        arguments.micro_batches_of(windows)
    }
}

/// Splits the documents into training and validation documents.
fn split(all: &TokenView, arguments: &TrainingArguments) -> Result<(TokenView, TokenView)> {
    let split = SplitOptions {
        validation_fraction: arguments.validation_fraction,
        seed: arguments.seed,
        by: match arguments.sequence_mode() {
            // A single book is split by position, a folder of files by file.
            SequenceMode::Windows => SplitBy::Auto,
            SequenceMode::Documents => SplitBy::Document,
        },
    };
    if split.by == SplitBy::Document && all.document_count().is_some_and(|count| count < 2) {
        let expected = "`windows` for a text of one document, because some documents are held out for \
                        validation; write `sample_by: line`, give more files or records, or write \
                        `sequences: windows`";
        return invalid("sequences", "documents", expected);
    }
    Ok(all.split(&split)?)
}

/// Returns the tokenizer of the snapshot from which the run resumes, and the folder of the snapshot. The weights
/// belong to the ids of that tokenizer; a tokenizer trained on changed data would have other ids.
fn tokenizer_of_snapshot(arguments: &TrainingArguments) -> Result<Option<(PathBuf, Tokenizer)>> {
    for snapshot in arguments.listed_snapshots()? {
        match snapshot.file("tokenizer.json") {
            Ok(Some(path)) => {
                return Ok(Some((snapshot.path().to_owned(), load_tokenizer(path)?)));
            }
            // The run does not resume from a damaged snapshot either.
            Ok(None) | Err(overdrive_snapshot::Error::Damaged { .. }) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(None)
}

fn prompts(validation: &TokenView, arguments: &TrainingArguments) -> Result<Vec<Vec<u32>>> {
    let tokens = PROMPT_TOKENS.min(arguments.context() / 2);
    let wanted = usize::try_from(arguments.samples).unwrap_or(usize::MAX);
    let long_enough: Vec<_> = validation
        .document_numbers()
        .filter_map(|number| validation.document(number))
        .filter(|(_, document)| document.tokens.len() > 2 * tokens)
        .collect();
    let every = (long_enough.len() / wanted.max(1)).max(1);
    let chosen = long_enough.iter().step_by(every).take(wanted);
    let starts = chosen.map(|(store, document)| (store, document.tokens.start));
    Ok(starts
        .map(|(store, start)| store.tokens(start..start + tokens))
        .collect::<overdrive_datasets::Result<_>>()?)
}

fn windows(view: &TokenView, arguments: &TrainingArguments) -> Result<SequentialWindows> {
    let windows = SequentialWindows::new(view.clone(), arguments.context(), LastWindow::Drop);
    Ok(windows?)
}

fn millions(count: usize) -> f64 {
    count as f64 / 1e6
}
