//! New keys and values, checked once.

use tch::{Device, Kind, Tensor};

use crate::{Error, Result};

/// What all entries of a layer have in common.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Spec {
    pub(crate) batch: i64,
    pub(crate) heads: i64,
    pub(crate) key_dim: i64,
    pub(crate) value_dim: i64,
    pub(crate) kind: Kind,
    pub(crate) device: Device,
}

/// Keys `(B, H, T, D)` and values `(B, H, T, D_v)` of one kind and device, without a gradient.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Entries<'a> {
    pub(crate) keys: &'a Tensor,
    pub(crate) values: &'a Tensor,
    pub(crate) spec: Spec,
    pub(crate) tokens: i64,
}

impl<'a> Entries<'a> {
    pub(crate) fn new(layer: usize, keys: &'a Tensor, values: &'a Tensor) -> Result<Entries<'a>> {
        let (k, v) = (keys.size(), values.size());
        let (&[batch, heads, tokens, key_dim], &[.., value_dim]) = (k.as_slice(), v.as_slice())
        else {
            return Err(Error::BadShape { keys: k, values: v });
        };
        if v.len() != 4 || k[..3] != v[..3] {
            return Err(Error::BadShape { keys: k, values: v });
        }
        let (kind, device) = (keys.f_kind()?, keys.device());
        let of_values = (values.f_kind()?, values.device());
        if of_values != (kind, device) {
            return Err(Error::ValuesUnlikeKeys {
                layer,
                keys: kind,
                keys_device: device,
                values: of_values.0,
                values_device: of_values.1,
            });
        }
        if keys.requires_grad() || values.requires_grad() {
            return Err(Error::RequiresGrad { layer });
        }
        Ok(Entries {
            keys,
            values,
            spec: Spec {
                batch,
                heads,
                key_dim,
                value_dim,
                kind,
                device,
            },
            tokens,
        })
    }
}

impl Spec {
    /// An error unless entries of `other` can join those of `self`.
    pub(crate) fn check_fit(&self, layer: usize, other: &Spec) -> Result<()> {
        if self == other {
            return Ok(());
        }
        let values = self.key_dim == other.key_dim;
        let shape = |spec: &Spec| {
            let dim = if values { spec.value_dim } else { spec.key_dim };
            vec![spec.batch, spec.heads, dim]
        };
        Err(Error::Mismatch {
            layer,
            held: self.kind,
            held_shape: shape(self),
            held_device: self.device,
            got: other.kind,
            got_shape: shape(other),
            got_device: other.device,
        })
    }

    /// Bytes of the keys and values of one token of one row.
    pub(crate) fn bytes_per_token(&self) -> u64 {
        let numbers = self.heads * (self.key_dim + self.value_dim);
        u64::try_from(numbers).unwrap_or(0) * self.kind.elt_size_in_bytes() as u64
    }
}

/// `len`, which a cache of `held` tokens is asked to keep.
pub(crate) fn check_truncation(len: i64, held: i64) -> Result<()> {
    if len < 0 {
        return Err(Error::NegativeLength { len });
    }
    if len > held {
        return Err(Error::TruncateBeyondEnd { len, held });
    }
    Ok(())
}
