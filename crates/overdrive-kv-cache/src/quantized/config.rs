use super::codec::{Format, QuantizationAxis, QuantizationBits};
use crate::entries::Spec;
use crate::{Error, Result};

/// How a [`QuantizedCache`](crate::QuantizedCache) codes; transformers' names in brackets.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct QuantizedCacheConfig {
    /// Layers of the model; default 1.
    pub layers: usize,
    /// Bits of a number (`nbits`); default 8.
    pub bits: QuantizationBits,
    /// Numbers that share a scale (`q_group_size`), an even number; default 64. Of one token at most so
    /// many channels, as divide the head evenly; of one channel exactly so many tokens. Tokens are
    /// coded so many at a time.
    pub group_size: i64,
    /// The last tokens that stay in full precision, at least (`residual_length`); default 128. Up to
    /// `group_size` more wait to be coded.
    pub residual_length: i64,
    /// Which keys share a scale (`axis_key`); default: those of a channel, as KIVI found best.
    pub axis_keys: QuantizationAxis,
    /// Which values share a scale (`axis_value`); default: those of a token.
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
    /// INT8 for `layers` layers.
    pub fn int8(layers: usize) -> QuantizedCacheConfig {
        QuantizedCacheConfig {
            layers,
            ..QuantizedCacheConfig::default()
        }
    }

    /// INT4 for `layers` layers.
    pub fn int4(layers: usize) -> QuantizedCacheConfig {
        QuantizedCacheConfig {
            bits: QuantizationBits::Four,
            ..QuantizedCacheConfig::int8(layers)
        }
    }

    /// Whether the settings are in range.
    ///
    /// # Errors
    /// [`Error::BadConfig`] with the setting that is not.
    pub fn validate(&self) -> Result<()> {
        let bad = |key, found: i64, expected| {
            Err(Error::BadConfig {
                key,
                found: found.to_string(),
                expected,
            })
        };
        if self.group_size < 2 || self.group_size % 2 != 0 {
            return bad("group_size", self.group_size, "an even number from 2 on");
        }
        if self.residual_length < 0 {
            return bad("residual_length", self.residual_length, "at least 0");
        }
        Ok(())
    }

    /// The formats of keys and values of `spec`.
    pub(super) fn formats(&self, spec: &Spec) -> Result<[Format; 2]> {
        Ok([
            self.format(spec.key_dim, self.axis_keys)?,
            self.format(spec.value_dim, self.axis_values)?,
        ])
    }

    fn format(&self, dim: i64, axis: QuantizationAxis) -> Result<Format> {
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
            None => Err(Error::BadConfig {
                key: "channels of a head",
                found: dim.to_string(),
                expected: "an even number, for a cache that packs codes in pairs",
            }),
        }
    }
}
