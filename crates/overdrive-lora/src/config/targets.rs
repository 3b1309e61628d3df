use serde::{Deserialize, Serialize};

/// Which modules an adapter is for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum TargetModules {
    /// Names, each of a whole module or of its last parts: `q_proj` is `model.layers.0.self_attn.q_proj`.
    Names(Vec<String>),
    /// A regular expression (Python's syntax) of the whole name.
    Pattern(String),
    /// Every linear map but the head.
    AllLinear,
}

impl TargetModules {
    /// Names.
    pub fn names<S: Into<String>>(names: impl IntoIterator<Item = S>) -> TargetModules {
        TargetModules::Names(names.into_iter().map(Into::into).collect())
    }
}

impl From<&str> for TargetModules {
    /// `all-linear` in any case, or a pattern: as PEFT takes a string.
    fn from(text: &str) -> TargetModules {
        if text.to_lowercase() == "all-linear" {
            TargetModules::AllLinear
        } else {
            TargetModules::Pattern(text.to_owned())
        }
    }
}

/// One name or pattern, or several.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Names {
    /// One, which PEFT takes as a regular expression.
    One(String),
    /// Several.
    Many(Vec<String>),
}

impl Names {
    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        match self {
            Names::One(name) => name.is_empty(),
            Names::Many(names) => names.is_empty(),
        }
    }
}

/// One layer, or several.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum LayerIndices {
    /// One.
    One(u64),
    /// Several; an empty list means all.
    Many(Vec<u64>),
}
