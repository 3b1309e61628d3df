use overdrive_core::Error as Common;
use tch::{Kind, Tensor};

use crate::Result;
use crate::kernels::Argument::{F32, I32, I64, Tensor as Elements};
use crate::kernels::{
    Kernels, Loaded, Request, check_shapes, dense, dtype, multiples_of_16, strided,
};

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
    /// Checks the tables for `batch` sequences of `length` tokens.
    fn check(&self, batch: i64, length: i64, pairs: i64) -> Result<()> {
        let size = self.cos.size();
        let fits = match *size.as_slice() {
            [tokens, own] => (tokens, own) == (length, pairs),
            [sequences, tokens, own] => {
                (tokens, own) == (length, pairs) && (sequences == 1 || sequences == batch)
            }
            _ => false,
        };
        if !fits {
            let expected = format!("[{length}, {pairs}], or [1 or {batch}, {length}, {pairs}]");
            return Err(Common::shape("cos", size, expected).into());
        }
        check_shapes(&[("sin", self.sin, &size)])
    }

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
        let all = heads + 2 * kv_heads;
        let (batch, length, dim) = match qkv.size().as_slice() {
            &[batch, length, width] if all > 0 && width % all == 0 => (batch, length, width / all),
            size => {
                let expected = format!("(B, T, {all} · D)");
                return Err(Common::shape("qkv", size, expected).into());
            }
        };
        self.check_dim(dim)?;
        tables.check(batch, length, self.pairs)?;
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
        self.join([x, x, x], [heads_of(x), 0, 0], tables, reverse)
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
        let counts = gradients.map(heads_of);
        let joint = self.join(gradients, counts, tables, true)?;
        Ok(joint.f_flatten(2, 3)?)
    }

    fn check_dim(&self, dim: i64) -> Result<()> {
        if 2 * self.pairs <= dim {
            return Ok(());
        }
        let expected = format!("at least 2 · {} pairs", self.pairs);
        Err(Common::option("the channels of a head", dim, expected).into())
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
        let &[batch, length, _, dim] = q.size().as_slice() else {
            return Err(Common::shape("q", q.size(), "(B, T, H, D)".to_owned()).into());
        };
        for (name, part) in [("k", k), ("v", v)] {
            check_shapes(&[(name, part, &[batch, length, heads_of(part), dim])])?;
        }
        self.check_dim(dim)?;
        tables.check(batch, length, self.pairs)?;
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

/// Returns the number of heads of `(B, T, H, D)`; 0 for another shape, which is refused.
fn heads_of(x: &Tensor) -> i64 {
    x.size().get(2).copied().unwrap_or(0)
}
