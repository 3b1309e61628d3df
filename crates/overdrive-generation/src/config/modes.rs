use serde::{Deserialize, Serialize};
use serde_json::Value;

/// The condition that ends a beam search; in JSON `false`, `true` or `"never"`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "Value", into = "Value")]
pub enum EarlyStopping {
    /// `false`: the best running beam, at its current length, cannot beat the worst finished one.
    #[default]
    Heuristic,
    /// `true`: `num_beams` beams have finished.
    FirstFinished,
    /// `"never"`: no running beam can beat the worst finished one at any length.
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

/// The schedule of the number of tokens that a draft model proposes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum NumAssistantTokensSchedule {
    /// The number stays the same.
    #[default]
    Constant,
    /// The number grows by two after a round in which all proposals were accepted, and shrinks by one after
    /// any other round. Every call begins with the configured number.
    #[serde(alias = "heuristic_transient")]
    Heuristic,
}

/// The scores of which log-probabilities are returned, by vLLM's names.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LogprobsMode {
    /// The scores are the model's logits, unchanged (transformers' `output_logits`).
    #[default]
    RawLogprobs,
    /// The scores are those from which the token is chosen: after penalties, biases, temperature and
    /// cuts (transformers' `output_scores`). Under greedy search temperature and cuts do not apply.
    ProcessedLogprobs,
}
