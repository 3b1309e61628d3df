//! Codes that are packed in 32-bit words, and group-wise weights from such codes.

use overdrive_safetensors::StoredTensor;
use tch::{Kind, Tensor};

use super::source::{Module, narrowed};
use crate::{GroupedParts, QuantizedWeight, Result};
use overdrive_kernels::tensors::elements;

/// Returns the words of a stored tensor of kind Int.
pub(super) fn words<'a>(stored: &StoredTensor<'a>) -> impl Iterator<Item = u32> + use<'a> {
    let (chunks, _) = stored.data().as_chunks::<4>();
    chunks.iter().map(|bytes| u32::from_le_bytes(*bytes))
}

/// Returns the code in a slot of a word; slot 0 is the lowest bits.
pub(super) fn code(word: u32, bits: u8, slot: usize) -> u8 {
    let mask = (1u32 << bits) - 1;
    (word >> (usize::from(bits) * slot) & mask) as u8
}

/// The codes `(outputs, inputs)`, one in each byte and unsigned, with scales and zero points by group of inputs.
pub(super) struct Groups {
    pub(super) bits: u8,
    pub(super) outputs: usize,
    pub(super) inputs: usize,
    pub(super) codes: Vec<u8>,
    /// The scales, f32 or f16 `(outputs, groups)`.
    pub(super) scales: Tensor,
    /// The zero points, `(outputs, groups)`; `None` if all are the middle of the range.
    pub(super) zeros: Option<Vec<u8>>,
    /// The input of each column of the codes.
    pub(super) order: Option<Vec<i32>>,
}

impl Groups {
    /// Builds the weight. Groups of a size that is not supported are split into smaller ones of the same scale.
    pub(super) fn build(self, module: Module<'_>) -> Result<QuantizedWeight> {
        let bits = self.bits;
        let middle = 1u8 << (bits - 1);
        let [outputs, inputs] = [self.outputs as i64, self.inputs as i64];
        let groups = self.scales.size()[1];
        let group = match groups {
            1.. if inputs % groups == 0 => inputs / groups,
            _ => {
                let reason = format!("its {inputs} inputs are not divisible by {groups} groups");
                return Err(module.bad(reason));
            }
        };
        // The largest supported size, so that the fewest scales are repeated.
        let Some(size) = [256, 128, 64, 32, 16]
            .into_iter()
            .find(|size| group % size == 0)
        else {
            return Err(module.bad(format!(
                "its groups have {group} inputs; the number must be a multiple of 16"
            )));
        };
        // Zero points that are all the middle are a symmetric weight, which needs no offsets.
        let zeros = self
            .zeros
            .filter(|zeros| zeros.iter().any(|&zero| zero != middle));
        let repeated = |tensor: Tensor| -> Result<Tensor> {
            Ok(match group / size {
                1 => tensor,
                times => tensor.f_repeat_interleave_self_int(times, 1, None)?,
            })
        };
        let (scales, offsets) = match zeros {
            None => (self.scales, None),
            Some(zeros) => {
                let zeros = Tensor::f_from_slice(&zeros)?.f_view([outputs, groups])?;
                let zeros = zeros.f_to_kind(Kind::Float)?;
                let scales = self.scales.f_to_kind(Kind::Float)?;
                let offsets = narrowed(zeros.f_mul(&scales)?.f_neg()?)?;
                (self.scales, Some(repeated(offsets)?))
            }
        };
        let codes = match (bits, &offsets) {
            (4, _) => {
                let (pairs, _) = self.codes.as_chunks::<2>();
                let packed: Vec<u8> = pairs.iter().map(|[low, high]| low | high << 4).collect();
                Tensor::f_from_slice(&packed)?.f_view([outputs, inputs / 2])?
            }
            (_, None) => {
                // Flipping the top bit subtracts 128 from an unsigned byte.
                let signed: Vec<u8> = self.codes.iter().map(|code| code ^ middle).collect();
                Tensor::f_from_data_size(&signed, &[outputs, inputs], Kind::Int8)?
            }
            _ => Tensor::f_from_slice(&self.codes)?.f_view([outputs, inputs])?,
        };
        let order = self.order.map(|order| Tensor::f_from_slice(&order));
        module.built(QuantizedWeight::from_grouped(GroupedParts {
            bits,
            codes,
            scales: repeated(scales)?,
            offsets,
            order: order.transpose()?,
        }))
    }
}

/// Returns the inputs in the order of their groups, from the group of each (`g_idx`); `None` if they are in
/// that order already.
pub(super) fn order_of(
    module: Module<'_>,
    part: &str,
    inputs: usize,
    groups: usize,
) -> Result<Option<Vec<i32>>> {
    let stored = module.tensor(part, &[Kind::Int], &[Some(inputs as i64)])?;
    let group_of = elements::<i32>(&stored)?;
    let group = inputs / groups.max(1);
    let group_at_column = |column: usize| column / group.max(1);
    let in_order = |(input, &of): (usize, &i32)| usize::try_from(of) == Ok(group_at_column(input));
    if group_of.iter().enumerate().all(in_order) {
        return Ok(None);
    }
    let mut order: Vec<i32> = (0..inputs as i32).collect();
    // A stable sort: within a group the inputs stay in order, as in GPTQ.
    order.sort_by_key(|&input| group_of[input.unsigned_abs() as usize]);
    let group_at = |&input: &i32| group_of[input.unsigned_abs() as usize];
    for (column, found) in order.iter().map(group_at).enumerate() {
        if usize::try_from(found) != Ok(group_at_column(column)) {
            return Err(module.bad(format!(
                "`{part}` does not assign {group} inputs to each of its {groups} groups (group {found})"
            )));
        }
    }
    Ok(Some(order))
}
