//! Training on preferences: pairs of a chosen and a rejected answer, and Direct Preference Optimization.

mod batch;
mod data;
mod log_probs;
mod loss;
mod rewards;
mod task;

pub use batch::{PreferenceBatch, PreferenceExample, collate_preferences};
pub use data::PreferenceData;
pub use log_probs::{PreferenceLogProbs, preference_log_probs};
pub use loss::{DpoOutput, dpo_loss};
pub use rewards::{RewardMetrics, RewardTotals};
pub use task::PreferenceTask;
