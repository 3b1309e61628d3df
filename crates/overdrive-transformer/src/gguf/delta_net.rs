//! The layers of linear attention in GGUF files (Qwen3-Next, Qwen3.5).
//!
//! The joint projection of Qwen3-Next is ordered by heads of keys, and a file has two tensors in its place, ordered by
//! kind. Files of Qwen3.5 tile the heads of values: head `h` has the keys of head `h % K` of `K`, where transformers has
//! those of head `h / (V / K)`.

use overdrive_quantization::{GgufArray, GgufValue};

use super::config::Keys;
use super::metadata::Metadata;
use crate::Result;
use crate::config::{DeltaNetConfig, LayerType, LlamaConfig};

/// The joint projection of Qwen3-Next, and the tensors in its place.
const JOINT: &str = "linear_attn.in_proj_qkvz.weight";
const PARTS: [&str; 2] = ["attn_qkv.weight", "attn_gate.weight"];

/// The order of the rows or columns of a parameter: the stored index of each.
type Order = Vec<i64>;

impl Keys<'_> {
    /// Reads the sizes of layers of linear attention, and which layers they are.
    pub(super) fn delta_net(&self, config: &mut LlamaConfig) -> Result<()> {
        let Some(sizes) = &mut config.delta_net else {
            return Ok(());
        };
        sizes.linear_conv_kernel_dim = self.required("ssm.conv_kernel")?;
        sizes.linear_key_head_dim = self.required("ssm.state_size")?;
        sizes.linear_num_key_heads = self.required("ssm.group_count")?;
        sizes.linear_num_value_heads = self.required("ssm.time_step_rank")?;
        let (inner, heads) = (
            self.required("ssm.inner_size")?,
            sizes.linear_num_value_heads,
        );
        if inner % heads != 0 {
            let expected = format!("a multiple of ssm.time_step_rank ({heads})");
            return Err(self.wrong("ssm.inner_size", &expected));
        }
        sizes.linear_value_head_dim = inner / heads;
        let layers = 0..config.num_hidden_layers;
        let of = |is_linear: bool| match is_linear {
            true => LayerType::Linear,
            false => LayerType::Full,
        };
        let key = "attention.recurrent_layers";
        let types: Vec<LayerType> = match self.value(key).map(GgufValue::as_bools) {
            // Those that are not read are listed as well.
            Some(Some(all)) if all.len() >= layers.end as usize => {
                let own = all.iter().take(layers.end as usize);
                own.map(|&is_linear| of(is_linear)).collect()
            }
            Some(_) => return Err(self.wrong(key, "a list of booleans, one for each layer")),
            None => {
                let interval = self.integer("full_attention_interval")?.unwrap_or(4).max(1);
                layers
                    .map(|layer| of((layer + 1) % interval != 0))
                    .collect()
            }
        };
        config.layer_types = Some(types);
        Ok(())
    }
}

/// Sets the sizes of layers of linear attention (Qwen3-Next, Qwen3.5), and which layers they are.
pub(super) fn metadata(
    own: &mut Metadata,
    config: &LlamaConfig,
    sizes: &DeltaNetConfig,
) -> Result<()> {
    let (keys, values) = (sizes.linear_key_head_dim, sizes.linear_value_head_dim);
    // llama.cpp has one number for both.
    own.only(
        keys == values,
        "linear_value_head_dim",
        values,
        &format!("{keys}, that of keys"),
    )?;
    let is_linear = |layer| config.is_linear(layer);
    let layers = config.num_hidden_layers;
    let is_usual =
        |interval: i64| (0..layers).all(|layer| is_linear(layer) == ((layer + 1) % interval != 0));
    let interval = (1..=layers).find(|&interval| is_usual(interval));
    let Some(interval) = interval else {
        return Err(own.without(
            "layer_types",
            "another pattern",
            "full attention in every n-th layer",
        ));
    };
    own.sizes([
        ("ssm.conv_kernel", sizes.linear_conv_kernel_dim),
        ("ssm.state_size", keys),
        ("ssm.group_count", sizes.linear_num_key_heads),
        ("ssm.time_step_rank", sizes.linear_num_value_heads),
        ("ssm.inner_size", sizes.value_width()),
        ("full_attention_interval", interval),
    ])?;
    if config.family.is_qwen35() {
        // The pairs of channels of the positions in time, height and width of images, which are one number in text.
        let pairs = config.rotary_dim() / 2;
        let sections = [(pairs + 2) / 3, (pairs + 1) / 3, pairs / 3, 0].map(|pairs| pairs as i32);
        let sections = GgufValue::Array(GgufArray::I32(sections.into()));
        own.put("rope.dimension_sections", sections);
    }
    Ok(())
}

/// Returns the tensors in place of the joint projection `name` of Qwen3-Next, with their rows, and the stored row of each
/// row of the parameter.
pub(super) fn joint_projection(
    name: &str,
    config: &LlamaConfig,
) -> Option<([(String, i64); 2], Order)> {
    let (layer, part) = name.strip_prefix("model.layers.")?.split_once('.')?;
    let sizes = config.delta_net.as_ref().filter(|_| part == JOINT)?;
    let widths = [sizes.mixed_width(), sizes.value_width()];
    let mut widths = widths.into_iter();
    let tensors = PARTS.map(|part| (format!("blk.{layer}.{part}"), widths.next().unwrap_or(0)));
    let (keys, values) = (sizes.key_width(), sizes.value_width());
    let (key, group) = (
        sizes.linear_key_head_dim,
        sizes.linear_value_head_dim * shared(sizes),
    );
    let of_head = |head: i64| {
        let kinds = [
            (0, key),
            (keys, key),
            (2 * keys, group),
            (2 * keys + values, group),
        ];
        kinds
            .into_iter()
            .flat_map(move |(first, width)| (0..width).map(move |row| first + head * width + row))
    };
    let rows = (0..sizes.linear_num_key_heads).flat_map(of_head).collect();
    Some((tensors, rows))
}

/// Returns the stored row of each row of a parameter of Qwen3.5, if the orders differ.
pub(super) fn row_order(name: &str, config: &LlamaConfig) -> Option<Order> {
    let (sizes, part) = tiled(name, config)?;
    match part {
        "in_proj_qkv.weight" | "conv1d.weight" => {
            let first = 2 * sizes.key_width();
            let values = of_values(sizes, sizes.linear_value_head_dim);
            Some((0..first).chain(values.map(|row| first + row)).collect())
        }
        "in_proj_z.weight" => Some(of_values(sizes, sizes.linear_value_head_dim).collect()),
        "in_proj_a.weight" | "in_proj_b.weight" | "A_log" | "dt_bias" => {
            Some(of_values(sizes, 1).collect())
        }
        _ => None,
    }
}

/// Returns the stored column of each column of a parameter of Qwen3.5, if the orders differ.
pub(super) fn column_order(name: &str, config: &LlamaConfig) -> Option<Order> {
    let (sizes, part) = tiled(name, config)?;
    (part == "out_proj.weight").then(|| of_values(sizes, sizes.linear_value_head_dim).collect())
}

/// Returns the sizes and the part of a layer of linear attention whose heads of values are tiled.
fn tiled<'a>(name: &'a str, config: &'a LlamaConfig) -> Option<(&'a DeltaNetConfig, &'a str)> {
    let sizes = config.delta_net.as_ref()?;
    let (_, part) = name.split_once(".linear_attn.")?;
    (config.family.is_qwen35() && shared(sizes) > 1).then_some((sizes, part))
}

/// Returns the number of heads of values that share a head of keys.
fn shared(sizes: &DeltaNetConfig) -> i64 {
    sizes.linear_num_value_heads / sizes.linear_num_key_heads.max(1)
}

/// Returns the stored index of each of `width` channels of each head of values.
fn of_values(sizes: &DeltaNetConfig, width: i64) -> impl Iterator<Item = i64> {
    let (keys, shared) = (sizes.linear_num_key_heads, shared(sizes));
    let stored = move |head: i64| head % shared * keys + head / shared;
    let heads = 0..sizes.linear_num_value_heads;
    heads.flat_map(move |head| (0..width).map(move |channel| stored(head) * width + channel))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test may panic")]

    use super::*;
    use crate::LlamaFamily;

    fn config(family: LlamaFamily) -> LlamaConfig {
        LlamaConfig {
            delta_net: Some(DeltaNetConfig {
                linear_conv_kernel_dim: 4,
                linear_key_head_dim: 1,
                linear_value_head_dim: 2,
                linear_num_key_heads: 2,
                linear_num_value_heads: 4,
            }),
            ..LlamaConfig::of(family)
        }
    }

    #[test]
    fn heads_of_values_are_tiled_in_files_of_qwen35_alone() {
        let own = config(LlamaFamily::Qwen35);
        let name = |part: &str| format!("model.layers.0.linear_attn.{part}");
        assert_eq!(row_order(&name("A_log"), &own).unwrap(), [0, 2, 1, 3]);
        let values = [0, 1, 4, 5, 2, 3, 6, 7];
        assert_eq!(row_order(&name("in_proj_z.weight"), &own).unwrap(), values);
        assert_eq!(
            column_order(&name("out_proj.weight"), &own).unwrap(),
            values
        );
        let mixed = row_order(&name("conv1d.weight"), &own).unwrap();
        assert_eq!(mixed[..6], [0, 1, 2, 3, 4, 5]);
        assert_eq!(mixed[6..], [8, 9, 6, 7, 10, 11]);
        let next = config(LlamaFamily::Qwen3Next);
        assert_eq!(row_order(&name("A_log"), &next), None);
        assert_eq!(column_order(&name("out_proj.weight"), &next), None);
    }

    #[test]
    fn the_joint_projection_of_qwen3_next_is_stored_by_kind() {
        let next = config(LlamaFamily::Qwen3Next);
        let name = "model.layers.3.linear_attn.in_proj_qkvz.weight";
        let (tensors, rows) = joint_projection(name, &next).unwrap();
        let expected = [("blk.3.attn_qkv.weight", 12), ("blk.3.attn_gate.weight", 8)];
        assert_eq!(
            tensors,
            expected.map(|(name, rows)| (name.to_owned(), rows))
        );
        // A query, a key, four channels of values and four of gates for each head of keys.
        assert_eq!(rows[..10], [0, 2, 4, 5, 6, 7, 12, 13, 14, 15]);
        assert_eq!(rows[10..], [1, 3, 8, 9, 10, 11, 16, 17, 18, 19]);
    }
}
