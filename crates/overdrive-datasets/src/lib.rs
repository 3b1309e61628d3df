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
//! [`RandomSampler`], [`LengthGroupedBatches`] and [`TokenBudgetBatches`] say which records they have;
//! [`pad_sequences`] makes blocks of them.
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
//! is a pure function of a seed and a number ([`random`]), so a run continues exactly where it
//! stopped, with any number of threads or processes.
//!
//! ```
//! use overdrive_datasets::{
//!     BatchOptions, Batches, BpeOptions, BuildOptions, Corpus, CorpusOptions, RandomWindows,
//!     SplitOptions, TokenView, build_tokens, train_bpe,
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
//! let mut batches = Batches::new(windows, BatchOptions { micro_batch_size: 4, ..Default::default() })?;
//! let batch = batches.next().expect("random windows never end")?;
//! assert_eq!(batch.input_ids[1..32], batch.labels[..31]);
//! # assert!(!validation.is_empty());
//! # Ok(())
//! # }
//! ```
//!
//! | feature | default | adds |
//! |---|---|---|
//! | `tch` | yes | `DeviceLoader`, `PaddedTensors`, `TokenBatches`: batches as tensors on a device |
//! | `image` | no | `ImageCaptionDataset`: images decoded and resized when they are asked for |
//! | `speech` | no | `SpeechDataset`: WAV, FLAC, MP3 and Ogg Vorbis decoded and resampled when asked for (symphonia, MPL-2.0) |
//! | `parquet` | no | `TableRecords`: rows of Parquet and Arrow files (arrow takes minutes to compile) |
//!
//! Related: PyTorch's `Dataset`, `Sampler` and `DataLoader`, whose names and defaults are used where
//! they exist; Hugging Face `datasets` and `tokenizers` (which does the tokenizing here); WebDataset;
//! nanoGPT's `prepare.py` and `get_batch`; Megatron's indexed dataset.

#![deny(missing_docs)]

mod batches;
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
mod prefetch;
pub mod random;
mod records;
mod sampling;
pub mod store_format;
#[cfg(feature = "tch")]
mod tensor_batches;
mod token_store;
mod token_store_writer;
mod token_view;
mod tokenizer_files;
mod transform;
mod typed;
mod windows;

pub use batches::{BatchOptions, BatchState, Batches, WindowBatch};
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
    ChatFormat, ChatMessage, CollateOptions, EncodeOptions, InstructionBatch, InstructionBatches,
    InstructionDataset, InstructionEncoder, InstructionOptions, InstructionRecord,
    InstructionReport, Layout, OnBadRecord, PlainChat, RenderedChat, TokenizedExample,
};
#[cfg(feature = "tch")]
pub use instruction::{InstructionTensorBatches, InstructionTensors};
pub use loader::{
    DataLoader, DataLoaderOptions, Epoch, LoaderState, LoaderStats, PadOptions, PadSide,
    PaddedBatch, RowLayout, SequenceRows, collate_rows, pad_sequences,
};
#[cfg(feature = "tch")]
pub use loader::{DeviceLoader, OnDevice, PaddedTensors};
pub use packing::{PackPlan, PackingStrategy, Segment};
pub use prefetch::Prefetch;
pub use random::uniform_below;
#[cfg(feature = "parquet")]
pub use records::TableRecords;
pub use records::{
    CsvColumns, CsvOptions, CsvRecords, CsvRow, JsonLayout, JsonOptions, JsonRecords, Place,
    RecordFiles, SampleBy, TextLines, TextOptions, WebDataset, WebSample, find_files,
};
pub use sampling::{
    BatchSampler, LastShare, LengthGroupedBatches, Lengths, Permutation, RandomSampler,
    SampledBatches, Sampler, SequentialSampler, Shard, ShardedBatches, TokenBudgetBatches,
    TokenBudgetOptions,
};
pub use store_format::{FORMAT_VERSION, MAGIC, TokenWidth};
#[cfg(feature = "tch")]
pub use tensor_batches::{Batch, TokenBatches};
pub use token_store::{Document, RawOptions, TokenStore};
pub use token_store_writer::{StoreOptions, TokenStoreWriter};
pub use token_view::{SplitBy, SplitOptions, TokenView};
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
pub use windows::{IGNORE_INDEX, LastWindow, RandomWindows, SequentialWindows, Window, Windows};
