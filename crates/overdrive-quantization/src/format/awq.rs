//! AWQ checkpoints (Lin et al. 2023, arXiv:2306.00978), as AutoAWQ writes them for its `gemm` kernels.

use overdrive_core::check_option;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use tch::Kind;

use super::packed_words::{Groups, code, words};
use super::source::{FLOATS, Module};
use crate::{Error, QuantizedWeight, Result};

/// The `quantization_config` of an AWQ checkpoint; keys as in transformers' `AwqConfig`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct AwqConfig {
    /// The number of bits of a code: 4.
    #[serde(default = "bits")]
    pub bits: u8,
    /// The number of inputs of a group; -1 for one group in each row.
    #[serde(default = "group_size")]
    pub group_size: i64,
    /// If `true`, groups have zero points.
    #[serde(default = "yes")]
    pub zero_point: bool,
    /// The layout: `gemm`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub version: Option<String>,
    /// The modules that are not quantized.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub modules_to_not_convert: Option<Vec<String>>,
    /// The other keys of the object.
    #[serde(flatten)]
    pub other: Map<String, Value>,
}

fn bits() -> u8 {
    4
}

fn group_size() -> i64 {
    128
}

fn yes() -> bool {
    true
}

/// The number of codes in a word.
const PER_WORD: usize = 8;
/// The output of each slot of a word: AWQ's kernels interleave the outputs.
const OUTPUT_AT: [usize; PER_WORD] = [0, 2, 4, 6, 1, 3, 5, 7];

impl AwqConfig {
    pub(super) const PARTS: &'static [&'static str] = &["qweight", "qzeros", "scales"];

    pub(super) fn validate(&self) -> Result<()> {
        check_option(self.bits == 4, "quantization_config.bits", self.bits, "4")?;
        match &self.version {
            Some(version) if !version.eq_ignore_ascii_case("gemm") => Err(Error::option(
                "quantization_config.version",
                version,
                "gemm",
            )),
            _ => Ok(()),
        }
    }

    pub(super) fn read(&self, module: Module<'_>) -> Result<QuantizedWeight> {
        let qweight = module.required("qweight")?;
        module.check(&qweight, "qweight", &[Kind::Int], &[None, None])?;
        // `check` has found positive dimensions, and a mapped file has as many bytes.
        let [inputs, columns] = [0, 1].map(|axis| qweight.shape()[axis].unsigned_abs() as usize);
        let outputs = columns * PER_WORD;
        // -1 is one group in each row.
        let groups = match usize::try_from(self.group_size) {
            Ok(size) if size > 0 => inputs.div_ceil(size),
            _ => 1,
        };
        let shape = [Some(groups as i64), Some(outputs as i64)];
        module.check(&module.required("scales")?, "scales", FLOATS, &shape)?;
        let scales = module.scales("scales", &shape)?.f_tr()?.f_contiguous()?;
        let zeros = match self.zero_point {
            false => None,
            true => {
                let stored = module.required("qzeros")?;
                let shape = [Some(groups as i64), Some(columns as i64)];
                module.check(&stored, "qzeros", &[Kind::Int], &shape)?;
                Some(transposed(words(&stored), groups, columns))
            }
        };
        Groups {
            bits: 4,
            outputs,
            inputs,
            codes: transposed(words(&qweight), inputs, columns),
            scales,
            zeros,
            order: None,
        }
        .build(module)
    }

    /// Returns `true` if a weight is stored in this layout.
    pub(super) fn is_stored(module: Module<'_>) -> Result<bool> {
        Ok(module.optional("qweight")?.is_some())
    }
}

/// Unpacks words `(rows, columns)` of eight outputs each to codes `(8·columns, rows)`.
fn transposed(words: impl Iterator<Item = u32>, rows: usize, columns: usize) -> Vec<u8> {
    let mut codes = vec![0; rows * columns * PER_WORD];
    for (index, word) in words.enumerate() {
        let (row, column) = (index / columns, index % columns);
        for (slot, output) in OUTPUT_AT.iter().enumerate() {
            codes[(column * PER_WORD + output) * rows + row] = code(word, 4, slot);
        }
    }
    codes
}
