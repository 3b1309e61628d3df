//! The arguments and the data of fine-tuning: full, LoRA and QLoRA, on instruction data.

mod arguments;
mod data;

pub use arguments::{ComputeDtype, FinetuneArguments, Quant4Type, TargetModulesArgument};
pub use data::{InstructionData, TemplateFormat};
