//! Instruction data for fine-tuning: records are converted to tokens and labels on demand.

mod chat;
mod dataset;
mod encoder;
mod record;
mod record_file;

pub use chat::{ChatFormat, ChatMessage, PlainChat, RenderedChat};
pub use dataset::{InstructionDataset, InstructionOptions, InstructionReport, OnBadRecord};
pub use encoder::{EncodeOptions, InstructionEncoder};
pub use record::InstructionRecord;
