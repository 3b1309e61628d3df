use overdrive_sys::transfer::to_device;
use tch::{Device, Kind, Tensor};

use crate::attention::function;
use crate::blockwise::blockwise;
use crate::call::{Call, slopes_of};
use crate::cuda_flash::{CudaFlash, cuda_flash};
use crate::kernel::Sequence;
use crate::math::math;
use crate::selection::select;
use crate::{AttentionOptions, Backend, Error, Layout, Result};

/// The bounds of the sequences in a pack.
///
/// Create it once for a batch and use it in every layer: on a GPU, the lengths are copied to the host only here.
#[derive(Debug)]
pub struct PackedLengths {
    cumulative_q: Tensor,
    cumulative_k: Tensor,
    sequences: Vec<Sequence>,
    longest_q: i64,
    longest_k: i64,
}

impl Clone for PackedLengths {
    fn clone(&self) -> Self {
        PackedLengths {
            cumulative_q: self.cumulative_q.shallow_clone(),
            cumulative_k: self.cumulative_k.shallow_clone(),
            sequences: self.sequences.clone(),
            ..*self
        }
    }
}

impl PackedLengths {
    /// Creates it from cumulative lengths (flash-attn's `cu_seqlens`): integers (N + 1), from 0 to the total;
    /// sequence `n` has rows `cu[n]..cu[n + 1]`.
    ///
    /// # Errors
    /// [`Error::CumulativeLengths`] if they do not begin with 0, decrease, or differ in number between
    /// queries and keys.
    pub fn new(cumulative_q: &Tensor, cumulative_k: &Tensor) -> Result<PackedLengths> {
        let queries = bounds("cu_seqlens_q", cumulative_q)?;
        let keys = bounds("cu_seqlens_k", cumulative_k)?;
        if queries.len() != keys.len() {
            return Err(Error::CumulativeLengths {
                tensor: "cu_seqlens_k",
                problem: format!(
                    "describes {} sequences, but cu_seqlens_q describes {}",
                    keys.len() - 1,
                    queries.len() - 1
                ),
            });
        }
        let sequences: Vec<Sequence> = queries
            .windows(2)
            .zip(keys.windows(2))
            .map(|(q, k)| Sequence {
                batch: 0,
                query_start: q[0],
                queries: q[1] - q[0],
                key_start: k[0],
                keys: k[1] - k[0],
            })
            .collect();
        let longest = |length: fn(&Sequence) -> usize| {
            i64::try_from(sequences.iter().map(length).max().unwrap_or(0)).unwrap_or(i64::MAX)
        };
        Ok(PackedLengths {
            // flash-attn takes only int32 cumulative lengths. These are copies, so they cannot change after the check.
            cumulative_q: cumulative_q.f_to_dtype(Kind::Int, false, true)?,
            cumulative_k: cumulative_k.f_to_dtype(Kind::Int, false, true)?,
            longest_q: longest(|sequence| sequence.queries),
            longest_k: longest(|sequence| sequence.keys),
            sequences,
        })
    }

    /// Returns the bounds for self-attention over sequences of these lengths, on `device`.
    ///
    /// # Errors
    /// [`Error::CumulativeLengths`] for a negative length, or a sum above `i64::MAX`.
    pub fn from_lengths(lengths: &[i64], device: Device) -> Result<PackedLengths> {
        let mut cumulative = vec![0_i64];
        for length in lengths {
            // A sum that wraps around is negative and is refused below.
            cumulative.push(cumulative[cumulative.len() - 1].wrapping_add(*length));
        }
        let cumulative = Tensor::f_from_slice(&cumulative)?;
        PackedLengths::new(&cumulative, &cumulative)?.to_device(device)
    }

    /// Returns a copy on another device. Copies to a GPU are asynchronous.
    ///
    /// # Errors
    /// [`Error::Tch`] if the device does not exist.
    pub fn to_device(&self, device: Device) -> Result<PackedLengths> {
        let moved = |bounds: &Tensor| match bounds.device() {
            Device::Cpu => Ok(to_device(bounds.shallow_clone(), device)?),
            _ => Ok::<_, Error>(bounds.f_to_device(device)?),
        };
        Ok(PackedLengths {
            cumulative_q: moved(&self.cumulative_q)?,
            cumulative_k: moved(&self.cumulative_k)?,
            ..self.clone()
        })
    }

    /// Returns the number of sequences.
    pub fn len(&self) -> usize {
        self.sequences.len()
    }

    /// Returns `true` if there is no sequence.
    pub fn is_empty(&self) -> bool {
        self.sequences.is_empty()
    }

    /// Returns the number of queries of the longest sequence.
    pub fn longest_queries(&self) -> i64 {
        self.longest_q
    }

    /// Returns the number of keys of the longest sequence.
    pub fn longest_keys(&self) -> i64 {
        self.longest_k
    }

    /// Returns the number of queries of each sequence.
    pub fn query_lengths(&self) -> impl Iterator<Item = i64> {
        self.sequences
            .iter()
            .map(|sequence| sequence.queries as i64)
    }

    /// Returns the total number of queries.
    pub fn total_queries(&self) -> i64 {
        self.sequences.iter().map(|s| s.queries as i64).sum()
    }

    /// Returns the total number of keys.
    pub fn total_keys(&self) -> i64 {
        self.sequences.iter().map(|s| s.keys as i64).sum()
    }

    pub(crate) fn sequences(&self) -> &[Sequence] {
        &self.sequences
    }

    /// Returns `true` if each sequence has as many queries as keys.
    pub fn is_square(&self) -> bool {
        self.sequences
            .iter()
            .all(|sequence| sequence.queries == sequence.keys)
    }
}

fn bounds(name: &'static str, cumulative: &Tensor) -> Result<Vec<usize>> {
    let error = |problem: String| {
        Err(Error::CumulativeLengths {
            tensor: name,
            problem,
        })
    };
    let integers = matches!(cumulative.kind(), Kind::Int | Kind::Int64);
    if cumulative.dim() != 1 || cumulative.size()[0] == 0 || !integers {
        return error(format!(
            "{:?} of shape {:?}, expected integers (sequences + 1)",
            cumulative.kind(),
            cumulative.size()
        ));
    }
    // Done once for each pack instead of in each layer, since reading from a GPU waits for it.
    let on_host = cumulative
        .f_to_device(Device::Cpu)?
        .f_to_kind(Kind::Int64)?;
    let values = Vec::<i64>::try_from(&on_host.f_contiguous()?)?;
    if values[0] != 0 {
        return error(format!("begins with {}, expected 0", values[0]));
    }
    if let Some(at) = values.windows(2).position(|pair| pair[1] < pair[0]) {
        return error(format!(
            "falls from {} to {} at {}",
            values[at],
            values[at + 1],
            at + 1
        ));
    }
    // None is negative, since they rise from 0.
    Ok(values
        .into_iter()
        .map(|value| usize::try_from(value).unwrap_or(0))
        .collect())
}

/// Computes the attention within each sequence of a pack: query (total_q, H, D), key
/// (total_k, H_kv, D), value (total_k, H_kv, D_v), output (total_q, H, D_v).
///
/// Each sequence has the result that [`attention`](crate::attention) would return for it alone; positions for
/// causality, window and ALiBi are relative to the sequence. `alibi_slopes` may be (H) or (sequences, H); `mask` must
/// be `None`; `layout` is ignored. With dropout, the dropped weights depend on the position in the pack.
///
/// It runs libtorch's flash kernels on CUDA and the blockwise kernel on a CPU; neither allocates T · T elements. The
/// math back end computes one sequence after another; on CUDA it also runs ALiBi, which libtorch's flash kernels do not
/// support.
///
/// The results equal those of `flash_attn_varlen_func` and `torch.nn.attention.varlen.varlen_attn`.
///
/// # Errors
/// As [`attention`](crate::attention).
///
/// ```
/// use overdrive_attention::{AttentionOptions, PackedLengths, attention_varlen};
/// use tch::{Device, Kind, Tensor};
///
/// # fn main() -> Result<(), overdrive_attention::Error> {
/// let random = |heads: i64| Tensor::randn([10, heads, 16], (Kind::Float, Device::Cpu));
/// let lengths = PackedLengths::from_lengths(&[3, 7], Device::Cpu)?;
/// let output = attention_varlen(&random(4), &random(2), &random(2), &lengths, &AttentionOptions::causal())?;
/// assert_eq!(output.size(), [10, 4, 16]);
/// # Ok(())
/// # }
/// ```
pub fn attention_varlen(
    query: &Tensor,
    key: &Tensor,
    value: &Tensor,
    lengths: &PackedLengths,
    options: &AttentionOptions<'_>,
) -> Result<Tensor> {
    let call = Call::packed(query, key, value, lengths, options, false)?;
    Ok(run(&call, lengths)?.0)
}

/// Returns the output of [`attention_varlen`] and the log-sum-exp (H, total_q) of
/// [`attention_with_lse`](crate::attention_with_lse).
///
/// # Errors
/// As [`attention_varlen`].
pub fn attention_varlen_with_lse(
    query: &Tensor,
    key: &Tensor,
    value: &Tensor,
    lengths: &PackedLengths,
    options: &AttentionOptions<'_>,
) -> Result<(Tensor, Tensor)> {
    let call = Call::packed(query, key, value, lengths, options, true)?;
    run(&call, lengths)
}

/// Returns the output (total_q, H, D_v) and log-sum-exp (H, total_q).
fn run(call: &Call<'_>, lengths: &PackedLengths) -> Result<(Tensor, Tensor)> {
    let (output, lse) = match select(call)? {
        Backend::Blockwise => {
            let sequences = lengths.sequences().to_vec();
            let function = function(call.options, call.scale, call.limits, sequences)?;
            let sinks = call.options.sinks;
            // Output (1, total_q, H, D_v).
            blockwise(function, &call.query, &call.key, &call.value, None, sinks)?
        }
        Backend::Flash => return on_cuda(call, lengths),
        _ => one_by_one(call, lengths)?,
    };
    Ok((output.f_squeeze_dim(0)?, lse.f_squeeze_dim(0)?))
}

fn on_cuda(call: &Call<'_>, lengths: &PackedLengths) -> Result<(Tensor, Tensor)> {
    let flash = CudaFlash {
        cumulative: Some((
            lengths.cumulative_q.f_to_device(call.device)?,
            lengths.cumulative_k.f_to_device(call.device)?,
        )),
        longest: (lengths.longest_q, lengths.longest_k),
        dropout_p: call.options.dropout_p,
        scale: call.scale,
        left: call.limits.left,
        right: call.limits.right,
        has_sinks: false,
    };
    let rows = |tensor: &Tensor| tensor.f_squeeze_dim(0)?.f_transpose(0, 1);
    cuda_flash(
        flash,
        &rows(&call.query)?,
        &rows(&call.key)?,
        &rows(&call.value)?,
        call.options.sinks,
    )
}

/// Returns the output (1, total_q, H, D_v) and log-sum-exp (1, H, total_q) of the math back end.
fn one_by_one(call: &Call<'_>, lengths: &PackedLengths) -> Result<(Tensor, Tensor)> {
    let (mut outputs, mut lses) = (Vec::new(), Vec::new());
    // An empty pack has the result of an empty sequence, which has a graph.
    let none = [Sequence {
        batch: 0,
        query_start: 0,
        queries: 0,
        key_start: 0,
        keys: 0,
    }];
    let sequences = match lengths.is_empty() {
        true => &none[..],
        false => lengths.sequences(),
    };
    for (index, sequence) in sequences.iter().enumerate() {
        let part = |tensor: &Tensor, start: usize, len: usize| {
            tensor.f_narrow(2, start as i64, len as i64)
        };
        let slopes = match lengths.is_empty() {
            true => None,
            false => slopes_of(call.options, index)?,
        };
        let options = AttentionOptions {
            alibi_slopes: slopes.as_ref(),
            layout: Layout::Bhtd,
            ..*call.options
        };
        let alone = Call::new(
            &part(&call.query, sequence.query_start, sequence.queries)?,
            &part(&call.key, sequence.key_start, sequence.keys)?,
            &part(&call.value, sequence.key_start, sequence.keys)?,
            &options,
            call.with_lse,
        )?;
        let (output, lse) = math(&alone)?;
        outputs.push(output.f_transpose(1, 2)?);
        lses.push(lse);
    }
    Ok((Tensor::f_cat(&outputs, 1)?, Tensor::f_cat(&lses, 2)?))
}
