//! What fine-tuning needs beside the loop: the model with its adapters, and what it costs.

mod comparison;
mod memory;
mod model;
mod results;

pub use comparison::{Comparison, Method};
pub use memory::TrainingMemory;
pub use model::FinetuneModel;
pub use results::{FinetuneResults, Finetuned};
