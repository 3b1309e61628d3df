//! Fine-tuning of a pre-trained model on questions and answers: full, LoRA and QLoRA.

mod arguments;
mod comparison;
mod data;
mod memory;
mod model;
mod run;

pub use arguments::{ComputeDtype, FinetuneArguments, Quant4Type, TargetModulesArgument};
pub use comparison::{Comparison, Method, compare};
pub use data::{InstructionData, TemplateFormat};
pub use memory::TrainingMemory;
pub use model::FinetuneModel;
pub use run::{FinetuneResults, finetune, finetune_in};
