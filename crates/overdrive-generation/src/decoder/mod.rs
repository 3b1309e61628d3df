//! A model with its cache of the rows of a batch.

use overdrive_kv_cache::PagedCache;
use overdrive_sys::transfer::to_device;
use overdrive_transformer::CausalLm;
use tch::{Device, Kind, Tensor};

use crate::captured::is_forced;
use crate::device_sampling::stays_on_device;
use crate::generation_model::RowDecoder;
use crate::images::PaddedImages;
use crate::{Error, GenerationConfig, ImagePatches, Result, cache};

mod encoder_decoder;
mod padded;
mod ragged;

pub(crate) use encoder_decoder::EncoderDecoder;
use padded::Padded;
use ragged::Ragged;

/// The size of the batch that a generation needs.
#[derive(Debug, Clone, Copy)]
pub(crate) struct DecoderSize {
    /// The number of rows, copies of prompts for beams and samples included.
    pub(crate) rows: usize,
    /// The number of positions of the longest row, padding included.
    pub(crate) positions: usize,
    /// The most new tokens of a row.
    pub(crate) new_tokens: usize,
    /// The most tokens of several steps that a truncation drops.
    pub(crate) slack: usize,
}

/// Reads the prompts of a batch, and then one token a row at a time.
pub(crate) struct Decoder<'a> {
    layout: Layout<'a>,
    /// The decoder to restart with if the model's attention does not go through its cache.
    fallback: Option<Padded<'a>>,
}

enum Layout<'a> {
    Padded(Padded<'a>),
    Ragged(Box<Ragged<'a>>),
}

impl<'a> Decoder<'a> {
    /// Returns a decoder of `prompts`, each of which becomes `copies` rows later.
    ///
    /// Prompts of different lengths are concatenated without padding if the cache is paged or not
    /// specified. On a GPU, so are prompts of equal length, because steps over a paged cache are captured.
    pub(crate) fn new(
        model: &'a CausalLm,
        prompts: &[Vec<i64>],
        config: &GenerationConfig,
        copies: usize,
    ) -> Result<Self> {
        Decoder::with_slack(model, prompts, config, copies, 0)
    }

    /// Returns a decoder whose [`truncate`](Decoder::truncate) may drop up to `slack` tokens of several steps.
    pub(crate) fn with_slack(
        model: &'a CausalLm,
        prompts: &[Vec<i64>],
        config: &GenerationConfig,
        copies: usize,
        slack: usize,
    ) -> Result<Self> {
        let longest = prompts.iter().map(Vec::len).max().unwrap_or(0);
        let context = cache::context(model, config);
        let new = |prompt: &Vec<i64>| {
            let room = context.saturating_add(1).saturating_sub(prompt.len());
            config.new_tokens(prompt.len()).min(room)
        };
        let most = prompts.iter().map(new).max().unwrap_or(0);
        let size = DecoderSize {
            rows: prompts.len() * copies,
            positions: longest + most,
            new_tokens: most,
            slack,
        };
        let uneven = prompts.iter().any(|prompt| prompt.len() != longest);
        let name = config.cache_implementation.as_deref();
        let paged = name == Some("paged");
        if uneven && cache::slides(config) && config.cache_config.num_sink_tokens > 0 {
            return Err(Error::Incompatible {
                first: "cache_config.num_sink_tokens",
                second: "prompts of different lengths",
                why: "the first columns of a padded row are padding, and a sliding cache would keep them instead of \
                      its first tokens; generate prompts of one length together",
            });
        }
        // The last token is not read.
        let read = i64::try_from(size.positions.saturating_sub(1)).unwrap_or(i64::MAX);
        let restart = model.config().cache_restart().filter(|_| config.use_cache);
        if paged && restart.is_some_and(|length| read > length) {
            return Err(Error::Incompatible {
                first: "cache_implementation \"paged\"",
                second: "sequences beyond the original context of a Phi-3 with LongRoPE",
                why: "beyond that context the keys and values are computed again from the tokens, which a paged cache does \
                      not keep; use \"dynamic\" or fewer tokens",
            });
        }
        let mut fallback = None;
        // A cache that may have to be restarted needs the tokens, which only padded rows keep.
        let ragged = config.use_cache
            && (paged
                || name.is_none()
                    && restart.is_none()
                    && (uneven || config.num_beams == 1 && captures(model, size)));
        let layout = if ragged {
            // Made here and not on demand, because `prefill` no longer has the prompts.
            if !paged {
                fallback = Some(Padded::new(model, prompts, config, size)?);
            }
            Layout::Ragged(Box::new(Ragged::new(model, prompts, config, size)?))
        } else {
            Layout::Padded(Padded::new(model, prompts, config, size)?)
        };
        Ok(Decoder { layout, fallback })
    }

    /// Returns a decoder of prompts with `images`, whose rows are padded; see [`Decoder::new`].
    pub(crate) fn with_images(
        model: &'a CausalLm,
        prompts: &[Vec<i64>],
        images: &[Vec<ImagePatches>],
        config: &GenerationConfig,
        copies: usize,
    ) -> Result<Self> {
        if images.iter().all(Vec::is_empty) {
            return Decoder::new(model, prompts, config, copies);
        }
        let refused = |first, why| {
            let second = "images";
            Err(Error::Incompatible { first, second, why })
        };
        if config.cache_implementation.as_deref() == Some("paged") {
            return refused(
                "cache_implementation \"paged\"",
                "the rows of `generate` are padded then; use an engine, whose cache is paged",
            );
        }
        if cache::slides(config) {
            return refused(
                "cache_implementation \"sliding_window\"",
                "a sliding cache moves keys along one axis, and image tokens have three",
            );
        }
        // On a GPU the steps of padded rows are not captured.
        let config = &GenerationConfig {
            cache_implementation: config
                .cache_implementation
                .clone()
                .or(Some("dynamic".to_owned())),
            ..config.clone()
        };
        let mut decoder = Decoder::new(model, prompts, config, copies)?;
        if let Layout::Padded(rows) = &mut decoder.layout {
            rows.set_images(PaddedImages::new(model, prompts, images)?);
        }
        Ok(decoder)
    }

    /// Reads more tokens of the only row; returns the logits after each, `(1, T, V)`.
    pub(crate) fn extend(&mut self, tokens: &[i64]) -> Result<Tensor> {
        match &mut self.layout {
            Layout::Padded(rows) => rows.extend(tokens),
            Layout::Ragged(rows) => rows.extend(tokens),
        }
    }

    /// Drops all but the first `len` tokens of the only row.
    pub(crate) fn truncate(&mut self, len: usize) -> Result<()> {
        match &mut self.layout {
            Layout::Padded(rows) => rows.truncate(len),
            Layout::Ragged(rows) => rows.truncate(len),
        }
    }
}

impl RowDecoder for Decoder<'_> {
    /// Reads the prompts in chunks; returns the logits after them, `(B, 1, V)`.
    fn prefill(&mut self) -> Result<Tensor> {
        let mut fallback = self.fallback.take();
        let logits = match &mut self.layout {
            Layout::Padded(rows) => rows.prefill(),
            Layout::Ragged(rows) => rows.prefill(),
        };
        // A model whose attention calls `append` cannot use a paged cache, and its first layer says so.
        if let Err(Error::Model(overdrive_transformer::Error::Cache(
            overdrive_kv_cache::Error::NotDense { .. },
        ))) = &logits
            && let Some(mut padded) = fallback.take()
        {
            let logits = padded.prefill()?;
            self.layout = Layout::Padded(padded);
            return Ok(logits);
        }
        logits
    }

    /// Reads one more token a row; returns the logits after it, `(B, 1, V)`.
    fn step(&mut self, tokens: &[i64]) -> Result<Tensor> {
        match &mut self.layout {
            Layout::Padded(rows) => rows.step(tokens),
            Layout::Ragged(rows) => rows.step(tokens),
        }
    }

    fn looks_ahead(&self) -> bool {
        match &self.layout {
            Layout::Padded(_) => false,
            Layout::Ragged(rows) => rows.looks_ahead(),
        }
    }

    fn look_ahead(&mut self, tokens: &Tensor) -> Result<()> {
        match &mut self.layout {
            Layout::Padded(_) => Ok(()),
            Layout::Ragged(rows) => rows.look_ahead(tokens),
        }
    }

    /// Reorders the rows: row `i` becomes the old row `rows[i]`.
    fn reorder(&mut self, order: &[usize]) -> Result<()> {
        match &mut self.layout {
            Layout::Padded(rows) => rows.reorder(order),
            Layout::Ragged(rows) => rows.reorder(order),
        }
    }

    /// Returns `true` if dropping a row copies nothing.
    fn drops_rows_for_free(&self) -> bool {
        matches!(self.layout, Layout::Ragged(_))
    }
}

/// Returns `true` if the steps of rows over a paged cache would be captured, and if the memory for all their tokens,
/// which a paged cache allocates at the beginning, is small enough.
fn captures(model: &CausalLm, size: DecoderSize) -> bool {
    if !PagedCache::can_be_captured(model.device()) {
        return is_forced();
    }
    let config = model.config();
    let layer = config.num_key_value_heads() * config.head_dim();
    let own = model.cache_layer_heads();
    let token = match own.is_empty() {
        true => 2 * model.cache_layers() as i64 * layer,
        false => own.iter().map(|own| 2 * own.kv_heads * own.head_dim).sum(),
    };
    let bytes = (size.rows * size.positions) as u64
        * token.unsigned_abs()
        * model.kind().elt_size_in_bytes() as u64;
    overdrive_sys::memory::free_bytes(model.device()).is_ok_and(|free| bytes < free / 4)
}

/// Returns indices of rows as a tensor on the device of a cache.
fn row_indices(rows: &[usize], device: Device) -> Result<Tensor> {
    let rows: Vec<i64> = rows.iter().map(|&row| row as i64).collect();
    Ok(to_device(Tensor::f_from_slice(&rows)?, device)?)
}

/// Copies logits of any device and dtype into `scores`, whose memory is reused from step to step;
/// returns the size of the vocabulary.
pub(crate) fn to_host(logits: &Tensor, scores: &mut Vec<f32>) -> Result<usize> {
    let vocabulary = logits.size().last().copied().unwrap_or(0);
    let host = match stays_on_device(logits) {
        // Through pinned memory, and in the dtype of the logits.
        true => overdrive_sys::transfer::to_host(logits)?,
        false => logits.shallow_clone(),
    };
    let host = host.f_to_kind(Kind::Float)?.f_contiguous()?;
    scores.resize(host.numel(), 0.0);
    host.f_copy_data(scores, host.numel())?;
    Ok(vocabulary.unsigned_abs() as usize)
}
