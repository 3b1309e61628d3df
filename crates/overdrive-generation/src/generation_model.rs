use std::borrow::Cow;

use overdrive_kv_cache::CacheShape;
use overdrive_transformer::{CausalLm, Seq2SeqLm};
use tch::{Device, Tensor};

use crate::decoder::{Decoder, EncoderDecoder};
use crate::prompts::check;
use crate::{GenerationConfig, ImagePatches, Result, cache};

/// A model for [`generate`](crate::generate()): a [`CausalLm`], whose sequences begin with the prompts, or a
/// [`Seq2SeqLm`], whose encoder reads the prompts and whose sequences begin with `decoder_start_token_id`.
pub trait GenerationModel {
    /// Returns the number of logits of a position.
    fn num_logits(&self) -> i64;

    /// Returns the largest number of positions of a sequence with the cache of `config`.
    fn max_positions(&self, config: &GenerationConfig) -> usize;

    /// Checks the prompts, and returns the beginnings of the sequences, one for each.
    ///
    /// # Errors
    /// When a prompt is empty, too long or has an id outside the vocabulary, or a token is not known.
    fn beginnings<'p>(
        &self,
        prompts: &'p [Vec<i64>],
        config: &GenerationConfig,
    ) -> Result<Cow<'p, [Vec<i64>]>>;

    /// Returns a decoder with a row for each prompt, of which each becomes `copies` rows later. `images` are those of each
    /// prompt, or empty.
    ///
    /// # Errors
    /// When `config` asks for a cache that the model cannot use, the model sees no images or they do not fit the prompts, or
    /// the model fails.
    fn row_decoder<'m>(
        &'m self,
        prompts: &[Vec<i64>],
        images: &[Vec<ImagePatches>],
        config: &GenerationConfig,
        copies: usize,
    ) -> Result<Box<dyn RowDecoder + 'm>>;

    /// Returns `true` if the first pass loads things that later passes use, such as GPU kernels, so that
    /// [`warm_up`](crate::warm_up()) runs a pass; default `false`.
    fn loads_on_first_use(&self) -> bool {
        false
    }

    /// Returns the model if it is a decoder whose proposals can be verified, which speculation needs; default
    /// `None`.
    fn as_causal_lm(&self) -> Option<&CausalLm> {
        None
    }
}

/// The rows of a batch and their cache, which gives the logits of the next tokens.
pub trait RowDecoder {
    /// Reads the beginnings of the sequences; returns the logits after them, `(B, 1, V)`.
    ///
    /// # Errors
    /// An error of the model.
    fn prefill(&mut self) -> Result<Tensor>;

    /// Reads one more token a row; returns the logits after it, `(B, 1, V)`.
    ///
    /// # Errors
    /// An error of the model.
    fn step(&mut self, tokens: &[i64]) -> Result<Tensor>;

    /// Returns `true` if [`look_ahead`](RowDecoder::look_ahead) would begin the next step; default `false`. Otherwise nobody
    /// computes the tokens for it.
    fn looks_ahead(&self) -> bool {
        false
    }

    /// Begins the next [`step`](RowDecoder::step), whose tokens are these of a device, i64 `(B, 1)`; the host does not know
    /// them yet. The step that follows has the same tokens, unless the rows are reordered before it. Default: nothing.
    ///
    /// # Errors
    /// An error of the model.
    fn look_ahead(&mut self, tokens: &Tensor) -> Result<()> {
        let _tokens = tokens;
        Ok(())
    }

    /// Reorders the rows: row `i` becomes the old row `rows[i]`. A row may appear several times or not at all.
    ///
    /// # Errors
    /// An error of the cache.
    fn reorder(&mut self, rows: &[usize]) -> Result<()>;

    /// Returns `true` if dropping a row copies nothing; default `false`.
    fn drops_rows_for_free(&self) -> bool {
        false
    }
}

impl GenerationModel for CausalLm {
    fn num_logits(&self) -> i64 {
        self.config().vocab_size()
    }

    fn max_positions(&self, config: &GenerationConfig) -> usize {
        cache::context(self, config)
    }

    fn beginnings<'p>(
        &self,
        prompts: &'p [Vec<i64>],
        config: &GenerationConfig,
    ) -> Result<Cow<'p, [Vec<i64>]>> {
        check(prompts, self.max_positions(config), self.num_logits())?;
        Ok(Cow::Borrowed(prompts))
    }

    fn row_decoder<'m>(
        &'m self,
        prompts: &[Vec<i64>],
        images: &[Vec<ImagePatches>],
        config: &GenerationConfig,
        copies: usize,
    ) -> Result<Box<dyn RowDecoder + 'm>> {
        let decoder = Decoder::with_images(self, prompts, images, config, copies)?;
        Ok(Box::new(decoder))
    }

    fn loads_on_first_use(&self) -> bool {
        self.device() != Device::Cpu
    }

    fn as_causal_lm(&self) -> Option<&CausalLm> {
        Some(self)
    }
}

impl GenerationModel for Seq2SeqLm {
    fn num_logits(&self) -> i64 {
        self.config().vocab_size()
    }

    fn max_positions(&self, _: &GenerationConfig) -> usize {
        let context = self.config().max_position_embeddings();
        // Half of the largest number: lengths are added to it.
        context.map_or(usize::MAX >> 1, |context| context.unsigned_abs() as usize)
    }

    fn beginnings<'p>(
        &self,
        prompts: &'p [Vec<i64>],
        config: &GenerationConfig,
    ) -> Result<Cow<'p, [Vec<i64>]>> {
        let vocabulary = self.num_logits();
        check(prompts, self.max_positions(config), vocabulary)?;
        let own = self.config().decoder_start_token_id();
        let start = config.decoder_start_token_id.or(own);
        match start.filter(|start| (0..vocabulary).contains(start)) {
            Some(start) => Ok(Cow::Owned(vec![vec![start]; prompts.len()])),
            None => {
                let found = start.map_or("null".to_owned(), |start| start.to_string());
                let expected = format!("an id in the model's vocabulary, 0..{vocabulary}");
                let key = "decoder_start_token_id";
                Err(overdrive_core::Error::option(key, found, expected).into())
            }
        }
    }

    fn row_decoder<'m>(
        &'m self,
        prompts: &[Vec<i64>],
        images: &[Vec<ImagePatches>],
        config: &GenerationConfig,
        copies: usize,
    ) -> Result<Box<dyn RowDecoder + 'm>> {
        if images.iter().any(|images| !images.is_empty()) {
            return Err(overdrive_transformer::Error::NoVision.into());
        }
        Ok(Box::new(EncoderDecoder::new(
            self, prompts, config, copies,
        )?))
    }

    fn loads_on_first_use(&self) -> bool {
        self.device() != Device::Cpu
    }
}

/// Returns the shape of the cache of a decoder's own tokens.
pub(crate) fn cache_shape(model: &Seq2SeqLm) -> CacheShape {
    CacheShape {
        windows: vec![None; model.num_layers()],
        kv_heads: model.config().decoder_attention_heads(),
        head_dim: model.config().decoder_head_dim(),
        kind: model.kind(),
        device: model.device(),
        ..CacheShape::default()
    }
}
