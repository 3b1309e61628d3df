//! A model with what it has read of the rows of a batch.

use overdrive_transformer::CausalLm;
use tch::{Device, Kind, Tensor};

use crate::{Error, GenerationConfig, Result, cache};

mod padded;
mod ragged;

use padded::Padded;
use ragged::Ragged;

/// Room that a generation needs.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Need {
    /// Rows at once, copies of prompts for beams and samples included.
    pub(crate) rows: usize,
    /// Places of the widest row, padding included.
    pub(crate) places: usize,
}

/// Reads the prompts of a batch, and then one token a row at a time.
pub(crate) struct Decoder<'a> {
    reading: Reading<'a>,
    /// What to begin anew with where the model's attention does not go through its cache.
    otherwise: Option<Padded<'a>>,
}

enum Reading<'a> {
    Padded(Padded<'a>),
    Ragged(Box<Ragged<'a>>),
}

impl<'a> Decoder<'a> {
    /// A decoder of `prompts`, each of which becomes `copies` rows later.
    ///
    /// Prompts of different lengths lie side by side without padding where the cache is paged or of no
    /// particular kind.
    pub(crate) fn new(
        model: &'a CausalLm,
        prompts: &[Vec<i64>],
        config: &GenerationConfig,
        copies: usize,
    ) -> Result<Self> {
        let longest = prompts.iter().map(Vec::len).max().unwrap_or(0);
        let context = cache::context(model, config);
        let new = |prompt: &Vec<i64>| {
            let room = context.saturating_add(1).saturating_sub(prompt.len());
            config.new_tokens(prompt.len()).min(room)
        };
        let most = prompts.iter().map(new).max().unwrap_or(0);
        let need = Need {
            rows: prompts.len() * copies,
            places: longest + most,
        };
        let uneven = prompts.iter().any(|prompt| prompt.len() != longest);
        let name = config.cache_implementation.as_deref();
        let paged = name == Some("paged");
        let mut otherwise = None;
        let ragged = config.use_cache && (paged || (name.is_none() && uneven));
        let reading = if ragged {
            if !paged {
                otherwise = Some(Padded::new(model, prompts, config, need)?);
            }
            Reading::Ragged(Box::new(Ragged::new(model, prompts, config, need)?))
        } else {
            Reading::Padded(Padded::new(model, prompts, config, need)?)
        };
        Ok(Decoder { reading, otherwise })
    }

    /// Reads the prompts, a chunk at a time; returns the logits after them, `(B, 1, V)`.
    pub(crate) fn prefill(&mut self) -> Result<Tensor> {
        let mut otherwise = self.otherwise.take();
        let logits = match &mut self.reading {
            Reading::Padded(rows) => rows.prefill(),
            Reading::Ragged(rows) => rows.prefill(),
        };
        if let Err(Error::Model(overdrive_transformer::Error::Cache(
            overdrive_kv_cache::Error::NotDense { .. },
        ))) = &logits
            && let Some(mut padded) = otherwise.take()
        {
            let logits = padded.prefill()?;
            self.reading = Reading::Padded(padded);
            return Ok(logits);
        }
        logits
    }

    /// Reads one more token a row; returns the logits after it, `(B, 1, V)`.
    pub(crate) fn step(&mut self, tokens: &[i64]) -> Result<Tensor> {
        match &mut self.reading {
            Reading::Padded(rows) => rows.step(tokens),
            Reading::Ragged(rows) => rows.step(tokens),
        }
    }

    /// Reads more tokens of the only row; returns the logits after each, `(1, T, V)`.
    pub(crate) fn extend(&mut self, tokens: &[i64]) -> Result<Tensor> {
        match &mut self.reading {
            Reading::Padded(rows) => rows.extend(tokens),
            Reading::Ragged(rows) => rows.extend(tokens),
        }
    }

    /// Forgets all but the first `len` tokens of the only row.
    pub(crate) fn truncate(&mut self, len: usize) -> Result<()> {
        match &mut self.reading {
            Reading::Padded(rows) => rows.truncate(len),
            Reading::Ragged(rows) => rows.truncate(len),
        }
    }

    /// Row `i` becomes the old row `rows[i]`.
    pub(crate) fn reorder(&mut self, order: &[usize]) -> Result<()> {
        match &mut self.reading {
            Reading::Padded(rows) => rows.reorder(order),
            Reading::Ragged(rows) => rows.reorder(order),
        }
    }

    /// Whether a row that has ended costs nothing to leave out.
    pub(crate) fn leaves_freely(&self) -> bool {
        matches!(self.reading, Reading::Ragged(_))
    }
}

/// Copies logits of any device and kind into `scores`, whose memory is kept from step to step; returns
/// the size of the vocabulary.
pub(crate) fn to_host(logits: &Tensor, scores: &mut Vec<f32>) -> Result<usize> {
    let vocabulary = logits.size().last().copied().unwrap_or(0);
    let host = logits
        .f_to_device(Device::Cpu)?
        .f_to_kind(Kind::Float)?
        .f_contiguous()?;
    scores.resize(host.numel(), 0.0);
    host.f_copy_data(scores, host.numel())?;
    Ok(vocabulary.unsigned_abs() as usize)
}
