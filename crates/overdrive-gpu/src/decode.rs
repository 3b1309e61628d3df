use std::collections::BTreeSet;

use overdrive_core::Error as Common;
use parking_lot::Mutex;
use tch::{Kind, Tensor};
use tracing::debug;

use crate::Result;
use crate::kernels::Argument::{F32, I32, I64, Tensor as Elements};
use crate::kernels::{
    Argument, Kernels, Loaded, Request, dense, dtype, is_aligned, multiples_of_16, strided,
};

/// The largest number of queries of a sequence. For more, a kernel that reads the keys once for all of them is faster.
pub const MOST_QUERIES: i64 = 16;

/// The minimum number of keys in a split.
const KEYS_OF_A_SPLIT: i64 = 128;

/// The number of channels, or for keys of tokens, that share a scale.
const GROUP: i64 = 64;

/// The value that means "no limit" to a kernel; its sum with a number of keys stays below 2³¹.
const UNLIMITED: i64 = 1 << 30;

/// Attention of a few new queries of each sequence over its keys.
#[derive(Debug, Clone, Copy)]
pub struct Decode<'a> {
    /// The concatenated queries of all sequences `(N, H, D)`, or `(B, H, T, D)` with the same number for each sequence;
    /// in f32, f16 or bf16.
    pub query: &'a Tensor,
    /// The keys, in the dtype of the queries: `(B, H_kv, S, D)`, or the blocks of a pool `(blocks, H_kv, block, D)`.
    /// Only the channels of a key need to be contiguous.
    pub keys: &'a Tensor,
    /// The values, of the shape of the keys.
    pub values: &'a Tensor,
    /// The layout of the keys of each sequence.
    pub layout: DecodeLayout<'a>,
    /// The number of keys before its own that a query sees; `None`: all.
    pub left: Option<usize>,
    /// The number of keys after its own that a query sees; `None`: all.
    pub right: Option<usize>,
    /// The factor of the scores.
    pub scale: f64,
    /// The bound of the scores.
    pub softcap: Option<f64>,
    /// A logit for each head that takes part in the softmax without a value, `(H,)`.
    pub sinks: Option<&'a Tensor>,
}

/// The layout of the keys of each sequence; its queries belong to its last keys.
#[derive(Debug, Clone, Copy)]
pub enum DecodeLayout<'a> {
    /// Sequence `b` has the first `counts[b]` keys of row `b`, i32 `(B,)` on the device, and `N / B` queries.
    Rows {
        /// The numbers of keys.
        counts: &'a Tensor,
    },
    /// Key `j` of sequence `n` is row `g % block` of the block `blocks[g / block]`, with `g = key_starts[n] + j`. All
    /// are i32 on the device.
    Paged {
        /// The concatenated blocks of all sequences.
        blocks: &'a Tensor,
        /// The first key of each sequence `(sequences + 1,)`: multiples of the block.
        key_starts: &'a Tensor,
        /// The first query of each sequence, followed by `N`.
        query_starts: &'a Tensor,
        /// The number of keys of each sequence.
        counts: &'a Tensor,
        /// The largest number of queries of a sequence.
        longest_queries: i64,
        /// The largest number of keys of a sequence.
        longest_keys: i64,
    },
    /// Every row has `coded` keys as codes, followed by those of `keys`, all of which are filled.
    Coded {
        /// The codes of the keys, with a scale for 64 tokens of a channel.
        keys: CodedHeads<'a>,
        /// The codes of the values, with a scale for 64 channels of a token.
        values: CodedHeads<'a>,
        /// The number of keys that are codes, a multiple of 64.
        coded: i64,
    },
}

/// Codes of 8 bits, `least + scale · code`.
#[derive(Debug, Clone, Copy)]
pub struct CodedHeads<'a> {
    /// The codes, u8 `(B, H_kv, capacity, D)`, contiguous.
    pub codes: &'a Tensor,
    /// The scales, followed by the minima, f32 `(B, H_kv, lines, 2·n)`, contiguous: for keys one line for each 64
    /// tokens, with a value for each channel; for values one line for each token, with a value for each 64 channels.
    pub lines: &'a Tensor,
}

/// The sizes of a call.
struct Sizes {
    total: i64,
    heads: i64,
    kv_heads: i64,
    dim: i64,
    sequences: i64,
    queries: i64,
    /// The largest number of keys.
    room: i64,
}

impl Kernels {
    /// Returns the attention of each query, with the shape and dtype of the queries, and the log-sum-exps, f32 `(H, N)`
    /// or `(B, H, T)`; `None` if there is no kernel for this call. A query that sees no key gets zeros and
    /// -∞.
    ///
    /// It takes one launch if rows and heads alone fill the GPU. Otherwise it takes two, and the keys are split among enough
    /// programs to fill the GPU. Their number depends only on the capacity of the rows, so that a captured launch serves
    /// every length.
    ///
    /// # Errors
    /// [`Error::Common`](crate::Error::Common) for tensors that do not match,
    /// [`Error::Driver`](crate::Error::Driver) if a kernel cannot be loaded or launched.
    pub fn decode(&self, call: &Decode<'_>) -> Result<Option<(Tensor, Tensor)>> {
        let &[batch, heads, queries, dim] = call.query.size().as_slice() else {
            return self.decode_rows(call);
        };
        let rows = match queries {
            1 => call.query.f_detach()?.f_select(2, 0)?,
            _ => call.query.f_detach()?.f_transpose(1, 2)?.f_flatten(0, 1)?,
        };
        let call = Decode {
            query: &rows,
            ..*call
        };
        let Some((y, lse)) = self.decode_rows(&call)? else {
            return Ok(None);
        };
        let y = y.f_view([batch, queries, heads, dim])?.f_transpose(1, 2)?;
        let lse = lse.f_view([heads, batch, queries])?.f_transpose(0, 1)?;
        Ok(Some((y, lse)))
    }

    fn decode_rows(&self, call: &Decode<'_>) -> Result<Option<(Tensor, Tensor)>> {
        let sizes = check(call)?;
        if let Some(reason) = unfit(call, &sizes) {
            report_fallback("attention of a few queries", reason);
            return Ok(None);
        }
        let Some((split, combine)) = self.decode_kernels(call, &sizes)? else {
            let reason = "there is no kernel for heads of this size and dtype, or it was not loaded before this capture";
            report_fallback("attention of a few queries", reason);
            return Ok(None);
        };
        self.run_decode(call, &sizes, &split, &combine).map(Some)
    }

    fn decode_kernels(&self, call: &Decode<'_>, sizes: &Sizes) -> Result<Option<(Loaded, Loaded)>> {
        let split = self.decode_kernel(call, sizes, false)?;
        let sinks = vec![("SINKS", call.sinks.is_some().into())];
        let combine = self.find_decode("decode_combine", call, sizes, sinks)?;
        Ok(split.zip(combine))
    }

    /// Returns the kernel for a split, or the one that writes the results of a single split.
    fn decode_kernel(
        &self,
        call: &Decode<'_>,
        sizes: &Sizes,
        direct: bool,
    ) -> Result<Option<Loaded>> {
        let is_paged = matches!(call.layout, DecodeLayout::Paged { .. });
        let is_coded = matches!(call.layout, DecodeLayout::Coded { .. });
        let constants = vec![
            ("PAGED", is_paged.into()),
            ("CODED", is_coded.into()),
            ("DIRECT", direct.into()),
        ];
        self.find_decode("decode_attention", call, sizes, constants)
    }

    fn find_decode(
        &self,
        kernel: &'static str,
        call: &Decode<'_>,
        sizes: &Sizes,
        constants: Vec<(&'static str, i64)>,
    ) -> Result<Option<Loaded>> {
        let Some(dtype) = dtype(call.query.kind()) else {
            return Ok(None);
        };
        self.find(&Request {
            kernel,
            dtype,
            constants,
            least: ("DIM", sizes.dim),
            aligned: true,
        })
    }

    fn run_decode(
        &self,
        call: &Decode<'_>,
        sizes: &Sizes,
        split: &Loaded,
        combine: &Loaded,
    ) -> Result<(Tensor, Tensor)> {
        let &Sizes {
            total,
            heads,
            kv_heads,
            dim,
            ..
        } = sizes;
        let group = heads / kv_heads;
        let rows = (sizes.queries * group) as usize;
        let parts = rows.div_ceil(split.variant.size("ROWS")?);
        let programs = parts * (sizes.sequences * kv_heads) as usize;
        let most = combine.variant.size("SPLITS")?.min(
            (sizes.room as usize)
                .div_ceil(KEYS_OF_A_SPLIT as usize)
                .max(1),
        );
        // Two programs for each multiprocessor keep enough loads in flight to saturate the memory.
        let splits = (2 * self.multiprocessors()).div_ceil(programs.max(1));
        let splits = splits.clamp(1, most);
        let (kind, device) = (call.query.kind(), call.query.device());
        let float = (Kind::Float, device);
        let y = Tensor::f_empty([total, heads, dim], (kind, device))?;
        let lse = Tensor::f_empty([heads, total], float)?;
        // The results of one split are those of the call, without a second launch. Codes have no kernel for that.
        let direct = match splits == 1 && call.sinks.is_none() {
            true => self.decode_kernel(call, sizes, true)?,
            false => None,
        };
        let partials = match direct {
            Some(_) => None,
            None => Some((
                Tensor::f_empty([splits as i64, total, heads, dim], float)?,
                Tensor::f_empty([splits as i64, total, heads], float)?,
            )),
        };
        let query = aligned_rows(call.query)?;
        let mut arguments = vec![
            ("query", Elements(&query)),
            ("keys", Elements(call.keys)),
            ("values", Elements(call.values)),
        ];
        arguments.extend(
            match &partials {
                Some((partial, partial_lse)) => [("partial", partial), ("lse", partial_lse)],
                None => [("y", &y), ("y_lse", &lse)],
            }
            .map(|(name, tensor)| (name, Elements(tensor))),
        );
        let tables = tables(call)?;
        arguments.extend(tables.iter().map(|(name, table)| (*name, Elements(table))));
        arguments.extend([
            ("queries", I32(sizes.queries)),
            ("total", I32(total)),
            ("room", I32(sizes.room)),
        ]);
        if let DecodeLayout::Coded { keys, coded, .. } = call.layout {
            let capacity = keys.codes.size()[2];
            arguments.extend([("coded", I32(coded)), ("capacity", I32(capacity))]);
        }
        arguments.extend([
            ("kv_heads", I32(kv_heads)),
            ("group", I32(group)),
            ("dim", I32(dim)),
        ]);
        if matches!(call.layout, DecodeLayout::Paged { .. }) {
            arguments.push(("block_size", I32(call.keys.size()[2])));
        }
        arguments.extend(strides(&query, call));
        let limit = |keys: Option<usize>| {
            let keys = keys.and_then(|keys| i64::try_from(keys).ok());
            I32(keys.unwrap_or(UNLIMITED).min(UNLIMITED))
        };
        arguments.extend([
            ("left", limit(call.left)),
            ("right", limit(call.right)),
            ("scale", F32(call.scale)),
            ("softcap", F32(call.softcap.unwrap_or(0.0))),
        ]);
        let kernel = direct.as_ref().unwrap_or(split);
        self.launch(kernel, [programs, splits], &arguments)?;
        let Some((partial, partial_lse)) = partials else {
            return Ok((y, lse));
        };
        let sinks = match call.sinks {
            Some(sinks) => Some(dense(&sinks.f_to_kind(Kind::Float)?)?),
            None => None,
        };
        let mut arguments = vec![
            ("partial", Elements(&partial)),
            ("partial_lse", Elements(&partial_lse)),
        ];
        arguments.extend(sinks.as_ref().map(|sinks| ("sinks", Elements(sinks))));
        arguments.extend([
            ("y", Elements(&y)),
            ("lse", Elements(&lse)),
            ("splits", I32(splits as i64)),
            ("dim", I32(dim)),
        ]);
        self.launch(combine, [total as usize, heads as usize], &arguments)?;
        Ok((y, lse))
    }
}

/// Logs at level debug, once in a process, why an operation on a GPU runs libtorch's operators although the kernels are
/// on.
pub fn report_fallback(operation: &'static str, reason: &'static str) {
    static REPORTED: Mutex<BTreeSet<(&str, &str)>> = Mutex::new(BTreeSet::new());
    if REPORTED.lock().insert((operation, reason)) {
        debug!("{operation} uses libtorch's operators: {reason}");
    }
}

/// Returns the tables of the layout, which the kernel takes after the tensors.
fn tables(call: &Decode<'_>) -> Result<Vec<(&'static str, Tensor)>> {
    Ok(match call.layout {
        DecodeLayout::Rows { counts } => vec![("counts", dense(counts)?)],
        DecodeLayout::Paged {
            blocks,
            key_starts,
            query_starts,
            counts,
            ..
        } => vec![
            ("counts", dense(counts)?),
            ("table", dense(blocks)?),
            ("key_starts", dense(key_starts)?),
            ("query_starts", dense(query_starts)?),
        ],
        DecodeLayout::Coded { keys, values, .. } => vec![
            ("key_codes", keys.codes.shallow_clone()),
            ("value_codes", values.codes.shallow_clone()),
            ("key_lines", keys.lines.shallow_clone()),
            ("value_lines", values.lines.shallow_clone()),
        ],
    })
}

fn strides<'a>(query: &Tensor, call: &Decode<'_>) -> [(&'static str, Argument<'a>); 8] {
    let of = |tensor, axis| I64(step(tensor, axis));
    [
        ("q_row", of(query, 0)),
        ("q_head", of(query, 1)),
        ("k_sequence", of(call.keys, 0)),
        ("k_head", of(call.keys, 1)),
        ("k_token", of(call.keys, 2)),
        ("v_sequence", of(call.values, 0)),
        ("v_head", of(call.values, 1)),
        ("v_token", of(call.values, 2)),
    ]
}

/// Returns the stride along an axis; 0 for an axis of one element, whose stride is meaningless.
fn step(tensor: &Tensor, axis: usize) -> i64 {
    match tensor.size()[axis] {
        0 | 1 => 0,
        _ => tensor.stride()[axis],
    }
}

/// Returns `true` if the channels are contiguous and each head is aligned for loads of 16 bytes.
fn is_wide(tensor: &Tensor) -> bool {
    let last = tensor.dim() - 1;
    let steps: Vec<i64> = (0..last).map(|axis| step(tensor, axis)).collect();
    matches!(step(tensor, last), 0 | 1) && multiples_of_16(&steps) && is_aligned(tensor)
}

/// Returns the queries, or a copy of them, with strides that the kernel supports.
fn aligned_rows(query: &Tensor) -> Result<Tensor> {
    let query = strided(query)?;
    match is_wide(&query) {
        true => Ok(query),
        false => {
            let mut copy = Tensor::f_empty(query.size(), (query.kind(), query.device()))?;
            copy.f_copy_(&query)?;
            Ok(copy)
        }
    }
}

/// Returns the reason why no kernel supports a call, if there is one.
fn unfit(call: &Decode<'_>, sizes: &Sizes) -> Option<&'static str> {
    let widest = if call.query.kind() == Kind::Float {
        128
    } else {
        256
    };
    if dtype(call.query.kind()).is_none() {
        return Some("the dtype is not f32, f16 or bf16");
    }
    if sizes.dim % 16 != 0 || sizes.dim > widest {
        return Some(
            "the number of channels of a head is not a multiple of 16, or above 256 (128 in f32)",
        );
    }
    if !(1..=MOST_QUERIES).contains(&sizes.queries) || sizes.sequences == 0 {
        return Some("a sequence has more than 16 queries, or none");
    }
    if !is_wide(call.keys) || !is_wide(call.values) {
        return Some("keys or values are not contiguous along their channels and aligned");
    }
    if sizes.room >= UNLIMITED {
        return Some("there are 2³⁰ keys or more");
    }
    let DecodeLayout::Coded {
        keys,
        values,
        coded,
    } = call.layout
    else {
        return None;
    };
    let tensors = [keys.codes, values.codes, keys.lines, values.lines];
    let fits = matches!(sizes.dim, 64 | 128 | 256)
        && keys.codes.size()[2] % GROUP == 0
        && coded % GROUP == 0
        && tensors
            .iter()
            .all(|tensor| tensor.is_contiguous() && is_aligned(tensor));
    (!fits).then_some("codes are not contiguous, or heads do not have 64, 128 or 256 channels")
}

/// Checks that the tensors of a call match, so that the kernel stays within them; returns the sizes.
fn check(call: &Decode<'_>) -> Result<Sizes> {
    let (q, k) = (call.query.size(), call.keys.size());
    let (&[total, heads, dim], &[outer, kv_heads, rows, key_dim]) = (q.as_slice(), k.as_slice())
    else {
        let expected = "(N, H, D) or (B, H, T, D), with keys of four dimensions";
        return Err(Common::shape("query", q, expected).into());
    };
    if dim == 0 || key_dim != dim || kv_heads == 0 || heads == 0 || heads % kv_heads != 0 {
        let expected =
            format!("a tensor whose number of heads divides {heads}, with {dim} channels");
        return Err(Common::shape("keys", k, expected).into());
    }
    if call.values.size() != k {
        let expected = format!("{k:?}, as the keys are");
        return Err(Common::shape("values", call.values.size(), expected).into());
    }
    if let Some(sinks) = call.sinks.filter(|sinks| sinks.size() != [heads]) {
        return Err(Common::shape("sinks", sinks.size(), format!("[{heads}]")).into());
    }
    let integers = |name: &'static str, tensor: &Tensor, least: i64| {
        let count = tensor.numel() as i64;
        match tensor.kind() == Kind::Int && count >= least {
            true => Ok(count),
            false => {
                let expected = format!("at least {least} elements of i32");
                Err(Common::shape(name, tensor.size(), expected))
            }
        }
    };
    let (sequences, queries, room) = match call.layout {
        DecodeLayout::Rows { counts } => {
            integers("counts", counts, outer)?;
            (outer, per_row(total, outer)?, rows)
        }
        DecodeLayout::Paged {
            blocks,
            key_starts,
            query_starts,
            counts,
            longest_queries,
            longest_keys,
        } => {
            let sequences = integers("counts", counts, 0)?;
            integers("key_starts", key_starts, sequences)?;
            integers("query_starts", query_starts, sequences + 1)?;
            integers("blocks", blocks, 0)?;
            (sequences, longest_queries, longest_keys)
        }
        DecodeLayout::Coded {
            keys,
            values,
            coded,
        } => {
            check_codes(keys, [outer, kv_heads, coded, dim], true)?;
            check_codes(values, [outer, kv_heads, coded, dim], false)?;
            (outer, per_row(total, outer)?, coded + rows)
        }
    };
    Ok(Sizes {
        total,
        heads,
        kv_heads,
        dim,
        sequences,
        queries,
        room,
    })
}

/// Returns the number of queries of each of `rows` sequences.
fn per_row(total: i64, rows: i64) -> Result<i64> {
    match rows {
        0 if total == 0 => Ok(0),
        1.. if total % rows == 0 => Ok(total / rows),
        _ => {
            let expected = format!("a multiple of the {rows} rows of the keys");
            Err(Common::option("the number of queries", total, expected).into())
        }
    }
}

/// Checks codes of shape `[B, H_kv, tokens, D]`.
fn check_codes(
    heads: CodedHeads<'_>,
    [batch, kv_heads, tokens, dim]: [i64; 4],
    are_keys: bool,
) -> Result<()> {
    let size = heads.codes.size();
    let capacity = size.get(2).copied().unwrap_or(0);
    if size != [batch, kv_heads, capacity, dim] || capacity < tokens {
        let expected = format!("[{batch}, {kv_heads}, at least {tokens}, {dim}]");
        return Err(Common::shape("codes", size, expected).into());
    }
    let expected = match are_keys {
        true => [batch, kv_heads, capacity / GROUP, 2 * dim],
        false => [batch, kv_heads, capacity, 2 * (dim / GROUP)],
    };
    match heads.lines.size() == expected {
        true => Ok(()),
        false => {
            let expected = format!("{expected:?}");
            Err(Common::shape("lines", heads.lines.size(), expected).into())
        }
    }
}
