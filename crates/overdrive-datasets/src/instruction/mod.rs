//! Questions and answers to fine-tune on: records become tokens and labels when they are asked for.

mod batches;
mod chat;
mod dataset;
mod encoder;
mod epoch;
mod record;
mod record_file;
#[cfg(feature = "tch")]
mod tensor_batches;

pub use batches::{CollateOptions, InstructionBatch, InstructionBatches, Layout};
pub use chat::{ChatFormat, ChatMessage, PlainChat, RenderedChat};
pub use dataset::{InstructionDataset, InstructionOptions, InstructionReport, OnBadRecord};
pub use encoder::{EncodeOptions, InstructionEncoder, TokenizedExample};
pub use record::InstructionRecord;
#[cfg(feature = "tch")]
pub use tensor_batches::{InstructionTensorBatches, InstructionTensors};
