use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// The modules that get an adapter.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum TargetModules {
    /// Names of modules, complete or only their last components: `q_proj` selects
    /// `model.layers.0.self_attn.q_proj`.
    Names(Vec<String>),
    /// A regular expression in Python's syntax that matches the whole name.
    Pattern(String),
    /// Every linear layer except the head, and those that are
    /// [unknown to PEFT](overdrive_nn::AdapterHost::is_unknown_to_peft).
    AllLinear,
}

impl TargetModules {
    /// Makes a list of names.
    pub fn names<S: Into<String>>(names: impl IntoIterator<Item = S>) -> TargetModules {
        TargetModules::Names(names.into_iter().map(Into::into).collect())
    }
}

impl From<&str> for TargetModules {
    /// Reads a string as PEFT does: `all-linear` in upper or lower case, or else a pattern.
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
#[serde(untagged, expecting = "a string or a list of strings")]
pub enum Names {
    /// One name, which PEFT reads as a regular expression.
    One(String),
    /// Several names.
    Many(Vec<String>),
}

impl Names {
    /// Returns `true` if there is none.
    pub fn is_empty(&self) -> bool {
        match self {
            Names::One(name) => name.is_empty(),
            Names::Many(names) => names.is_empty(),
        }
    }
}

/// The tokens whose rows of an embedding or a head are trained.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged, expecting = "a list of token ids, or one for each module")]
pub enum TokenIndices {
    /// Those of the embedding.
    OfEmbedding(Vec<i64>),
    /// Those of each module, by its name or its last components.
    OfModules(BTreeMap<String, Vec<i64>>),
}

/// The index of one layer, or several indices.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged, expecting = "an index or a list of indices")]
pub enum LayerIndices {
    /// One index.
    One(u64),
    /// Several indices; an empty list means all.
    Many(Vec<u64>),
}
