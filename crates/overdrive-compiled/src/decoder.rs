//! The models `prefill` and `decode` of a package, over a static cache.

use std::path::Path;

use overdrive_kv_cache::{KvCache, StaticCache, StaticCacheConfig};
use tch::{Device, Kind, Tensor};

use crate::{CompiledModel, Error, LoadOptions, Result, Size, TensorSpec};

/// Text from a package alone: its models `prefill` and `decode` over a [`StaticCache`] of ours.
///
/// ```no_run
/// // Needs a package, which only Python can make.
/// use overdrive_compiled::{CompiledDecoder, LoadOptions};
/// use tch::Tensor;
///
/// let mut decoder = CompiledDecoder::load("tiny.pt2", 1, &LoadOptions::default())?;
/// let mut logits = decoder.prefill(&Tensor::from_slice(&[1i64, 2, 3]).view([1, 3]))?;
/// for _ in 0..100 {
///     let next = logits.f_argmax(-1, false)?;
///     logits = decoder.step(&next)?;
/// }
/// # Ok::<(), overdrive_compiled::Error>(())
/// ```
#[derive(Debug)]
pub struct CompiledDecoder {
    prefill: CompiledModel,
    decode: CompiledModel,
    cache: StaticCache,
    batch: i64,
}

impl CompiledDecoder {
    /// Loads both models of a package, with an empty cache of `batch` rows and the length that they were
    /// compiled for. [`LoadOptions::model`] is not looked at.
    ///
    /// # Errors
    /// As [`CompiledModel::load`]; [`Error::BadArgument`] where the models are not of that kind.
    pub fn load(path: impl AsRef<Path>, batch: i64, options: &LoadOptions) -> Result<Self> {
        let load = |name: &str| {
            let options = LoadOptions {
                model: Some(name.to_owned()),
                ..options.clone()
            };
            CompiledModel::load(path.as_ref(), &options)
        };
        let (prefill, decode) = (load("prefill")?, load("decode")?);
        let cache = StaticCache::new(cache_config(&decode, batch, options)?)?;
        if prefill.input_names() != decode.input_names() {
            return Err(bad_package("prefill and decode take different inputs"));
        }
        Ok(CompiledDecoder {
            prefill,
            decode,
            cache,
            batch,
        })
    }

    /// Reads prompts of one length, `(B, T)`, into the cache, behind what it holds; the logits of the last
    /// token, `(B, 1, V)`.
    ///
    /// # Errors
    /// When shapes do not fit or the cache is too short.
    pub fn prefill(&mut self, tokens: &Tensor) -> Result<Tensor> {
        self.run(tokens)
    }

    /// One token for each row, `(B, 1)`; its logits `(B, 1, V)`.
    ///
    /// # Errors
    /// As [`prefill`](CompiledDecoder::prefill).
    pub fn step(&mut self, tokens: &Tensor) -> Result<Tensor> {
        self.run(tokens)
    }

    /// Forgets all tokens.
    pub fn reset(&mut self) {
        self.cache.reset();
    }

    /// The cache: the buffers that the compiled code reads and writes.
    pub fn cache(&self) -> &StaticCache {
        &self.cache
    }

    /// The models: `prefill`, then `decode`. Each has its own copy of the weights unless they
    /// [share](crate::ReplaceOptions::share) one.
    pub fn models(&self) -> [&CompiledModel; 2] {
        [&self.prefill, &self.decode]
    }

    fn run(&mut self, tokens: &Tensor) -> Result<Tensor> {
        let &[rows, new] = tokens.size().as_slice() else {
            return Err(Error::BadArgument {
                what: "tokens".to_owned(),
                expected: format!("shape ({}, T)", self.batch),
                got: format!("shape {:?}", tokens.size()),
            });
        };
        let (held, most) = (self.cache.len(), self.cache.config().max_len);
        if rows != self.batch || new == 0 {
            return Err(Error::BadArgument {
                what: "tokens".to_owned(),
                expected: format!("{} rows of at least one token", self.batch),
                got: format!("shape {:?}", tokens.size()),
            });
        }
        if held + new > most {
            return Err(overdrive_kv_cache::Error::Full {
                capacity: most,
                held,
                new,
            }
            .into());
        }
        let positions = Tensor::f_arange_start(held, held + new, (Kind::Int64, tokens.device()))?;
        let layers = 0..self.cache.layers();
        let buffers: Vec<(&Tensor, &Tensor)> = layers
            .map(|layer| self.cache.buffers(layer))
            .collect::<std::result::Result<_, _>>()?;
        let mut inputs = vec![tokens, &positions];
        inputs.extend(buffers.iter().map(|(keys, _)| *keys));
        inputs.extend(buffers.iter().map(|(_, values)| *values));
        let model = match new {
            1 => &self.decode,
            _ => &self.prefill,
        };
        let logits = model.run(&inputs)?.into_iter().next();
        self.cache.advance(new)?;
        logits.ok_or_else(|| bad_package("the model gives no output"))
    }
}

fn bad_package(got: &str) -> Error {
    Error::BadArgument {
        what: "a package to decode with".to_owned(),
        expected: "prefill and decode as compile_package.py makes them".to_owned(),
        got: got.to_owned(),
    }
}

/// The sizes of the cache, read off the keys that the model takes.
fn cache_config(
    model: &CompiledModel,
    batch: i64,
    options: &LoadOptions,
) -> Result<StaticCacheConfig> {
    let specs = model
        .inputs()
        .ok_or_else(|| bad_package("a package that does not describe its inputs"))?;
    let caches: Vec<&TensorSpec> = specs.iter().filter(|spec| spec.mutated).collect();
    let first = caches
        .first()
        .ok_or_else(|| bad_package("a model without a cache"))?;
    let &[
        _,
        Size::Fixed(kv_heads),
        Size::Fixed(max_len),
        Size::Fixed(head_dim),
    ] = first.shape.as_slice()
    else {
        return Err(bad_package(&format!("keys of {first}")));
    };
    let kind = first
        .kind()
        .ok_or_else(|| bad_package(&format!("keys of {first}")))?;
    let device = match model.info().device() {
        "cuda" => Device::Cuda(options.device_index.unwrap_or(0)),
        "mps" => Device::Mps,
        _ => Device::Cpu,
    };
    Ok(StaticCacheConfig {
        layers: caches.len() / 2,
        batch,
        max_len,
        kv_heads,
        head_dim,
        value_dim: None,
        kind,
        device,
    })
}
