//! Going on with a model that there is: full fine-tuning, LoRA and QLoRA on questions and answers.

mod args;
mod arguments;
mod comparison;
mod data;
mod layers;
mod memory;
mod model;
mod run;

pub use args::FinetuneArgs;
pub use arguments::{ComputeDtype, FinetuneArguments, Quant4Type, TargetModulesArgument};
pub use comparison::{Comparison, Method, compare};
pub use data::{InstructionData, TemplateFormat};
pub use layers::FinetuneLayers;
pub use memory::TrainingMemory;
pub use model::FinetuneModel;
pub use run::{FinetuneResults, finetune, finetune_in};
