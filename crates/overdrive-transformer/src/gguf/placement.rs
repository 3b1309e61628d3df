//! The location and the form of a parameter in a GGUF file.

use tch::Tensor;

use super::deepseek;
use super::delta_net;
use super::names::{STACKS, fused_rows, gguf_shape, llama_name, row_order, stream_of};
use crate::Result;
use crate::config::{LlamaConfig, LlamaFamily};
use crate::moe;
use crate::parameters::ParameterSpec;

/// The place of a parameter in a file.
pub(super) struct Placement {
    /// The tensors whose rows hold the parameter, one tensor behind the other, with the shape of each.
    pub(super) tensors: Vec<(String, Vec<i64>)>,
    /// The index of the slice of the tensor, and the number of its slices: an expert or a residual stream.
    pub(super) slice: Option<(usize, i64)>,
    /// The stored row of each row, if there are others or the orders differ.
    pub(super) rows: Option<Vec<i64>>,
    /// The stored column of each column, if the orders differ.
    pub(super) columns: Option<Vec<i64>>,
    pub(super) form: Form,
}

/// The difference between the elements in a file and those of transformers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Form {
    Same,
    /// The factor of a norm; transformers stores the factor minus one.
    PlusOne,
    /// `-exp` of the elements.
    NegativeExponential,
    /// Keys and values of each head apart, and keys transposed (DeepSeek).
    KeysAndValues,
}

impl Form {
    fn of(name: &str, config: &LlamaConfig) -> Form {
        if name.ends_with(".A_log") {
            Form::NegativeExponential
        } else if config.norm_adds_one()
            && name.ends_with("norm.weight")
            && !name.ends_with(".linear_attn.norm.weight")
        {
            Form::PlusOne
        } else {
            Form::Same
        }
    }

    /// Returns the elements of transformers.
    pub(super) fn read(self, stored: Tensor) -> Result<Tensor> {
        Ok(match self {
            Form::Same | Form::KeysAndValues => stored,
            Form::PlusOne => stored.f_sub_scalar(1.0)?,
            Form::NegativeExponential => stored.f_neg()?.f_log()?,
        })
    }

    /// Returns the elements of a file.
    pub(super) fn written(self, weight: Tensor) -> Result<Tensor> {
        Ok(match self {
            Form::Same | Form::KeysAndValues => weight,
            Form::PlusOne => weight.f_add_scalar(1.0)?,
            Form::NegativeExponential => weight.f_exp()?.f_neg()?,
        })
    }
}

/// Returns the places where files may have a parameter, the usual one first. There is none for a parameter that files do
/// not have.
pub(super) fn placements(spec: &ParameterSpec, config: &LlamaConfig) -> Vec<Placement> {
    let (name, form) = (&spec.name, Form::of(&spec.name, config));
    let shape = gguf_shape(spec);
    let [rows, columns] = orders(name, config);
    let of_rows = |rows: i64| [&[rows], shape.get(1..).unwrap_or_default()].concat();
    let mut all = Vec::new();
    if let Some((tensors, rows)) = delta_net::joint_projection(name, config) {
        let tensors = tensors.map(|(name, rows)| (name, of_rows(rows)));
        all.push(Placement {
            tensors: tensors.into(),
            slice: None,
            rows: Some(rows),
            columns: None,
            form,
        });
    }
    if let Some(tensors) = deepseek::keys_and_values(name, config) {
        all.push(Placement {
            tensors: tensors.into(),
            slice: None,
            rows: None,
            columns: None,
            form: Form::KeysAndValues,
        });
    }
    let slice = slice_of(spec, config);
    if let Some((tensors, rows)) = neighbouring_gate_up(spec, config) {
        all.push(Placement {
            tensors: tensors
                .map(|name| (name, of_rows(rows.len() as i64 / 2)))
                .into(),
            slice,
            rows: Some(rows),
            columns: None,
            form,
        });
        return all;
    }
    if let Some(own) = llama_name(name, config.family) {
        all.push(Placement {
            tensors: vec![(own, shape.clone())],
            slice,
            rows,
            columns,
            form,
        });
    }
    // Files with layers joined that are apart here.
    let fused = fused_rows(name, config).or_else(|| joint_expert_rows(spec));
    all.extend(fused.map(|(name, height, rows)| Placement {
        tensors: vec![(name, of_rows(height))],
        slice,
        rows: Some(rows),
        columns: None,
        form,
    }));
    all
}

/// Returns the stored row of each row of a parameter, and the stored column of each column, where the orders differ.
pub(super) fn orders(name: &str, config: &LlamaConfig) -> [Option<Vec<i64>>; 2] {
    [
        row_order(name, config).or_else(|| delta_net::row_order(name, config)),
        delta_net::column_order(name, config),
    ]
}

/// Returns the slice that a parameter is, and the number of slices.
fn slice_of(spec: &ParameterSpec, config: &LlamaConfig) -> Option<(usize, i64)> {
    if let Some((_, stream)) = stream_of(spec.module()) {
        let altup = config.per_layer.as_ref()?.altup.as_ref()?;
        return Some((stream, altup.altup_num_inputs - 1));
    }
    let (_, expert, _) = moe::expert_of(spec.module())?;
    Some((expert, config.experts.as_ref()?.num_experts))
}

/// Returns the stack with gate and up of all experts, which some files have, if `spec` is one of them: its name, the
/// number of rows of an expert, and the rows of `spec`.
fn joint_expert_rows(spec: &ParameterSpec) -> Option<(String, i64, Vec<i64>)> {
    let (layer, _, part) = moe::expert_of(spec.module())?;
    let height = *spec.shape.first()?;
    let first = match part {
        0 => 0,
        1 => height,
        _ => return None,
    };
    let name = format!("blk.{layer}.ffn_gate_up_exps.weight");
    Some((name, 2 * height, (first..first + height).collect()))
}

/// Returns the stacks with the gates and with the other half of all experts, if `spec` is both of an expert of gpt-oss,
/// whose rows alternate, and the stored row of each of its rows.
fn neighbouring_gate_up(
    spec: &ParameterSpec,
    config: &LlamaConfig,
) -> Option<([String; 2], Vec<i64>)> {
    let (module, end) = spec.name.rsplit_once('.')?;
    let (layer, _, part) = moe::expert_of(module)?;
    if config.family != LlamaFamily::GptOss || part != 3 {
        return None;
    }
    let stacks = [STACKS[0], STACKS[1]].map(|stack| format!("blk.{layer}.{stack}.{end}"));
    let width = config.intermediate_size;
    Some((
        stacks,
        (0..width).flat_map(|row| [row, width + row]).collect(),
    ))
}

/// Returns the index at which each index of a permutation is.
pub(super) fn inverse(order: &[i64]) -> Vec<i64> {
    let mut places = vec![0; order.len()];
    for (place, stored) in (0..).zip(order) {
        places[stored.unsigned_abs() as usize] = place;
    }
    places
}
