//! The configuration of a run of preference training.

use overdrive_core::{check_option, check_positive};
use serde::{Deserialize, Serialize};

use super::choices::DpoLossType;
use super::finetune::FinetuneArguments;
use super::key::Harmless::Only;
use super::key::options;
use crate::Result;

options! {
    /// The options of [`dpo_loss`](crate::dpo_loss), under the keys of TRL's `DPOConfig` and with its defaults.
    #[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
    #[serde(default, deny_unknown_fields)]
    pub struct DpoConfig, keys PREFERENCE in "" {
        "Preferences" => {
            /// The weight of the deviation from the reference model: larger values keep the model closer to it; tau in
            /// IPO. Default 0.1.
            beta: f64 = 0.1 => DPO("X", harmless: Only(&["0.1"]));
            /// The loss of a pair. Default `sigmoid`.
            loss_type: DpoLossType = DpoLossType::Sigmoid => DPO("NAME", harmless: Only(&["\"nll\"", "\"chunked_nll\""]));
            /// The probability that the answers of a pair are swapped, at least 0 and below 0.5, for
            /// `loss_type: robust`. Default 0.
            label_smoothing: f64 = 0.0 => DPO("P", harmless: Only(&["0"]));
            /// If `true`, turn off the dropouts of the model and of its adapters. Default `true`.
            disable_dropout: bool = true => DPO("");
        }
    }
}

/// The means of the rewards of pairs, under the names of TRL: of the chosen and of the rejected answers, the share of pairs
/// whose chosen answer has the larger reward, and the difference between the rewards.
pub const REWARD_METRICS: [&str; 4] = [
    "rewards/chosen",
    "rewards/rejected",
    "rewards/accuracies",
    "rewards/margins",
];

impl DpoConfig {
    /// Checks the ranges of the options.
    ///
    /// # Errors
    /// [`Error::Common`](crate::Error::Common) with the option, its value and what is allowed.
    pub fn validate(&self) -> Result<()> {
        check_positive("beta", self.beta)?;
        let smoothing = self.label_smoothing;
        match self.loss_type {
            DpoLossType::Robust => check_option(
                (0.0..0.5).contains(&smoothing),
                "label_smoothing",
                smoothing,
                "at least 0 and below 0.5",
            )?,
            _ => check_option(
                smoothing == 0.0,
                "label_smoothing",
                smoothing,
                "0 with this `loss_type`; `robust` is the sigmoid loss with label smoothing",
            )?,
        }
        Ok(())
    }
}

/// The configuration of preference training, under the keys of [`FinetuneArguments`] and [`DpoConfig`]. Files have all
/// keys at the top level.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct DpoArguments {
    /// The model, its adapters, the data and the training.
    pub finetune: FinetuneArguments,
    /// The loss.
    pub dpo: DpoConfig,
}
