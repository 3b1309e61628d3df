//! The memory of one layer.

use tch::Tensor;

use crate::Result;
use crate::copy::copy_tokens;
use crate::entries::{Entries, Spec};

/// Keys and values of one layer, `(B, H, capacity, D)`, contiguous: a head's tokens lie side by side, so
/// that attention reads one run of memory a head.
#[derive(Debug)]
pub(crate) struct Buffer {
    pub(crate) keys: Tensor,
    pub(crate) values: Tensor,
    pub(crate) spec: Spec,
    pub(crate) capacity: i64,
}

impl Buffer {
    /// Uninitialised.
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

    /// Copies `count` of the new tokens, from number `from` of them on, to `at..`.
    pub(crate) fn write(
        &mut self,
        at: i64,
        new: &Entries<'_>,
        from: i64,
        count: i64,
    ) -> Result<()> {
        copy_tokens(&self.keys, at, new.keys, (from, count))?;
        copy_tokens(&self.values, at, new.values, (from, count))
    }

    /// Tokens `from..from + len`, not copied.
    pub(crate) fn view(&self, from: i64, len: i64) -> Result<(Tensor, Tensor)> {
        Ok((
            self.keys.f_narrow(2, from, len)?,
            self.values.f_narrow(2, from, len)?,
        ))
    }

    /// A larger buffer that begins with the first `len` tokens of this one.
    pub(crate) fn resized(&self, capacity: i64, len: i64) -> Result<Buffer> {
        let resized = Buffer::new(self.spec, capacity)?;
        for (to, from) in [(&resized.keys, &self.keys), (&resized.values, &self.values)] {
            to.f_narrow(2, 0, len)?
                .f_copy_(&from.f_narrow(2, 0, len)?)?;
        }
        Ok(resized)
    }

    /// A buffer of the same capacity whose row `i` is this one's row `rows[i]`, in its first `len`
    /// tokens.
    pub(crate) fn selected(&self, rows: &Tensor, len: i64) -> Result<Buffer> {
        let batch = i64::try_from(rows.numel()).unwrap_or(i64::MAX);
        let selected = Buffer::new(Spec { batch, ..self.spec }, self.capacity)?;
        for (to, from) in [
            (&selected.keys, &self.keys),
            (&selected.values, &self.values),
        ] {
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

/// A tensor of its own with the same elements.
pub(crate) fn copied(tensor: &Tensor) -> std::result::Result<Tensor, tch::TchError> {
    let mut copy = tensor.f_empty_like()?;
    copy.f_copy_(tensor)?;
    Ok(copy)
}
