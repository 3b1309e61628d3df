//! Questions and answers to fine-tune on: records become tokens and labels when they are asked for.

mod chat;
mod dataset;
mod encoder;
mod record;
mod record_file;

pub use chat::{ChatFormat, ChatMessage, PlainChat, RenderedChat};
pub use dataset::{InstructionDataset, InstructionOptions, InstructionReport, OnBadRecord};
pub use encoder::{EncodeOptions, InstructionEncoder};
pub use record::InstructionRecord;
