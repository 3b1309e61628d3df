//! Instruction data for fine-tuning: records are converted to tokens and labels on demand.

mod chat;
mod dataset;
mod encoder;
mod example_cache;
mod example_file;
mod message;
mod record;
mod scan;

pub use chat::{ChatFormat, ChatMessage, PlainChat, RenderedChat};
pub use dataset::{InstructionDataset, InstructionOptions, InstructionReport, OnBadRecord};
pub use encoder::{EncodeOptions, InstructionEncoder};
pub use example_cache::ExampleCache;
pub use record::{AnswerKey, InstructionRecord};
