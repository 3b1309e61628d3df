use serde::{Deserialize, Serialize};
use serde_json::Value;

/// When a beam search ends; in JSON `false`, `true` or `"never"`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "Value", into = "Value")]
pub enum EarlyStopping {
    /// `false`: when the best running beam, at its present length, cannot beat the worst finished one.
    #[default]
    Heuristic,
    /// `true`: as soon as `num_beams` beams have finished.
    FirstFinished,
    /// `"never"`: when no running beam can beat the worst finished one at any length.
    Never,
}

impl TryFrom<Value> for EarlyStopping {
    type Error = &'static str;

    fn try_from(value: Value) -> Result<Self, Self::Error> {
        match &value {
            Value::Bool(false) => Ok(EarlyStopping::Heuristic),
            Value::Bool(true) => Ok(EarlyStopping::FirstFinished),
            Value::String(text) if text == "never" => Ok(EarlyStopping::Never),
            _ => Err("true, false or \"never\""),
        }
    }
}

impl From<EarlyStopping> for Value {
    fn from(early: EarlyStopping) -> Value {
        match early {
            EarlyStopping::Heuristic => Value::Bool(false),
            EarlyStopping::FirstFinished => Value::Bool(true),
            EarlyStopping::Never => Value::String("never".to_owned()),
        }
    }
}

/// How the number of tokens that a draft model proposes changes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum NumAssistantTokensSchedule {
    /// It stays.
    #[default]
    Constant,
    /// Two more after a round whose proposals were all taken, one less after any other. It begins anew
    /// with every call: nothing of one call is kept for the next.
    #[serde(alias = "heuristic_transient")]
    Heuristic,
}

/// Of which scores log-probabilities are, by vLLM's names.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LogprobsMode {
    /// Of the model's logits, as they are (transformers' `output_logits`).
    #[default]
    RawLogprobs,
    /// Of the scores from which the token is chosen: after penalties, biases, temperature and cuts
    /// (transformers' `output_scores`). Under greedy search temperature and cuts do not apply.
    ProcessedLogprobs,
}
