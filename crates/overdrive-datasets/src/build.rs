//! Text to tokens, on all cores, with flat memory.

use std::path::Path;
use std::sync::mpsc::{Receiver, sync_channel};
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressStyle};
use rayon::prelude::*;
use tokenizers::Tokenizer;

use crate::byte_level::ByteLevelEncoder;
use crate::digest::FieldHasher;
use crate::documents::{Piece, cut_into_pieces, for_each_piece};
use crate::index::in_order;
use crate::{
    Corpus, Dataset, Error, Result, Sha256Digest, StoreOptions, TokenStore, TokenStoreWriter,
    TokenWidth, tokenizer_digest,
};

/// With room for several characters, there is always a place to cut.
const MIN_PIECE_BYTES: usize = 16;

/// How to make tokens of text.
#[derive(Debug, Clone)]
pub struct BuildOptions {
    /// The token that is put behind each document; `None` puts none. Default: `<|endoftext|>`.
    pub end_of_document: Option<String>,
    /// A token that is put in front of each document (Llama's `<s>`). Default: `None`.
    pub begin_of_document: Option<String>,
    /// Longer documents are tokenized in pieces of at most so many bytes. They are cut between two
    /// lines or words where GPT and Llama-3 tokenizers begin a new word in any case, so the tokens are
    /// those of the whole document; only where there is no such place in half a piece (no ASCII
    /// text), or with a tokenizer of another kind, may a token or two differ at the cut. Memory grows
    /// with it. Default: 256 KiB.
    pub max_piece_bytes: usize,
    /// Bytes a token. `None` (the default) takes the narrowest that holds the vocabulary.
    pub width: Option<TokenWidth>,
    /// How many threads tokenize. `None` (the default): one a core. The tokens are the same.
    pub threads: Option<usize>,
    /// Shows a progress bar on standard error, when that is a terminal. Default: true.
    pub progress: bool,
}

impl Default for BuildOptions {
    fn default() -> Self {
        Self {
            end_of_document: Some("<|endoftext|>".to_owned()),
            begin_of_document: None,
            max_piece_bytes: 256 << 10,
            width: None,
            threads: None,
            progress: true,
        }
    }
}

impl BuildOptions {
    /// Everything here that changes the tokens, and the version of the code that makes them.
    pub(crate) fn add_to(&self, hasher: &mut FieldHasher) {
        const VERSION: &[u8] = b"build 1";
        hasher.add(VERSION);
        hasher.add(format!("{:?}", self.end_of_document).as_bytes());
        hasher.add(format!("{:?}", self.begin_of_document).as_bytes());
        hasher.add(&(self.max_piece_bytes as u64).to_le_bytes());
        hasher.add(format!("{:?}", self.width).as_bytes());
    }
}

/// What a build did.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct BuildReport {
    /// Documents written.
    pub documents: u64,
    /// Tokens written.
    pub tokens: u64,
    /// UTF-8 bytes of their text.
    pub text_bytes: u64,
    /// How long it took.
    pub elapsed: Duration,
}

/// Tokenizes a corpus into a store at `path`.
///
/// One thread reads, the others tokenize, and the tokens are written in the corpus' order whatever
/// the number of threads. Memory does not grow with the corpus. Special tokens that stand in the
/// text, such as a literal `<|endoftext|>`, are tokenized as ordinary text: only the builder puts
/// special tokens. Truncation and padding of the tokenizer are switched off.
///
/// [`crate::build_tokens`] does the same with a cache.
///
/// # Errors
/// When a file cannot be read, changed since the corpus was listed or holds a broken record; when
/// the tokenizer lacks `end_of_document` or fails; when the disk refuses. Nothing is left at `path`
/// then.
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
/// It streams as [`build_tokens_to`] does: memory does not grow with the dataset, and the tokens are
/// the same for any number of threads. Empty records are no documents. Records of other kinds become
/// texts by [`crate::DatasetExt::map`]. [`crate::build_dataset_tokens`] does the same with a cache.
///
/// # Errors
/// When a record cannot be read, and as [`build_tokens_to`].
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
    build_with_source(path.as_ref(), &Texts(dataset), tokenizer, options, unknown)
}

/// Documents in pieces, and how many there are, for the progress bar.
pub(crate) trait Pieces: Sync {
    /// Hands all pieces to `sink` in order, until it says `false`.
    fn for_each(
        &self,
        max_bytes: usize,
        threads: usize,
        sink: &mut dyn FnMut(Piece) -> bool,
    ) -> Result<()>;

    fn progress(&self) -> ProgressBar;
}

impl Pieces for Corpus {
    fn for_each(
        &self,
        max_bytes: usize,
        _threads: usize,
        sink: &mut dyn FnMut(Piece) -> bool,
    ) -> Result<()> {
        for_each_piece(self, max_bytes, sink)
    }

    fn progress(&self) -> ProgressBar {
        // Draws on standard error, and nothing at all where that is no terminal.
        let template =
            "tokenizing {wide_bar} {bytes}/{total_bytes} of {msg} · {bytes_per_sec} · {eta} left";
        let style =
            ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar());
        let files = format!("{} files", self.files().len());
        ProgressBar::new(self.total_bytes())
            .with_style(style)
            .with_message(files)
    }
}

/// The records of a dataset as documents.
pub(crate) struct Texts<'a, D: ?Sized>(pub(crate) &'a D);

impl<D: Dataset<Item = String> + ?Sized> Pieces for Texts<'_, D> {
    fn for_each(
        &self,
        max_bytes: usize,
        threads: usize,
        sink: &mut dyn FnMut(Piece) -> bool,
    ) -> Result<()> {
        // So many records are read at a time. Reading is little beside tokenizing, unless records are
        // parsed: a quarter of the threads keeps up.
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
                if !cut_into_pieces(text, max_bytes, 1, sink) {
                    // Tokenizing has failed with an error of its own, which is the one that counts.
                    return Err(Error::WorkerPanicked);
                }
            }
            Ok(())
        })
    }

    fn progress(&self) -> ProgressBar {
        let template = "tokenizing {wide_bar} {pos}/{len} records · {eta} left";
        let style =
            ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar());
        ProgressBar::new(self.0.len() as u64).with_style(style)
    }
}

pub(crate) fn build_with_source(
    path: &Path,
    corpus: &(impl Pieces + ?Sized),
    tokenizer: &Tokenizer,
    options: &BuildOptions,
    source: Sha256Digest,
) -> Result<(TokenStore, BuildReport)> {
    let started = Instant::now();
    if options.max_piece_bytes < MIN_PIECE_BYTES {
        return Err(Error::InvalidOption {
            option: "max_piece_bytes",
            value: options.max_piece_bytes.to_string(),
            expected: "at least 16; the default is 262144",
        });
    }
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
    let pool = rayon::ThreadPoolBuilder::new()
        .num_threads(threads)
        .thread_name(|index| format!("overdrive-tokenize-{index}"))
        .build()
        .map_err(|error| Error::Threads {
            what: "the threads that tokenize",
            problem: error.to_string(),
        })?;
    // The reader is one batch ahead: at most three are in memory, one on each side of the channel.
    let batch_bytes = (4 * options.max_piece_bytes * threads).max(1 << 20);
    std::thread::scope(|scope| -> Result<()> {
        let (sender, batches) = sync_channel(1);
        let reader = scope.spawn(move || -> Result<()> {
            let max_piece_bytes = options.max_piece_bytes;
            read_batches(corpus, max_piece_bytes, threads, batch_bytes, |batch| {
                sender.send(batch).is_ok()
            })
        });
        // The channel is closed when this is done, so a reader that waits goes on and ends.
        encode_batches(batches, &pool, &encoder, &mut sink)?;
        match reader.join() {
            Ok(result) => result,
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

/// The number of ids: one more than the largest.
fn vocab_size(tokenizer: &Tokenizer) -> u64 {
    tokenizer
        .get_vocab(true)
        .values()
        .max()
        .map_or(0, |&largest| u64::from(largest) + 1)
}

fn token_id(tokenizer: &Tokenizer, token: &str, option: &'static str) -> Result<u32> {
    tokenizer.token_to_id(token).ok_or_else(|| {
        let decoder = tokenizer.get_added_tokens_decoder();
        let mut known: Vec<_> = decoder.iter().filter(|(_, token)| token.special).collect();
        known.sort_unstable_by_key(|(id, _)| **id);
        let known: Vec<_> = known
            .iter()
            .map(|(_, token)| token.content.as_str())
            .collect();
        let known = match known.len() {
            0 => String::new(),
            _ => format!(" ({})", known.join(" ")),
        };
        Error::UnknownToken {
            token: token.to_owned(),
            option,
            known,
        }
    })
}

fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// A tokenizer set up for documents.
pub(crate) enum Encoder {
    /// GPT-2's kind, several times as fast.
    ByteLevel(Box<ByteLevelEncoder>),
    /// Any other.
    Any(Box<Tokenizer>),
}

impl Encoder {
    pub(crate) fn new(tokenizer: &Tokenizer) -> Result<Self> {
        let mut tokenizer = tokenizer.clone();
        tokenizer
            .with_truncation(None)
            .map_err(Error::tokenizer("switch truncation off"))?;
        tokenizer.with_padding(None);
        // Text is data: what looks like a special token in it is not one.
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

/// Puts pieces together to batches of about `batch_bytes`.
fn read_batches(
    corpus: &(impl Pieces + ?Sized),
    max_piece_bytes: usize,
    threads: usize,
    batch_bytes: usize,
    mut send: impl FnMut(Vec<Piece>) -> bool,
) -> Result<()> {
    // Many tiny documents are a batch too: each has a cost of its own in memory.
    const MAX_PIECES: usize = 1 << 14;
    let mut batch = Vec::new();
    let mut bytes = 0;
    corpus.for_each(max_piece_bytes, threads, &mut |piece| {
        bytes += piece.text.len();
        batch.push(piece);
        if bytes < batch_bytes && batch.len() < MAX_PIECES {
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
    batches: Receiver<Vec<Piece>>,
    pool: &rayon::ThreadPool,
    encoder: &Encoder,
    sink: &mut Sink,
) -> Result<()> {
    for batch in batches {
        let encode = |piece: &Piece| encoder.encode(&piece.text);
        let encoded: Vec<_> =
            pool.install(|| batch.par_iter().with_max_len(1).map(encode).collect());
        for (piece, tokens) in batch.iter().zip(encoded) {
            sink.push(piece, &tokens?)?;
        }
    }
    Ok(())
}

struct Sink {
    writer: TokenStoreWriter,
    begin_of_document: Option<u32>,
    end_of_document: Option<u32>,
    text_bytes: u64,
    /// Bytes of the current document so far; no piece is empty, so 0 says that none has begun.
    document_bytes: u64,
    bar: ProgressBar,
}

impl Sink {
    fn push(&mut self, piece: &Piece, tokens: &[u32]) -> Result<()> {
        if self.document_bytes == 0 {
            self.writer.push_tokens(self.begin_of_document.as_slice())?;
        }
        self.writer.push_tokens(tokens)?;
        self.document_bytes += piece.text.len() as u64;
        if piece.ends_document {
            self.writer.push_tokens(self.end_of_document.as_slice())?;
            self.writer.end_document(self.document_bytes)?;
            self.text_bytes += self.document_bytes;
            self.document_bytes = 0;
        }
        self.bar.inc(piece.file_bytes);
        Ok(())
    }
}
