//! The models `prefill` and `decode` of a package, over a static cache.

use std::path::Path;

use overdrive_core::Error as CommonError;
use overdrive_kv_cache::{KvCache, StaticCache, StaticCacheConfig};
use tch::{Device, Kind, Tensor};

use crate::{CompiledModel, Error, LoadOptions, Result, Size, TensorSpec};

/// A decoder from a package: its models `prefill` and `decode` over a [`StaticCache`].
///
/// ```no_run
/// // Needs a package, which only Python can make.
/// use overdrive_packages::{CompiledDecoder, LoadOptions};
/// use tch::Tensor;
///
/// let mut decoder = CompiledDecoder::load("tiny.pt2", 1, &LoadOptions::default())?;
/// let mut logits = decoder.prefill(&Tensor::from_slice(&[1i64, 2, 3]).view([1, 3]))?;
/// for _ in 0..100 {
///     let next = logits.f_argmax(-1, false)?;
///     logits = decoder.step(&next)?;
/// }
/// # Ok::<(), overdrive_packages::Error>(())
/// ```
#[derive(Debug)]
pub struct CompiledDecoder {
    prefill: CompiledModel,
    decode: CompiledModel,
    cache: StaticCache,
    batch: i64,
}

impl CompiledDecoder {
    /// Loads both models of a package and creates an empty cache with `batch` rows and the length that the models
    /// were compiled for. [`LoadOptions::model`] is ignored.
    ///
    /// # Errors
    /// As for [`CompiledModel::load`]; [`Error::NotADecoder`] if the package has no such models.
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
        // Both run on the same buffers, passed in the same order.
        if prefill.input_names() != decode.input_names() {
            return Err(not_a_decoder(
                "its models `prefill` and `decode` take different inputs",
            ));
        }
        Ok(CompiledDecoder {
            prefill,
            decode,
            cache,
            batch,
        })
    }

    /// Appends prompts of one length, `(B, T)`, to the cache. Returns the logits of the last token, `(B, 1, V)`.
    ///
    /// # Errors
    /// If shapes do not fit or the cache is too short.
    pub fn prefill(&mut self, tokens: &Tensor) -> Result<Tensor> {
        self.run(tokens)
    }

    /// Appends one token for each row, `(B, 1)`. Returns its logits, `(B, 1, V)`.
    ///
    /// # Errors
    /// As for [`prefill`](CompiledDecoder::prefill).
    pub fn step(&mut self, tokens: &Tensor) -> Result<Tensor> {
        self.run(tokens)
    }

    /// Empties the cache.
    pub fn reset(&mut self) {
        self.cache.reset();
    }

    /// Returns the cache, whose buffers the compiled code reads and writes.
    pub fn cache(&self) -> &StaticCache {
        &self.cache
    }

    /// Returns the models `prefill` and `decode`. Each has its own copy of the weights unless they
    /// [share](crate::ReplaceOptions::share) them.
    pub fn models(&self) -> [&CompiledModel; 2] {
        [&self.prefill, &self.decode]
    }

    fn run(&mut self, tokens: &Tensor) -> Result<Tensor> {
        let new = match tokens.size().as_slice() {
            &[rows, new] if rows == self.batch && new > 0 => new,
            other => {
                let expected = format!("({}, T) with at least one token in each row", self.batch);
                return Err(CommonError::shape("tokens", other, expected).into());
            }
        };
        let (held, capacity) = (self.cache.len(), self.cache.config().max_len);
        // The compiled code does not check positions against the length of the buffers.
        if held + new > capacity {
            return Err(overdrive_kv_cache::Error::Full {
                capacity,
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
        // `decode` was compiled for one token in each row, `prefill` for a dynamic number.
        let model = match new {
            1 => &self.decode,
            _ => &self.prefill,
        };
        let logits = model.run(&inputs)?.into_iter().next();
        self.cache.advance(new)?;
        logits.ok_or_else(|| not_a_decoder("a model has no output"))
    }
}

fn not_a_decoder(problem: &str) -> Error {
    Error::NotADecoder {
        problem: problem.to_owned(),
    }
}

/// Returns the sizes of the cache, which are those of the keys that the model takes.
fn cache_config(
    model: &CompiledModel,
    batch: i64,
    options: &LoadOptions,
) -> Result<StaticCacheConfig> {
    let specs = model
        .inputs()
        .ok_or_else(|| not_a_decoder("it has no manifest, which lists the inputs"))?;
    let caches: Vec<&TensorSpec> = specs.iter().filter(|spec| spec.mutated).collect();
    let first = caches
        .first()
        .ok_or_else(|| not_a_decoder("its model `decode` takes no cache"))?;
    let &[
        _,
        Size::Fixed(kv_heads),
        Size::Fixed(max_len),
        Size::Fixed(head_dim),
    ] = first.shape.as_slice()
    else {
        return Err(not_a_decoder(&format!("its keys are {first}")));
    };
    let kind = first
        .kind()
        .ok_or_else(|| not_a_decoder(&format!("its keys are {first}")))?;
    let device = match model.info().device() {
        "cuda" => Device::Cuda(options.device_index.unwrap_or(0)),
        "mps" => Device::Mps,
        _ => Device::Cpu,
    };
    Ok(StaticCacheConfig {
        // Each layer has keys and values.
        layers: caches.len() / 2,
        batch,
        max_len,
        kv_heads,
        head_dim,
        value_dim: None,
        layer_heads: Vec::new(),
        kind,
        device,
    })
}
