use tch::{Device, Kind, Tensor};
use tokenizers::Tokenizer;

use crate::{Error, GenerationConfig, Result};

/// The prompts of a batch, padded on the left so that all end at the same column.
#[derive(Debug)]
pub(crate) struct PaddedPrompts {
    /// The token ids, `(B, T)`.
    pub(crate) ids: Tensor,
    /// The padding mask, `(B, T)`, 1 for a token; `None` if no row is padded.
    mask: Option<Tensor>,
    /// The padding of each row, `(B, 1)`.
    padding: Tensor,
    /// The model's context.
    context: i64,
}

impl PaddedPrompts {
    pub(crate) fn new(
        prompts: &[Vec<i64>],
        pad: i64,
        context: i64,
        device: Device,
    ) -> Result<PaddedPrompts> {
        let width = prompts.iter().map(Vec::len).max().unwrap_or(0);
        let padding: Vec<usize> = prompts.iter().map(|prompt| width - prompt.len()).collect();
        let mut ids = Vec::with_capacity(prompts.len() * width);
        let mut mask = Vec::with_capacity(prompts.len() * width);
        for (prompt, &padding) in prompts.iter().zip(&padding) {
            ids.extend(std::iter::repeat_n(pad, padding).chain(prompt.iter().copied()));
            mask.extend((0..width).map(|column| i64::from(column >= padding)));
        }
        let shape = [prompts.len() as i64, width as i64];
        let tensor = |values: &[i64]| -> Result<Tensor> {
            Ok(Tensor::f_from_slice(values)?
                .f_view(shape)?
                .f_to_device(device)?)
        };
        let padded = padding.iter().any(|&n| n > 0);
        Ok(PaddedPrompts {
            ids: tensor(&ids)?,
            mask: padded.then(|| tensor(&mask)).transpose()?,
            padding: {
                let padding: Vec<i64> = padding.into_iter().map(|n| n as i64).collect();
                Tensor::f_from_slice(&padding)?
                    .f_unsqueeze(1)?
                    .f_to_device(device)?
            },
            context,
        })
    }

    /// Returns the positions `(B, tokens)` of the tokens from column `past` on, counted without
    /// padding, as in transformers' `generate`; `None` if the model's own count is right.
    pub(crate) fn positions(&self, past: i64, tokens: i64) -> Result<Option<Tensor>> {
        match self.mask {
            None => Ok(None),
            Some(_) => self.counted(past, tokens).map(Some),
        }
    }

    /// Returns the positions `(B, tokens)` of the tokens from column `past` on, counted without padding.
    pub(crate) fn counted(&self, past: i64, tokens: i64) -> Result<Tensor> {
        let options = (Kind::Int64, self.ids.device());
        let columns = Tensor::f_arange_start(past, past + tokens, options)?.f_unsqueeze(0)?;
        // A finished row reads padding until the other rows end, and its output is not used, so its
        // positions stop at the context.
        Ok(columns.f_sub(&self.padding)?.f_clamp(0, self.context - 1)?)
    }

    /// Returns an exclusive upper bound of [`positions`](Self::positions).
    pub(crate) fn position_bound(&self, past: i64, tokens: i64) -> i64 {
        (past + tokens).min(self.context)
    }

    /// Reorders the rows: row `i` becomes the old row `rows[i]`.
    pub(crate) fn reorder(&mut self, rows: &Tensor) -> Result<()> {
        let ids = self.ids.f_index_select(0, rows)?;
        let padding = self.padding.f_index_select(0, rows)?;
        let mask = match &self.mask {
            Some(mask) => Some(mask.f_index_select(0, rows)?),
            None => None,
        };
        (self.ids, self.padding, self.mask) = (ids, padding, mask);
        Ok(())
    }

    /// Returns the padding mask `(B, columns)` of prompts and continuations together.
    pub(crate) fn mask(&self, columns: i64) -> Result<Option<Tensor>> {
        let Some(mask) = &self.mask else {
            return Ok(None);
        };
        // Generated tokens are never padding.
        let new = columns - mask.size()[1];
        if new <= 0 {
            return Ok(Some(mask.f_narrow(1, 0, columns)?));
        }
        let ones = mask.f_new_ones([mask.size()[0], new], (Kind::Int64, mask.device()))?;
        Ok(Some(Tensor::f_cat(&[mask, &ones], 1)?))
    }
}

/// Pads prompts on the right to one width; returns the token ids `(B, S)`, and the mask `(B, S)` with 1 for a token if
/// a row is padded.
pub(crate) fn padded_on_the_right(
    prompts: &[Vec<i64>],
    pad: i64,
    device: Device,
) -> Result<(Tensor, Option<Tensor>)> {
    let width = prompts.iter().map(Vec::len).max().unwrap_or(0);
    let shape = [prompts.len() as i64, width as i64];
    let rows = |of: &dyn Fn(&Vec<i64>, usize) -> i64| -> Result<Tensor> {
        let values = prompts.iter();
        let values = values.flat_map(|prompt| (0..width).map(|column| of(prompt, column)));
        let values: Vec<i64> = values.collect();
        let tensor = Tensor::f_from_slice(&values)?.f_view(shape)?;
        Ok(tensor.f_to_device(device)?)
    };
    let ids = rows(&|prompt, column| prompt.get(column).copied().unwrap_or(pad))?;
    let padded = prompts.iter().any(|prompt| prompt.len() < width);
    let mask = padded.then(|| rows(&|prompt, column| i64::from(column < prompt.len())));
    Ok((ids, mask.transpose()?))
}

/// Returns the tokens of a text without adding special tokens. Ignores the truncation and padding of the tokenizer's
/// file, which are meant for training batches: truncation would silently cut the end of a prompt.
pub(crate) fn encode(tokenizer: &Tokenizer, text: &str) -> Result<Vec<i64>> {
    let whole;
    let tokenizer = if tokenizer.get_truncation().is_some() || tokenizer.get_padding().is_some() {
        let mut copy = tokenizer.clone();
        copy.with_truncation(None).map_err(Error::Tokenizer)?;
        copy.with_padding(None);
        whole = copy;
        &whole
    } else {
        tokenizer
    };
    let encoding = tokenizer.encode(text, false).map_err(Error::Tokenizer)?;
    Ok(encoding.get_ids().iter().map(|&id| i64::from(id)).collect())
}

/// Checks every prompt against the context and the vocabulary of the model.
pub(crate) fn check(prompts: &[Vec<i64>], context: usize, vocab_size: i64) -> Result<()> {
    if prompts.is_empty() {
        return Err(Error::NoPrompts);
    }
    for (row, prompt) in prompts.iter().enumerate() {
        if prompt.is_empty() {
            return Err(Error::EmptyPrompt { row });
        }
        if prompt.len() > context {
            return Err(Error::PromptTooLong {
                row,
                tokens: prompt.len(),
                limit: i64::try_from(context).unwrap_or(i64::MAX),
            });
        }
        let outside = prompt.iter().position(|id| !(0..vocab_size).contains(id));
        if let Some(position) = outside {
            let id = prompt[position];
            return Err(Error::TokenOutOfRange {
                row,
                position,
                id,
                vocab_size,
            });
        }
    }
    Ok(())
}

/// Checks that every token which `config` names is in the vocabulary.
pub(crate) fn check_ids(config: &GenerationConfig, vocab_size: i64) -> Result<()> {
    let single = [
        ("eos_token_id", &config.eos_token_id),
        ("stop_token_ids", &config.stop_token_ids),
        ("forced_eos_token_id", &config.forced_eos_token_id),
        ("suppress_tokens", &config.suppress_tokens),
        ("begin_suppress_tokens", &config.begin_suppress_tokens),
    ];
    let words = config.bad_words_ids.iter().map(|w| ("bad_words_ids", w));
    let biased = config
        .sequence_bias
        .iter()
        .map(|(w, _)| ("sequence_bias", w));
    let listed = single
        .into_iter()
        .chain(words)
        .chain(biased)
        .flat_map(|(key, ids)| ids.iter().map(move |&id| (key, id)));
    let alone = config
        .forced_bos_token_id
        .map(|id| ("forced_bos_token_id", id));
    let biases = config.logit_bias.keys().map(|&id| ("logit_bias", id));
    match listed
        .chain(alone)
        .chain(biases)
        .find(|(_, id)| *id >= vocab_size)
    {
        None => Ok(()),
        Some((key, id)) => {
            let expected = format!("an id in the model's vocabulary, 0..{vocab_size}");
            Err(overdrive_core::Error::option(key, id, expected).into())
        }
    }
}
