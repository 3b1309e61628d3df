use serde_json::{Map, Value, json};
use tch::Kind;

use super::family::{LayerType, LlamaFamily};
use super::fields::{Fields, bad};
use super::sizes::check_size;
use crate::{Error, Result};

/// The sizes of the layers of linear attention by the gated delta rule (Yang et al. 2024, arXiv:2412.06464), with the
/// keys and defaults of transformers' `Qwen3NextConfig` and `Qwen3_5TextConfig`. Such a layer has a state of fixed size
/// for a sequence in place of keys and values.
#[derive(Debug, Clone, PartialEq)]
pub struct DeltaNetConfig {
    /// The number of tokens that the convolution of queries, keys and values covers; default 4.
    pub linear_conv_kernel_dim: i64,
    /// The number of channels of a query or key; default 128.
    pub linear_key_head_dim: i64,
    /// The number of channels of a value; default 128.
    pub linear_value_head_dim: i64,
    /// The number of heads of queries and keys; default 16.
    pub linear_num_key_heads: i64,
    /// The number of heads of values, a multiple of that of keys; default 32.
    pub linear_num_value_heads: i64,
}

impl DeltaNetConfig {
    /// Returns the defaults of transformers, or `None` for a family without such layers.
    pub(super) fn of(family: LlamaFamily) -> Option<DeltaNetConfig> {
        family.is_hybrid().then_some(DeltaNetConfig {
            linear_conv_kernel_dim: 4,
            linear_key_head_dim: 128,
            linear_value_head_dim: 128,
            linear_num_key_heads: 16,
            linear_num_value_heads: 32,
        })
    }

    pub(super) fn read(&mut self, fields: &mut Fields) -> Result<()> {
        for (key, size) in self.sizes_mut() {
            fields.positive(key, size)?;
        }
        // transformers has no other form of these layers and of the attention beside them.
        let mut gated = true;
        fields.boolean("attn_output_gate", &mut gated)?;
        match gated {
            true => Ok(()),
            false => Err(Error::unsupported(
                "attn_output_gate",
                "false",
                "true, attention with a gate",
            )),
        }
    }

    /// Returns the types of layers of a file that has `full_attention_interval` (default 4) in place of them.
    pub(super) fn layer_types(fields: &mut Fields, layers: i64) -> Result<Vec<LayerType>> {
        let mut interval = 4;
        fields.positive("full_attention_interval", &mut interval)?;
        let of_layer = |layer| match (layer + 1) % interval {
            0 => LayerType::Full,
            _ => LayerType::Linear,
        };
        Ok((0..layers).map(of_layer).collect())
    }

    fn sizes_mut(&mut self) -> [(&'static str, &mut i64); 5] {
        [
            ("linear_conv_kernel_dim", &mut self.linear_conv_kernel_dim),
            ("linear_key_head_dim", &mut self.linear_key_head_dim),
            ("linear_value_head_dim", &mut self.linear_value_head_dim),
            ("linear_num_key_heads", &mut self.linear_num_key_heads),
            ("linear_num_value_heads", &mut self.linear_num_value_heads),
        ]
    }

    pub(super) fn write(&self, map: &mut Map<String, Value>) {
        for (key, size) in self.clone().sizes_mut() {
            map.insert(key.to_owned(), json!(size));
        }
    }

    pub(super) fn validate(&self) -> Result<()> {
        for (key, size) in self.clone().sizes_mut() {
            check_size(key, *size)?;
        }
        let (keys, values) = (self.linear_num_key_heads, self.linear_num_value_heads);
        if values % keys != 0 {
            let expected = format!("a multiple of linear_num_key_heads ({keys})");
            return Err(bad("linear_num_value_heads", &values.into(), &expected));
        }
        Ok(())
    }

    /// Returns the number of bytes of the state of one sequence: the last inputs of the convolution, in `kind`, and the
    /// matrices of the heads in f32.
    pub(crate) fn state_bytes(&self, kind: Kind) -> u64 {
        let inputs = self.mixed_width() * (self.linear_conv_kernel_dim - 1);
        let matrices = self.value_width() * self.linear_key_head_dim;
        let bytes = |count: i64, kind: Kind| {
            count
                .unsigned_abs()
                .saturating_mul(kind.elt_size_in_bytes() as u64)
        };
        bytes(inputs, kind).saturating_add(bytes(matrices, Kind::Float))
    }

    /// Returns the width of all queries, or of all keys.
    pub(crate) fn key_width(&self) -> i64 {
        self.linear_num_key_heads * self.linear_key_head_dim
    }

    /// Returns the width of all values.
    pub(crate) fn value_width(&self) -> i64 {
        self.linear_num_value_heads * self.linear_value_head_dim
    }

    /// Returns the width of queries, keys and values side by side.
    pub(crate) fn mixed_width(&self) -> i64 {
        2 * self.key_width() + self.value_width()
    }
}
