//! The memory of one layer.

use overdrive_attention::Backend;
use overdrive_attention::rows::{HeadRows, RowsShape, attend};
use overdrive_sys::cuda::on_device;
use overdrive_sys::raw::LocatedTensor;
use tch::{Device, Kind, Tensor};

use crate::copy::{copy_tokens, rows_of};
use crate::key_values::{KeyValues, Spec};
use crate::{AttendOptions, Error, QkvRows, Result};

/// The keys and values of one layer, `(B, H, capacity, D)`, contiguous. The tokens of a head are
/// adjacent, so attention reads one contiguous range for each head.
#[derive(Debug)]
pub(crate) struct Buffer {
    pub(crate) keys: LocatedTensor,
    pub(crate) values: LocatedTensor,
    pub(crate) spec: Spec,
    pub(crate) capacity: i64,
}

impl Buffer {
    /// Allocates a buffer without initializing it.
    pub(crate) fn new(spec: Spec, capacity: i64) -> Result<Buffer> {
        let empty = |dim| {
            let size = [spec.batch, spec.heads, capacity, dim];
            let empty = Tensor::f_empty(size, (spec.kind, spec.device));
            on_device(spec.device, empty.map_err(Error::from))
        };
        Ok(Buffer {
            keys: empty(spec.key_dim)?.into(),
            values: empty(spec.value_dim)?.into(),
            spec,
            capacity,
        })
    }

    /// Copies `count` of the new tokens, beginning with the new token `from`, to position `at`.
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

    /// Returns `true` if [`attend_rows`](Self::attend_rows) can take such tokens.
    pub(crate) fn takes_rows(&self, new: &QkvRows<'_>, options: &AttendOptions<'_>) -> bool {
        let spec = &self.spec;
        let equal = |size: i64, other: usize| usize::try_from(size).is_ok_and(|size| size == other);
        spec.kind == Kind::Float
            && spec.device == Device::Cpu
            && equal(spec.batch, new.batch)
            && equal(spec.heads, new.kv_heads)
            && equal(spec.key_dim, new.head_dim)
            && equal(spec.value_dim, new.head_dim)
            && new.tokens().is_some()
            && options.mask.is_none()
            && matches!(options.backend, Backend::Auto | Backend::Blockwise)
    }

    /// Writes the new keys and values after the `held` tokens and computes the attention over all of them. The buffer
    /// must have room.
    pub(crate) fn attend_rows(
        &mut self,
        held: i64,
        new: &QkvRows<'_>,
        options: &AttendOptions<'_>,
        output: &mut [f32],
    ) -> Result<()> {
        let to_usize = |size: i64| usize::try_from(size).unwrap_or(0);
        let (held, capacity) = (to_usize(held), to_usize(self.capacity));
        let (width, tokens) = (new.width(), new.tokens().unwrap_or(0));
        let (keys, values) = rows_of(self)?;
        let dim = new.head_dim;
        let queries = new.heads * dim;
        let head = capacity * dim;
        let batch = new.kv_heads * head;
        for (index, row) in new.rows.chunks_exact(width).enumerate() {
            let at = index / tokens * batch + (held + index % tokens) * dim;
            let (of_keys, of_values) = row[queries..].split_at(new.kv_heads * dim);
            for (to, from) in [(&mut *keys, of_keys), (&mut *values, of_values)] {
                for (number, from) in from.chunks_exact(dim).enumerate() {
                    let at = at + number * head;
                    to[at..at + dim].copy_from_slice(from);
                }
            }
        }
        let heads = |data| HeadRows {
            data,
            batch,
            head,
            row: dim,
        };
        let query = HeadRows {
            data: new.rows,
            batch: tokens * width,
            head: dim,
            row: width,
        };
        let shape = RowsShape {
            batch: new.batch,
            heads: new.heads,
            kv_heads: new.kv_heads,
            queries: tokens,
            keys: held + tokens,
            head_dim: dim,
        };
        let done = attend(
            query,
            heads(keys),
            heads(values),
            shape,
            &options.causal(),
            output,
        )?;
        debug_assert!(done, "`takes_rows` admits what the kernel takes");
        Ok(())
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
            // Gathers only the filled tokens, directly into the new buffer: `index_select` of the whole
            // buffer would copy the free capacity and allocate twice.
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

/// Returns a copy of a tensor that owns its memory.
pub(crate) fn copied(tensor: &Tensor) -> std::result::Result<Tensor, tch::TchError> {
    let mut copy = tensor.f_empty_like()?;
    copy.f_copy_(tensor)?;
    Ok(copy)
}
