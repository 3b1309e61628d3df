//! The training tasks: a language model from scratch, fine-tuning, training on preferences, classification, sources
//! with targets, and images with texts.

mod classification;
mod finetune;
#[cfg(feature = "image")]
mod image_text;
mod language_model;
mod preference;
mod seq2seq;

pub use classification::{ClassificationTask, LabeledBatch};
pub use finetune::{
    FinetuneMethod, FinetuneModel, FinetuneResults, FinetuneTask, Finetuned, InstructionData,
    MethodComparison, TemplateFormat, TrainingMemory,
};
#[cfg(feature = "image")]
pub use image_text::{ImageTextBatch, ImageTextFormat, load_image_texts};
pub use language_model::{
    TrainingResults, batch_loss, decoder_shape, describe_model, evaluate, model_flops, new_model,
    snapshot_files, write_results,
};
pub use preference::{
    DpoOutput, PreferenceBatch, PreferenceData, PreferenceExample, PreferenceLogProbs,
    PreferenceTask, RewardMetrics, RewardTotals, collate_preferences, dpo_loss,
    preference_log_probs,
};
pub use seq2seq::{Seq2SeqPair, exact_matches, load_seq2seq};
