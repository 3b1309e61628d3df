//! Attention on f32 slices.
//!
//! A decoder that reuses its buffers calls [`attend`] instead of [`attention`](crate::attention()), whose checks,
//! tensors and autograd node take longer than the attention of one token over a short sequence. The kernel is the same;
//! nothing is recorded for autograd.

use overdrive_core::Error as Common;
use overdrive_kernels::tensors::Strided;
use overdrive_kernels::{Buffers, InstructionSet, Kept, capacity_bytes};
use tch::{Device, Kind};

use crate::Result;
use crate::call::{check_options, scale, unresolved_limits};
use crate::kernel::{
    self, AttentionInputs, ForwardOutputs, Rules, Sequence, Stored, View, ViewMut,
};
use crate::{AttentionOptions, Backend};

/// Heads in memory: row `r` of head `h` of batch `b` begins at `b · batch + h · head + r · row`.
#[derive(Debug, Clone, Copy)]
pub struct HeadRows<'a> {
    /// The elements.
    pub data: &'a [f32],
    /// The distance of two rows of the batch.
    pub batch: usize,
    /// The distance of two heads.
    pub head: usize,
    /// The distance of two tokens.
    pub row: usize,
}

/// The sizes of an attention on rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RowsShape {
    /// The number of rows of the batch.
    pub batch: usize,
    /// The number of query heads.
    pub heads: usize,
    /// The number of key heads, and of value heads.
    pub kv_heads: usize,
    /// The number of queries, which belong to the last tokens.
    pub queries: usize,
    /// The number of keys.
    pub keys: usize,
    /// The number of channels of a head.
    pub head_dim: usize,
}

#[derive(Default)]
struct Workspace(Vec<f32>);

impl Buffers for Workspace {
    fn bytes(&self) -> usize {
        capacity_bytes(&self.0)
    }
}

thread_local! {
    static WORKSPACE: Kept<Workspace> = const { Kept::new() };
}

/// Computes [`attention`](crate::attention()) on f32 slices and writes rows `(B · T, H · D)` to `output`. Returns
/// `false` and leaves `output` unchanged for a mask, slopes of ALiBi, dropout, or a back end other than this crate's
/// kernel.
///
/// # Errors
/// [`Error::Common`](crate::Error::Common) for slices or sinks that do not fit the shape, sinks on another device, or
/// an option outside its range.
///
/// ```
/// use overdrive_attention::AttentionOptions;
/// use overdrive_attention::rows::{HeadRows, RowsShape, attend};
///
/// // One query of two heads over two keys of one head, whose scores are equal.
/// let query = HeadRows { data: &[0.0; 4], batch: 4, head: 2, row: 4 };
/// let keys = HeadRows { data: &[1.0, 2.0, 3.0, 4.0], batch: 4, head: 4, row: 2 };
/// let shape = RowsShape { batch: 1, heads: 2, kv_heads: 1, queries: 1, keys: 2, head_dim: 2 };
/// let mut output = [0.0; 4];
/// assert!(attend(query, keys, keys, shape, &AttentionOptions::causal(), &mut output)?);
/// assert_eq!(output, [2.0, 3.0, 2.0, 3.0]);
/// # Ok::<(), overdrive_attention::Error>(())
/// ```
pub fn attend(
    query: HeadRows<'_>,
    keys: HeadRows<'_>,
    values: HeadRows<'_>,
    shape: RowsShape,
    options: &AttentionOptions<'_>,
    output: &mut [f32],
) -> Result<bool> {
    let plain = matches!(options.backend, Backend::Auto | Backend::Blockwise)
        && options.dropout_p == 0.0
        && options.mask.is_none()
        && options.alibi_slopes.is_none();
    if !plain {
        return Ok(false);
    }
    check(query, keys, values, shape, output.len())?;
    let [batch, heads, head_dim] =
        [shape.batch, shape.heads, shape.head_dim].map(|size| size.try_into().unwrap_or(i64::MAX));
    check_options(options, Device::Cpu, heads, batch)?;
    let scale = scale(options, head_dim)?;
    if output.is_empty() {
        return Ok(true);
    }
    let sinks = options.sinks.map(|sinks| -> Result<_> {
        let sinks = sinks.f_detach()?.f_to_kind(Kind::Float)?;
        Ok(Strided::rows(&sinks.f_contiguous()?)?)
    });
    let sinks = sinks.transpose()?;
    let inputs = AttentionInputs {
        set: InstructionSet::best(),
        sequences: (0..shape.batch)
            .map(|batch| Sequence {
                batch,
                query_start: 0,
                queries: shape.queries,
                key_start: 0,
                keys: shape.keys,
            })
            .collect(),
        heads: shape.heads,
        kv_heads: shape.kv_heads,
        key_dim: shape.head_dim,
        value_dim: shape.head_dim,
        query: query.view(),
        key: Stored::Elements(keys.view()),
        value: Stored::Elements(values.view()),
        pages: None,
        rules: Rules {
            scale,
            softcap: options.softcap,
            limits: unresolved_limits(options),
            bottom_right: options.alignment == crate::Alignment::BottomRight,
            slopes: None,
            sinks: sinks.as_ref().map(Strided::elements).transpose()?,
            bias: None,
            dropout: None,
        },
    };
    let logsumexps = shape.batch * shape.heads * shape.queries;
    let needed = kernel::forward_workspace(&inputs);
    let width = shape.heads * shape.head_dim;
    let per_batch = shape.heads * shape.queries;
    Kept::with(&WORKSPACE, |Workspace(memory)| {
        // Only grown: clearing would write every element twice.
        if memory.len() < logsumexps + needed {
            memory.resize(logsumexps + needed, 0.0);
        }
        let (logsumexp, workspace) = memory.split_at_mut(logsumexps);
        let outputs = ForwardOutputs {
            output: ViewMut::new(output, shape.queries * width, shape.head_dim, width),
            logsumexp: ViewMut::new(logsumexp, per_batch, shape.queries, 1),
        };
        kernel::forward(&inputs, &outputs, &mut workspace[..needed]);
    });
    Ok(true)
}

impl<'a> HeadRows<'a> {
    fn view(self) -> View<'a, f32> {
        View {
            data: self.data,
            batch: self.batch,
            head: self.head,
            row: self.row,
        }
    }

    /// Returns the number of elements up to the end of the last row; `None` if it overflows.
    fn reach(&self, batch: usize, heads: usize, rows: usize, dim: usize) -> Option<usize> {
        if batch == 0 || heads == 0 || rows == 0 {
            return Some(0);
        }
        let last = |count: usize, stride: usize| (count - 1).checked_mul(stride);
        last(batch, self.batch)?
            .checked_add(last(heads, self.head)?)?
            .checked_add(last(rows, self.row)?)?
            .checked_add(dim)
    }
}

/// Checks the slices, whose rows the kernel reads by their strides.
fn check(
    query: HeadRows<'_>,
    keys: HeadRows<'_>,
    values: HeadRows<'_>,
    shape: RowsShape,
    output: usize,
) -> Result<()> {
    let RowsShape {
        batch,
        heads,
        kv_heads,
        queries,
        keys: tokens,
        head_dim,
    } = shape;
    if kv_heads == 0 || heads % kv_heads != 0 || head_dim == 0 {
        let found = format!("{heads} heads of {head_dim} channels over {kv_heads}");
        let expected = "a multiple of the key heads, with at least one channel";
        return Err(Common::option("heads", found, expected).into());
    }
    for (name, rows, heads, count) in [
        ("query", query, heads, queries),
        ("keys", keys, kv_heads, tokens),
        ("values", values, kv_heads, tokens),
    ] {
        let reach = rows.reach(batch, heads, count, head_dim);
        if reach.is_none_or(|reach| reach > rows.data.len()) {
            let expected = format!("all rows of {shape:?} at the strides of {name}");
            return Err(Common::shape(name, [rows.data.len() as i64], expected).into());
        }
    }
    let expected = batch
        .checked_mul(queries)
        .and_then(|rows| rows.checked_mul(heads * head_dim));
    if expected != Some(output) {
        let expected = format!("(B · T · H · D,) of {shape:?}");
        return Err(Common::shape("output", [output as i64], expected).into());
    }
    Ok(())
}
