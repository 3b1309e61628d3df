//! The training tasks: a language model from scratch, fine-tuning, and training on preferences.

mod finetune;
mod language_model;
mod preference;

pub use finetune::{
    FinetuneMethod, FinetuneModel, FinetuneResults, FinetuneTask, Finetuned, InstructionData,
    MethodComparison, TemplateFormat, TrainingMemory,
};
pub use language_model::{
    TrainingResults, batch_loss, decoder_shape, describe_model, evaluate, model_flops, new_model,
    snapshot_files, write_results,
};
pub use preference::{
    DpoConfig, DpoLossType, DpoOutput, PreferenceBatch, PreferenceData, PreferenceExample,
    PreferenceLogProbs, PreferenceTask, RewardMetrics, RewardTotals, collate_preferences, dpo_loss,
    preference_log_probs,
};
