//! From the arguments to batches: text, tokenizer, token store, split.

use std::path::Path;

use overdrive_datasets::{
    Batch, DeviceLoader, LastWindow, RandomWindows, RowLayout, SequentialWindows, SplitBy,
    SplitOptions, TokenView, Tokenizer, default_cache_dir, load_tokenizer, save_tokenizer,
};
use tch::Device;

use crate::documents::DocumentRows;
use crate::loading::Loading;
use crate::text_source::TextSource;
use crate::{Error, Part, Result, SequenceMode, TrainingArguments};

/// The text of a run: tokenized, kept in the cache, split by document.
///
/// Without `data` it is Rust source that Cargo keeps on this machine; without `tokenizer` a
/// byte-level BPE of `vocab_size` tokens is trained on it. Both are done once: the next run on the
/// same text finds them in the cache (`overdrive_datasets::default_cache_dir`).
#[derive(Debug)]
pub struct TextData {
    /// What turns text into tokens and back.
    pub tokenizer: Tokenizer,
    /// The documents to train on.
    pub train: TokenView,
    /// The documents that training never sees.
    pub validation: TokenView,
    /// Where a sequence is a document.
    rows: Option<DocumentRows>,
}

impl TextData {
    /// Reads, tokenizes and splits the text that `arguments` name, and tells `say` about it, a line
    /// at a time.
    ///
    /// # Errors
    /// [`crate::Error::Data`]: there is no text, it cannot be read, or there is too little of it for
    /// one window of `context_length` in each part.
    pub fn prepare(arguments: &TrainingArguments, say: impl FnMut(&str)) -> Result<Self> {
        Self::prepare_in(&default_cache_dir()?, arguments, say)
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
        let source = TextSource::open(arguments)?;
        source.describe(arguments, &mut say);
        let tokenizer = match &arguments.tokenizer {
            Some(path) => load_tokenizer(path)?,
            None => {
                let vocab_size = usize::try_from(arguments.vocab_size).unwrap_or(usize::MAX);
                let bpe = source.train_tokenizer(vocab_size, cache)?;
                say(&format!(
                    "tokenizer   byte-level BPE, {} tokens{}",
                    bpe.vocab_size,
                    if bpe.was_cached { " (cached)" } else { "" },
                ));
                bpe.tokenizer
            }
        };

        let built = source.build(arguments, &tokenizer, cache)?;
        let cached = if built.was_cached() { " (cached)" } else { "" };
        let all = TokenView::new(built.store);
        let split = SplitOptions {
            validation_fraction: arguments.validation_fraction,
            seed: arguments.seed,
            by: match arguments.sequence_mode() {
                // One book is split by position, a folder of files by file.
                SequenceMode::Windows => SplitBy::Auto,
                SequenceMode::Documents => SplitBy::Document,
            },
        };
        if split.by == SplitBy::Document && all.document_count().is_some_and(|count| count < 2) {
            return Err(Error::Invalid {
                key: "sequences",
                given: "`documents`".to_owned(),
                problem: "the text is one document, and some are kept for validation".to_owned(),
                way_out:
                    "write `sample_by: line`, give more files or records, or `sequences: windows`"
                        .to_owned(),
            });
        }
        let (train, validation) = all.split(&split)?;
        say(&format!(
            "tokens      {:.2}M to train on, {:.2}M for validation{cached}",
            millions(train.len()),
            millions(validation.len()),
        ));
        let lengths = source.column_lengths(arguments)?;
        let mut data = Self {
            tokenizer,
            train,
            validation,
            rows: None,
        };
        if arguments.sequence_mode() == SequenceMode::Documents {
            let pad_token = data.end_of_text().unwrap_or(0);
            let rows =
                DocumentRows::to_train(&data.train, lengths.as_deref(), pad_token, arguments)?;
            rows.describe(loading(arguments, Device::Cpu, true), &mut say)?;
            if lengths.is_some() {
                say(&format!(
                    "            grouped by the column `{}`",
                    arguments.length_column_name
                ));
            }
            data.rows = Some(rows);
        }
        // Too short a part is an error now, not at the first evaluation.
        data.train_loader(arguments, Device::Cpu)?;
        data.validation_loader(arguments, Device::Cpu)?;
        Ok(data)
    }

    /// Tokens of the vocabulary.
    pub fn vocab_size(&self) -> u64 {
        self.tokenizer.get_vocab_size(true) as u64
    }

    /// Writes the tokenizer into a Hugging Face folder, for a model with this context.
    ///
    /// # Errors
    /// When the folder cannot be written.
    pub fn save_tokenizer(
        &self,
        folder: impl AsRef<Path>,
        arguments: &TrainingArguments,
    ) -> Result<()> {
        let end = self
            .end_of_text()
            .and_then(|id| self.tokenizer.id_to_token(id));
        save_tokenizer(folder, &self.tokenizer, end.as_deref(), context(arguments))?;
        Ok(())
    }

    /// The token that ends a document.
    pub fn end_of_text(&self) -> Option<u32> {
        self.train.store().end_of_document()
    }

    /// Returns an endless loader of the training part, pass after pass: windows or documents, as the
    /// configuration says, prepared by `dataloader_num_workers` threads, in an order that the seed decides. `part`: a device
    /// for all of it, or the [`Part`] of one process among several.
    ///
    /// # Errors
    /// [`crate::Error::Data`] if the part is shorter than a window; [`crate::Error::Invalid`] if it has
    /// no whole batch and `dataloader_drop_last` wants one.
    pub fn train_loader(
        &self,
        arguments: &TrainingArguments,
        part: impl Into<Part>,
    ) -> Result<DeviceLoader<Batch>> {
        let how = loading(arguments, part, true);
        match &self.rows {
            Some(rows) => rows.load(how),
            None => {
                let windows =
                    RandomWindows::new(self.train.clone(), context(arguments), arguments.seed)?;
                how.of_windows(windows, self.micro_batches_per_epoch(arguments))
            }
        }
    }

    /// Returns a loader of the validation part, of `max_eval_batches` batches at most over all processes:
    /// windows in order, or documents without padding.
    ///
    /// # Errors
    /// [`crate::Error::Data`] if the part is shorter than a window.
    pub fn validation_loader(
        &self,
        arguments: &TrainingArguments,
        part: impl Into<Part>,
    ) -> Result<DeviceLoader<Batch>> {
        let how = loading(arguments, part, false);
        if self.rows.is_some() {
            return DocumentRows::to_evaluate(&self.validation, arguments)?.load(how);
        }
        let part = self.validation.clone();
        let mut windows = SequentialWindows::new(part, context(arguments), LastWindow::Drop)?;
        if let Some(batches) = arguments.max_eval_batches {
            let most = batches * arguments.per_device_eval_batch_size;
            windows = windows.at_most(usize::try_from(most).unwrap_or(usize::MAX))?;
        }
        how.of_rows(windows, RowLayout::default(), None)
    }

    /// Micro-batches of one pass over the training part, of all processes.
    pub fn micro_batches_per_epoch(&self, arguments: &TrainingArguments) -> u64 {
        if let Some(rows) = &self.rows {
            return rows.micro_batches(arguments);
        }
        let tokens = arguments.per_device_train_batch_size * arguments.context_length;
        (self.train.len() as u64).div_ceil(tokens.max(1))
    }
}

fn context(arguments: &TrainingArguments) -> usize {
    usize::try_from(arguments.context_length).unwrap_or(usize::MAX)
}

fn loading(arguments: &TrainingArguments, part: impl Into<Part>, endless: bool) -> Loading<'_> {
    Loading {
        arguments,
        part: part.into(),
        endless,
    }
}

fn millions(count: usize) -> f64 {
    count as f64 / 1e6
}
