use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::{Error, Result};

/// How the weight of a linear map is kept.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Scheme {
    /// 8-bit integers with one scale an output; activations are quantized to 8 bits token by token when
    /// the product is made. What `torch.ao.quantization.quantize_dynamic` does.
    Int8Dynamic,
    /// The same weights; activations as they are.
    Int8WeightOnly,
    /// The same weights; columns of activations with a number beyond the threshold are multiplied in
    /// full precision (LLM.int8, Dettmers et al. 2022, arXiv:2208.07339). bitsandbytes' `load_in_8bit`.
    LlmInt8 {
        /// Default 6.0.
        threshold: f64,
    },
    /// Integers of 4 or 8 bits in groups along the input, each with its scale and, where not symmetric,
    /// its offset.
    Grouped(GroupOptions),
    /// One of 16 numbers a weight, those of a normal distribution's quantiles, in blocks with their
    /// largest magnitude (Dettmers et al. 2023, arXiv:2305.14314).
    Nf4(BlockOptions),
    /// The same blocks with 4-bit floats.
    Fp4(BlockOptions),
    /// 8-bit floats (e4m3) with one scale an output.
    Fp8,
}

/// Groups of [`Scheme::Grouped`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct GroupOptions {
    /// 4 (the default) or 8.
    pub bits: u8,
    /// Inputs of a group; default 128. 16 to 256, a power of two, and a divisor of the input width.
    pub group_size: usize,
    /// Whether codes are about zero; default true. Otherwise each group has an offset of its own.
    pub symmetric: bool,
}

impl Default for GroupOptions {
    fn default() -> Self {
        GroupOptions {
            bits: 4,
            group_size: 128,
            symmetric: true,
        }
    }
}

/// Blocks of [`Scheme::Nf4`] and [`Scheme::Fp4`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct BlockOptions {
    /// Weights of a block, counted along the flattened weight; default 64, as in bitsandbytes.
    pub block_size: usize,
    /// Whether the blocks' magnitudes are quantized in their turn, to 8 bits in blocks of 256; default
    /// true.
    pub double_quant: bool,
}

impl Default for BlockOptions {
    fn default() -> Self {
        BlockOptions {
            block_size: 64,
            double_quant: true,
        }
    }
}

impl Scheme {
    /// The names that [`Scheme::from_str`] takes, with the defaults of each.
    pub const NAMES: [&'static str; 12] = [
        "int8",
        "int8-weight",
        "llm-int8",
        "int4",
        "int4-g32",
        "int4-g64",
        "int4-g128",
        "int4-asym",
        "nf4",
        "nf4-single",
        "fp4",
        "fp8",
    ];
}

impl FromStr for Scheme {
    type Err = Error;

    fn from_str(name: &str) -> Result<Scheme> {
        let grouped = |group_size, symmetric| {
            Scheme::Grouped(GroupOptions {
                bits: 4,
                group_size,
                symmetric,
            })
        };
        Ok(match name {
            "int8" | "int8-dynamic" => Scheme::Int8Dynamic,
            "int8-weight" => Scheme::Int8WeightOnly,
            "llm-int8" => Scheme::LlmInt8 { threshold: 6.0 },
            "int4" | "int4-g128" => grouped(128, true),
            "int4-g64" => grouped(64, true),
            "int4-g32" => grouped(32, true),
            "int4-asym" => grouped(128, false),
            "nf4" => Scheme::Nf4(BlockOptions::default()),
            "nf4-single" => Scheme::Nf4(BlockOptions {
                double_quant: false,
                ..BlockOptions::default()
            }),
            "fp4" => Scheme::Fp4(BlockOptions::default()),
            "fp8" => Scheme::Fp8,
            _ => {
                return Err(Error::UnknownScheme {
                    name: name.to_owned(),
                });
            }
        })
    }
}

impl fmt::Display for Scheme {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Scheme::Int8Dynamic => f.write_str("int8"),
            Scheme::Int8WeightOnly => f.write_str("int8-weight"),
            Scheme::LlmInt8 { .. } => f.write_str("llm-int8"),
            Scheme::Grouped(options) => {
                write!(f, "int{}-g{}", options.bits, options.group_size)?;
                f.write_str(if options.symmetric { "" } else { "-asym" })
            }
            Scheme::Nf4(options) => {
                f.write_str("nf4")?;
                f.write_str(if options.double_quant { "" } else { "-single" })
            }
            Scheme::Fp4(options) => {
                f.write_str("fp4")?;
                f.write_str(if options.double_quant { "" } else { "-single" })
            }
            Scheme::Fp8 => f.write_str("fp8"),
        }
    }
}
