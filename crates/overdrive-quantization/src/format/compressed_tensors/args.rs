use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::{GroupOptions, Scheme};

/// Modules that are quantized alike.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ConfigGroup {
    /// Names, regular expressions after `re:`, and classes: `Linear` is any.
    pub targets: Vec<String>,
    /// How weights are quantized.
    #[serde(default)]
    pub weights: Option<QuantizationArgs>,
    /// How activations are.
    #[serde(default)]
    pub input_activations: Option<QuantizationArgs>,
    /// How results are.
    #[serde(default)]
    pub output_activations: Option<QuantizationArgs>,
    /// The layout of this group.
    #[serde(default)]
    pub format: Option<String>,
    /// What else is in the object.
    #[serde(flatten)]
    pub other: Map<String, Value>,
}

/// How numbers are quantized.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct QuantizationArgs {
    /// Bits of a code; default 8.
    #[serde(default = "eight")]
    pub num_bits: u8,
    /// `int` (the default) or `float`.
    #[serde(default = "int", rename = "type")]
    pub kind: String,
    /// Whether codes are about zero; default true.
    #[serde(default = "yes")]
    pub symmetric: bool,
    /// Inputs of a group; -1 for one group a row.
    #[serde(default)]
    pub group_size: Option<i64>,
    /// What shares a scale: `tensor`, `channel`, `group`, `block` or `token`.
    #[serde(default)]
    pub strategy: Option<String>,
    /// `true` where scales are found as numbers come.
    #[serde(default)]
    pub dynamic: Value,
    /// What else is in the object.
    #[serde(flatten)]
    pub other: Map<String, Value>,
}

fn eight() -> u8 {
    8
}

fn int() -> String {
    "int".to_owned()
}

fn yes() -> bool {
    true
}

/// What shares a scale, of those that are read.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum Strategy {
    Tensor,
    Channel,
    Group(i64),
}

impl QuantizationArgs {
    pub(super) fn of(
        num_bits: u8,
        kind: &str,
        symmetric: bool,
        strategy: &str,
        group: Option<i64>,
    ) -> Self {
        let dynamic = strategy == "token";
        QuantizationArgs {
            num_bits,
            kind: kind.to_owned(),
            symmetric,
            group_size: group,
            strategy: Some(strategy.to_owned()),
            dynamic: Value::Bool(dynamic),
            other: Map::new(),
        }
    }

    pub(super) fn strategy(&self) -> Option<Strategy> {
        match (self.strategy.as_deref(), self.group_size) {
            (Some("tensor") | None, None) => Some(Strategy::Tensor),
            (Some("channel"), _) | (None, Some(-1)) => Some(Strategy::Channel),
            (Some("group") | None, Some(size)) if size > 0 => Some(Strategy::Group(size)),
            _ => None,
        }
    }
}

/// The scheme of weights; `dynamic`: activations are quantized too.
pub(super) fn scheme_of(args: &QuantizationArgs, dynamic: bool) -> Option<Scheme> {
    let strategy = args.strategy()?;
    match (args.kind.as_str(), args.num_bits, strategy) {
        ("float", 8, Strategy::Tensor | Strategy::Channel) => Some(Scheme::Fp8),
        ("int", 8, Strategy::Tensor | Strategy::Channel) if args.symmetric => Some(match dynamic {
            true => Scheme::Int8Dynamic,
            false => Scheme::Int8WeightOnly,
        }),
        ("int", 4 | 8, _) => Some(Scheme::Grouped(GroupOptions {
            bits: args.num_bits,
            group_size: match strategy {
                Strategy::Group(size) => usize::try_from(size).ok()?,
                _ => GroupOptions::default().group_size,
            },
            symmetric: args.symmetric,
        })),
        _ => None,
    }
}
