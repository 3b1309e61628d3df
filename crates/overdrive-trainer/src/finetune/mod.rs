//! The arguments and the data of fine-tuning: full, LoRA and QLoRA, on questions and answers.

mod args;
mod arguments;
mod data;
mod layers;

pub use args::FinetuneArgs;
pub use arguments::{ComputeDtype, FinetuneArguments, Quant4Type, TargetModulesArgument};
pub use data::{InstructionData, TemplateFormat};
pub use layers::FinetuneLayers;
