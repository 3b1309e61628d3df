//! Lazy datasets over files on disk, tokenization, and data loading in the background.
//!
//! **Records of files.** [`TextLines`], [`JsonRecords`] (lines or arrays), [`CsvRecords`] and [`WebDataset`] read
//! any record of files of any size: the records' offsets are found once, on all cores, and kept in about one
//! byte per record. [`TextDataset`] tokenizes texts; cargo features add datasets of images, speech and tables.
//! [`Dataset`] is the interface of all of them and [`DatasetExt`] has the transforms; [`MapCache`] caches
//! expensive results on disk, and [`Selection::deduplicate`] removes duplicates.
//!
//! **Batches.** [`DataLoader`] prepares batches on threads, in an order that does not depend on the threads;
//! [`RandomSampler`], [`LengthGroupedBatches`] and [`TokenBudgetBatches`] choose the records of each batch.
//! `collate` converts rows of tokens ([`TokenizedExample`]: windows, documents, instruction data, packed rows)
//! to a `Batch`, and `DeviceLoader` copies it to a device.
//!
//! ```
//! use overdrive_datasets::prelude::*;
//! use overdrive_datasets::{JsonOptions, JsonRecords};
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
//! **Tokens.** [`build_tokens`] tokenizes text files into a token store, with any tokenizer or one trained on the
//! same text ([`train_bpe`]); [`TokenStore`] also opens nanoGPT's `.bin` files; [`TokenView::split`] splits by
//! document; [`RandomWindows`] draws windows for training, and [`SequentialWindows`] returns them in order for
//! evaluation.
//!
//! No function holds a corpus in memory: builds stream, and reads are memory-mapped. All randomness is a pure
//! function of a seed and an index ([`overdrive_core::random`]), so a run resumes exactly where it stopped, with
//! any number of threads or processes.
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
//! let bpe = train_bpe(corpus.sample(16 << 20), &BpeOptions { vocab_size: 300, ..BpeOptions::default() })?;
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
//! | `tokenizers` | no | [`build_tokens`], [`train_bpe`], [`TextDataset`], [`InstructionDataset`]: text as tokens |
//! | `progress` | no | a progress bar on the terminal while text is tokenized |
//! | `tch` | yes | `Batch`, `collate`, `DeviceLoader`: batches as tensors on a device |
//! | `image` | no | `ImageCaptionDataset`: images decoded and resized on demand; `ImageProcessor::decode` |
//! | `speech` | no | `SpeechDataset`: WAV, FLAC, MP3 and Ogg Vorbis decoded and resampled on demand (symphonia, MPL-2.0) |
//! | `parquet` | no | `TableRecords`: rows of Parquet and Arrow files (arrow takes minutes to compile) |
//!
//! Related: PyTorch's `Dataset`, `Sampler` and `DataLoader`, whose names and defaults are used where
//! they exist; Hugging Face `datasets` and `tokenizers` (which does the tokenizing here); WebDataset;
//! nanoGPT's `prepare.py` and `get_batch`; Megatron's indexed dataset.

#![deny(missing_docs)]

#[cfg(feature = "tokenizers")]
mod bpe;
#[cfg(feature = "tokenizers")]
mod bpe_sample;
#[cfg(feature = "tokenizers")]
mod build_tokens;
#[cfg(feature = "tokenizers")]
mod byte_level;
mod cache;
mod cargo_registry;
mod corpus;
mod dataset;
mod digest;
#[cfg(feature = "tokenizers")]
mod documents;
mod error;
mod error_policy;
mod file_state;
mod index;
#[cfg(feature = "tokenizers")]
mod instruction;
mod labeled_text;
mod llm_c;
mod loader;
mod mixture;
mod modalities;
mod packing;
pub mod prelude;
#[cfg(feature = "tokenizers")]
mod progress_bar;
mod range_source;
#[cfg(any(feature = "image", feature = "parquet", feature = "speech"))]
mod read_failure;
mod records;
mod sampling;
pub mod store_format;
mod token_documents;
mod token_masking;
mod token_store;
mod token_store_writer;
mod token_view;
mod tokenized_example;
#[cfg(feature = "tokenizers")]
mod tokenizer_files;
mod transform;
mod windows;
#[cfg(feature = "tokenizers")]
mod word_piece;

#[cfg(feature = "tokenizers")]
pub use bpe::{BpeOptions, TrainedBpe, train_bpe, train_bpe_cached};
#[cfg(feature = "tokenizers")]
pub use bpe_sample::sample_texts;
#[cfg(feature = "tokenizers")]
pub use build_tokens::{BuildOptions, BuildReport, build_dataset_tokens_to, build_tokens_to};
pub use cache::cache_dir;
#[cfg(feature = "tokenizers")]
pub use cache::{BuiltTokens, build_dataset_tokens, build_tokens};
pub use corpus::{Corpus, CorpusFile, CorpusOptions, Skipped, TextFormat};
pub use dataset::{Dataset, InMemory};
pub use digest::Sha256Digest;
pub use error::{Error, RecordNumber, Result};
pub use error_policy::{ErrorLog, ErrorPolicy};
pub use index::{IndexLocation, IndexOptions, IndexReport};
#[cfg(feature = "tokenizers")]
pub use instruction::{
    AnswerKey, ChatFormat, ChatMessage, EncodeOptions, ExampleCache, InstructionDataset,
    InstructionEncoder, InstructionOptions, InstructionRecord, InstructionReport, OnBadRecord,
    PlainChat, RenderedChat,
};
pub use labeled_text::LabeledTexts;
#[cfg(feature = "tch")]
pub use loader::{
    Batch, DeviceLoader, OnDevice, RowLayout, Seq2SeqBatch, Seq2SeqExample, Seq2SeqPadding,
    SpeechBatch, SpeechExample, collate, collate_masked, collate_seq2seq, collate_speech,
};
pub use loader::{
    DataLoader, DataLoaderOptions, Epoch, LoaderState, LoaderStats, SequenceRows, WorkerOptions,
};
#[cfg(all(feature = "tch", feature = "image"))]
pub use loader::{ImageBatch, collate_captions, collate_images};
pub use mixture::{Mixture, MixtureSampler};
#[cfg(feature = "image")]
pub use modalities::{
    CaptionedPatches, ImageAugmentation, ImageCaption, ImageCaptionDataset, ImageOptions,
    ImageResize, PatchCaptionDataset,
};
pub use modalities::{ImagePatches, ImageProcessor};
#[cfg(feature = "tch")]
pub use modalities::{LogMel, LogMelOptions};
#[cfg(feature = "speech")]
pub use modalities::{Resampling, Speech, SpeechDataset, SpeechOptions};
#[cfg(feature = "tokenizers")]
pub use modalities::{TextDataset, TextDatasetOptions, TruncationSide};
pub use overdrive_core::IGNORE_INDEX;
pub use packing::{PackPlan, PackingStrategy, Segment};
pub use range_source::{RangeSource, register_source, registered_source};
#[cfg(feature = "parquet")]
pub use records::TableRecords;
pub use records::{
    CsvColumns, CsvOptions, CsvRecords, CsvRow, FieldRecords, FieldRow, JsonLayout, JsonOptions,
    JsonRecords, RecordFiles, RecordFormat, RecordLocation, SampleBy, TextLines, TextOptions,
    WebDataset, WebSample, find_files,
};
pub use sampling::{
    BatchSampler, ConsecutiveBatches, LastShare, LengthGroupedBatches, Lengths, Permutation,
    RandomSampler, SampledBatches, Sampler, SequentialSampler, Shard, ShardedBatches,
    TokenBudgetBatches, TokenBudgetOptions,
};
pub use store_format::{FORMAT_VERSION, MAGIC, TokenWidth};
pub use token_documents::TokenDocuments;
pub use token_masking::{TokenMasking, TokenMaskingOptions};
pub use token_store::{Document, RawOptions, TokenStore};
pub use token_store_writer::{StoreOptions, TokenStoreWriter};
pub use token_view::{SplitBy, SplitOptions, TokenView};
pub use tokenized_example::TokenizedExample;
#[cfg(feature = "tokenizers")]
pub use tokenizer_files::{copy_tokenizer, load_tokenizer, save_tokenizer, tokenizer_digest};
/// The tokenizer type of Hugging Face's `tokenizers`, which this crate's functions use.
#[cfg(feature = "tokenizers")]
pub use tokenizers::Tokenizer;
pub use transform::{
    BatchedIter, BatchedMap, CacheOptions, Concat, DatasetExt, DatasetIter, DeduplicateOptions,
    Deduplicated, Exhausted, Interleave, Map, MapCache, Selection, Split,
};
pub use windows::{LastWindow, RandomWindows, SequentialWindows};
#[cfg(feature = "tokenizers")]
pub use word_piece::{encode_sequences, save_word_piece, train_word_piece};
