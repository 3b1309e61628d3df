use tch::{Kind, Tensor};

use crate::Result;
use crate::kernels::Argument::{F32, I32, I64, Tensor as Elements};
use crate::kernels::{Kernels, Loaded, Request, dense, dtype, multiples_of_16, strided};

/// Rotary position embedding of heads of one dtype, forward and backward.
#[derive(Debug, Clone, Copy)]
pub struct Rotary {
    kernels: &'static Kernels,
    pairs: i64,
    split: Loaded,
    /// The kernels for strides that are multiples of 16.
    join_aligned: Option<Loaded>,
    join: Loaded,
}

/// The cosines and sines of the tokens: `(T, pairs)` or `(B, T, pairs)`, contiguous and in f32.
#[derive(Debug, Clone, Copy)]
pub struct RotaryTables<'a> {
    /// The cosines.
    pub cos: &'a Tensor,
    /// The sines.
    pub sin: &'a Tensor,
}

impl RotaryTables<'_> {
    /// Returns the distance in elements between the tables of two sequences.
    fn stride(&self, length: i64, pairs: i64) -> i64 {
        let size = self.cos.size();
        // A batch dimension of 1 is one table for all sequences.
        let own = size.len() == 3 && size[0] > 1;
        if own { length * pairs } else { 0 }
    }
}

impl Kernels {
    /// Returns the kernels for heads of `dim` channels, of which `pairs` pairs are rotated; `None` if there are none.
    ///
    /// # Errors
    /// [`Error::Driver`](crate::Error::Driver) if a kernel cannot be loaded.
    pub fn rotary(
        &'static self,
        kind: Kind,
        dim: i64,
        pairs: i64,
        interleaved: bool,
    ) -> Result<Option<Rotary>> {
        let Some(dtype) = dtype(kind).filter(|_| pairs > 0) else {
            return Ok(None);
        };
        let find = |kernel, aligned| {
            self.find(&Request {
                kernel,
                dtype,
                constants: vec![("INTERLEAVED", i64::from(interleaved))],
                least: ("PAIRS", pairs),
                aligned,
            })
        };
        let aligned = multiples_of_16(&[dim, pairs]);
        let split = find("rotary_split", aligned)?;
        let join = find("rotary_join", false)?;
        let join_aligned = match aligned {
            true => find("rotary_join", true)?,
            false => None,
        };
        Ok(split.zip(join).map(|(split, join)| Rotary {
            kernels: self,
            pairs,
            split,
            join_aligned,
            join,
        }))
    }
}

impl Rotary {
    /// Splits rows `qkv (B, T, (H + 2·Hkv)·D)` into queries, keys and values `(B, T, H, D)`, and rotates the first two.
    ///
    /// # Errors
    /// [`Error::Common`](crate::Error::Common) for tensors on another device or of another dtype,
    /// [`Error::Driver`](crate::Error::Driver) if the launch fails.
    pub fn split(
        &self,
        qkv: &Tensor,
        [heads, kv_heads]: [i64; 2],
        tables: RotaryTables<'_>,
    ) -> Result<[Tensor; 3]> {
        let qkv = dense(qkv)?;
        let size = qkv.size();
        let (batch, length) = (size[0], size[1]);
        let all = heads + 2 * kv_heads;
        let dim = size[2] / all;
        let new = |count| Tensor::f_empty([batch, length, count, dim], (qkv.kind(), qkv.device()));
        let [q, k, v] = [new(heads)?, new(kv_heads)?, new(kv_heads)?];
        let (cos, sin) = (dense(tables.cos)?, dense(tables.sin)?);
        let arguments = [
            ("x", Elements(&qkv)),
            ("q", Elements(&q)),
            ("k", Elements(&k)),
            ("v", Elements(&v)),
            ("cos", Elements(&cos)),
            ("sin", Elements(&sin)),
            ("length", I32(length)),
            ("q_heads", I32(heads)),
            ("kv_heads", I32(kv_heads)),
            ("dim", I32(dim)),
            ("pairs", I32(self.pairs)),
            ("table_stride", I64(tables.stride(length, self.pairs))),
        ];
        let blocks = blocks(&self.split, batch * length, all)?;
        self.kernels.launch(&self.split, blocks, &arguments)?;
        Ok([q, k, v])
    }

    /// Rotates the heads of one tensor `(B, T, H, D)` with any strides; `reverse` rotates back, which is the gradient.
    ///
    /// # Errors
    /// As [`Rotary::split`].
    pub fn rotate(&self, x: &Tensor, tables: RotaryTables<'_>, reverse: bool) -> Result<Tensor> {
        self.join([x, x, x], [x.size()[2], 0, 0], tables, reverse)
    }

    /// Returns the gradient of [`Rotary::split`], `(B, T, (H + 2·Hkv)·D)`, from the gradients of its results.
    ///
    /// # Errors
    /// As [`Rotary::split`].
    pub fn split_backward(
        &self,
        gradients: [&Tensor; 3],
        tables: RotaryTables<'_>,
    ) -> Result<Tensor> {
        let counts = gradients.map(|gradient| gradient.size()[2]);
        let joint = self.join(gradients, counts, tables, true)?;
        Ok(joint.f_flatten(2, 3)?)
    }

    fn join(
        &self,
        parts: [&Tensor; 3],
        counts: [i64; 3],
        tables: RotaryTables<'_>,
        reverse: bool,
    ) -> Result<Tensor> {
        let parts = [strided(parts[0])?, strided(parts[1])?, strided(parts[2])?];
        let [q, k, v] = &parts;
        let size = q.size();
        let (batch, length, dim) = (size[0], size[1], size[3]);
        let heads = counts.iter().sum();
        let y = Tensor::f_empty([batch, length, heads, dim], (q.kind(), q.device()))?;
        let (cos, sin) = (dense(tables.cos)?, dense(tables.sin)?);
        let strides = [q.stride(), k.stride(), v.stride()];
        let stride = |part: usize, axis: usize| I64(strides[part][axis]);
        let arguments = [
            ("q", Elements(q)),
            ("k", Elements(k)),
            ("v", Elements(v)),
            ("y", Elements(&y)),
            ("cos", Elements(&cos)),
            ("sin", Elements(&sin)),
            ("length", I32(length)),
            ("q_heads", I32(counts[0])),
            ("kv_heads", I32(counts[1])),
            ("v_heads", I32(counts[2])),
            ("dim", I32(dim)),
            ("pairs", I32(self.pairs)),
            ("table_stride", I64(tables.stride(length, self.pairs))),
            ("q_sequence", stride(0, 0)),
            ("q_token", stride(0, 1)),
            ("q_head", stride(0, 2)),
            ("k_sequence", stride(1, 0)),
            ("k_token", stride(1, 1)),
            ("k_head", stride(1, 2)),
            ("v_sequence", stride(2, 0)),
            ("v_token", stride(2, 1)),
            ("v_head", stride(2, 2)),
            ("sign", F32(if reverse { -1.0 } else { 1.0 })),
        ];
        let wide = strides.iter().all(|strides| multiples_of_16(&strides[..3]));
        let loaded = self.join_aligned.as_ref().filter(|_| wide);
        let loaded = loaded.unwrap_or(&self.join);
        let blocks = blocks(loaded, batch * length, heads)?;
        self.kernels.launch(loaded, blocks, &arguments)?;
        Ok(y)
    }
}

/// Returns the grid with one program for each token and block of heads.
fn blocks(loaded: &Loaded, tokens: i64, heads: i64) -> Result<[usize; 2]> {
    let each = loaded.variant.size("HEADS")?;
    Ok([tokens as usize, (heads as usize).div_ceil(each)])
}
