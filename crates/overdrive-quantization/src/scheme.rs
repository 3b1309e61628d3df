use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::codec::code_book::Book;
use crate::{Error, Result};

/// The format of a quantized weight: the type of its codes and the elements that share a scale.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Scheme {
    /// 8-bit integers with one scale for each output; the GEMM quantizes activations to 8 bits with one scale
    /// for each token, as `torch.ao.quantization.quantize_dynamic` does.
    Int8Dynamic,
    /// 8-bit integers with one scale for each output; activations stay floating-point.
    Int8WeightOnly,
    /// 8-bit integers with one scale for each output; columns of activations with a magnitude of at least the
    /// threshold are multiplied in full precision (bitsandbytes' `load_in_8bit`; LLM.int8, Dettmers et al. 2022,
    /// arXiv:2208.07339).
    LlmInt8 {
        /// The magnitude from which on a column is an outlier; default 6.0. With 0, as in bitsandbytes, or infinity
        /// there are no outliers.
        threshold: f64,
    },
    /// Integers of 4 or 8 bits in groups along the inputs, each group with a scale and, if not symmetric, an
    /// offset.
    Grouped(GroupOptions),
    /// 4-bit codes with a code book of 16 values, the quantiles of a normal distribution, in blocks that are
    /// scaled by their largest magnitude (Dettmers et al. 2023, arXiv:2305.14314).
    Nf4(BlockOptions),
    /// The blocks of NF4 with a code book of 4-bit floats.
    Fp4(BlockOptions),
    /// 8-bit floats (e4m3) with one scale for each output.
    Fp8,
    /// 8-bit floats (e4m3) with one scale for each block of 128 outputs and 128 inputs, as DeepSeek-V3 is published.
    /// Such weights are read and written; no weight is quantized to this scheme.
    Fp8Blocks,
    /// 4-bit floats (e2m1) in blocks of 32 inputs, each with a power of two as its scale (OCP Microscaling Formats
    /// 1.0; the experts of gpt-oss).
    Mxfp4,
    /// 4-bit floats (e2m1) in blocks of 16 inputs, each with an 8-bit float (e4m3) as its scale, and one scale for the
    /// weight.
    Nvfp4,
}

/// The options of [`Scheme::Grouped`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct GroupOptions {
    /// The number of bits of a code: 4 (the default) or 8.
    pub bits: u8,
    /// The number of inputs in a group: 16, 32, 64, 128 (the default) or 256. It must divide the number of
    /// inputs.
    pub group_size: usize,
    /// If `true` (the default), the codes are symmetric about zero; otherwise each group has an offset.
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

/// The dtype of the scales of groups that this crate quantizes. Scales from files keep their dtype.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum GroupScales {
    /// f16, also for the offsets of 4-bit codes: 4.5 bits per element in groups of 32. The scales are rounded up
    /// before the codes are chosen, by up to 1/1024, or with offsets by up to 1/64, so that 0 still has a code.
    /// Scales that do not fit f16 (the largest is below 2⁻¹⁴ or above 2048) are
    /// f32.
    #[default]
    Half,
    /// f32: 5 bits per element in groups of 32. The codes equal those of compressed-tensors for an f32 model, bit
    /// for bit.
    Float,
}

/// The options of [`Scheme::Nf4`] and [`Scheme::Fp4`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct BlockOptions {
    /// The number of elements of a block, counted along the flattened weight: a power of two from 32 to 4096
    /// as in bitsandbytes, default 64. The last block may be shorter.
    pub block_size: usize,
    /// If `true` (the default), the magnitudes of the blocks are quantized as well, to 8 bits in blocks of
    /// 256.
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
    /// The common names that [`Scheme::from_str`] reads.
    pub const NAMES: [&'static str; 14] = [
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
        "mxfp4",
        "nvfp4",
    ];

    /// Checks that a weight with `inputs` inputs can be quantized with this scheme.
    ///
    /// # Errors
    /// [`Error::Common`] for a group size that is not supported or does not divide the inputs, a block size
    /// that bitsandbytes does not support, a threshold that is negative or NaN, and [`Scheme::Fp8Blocks`].
    pub fn validate(&self, inputs: i64) -> Result<()> {
        match self {
            Scheme::Grouped(options) => options.validate(inputs),
            Scheme::Nf4(options) | Scheme::Fp4(options) => options.validate(),
            Scheme::Mxfp4 | Scheme::Nvfp4 => {
                let (_, options) = self.blocks()?;
                let block = options.block_size as i64;
                if inputs % block == 0 {
                    return Ok(());
                }
                let found = format!("{self} for a weight with {inputs} inputs");
                let expected = format!(
                    "a scheme by row for inputs that are no multiple of {block}, such as fp8"
                );
                Err(Error::option("scheme", found, expected))
            }
            Scheme::Fp8Blocks => Err(self.is_only_read()),
            Scheme::LlmInt8 { threshold } if threshold.is_nan() || *threshold < 0.0 => {
                // Not `check_non_negative`: an infinite threshold is valid and means that there are no outliers.
                Err(Error::option(
                    "threshold",
                    threshold,
                    "0 or positive; 6 is the default",
                ))
            }
            _ => Ok(()),
        }
    }

    /// Returns the error for quantizing to a scheme of files.
    pub(crate) fn is_only_read(self) -> Error {
        let expected = "a scheme to quantize to, such as fp8; a weight in this scheme is read from a file, so dequantize \
                        the model before you change its weights";
        Error::option("scheme", self, expected)
    }

    /// Returns the code book of the blocks and their options; an error for a scheme without blocks.
    pub(crate) fn blocks(self) -> Result<(Book, BlockOptions)> {
        match self {
            Scheme::Nf4(options) => Ok((Book::Nf4, options)),
            Scheme::Fp4(options) => Ok((Book::Fp4, options)),
            Scheme::Mxfp4 => Ok((Book::E2m1, BlockOptions::in_eight_bits(32))),
            Scheme::Nvfp4 => Ok((Book::E2m1, BlockOptions::in_eight_bits(16))),
            other => Err(Error::option("scheme", other, "nf4, fp4, mxfp4 or nvfp4")),
        }
    }
}

impl GroupOptions {
    fn validate(&self, inputs: i64) -> Result<()> {
        if !matches!(self.bits, 4 | 8) {
            return Err(Error::option("bits", self.bits, "4 or 8"));
        }
        let size = self.group_size;
        if !matches!(size, 16 | 32 | 64 | 128 | 256) {
            return Err(Error::option("group_size", size, "16, 32, 64, 128 or 256"));
        }
        if inputs % size as i64 != 0 {
            let found = format!("{size} for a weight with {inputs} inputs");
            let expected = "a divisor of the number of inputs; use a smaller group, or a scheme by row or block";
            return Err(Error::option("group_size", found, expected));
        }
        Ok(())
    }
}

impl BlockOptions {
    /// Returns the options of blocks whose scales have 8 bits.
    const fn in_eight_bits(block_size: usize) -> Self {
        BlockOptions {
            block_size,
            double_quant: true,
        }
    }

    fn validate(&self) -> Result<()> {
        let size = self.block_size;
        if size.is_power_of_two() && (32..=4096).contains(&size) {
            return Ok(());
        }
        Err(Error::option(
            "block_size",
            size,
            "a power of two from 32 to 4096",
        ))
    }
}

/// The beginning of the name of LLM.int8() with a threshold other than 6.
const LLM_INT8_T: &str = "llm-int8-t";

/// Parses the names that [`Scheme`]'s `Display` writes: `int4` and `int8` with `-g` and the group size, and
/// `-asym` for groups with offsets; `nf4` and `fp4` with `-b` and the block size, and `-single` for no double
/// quantization; `llm-int8` with `-t` and the threshold. `fp8-blocks` is refused: it is only read from files.
impl FromStr for Scheme {
    type Err = Error;

    fn from_str(name: &str) -> Result<Scheme> {
        let unknown = || {
            let expected = format!("one of {}", Scheme::NAMES.join(", "));
            Error::option("scheme", name, expected)
        };
        let scheme = match name {
            // Before the names with options: `int8` alone is by row, `int8-g32` in groups.
            "int8" | "int8-dynamic" => Scheme::Int8Dynamic,
            "int8-weight" => Scheme::Int8WeightOnly,
            "llm-int8" => Scheme::LlmInt8 { threshold: 6.0 },
            "fp8" => Scheme::Fp8,
            "mxfp4" => Scheme::Mxfp4,
            "nvfp4" => Scheme::Nvfp4,
            _ if name.starts_with(LLM_INT8_T) => {
                let threshold = name[LLM_INT8_T.len()..].parse();
                let threshold = threshold.map_err(|_| unknown())?;
                Scheme::LlmInt8 { threshold }
            }
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
        // The number of inputs is not known yet; every group size divides 0.
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
            Scheme::LlmInt8 { threshold: 6.0 } => f.write_str("llm-int8"),
            Scheme::LlmInt8 { threshold } => write!(f, "{LLM_INT8_T}{threshold}"),
            Scheme::Grouped(options) => {
                write!(f, "int{}-g{}", options.bits, options.group_size)?;
                f.write_str(if options.symmetric { "" } else { "-asym" })
            }
            Scheme::Nf4(options) => write!(f, "nf4{options}"),
            Scheme::Fp4(options) => write!(f, "fp4{options}"),
            Scheme::Fp8 => f.write_str("fp8"),
            Scheme::Fp8Blocks => f.write_str("fp8-blocks"),
            Scheme::Mxfp4 => f.write_str("mxfp4"),
            Scheme::Nvfp4 => f.write_str("nvfp4"),
        }
    }
}

/// Writes what follows the name of the code book in [`Scheme`]'s `Display`.
impl fmt::Display for BlockOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.block_size != BlockOptions::default().block_size {
            write!(f, "-b{}", self.block_size)?;
        }
        f.write_str(if self.double_quant { "" } else { "-single" })
    }
}
