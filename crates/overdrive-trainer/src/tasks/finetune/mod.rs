//! Fine-tuning: full, LoRA and QLoRA, on instruction data.

mod comparison;
mod data;
mod memory;
mod model;
mod results;
mod task;

pub use comparison::{FinetuneMethod, MethodComparison};
pub use data::{InstructionData, TemplateFormat};
pub(crate) use data::{RecordReader, without_duplicates};
pub use memory::TrainingMemory;
pub use model::FinetuneModel;
pub use results::{FinetuneResults, Finetuned};
pub use task::FinetuneTask;
pub(crate) use task::{LoadedModel, Measured};
