use overdrive_kv_cache::KvCache;
use overdrive_sys::transfer::to_device;
use overdrive_transformer::{CausalLm, ForwardInput, Logits};
use tch::Tensor;

use super::{DecoderSize, row_indices};
use crate::images::PaddedImages;
use crate::prompts::PaddedPrompts;
use crate::{GenerationConfig, Result, cache};

/// A batch whose rows are padded on the left to one width.
pub(super) struct Padded<'a> {
    model: &'a CausalLm,
    prompts: PaddedPrompts,
    memory: Memory,
    chunk: Option<usize>,
    restart: Option<Restart>,
    images: Option<PaddedImages>,
}

/// The tokens of a cache that is restarted when a sequence grows beyond a length, as transformers does for
/// Phi-3 (see [`cache_restart`](overdrive_transformer::ModelConfig::cache_restart)).
struct Restart {
    length: i64,
    /// The ids in the cache, `(B, S)`.
    tokens: Tensor,
    /// `true` if the keys in the cache are those of a sequence beyond the length.
    beyond: bool,
}

impl Restart {
    /// Appends the tokens `ids`, and returns the tokens that the model has to read: all tokens so far if the
    /// cache has to be restarted, which empties it.
    fn tokens(&mut self, cache: &mut dyn KvCache, ids: &Tensor) -> Result<Tensor> {
        let past = cache.len();
        // Speculation may have removed tokens from the cache.
        let before = self.tokens.f_narrow(1, 0, past)?;
        self.tokens = Tensor::f_cat(&[&before, ids], 1)?;
        let was_beyond = self.beyond;
        self.beyond = past + ids.size()[1] > self.length;
        if past == 0 || was_beyond == self.beyond {
            return Ok(ids.shallow_clone());
        }
        cache.reset();
        Ok(self.tokens.shallow_clone())
    }
}

/// The memory of earlier tokens.
pub(super) enum Memory {
    Cache(Box<dyn KvCache>),
    /// The ids so far, `(B, S)`, which are read again at each step.
    Tokens(Tensor),
}

impl Memory {
    /// Takes more tokens `(B, T)`; returns those that the model has to read.
    pub(super) fn push(&mut self, tokens: Tensor) -> Result<Tensor> {
        match self {
            Memory::Cache(_) => Ok(tokens),
            Memory::Tokens(all) => {
                *all = Tensor::f_cat(&[&*all, &tokens], 1)?;
                Ok(all.shallow_clone())
            }
        }
    }

    /// Reorders the rows by `rows (B_new,)`, i64.
    pub(super) fn reorder(&mut self, rows: &Tensor) -> Result<()> {
        match self {
            Memory::Cache(cache) => cache.reorder(rows)?,
            Memory::Tokens(all) => *all = all.f_index_select(0, rows)?,
        }
        Ok(())
    }
}

impl<'a> Padded<'a> {
    pub(super) fn new(
        model: &'a CausalLm,
        prompts: &[Vec<i64>],
        config: &GenerationConfig,
        size: DecoderSize,
    ) -> Result<Self> {
        let context = i64::try_from(cache::context(model, config)).unwrap_or(i64::MAX);
        let pad = config.pad(model.config().vocab_size());
        let prompts = PaddedPrompts::new(prompts, pad, context, model.device())?;
        let memory = if config.use_cache {
            Memory::Cache(cache::build(config, cache::shape(config, model), size)?)
        } else {
            Memory::Tokens(prompts.ids.shallow_clone())
        };
        let restart = model.config().cache_restart().filter(|_| config.use_cache);
        let restart = restart
            .map(|length| -> Result<Restart> {
                Ok(Restart {
                    length,
                    tokens: prompts.ids.f_narrow(1, 0, 0)?,
                    beyond: false,
                })
            })
            .transpose()?;
        Ok(Padded {
            model,
            prompts,
            memory,
            chunk: config.prefill_chunk_size,
            restart,
            images: None,
        })
    }

    /// Sets the images of the prompts.
    pub(super) fn set_images(&mut self, images: PaddedImages) {
        self.images = Some(images);
    }

    /// Reads the prompts in chunks; returns the logits after them, `(B, 1, V)`.
    pub(super) fn prefill(&mut self) -> Result<Tensor> {
        let ids = self.prompts.ids.shallow_clone();
        let tokens = ids.size()[1];
        // Without a cache every pass reads the whole sequence anyway.
        let chunk = match (&self.memory, self.chunk) {
            (Memory::Cache(_), Some(chunk)) => i64::try_from(chunk).unwrap_or(i64::MAX),
            _ => tokens,
        };
        let mut start = 0;
        while tokens - start > chunk {
            let tokens = ids.f_narrow(1, start, chunk)?;
            self.read(&tokens)?;
            start += chunk;
        }
        let rest = ids.f_narrow(1, start, tokens - start)?;
        self.forward(&rest, Logits::Last)
    }

    /// Reads one more token a row; returns the logits after it, `(B, 1, V)`.
    pub(super) fn step(&mut self, tokens: &[i64]) -> Result<Tensor> {
        let tokens = Tensor::f_from_slice(tokens)?.f_unsqueeze(1)?;
        let tokens = to_device(tokens, self.model.device())?;
        let ids = self.memory.push(tokens)?;
        self.forward(&ids, Logits::Last)
    }

    /// Reads more tokens of the only row; returns the logits after each, `(1, T, V)`.
    pub(super) fn extend(&mut self, tokens: &[i64]) -> Result<Tensor> {
        let ids = Tensor::f_from_slice(tokens)?.f_unsqueeze(0)?;
        let ids = to_device(ids, self.model.device())?;
        // Tokens up to the length at which the cache restarts get the logits of a short sequence, as they do if
        // they are read one by one.
        let (tokens, short) = (ids.size()[1], self.tokens_before_restart());
        if !(1..tokens).contains(&short) {
            return self.forward(&ids, Logits::All);
        }
        let first = self.forward(&ids.f_narrow(1, 0, short)?, Logits::All)?;
        let rest = ids.f_narrow(1, short, tokens - short)?;
        let rest = self.forward(&rest, Logits::All)?;
        Ok(Tensor::f_cat(&[first, rest], 1)?)
    }

    /// Returns the number of tokens that fit before the cache restarts, or 0 if it never restarts.
    fn tokens_before_restart(&self) -> i64 {
        match (&self.restart, &self.memory) {
            (Some(restart), Memory::Cache(cache)) => (restart.length - cache.len()).max(0),
            _ => 0,
        }
    }

    /// Drops all but the first `len` tokens.
    pub(super) fn truncate(&mut self, len: usize) -> Result<()> {
        match &mut self.memory {
            Memory::Cache(cache) => cache.truncate(len as i64)?,
            Memory::Tokens(all) => *all = all.f_narrow(1, 0, len as i64)?,
        }
        Ok(())
    }

    /// Reorders the rows: row `i` becomes the old row `rows[i]`.
    pub(super) fn reorder(&mut self, order: &[usize]) -> Result<()> {
        let rows = row_indices(order, self.model.device())?;
        self.prompts.reorder(&rows)?;
        if let Some(images) = &mut self.images {
            images.reorder(order)?;
        }
        if let Some(restart) = &mut self.restart {
            restart.tokens = restart.tokens.f_index_select(0, &rows)?;
        }
        self.memory.reorder(&rows)
    }

    /// Reads tokens without computing logits.
    fn read(&mut self, ids: &Tensor) -> Result<()> {
        let ids = &self.unread(ids)?;
        self.with_input(ids, Logits::Last, |model, input| {
            // The projection to the vocabulary, the widest matrix of the model, is left out.
            model.hidden_states(input).map(drop)
        })
    }

    fn forward(&mut self, ids: &Tensor, logits: Logits<'_>) -> Result<Tensor> {
        let wanted = ids.size()[1];
        let ids = self.unread(ids)?;
        let logits = self.with_input(&ids, logits, CausalLm::forward)?;
        // After a restart, the logits are those of all tokens.
        let (given, wanted) = (logits.size()[1], wanted.min(logits.size()[1]));
        Ok(logits.f_narrow(1, given - wanted, wanted)?)
    }

    /// Returns the tokens that the model has to read so that its cache ends with `ids`.
    fn unread(&mut self, ids: &Tensor) -> Result<Tensor> {
        match (&mut self.restart, &mut self.memory) {
            (Some(restart), Memory::Cache(cache)) => restart.tokens(cache.as_mut(), ids),
            _ => Ok(ids.shallow_clone()),
        }
    }

    fn with_input<T>(
        &mut self,
        ids: &Tensor,
        logits: Logits<'_>,
        run: impl FnOnce(&CausalLm, ForwardInput<'_>) -> overdrive_transformer::Result<T>,
    ) -> Result<T> {
        let tokens = ids.size()[1];
        let past = match &self.memory {
            Memory::Cache(cache) => cache.len(),
            Memory::Tokens(_) => 0,
        };
        let mut positions = self.prompts.positions(past, tokens)?;
        let mut image_tokens = None;
        if let Some(images) = &self.images {
            let counted = self.prompts.counted(past, tokens)?;
            positions = Some(images.positions(past, &counted)?);
            image_tokens = images.tokens(past, tokens)?;
        }
        let mask = self.prompts.mask(past + tokens)?;
        let mut input = ForwardInput::new(ids).with_logits(logits);
        if let Some(positions) = &positions {
            input.position_ids = Some(positions);
            input.position_bound = Some(self.prompts.position_bound(past, tokens));
        }
        input.images = image_tokens.as_ref();
        input.attention_mask = mask.as_ref();
        if let Memory::Cache(cache) = &mut self.memory {
            input.cache = Some(cache.as_mut());
        }
        Ok(run(self.model, input)?)
    }
}
