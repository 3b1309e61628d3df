//! GPTQ checkpoints (Frantar et al. 2022, arXiv:2210.17323), as AutoGPTQ and GPTQModel write them.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use tch::Kind;

use super::module::{FLOATS, Module};
use super::words::{Groups, code, order_of, words};
use crate::{Error, QuantizedWeight, Result};

/// The `quantization_config` of a GPTQ checkpoint; keys as in transformers' `GPTQConfig`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct GptqConfig {
    /// Bits of a code; 4 and 8 are read.
    pub bits: u8,
    /// Inputs of a group; -1 for one group a row.
    #[serde(default = "group_size")]
    pub group_size: i64,
    /// Whether inputs are grouped by their activations, so that `g_idx` matters.
    #[serde(default)]
    pub desc_act: bool,
    /// Whether zero points are the middle of the range.
    #[serde(default = "yes")]
    pub sym: bool,
    /// Whether the head is quantized too.
    #[serde(default)]
    pub lm_head: bool,
    /// `gptq`, whose zero points are stored less one, or `gptq_v2`. Older files call it
    /// `checkpoint_format`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub format: Option<String>,
    /// The older name of `format`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub checkpoint_format: Option<String>,
    /// What else is in the object.
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
        if !matches!(self.bits, 4 | 8) {
            return Err(Error::BadOption {
                option: "quantization_config.bits",
                found: self.bits.to_string(),
                expected: "4 or 8, which can be read".to_owned(),
            });
        }
        self.zeros_less_one().map(drop)
    }

    /// Whether zero points are stored less one.
    fn zeros_less_one(&self) -> Result<bool> {
        let format = self.checkpoint_format.as_ref().or(self.format.as_ref());
        match format.map(String::as_str) {
            None | Some("gptq") => Ok(true),
            Some("gptq_v2") => Ok(false),
            Some(other) => Err(Error::BadOption {
                option: "quantization_config.checkpoint_format",
                found: other.to_owned(),
                expected: "gptq or gptq_v2".to_owned(),
            }),
        }
    }

    pub(super) fn read(&self, module: Module<'_>) -> Result<QuantizedWeight> {
        let bits = self.bits;
        let per_word = 32 / usize::from(bits);
        let qweight = module.required("qweight")?;
        module.check(&qweight, "qweight", &[Kind::Int], &[None, None])?;
        // Positive, and a mapped file has as many bytes.
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
        // Place by place, as the order has them.
        let mut place_of = vec![0; inputs];
        match &order {
            Some(order) => {
                for (place, input) in order.iter().enumerate() {
                    place_of[input.unsigned_abs() as usize] = place;
                }
            }
            None => place_of = (0..inputs).collect(),
        }
        let mut codes = vec![0u8; outputs * inputs];
        for (at, word) in words(&qweight).enumerate() {
            let (row, output) = (at / outputs, at % outputs);
            for part in 0..per_word {
                let place = place_of[row * per_word + part];
                codes[output * inputs + place] = code(word, bits, part);
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
            "its scales are of {groups} groups, where groups of {} in {inputs} inputs are {expected}",
            self.group_size
        )))
    }

    /// `(outputs, groups)`.
    fn zeros(&self, module: Module<'_>, groups: usize, outputs: usize) -> Result<Vec<u8>> {
        let per_word = 32 / usize::from(self.bits);
        let columns = outputs.div_ceil(per_word);
        let stored = module.required("qzeros")?;
        let shape = [Some(groups as i64), Some(columns as i64)];
        module.check(&stored, "qzeros", &[Kind::Int], &shape)?;
        let mask = (1u16 << self.bits) - 1;
        let more = u16::from(self.zeros_less_one()?);
        let mut zeros = vec![0; outputs * groups];
        for (at, word) in words(&stored).enumerate() {
            let (group, column) = (at / columns, at % columns);
            for part in 0..per_word.min(outputs - column * per_word) {
                let zero = u16::from(code(word, self.bits, part)) + more;
                // What would be one too many was 0 before one was taken off.
                zeros[(column * per_word + part) * groups + group] = (zero & mask) as u8;
            }
        }
        Ok(zeros)
    }

    /// Whether a weight is stored in this layout.
    pub(super) fn is_stored(module: Module<'_>) -> Result<bool> {
        Ok(module.optional("qweight")?.is_some())
    }
}
