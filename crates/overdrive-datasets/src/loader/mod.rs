//! Data loaders, which prepare batches in the background.

#[cfg(feature = "tch")]
mod batch;
#[cfg(feature = "tch")]
mod collate;
mod data_loader;
#[cfg(feature = "tch")]
mod device_loader;
#[cfg(all(feature = "tch", feature = "image"))]
mod images;
mod options;
#[cfg(feature = "tch")]
mod seq2seq;
mod sequence_rows;
#[cfg(feature = "tch")]
mod speech;
mod workers;

#[cfg(feature = "tch")]
pub use batch::Batch;
#[cfg(feature = "tch")]
pub use collate::{RowLayout, collate, collate_masked};
pub use data_loader::{DataLoader, Epoch, LoaderState, LoaderStats};
#[cfg(feature = "tch")]
pub use device_loader::{DeviceLoader, OnDevice};
#[cfg(all(feature = "tch", feature = "image"))]
pub use images::{ImageBatch, collate_captions, collate_images};
pub use options::{DataLoaderOptions, WorkerOptions};
#[cfg(feature = "tch")]
pub use seq2seq::{Seq2SeqBatch, Seq2SeqExample, Seq2SeqPadding, collate_seq2seq};
pub use sequence_rows::SequenceRows;
#[cfg(feature = "tch")]
pub use speech::{SpeechBatch, SpeechExample, collate_speech};
