//! Weights in groups made of the rows of others, or with their inputs in another order.

use tch::{Kind, Tensor};

use crate::codec::microscaling;
use crate::weight::{Magnitudes, Storage};
use crate::{Error, GroupOptions, QuantizedWeight, Result, Scheme};

/// The tensors of a weight in groups, in rows.
struct Parts {
    options: GroupOptions,
    codes: Tensor,
    scales: Tensor,
    offsets: Option<Tensor>,
}

impl QuantizedWeight {
    /// Returns the weight with the rows of `parts`, one part behind the other, in the order `rows` (default: theirs).
    ///
    /// The parts are weights in groups ([`Scheme::Grouped`]) with the same inputs. If they differ in bits, groups or
    /// offsets, the result has 8 bits, the smallest group and offsets. Its elements are those of the parts bit for bit
    /// where a code times its scale is exact in f32, as it is for the types of GGUF files. Weights in
    /// [`Scheme::Mxfp4`] are joined with one another.
    ///
    /// # Errors
    /// [`Error::Common`] for another scheme, other inputs, inputs in another order, or no parts; [`Error::Values`] for rows
    /// that do not exist.
    pub fn from_rows(parts: &[QuantizedWeight], rows: Option<&[i64]>) -> Result<QuantizedWeight> {
        let inputs = parts.first().map_or(0, |part| part.inputs);
        if parts.is_empty() || parts.iter().any(|part| part.inputs != inputs) {
            let sizes: Vec<[i64; 2]> = parts.iter().map(QuantizedWeight::size).collect();
            return Err(Error::option(
                "parts",
                format!("weights of the shapes {sizes:?}"),
                "one or more weights with the same number of inputs",
            ));
        }
        let outputs: i64 = parts.iter().map(|part| part.outputs).sum();
        let chosen = rows.map(|rows| chosen_rows(rows, outputs)).transpose()?;
        if let Some(joined) = joined_microscaled(parts, chosen.as_ref())? {
            return Ok(joined);
        }
        let mut all: Vec<Parts> = parts.iter().map(Parts::of).collect::<Result<_>>()?;
        if all
            .windows(2)
            .any(|pair| pair[0].options != pair[1].options)
        {
            let smallest = all.iter().map(|part| part.options.group_size).min();
            let group = smallest.unwrap_or(1);
            all = all
                .into_iter()
                .map(|part| part.widened(group))
                .collect::<Result<_>>()?;
        }
        let joined = |of: &dyn Fn(&Parts) -> Option<&Tensor>| -> Result<Option<Tensor>> {
            let each: Vec<&Tensor> = all.iter().filter_map(of).collect();
            if each.is_empty() {
                return Ok(None);
            }
            // Scales in f16 beside others in f32 become f32.
            let kind = match each.iter().all(|tensor| tensor.kind() == each[0].kind()) {
                true => each[0].kind(),
                false => Kind::Float,
            };
            let each: std::result::Result<Vec<Tensor>, _> =
                each.iter().map(|tensor| tensor.f_to_kind(kind)).collect();
            let joined = Tensor::f_cat(&each?, 0)?;
            Ok(Some(match &chosen {
                Some(rows) => joined.f_index_select(0, &rows.f_to_device(joined.device())?)?,
                None => joined,
            }))
        };
        let missing = || overdrive_core::Error::internal("a weight in groups has no codes");
        let storage = Storage::grouped(
            joined(&|part| Some(&part.codes))?.ok_or_else(missing)?,
            joined(&|part| Some(&part.scales))?.ok_or_else(missing)?,
            joined(&|part| part.offsets.as_ref())?,
            None,
        );
        let outputs = rows.map_or(outputs, |rows| rows.len() as i64);
        let scheme = Scheme::Grouped(all[0].options);
        QuantizedWeight::of(scheme, [outputs, inputs], storage).laid_out()
    }

    /// Returns the weight whose input `j` is input `inputs[j]` of this one. Where whole groups move, they are moved;
    /// otherwise the weight has its columns in this order, as those of GPTQ's `desc_act` are.
    ///
    /// # Errors
    /// [`Error::Common`] for another scheme than [`Scheme::Grouped`] and for a weight whose inputs are in another order;
    /// [`Error::Values`] for `inputs` that are not each of `0..I` once.
    pub fn with_inputs(&self, inputs: &[i64]) -> Result<QuantizedWeight> {
        let parts = Parts::of(self)?;
        let mut places = vec![None; inputs.len()];
        for (place, input) in (0..).zip(inputs) {
            if let Some(slot) = usize::try_from(*input)
                .ok()
                .and_then(|at| places.get_mut(at))
            {
                *slot = Some(place);
            }
        }
        let places: Option<Vec<i32>> = places.into_iter().collect();
        let Some(places) = places.filter(|_| inputs.len() as i64 == self.inputs) else {
            let expected = format!("each of 0..{} once, the inputs of the weight", self.inputs);
            let found = format!("{} inputs", inputs.len());
            return Err(Error::values("inputs", found, expected));
        };
        let group = parts.options.group_size;
        let is_whole = |group: &[i64]| group.windows(2).all(|pair| pair[1] == pair[0] + 1);
        let groups: Option<Vec<i64>> = inputs
            .chunks(group)
            .map(|chunk| {
                (is_whole(chunk) && chunk[0] % group as i64 == 0).then(|| chunk[0] / group as i64)
            })
            .collect();
        let storage = match groups {
            Some(groups) => {
                let groups = Tensor::f_from_slice(&groups)?.f_to_device(self.device())?;
                let moved = |tensor: &Tensor| -> Result<Tensor> {
                    let by_group = tensor.f_unflatten(1, [groups.size()[0], -1])?;
                    Ok(by_group.f_index_select(1, &groups)?.f_flatten(1, 2)?)
                };
                Storage::grouped(
                    moved(&parts.codes)?,
                    moved(&parts.scales)?,
                    parts.offsets.as_ref().map(moved).transpose()?,
                    None,
                )
            }
            None => Storage::grouped(
                parts.codes,
                parts.scales,
                parts.offsets,
                Some(Tensor::f_from_slice(&places)?.f_to_device(self.device())?),
            ),
        };
        let scheme = Scheme::Grouped(parts.options);
        QuantizedWeight::of(scheme, self.size(), storage).laid_out()
    }
}

impl Parts {
    fn of(weight: &QuantizedWeight) -> Result<Parts> {
        let rows = weight.in_rows()?;
        match (rows.scheme, rows.storage) {
            (
                Scheme::Grouped(options),
                Storage::Grouped {
                    codes,
                    scales,
                    offsets,
                    order: None,
                },
            ) => Ok(Parts {
                options,
                codes: codes.shallow_clone(),
                scales: scales.shallow_clone(),
                offsets: offsets.map(|offsets| offsets.shallow_clone()),
            }),
            (scheme, _) => Err(Error::option(
                "scheme",
                scheme,
                "a weight in groups whose inputs are in their order",
            )),
        }
    }

    /// Returns the same elements in 8 bits with offsets, in groups of `group`, which divides those of this weight.
    fn widened(self, group: usize) -> Result<Parts> {
        let codes = match self.options.bits {
            4 => {
                let low = self.codes.f_bitwise_and(15)?;
                let high = self.codes.f_bitwise_right_shift_tensor_scalar(4)?;
                Tensor::f_stack(&[low, high], -1)?.f_flatten(1, 2)?
            }
            _ => self.codes,
        };
        // The code of zero: of signed codes a small one if it suffices, so that its product with the scale is exact.
        let (codes, zero) = match codes.kind() {
            Kind::Int8 => {
                let zero = match codes.f_min()?.f_int64_value(&[])? >= -32 {
                    true => 32,
                    false => 128,
                };
                let shifted = codes.f_to_kind(Kind::Int16)?.f_add_scalar(zero)?;
                (shifted.f_to_kind(Kind::Uint8)?, zero)
            }
            _ if self.options.symmetric => (codes, 8),
            _ => (codes, 0),
        };
        let scales = self.scales.f_to_kind(Kind::Float)?;
        let offsets = match self.offsets {
            Some(offsets) => offsets.f_to_kind(Kind::Float)?,
            None => scales.f_mul_scalar(-zero)?,
        };
        let copies = (self.options.group_size / group) as i64;
        let repeated = |tensor: Tensor| tensor.f_repeat_interleave_self_int(copies, 1, None);
        Ok(Parts {
            options: GroupOptions {
                bits: 8,
                group_size: group,
                symmetric: false,
            },
            codes,
            scales: repeated(scales)?,
            offsets: Some(repeated(offsets)?),
        })
    }
}

/// Returns the rows of weights in MXFP4, whose blocks lie within rows, if all parts are.
fn joined_microscaled(
    parts: &[QuantizedWeight],
    rows: Option<&Tensor>,
) -> Result<Option<QuantizedWeight>> {
    let (mut codes, mut scales) = (Vec::new(), Vec::new());
    for part in parts {
        match &part.storage {
            Storage::Blocks {
                codes: own,
                magnitudes:
                    Magnitudes::Quantized {
                        codes: of_blocks, ..
                    },
            } if part.scheme == Scheme::Mxfp4 => {
                codes.push(own.f_view([part.outputs, -1])?);
                scales.push(of_blocks.f_view([part.outputs, -1])?);
            }
            _ => return Ok(None),
        }
    }
    let joined = |tensors: &[Tensor]| -> Result<Tensor> {
        let whole = Tensor::f_cat(tensors, 0)?;
        Ok(match rows {
            Some(rows) => whole.f_index_select(0, &rows.f_to_device(whole.device())?)?,
            None => whole,
        })
    };
    let codes = joined(&codes)?;
    let size = [codes.size()[0], parts[0].inputs];
    let scales = joined(&scales)?.f_flatten(0, -1)?;
    let magnitudes = microscaling::magnitudes(scales, &microscaling::e8m0_numbers())?;
    QuantizedWeight::from_blocks(Scheme::Mxfp4, size, codes, magnitudes).map(Some)
}

fn chosen_rows(rows: &[i64], outputs: i64) -> Result<Tensor> {
    match rows.iter().find(|row| !(0..outputs).contains(*row)) {
        None => Ok(Tensor::f_from_slice(rows)?),
        Some(row) => {
            let expected = format!("rows in 0..{outputs}");
            Err(Error::values("rows", row.to_string(), expected))
        }
    }
}
