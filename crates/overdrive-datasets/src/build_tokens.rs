//! The tokenization of a corpus into a token store, on all cores and with bounded memory.

use std::path::Path;
use std::sync::mpsc::{Receiver, sync_channel};
use std::time::{Duration, Instant};

use overdrive_core::check_at_least;
use rayon::prelude::*;
use tokenizers::Tokenizer;

use crate::byte_level::ByteLevelEncoder;
use crate::digest::FieldHasher;
use crate::documents::{Chunk, for_each_chunk, split_into_chunks};
use crate::index::{cores, in_order};
use crate::progress_bar::ProgressBar;
use crate::tokenizer_files::{switch_limits_off, token_id};
use crate::{
    Corpus, Dataset, Error, Result, Sha256Digest, StoreOptions, TokenStore, TokenStoreWriter,
    TokenWidth, tokenizer_digest,
};

/// The smallest bound on a chunk: half of it holds several characters, so there is always a position to split at.
const MIN_CHUNK_BYTES: usize = 16;

/// The options of [`build_tokens_to`] and of the functions like it.
#[derive(Debug, Clone)]
pub struct BuildOptions {
    /// The token that is appended to each document; `None` appends none. Default: `<|endoftext|>`.
    pub end_of_document: Option<String>,
    /// The token that is put before each document (Llama's `<s>`). Default: `None`.
    pub begin_of_document: Option<String>,
    /// The largest number of bytes that are tokenized at once; longer documents are split into chunks. They
    /// are split between two lines or words where GPT and Llama-3 tokenizers begin a new word in any case, so
    /// the tokens are those of the whole document. Only if there is no such position in half a chunk (no ASCII
    /// text), or with another kind of tokenizer, may one or two tokens differ at the split. Memory grows with
    /// it. Default: 256 KiB; `usize::MAX` splits no document.
    pub max_chunk_bytes: usize,
    /// The number of bytes per token. `None` (the default) uses the smallest that holds the vocabulary.
    pub width: Option<TokenWidth>,
    /// The number of threads that tokenize; the tokens do not depend on it. `None` (the default) uses one per
    /// core.
    pub threads: Option<usize>,
    /// If `true`, a progress bar is drawn on standard error, if that is a terminal and the crate has its feature
    /// `progress`. Default: `true`.
    pub progress: bool,
}

impl Default for BuildOptions {
    fn default() -> Self {
        Self {
            end_of_document: Some("<|endoftext|>".to_owned()),
            begin_of_document: None,
            max_chunk_bytes: 256 << 10,
            width: None,
            threads: None,
            progress: true,
        }
    }
}

impl BuildOptions {
    /// Adds to `hasher` the options that change the tokens, and the version of the code that makes the tokens.
    pub(crate) fn add_to(&self, hasher: &mut FieldHasher) {
        // Increase this when the same text gives different tokens, so that cached stores are built again.
        const VERSION: &[u8] = b"build 1";
        hasher.add(VERSION);
        hasher.add(format!("{:?}", self.end_of_document).as_bytes());
        hasher.add(format!("{:?}", self.begin_of_document).as_bytes());
        hasher.add(&(self.max_chunk_bytes as u64).to_le_bytes());
        // Threads and progress do not change the tokens, so they are not part of the key.
        hasher.add(format!("{:?}", self.width).as_bytes());
    }
}

/// A report on a build.
#[derive(Debug, Clone, Copy, PartialEq)]
#[non_exhaustive]
pub struct BuildReport {
    /// The number of documents written.
    pub documents: u64,
    /// The number of tokens written.
    pub tokens: u64,
    /// The length of the documents' text in UTF-8 bytes.
    pub text_bytes: u64,
    /// The duration of the build.
    pub elapsed: Duration,
}

/// Tokenizes a corpus into a store at `path`.
///
/// One thread reads, the others tokenize, and the tokens are written in the order of the corpus for any number
/// of threads. Memory does not grow with the corpus. Special tokens in the text, such as a literal
/// `<|endoftext|>`, are tokenized as ordinary text: only the builder adds special tokens. Truncation and
/// padding of the tokenizer are switched off.
///
/// [`crate::build_tokens`] does the same with a cache.
///
/// # Errors
/// Returns an error if a file cannot be read, changed since the corpus was listed or has an invalid record; if the
/// tokenizer does not have `end_of_document` or fails; if the store cannot be written. In all these cases nothing is
/// left at `path`.
pub fn build_tokens_to(
    path: impl AsRef<Path>,
    corpus: &Corpus,
    tokenizer: &Tokenizer,
    options: &BuildOptions,
) -> Result<(TokenStore, BuildReport)> {
    build_with_source(
        path.as_ref(),
        corpus,
        tokenizer,
        options,
        Sha256Digest::UNKNOWN,
    )
}

/// Tokenizes the records of a dataset of texts into a store at `path`: each is a document.
///
/// It streams as [`build_tokens_to`] does: memory does not grow with the dataset, and the tokens are the same
/// for any number of threads. Empty records are skipped. [`crate::DatasetExt::map`] converts other records to
/// text. [`crate::build_dataset_tokens`] does the same with a cache.
///
/// # Errors
/// Those of [`build_tokens_to`], and an error if a record cannot be read or a file of the records changed
/// ([`Dataset::check_unchanged`]).
pub fn build_dataset_tokens_to<D>(
    path: impl AsRef<Path>,
    dataset: &D,
    tokenizer: &Tokenizer,
    options: &BuildOptions,
) -> Result<(TokenStore, BuildReport)>
where
    D: Dataset<Item = String> + ?Sized,
{
    let unknown = Sha256Digest::UNKNOWN;
    build_with_source(
        path.as_ref(),
        &DatasetDocuments(dataset),
        tokenizer,
        options,
        unknown,
    )
}

/// A source of documents, in chunks of bounded size.
pub(crate) trait DocumentSource: Sync {
    /// Passes all chunks to `sink` in order, until it returns `false`.
    fn for_each(
        &self,
        max_bytes: usize,
        threads: usize,
        sink: &mut dyn FnMut(Chunk) -> bool,
    ) -> Result<()>;

    /// Returns a progress bar of the length of the source.
    fn progress(&self) -> ProgressBar;
}

impl DocumentSource for Corpus {
    fn for_each(
        &self,
        max_bytes: usize,
        _threads: usize,
        sink: &mut dyn FnMut(Chunk) -> bool,
    ) -> Result<()> {
        for_each_chunk(self, max_bytes, sink)
    }

    fn progress(&self) -> ProgressBar {
        let template =
            "tokenizing {wide_bar} {bytes}/{total_bytes} of {msg} · {bytes_per_sec} · {eta} left";
        let files = format!("{} files", self.files().len());
        ProgressBar::new(self.total_bytes(), template, files)
    }
}

/// The records of a dataset as documents.
pub(crate) struct DatasetDocuments<'a, D: ?Sized>(pub(crate) &'a D);

impl<D: Dataset<Item = String> + ?Sized> DocumentSource for DatasetDocuments<'_, D> {
    fn for_each(
        &self,
        max_bytes: usize,
        threads: usize,
        sink: &mut dyn FnMut(Chunk) -> bool,
    ) -> Result<()> {
        // Records are read in blocks, so that threads rarely wait for each other. Reading is cheap
        // compared with tokenizing, unless records are parsed: a quarter of the threads is enough.
        const BLOCK: usize = 256;
        let len = self.0.len();
        let blocks = len.div_ceil(BLOCK);
        let readers = threads.div_ceil(4);
        let read = |block: usize| -> Result<Vec<String>> {
            let start = block * BLOCK;
            (start..len.min(start + BLOCK))
                .map(|index| self.0.get(index))
                .collect()
        };
        in_order(blocks, readers, 2 * readers, read, |texts| {
            for text in texts?.into_iter().filter(|text| !text.is_empty()) {
                if !split_into_chunks(text, max_bytes, 1, sink) {
                    // The sink has ended because tokenizing failed; that error is returned instead of this one.
                    return Err(Error::WorkerPanicked);
                }
            }
            Ok(())
        })?;
        self.0.check_unchanged()
    }

    fn progress(&self) -> ProgressBar {
        let template = "tokenizing {wide_bar} {pos}/{len} records · {eta} left";
        ProgressBar::new(self.0.len() as u64, template, String::new())
    }
}

pub(crate) fn build_with_source(
    path: &Path,
    corpus: &(impl DocumentSource + ?Sized),
    tokenizer: &Tokenizer,
    options: &BuildOptions,
    source: Sha256Digest,
) -> Result<(TokenStore, BuildReport)> {
    let started = Instant::now();
    check_at_least("max_chunk_bytes", options.max_chunk_bytes, MIN_CHUNK_BYTES)?;
    let id_of = |token: &Option<String>, option| {
        token
            .as_ref()
            .map(|token| token_id(tokenizer, token, option))
            .transpose()
    };
    let begin_of_document = id_of(&options.begin_of_document, "begin_of_document")?;
    let end_of_document = id_of(&options.end_of_document, "end_of_document")?;
    let digest = tokenizer_digest(tokenizer)?;
    let store_options = StoreOptions {
        width: options.width,
        end_of_document,
        tokenizer: digest,
        source,
        ..StoreOptions::new(vocab_size(tokenizer))
    };
    let mut sink = Sink {
        writer: TokenStoreWriter::create(path, store_options)?,
        begin_of_document,
        end_of_document,
        text_bytes: 0,
        document_bytes: 0,
        bar: match options.progress {
            true => corpus.progress(),
            false => ProgressBar::hidden(),
        },
    };
    let encoder = Encoder::new(tokenizer)?;
    let threads = options.threads.map_or_else(cores, |threads| threads.max(1));
    // A separate pool: the caller may be using the global one, and its size is fixed.
    let pool = rayon::ThreadPoolBuilder::new()
        .num_threads(threads)
        .thread_name(|index| format!("overdrive-tokenize-{index}"))
        .build()
        .map_err(|error| Error::Threads {
            threads: "the threads that tokenize",
            problem: error.to_string(),
        })?;
    // The reader is one batch ahead: at most three batches are in memory, with one on each side of the
    // channel. Four chunks per thread balance the threads' loads, and a batch of 1 MiB is worth a parallel
    // loop. Without a bound of the chunks, that of the batches is one of memory.
    let batch_bytes = options
        .max_chunk_bytes
        .saturating_mul(4)
        .saturating_mul(threads);
    let batch_bytes = batch_bytes.clamp(1 << 20, 256 << 20);
    std::thread::scope(|scope| -> Result<()> {
        let (sender, batches) = sync_channel(1);
        let reader = scope.spawn(move || -> Result<()> {
            let max_chunk_bytes = options.max_chunk_bytes;
            read_batches(corpus, max_chunk_bytes, threads, batch_bytes, |batch| {
                sender.send(batch).is_ok()
            })
        });
        // An error drops the receiver, which closes the channel: a reader that waits then ends.
        encode_batches(batches, &pool, &encoder, &mut sink)?;
        match reader.join() {
            Ok(result) => result,
            // A panic of the user's dataset is not an error of this crate and continues in the caller's thread.
            Err(panic) => std::panic::resume_unwind(panic),
        }
    })?;
    sink.bar.finish_and_clear();
    let text_bytes = sink.text_bytes;
    let store = sink.writer.finish()?;
    let report = BuildReport {
        documents: store.document_count() as u64,
        tokens: store.len() as u64,
        text_bytes,
        elapsed: started.elapsed(),
    };
    Ok((store, report))
}

/// Returns the number of ids, which is one more than the largest: a tokenizer may have unused ids.
fn vocab_size(tokenizer: &Tokenizer) -> u64 {
    tokenizer
        .get_vocab(true)
        .values()
        .max()
        .map_or(0, |&largest| u64::from(largest) + 1)
}

/// A tokenizer set up for documents.
pub(crate) enum Encoder {
    /// The encoder for GPT-2's kind of tokenizer, which is several times as fast.
    ByteLevel(Box<ByteLevelEncoder>),
    /// A tokenizer of any other kind.
    Any(Box<Tokenizer>),
}

impl Encoder {
    pub(crate) fn new(tokenizer: &Tokenizer) -> Result<Self> {
        let mut tokenizer = tokenizer.clone();
        switch_limits_off(&mut tokenizer)?;
        // A text may contain the name of a special token, which must not become that token.
        tokenizer.set_encode_special_tokens(true);
        Ok(match ByteLevelEncoder::of(&tokenizer)? {
            Some(encoder) => Self::ByteLevel(Box::new(encoder)),
            None => Self::Any(Box::new(tokenizer)),
        })
    }

    pub(crate) fn encode(&self, text: &str) -> Result<Vec<u32>> {
        match self {
            Self::ByteLevel(encoder) => encoder.encode(text),
            Self::Any(tokenizer) => {
                let encoding = tokenizer
                    .encode_fast(text, false)
                    .map_err(Error::tokenizer("tokenize a document"))?;
                Ok(encoding.get_ids().to_vec())
            }
        }
    }
}

/// Collects chunks into batches of about `batch_bytes`.
fn read_batches(
    corpus: &(impl DocumentSource + ?Sized),
    max_chunk_bytes: usize,
    threads: usize,
    batch_bytes: usize,
    mut send: impl FnMut(Vec<Chunk>) -> bool,
) -> Result<()> {
    // The number of documents is bounded too, because each document has a fixed cost in memory.
    const MAX_CHUNKS: usize = 1 << 14;
    let mut batch = Vec::new();
    let mut bytes = 0;
    corpus.for_each(max_chunk_bytes, threads, &mut |chunk| {
        bytes += chunk.text.len();
        batch.push(chunk);
        if bytes < batch_bytes && batch.len() < MAX_CHUNKS {
            return true;
        }
        bytes = 0;
        send(std::mem::take(&mut batch))
    })?;
    if !batch.is_empty() {
        send(batch);
    }
    Ok(())
}

fn encode_batches(
    batches: Receiver<Vec<Chunk>>,
    pool: &rayon::ThreadPool,
    encoder: &Encoder,
    sink: &mut Sink,
) -> Result<()> {
    for batch in batches {
        // Chunks differ in length by orders of magnitude, so each is a task of its own.
        let encode = |chunk: &Chunk| encoder.encode(&chunk.text);
        let encoded: Vec<_> =
            pool.install(|| batch.par_iter().with_max_len(1).map(encode).collect());
        // Tokens of a batch arrive in its order, so the file is the same for any number of threads.
        for (chunk, tokens) in batch.iter().zip(encoded) {
            sink.push(chunk, &tokens?)?;
        }
    }
    Ok(())
}

struct Sink {
    writer: TokenStoreWriter,
    begin_of_document: Option<u32>,
    end_of_document: Option<u32>,
    text_bytes: u64,
    /// The number of bytes of the current document so far. No chunk is empty, so 0 means that none has begun.
    document_bytes: u64,
    bar: ProgressBar,
}

impl Sink {
    fn push(&mut self, chunk: &Chunk, tokens: &[u32]) -> Result<()> {
        if self.document_bytes == 0 {
            self.writer.push_tokens(self.begin_of_document.as_slice())?;
        }
        self.writer.push_tokens(tokens)?;
        self.document_bytes += chunk.text.len() as u64;
        if chunk.ends_document {
            self.writer.push_tokens(self.end_of_document.as_slice())?;
            self.writer.end_document(self.document_bytes)?;
            self.text_bytes += self.document_bytes;
            self.document_bytes = 0;
        }
        self.bar.advance(chunk.file_bytes);
        Ok(())
    }
}
