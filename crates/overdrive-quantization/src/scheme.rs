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
    /// Inputs of a group; default 128. 16, 32, 64, 128 or 256, and a divisor of the input width.
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

/// In what the scales of groups are kept that are quantized here. Those of files are kept as they are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum GroupScales {
    /// f16, and offsets of 4-bit codes too: 4.5 bits a weight in groups of 32. The codes belong to the
    /// rounded scales, which are up to 1/1024 larger than others, with offsets up to 1/64, so that 0 has
    /// a code still. Weights whose scales do not fit (the largest is below 2⁻¹⁴ or above 2048) have them
    /// in fp32.
    #[default]
    Half,
    /// fp32: 5 bits a weight in groups of 32. Codes are those of compressed-tensors, bit for bit, for a
    /// model in fp32.
    Float,
}

/// Blocks of [`Scheme::Nf4`] and [`Scheme::Fp4`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct BlockOptions {
    /// Weights of a block, counted along the flattened weight; default 64. As in bitsandbytes a power of
    /// two from 32 to 4096; the last block may be shorter.
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

impl Scheme {
    /// Whether a weight with `inputs` inputs can be quantized so.
    ///
    /// # Errors
    /// [`Error::BadOption`] for groups of a size that there is not or that does not divide the inputs,
    /// blocks of a size that bitsandbytes does not have, and a threshold that is negative or not a number.
    pub fn validate(&self, inputs: i64) -> Result<()> {
        match self {
            Scheme::Grouped(options) => options.validate(inputs),
            Scheme::Nf4(options) | Scheme::Fp4(options) => options.validate(),
            Scheme::LlmInt8 { threshold } if threshold.is_nan() || *threshold < 0.0 => {
                Err(Error::BadOption {
                    option: "threshold",
                    found: threshold.to_string(),
                    expected: "0 or more; 6 is the default".to_owned(),
                })
            }
            _ => Ok(()),
        }
    }
}

impl GroupOptions {
    fn validate(&self, inputs: i64) -> Result<()> {
        if !matches!(self.bits, 4 | 8) {
            return Err(Error::BadOption {
                option: "bits",
                found: self.bits.to_string(),
                expected: "4 or 8".to_owned(),
            });
        }
        let size = self.group_size;
        if !matches!(size, 16 | 32 | 64 | 128 | 256) {
            return Err(Error::BadOption {
                option: "group_size",
                found: size.to_string(),
                expected: "16, 32, 64, 128 or 256".to_owned(),
            });
        }
        if inputs % size as i64 != 0 {
            return Err(Error::BadOption {
                option: "group_size",
                found: format!("{size} for a weight with {inputs} inputs"),
                expected: "a divisor of the inputs: a smaller group, or a scheme by row or block"
                    .to_owned(),
            });
        }
        Ok(())
    }
}

impl BlockOptions {
    fn validate(&self) -> Result<()> {
        let size = self.block_size;
        if size.is_power_of_two() && (32..=4096).contains(&size) {
            return Ok(());
        }
        Err(Error::BadOption {
            option: "block_size",
            found: size.to_string(),
            expected: "a power of two from 32 to 4096".to_owned(),
        })
    }
}

/// Any name that [`Scheme`]'s `Display` writes is read back: `int4`, `int8` and the like with `-g` and the
/// size of groups, `-asym` for codes that are not about zero; `nf4` and `fp4` with `-b` and the size of
/// blocks, `-single` without double quantization.
impl FromStr for Scheme {
    type Err = Error;

    fn from_str(name: &str) -> Result<Scheme> {
        let unknown = || Error::UnknownScheme {
            name: name.to_owned(),
        };
        let scheme = match name {
            "int8" | "int8-dynamic" => Scheme::Int8Dynamic,
            "int8-weight" => Scheme::Int8WeightOnly,
            "llm-int8" => Scheme::LlmInt8 { threshold: 6.0 },
            "fp8" => Scheme::Fp8,
            _ => {
                let mut parts = name.split('-');
                match parts.next() {
                    Some("nf4") => Scheme::Nf4(block_options(parts).ok_or_else(unknown)?),
                    Some("fp4") => Scheme::Fp4(block_options(parts).ok_or_else(unknown)?),
                    Some("int4") => Scheme::Grouped(group_options(4, parts).ok_or_else(unknown)?),
                    Some("int8") => Scheme::Grouped(group_options(8, parts).ok_or_else(unknown)?),
                    _ => return Err(unknown()),
                }
            }
        };
        // No inputs: every size of groups divides 0.
        scheme.validate(0)?;
        Ok(scheme)
    }
}

fn group_options<'a>(bits: u8, parts: impl Iterator<Item = &'a str>) -> Option<GroupOptions> {
    let mut options = GroupOptions {
        bits,
        ..GroupOptions::default()
    };
    for part in parts {
        match part.strip_prefix('g') {
            Some(size) => options.group_size = size.parse().ok()?,
            None if part == "asym" => options.symmetric = false,
            None => return None,
        }
    }
    Some(options)
}

fn block_options<'a>(parts: impl Iterator<Item = &'a str>) -> Option<BlockOptions> {
    let mut options = BlockOptions::default();
    for part in parts {
        match part.strip_prefix('b') {
            Some(size) => options.block_size = size.parse().ok()?,
            None if part == "single" => options.double_quant = false,
            None => return None,
        }
    }
    Some(options)
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
            Scheme::Nf4(options) => write!(f, "nf4{options}"),
            Scheme::Fp4(options) => write!(f, "fp4{options}"),
            Scheme::Fp8 => f.write_str("fp8"),
        }
    }
}

/// What follows the name of the book in [`Scheme`]'s `Display`.
impl fmt::Display for BlockOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.block_size != BlockOptions::default().block_size {
            write!(f, "-b{}", self.block_size)?;
        }
        f.write_str(if self.double_quant { "" } else { "-single" })
    }
}
