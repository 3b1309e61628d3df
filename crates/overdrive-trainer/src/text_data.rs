//! From the arguments to batches: corpus, tokenizer, token store, split.

use std::path::Path;

use overdrive_datasets::{
    BatchOptions, BpeOptions, BuildOptions, Corpus, CorpusOptions, LastWindow, RandomWindows,
    SequentialWindows, SplitBy, SplitOptions, TokenBatches, TokenView, Tokenizer, build_tokens,
    default_cache_dir, load_tokenizer, save_tokenizer, train_bpe_cached,
};
use tch::Device;

use crate::{Result, TrainingArguments};

/// How much of Cargo's registry is read where no data is named.
const DEFAULT_CORPUS_BYTES: u64 = 24 << 20;

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
        let corpus = if arguments.data.is_empty() {
            Corpus::cargo_registry(DEFAULT_CORPUS_BYTES)?
        } else {
            Corpus::from_paths(&arguments.data, &CorpusOptions::default())?
        };
        // The fingerprint tells two runs apart whose text was not the same: Cargo's registry grows.
        say(&format!(
            "corpus      {} files, {:.1} MB, fingerprint {:.12}",
            corpus.files().len(),
            megabytes(corpus.total_bytes()),
            corpus.digest().to_string(),
        ));
        if arguments.data.is_empty() {
            say("            Rust source that Cargo keeps on this machine");
        }
        if corpus.skipped().total() > 0 && !arguments.data.is_empty() {
            say(&format!(
                "            {} files left out",
                corpus.skipped().total()
            ));
        }

        let tokenizer = match &arguments.tokenizer {
            Some(path) => load_tokenizer(path)?,
            None => {
                let vocab_size = usize::try_from(arguments.vocab_size).unwrap_or(usize::MAX);
                let options = BpeOptions {
                    vocab_size,
                    ..BpeOptions::default()
                };
                let bpe = train_bpe_cached(&corpus, &options, cache)?;
                say(&format!(
                    "tokenizer   byte-level BPE, {} tokens{}",
                    bpe.vocab_size,
                    if bpe.was_cached { " (cached)" } else { "" },
                ));
                bpe.tokenizer
            }
        };

        let options = BuildOptions {
            progress: true,
            ..BuildOptions::default()
        };
        let built = build_tokens(&corpus, &tokenizer, &options, cache)?;
        let cached = if built.was_cached() { " (cached)" } else { "" };
        let all = TokenView::new(built.store);
        let split = SplitOptions {
            validation_fraction: arguments.validation_fraction,
            seed: arguments.seed,
            // One book is split by position, a folder of files by file.
            by: SplitBy::Auto,
        };
        let (train, validation) = all.split(&split)?;
        say(&format!(
            "tokens      {:.2}M to train on, {:.2}M for validation{cached}",
            millions(train.len()),
            millions(validation.len()),
        ));
        let data = Self {
            tokenizer,
            train,
            validation,
        };
        // Too short a part is an error now, not at the first evaluation.
        data.train_batches(arguments, Device::Cpu)?;
        data.validation_batches(arguments, Device::Cpu)?;
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

    /// Random windows of the training part, without end, in an order that the seed decides.
    ///
    /// # Errors
    /// [`crate::Error::Data`] if the part is shorter than a window.
    pub fn train_batches(
        &self,
        arguments: &TrainingArguments,
        device: Device,
    ) -> Result<TokenBatches> {
        let windows = RandomWindows::new(self.train.clone(), context(arguments), arguments.seed)?;
        let options = batches_of(arguments.per_device_train_batch_size);
        Ok(TokenBatches::new(windows, options, device)?)
    }

    /// The windows of the validation part in order, `max_eval_batches` of them at most.
    ///
    /// # Errors
    /// [`crate::Error::Data`] if the part is shorter than a window.
    pub fn validation_batches(
        &self,
        arguments: &TrainingArguments,
        device: Device,
    ) -> Result<TokenBatches> {
        let mut windows = SequentialWindows::new(
            self.validation.clone(),
            context(arguments),
            LastWindow::Drop,
        )?;
        let batch = arguments.per_device_eval_batch_size;
        if let Some(batches) = arguments.max_eval_batches {
            windows = windows.at_most(usize::try_from(batches * batch).unwrap_or(usize::MAX))?;
        }
        Ok(TokenBatches::new(windows, batches_of(batch), device)?)
    }

    /// Micro-batches of one pass over the training part.
    pub fn micro_batches_per_epoch(&self, arguments: &TrainingArguments) -> u64 {
        let tokens = arguments.per_device_train_batch_size * arguments.context_length;
        (self.train.len() as u64).div_ceil(tokens.max(1))
    }
}

fn context(arguments: &TrainingArguments) -> usize {
    usize::try_from(arguments.context_length).unwrap_or(usize::MAX)
}

fn batches_of(size: u64) -> BatchOptions {
    let micro_batch_size = usize::try_from(size).unwrap_or(usize::MAX);
    BatchOptions {
        micro_batch_size,
        ..BatchOptions::default()
    }
}

fn megabytes(bytes: u64) -> f64 {
    bytes as f64 / 1e6
}

fn millions(count: usize) -> f64 {
    count as f64 / 1e6
}
