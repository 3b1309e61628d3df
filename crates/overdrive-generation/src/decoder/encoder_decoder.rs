use overdrive_core::Error as Common;
use overdrive_sys::transfer::to_device;
use overdrive_transformer::{CrossAttentionCache, DecoderInput, Logits, Seq2SeqLm};
use tch::Tensor;

use super::padded::Memory;
use super::{DecoderSize, row_indices};
use crate::generation_model::{GenerationModel, RowDecoder, cache_shape};
use crate::prompts::padded_on_the_right;
use crate::{GenerationConfig, Result, cache};

/// The maximum number of positions for which memory is allocated at once: a model with relative positions has no
/// limit of its own.
const MOST_RESERVED: usize = 4096;

/// The rows of an encoder-decoder model. The encoder reads the prompts once, and its keys and values stay.
pub(crate) struct EncoderDecoder<'a> {
    model: &'a Seq2SeqLm,
    cross: CrossAttentionCache,
    memory: Memory,
    /// The first tokens `(B, 1)`, until they have been read.
    start: Tensor,
}

impl<'a> EncoderDecoder<'a> {
    pub(crate) fn new(
        model: &'a Seq2SeqLm,
        prompts: &[Vec<i64>],
        config: &GenerationConfig,
        copies: usize,
    ) -> Result<Self> {
        let begun = model.beginnings(prompts, config)?;
        let start = Tensor::f_from_slice(&begun.concat())?.f_unsqueeze(1)?;
        let start = start.f_to_device(model.device())?;
        let memory = if config.use_cache {
            let name = config.cache_implementation.as_deref();
            if let Some(name @ ("paged" | "sliding_window")) = name {
                let expected = "dynamic, static, int8 or int4 for an encoder-decoder model";
                let key = "cache_implementation";
                return Err(Common::option(key, format!("{name:?}"), expected).into());
            }
            let most = config.new_tokens(1).min(model.max_positions(config));
            let positions = match name {
                Some("static") => most.saturating_add(1),
                _ => most.min(MOST_RESERVED) + 1,
            };
            let rows = prompts.len() * copies;
            Memory::Cache(cache::build(
                config,
                cache_shape(model),
                DecoderSize {
                    rows,
                    positions,
                    new_tokens: most,
                    slack: 0,
                },
            )?)
        } else {
            Memory::Tokens(start.f_narrow(1, 0, 0)?)
        };
        let pad = config.pad(model.num_logits());
        let (ids, mask) = padded_on_the_right(prompts, pad, model.device())?;
        let encoded = model.encode(&ids, mask.as_ref())?;
        Ok(EncoderDecoder {
            model,
            cross: model.cross_attention_cache(&encoded)?,
            memory,
            start,
        })
    }

    fn read(&mut self, tokens: Tensor) -> Result<Tensor> {
        let ids = self.memory.push(tokens)?;
        let mut input = DecoderInput::new(&ids, &self.cross).with_logits(Logits::Last);
        if let Memory::Cache(cache) = &mut self.memory {
            input.cache = Some(cache.as_mut());
        }
        Ok(self.model.decode(input)?)
    }
}

impl RowDecoder for EncoderDecoder<'_> {
    fn prefill(&mut self) -> Result<Tensor> {
        self.read(self.start.shallow_clone())
    }

    fn step(&mut self, tokens: &[i64]) -> Result<Tensor> {
        let tokens = Tensor::f_from_slice(tokens)?.f_unsqueeze(1)?;
        let tokens = to_device(tokens, self.model.device())?;
        self.read(tokens)
    }

    fn reorder(&mut self, rows: &[usize]) -> Result<()> {
        let rows = row_indices(rows, self.model.device())?;
        self.memory.reorder(&rows)?;
        Ok(self.cross.reorder(&rows)?)
    }
}
