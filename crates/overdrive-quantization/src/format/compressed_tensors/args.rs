use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::codec::fp8;
use crate::{GroupOptions, Scheme};

/// A group of modules with the same quantization.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ConfigGroup {
    /// The names of the modules, regular expressions after `re:`, and classes: `Linear` is any linear layer.
    pub targets: Vec<String>,
    /// The quantization of the weights.
    #[serde(default)]
    pub weights: Option<QuantizationArgs>,
    /// The quantization of the activations.
    #[serde(default)]
    pub input_activations: Option<QuantizationArgs>,
    /// The quantization of the outputs.
    #[serde(default)]
    pub output_activations: Option<QuantizationArgs>,
    /// The layout of this group.
    #[serde(default)]
    pub format: Option<String>,
    /// The other keys of the object.
    #[serde(flatten)]
    pub other: Map<String, Value>,
}

/// The quantization of a tensor.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct QuantizationArgs {
    /// The number of bits of a code; default 8.
    #[serde(default = "eight")]
    pub num_bits: u8,
    /// The type of the codes: `int` (the default) or `float`.
    #[serde(default = "int", rename = "type")]
    pub kind: String,
    /// If `true` (the default), the codes are symmetric about zero.
    #[serde(default = "yes")]
    pub symmetric: bool,
    /// The number of inputs of a group; -1 for one group in each row.
    #[serde(default)]
    pub group_size: Option<i64>,
    /// The elements that share a scale: `tensor`, `channel`, `group`, `tensor_group`, `block` or `token`.
    #[serde(default)]
    pub strategy: Option<String>,
    /// The outputs and inputs of a block.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub block_structure: Option<[i64; 2]>,
    /// If `true`, scales are computed while the model runs.
    #[serde(default)]
    pub dynamic: Value,
    /// The other keys of the object.
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

/// The strategies that are read.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum Strategy {
    Tensor,
    Channel,
    Group(i64),
    /// Groups whose scales have a common scale.
    TensorGroup(i64),
    /// Blocks of 128 outputs and 128 inputs.
    Block,
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
            block_structure: None,
            dynamic: Value::Bool(dynamic),
            other: Map::new(),
        }
    }

    /// Names the dtype of the scales.
    pub(super) fn with_scales_of(mut self, dtype: &str) -> Self {
        self.other.insert("scale_dtype".to_owned(), dtype.into());
        self
    }

    pub(super) fn strategy(&self) -> Option<Strategy> {
        match (self.strategy.as_deref(), self.group_size) {
            (Some("tensor") | None, None) => Some(Strategy::Tensor),
            (Some("channel"), _) | (None, Some(-1)) => Some(Strategy::Channel),
            (Some("group") | None, Some(size)) if size > 0 => Some(Strategy::Group(size)),
            (Some("tensor_group"), Some(size)) if size > 0 => Some(Strategy::TensorGroup(size)),
            (Some("block"), _) if self.block_structure == Some([fp8::BLOCK as i64; 2]) => {
                Some(Strategy::Block)
            }
            _ => None,
        }
    }
}

/// Returns the scheme of the weights; `dynamic` if activations are quantized as well.
pub(super) fn scheme_of(args: &QuantizationArgs, dynamic: bool) -> Option<Scheme> {
    let strategy = args.strategy()?;
    match (args.kind.as_str(), args.num_bits, strategy) {
        ("float", 4, Strategy::Group(32)) if args.symmetric => Some(Scheme::Mxfp4),
        ("float", 4, Strategy::TensorGroup(16)) if args.symmetric => Some(Scheme::Nvfp4),
        ("float", 8, Strategy::Tensor | Strategy::Channel) => Some(Scheme::Fp8),
        ("int", 8, Strategy::Tensor | Strategy::Channel) if args.symmetric => Some(match dynamic {
            true => Scheme::Int8Dynamic,
            false => Scheme::Int8WeightOnly,
        }),
        ("float", 8, Strategy::Block) => Some(Scheme::Fp8Blocks),
        (_, _, Strategy::TensorGroup(_) | Strategy::Block) => None,
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
