use std::collections::HashMap;

use overdrive_autograd::NoGradGuard;
use overdrive_core::Error as Common;
use overdrive_kernels::tensors::{Fresh, Strided};
use overdrive_kernels::{Accumulate, InstructionSet};
use overdrive_sys::transfer::to_device;
use tch::{Device, Kind, Tensor};

use crate::attention::attention_with_lse;
use crate::blockwise::{accumulator, for_kind, workspace};
use crate::call::{check_options, scale, shape_error, slopes_of, unresolved_limits};
use crate::error::other_device;
use crate::gpu;
use crate::kernel::{
    self, AttentionInputs, ForwardOutputs, Pages, Rules, Sequence, Slopes, View, ViewMut, usize_of,
};
use crate::paged_blocks::{PagedBlocks, check_blocks};
use crate::paged_packed::{packed, packed_kernel, takes_packs};
use crate::{Alignment, AttentionOptions, Backend, Error, Layout, PagedLayout, Result};

/// Computes the attention of several sequences whose keys and values are in blocks of one pool, without a gradient.
/// Returns the output (N, H, D_v) and the log-sum-exp (H, N).
///
/// Query (N, H, D): the new queries of all sequences, concatenated without padding; key blocks (blocks, H_kv,
/// block_size, D), value blocks (blocks, H_kv, block_size, D_v). Each sequence has the result that
/// [`attention`](crate::attention) would return for it alone: positions for causality, window and ALiBi are relative to
/// the sequence, and queries are at the end of its keys. Sequences with one query and with many can be mixed.
/// `alibi_slopes` may be (H) or (sequences, H); `layout` is ignored.
///
/// On a CPU, the blockwise kernel reads keys and values in their blocks, without gathering them. On CUDA, so does a
/// kernel of overdrive-gpu if these are on (by default on Hopper), in one or two launches, for up to 16 queries of each
/// sequence and without ALiBi or sink tokens under a window. Otherwise, on CUDA, the blocks of all sequences are
/// gathered into one pack, which one call of a libtorch kernel computes: flash in half precision, else the efficient
/// kernel. With options that neither supports (ALiBi, a softcap, sink logits, sink tokens under a window), and for
/// another requested back end, sequences are computed one after another, which is correct but slow.
///
/// Keys and values of 8 bits ([`PagedBlocks`]) are dequantized a block of keys at a time by the CPU kernel; on CUDA, and
/// for another back end, the blocks of all sequences are dequantized into a copy first, which saves memory but no time.
///
/// The results equal those of `flash_attn_varlen_func` with a `block_table`. Method: PagedAttention (Kwon et al. 2023,
/// [arXiv:2309.06180](https://arxiv.org/abs/2309.06180)).
///
/// # Errors
/// [`Error::Common`] for tensors that do not fit, a mask, dropout, [`Alignment::TopLeft`] or a query that requires a
/// gradient; [`Error::PagedLayout`] for lengths and tables that do not
/// fit.
///
/// ```
/// use overdrive_attention::{AttentionOptions, PagedLayout, attention_paged};
/// use tch::{Device, Kind, Tensor};
///
/// # fn main() -> Result<(), overdrive_attention::Error> {
/// let random = |shape: [i64; 4]| Tensor::randn(shape, (Kind::Float, Device::Cpu));
/// let (keys, values) = (random([6, 2, 4, 8]), random([6, 2, 4, 8])); // 6 blocks of 4 tokens
/// let query = random([1, 3, 4, 8]).squeeze_dim(0); // 1 query of the first sequence, 2 of the second
/// let tables = vec![vec![5, 0, 2], vec![3]];
/// let layout = PagedLayout::new(tables, vec![1, 2], vec![10, 2], 4, Device::Cpu)?;
/// let (output, _) = attention_paged(&query, &keys, &values, &layout, &AttentionOptions::causal())?;
/// assert_eq!(output.size(), [3, 4, 8]);
/// # Ok(())
/// # }
/// ```
pub fn attention_paged<'a>(
    query: &Tensor,
    key_blocks: impl Into<PagedBlocks<'a>>,
    value_blocks: impl Into<PagedBlocks<'a>>,
    layout: &PagedLayout,
    options: &AttentionOptions<'_>,
) -> Result<(Tensor, Tensor)> {
    let (keys, values) = (key_blocks.into(), value_blocks.into());
    let is_quantized = check_blocks(query, keys, values)?;
    let call = PagedCall::new(query, keys.elements, values.elements, layout, options)?;
    let _no_grad = NoGradGuard::new();
    let in_place_on_cpu = query.device() == Device::Cpu
        && matches!(options.backend, Backend::Auto | Backend::Blockwise)
        && !takes_packs(Device::Cpu);
    if is_quantized {
        return match in_place_on_cpu {
            true => for_kind!(query.kind(), in_place(&call, keys, values)),
            false => dequantized(&call, keys, values),
        };
    }
    if let Some(results) = gpu::paged(&call)? {
        return Ok(results);
    }
    if layout.is_of_device {
        return Err(Error::PagedLayout {
            argument: "layout",
            problem: "is only on the device, and the decode kernel of overdrive-gpu, which could read it there, does not \
                      run this call; create the layout with `PagedLayout::new`"
                .to_owned(),
        });
    }
    if in_place_on_cpu {
        return for_kind!(query.kind(), in_place(&call, keys, values));
    }
    match (packed_kernel(&call), &layout.on_device) {
        (Some(kernel), Some(tables)) if takes_packs(query.device()) => {
            packed(&call, tables, kernel)
        }
        _ => gathered(&call),
    }
}

/// The checked arguments.
pub(crate) struct PagedCall<'a> {
    pub(crate) query: &'a Tensor,
    pub(crate) keys: &'a Tensor,
    pub(crate) values: &'a Tensor,
    pub(crate) layout: &'a PagedLayout,
    pub(crate) options: &'a AttentionOptions<'a>,
    pub(crate) scale: f64,
    pub(crate) sizes: Sizes,
}

/// The sizes of the tensors.
#[derive(Clone, Copy)]
pub(crate) struct Sizes {
    pub(crate) queries: i64,
    pub(crate) heads: i64,
    pub(crate) blocks: i64,
    pub(crate) kv_heads: i64,
    pub(crate) block_size: usize,
    pub(crate) key_dim: i64,
    pub(crate) value_dim: i64,
}

impl<'a> PagedCall<'a> {
    pub(crate) fn new(
        query: &'a Tensor,
        keys: &'a Tensor,
        values: &'a Tensor,
        layout: &'a PagedLayout,
        options: &'a AttentionOptions<'a>,
    ) -> Result<PagedCall<'a>> {
        let sizes = sizes(query, keys, values)?;
        layout.check(sizes.queries, sizes.blocks, sizes.block_size)?;
        if query.device() != layout.device {
            return Err(other_device("query", query.device(), layout.device));
        }
        let texts = i64::try_from(layout.len()).unwrap_or(i64::MAX);
        check_options(options, query.device(), sizes.heads, texts)?;
        refuse(query, options)?;
        Ok(PagedCall {
            query,
            keys,
            values,
            layout,
            options,
            scale: scale(options, sizes.key_dim)?,
            sizes,
        })
    }

    /// Returns the sequences in the form that the kernel takes.
    fn sequences(&self) -> Vec<Sequence> {
        let mut start = 0;
        let lengths = self.layout.query_lengths.iter();
        lengths
            .zip(&self.layout.key_lengths)
            .map(|(queries, keys)| {
                let sequence = Sequence {
                    batch: 0,
                    query_start: start,
                    queries: *queries,
                    key_start: 0,
                    keys: *keys,
                };
                start += queries;
                sequence
            })
            .collect()
    }
}

/// Runs the CPU kernel on the blocks in place.
fn in_place<E: Accumulate>(
    call: &PagedCall<'_>,
    keys: PagedBlocks<'_>,
    values: PagedBlocks<'_>,
) -> Result<(Tensor, Tensor)> {
    let (sizes, options) = (call.sizes, call.options);
    let query = Strided::rows(&call.query.f_detach()?.f_transpose(0, 1)?.f_unsqueeze(0)?)?;
    let (keys, values) = (keys.strided()?, values.strided()?);
    let accumulator = <E::Acc as overdrive_sys::raw::Element>::KIND;
    let numbers = |tensor: Option<&Tensor>| -> Result<Option<Strided>> {
        let flat = |tensor: &Tensor| {
            Strided::rows(&tensor.f_detach()?.f_to_kind(accumulator)?.f_contiguous()?)
        };
        Ok(tensor.map(flat).transpose()?)
    };
    let (slopes, sinks) = (numbers(options.alibi_slopes)?, numbers(options.sinks)?);
    let problem = AttentionInputs::<E> {
        set: InstructionSet::best(),
        sequences: call.sequences(),
        heads: usize_of(sizes.heads),
        kv_heads: usize_of(sizes.kv_heads),
        key_dim: usize_of(sizes.key_dim),
        value_dim: usize_of(sizes.value_dim),
        query: View::of(&query)?,
        key: keys.stored()?,
        value: values.stored()?,
        pages: Some(Pages {
            tables: &call.layout.block_tables,
            block_size: sizes.block_size,
        }),
        rules: Rules {
            scale: call.scale,
            softcap: options.softcap,
            limits: unresolved_limits(options),
            // New tokens are at the end of their keys; `refuse` has excluded other alignments.
            bottom_right: true,
            slopes: match (&slopes, options.alibi_slopes) {
                (Some(flat), Some(slopes)) => Some(Slopes {
                    data: flat.elements()?,
                    sequence: match slopes.dim() {
                        2 => usize_of(sizes.heads),
                        _ => 0,
                    },
                }),
                _ => None,
            },
            sinks: sinks.as_ref().map(Strided::elements).transpose()?,
            bias: None,
            dropout: None,
        },
    };
    let shape = [1, sizes.queries, sizes.heads, sizes.value_dim];
    let mut output = Fresh::new(&shape)?;
    let mut logsumexp = Fresh::new(&[1, sizes.heads, sizes.queries])?;
    let mut workspace = workspace::<E>(kernel::forward_workspace(&problem))?;
    let outputs = ForwardOutputs {
        output: ViewMut::by_row(&mut output)?,
        logsumexp: ViewMut::by_head(&mut logsumexp)?,
    };
    kernel::forward(&problem, &outputs, workspace.elements_mut()?);
    Ok((
        output.into_tensor().f_squeeze_dim(0)?,
        logsumexp.into_tensor().f_squeeze_dim(0)?,
    ))
}

/// Dequantizes the blocks of all sequences into a pool of their own, and attends to it.
fn dequantized(
    call: &PagedCall<'_>,
    keys: PagedBlocks<'_>,
    values: PagedBlocks<'_>,
) -> Result<(Tensor, Tensor)> {
    let layout = call.layout;
    if layout.is_of_device {
        return Err(Error::PagedLayout {
            argument: "layout",
            problem: "is only on the device, where no kernel reads quantized blocks; create the layout with \
                      `PagedLayout::new`"
                .to_owned(),
        });
    }
    // Shared blocks are copied once.
    let mut places = HashMap::new();
    let mut used = Vec::new();
    let tables = layout.block_tables.iter().enumerate().map(|(text, table)| {
        let table = table[..layout.used_blocks(text)].iter();
        let place = table.map(|block| {
            *places.entry(*block).or_insert_with(|| {
                used.push(i64::from(*block));
                // As many as a pool has blocks, whose numbers are u32.
                (used.len() - 1) as u32
            })
        });
        place.collect()
    });
    let tables = tables.collect();
    let table = to_device(Tensor::f_from_slice(&used)?, layout.device)?;
    let of_copy = PagedLayout::new(
        tables,
        layout.query_lengths.clone(),
        layout.key_lengths.clone(),
        layout.block_size,
        layout.device,
    )?;
    let kind = call.query.kind();
    let (keys, values) = (keys.dense(&table, kind)?, values.dense(&table, kind)?);
    attention_paged(call.query, &keys, &values, &of_copy, call.options)
}

/// Runs one sequence after another over a dense copy of its blocks.
fn gathered(call: &PagedCall<'_>) -> Result<(Tensor, Tensor)> {
    let (mut outputs, mut lses) = (Vec::new(), Vec::new());
    let made;
    let tables = match &call.layout.on_device {
        Some(tables) => tables,
        // Another back end was requested on a CPU.
        None => {
            made = call.layout.tables(call.query.device())?;
            &made
        }
    };
    for (text, sequence) in call.sequences().iter().enumerate() {
        let (start, count) = (sequence.query_start as i64, sequence.queries as i64);
        let query = call.query.f_narrow(0, start, count)?;
        let query = query.f_transpose(0, 1)?.f_unsqueeze(0)?;
        let slopes = slopes_of(call.options, text)?;
        let options = AttentionOptions {
            alibi_slopes: slopes.as_ref(),
            layout: Layout::Bhtd,
            ..*call.options
        };
        // A table may reserve blocks for future tokens, which are not copied.
        let used = call.layout.used_blocks(text) as i64;
        let table = tables.blocks.f_narrow(0, tables.block_starts[text], used)?;
        let dense = |blocks: &Tensor| -> Result<Tensor> {
            let blocks = blocks.f_index_select(0, &table)?;
            let rows = blocks.f_transpose(0, 1)?.f_flatten(1, 2)?;
            Ok(rows.f_narrow(1, 0, sequence.keys as i64)?.f_unsqueeze(0)?)
        };
        let (keys, values) = (dense(call.keys)?, dense(call.values)?);
        let (output, lse) = attention_with_lse(&query, &keys, &values, &options)?;
        outputs.push(output.f_squeeze_dim(0)?.f_transpose(0, 1)?);
        lses.push(lse.f_squeeze_dim(0)?);
    }
    if outputs.is_empty() {
        let sizes = call.sizes;
        let (kind, device) = (call.query.kind(), call.query.device());
        let output = [0, sizes.heads, sizes.value_dim];
        return Ok((
            Tensor::f_empty(output, (kind, device))?,
            Tensor::f_empty([sizes.heads, 0], (accumulator(kind), device))?,
        ));
    }
    Ok((Tensor::f_cat(&outputs, 0)?, Tensor::f_cat(&lses, 1)?))
}

/// Checks that all options are supported over a paged cache.
fn refuse(query: &Tensor, options: &AttentionOptions<'_>) -> Result<()> {
    let invalid = |option, value: String, expected| {
        Err(Error::Common(Common::option(option, value, expected)))
    };
    if options.mask.is_some() {
        let expected = "None over paged keys, whose scores have no common shape";
        return invalid("mask", "set".to_owned(), expected);
    }
    if options.dropout_p != 0.0 {
        let expected = "0 over paged keys, which are for inference only";
        return invalid("dropout_p", options.dropout_p.to_string(), expected);
    }
    if options.alignment == Alignment::TopLeft {
        let expected = "BottomRight, since new queries are at the end of their keys";
        return invalid("alignment", "TopLeft".to_owned(), expected);
    }
    if query.requires_grad() && overdrive_autograd::is_grad_enabled() {
        let value = "a tensor that requires a gradient".to_owned();
        let expected = "without a gradient (run under no_grad): attention over paged keys has no backward pass";
        return invalid("query", value, expected);
    }
    Ok(())
}

fn sizes(query: &Tensor, keys: &Tensor, values: &Tensor) -> Result<Sizes> {
    let (q, k, v) = (query.size(), keys.size(), values.size());
    if q.len() != 3 || q[1] == 0 || q[2] == 0 {
        let expected = "(queries of all sequences, heads, dim)".to_owned();
        return Err(shape_error("query", query, expected));
    }
    let dense = |tensor: &Tensor| tensor.stride()[3] == 1 || tensor.size()[3] == 1;
    if k.len() != 4 || k[3] != q[2] || k[1] == 0 || q[1] % k[1] != 0 || k[2] == 0 || !dense(keys) {
        let expected = format!(
            "(blocks, heads, block size, {}) with dense rows and a number of heads that divides the {} of the query",
            q[2], q[1]
        );
        return Err(shape_error("key_blocks", keys, expected));
    }
    if v.len() != 4 || v[..3] != k[..3] || !dense(values) {
        let expected = format!("[{}, {}, {}, dim], as the key blocks are", k[0], k[1], k[2]);
        return Err(shape_error("value_blocks", values, expected));
    }
    Ok(Sizes {
        queries: q[0],
        heads: q[1],
        blocks: k[0],
        kv_heads: k[1],
        block_size: usize_of(k[2]),
        key_dim: q[2],
        value_dim: v[3],
    })
}
