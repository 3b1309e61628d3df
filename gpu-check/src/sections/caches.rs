use anyhow::Result;
use overdrive::kv_cache::{
    CacheImplementation, CacheShape, KvCache, KvCacheDtype, PagedCache, PagedCacheConfig,
    SequenceId,
};
use overdrive::transformer::{CausalLm, ForwardInput, LlamaConfig, Logits};
use tch::{Device, Kind, Tensor};

use crate::context::Context;
use crate::finding::Finding;
use crate::models::{config, model, prompts, tokens};
use crate::parity::{KINDS, distance, largest, name_of, tolerance};

const PROMPT: i64 = 40;
const NEW: i64 = 6;

pub(super) fn run(context: &mut Context) -> Result<()> {
    let config = config(context);
    let device = context.device();
    for cache in CacheImplementation::ALL {
        for kind in KINDS {
            // The caches quantize f32 and keep it; half precision on a CPU is tested by the crate itself.
            if device == Device::Cpu && kind != Kind::Float {
                continue;
            }
            context.check(format!("{cache} in {}", name_of(kind)), || {
                let there = decoded(&config, cache, device, kind)?;
                let here = decoded(&config, cache, Device::Cpu, Kind::Float)?;
                let far = distance(&there, &here)?;
                // Through all layers; a value on the border of two codes may get the other one.
                let factor = match cache {
                    CacheImplementation::Int8 => 8.0,
                    CacheImplementation::Int4 => 20.0,
                    _ => 4.0,
                };
                let allowed = factor * tolerance(kind).max(1e-4);
                Ok(Finding::within(
                    far,
                    allowed,
                    "the logits differ from the CPU's",
                ))
            })?;
        }
    }
    for kind in KINDS {
        if device == Device::Cpu && kind != Kind::Float {
            continue;
        }
        context.check(format!("paged in {}", name_of(kind)), || {
            let there = paged(&config, device, kind, KvCacheDtype::Auto)?;
            let here = alone(&config)?;
            let far = distance(&there, &here)?;
            let allowed = 4.0 * tolerance(kind).max(1e-4);
            Ok(Finding::within(
                far,
                allowed,
                "the logits differ from those of each sequence alone on the CPU",
            ))
        })?;
        for dtype in [KvCacheDtype::Int8, KvCacheDtype::Fp8] {
            context.check(format!("paged {dtype} in {}", name_of(kind)), || {
                let there = paged(&config, device, kind, dtype)?;
                let here = paged(&config, Device::Cpu, Kind::Float, dtype)?;
                let far = distance(&there, &here)?;
                // Keys that differ in their last bits may get neighbouring codes.
                let allowed = 4.0 * tolerance(kind).max(5e-3);
                Ok(Finding::within(
                    far,
                    allowed,
                    "the logits differ from those over the same cache on the CPU",
                ))
            })?;
        }
    }
    for cache in [CacheImplementation::Dynamic, CacheImplementation::Int8] {
        context.check(format!("{cache}: reorder, truncate, fork, save"), || {
            changed(&config, cache, device)
        })?;
    }
    Ok(())
}

fn build(
    model: &CausalLm,
    cache: CacheImplementation,
    device: Device,
    kind: Kind,
) -> Result<Box<dyn KvCache>> {
    let config = model.config();
    let mut shape = CacheShape {
        windows: model.layer_windows(),
        batch: 2,
        max_len: Some(PROMPT + NEW),
        kv_heads: config.num_key_value_heads(),
        head_dim: config.head_dim(),
        kind,
        device,
        ..CacheShape::default()
    };
    if cache == CacheImplementation::Sliding {
        (shape.window, shape.sinks) = (Some(16), 0);
    }
    Ok(cache.build(&shape)?)
}

fn forward(model: &CausalLm, ids: &Tensor, cache: &mut dyn KvCache) -> Result<Tensor> {
    let input = ForwardInput::new(ids)
        .with_logits(Logits::All)
        .with_cache(cache);
    Ok(model.forward(input)?)
}

/// Returns the logits of a prompt and of single tokens after it.
fn decoded(
    config: &LlamaConfig,
    cache: CacheImplementation,
    device: Device,
    kind: Kind,
) -> Result<Tensor> {
    let _no_grad = tch::no_grad_guard();
    let model = model(config, device, kind)?;
    let mut cache = build(&model, cache, device, kind)?;
    let ids = tokens(2, PROMPT + NEW, device)?;
    let mut logits = vec![forward(
        &model,
        &ids.f_narrow(1, 0, PROMPT)?,
        cache.as_mut(),
    )?];
    for at in PROMPT..PROMPT + NEW {
        logits.push(forward(&model, &ids.f_narrow(1, at, 1)?, cache.as_mut())?);
    }
    Ok(Tensor::f_cat(&logits, 1)?)
}

/// Reorders, truncates, forks and reloads a cache, and compares what it gives with an untouched one.
fn changed(config: &LlamaConfig, kind: CacheImplementation, device: Device) -> Result<Finding> {
    let _no_grad = tch::no_grad_guard();
    let model = model(config, device, Kind::Float)?;
    let mut cache = build(&model, kind, device, Kind::Float)?;
    let ids = tokens(2, PROMPT + NEW, device)?;
    let (prompt, next) = (ids.f_narrow(1, 0, PROMPT)?, ids.f_narrow(1, PROMPT, 1)?);
    let _logits = forward(&model, &prompt, cache.as_mut())?;
    let mut fork = cache.fork()?;
    let expected = forward(&model, &next, cache.as_mut())?;
    let turned = Tensor::f_from_slice(&[1_i64, 0])?.f_to_device(device)?;
    fork.reorder(&turned)?;
    fork.reorder(&turned)?;
    let mut loaded = build(&model, kind, device, Kind::Float)?;
    loaded.load_state(&fork.state()?)?;
    let first = distance(&forward(&model, &next, loaded.as_mut())?, &expected)?;
    cache.truncate(PROMPT)?;
    let second = distance(&forward(&model, &next, cache.as_mut())?, &expected)?;
    let far = largest([first, second]);
    Ok(Finding::within(
        far,
        1e-4,
        "the logits differ from those of the untouched cache",
    ))
}

/// Returns the last logits of sequences that share one row over a paged cache.
fn paged(
    config: &LlamaConfig,
    device: Device,
    kind: Kind,
    kv_cache_dtype: KvCacheDtype,
) -> Result<Tensor> {
    let _no_grad = tch::no_grad_guard();
    let model = model(config, device, kind)?;
    let mut cache = PagedCache::new(PagedCacheConfig {
        layers: model.cache_layers(),
        kv_heads: model.config().num_key_value_heads(),
        head_dim: model.config().head_dim(),
        num_blocks: 32,
        kind,
        kv_cache_dtype,
        device,
        ..PagedCacheConfig::default()
    })?;
    let prompts = prompts(4);
    let ids: Vec<SequenceId> = prompts
        .iter()
        .map(|prompt| Ok(cache.add(prompt)?.0))
        .collect::<Result<_>>()?;
    // All but the last token first, then one token of each, as an engine decodes.
    let mut step = |is_last: bool| -> Result<Tensor> {
        let parts = ids.iter().zip(&prompts).map(|(id, prompt)| {
            let (before, last) = prompt.split_at(prompt.len() - 1);
            (*id, if is_last { last } else { before })
        });
        let mut batch = cache.batch(&parts.collect::<Vec<_>>())?;
        let (tokens, positions) = (batch.input_ids()?, batch.position_ids()?);
        let places = Tensor::f_from_slice(&batch.last_indices())?.f_to_device(device)?;
        let input = ForwardInput::new(&tokens)
            .with_position_ids(&positions)
            .with_logits(Logits::At(&places))
            .with_cache(&mut batch);
        let logits = model.forward(input)?;
        batch.commit()?;
        Ok(logits.f_squeeze_dim(0)?)
    };
    let _logits = step(false)?;
    step(true)
}

/// Returns the last logits of each sequence alone, on the CPU in f32 without a cache.
fn alone(config: &LlamaConfig) -> Result<Tensor> {
    let _no_grad = tch::no_grad_guard();
    let model = model(config, Device::Cpu, Kind::Float)?;
    let rows: Vec<Tensor> = prompts(4)
        .iter()
        .map(|prompt| {
            let ids = Tensor::f_from_slice(prompt)?.f_unsqueeze(0)?;
            let input = ForwardInput::new(&ids).with_logits(Logits::Last);
            Ok(model.forward(input)?.f_reshape([1, -1])?)
        })
        .collect::<Result<_>>()?;
    Ok(Tensor::f_cat(&rows, 0)?)
}
