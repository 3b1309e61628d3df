//! The memory of one layer.

use tch::Tensor;

use crate::Result;
use crate::copy::copy_tokens;
use crate::key_values::{KeyValues, Spec};

/// The keys and values of one layer, `(B, H, capacity, D)`, contiguous. The tokens of a head are
/// adjacent, so that attention reads one run of memory a head.
#[derive(Debug)]
pub(crate) struct Buffer {
    pub(crate) keys: Tensor,
    pub(crate) values: Tensor,
    pub(crate) spec: Spec,
    pub(crate) capacity: i64,
}

impl Buffer {
    /// Allocates a buffer without initializing it.
    pub(crate) fn new(spec: Spec, capacity: i64) -> Result<Buffer> {
        let empty = |dim| {
            let size = [spec.batch, spec.heads, capacity, dim];
            Tensor::f_empty(size, (spec.kind, spec.device))
        };
        Ok(Buffer {
            keys: empty(spec.key_dim)?,
            values: empty(spec.value_dim)?,
            spec,
            capacity,
        })
    }

    /// Copies `count` of the new tokens, beginning with token `from` of them, to position `at`.
    pub(crate) fn write(
        &mut self,
        at: i64,
        new: &KeyValues<'_>,
        from: i64,
        count: i64,
    ) -> Result<()> {
        copy_tokens(&self.keys, at, new.keys, (from, count))?;
        copy_tokens(&self.values, at, new.values, (from, count))
    }

    /// Returns a view of the tokens `from..from + len`.
    pub(crate) fn view(&self, from: i64, len: i64) -> Result<(Tensor, Tensor)> {
        Ok((
            self.keys.f_narrow(2, from, len)?,
            self.values.f_narrow(2, from, len)?,
        ))
    }

    /// Returns a buffer of `capacity` tokens that begins with the first `len` tokens of this one.
    pub(crate) fn resized(&self, capacity: i64, len: i64) -> Result<Buffer> {
        let resized = Buffer::new(self.spec, capacity)?;
        for (to, from) in [(&resized.keys, &self.keys), (&resized.values, &self.values)] {
            to.f_narrow(2, 0, len)?
                .f_copy_(&from.f_narrow(2, 0, len)?)?;
        }
        Ok(resized)
    }

    /// Returns a buffer of the same capacity whose row `i` holds the first `len` tokens of row
    /// `rows[i]`.
    pub(crate) fn selected(&self, rows: &Tensor, len: i64) -> Result<Buffer> {
        let batch = i64::try_from(rows.numel()).unwrap_or(i64::MAX);
        let selected = Buffer::new(Spec { batch, ..self.spec }, self.capacity)?;
        for (to, from) in [
            (&selected.keys, &self.keys),
            (&selected.values, &self.values),
        ] {
            // Only the filled tokens are gathered, straight into the new buffer: `index_select` of the
            // whole one would copy the free capacity and allocate twice.
            let to = to.f_narrow(2, 0, len)?;
            let _same = from.f_narrow(2, 0, len)?.f_index_select_out(&to, 0, rows)?;
        }
        Ok(selected)
    }

    pub(crate) fn bytes(&self) -> u64 {
        let tokens = self.spec.batch * self.capacity;
        u64::try_from(tokens).unwrap_or(0) * self.spec.bytes_per_token()
    }
}

/// Returns a copy of a tensor with memory of its own.
pub(crate) fn copied(tensor: &Tensor) -> std::result::Result<Tensor, tch::TchError> {
    let mut copy = tensor.f_empty_like()?;
    copy.f_copy_(tensor)?;
    Ok(copy)
}
