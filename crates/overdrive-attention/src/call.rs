//! One attention, checked and with its options resolved.

use overdrive_sys::autocast;
use tch::{Device, Kind, Tensor};

use crate::{Alignment, AttentionOptions, Error, Layout, PackedLengths, Result};

/// The slopes (H) of one text of a batch, of slopes (H) or (texts, H).
pub(crate) fn slopes_of(options: &AttentionOptions<'_>, text: usize) -> Result<Option<Tensor>> {
    Ok(match options.alibi_slopes {
        Some(slopes) if slopes.dim() == 2 => Some(slopes.f_select(0, text as i64)?),
        Some(slopes) => Some(slopes.shallow_clone()),
        None => None,
    })
}

/// Sizes: B, H, H_kv, T, S, D, D_v.
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

/// Tensors as (batch, heads, length, dim), and what the options come to for them.
#[derive(Debug)]
pub(crate) struct Call<'a> {
    pub(crate) options: &'a AttentionOptions<'a>,
    pub(crate) query: Tensor,
    pub(crate) key: Tensor,
    pub(crate) value: Tensor,
    /// Of four dimensions, each full or 1.
    pub(crate) mask: Option<Tensor>,
    pub(crate) sizes: Sizes,
    pub(crate) kind: Kind,
    pub(crate) device: Device,
    pub(crate) scale: f64,
    /// The window, where it hides anything; causality is `right = 0`.
    pub(crate) left: Option<usize>,
    pub(crate) right: Option<usize>,
    /// Sink tokens, where a window would hide them.
    pub(crate) sink_tokens: usize,
    /// Whether the log-sum-exp is asked for.
    pub(crate) with_lse: bool,
    /// Whether a gradient may be asked for.
    pub(crate) needs_grad: bool,
    /// Whether first and last query stand at first and last key, so that both alignments are the same.
    pub(crate) is_square: bool,
    /// Whether these are sequences one after another, in a batch of one; the sizes of queries and keys
    /// are then those of the pack.
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
        (call.left, call.right) = limits(options, call.sizes.queries, call.sizes.keys);
        call.sink_tokens = if call.left.is_some() {
            options.sink_tokens
        } else {
            0
        };
        Ok(call)
    }

    /// For (total, heads, dim) tensors of sequences one after another.
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
                let expected = format!("[{total}, heads, dim], the length of the pack first");
                return Err(shape_error(name, tensor, expected));
            }
        }
        if options.mask.is_some() {
            return Err(Error::InvalidOption {
                option: "mask",
                value: "set".to_owned(),
                expected: "None for packed sequences, whose scores have no common shape",
            });
        }
        let ordered = |tensor: &Tensor| tensor.f_transpose(0, 1)?.f_unsqueeze(0);
        let tensors = [ordered(query)?, ordered(key)?, ordered(value)?];
        let mut call = Call::ordered(tensors, options, Layout::Bthd, with_lse)?;
        let sequences = lengths.sequences().len() as i64;
        check_options(options, call.device, call.sizes.heads, sequences)?;
        (call.left, call.right) = unresolved_limits(options);
        call.sink_tokens = if call.left.is_some() {
            options.sink_tokens
        } else {
            0
        };
        call.is_square = lengths.is_square();
        call.is_packed = true;
        Ok(call)
    }

    /// For tensors (batch, heads, length, dim); errors show shapes in `layout`.
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
            left: None,
            right: None,
            sink_tokens: 0,
            with_lse,
            needs_grad,
            is_square: sizes.queries == sizes.keys,
            is_packed: false,
        })
    }

    /// Whether every key is seen but those after the query's own.
    pub(crate) fn is_causal(&self) -> bool {
        self.left.is_none() && self.right == Some(0)
    }

    /// Whether positions hide nothing.
    pub(crate) fn sees_all(&self) -> bool {
        self.left.is_none() && self.right.is_none()
    }

    /// The key at which query 0 stands.
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

    /// `output`, (B, H, T, D_v), in the caller's layout.
    pub(crate) fn in_layout(&self, output: Tensor) -> Result<Tensor> {
        Ok(match self.options.layout {
            Layout::Bhtd => output,
            Layout::Bthd => output.f_transpose(1, 2)?,
        })
    }
}

/// Factor on the products.
pub(crate) fn scale(options: &AttentionOptions<'_>, key_dim: i64) -> Result<f64> {
    match options.scale {
        None => Ok(1.0 / (key_dim.max(1) as f64).sqrt()),
        Some(scale) if scale.is_finite() => Ok(scale),
        Some(scale) => Err(Error::InvalidOption {
            option: "scale",
            value: scale.to_string(),
            expected: "a finite number",
        }),
    }
}

/// Left and right limits as the options say, for sequences of several lengths.
pub(crate) fn unresolved_limits(options: &AttentionOptions<'_>) -> (Option<usize>, Option<usize>) {
    let right = if options.causal {
        Some(0)
    } else {
        options.window.right
    };
    (options.window.left, right)
}

/// Left and right limits, none where they hide nothing from any query.
pub(crate) fn limits(
    options: &AttentionOptions<'_>,
    queries: i64,
    keys: i64,
) -> (Option<usize>, Option<usize>) {
    let offset = match options.alignment {
        Alignment::BottomRight => keys - queries,
        Alignment::TopLeft => 0,
    };
    let wide = |limit: usize| {
        i64::try_from(limit)
            .unwrap_or(i64::MAX / 4)
            .min(i64::MAX / 4)
    };
    let (left, right) = unresolved_limits(options);
    (
        left.filter(|left| offset + queries - 1 > wide(*left)),
        right.filter(|right| offset + wide(*right) < keys - 1),
    )
}

/// Options whose check needs no sizes but those of heads and batches.
pub(crate) fn check_options(
    options: &AttentionOptions<'_>,
    device: Device,
    heads: i64,
    batch: i64,
) -> Result<()> {
    if !(0.0..1.0).contains(&options.dropout_p) {
        return Err(Error::InvalidOption {
            option: "dropout_p",
            value: options.dropout_p.to_string(),
            expected: "at least 0 and less than 1",
        });
    }
    if let Some(cap) = options
        .softcap
        .filter(|cap| !(cap.is_finite() && *cap > 0.0))
    {
        return Err(Error::InvalidOption {
            option: "softcap",
            value: cap.to_string(),
            expected: "a finite number above 0 (None for no cap)",
        });
    }
    if options.causal && options.window.right.is_some_and(|right| right > 0) {
        return Err(Error::InvalidOption {
            option: "window.right",
            value: format!("{:?} with causal", options.window.right),
            expected: "Some(0) or None under a causal mask, which hides what comes after",
        });
    }
    let per_head = |name, tensor: Option<&Tensor>, batched: bool| match tensor {
        None => Ok(()),
        Some(tensor) if tensor.device() != device => Err(Error::OtherDevice {
            tensor: name,
            device: tensor.device(),
            expected: device,
        }),
        Some(tensor) if !tensor.is_floating_point() => Err(Error::Dtype {
            tensor: name,
            kind: tensor.kind(),
            expected: "a floating-point dtype".to_owned(),
        }),
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
                format!("[{heads}]{also}: one number a query head"),
            ))
        }
    };
    per_head("sinks", options.sinks, false)?;
    per_head("alibi_slopes", options.alibi_slopes, true)?;
    match options.alibi_slopes {
        Some(slopes) if slopes.requires_grad() => Err(Error::InvalidOption {
            option: "alibi_slopes",
            value: "a tensor that requires a gradient".to_owned(),
            expected: "one without (detach it), or learned slopes as a mask",
        }),
        _ => Ok(()),
    }
}

pub(crate) fn shape_error(name: &'static str, tensor: &Tensor, expected: String) -> Error {
    Error::Shape {
        tensor: name,
        shape: tensor.size(),
        expected,
    }
}

/// Under autocast, what PyTorch's does for `scaled_dot_product_attention`: all in its lower precision.
pub(crate) fn autocast(tensors: [Tensor; 3]) -> Result<[Tensor; 3]> {
    let dtype = match autocast::state(tensors[0].device()) {
        Ok(state) if state.enabled => state.dtype,
        // A device type without autocast has none that could be on.
        Ok(_) | Err(_) => return Ok(tensors),
    };
    let cast = |tensor: &Tensor| match tensor.kind() {
        Kind::Float | Kind::Half | Kind::BFloat16 => tensor.f_to_kind(dtype),
        _ => Ok(tensor.shallow_clone()),
    };
    let [query, key, value] = &tensors;
    Ok([cast(query)?, cast(key)?, cast(value)?])
}

/// Same device and floating-point dtype.
pub(crate) fn check_kinds(query: &Tensor, key: &Tensor, value: &Tensor) -> Result<()> {
    if !query.is_floating_point() {
        return Err(Error::Dtype {
            tensor: "query",
            kind: query.kind(),
            expected: "Float, Double, Half or BFloat16".to_owned(),
        });
    }
    for (name, tensor) in [("key", key), ("value", value)] {
        if tensor.device() != query.device() {
            return Err(Error::OtherDevice {
                tensor: name,
                device: tensor.device(),
                expected: query.device(),
            });
        }
        if tensor.kind() != query.kind() {
            return Err(Error::Dtype {
                tensor: name,
                kind: tensor.kind(),
                expected: format!("{:?} as the query", query.kind()),
            });
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

/// Sizes of tensors in (batch, heads, length, dim), checked; errors show the caller's layout.
fn sizes(query: &Tensor, key: &Tensor, value: &Tensor, layout: Layout) -> Result<Sizes> {
    let of = |tensor: &Tensor| {
        let size = tensor.size();
        (size[0], size[1], size[2], size[3])
    };
    let in_layout = |(b, h, t, d): (i64, i64, i64, i64)| match layout {
        Layout::Bhtd => [b, h, t, d],
        Layout::Bthd => [b, t, h, d],
    };
    let error = |tensor, sizes, expected| Error::Shape {
        tensor,
        shape: in_layout(sizes).to_vec(),
        expected,
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
            format!("a number of heads that divides the {heads} of the query"),
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

/// The mask with dimensions of size 1 in front, checked against the scores.
fn four_dimensional(mask: &Tensor, query: &Tensor, sizes: &Sizes) -> Result<Tensor> {
    if mask.device() != query.device() {
        return Err(Error::OtherDevice {
            tensor: "mask",
            device: mask.device(),
            expected: query.device(),
        });
    }
    if mask.kind() != Kind::Bool && !mask.is_floating_point() {
        return Err(Error::Dtype {
            tensor: "mask",
            kind: mask.kind(),
            expected: "Bool (true: seen) or a floating-point dtype (added to the scores)"
                .to_owned(),
        });
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
