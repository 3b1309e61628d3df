//! The arguments and the data of fine-tuning: full, LoRA and QLoRA, on instruction data.

mod arguments;
mod comparison;
mod data;
mod memory;
mod model;
mod results;
mod task;

pub use arguments::{ComputeDtype, FinetuneArguments, Quant4Type, TargetModulesArgument};
pub use comparison::{FinetuneMethod, MethodComparison};
pub use data::{InstructionData, TemplateFormat};
pub(crate) use data::{RecordReader, loading, without_duplicates};
pub use memory::TrainingMemory;
pub use model::FinetuneModel;
pub use results::{FinetuneResults, Finetuned};
pub use task::FinetuneTask;
pub(crate) use task::LoadedModel;
