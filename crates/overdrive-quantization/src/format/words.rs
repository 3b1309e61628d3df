//! Codes packed in 32-bit words, and groups made of them.

use overdrive_safetensors::StoredTensor;
use tch::{Kind, Tensor};

use super::module::{Module, narrowed};
use crate::tensors::elements;
use crate::{GroupedParts, QuantizedWeight, Result};

/// The words of a stored tensor of kind Int.
pub(super) fn words<'a>(stored: &StoredTensor<'a>) -> impl Iterator<Item = u32> + use<'a> {
    let (chunks, _) = stored.data().as_chunks::<4>();
    chunks.iter().map(|bytes| u32::from_le_bytes(*bytes))
}

/// The code at a place of a word, the least bits first.
pub(super) fn code(word: u32, bits: u8, place: usize) -> u8 {
    let mask = (1u32 << bits) - 1;
    (word >> (usize::from(bits) * place) & mask) as u8
}

/// Codes `(outputs, inputs)`, one a byte, counted from 0, with scales and zero points by group of inputs.
pub(super) struct Groups {
    pub(super) bits: u8,
    pub(super) outputs: usize,
    pub(super) inputs: usize,
    pub(super) codes: Vec<u8>,
    /// f32 or f16 `(outputs, groups)`.
    pub(super) scales: Tensor,
    /// `(outputs, groups)`; none where it is the middle everywhere.
    pub(super) zeros: Option<Vec<u8>>,
    /// The input at each place.
    pub(super) order: Option<Vec<i32>>,
}

impl Groups {
    /// The weight. Groups of sizes that there are not here are cut into smaller ones of the same scale.
    pub(super) fn build(self, module: Module<'_>) -> Result<QuantizedWeight> {
        let bits = self.bits;
        let middle = 1u8 << (bits - 1);
        let [outputs, inputs] = [self.outputs as i64, self.inputs as i64];
        let groups = self.scales.size()[1];
        let group = match groups {
            1.. if inputs % groups == 0 => inputs / groups,
            _ => {
                let reason = format!("{groups} groups do not divide its {inputs} inputs");
                return Err(module.bad(reason));
            }
        };
        let Some(size) = [256, 128, 64, 32, 16]
            .into_iter()
            .find(|size| group % size == 0)
        else {
            return Err(module.bad(format!(
                "its groups are of {group} inputs, where multiples of 16 can be read"
            )));
        };
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

/// The order in which inputs stand by group, from the group of each (`g_idx`); `None` where they do so
/// already.
pub(super) fn order_of(
    module: Module<'_>,
    part: &str,
    inputs: usize,
    groups: usize,
) -> Result<Option<Vec<i32>>> {
    let stored = module.tensor(part, &[Kind::Int], &[Some(inputs as i64)])?;
    let group_of = elements::<i32>(&stored)?;
    let group = inputs / groups.max(1);
    let place = |input: usize| input / group.max(1);
    let in_order = |(input, &of): (usize, &i32)| usize::try_from(of) == Ok(place(input));
    if group_of.iter().enumerate().all(in_order) {
        return Ok(None);
    }
    let mut order: Vec<i32> = (0..inputs as i32).collect();
    order.sort_by_key(|&input| group_of[input.unsigned_abs() as usize]);
    let group_at = |&input: &i32| group_of[input.unsigned_abs() as usize];
    for (at, found) in order.iter().map(group_at).enumerate() {
        if usize::try_from(found) != Ok(place(at)) {
            return Err(module.bad(format!(
                "`{part}` does not give each of its {groups} groups {group} inputs (group {found})"
            )));
        }
    }
    Ok(Some(order))
}
