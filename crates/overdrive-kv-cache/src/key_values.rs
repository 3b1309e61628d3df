//! New keys and values, and their checks.

use tch::{Device, Kind, Tensor};

use crate::{Error, Result};

/// The properties that all tokens of a layer share.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Spec {
    pub(crate) batch: i64,
    pub(crate) heads: i64,
    pub(crate) key_dim: i64,
    pub(crate) value_dim: i64,
    pub(crate) kind: Kind,
    pub(crate) device: Device,
}

/// Keys `(B, H, T, D)` and values `(B, H, T, D_v)` of one dtype and device, without a gradient.
#[derive(Debug, Clone, Copy)]
pub(crate) struct KeyValues<'a> {
    pub(crate) keys: &'a Tensor,
    pub(crate) values: &'a Tensor,
    pub(crate) spec: Spec,
    /// `T`.
    pub(crate) tokens: i64,
}

impl<'a> KeyValues<'a> {
    pub(crate) fn new(layer: usize, keys: &'a Tensor, values: &'a Tensor) -> Result<KeyValues<'a>> {
        check_shapes(keys, values)?;
        let (k, v) = (keys.size(), values.size());
        let spec = Spec {
            batch: k[0],
            heads: k[1],
            key_dim: k[3],
            value_dim: v[3],
            kind: keys.f_kind()?,
            device: keys.device(),
        };
        let value_kind = values.f_kind()?;
        if value_kind != spec.kind {
            let expected = format!("{:?}, the dtype of the keys", spec.kind);
            return Err(overdrive_core::Error::dtype("values", value_kind, expected).into());
        }
        if values.device() != spec.device {
            let expected = format!("on {:?}, the device of the keys", spec.device);
            return Err(overdrive_core::Error::device("values", values.device(), expected).into());
        }
        // The cache writes in place, which autograd would report only in the backward pass.
        if keys.requires_grad() || values.requires_grad() {
            return Err(Error::RequiresGrad { layer });
        }
        Ok(KeyValues {
            keys,
            values,
            spec,
            tokens: k[2],
        })
    }
}

/// Checks that keys and values are `(B, H, T, D)` with the same `B`, `H` and `T`.
fn check_shapes(keys: &Tensor, values: &Tensor) -> Result<()> {
    let (k, v) = (keys.size(), values.size());
    if k.len() != 4 {
        return Err(overdrive_core::Error::shape("keys", k, "(B, H, T, D)").into());
    }
    if v.len() != 4 || k[..3] != v[..3] {
        let expected = format!("(B, H, T, D) with the B, H and T of the keys, {k:?}");
        return Err(overdrive_core::Error::shape("values", v, expected).into());
    }
    Ok(())
}

impl Spec {
    /// Checks that tokens of `new` can be appended to those of `self`.
    pub(crate) fn check_fit(&self, layer: usize, new: &Spec) -> Result<()> {
        if self == new {
            return Ok(());
        }
        let remedy = format!(
            "like the tokens that layer {layer} holds; reset the cache before using it for another batch or model"
        );
        let same_keys = self.key_dim == new.key_dim;
        let tensor = if same_keys { "values" } else { "keys" };
        let shape = |spec: &Spec| {
            let dim = if same_keys {
                spec.value_dim
            } else {
                spec.key_dim
            };
            [spec.batch, spec.heads, dim]
        };
        let (held, got) = (shape(self), shape(new));
        Err(if held != got {
            let tensor = format!("{tensor} (B, H, D)");
            overdrive_core::Error::shape(tensor, got, format!("{held:?}, {remedy}"))
        } else if self.kind != new.kind {
            overdrive_core::Error::dtype("keys", new.kind, format!("{:?}, {remedy}", self.kind))
        } else {
            let expected = format!("on {:?}, {remedy}", self.device);
            overdrive_core::Error::device("keys", new.device, expected)
        }
        .into())
    }

    /// Returns the size in bytes of the keys and values of one token of one row.
    pub(crate) fn bytes_per_token(&self) -> u64 {
        let elements = self.heads * (self.key_dim + self.value_dim);
        u64::try_from(elements).unwrap_or(0) * self.kind.elt_size_in_bytes() as u64
    }
}

/// Checks that a cache of `held` tokens can be truncated to `len`.
pub(crate) fn check_truncation(len: i64, held: i64) -> Result<()> {
    overdrive_core::check_non_negative("len", len)?;
    if len > held {
        return Err(Error::TruncateBeyondEnd { len, held });
    }
    Ok(())
}
