//! One call of attention, checked and with its options resolved.

use overdrive_core::Error as Common;
use overdrive_sys::autocast;
use tch::{Device, Kind, Tensor};

use crate::error::other_device;
use crate::kernel::{Limits, as_limit};
use crate::{Alignment, AttentionOptions, Error, Layout, PackedLengths, Result};

/// Returns the slopes (H) of one sequence of a batch, from slopes (H) or (sequences, H).
pub(crate) fn slopes_of(options: &AttentionOptions<'_>, text: usize) -> Result<Option<Tensor>> {
    Ok(match options.alibi_slopes {
        Some(slopes) if slopes.dim() == 2 => Some(slopes.f_select(0, text as i64)?),
        Some(slopes) => Some(slopes.shallow_clone()),
        None => None,
    })
}

/// The sizes B, H, H_kv, T, S, D, D_v.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Sizes {
    pub(crate) batch: i64,
    pub(crate) heads: i64,
    pub(crate) kv_heads: i64,
    pub(crate) queries: i64,
    pub(crate) keys: i64,
    pub(crate) key_dim: i64,
    pub(crate) value_dim: i64,
}

/// The tensors as (batch, heads, length, dim), and the options resolved for them.
#[derive(Debug)]
pub(crate) struct Call<'a> {
    pub(crate) options: &'a AttentionOptions<'a>,
    pub(crate) query: Tensor,
    pub(crate) key: Tensor,
    pub(crate) value: Tensor,
    /// The mask or bias, of four dimensions, each of full size or 1.
    pub(crate) mask: Option<Tensor>,
    pub(crate) sizes: Sizes,
    pub(crate) kind: Kind,
    pub(crate) device: Device,
    pub(crate) scale: f64,
    /// The limits that hide anything.
    pub(crate) limits: Limits,
    /// If `true`, the caller wants the log-sum-exp.
    pub(crate) with_lse: bool,
    /// If `true`, a gradient may be needed.
    pub(crate) needs_grad: bool,
    /// If `true`, the first and last query are at the positions of the first and last key, so that both alignments are
    /// the same.
    pub(crate) is_square: bool,
    /// If `true`, the tensors are concatenated sequences in a batch of one, and the sizes of queries and keys are
    /// those of the pack.
    pub(crate) is_packed: bool,
}

impl<'a> Call<'a> {
    pub(crate) fn new(
        query: &Tensor,
        key: &Tensor,
        value: &Tensor,
        options: &'a AttentionOptions<'a>,
        with_lse: bool,
    ) -> Result<Call<'a>> {
        for (name, tensor) in [("query", query), ("key", key), ("value", value)] {
            if tensor.dim() != 4 {
                return Err(shape_error(name, tensor, four_dimensions(options.layout)));
            }
        }
        let ordered = |tensor: &Tensor| match options.layout {
            Layout::Bhtd => Ok(tensor.shallow_clone()),
            Layout::Bthd => tensor.f_transpose(1, 2),
        };
        let tensors = [ordered(query)?, ordered(key)?, ordered(value)?];
        let mut call = Call::ordered(tensors, options, options.layout, with_lse)?;
        check_options(options, call.device, call.sizes.heads, call.sizes.batch)?;
        call.mask = options
            .mask
            .map(|mask| four_dimensional(mask, &call.query, &call.sizes))
            .transpose()?;
        call.limits = limits(options, call.sizes.queries, call.sizes.keys);
        Ok(call)
    }

    /// Checks (total, heads, dim) tensors of concatenated sequences.
    pub(crate) fn packed(
        query: &Tensor,
        key: &Tensor,
        value: &Tensor,
        lengths: &PackedLengths,
        options: &'a AttentionOptions<'a>,
        with_lse: bool,
    ) -> Result<Call<'a>> {
        let totals = [
            ("query", query, lengths.total_queries()),
            ("key", key, lengths.total_keys()),
            ("value", value, lengths.total_keys()),
        ];
        for (name, tensor, total) in totals {
            if tensor.dim() != 3 || tensor.size()[0] != total {
                let expected = format!("[{total}, heads, dim], with the length of the pack first");
                return Err(shape_error(name, tensor, expected));
            }
        }
        if options.mask.is_some() {
            return Err(Error::Common(Common::option(
                "mask",
                "set",
                "None for packed sequences, whose scores have no common shape",
            )));
        }
        let ordered = |tensor: &Tensor| tensor.f_transpose(0, 1)?.f_unsqueeze(0);
        let tensors = [ordered(query)?, ordered(key)?, ordered(value)?];
        let mut call = Call::ordered(tensors, options, Layout::Bthd, with_lse)?;
        let sequences = lengths.sequences().len() as i64;
        check_options(options, call.device, call.sizes.heads, sequences)?;
        // Not resolved against the totals of the pack, because each sequence has its own limits.
        call.limits = unresolved_limits(options);
        call.is_square = lengths.is_square();
        call.is_packed = true;
        Ok(call)
    }

    /// Checks tensors (batch, heads, length, dim); errors show shapes in `layout`.
    fn ordered(
        tensors: [Tensor; 3],
        options: &'a AttentionOptions<'a>,
        layout: Layout,
        with_lse: bool,
    ) -> Result<Call<'a>> {
        let [query, key, value] = autocast(tensors)?;
        let sizes = sizes(&query, &key, &value, layout)?;
        check_kinds(&query, &key, &value)?;
        let recording = overdrive_autograd::is_grad_enabled();
        let learned = [options.mask, options.sinks];
        let needs_grad = recording
            && ([&query, &key, &value]
                .into_iter()
                .chain(learned.into_iter().flatten()))
            .any(Tensor::requires_grad);
        Ok(Call {
            options,
            kind: query.kind(),
            device: query.device(),
            query,
            key,
            value,
            mask: None,
            sizes,
            scale: scale(options, sizes.key_dim)?,
            limits: Limits::default(),
            with_lse,
            needs_grad,
            is_square: sizes.queries == sizes.keys,
            is_packed: false,
        })
    }

    /// Returns `true` if queries see every key except those after their own.
    pub(crate) fn is_causal(&self) -> bool {
        self.limits.left.is_none() && self.limits.right == Some(0)
    }

    /// Returns `true` if causality and window hide nothing.
    pub(crate) fn sees_all(&self) -> bool {
        self.limits.left.is_none() && self.limits.right.is_none()
    }

    /// Returns the position of query 0 among the keys.
    pub(crate) fn offset(&self) -> i64 {
        match self.options.alignment {
            Alignment::BottomRight => self.sizes.keys - self.sizes.queries,
            Alignment::TopLeft => 0,
        }
    }

    pub(crate) fn is_empty(&self) -> bool {
        let Sizes {
            batch,
            queries,
            keys,
            ..
        } = self.sizes;
        batch == 0 || queries == 0 || keys == 0
    }

    /// Returns `output`, (B, H, T, D_v), in the caller's layout.
    pub(crate) fn in_layout(&self, output: Tensor) -> Result<Tensor> {
        Ok(match self.options.layout {
            Layout::Bhtd => output,
            Layout::Bthd => output.f_transpose(1, 2)?,
        })
    }
}

/// Returns the factor of the scores.
pub(crate) fn scale(options: &AttentionOptions<'_>, key_dim: i64) -> Result<f64> {
    match options.scale {
        None => Ok(1.0 / (key_dim.max(1) as f64).sqrt()),
        Some(scale) if scale.is_finite() => Ok(scale),
        Some(scale) => Err(Error::Common(Common::option(
            "scale",
            scale.to_string(),
            "a finite number",
        ))),
    }
}

/// Returns the limits of the options, for sequences of several lengths.
pub(crate) fn unresolved_limits(options: &AttentionOptions<'_>) -> Limits {
    with_sinks(
        options,
        options.window.left,
        match options.causal {
            true => Some(0),
            false => options.window.right,
        },
    )
}

/// Returns the limits without those that hide nothing from any query.
pub(crate) fn limits(options: &AttentionOptions<'_>, queries: i64, keys: i64) -> Limits {
    let offset = match options.alignment {
        Alignment::BottomRight => keys - queries,
        Alignment::TopLeft => 0,
    };
    let Limits { left, right, .. } = unresolved_limits(options);
    with_sinks(
        options,
        left.filter(|left| offset + queries - 1 > as_limit(*left)),
        right.filter(|right| offset + as_limit(*right) < keys - 1),
    )
}

fn with_sinks(options: &AttentionOptions<'_>, left: Option<usize>, right: Option<usize>) -> Limits {
    Limits {
        left,
        right,
        // Without a left limit nothing hides the first tokens, so back ends without sink tokens can run.
        sink_tokens: left.map_or(0, |_| options.sink_tokens),
    }
}

/// Checks the options that depend on no sizes other than the numbers of heads and batches.
pub(crate) fn check_options(
    options: &AttentionOptions<'_>,
    device: Device,
    heads: i64,
    batch: i64,
) -> Result<()> {
    if !(0.0..1.0).contains(&options.dropout_p) {
        return Err(Error::Common(Common::option(
            "dropout_p",
            options.dropout_p.to_string(),
            "at least 0 and less than 1",
        )));
    }
    if let Some(cap) = options
        .softcap
        .filter(|cap| !(cap.is_finite() && *cap > 0.0))
    {
        return Err(Error::Common(Common::option(
            "softcap",
            cap.to_string(),
            "a finite number above 0 (None for no cap)",
        )));
    }
    if options.causal && options.window.right.is_some_and(|right| right > 0) {
        return Err(Error::Common(Common::option(
            "window.right",
            format!("{:?} with causal", options.window.right),
            "Some(0) or None under a causal mask, which hides later keys",
        )));
    }
    let per_head = |name, tensor: Option<&Tensor>, batched: bool| match tensor {
        None => Ok(()),
        Some(tensor) if tensor.device() != device => {
            Err(other_device(name, tensor.device(), device))
        }
        Some(tensor) if !tensor.is_floating_point() => Err(Error::Common(Common::dtype(
            name,
            tensor.kind(),
            "a floating-point dtype",
        ))),
        Some(tensor)
            if tensor.size() == [heads] || (batched && tensor.size() == [batch, heads]) =>
        {
            Ok(())
        }
        Some(tensor) => {
            let also = if batched {
                format!(" or [{batch}, {heads}]")
            } else {
                String::new()
            };
            Err(shape_error(
                name,
                tensor,
                format!("[{heads}]{also}: one element for each query head"),
            ))
        }
    };
    per_head("sinks", options.sinks, false)?;
    per_head("alibi_slopes", options.alibi_slopes, true)?;
    match options.alibi_slopes {
        Some(slopes) if slopes.requires_grad() => Err(Error::Common(Common::option(
            "alibi_slopes",
            "a tensor that requires a gradient",
            "a detached tensor; pass learned slopes as a mask",
        ))),
        _ => Ok(()),
    }
}

pub(crate) fn shape_error(name: &'static str, tensor: &Tensor, expected: String) -> Error {
    Error::Common(Common::shape(name, tensor.size(), expected))
}

/// Casts all tensors to the lower precision under autocast, as PyTorch does for `scaled_dot_product_attention`.
pub(crate) fn autocast(tensors: [Tensor; 3]) -> Result<[Tensor; 3]> {
    let dtype = match autocast::state(tensors[0].device()) {
        Ok(state) if state.enabled => state.dtype,
        // Autocast cannot be on for a device type without it.
        Ok(_) | Err(_) => return Ok(tensors),
    };
    let cast = |tensor: &Tensor| match tensor.kind() {
        Kind::Float | Kind::Half | Kind::BFloat16 => tensor.f_to_kind(dtype),
        // Autocast does not cast f64.
        _ => Ok(tensor.shallow_clone()),
    };
    let [query, key, value] = &tensors;
    Ok([cast(query)?, cast(key)?, cast(value)?])
}

/// Checks that the tensors have the same device and the same floating-point dtype.
pub(crate) fn check_kinds(query: &Tensor, key: &Tensor, value: &Tensor) -> Result<()> {
    if !query.is_floating_point() {
        return Err(Error::Common(Common::dtype(
            "query",
            query.kind(),
            "Float, Double, Half or BFloat16",
        )));
    }
    for (name, tensor) in [("key", key), ("value", value)] {
        if tensor.device() != query.device() {
            return Err(other_device(name, tensor.device(), query.device()));
        }
        if tensor.kind() != query.kind() {
            return Err(Error::Common(Common::dtype(
                name,
                tensor.kind(),
                format!("{:?}, as the query is", query.kind()),
            )));
        }
    }
    Ok(())
}

fn four_dimensions(layout: Layout) -> String {
    match layout {
        Layout::Bhtd => "four dimensions (batch, heads, length, dim)".to_owned(),
        Layout::Bthd => "four dimensions (batch, length, heads, dim)".to_owned(),
    }
}

/// Returns the sizes of tensors in (batch, heads, length, dim), checked; errors show the caller's layout.
fn sizes(query: &Tensor, key: &Tensor, value: &Tensor, layout: Layout) -> Result<Sizes> {
    let of = |tensor: &Tensor| {
        let size = tensor.size();
        (size[0], size[1], size[2], size[3])
    };
    let in_layout = |(b, h, t, d): (i64, i64, i64, i64)| match layout {
        Layout::Bhtd => [b, h, t, d],
        Layout::Bthd => [b, t, h, d],
    };
    let error = |tensor, sizes, expected| {
        Error::Common(Common::shape(tensor, in_layout(sizes).to_vec(), expected))
    };
    let (q, k, v) = (of(query), of(key), of(value));
    let (batch, heads, queries, key_dim) = q;
    let (_, kv_heads, keys, _) = k;
    if key_dim == 0 || heads == 0 {
        return Err(error(
            "query",
            q,
            "at least one head and one dimension".to_owned(),
        ));
    }
    if k.0 != batch || k.3 != key_dim {
        let expected = in_layout((batch, kv_heads, keys, key_dim));
        let why = "the batch and dim of the query";
        return Err(error("key", k, format!("{expected:?}, with {why}")));
    }
    if kv_heads == 0 || heads % kv_heads != 0 {
        return Err(error(
            "key",
            k,
            format!("a tensor whose number of heads divides the {heads} of the query"),
        ));
    }
    if (v.0, v.1, v.2) != (batch, kv_heads, keys) {
        let expected = in_layout((batch, kv_heads, keys, v.3));
        let why = "the batch, heads and length of the key";
        return Err(error("value", v, format!("{expected:?}, with {why}")));
    }
    Ok(Sizes {
        batch,
        heads,
        kv_heads,
        queries,
        keys,
        key_dim,
        value_dim: v.3,
    })
}

/// Returns the mask with dimensions of size 1 in front, checked against the scores.
fn four_dimensional(mask: &Tensor, query: &Tensor, sizes: &Sizes) -> Result<Tensor> {
    if mask.device() != query.device() {
        return Err(other_device("mask", mask.device(), query.device()));
    }
    if mask.kind() != Kind::Bool && !mask.is_floating_point() {
        return Err(Error::Common(Common::dtype(
            "mask",
            mask.kind(),
            "Bool (true: seen) or a floating-point dtype (added to the scores)",
        )));
    }
    let full = [sizes.batch, sizes.heads, sizes.queries, sizes.keys];
    let size = mask.size();
    let skipped = 4_usize.checked_sub(size.len());
    let fits = skipped.is_some_and(|skipped| {
        size.iter()
            .zip(&full[skipped..])
            .all(|(size, full)| *size == 1 || size == full)
    });
    let Some(skipped) = skipped.filter(|_| fits) else {
        let expected = format!("at most four dimensions that broadcast to {full:?} (B, H, T, S)");
        return Err(shape_error("mask", mask, expected));
    };
    let mut shape = vec![1; skipped];
    shape.extend(size);
    Ok(mask.f_reshape(shape)?)
}
