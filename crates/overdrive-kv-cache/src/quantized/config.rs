use overdrive_core::{check_non_negative, check_option};

use super::codec::{Format, QuantizationAxis, QuantizationBits};
use crate::Result;
use crate::key_values::Spec;

/// The options of a [`QuantizedCache`](crate::QuantizedCache), with transformers' names in parentheses.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct QuantizedCacheConfig {
    /// The layers of the model. Default 1.
    pub layers: usize,
    /// The bits of a quantized value (`nbits`). Default 8.
    pub bits: QuantizationBits,
    /// The number of values that share a scale (`q_group_size`), even. Default 64. Along the channels of a
    /// token, groups have the largest even divisor of the head size up to this number; along the tokens of a
    /// channel, they have exactly this number. It is also the number of tokens that are quantized at once.
    pub group_size: i64,
    /// The minimum number of recent tokens that stay in full precision (`residual_length`). Default 128. Up
    /// to `group_size` more tokens wait to be quantized.
    pub residual_length: i64,
    /// The axis along which keys share a scale (`axis_key`). Default: the tokens of a channel, the best choice
    /// according to KIVI.
    pub axis_keys: QuantizationAxis,
    /// The axis along which values share a scale (`axis_value`). Default: the channels of a token.
    pub axis_values: QuantizationAxis,
}

impl Default for QuantizedCacheConfig {
    fn default() -> Self {
        QuantizedCacheConfig {
            layers: 1,
            bits: QuantizationBits::Eight,
            group_size: 64,
            residual_length: 128,
            axis_keys: QuantizationAxis::Channel,
            axis_values: QuantizationAxis::Token,
        }
    }
}

impl QuantizedCacheConfig {
    /// Returns the INT8 configuration for `layers` layers.
    pub fn int8(layers: usize) -> QuantizedCacheConfig {
        QuantizedCacheConfig {
            layers,
            ..QuantizedCacheConfig::default()
        }
    }

    /// Returns the INT4 configuration for `layers` layers.
    pub fn int4(layers: usize) -> QuantizedCacheConfig {
        QuantizedCacheConfig {
            bits: QuantizationBits::Four,
            ..QuantizedCacheConfig::int8(layers)
        }
    }

    /// Checks every option against its range.
    ///
    /// # Errors
    /// An [option](overdrive_core::Error::InvalidOption) out of its range.
    pub fn validate(&self) -> Result<()> {
        // The group size must be even, because a byte holds two values of 4 bits.
        let even = self.group_size >= 2 && self.group_size % 2 == 0;
        check_option(even, "group_size", self.group_size, "even and at least 2")?;
        Ok(check_non_negative("residual_length", self.residual_length)?)
    }

    /// Returns the formats of keys and values of `spec`.
    pub(super) fn formats(&self, spec: &Spec) -> Result<[Format; 2]> {
        Ok([
            self.format(spec.key_dim, self.axis_keys)?,
            self.format(spec.value_dim, self.axis_values)?,
        ])
    }

    fn format(&self, dim: i64, axis: QuantizationAxis) -> Result<Format> {
        // A head of 80 channels has no groups of 64: the largest even divisor, 40, keeps the groups
        // equal.
        let groups = (2..=self.group_size.min(dim)).rev();
        let group = groups
            .filter(|group| group % 2 == 0)
            .find(|group| dim % group == 0);
        let size = |n: i64| usize::try_from(n).unwrap_or(0);
        match group {
            Some(group) => Ok(Format {
                bits: self.bits,
                axis,
                dim: size(dim),
                group: size(group),
                block: size(self.group_size),
            }),
            None => {
                let expected = "an even number, since the cache packs values in pairs";
                Err(overdrive_core::Error::option("head_dim", dim, expected).into())
            }
        }
    }
}
