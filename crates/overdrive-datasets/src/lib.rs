//! Data that stays on disk, and batches that are ready before they are asked for.
//!
//! **Records of files.** [`TextLines`], [`JsonRecords`] (lines or arrays), [`CsvRecords`] and
//! [`WebDataset`] read any record of files of any size: where the records are is found once, on all
//! cores, and kept in about one byte a record. [`TextDataset`] makes tokens of them; with features,
//! there are datasets of images, speech and tables. What every dataset gives is [`Dataset`], what can be
//! made of one [`DatasetExt`]; [`MapCache`] keeps what is expensive to compute, and
//! [`Selection::deduplicate`] leaves out what is there already.
//!
//! **Batches.** [`DataLoader`] prepares them on threads, in an order that does not depend on them;
//! [`RandomSampler`], [`LengthGroupedBatches`] and [`TokenBudgetBatches`] say which records they have.
//! Rows of tokens ([`TokenizedExample`]: windows, documents, instruction data, packed rows) all become
//! a `Batch` by `collate`, and `DeviceLoader` brings it to a device.
//!
//! ```
//! use overdrive_datasets::{DataLoader, DataLoaderOptions, JsonOptions, JsonRecords};
//! # let dir = tempfile::tempdir().unwrap();
//! # let path = dir.path().join("pairs.jsonl");
//! # std::fs::write(&path, "{\"prompt\": \"2+2?\", \"response\": \"4\"}\n".repeat(10)).unwrap();
//! #[derive(serde::Deserialize)]
//! struct Pair { prompt: String, response: String }
//!
//! let pairs = JsonRecords::<Pair>::open([&path], &JsonOptions::default())?;
//! let options = DataLoaderOptions { batch_size: 4, shuffle: true, num_workers: 2, ..Default::default() };
//! let mut loader = DataLoader::new(pairs, options)?;
//! for batch in loader.epoch() {
//!     let batch: Vec<Pair> = batch?;
//!     assert!(batch.iter().all(|pair| pair.response == "4" && pair.prompt == "2+2?"));
//! }
//! # Ok::<(), overdrive_datasets::Error>(())
//! ```
//!
//! **Tokens.** Files of text become a token file ([`build_tokens`]), with a tokenizer of your own or
//! one trained on the same text ([`train_bpe`]); nanoGPT's `.bin` files open as they are
//! ([`TokenStore`]); [`TokenView::split`] splits by document; [`RandomWindows`] draws for training,
//! [`SequentialWindows`] goes through in order for evaluation.
//!
//! Nothing here holds a corpus in memory: building streams, reading maps. Everything that is random
//! is a pure function of a seed and a number ([`overdrive_core::random`]), so a run continues exactly where it
//! stopped, with any number of threads or processes.
//!
//! ```
//! use overdrive_datasets::{
//!     BpeOptions, BuildOptions, Corpus, CorpusOptions, DataLoader, DataLoaderOptions,
//!     RandomWindows, SplitOptions, TokenView, build_tokens, train_bpe,
//! };
//! # fn main() -> overdrive_datasets::Result<()> {
//! # let dir = tempfile::tempdir().unwrap();
//! # for i in 0..40 {
//! #     let text = format!("Document {i}: the quick brown fox jumps over the lazy dog.\n").repeat(5);
//! #     std::fs::write(dir.path().join(format!("{i}.txt")), text).unwrap();
//! # }
//! # let (text_dir, cache_dir) = (dir.path(), &dir.path().join("cache"));
//! let corpus = Corpus::from_paths([text_dir], &CorpusOptions::default())?;
//! let bpe = train_bpe(&corpus, &BpeOptions { vocab_size: 300, ..BpeOptions::default() })?;
//! let built = build_tokens(&corpus, &bpe.tokenizer, &BuildOptions::default(), cache_dir)?;
//!
//! let all = TokenView::new(built.store);
//! let (train, validation) = all.split(&SplitOptions { validation_fraction: 0.1, ..Default::default() })?;
//! let windows = RandomWindows::new(train, 32, 1337)?;
//! let mut loader = DataLoader::new(windows, DataLoaderOptions { batch_size: 4, ..Default::default() })?;
//! let batch = loader.next_batch().expect("random windows never end")?;
//! assert_eq!((batch.len(), batch[0].input_ids.len(), batch[0].learned_tokens()), (4, 32, 31));
//! # assert!(!validation.is_empty());
//! # Ok(())
//! # }
//! ```
//!
//! | feature | default | adds |
//! |---|---|---|
//! | `tch` | yes | `Batch`, `collate`, `DeviceLoader`: batches as tensors on a device |
//! | `image` | no | `ImageCaptionDataset`: images decoded and resized when they are asked for |
//! | `speech` | no | `SpeechDataset`: WAV, FLAC, MP3 and Ogg Vorbis decoded and resampled when asked for (symphonia, MPL-2.0) |
//! | `parquet` | no | `TableRecords`: rows of Parquet and Arrow files (arrow takes minutes to compile) |
//!
//! Related: PyTorch's `Dataset`, `Sampler` and `DataLoader`, whose names and defaults are used where
//! they exist; Hugging Face `datasets` and `tokenizers` (which does the tokenizing here); WebDataset;
//! nanoGPT's `prepare.py` and `get_batch`; Megatron's indexed dataset.

#![deny(missing_docs)]

mod bpe;
mod bpe_sample;
mod build;
mod byte_level;
mod cache;
mod cargo_registry;
mod corpus;
mod dataset;
mod digest;
mod documents;
mod error;
mod error_policy;
mod index;
mod instruction;
mod loader;
mod mmap;
mod packing;
mod records;
mod sampling;
pub mod store_format;
mod token_documents;
mod token_store;
mod token_store_writer;
mod token_view;
mod tokenized_example;
mod tokenizer_files;
mod transform;
mod typed;
mod windows;

pub use bpe::{BpeOptions, TrainedBpe, train_bpe, train_bpe_cached};
pub use build::{BuildOptions, BuildReport, build_dataset_tokens_to, build_tokens_to};
pub use cache::{BuiltTokens, build_dataset_tokens, build_tokens, default_cache_dir};
pub use corpus::{Corpus, CorpusFile, CorpusOptions, Skipped, TextFormat};
pub use dataset::Dataset;
pub use digest::Sha256Digest;
pub use error::{Error, Result};
pub use error_policy::{ErrorLog, ErrorPolicy};
pub use index::{IndexLocation, IndexOptions, IndexReport};
pub use instruction::{
    ChatFormat, ChatMessage, EncodeOptions, InstructionDataset, InstructionEncoder,
    InstructionOptions, InstructionRecord, InstructionReport, OnBadRecord, PlainChat, RenderedChat,
};
#[cfg(feature = "tch")]
pub use loader::{Batch, DeviceLoader, OnDevice, RowLayout, collate};
pub use loader::{DataLoader, DataLoaderOptions, Epoch, LoaderState, LoaderStats, SequenceRows};
pub use packing::{PackPlan, PackingStrategy, Segment};
#[cfg(feature = "parquet")]
pub use records::TableRecords;
pub use records::{
    CsvColumns, CsvOptions, CsvRecords, CsvRow, JsonLayout, JsonOptions, JsonRecords, Place,
    RecordFiles, SampleBy, TextLines, TextOptions, WebDataset, WebSample, find_files,
};
pub use sampling::{
    BatchSampler, ConsecutiveBatches, LastShare, LengthGroupedBatches, Lengths, Permutation,
    RandomSampler, SampledBatches, Sampler, SequentialSampler, Shard, ShardedBatches,
    TokenBudgetBatches, TokenBudgetOptions,
};
pub use store_format::{FORMAT_VERSION, MAGIC, TokenWidth};
pub use token_documents::TokenDocuments;
pub use token_store::{Document, RawOptions, TokenStore};
pub use token_store_writer::{StoreOptions, TokenStoreWriter};
pub use token_view::{SplitBy, SplitOptions, TokenView};
pub use tokenized_example::{IGNORE_INDEX, TokenizedExample};
pub use tokenizer_files::{load_tokenizer, save_tokenizer, tokenizer_digest};
/// The tokenizer of Hugging Face's `tokenizers`, which this crate's functions take and give.
pub use tokenizers::Tokenizer;
pub use transform::{
    CacheOptions, Concat, DatasetExt, DatasetIter, DeduplicateOptions, Deduplicated, Exhausted,
    Interleave, Map, MapCache, Selection, Split,
};
#[cfg(feature = "image")]
pub use typed::{ImageCaption, ImageCaptionDataset, ImageOptions, ImageResize};
#[cfg(feature = "speech")]
pub use typed::{Resampling, Speech, SpeechDataset, SpeechOptions};
pub use typed::{TextDataset, TextDatasetOptions, TruncationSide};
pub use windows::{LastWindow, RandomWindows, SequentialWindows};
