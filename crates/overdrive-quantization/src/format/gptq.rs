//! GPTQ checkpoints (Frantar et al. 2022, arXiv:2210.17323), as AutoGPTQ and GPTQModel write them.

use overdrive_core::check_option;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use tch::Kind;

use super::packed_words::{Groups, code, order_of, words};
use super::source::{FLOATS, Module};
use crate::{Error, QuantizedWeight, Result};

/// The `quantization_config` of a GPTQ checkpoint; keys as in transformers' `GPTQConfig`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct GptqConfig {
    /// The number of bits of a code: 4 or 8.
    pub bits: u8,
    /// The number of inputs of a group; -1 for one group in each row.
    #[serde(default = "group_size")]
    pub group_size: i64,
    /// If `true`, inputs are grouped in the order of their activations, which `g_idx` has.
    #[serde(default)]
    pub desc_act: bool,
    /// If `true`, every zero point is the middle of the range.
    #[serde(default = "yes")]
    pub sym: bool,
    /// If `true`, the output head is quantized as well.
    #[serde(default)]
    pub lm_head: bool,
    /// The layout: `gptq`, which stores zero points minus one, or `gptq_v2`. Older files call this key
    /// `checkpoint_format`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub format: Option<String>,
    /// The older name of `format`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub checkpoint_format: Option<String>,
    /// The other keys of the object.
    #[serde(flatten)]
    pub other: Map<String, Value>,
}

fn group_size() -> i64 {
    128
}

fn yes() -> bool {
    true
}

impl GptqConfig {
    pub(super) const PARTS: &'static [&'static str] = &["qweight", "qzeros", "scales", "g_idx"];

    pub(super) fn validate(&self) -> Result<()> {
        let valid = matches!(self.bits, 4 | 8);
        check_option(valid, "quantization_config.bits", self.bits, "4 or 8")?;
        self.zeros_minus_one().map(drop)
    }

    /// Returns `true` if zero points are stored minus one.
    fn zeros_minus_one(&self) -> Result<bool> {
        // A file without either key is older than `gptq_v2`.
        let format = self.checkpoint_format.as_ref().or(self.format.as_ref());
        match format.map(String::as_str) {
            None | Some("gptq") => Ok(true),
            Some("gptq_v2") => Ok(false),
            Some(other) => {
                let option = "quantization_config.checkpoint_format";
                Err(Error::option(option, other, "gptq or gptq_v2"))
            }
        }
    }

    pub(super) fn read(&self, module: Module<'_>) -> Result<QuantizedWeight> {
        let bits = self.bits;
        let per_word = 32 / usize::from(bits);
        let qweight = module.required("qweight")?;
        module.check(&qweight, "qweight", &[Kind::Int], &[None, None])?;
        // `check` has found positive dimensions, and a mapped file has as many bytes.
        let [word_rows, outputs] = [0, 1].map(|axis| qweight.shape()[axis].unsigned_abs() as usize);
        let inputs = word_rows * per_word;
        let stored = module.required("scales")?;
        module.check(&stored, "scales", FLOATS, &[None, Some(outputs as i64)])?;
        let groups = stored.shape()[0].unsigned_abs() as usize;
        self.check_groups(module, inputs, groups)?;
        let scales = module
            .scales("scales", &[None, Some(outputs as i64)])?
            .f_tr()?
            .f_contiguous()?;
        let zeros = self.zeros(module, groups, outputs)?;
        let order = match module.optional("g_idx")? {
            Some(_) => order_of(module, "g_idx", inputs, groups)?,
            None => None,
        };
        // The file has the codes in the order of the inputs; the weight has those of a group together.
        let mut column_of: Vec<usize> = (0..inputs).collect();
        for (column, input) in order.iter().flatten().enumerate() {
            column_of[input.unsigned_abs() as usize] = column;
        }
        let mut codes = vec![0u8; outputs * inputs];
        for (index, word) in words(&qweight).enumerate() {
            let (row, output) = (index / outputs, index % outputs);
            for slot in 0..per_word {
                let column = column_of[row * per_word + slot];
                codes[output * inputs + column] = code(word, bits, slot);
            }
        }
        Groups {
            bits,
            outputs,
            inputs,
            codes,
            scales,
            zeros: Some(zeros),
            order,
        }
        .build(module)
    }

    fn check_groups(&self, module: Module<'_>, inputs: usize, groups: usize) -> Result<()> {
        let expected = match usize::try_from(self.group_size) {
            Ok(size) if size > 0 => inputs.div_ceil(size),
            _ => 1,
        };
        if groups == expected {
            return Ok(());
        }
        Err(module.bad(format!(
            "it has scales of {groups} groups; {inputs} inputs in groups of {} have {expected}",
            self.group_size
        )))
    }

    /// Reads the zero points, `(outputs, groups)`.
    fn zeros(&self, module: Module<'_>, groups: usize, outputs: usize) -> Result<Vec<u8>> {
        let per_word = 32 / usize::from(self.bits);
        let columns = outputs.div_ceil(per_word);
        let stored = module.required("qzeros")?;
        let shape = [Some(groups as i64), Some(columns as i64)];
        module.check(&stored, "qzeros", &[Kind::Int], &shape)?;
        let mask = (1u16 << self.bits) - 1;
        let added = u16::from(self.zeros_minus_one()?);
        let mut zeros = vec![0; outputs * groups];
        for (index, word) in words(&stored).enumerate() {
            let (group, column) = (index / columns, index % columns);
            for slot in 0..per_word.min(outputs - column * per_word) {
                let zero = u16::from(code(word, self.bits, slot)) + added;
                // Masked, since a zero point of 0 minus one was stored as the largest code.
                zeros[(column * per_word + slot) * groups + group] = (zero & mask) as u8;
            }
        }
        Ok(zeros)
    }

    /// Returns `true` if a weight is stored in this layout.
    pub(super) fn is_stored(module: Module<'_>) -> Result<bool> {
        Ok(module.optional("qweight")?.is_some())
    }
}
