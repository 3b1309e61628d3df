//! Reading: from the tensors of a file to a weight.

use tch::{Kind, Tensor};

use super::args::{QuantizationArgs, Strategy, scheme_of};
use super::config::CompressedTensorsConfig;
use crate::format::fp8;
use crate::format::packed_words::{Groups, code, order_of, words};
use crate::format::source::{self, Module};
use crate::tensors::bytes;
use crate::{Activations, QuantizedWeight, Result, Scheme};

impl CompressedTensorsConfig {
    pub(in crate::format) fn read(&self, module: Module<'_>) -> Result<QuantizedWeight> {
        let group = self.group_of(module.name)?;
        let dynamic = group
            .as_ref()
            .is_some_and(|group| group.input_activations.is_some());
        let Some(args) = group.and_then(|group| group.weights) else {
            return Err(module.bad("no group of `config_groups` describes it"));
        };
        let Some(strategy) = args.strategy() else {
            return Err(module.bad(format!(
                "its scales are by {}; they must be by tensor, channel, group, or block of 128 by 128",
                args.strategy.as_deref().unwrap_or("nothing")
            )));
        };
        if let Some(scheme @ (Scheme::Mxfp4 | Scheme::Nvfp4)) = scheme_of(&args, dynamic) {
            return read_floats(module, scheme);
        }
        if module.optional("weight_packed")?.is_some() {
            return self.read_packed(module, &args, strategy, dynamic);
        }
        let stored = module.required("weight")?;
        match stored.kind() {
            Some(Kind::Int8) => self.read_ints(module, &args, strategy, dynamic),
            Some(Kind::Float8e4m3fn) => {
                let codes = module.tensor("weight", &[Kind::Float8e4m3fn], &[None, None])?;
                if strategy == Strategy::Block {
                    return fp8::read_blocks(module, codes, "weight_scale");
                }
                let scales = row_scales(module, strategy, codes.size()[0])?;
                let weight = module.built(QuantizedWeight::from_fp8(codes, scales))?;
                match dynamic {
                    true => weight.with_activations(Activations::Float8),
                    false => Ok(weight),
                }
            }
            _ => Err(module.bad(format!(
                "its elements are {}: the weight is not quantized",
                stored.format()
            ))),
        }
    }

    fn read_packed(
        &self,
        module: Module<'_>,
        args: &QuantizationArgs,
        strategy: Strategy,
        dynamic: bool,
    ) -> Result<QuantizedWeight> {
        let bits = bits_of(module, args)?;
        let per_word = 32 / usize::from(bits);
        let shape = module.tensor("weight_shape", &[Kind::Int64, Kind::Int], &[Some(2)])?;
        let shape: Vec<i64> = Vec::try_from(shape.f_to_kind(Kind::Int64)?)?;
        let [rows, columns] = [shape[0], shape[1]];
        let stored = module.required("weight_packed")?;
        module.check(&stored, "weight_packed", &[Kind::Int], &[None, None])?;
        // `check` has found positive dimensions, and a mapped file has as many bytes.
        let [outputs, width] = [0, 1].map(|axis| stored.shape()[axis].unsigned_abs() as usize);
        let inputs = usize::try_from(columns).unwrap_or_default();
        if rows != outputs as i64 || inputs == 0 || inputs.div_ceil(per_word) != width {
            return Err(module.bad(format!(
                "`weight_shape` is [{rows}, {columns}], which does not match {outputs} rows of {width} words"
            )));
        }
        let mut codes = Vec::with_capacity(outputs * inputs);
        for (index, word) in words(&stored).enumerate() {
            // The last word of a row may have fewer codes.
            let first = index % width * per_word;
            let count = per_word.min(inputs - first);
            codes.extend((0..count).map(|slot| code(word, bits, slot)));
        }
        self.build(module, args, strategy, dynamic, [outputs, inputs], codes)
    }

    fn read_ints(
        &self,
        module: Module<'_>,
        args: &QuantizationArgs,
        strategy: Strategy,
        dynamic: bool,
    ) -> Result<QuantizedWeight> {
        let bits = bits_of(module, args)?;
        let codes = module.tensor("weight", &[Kind::Int8], &[None, None])?;
        let [outputs, inputs] = [0, 1].map(|axis| codes.size()[axis].unsigned_abs() as usize);
        let middle = 1u8 << (bits - 1);
        let codes: Vec<u8> = bytes(&codes)?
            .iter()
            .map(|c| c.wrapping_add(middle))
            .collect();
        if let Some(code) = codes.iter().find(|&&code| bits == 4 && code > 15) {
            let code = i16::from(*code) - 8;
            return Err(module.bad(format!(
                "it has the code {code}, which 4 bits cannot represent"
            )));
        }
        self.build(module, args, strategy, dynamic, [outputs, inputs], codes)
    }

    /// Builds the weight of unsigned `codes`, one in each byte.
    fn build(
        &self,
        module: Module<'_>,
        args: &QuantizationArgs,
        strategy: Strategy,
        dynamic: bool,
        [outputs, inputs]: [usize; 2],
        codes: Vec<u8>,
    ) -> Result<QuantizedWeight> {
        let bits = bits_of(module, args)?;
        let by_row = !matches!(strategy, Strategy::Group(_));
        if bits == 8 && args.symmetric && by_row {
            let scales = row_scales(module, strategy, outputs as i64)?;
            let signed: Vec<u8> = codes.iter().map(|code| code ^ 0x80).collect();
            let shape = [outputs, inputs].map(|n| n as i64);
            let codes = Tensor::f_from_data_size(&signed, &shape, Kind::Int8)?;
            let scheme = if dynamic {
                Scheme::Int8Dynamic
            } else {
                Scheme::Int8WeightOnly
            };
            return module.built(QuantizedWeight::from_int8(scheme, codes, scales));
        }
        let (groups, scales) = match strategy {
            Strategy::Group(size) => {
                let size = usize::try_from(size).unwrap_or(1);
                let groups = inputs.div_ceil(size);
                let shape = [Some(outputs as i64), Some(groups as i64)];
                (groups, module.scales("weight_scale", &shape)?)
            }
            _ => {
                let scales = row_scales(module, strategy, outputs as i64)?;
                (1, scales.f_unsqueeze(1)?)
            }
        };
        // Present for GPTQ with `actorder`, where groups are not neighbouring inputs.
        let order = match module.optional("weight_g_idx")? {
            Some(_) => order_of(module, "weight_g_idx", inputs, groups)?,
            None => None,
        };
        let zeros = match args.symmetric {
            true => None,
            false => Some(zeros(module, bits, strategy, [outputs, groups])?),
        };
        let codes = match &order {
            None => codes,
            Some(order) => {
                let rows = codes.chunks_exact(inputs);
                let of_row = |row| {
                    order.iter().map(move |&input: &i32| {
                        let row: &[u8] = row;
                        row[input.unsigned_abs() as usize]
                    })
                };
                rows.flat_map(of_row).collect()
            }
        };
        Groups {
            bits,
            outputs,
            inputs,
            codes,
            scales,
            zeros,
            order,
        }
        .build(module)
    }
}

/// Reads a weight of 4-bit floats.
fn read_floats(module: Module<'_>, scheme: Scheme) -> Result<QuantizedWeight> {
    let codes = module.tensor("weight_packed", &[Kind::Uint8], &[None, None])?;
    if scheme == Scheme::Mxfp4 {
        let scales = module.tensor("weight_scale", &[Kind::Uint8], &[None, None])?;
        return module.built(QuantizedWeight::from_mxfp4(codes, scales));
    }
    let scales = module.tensor("weight_scale", &[Kind::Float8e4m3fn], &[None, None])?;
    let global = module.scales_f32("weight_global_scale", &[Some(1)])?;
    let global = global.f_double_value(&[0])? as f32;
    module.built(QuantizedWeight::from_nvfp4(codes, scales, global))
}

fn bits_of(module: Module<'_>, args: &QuantizationArgs) -> Result<u8> {
    match (args.kind.as_str(), args.num_bits) {
        ("int", bits @ (4 | 8)) => Ok(bits),
        (kind, bits) => Err(module.bad(format!(
            "its codes are {bits}-bit {kind}; they must be 4-bit or 8-bit int"
        ))),
    }
}

/// Reads the scales as f32 `(outputs,)`, from one for each row or one for the tensor.
fn row_scales(module: Module<'_>, strategy: Strategy, outputs: i64) -> Result<Tensor> {
    let count = match strategy {
        Strategy::Tensor => 1,
        _ => outputs,
    };
    source::row_scales(module, "weight_scale", count, outputs)
}

/// Reads the zero points as unsigned codes, `(outputs, groups)`.
fn zeros(
    module: Module<'_>,
    bits: u8,
    strategy: Strategy,
    [outputs, groups]: [usize; 2],
) -> Result<Vec<u8>> {
    let part = "weight_zero_point";
    let stored = module.required(part)?;
    let middle = 1u8 << (bits - 1);
    if stored.kind() == Some(Kind::Int) {
        let per_word = 32 / usize::from(bits);
        let rows = outputs.div_ceil(per_word);
        let shape = [Some(rows as i64), Some(groups as i64)];
        module.check(&stored, part, &[Kind::Int], &shape)?;
        let mut zeros = vec![0; outputs * groups];
        for (index, word) in words(&stored).enumerate() {
            let (row, group) = (index / groups, index % groups);
            for slot in 0..per_word.min(outputs - row * per_word) {
                zeros[(row * per_word + slot) * groups + group] = code(word, bits, slot);
            }
        }
        return Ok(zeros);
    }
    // Otherwise they are signed bytes and not packed.
    let shape: Vec<Option<i64>> = match (strategy, stored.shape().len()) {
        (Strategy::Tensor, n) => vec![Some(1); n],
        _ => vec![Some(outputs as i64), Some(groups as i64)],
    };
    let tensor = module.tensor(part, &[Kind::Int8], &shape)?;
    let tensor = tensor
        .f_reshape([-1, groups as i64])?
        .f_expand([outputs as i64, -1], false)?;
    let tensor = tensor.f_contiguous()?;
    let zeros: Vec<u8> = bytes(&tensor)?
        .iter()
        .map(|zero| zero.wrapping_add(middle))
        .collect();
    match zeros.iter().find(|&&zero| bits == 4 && zero > 15) {
        Some(zero) => Err(module.bad(format!("its zero point {zero} does not fit 4 bits"))),
        None => Ok(zeros),
    }
}
