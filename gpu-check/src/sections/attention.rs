use anyhow::Result;
use overdrive::attention::{
    Alignment, AttentionOptions, Backend, Layout, PackedLengths, PagedLayout, PagedSlots, Window,
    attention, attention_decode, attention_paged, attention_varlen, attention_with_lse, explain,
    explain_varlen, merge, paged_write,
};
use tch::{Device, Kind, Tensor};

use crate::context::Context;
use crate::finding::Finding;
use crate::parity::{Input, Run, constant, copied, leaf};

/// The sizes of the dense cases.
#[derive(Clone, Copy)]
struct Sizes {
    batch: i64,
    heads: i64,
    tokens: i64,
    dim: i64,
}

pub(super) fn run(context: &mut Context) -> Result<()> {
    let sizes = Sizes {
        batch: 2,
        heads: context.sized(8, 4),
        // An odd number: the last tile is not full, and rows of a mask are not aligned.
        tokens: context.sized(257, 33),
        dim: context.sized(64, 16),
    };
    dense(context, sizes)?;
    masked(context, sizes)?;
    packed(context, sizes)?;
    inference(context, sizes)
}

/// Returns the options with the back end of the run: the reference is computed by elementary operators.
fn on<'a>(run: &Run, options: AttentionOptions<'a>) -> AttentionOptions<'a> {
    let backend = match run.is_reference {
        true => Backend::Math,
        false => options.backend,
    };
    AttentionOptions { backend, ..options }
}

/// Returns queries, keys and values with `kv_heads` heads of the latter.
fn inputs(sizes: Sizes, kv_heads: i64) -> [Input; 3] {
    let Sizes {
        batch,
        heads,
        tokens,
        dim,
    } = sizes;
    let keys = leaf(&[batch, kv_heads, tokens, dim]);
    [leaf(&[batch, heads, tokens, dim]), keys.clone(), keys]
}

/// Runs attention and notes the back end.
fn noted(run: &Run, x: &[Tensor], options: &AttentionOptions<'_>) -> Result<Vec<Tensor>> {
    let options = on(run, *options);
    let explanation = explain(&x[0], &x[1], &x[2], &options)?;
    if let Some(backend) = explanation.backend {
        run.note(&backend.to_string());
    }
    Ok(vec![attention(&x[0], &x[1], &x[2], &options)?])
}

fn dense(context: &mut Context, sizes: Sizes) -> Result<()> {
    let full = AttentionOptions::default();
    let causal = AttentionOptions::causal();
    let window = Window {
        left: Some(7),
        right: Some(3),
    };
    let cases = [
        ("full", full),
        ("causal", causal),
        (
            "scale",
            AttentionOptions {
                scale: Some(0.3),
                ..causal
            },
        ),
        (
            "sliding window",
            AttentionOptions {
                window: Window::sliding(9),
                ..causal
            },
        ),
        ("window to both sides", AttentionOptions { window, ..full }),
        (
            "window with sink tokens",
            AttentionOptions {
                window: Window::sliding(9),
                sink_tokens: 4,
                ..causal
            },
        ),
        (
            "softcap",
            AttentionOptions {
                softcap: Some(2.0),
                ..causal
            },
        ),
    ];
    for (name, options) in cases {
        context.parity(name, &inputs(sizes, sizes.heads), |run, x| {
            noted(run, x, &options)
        })?;
    }
    context.parity("grouped heads, causal", &inputs(sizes, 2), |run, x| {
        noted(run, x, &causal)
    })?;
    let wide = Sizes {
        dim: context.sized(128, 24),
        ..sizes
    };
    context.parity("larger heads, causal", &inputs(wide, 2), |run, x| {
        noted(run, x, &causal)
    })?;
    let odd = Sizes {
        dim: context.sized(72, 10),
        ..sizes
    };
    context.parity("heads of an odd size", &inputs(odd, odd.heads), |run, x| {
        noted(run, x, &full)
    })?;
    let [query, key, value] = inputs(sizes, 2);
    let short = Sizes { tokens: 5, ..sizes };
    let [few, ..] = inputs(short, 2);
    let few = [few, key.clone(), value.clone()];
    context.parity("few queries, bottom right", &few, |run, x| {
        noted(run, x, &causal)
    })?;
    context.parity("few queries, top left", &few, |run, x| {
        let options = AttentionOptions {
            alignment: Alignment::TopLeft,
            ..causal
        };
        noted(run, x, &options)
    })?;
    let grouped = [query, key, value];
    context.parity("log-sum-exp", &grouped, |run, x| {
        let (output, lse) = attention_with_lse(&x[0], &x[1], &x[2], &on(run, causal))?;
        // Its gradient is not that of every back end.
        Ok(vec![output, lse.f_detach()?])
    })?;
    in_both_layouts(context, sizes)?;
    for backend in [
        Backend::Flash,
        Backend::Efficient,
        Backend::CuDnn,
        Backend::Blockwise,
    ] {
        let kinds = [Kind::BFloat16, Kind::Half];
        let there = matches!(backend, Backend::Blockwise) == (context.device() == Device::Cpu);
        if !there {
            continue;
        }
        let name = format!("causal by {backend}");
        context.parity_in(&name, &kinds, &inputs(sizes, sizes.heads), |run, x| {
            noted(run, x, &AttentionOptions { backend, ..causal })
        })?;
    }
    let device = context.device();
    context.check("dropout keeps the mean", || {
        let shape = [4, sizes.heads, sizes.tokens, sizes.dim];
        let kind = Kind::BFloat16;
        let x = Tensor::f_randn(shape, (Kind::Float, device))?.f_to_kind(kind)?;
        let ones = x.f_ones_like()?;
        let options = AttentionOptions {
            dropout_p: 0.25,
            ..full
        };
        let output = attention(&x, &x, &ones, &options)?;
        let mean = output.f_mean(Kind::Double)?.f_double_value(&[])?;
        Ok(Finding::judged(
            (mean - 1.0).abs() < 0.02,
            format!("the mean is {mean}"),
        ))
    })
}

/// Checks the two layouts of one shape one after the other, each of them first: cuDNN's plans of a backward must not
/// depend on how the gradient of the first call lay in memory.
fn in_both_layouts(context: &mut Context, sizes: Sizes) -> Result<()> {
    let kinds = [Kind::BFloat16, Kind::Half];
    for (first, second, tokens) in [
        // Shapes that no other check has, the last two of whole tiles.
        (Layout::Bhtd, Layout::Bthd, sizes.tokens + 2),
        (Layout::Bthd, Layout::Bhtd, sizes.tokens + 4),
        (Layout::Bhtd, Layout::Bthd, context.sized(256, 64)),
        (Layout::Bthd, Layout::Bhtd, context.sized(384, 72)),
    ] {
        let inputs = inputs(Sizes { tokens, ..sizes }, 2);
        let again = format!("{}, again", name_of_layout(first));
        for (layout, name) in [
            (first, name_of_layout(first)),
            (second, name_of_layout(second)),
            (first, &again),
        ] {
            let name = format!("{tokens} tokens, layout {name}");
            context.parity_in(&name, &kinds, &inputs, |run, x| {
                let options = AttentionOptions {
                    layout,
                    ..AttentionOptions::causal()
                };
                if layout == Layout::Bhtd {
                    return noted(run, x, &options);
                }
                // The same keys and values in memory, so that cuDNN has one plan for both.
                let x = (x.iter().map(|x| x.f_transpose(1, 2))).collect::<Result<Vec<_>, _>>()?;
                noted(run, &x, &options)
            })?;
        }
    }
    Ok(())
}

fn name_of_layout(layout: Layout) -> &'static str {
    match layout {
        Layout::Bhtd => "(B, H, T, D)",
        Layout::Bthd => "(B, T, H, D)",
    }
}

fn masked(context: &mut Context, sizes: Sizes) -> Result<()> {
    let Sizes {
        batch,
        heads,
        tokens,
        ..
    } = sizes;
    let padding = move || -> Result<Tensor> {
        let at = Tensor::f_arange(tokens, (Kind::Int64, Device::Cpu))?;
        let lengths = Tensor::f_from_slice(&[tokens, tokens / 2])?;
        let seen = at.f_unsqueeze(0)?.f_lt_tensor(&lengths.f_unsqueeze(1)?)?;
        Ok(seen.f_view([batch, 1, 1, tokens])?)
    };
    for (name, kv_heads) in [
        ("mask of padding", heads),
        ("mask of padding, grouped heads", 2),
    ] {
        context.parity(name, &inputs(sizes, kv_heads), |run, x| {
            let mask = padding()?.f_to_device(run.device)?;
            noted(
                run,
                x,
                &AttentionOptions {
                    mask: Some(&mask),
                    ..Default::default()
                },
            )
        })?;
    }
    let [query, key, value] = inputs(sizes, heads);
    let biased = [query, key, value, leaf(&[1, heads, tokens, tokens])];
    context.parity("bias with a gradient", &biased, |run, x| {
        noted(
            run,
            x,
            &AttentionOptions {
                mask: Some(&x[3]),
                ..Default::default()
            },
        )
    })?;
    let causal = AttentionOptions::causal();
    context.parity("ALiBi", &inputs(sizes, heads), |run, x| {
        let slopes: Vec<f32> = (1..=heads).map(|head| 0.5_f32.powi(head as i32)).collect();
        let slopes = Tensor::f_from_slice(&slopes)?.f_to_device(run.device)?;
        noted(
            run,
            x,
            &AttentionOptions {
                alibi_slopes: Some(&slopes),
                ..causal
            },
        )
    })?;
    let [query, key, value] = inputs(sizes, 2);
    let sinks = [query, key, value, leaf(&[heads])];
    context.parity("attention sinks", &sinks, |run, x| {
        noted(
            run,
            x,
            &AttentionOptions {
                sinks: Some(&x[3]),
                ..causal
            },
        )
    })
}

fn packed(context: &mut Context, sizes: Sizes) -> Result<()> {
    let lengths = context.sized([100_i64, 1, 37, 120], [11, 1, 7, 14]);
    let total: i64 = lengths.iter().sum();
    let (heads, dim) = (sizes.heads, sizes.dim);
    let of = |kv_heads: i64| {
        let keys = leaf(&[total, kv_heads, dim]);
        [leaf(&[total, heads, dim]), keys.clone(), keys]
    };
    let causal = AttentionOptions::causal();
    let window = AttentionOptions {
        window: Window::sliding(5),
        ..causal
    };
    let softcap = AttentionOptions {
        softcap: Some(2.0),
        ..causal
    };
    let cases = [
        ("packed, full", AttentionOptions::default(), heads),
        ("packed, causal", causal, heads),
        ("packed, grouped heads", causal, 2),
        ("packed, sliding window", window, 2),
        ("packed, softcap", softcap, 2),
    ];
    for (name, options, kv_heads) in cases {
        context.parity(name, &of(kv_heads), |run, x| {
            let lengths = PackedLengths::from_lengths(&lengths, run.device)?;
            let options = on(run, options);
            let explanation = explain_varlen(&x[0], &x[1], &x[2], &lengths, &options)?;
            if let Some(backend) = explanation.backend {
                run.note(&backend.to_string());
            }
            let output = attention_varlen(&x[0], &x[1], &x[2], &lengths, &options)?;
            Ok(vec![output])
        })?;
    }
    Ok(())
}

fn inference(context: &mut Context, sizes: Sizes) -> Result<()> {
    let Sizes {
        heads, tokens, dim, ..
    } = sizes;
    let causal = AttentionOptions::causal();
    let keys = constant(&[3, 2, tokens, dim]);
    for queries in [1, 4] {
        let given = [
            constant(&[3, heads, queries, dim]),
            keys.clone(),
            keys.clone(),
        ];
        let name = format!("decode {queries} at a time with lengths");
        context.parity(&name, &given, |run, x| {
            let longest = usize::try_from(tokens)?;
            let lengths = [longest, longest / 2, 5];
            let (output, _) =
                attention_decode(&x[0], &x[1], &x[2], Some(&lengths), &on(run, causal))?;
            Ok(vec![output])
        })?;
    }
    let blocks = constant(&[12, 2, 16, dim]);
    let given = [constant(&[7, heads, dim]), blocks.clone(), blocks.clone()];
    let windowed = AttentionOptions {
        window: Window::sliding(9),
        ..causal
    };
    for (name, options) in [("paged", causal), ("paged, sliding window", windowed)] {
        context.parity(name, &given, |run, x| {
            let layout = PagedLayout::new(
                vec![vec![5, 0, 2], vec![3], vec![7, 11]],
                vec![1, 2, 4],
                vec![40, 2, 20],
                16,
                run.device,
            )?;
            let (output, _) = attention_paged(&x[0], &x[1], &x[2], &layout, &on(run, options))?;
            Ok(vec![output])
        })?;
    }
    let written = [constant(&[5, 2, dim]), blocks];
    context.parity("write to a paged pool", &written, |run, x| {
        let slots = PagedSlots::new(vec![3, 16, 17, 95, 40], 16, run.device)?;
        let mut pool = copied(&x[1])?;
        paged_write(&x[0], &mut pool, &slots)?;
        Ok(vec![pool])
    })?;
    let halves = [
        constant(&[2, heads, 5, dim]),
        constant(&[2, 2, tokens, dim]),
    ];
    context.parity("merge of two splits of the keys", &halves, |run, x| {
        let options = on(run, AttentionOptions::default());
        let half = tokens / 2;
        let (mut outputs, mut lses) = (Vec::new(), Vec::new());
        for (start, len) in [(0, half), (half, tokens - half)] {
            let keys = x[1].f_narrow(2, start, len)?;
            let (output, lse) = attention_with_lse(&x[0], &keys, &keys, &options)?;
            outputs.push(output);
            lses.push(lse);
        }
        let (output, lse) = merge(&outputs, &lses, Layout::Bhtd)?;
        Ok(vec![output, lse])
    })
}
