//! The components of fine-tuning besides the loop: the model with its adapters, its memory, its results.

mod comparison;
mod memory;
mod model;
mod results;

pub use comparison::{Comparison, Method};
pub use memory::TrainingMemory;
pub use model::FinetuneModel;
pub use results::{FinetuneResults, Finetuned};
