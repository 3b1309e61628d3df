use anyhow::{Result, anyhow, ensure};
use overdrive::attention::{
    AttentionOptions, Backend, DeviceLengths, PagedLayout, PagedSlots, Window,
    attention_at_lengths, attention_decode, attention_paged, paged_write_pair,
};
use overdrive::kv_cache::{AttendOptions, KvCache, QuantizedCache, QuantizedCacheConfig};
use overdrive::profiling::ProfilerConfig;
use overdrive_graphs::{CaptureOptions, CudaGraph};
use tch::{Device, Kind, Tensor};

use crate::context::Context;
use crate::finding::Finding;
use crate::parity::{Drawn, KINDS, Run, constant, copied, distance, largest, name_of, tolerance};
use crate::timing::{seconds, trace};

use super::own_kernels::launched as launched_all;

/// The name of the kernel in traces.
const KERNEL: &str = "decode_attention";
/// The kernels that the checks have to launch.
const KERNELS: [&str; 3] = [KERNEL, "decode_combine", "paged_write"];

/// The tokens of a block of the pools.
const BLOCK: usize = 16;

pub(super) fn run(context: &mut Context) -> Result<()> {
    // On a CPU there are none: the same checks run what the kernel replaces.
    let _on = overdrive_gpu::override_enabled(true);
    let device = context.device();
    context.check("the kernels for this GPU", || {
        Ok(match overdrive_gpu::kernels(device)? {
            Some(kernels) => Finding::passed().noting(kernels.target()),
            None => Finding::judged(device == Device::Cpu, "there are none"),
        })
    })?;
    // What only a GPU can show comes first, in case the time ends.
    context.check("each kind of cache launches it", || launched(device))?;
    context.check("capture, and replays with growing lengths", || {
        replayed(device)
    })?;
    speed(context)?;
    for (name, dim) in [("64", 64), ("80", 80), ("128", 128), ("256", 256)] {
        // f32 is for heads of up to 128.
        let kinds: &[Kind] = match dim {
            256 => &[Kind::BFloat16, Kind::Half],
            _ => &KINDS,
        };
        let many = longest(context, dim);
        // Few keys of small heads are one launch of another variant.
        let longests = if dim == 64 { &[many, 100][..] } else { &[many] };
        for &longest in longests {
            rows(context, name, dim, longest, kinds)?;
            paged(context, name, dim, longest, kinds)?;
        }
    }
    codes(context)?;
    written(context)?;
    launched_all(context, "decoding", &KERNELS)
}

/// Returns the length of the longest sequence: many blocks for one size of heads, a few for the others, whose
/// references on the CPU would take most of the section's time.
fn longest(context: &Context, dim: i64) -> usize {
    let full = if dim == 128 { 5000 } else { 300 };
    context.sized(full, 200)
}

fn cases() -> [(&'static str, AttentionOptions<'static>); 3] {
    let causal = AttentionOptions::causal();
    [
        ("causal", causal),
        (
            "window",
            AttentionOptions {
                window: Window::sliding(70),
                scale: Some(0.1),
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
    ]
}

/// Returns the options of the run: the reference is computed by the kernel for CPUs.
fn on<'a>(run: &Run, options: &AttentionOptions<'a>) -> AttentionOptions<'a> {
    let backend = match run.is_reference {
        true => Backend::Blockwise,
        false => options.backend,
    };
    AttentionOptions {
        backend,
        ..*options
    }
}

/// Returns attention over the first keys of each row, whose numbers the device has.
fn at_lengths(
    x: &[Tensor],
    lengths: &[usize],
    options: &AttentionOptions<'_>,
) -> Result<(Tensor, Tensor)> {
    let counts: Vec<i64> = lengths.iter().map(|length| *length as i64).collect();
    let counts = Tensor::f_from_slice(&counts)?.f_to_device(x[1].device())?;
    let on_device = DeviceLengths::new(&counts, &x[1])?;
    Ok(
        match attention_at_lengths(&x[0], &x[1], &x[2], &on_device, options)? {
            Some(results) => results,
            None => attention_decode(&x[0], &x[1], &x[2], Some(lengths), options)?,
        },
    )
}

fn rows(context: &mut Context, name: &str, dim: i64, longest: usize, kinds: &[Kind]) -> Result<()> {
    // A block of the kernel has 32 or 64 keys.
    let lengths = [longest, 0, 1, 31, 33, 63, 64, 65];
    for (queries, heads, kv_heads) in [(1, 8, 2), (4, 4, 4)] {
        let keys = constant(&[8, kv_heads, longest as i64, dim]);
        let given = [constant(&[8, heads, queries, dim]), keys.clone(), keys];
        let shape = format!("rows of {longest}, heads of {name}, {queries} queries");
        let drawn = Drawn::new(&shape, &given);
        for (case, options) in cases() {
            let name = format!("{shape}, {case}");
            context.parity_of(&name, kinds, &drawn, |run, x| {
                let (output, _) = at_lengths(x, &lengths, &on(run, &options))?;
                Ok(vec![output])
            })?;
        }
    }
    Ok(())
}

/// Returns the layout of sequences of these lengths over a pool in which their blocks lie in another order.
fn layout(queries: &[usize], lengths: &[usize], device: Device) -> Result<(PagedLayout, i64)> {
    let blocks: usize = lengths.iter().map(|length| length.div_ceil(BLOCK)).sum();
    let mut rest = (0..blocks as u32).rev();
    let tables = lengths
        .iter()
        .map(|length| rest.by_ref().take(length.div_ceil(BLOCK)).collect())
        .collect();
    let (queries, lengths) = (queries.to_vec(), lengths.to_vec());
    let layout = PagedLayout::new(tables, queries, lengths, BLOCK, device)?;
    Ok((layout, blocks as i64))
}

fn paged(
    context: &mut Context,
    name: &str,
    dim: i64,
    longest: usize,
    kinds: &[Kind],
) -> Result<()> {
    let queries = [1, 3, 1, 16, 0, 1];
    let lengths = [longest, BLOCK + 1, 1, 100, 7, BLOCK];
    let total: usize = queries.iter().sum();
    let (_, blocks) = layout(&queries, &lengths, Device::Cpu)?;
    for (heads, kv_heads) in [(8, 2), (3, 3)] {
        let pool = constant(&[blocks, kv_heads, BLOCK as i64, dim]);
        let given = [constant(&[total as i64, heads, dim]), pool.clone(), pool];
        let shape = format!("paged, up to {longest} keys, {heads} heads of {name}");
        let drawn = Drawn::new(&shape, &given);
        for (case, options) in cases() {
            let name = format!("{shape}, {case}");
            context.parity_of(&name, kinds, &drawn, |run, x| {
                let (layout, _) = layout(&queries, &lengths, run.device)?;
                let options = on(run, &options);
                let (output, lse) = attention_paged(&x[0], &x[1], &x[2], &layout, &options)?;
                Ok(vec![output, lse])
            })?;
        }
    }
    Ok(())
}

/// Returns the output of a step over an INT8 cache of `tokens` tokens.
fn coded(tokens: i64, dim: i64, device: Device, kind: Kind) -> Result<Tensor> {
    let mut cache = QuantizedCache::new(QuantizedCacheConfig::int8(1))?;
    tch::manual_seed(tokens);
    let random = |heads: i64, tokens: i64| -> Result<Tensor> {
        let values = Tensor::f_randn([2, heads, tokens, dim], (Kind::Float, Device::Cpu))?;
        Ok(values.f_to_kind(kind)?.f_to_device(device)?)
    };
    let mut output = None;
    for count in [tokens - 2, 1, 1] {
        let (query, keys, values) = (random(8, count)?, random(2, count)?, random(2, count)?);
        let options = AttendOptions::default();
        output = Some(cache.attend(0, &query, &keys, &values, &options)?);
    }
    output.ok_or_else(|| anyhow!("no step ran"))
}

/// Compares INT8 caches with and without the kernel.
fn codes(context: &mut Context) -> Result<()> {
    let device = context.device();
    for kind in KINDS {
        for (tokens, dim) in [(200, 64), (257, 128), (context.sized(6000, 400), 64)] {
            let name = format!("INT8, {tokens} tokens of {dim} {}", name_of(kind));
            context.check(name, || {
                let found = coded(tokens, dim, device, kind)?;
                let off = overdrive_gpu::override_enabled(false);
                let composed = coded(tokens, dim, device, kind)?;
                drop(off);
                let far = distance(&found, &composed)?;
                let allowed = 2.0 * tolerance(kind);
                Ok(Finding::within(
                    far,
                    allowed,
                    "the output differs from the one without the kernel",
                ))
            })?;
        }
    }
    Ok(())
}

/// Compares new keys and values in the blocks of two pools with those that the CPU writes.
fn written(context: &mut Context) -> Result<()> {
    for dim in [64, 128] {
        // Side by side, as a joint projection leaves them.
        let pool = constant(&[6, 2, BLOCK as i64, dim]);
        let given = [constant(&[5, 4, dim]), pool.clone(), pool];
        let name = format!("write of keys and values of {dim} to paged pools");
        context.parity(&name, &given, |run, x| {
            let slots = PagedSlots::new(vec![3, 95, 17, 16, 40], BLOCK, run.device)?;
            let (keys, values) = (x[0].f_narrow(1, 0, 2)?, x[0].f_narrow(1, 2, 2)?);
            let (mut key_pool, mut value_pool) = (copied(&x[1])?, copied(&x[2])?);
            let pools = [&mut key_pool, &mut value_pool];
            paged_write_pair([&keys, &values], pools, &slots)?;
            Ok(vec![key_pool, value_pool])
        })?;
    }
    Ok(())
}

/// Returns the number of kernels of this name that `work` runs on a GPU.
fn kernels_of(device: Device, work: impl FnOnce() -> Result<()>) -> Result<usize> {
    let ((), trace) = trace(device, ProfilerConfig::default(), work)?;
    let events = trace.events().iter();
    Ok(events
        .filter(|event| event.device_type != 0 && event.name.contains(KERNEL))
        .count())
}

fn launched(device: Device) -> Result<Finding> {
    if device == Device::Cpu {
        return Ok(Finding::passed().noting("no kernel on a CPU"));
    }
    let given = (Kind::BFloat16, device);
    let query = Tensor::f_randn([2, 8, 64], given)?;
    let keys = Tensor::f_randn([20, 2, BLOCK as i64, 64], given)?;
    let options = AttentionOptions::causal();
    let rows = query.f_unsqueeze(2)?;
    let by_row = keys.f_narrow(0, 0, 2)?;
    let of_rows = kernels_of(device, || {
        at_lengths(&[rows, by_row.shallow_clone(), by_row], &[5, 16], &options).map(drop)
    })?;
    let (layout, _) = layout(&[1, 1], &[100, 16], device)?;
    let of_pages = kernels_of(device, || {
        let _results = attention_paged(&query, &keys, &keys, &layout, &options)?;
        Ok(())
    })?;
    // The second and the third step read codes.
    let of_codes = kernels_of(device, || coded(300, 64, device, Kind::BFloat16).map(drop))?;
    let counts = [of_rows, of_pages, of_codes];
    Ok(Finding::judged(
        counts == [1, 1, 2],
        format!("{counts:?} launches for rows, pages and codes"),
    ))
}

/// Captures a step over rows, and replays it with other lengths, keys that grow, and queries.
fn replayed(device: Device) -> Result<Finding> {
    let (heads, kv_heads, dim) = (8, 2, 64);
    let random = |shape: [i64; 4], kind| -> Result<Tensor> {
        Ok(Tensor::f_randn(shape, (Kind::Float, device))?.f_to_kind(kind)?)
    };
    let mut errors = Vec::new();
    let mut allowed = 0.0_f64;
    // Up to 128 keys of small heads are one launch, more are two.
    for (kind, room) in [
        (Kind::Float, 128),
        (Kind::BFloat16, 128),
        (Kind::Float, 700),
        (Kind::BFloat16, 700),
    ] {
        let mut query = random([2, heads, 1, dim], kind)?;
        let keys = random([2, kv_heads, room, dim], kind)?;
        let values = random([2, kv_heads, room, dim], kind)?;
        let mut counts = Tensor::f_from_slice(&[1_i64, 1])?.f_to_device(device)?;
        let step = {
            let [query, keys, values, counts] =
                [&query, &keys, &values, &counts].map(Tensor::shallow_clone);
            move || -> Result<Option<Tensor>> {
                let lengths = DeviceLengths::new(&counts, &keys)?;
                let options = AttentionOptions::causal();
                let results = attention_at_lengths(&query, &keys, &values, &lengths, &options)?;
                Ok(results.map(|(output, _)| output))
            }
        };
        if device == Device::Cpu {
            ensure!(step()?.is_none(), "a CPU has such a kernel");
            continue;
        }
        let captured = move || -> Result<Tensor> { step()?.ok_or_else(|| anyhow!("no kernel")) };
        let graph = CudaGraph::capture(device, CaptureOptions::default(), captured)?;
        let lengths = [1_usize, 31, 32, 63, 64, 65, 128, 300, 699, 700];
        for length in lengths.into_iter().filter(|&length| length as i64 <= room) {
            let lengths = [length, length.div_ceil(2)];
            let new: Vec<i64> = lengths.iter().map(|length| *length as i64).collect();
            counts.f_copy_(&Tensor::f_from_slice(&new)?)?;
            query.f_copy_(&random([2, heads, 1, dim], kind)?)?;
            let host = |tensor: &Tensor| tensor.f_to_device(Device::Cpu)?.f_to_kind(Kind::Double);
            let (expected, _) = attention_decode(
                &host(&query)?,
                &host(&keys)?,
                &host(&values)?,
                Some(&lengths),
                &AttentionOptions::causal(),
            )?;
            // In units of the tolerance of the dtype.
            errors.push(distance(graph.replay()?, &expected)? / tolerance(kind));
        }
        allowed = 1.0;
    }
    let most = largest(errors);
    Ok(
        Finding::judged(most <= allowed, "the output differs from the CPU's")
            .with("output error, in tolerances", most),
    )
}

/// Measures a step over caches with and without the kernel.
fn speed(context: &mut Context) -> Result<()> {
    let device = context.device();
    let kind = context.sized(Kind::BFloat16, Kind::Float);
    let (heads, kv_heads, dim) = (32, 8, 128);
    let shapes: [(usize, usize); 3] = context.sized(
        [(1, 32_768), (8, 8192), (64, 4096)],
        [(1, 64), (1, 128), (2, 64)],
    );
    for (batch, length) in shapes {
        let random = |shape: &[i64]| -> Result<Tensor> {
            Ok(Tensor::f_randn(shape, (Kind::Float, device))?.f_to_kind(kind)?)
        };
        let (rows, tokens) = (batch as i64, length as i64);
        let bytes = 2.0 * (rows * kv_heads * tokens * dim) as f64;
        let wide = bytes * kind.elt_size_in_bytes() as f64;
        let options = AttentionOptions::causal();
        compared(context, format!("rows, {batch} × {length}"), wide, || {
            let shape = [rows, kv_heads, tokens, dim];
            let x = [
                random(&[rows, heads, 1, dim])?,
                random(&shape)?,
                random(&shape)?,
            ];
            let lengths = vec![length; batch];
            let counts = Tensor::f_full([rows], tokens, (Kind::Int64, device))?;
            let on_device = DeviceLengths::new(&counts, &x[1])?;
            Ok(Box::new(move || {
                if attention_at_lengths(&x[0], &x[1], &x[2], &on_device, &options)?.is_none() {
                    let _results = attention_decode(&x[0], &x[1], &x[2], Some(&lengths), &options)?;
                }
                Ok(())
            }))
        })?;
        compared(context, format!("paged, {batch} × {length}"), wide, || {
            let (layout, blocks) = layout(&vec![1; batch], &vec![length; batch], device)?;
            let shape = [blocks, kv_heads, BLOCK as i64, dim];
            let x = [
                random(&[rows, heads, dim])?,
                random(&shape)?,
                random(&shape)?,
            ];
            Ok(Box::new(move || {
                let _results = attention_paged(&x[0], &x[1], &x[2], &layout, &options)?;
                Ok(())
            }))
        })?;
        // A scale and a least number for 64 codes.
        let narrow = bytes * (1.0 + 8.0 / 64.0);
        compared(
            context,
            format!("INT8, {batch} × {length}"),
            narrow,
            || {
                let mut cache = QuantizedCache::new(QuantizedCacheConfig::int8(1))?;
                let prompt = random(&[rows, kv_heads, tokens, dim])?;
                let _view = cache.append(0, &prompt, &prompt)?;
                let (query, new) = (
                    random(&[rows, heads, 1, dim])?,
                    random(&[rows, kv_heads, 1, dim])?,
                );
                let held = cache.len();
                Ok(Box::new(move || {
                    let options = AttendOptions::default();
                    let _output = cache.attend(0, &query, &new, &new, &options)?;
                    Ok(cache.truncate(held)?)
                }))
            },
        )?;
    }
    Ok(())
}

type Work = Box<dyn FnMut() -> Result<()>>;

fn compared(
    context: &mut Context,
    name: String,
    bytes: f64,
    prepare: impl FnOnce() -> Result<Work>,
) -> Result<()> {
    let device = context.device();
    context.check(name, || {
        let _no_grad = tch::no_grad_guard();
        let mut work = prepare()?;
        let with = seconds(device, 5, 10, &mut work)?;
        let off = overdrive_gpu::override_enabled(false);
        let without = seconds(device, 3, 3, &mut work)?;
        drop(off);
        Ok(Finding::passed()
            .with("ms", with * 1e3)
            .with("GB/s", bytes / with / 1e9)
            .with("ms without the kernel", without * 1e3)
            .with("GB/s without the kernel", bytes / without / 1e9))
    })
}
