use std::ops::ControlFlow;
use std::time::Instant;

use overdrive_transformer::CausalLm;
use tch::Tensor;
use tokenizers::Tokenizer;

use crate::device_sampling::Ahead;
use crate::prompts::check_ids;
use crate::rows::{OnToken, Rows, check_options};
use crate::{
    Constraint, Error, GenerateOutput, GenerateTimings, GeneratedToken, GenerationConfig,
    GenerationModel, ImagePatches, Result, beams, speculation,
};

/// The options of a generation that a configuration file cannot hold.
#[derive(Debug, Default)]
pub struct GenerateOptions<'a> {
    /// The tokenizer that decodes tokens, which `stop_strings` need. Default `None`.
    pub tokenizer: Option<&'a Tokenizer>,
    /// A smaller model with the same tokens, whose proposals the model verifies, several in one
    /// pass: speculative decoding (Leviathan et al. 2023, arXiv:2211.17192). Default `None`.
    pub assistant_model: Option<&'a CausalLm>,
    /// The tokenizer of the draft model. If both tokenizers are given, every id that both models have must be
    /// the same token; without them, vocabularies may differ by the padding of their size, at most 128
    /// ids. Default `None`.
    pub assistant_tokenizer: Option<&'a Tokenizer>,
    /// The images of each prompt, in the order of their image tokens, for a model that sees images; see
    /// [`VisionConfig::expand`](overdrive_transformer::VisionConfig::expand). Default empty, for none.
    pub images: &'a [Vec<ImagePatches>],
    /// The constraints on the continuations, one for each prompt; default empty, for none.
    pub constraints: Vec<Box<dyn Constraint>>,
    /// The seeds, one for each prompt, instead of `seed`: the samples of a prompt then do not depend on the rest
    /// of the batch, up to the rounding of a wider one. Default empty, for none.
    pub seeds: Vec<u64>,
}

/// Continues `prompts`, a batch of token ids of any lengths, with the options of `config`.
///
/// Rows of different lengths are padded on the left. Each row gets the tokens that it would get alone,
/// up to the rounding of a wider batch, with a random stream of its own. No gradient is recorded.
///
/// The encoder of a [`Seq2SeqLm`](overdrive_transformer::Seq2SeqLm) reads the prompts once, padded on the right; the
/// sequences of the output then begin with `decoder_start_token_id` in place of the prompt.
///
/// # Errors
/// Before anything is computed: when there is no prompt, or one is empty, longer than the model's
/// context or has an id outside the vocabulary, or when an option is out of its range. Later: when the
/// model fails, or its logits are not finite.
pub fn generate<M: GenerationModel + ?Sized>(
    model: &M,
    prompts: &[Vec<i64>],
    config: &GenerationConfig,
) -> Result<GenerateOutput> {
    generate_with(model, prompts, config, |_| ControlFlow::Continue(()))
}

/// Works like [`generate`], and calls `on_token` with each new token, including end-of-text tokens. If it breaks,
/// the token's row ends; the others continue. A beam search reports its tokens at the end.
///
/// # Errors
/// As [`generate`].
pub fn generate_with<M: GenerationModel + ?Sized>(
    model: &M,
    prompts: &[Vec<i64>],
    config: &GenerationConfig,
    on_token: impl FnMut(GeneratedToken<'_>) -> ControlFlow<()>,
) -> Result<GenerateOutput> {
    let options = GenerateOptions::default();
    generate_with_options(model, prompts, config, &options, on_token)
}

/// Works like [`generate_with`], with a tokenizer, a draft model, constraints or seeds.
///
/// # Errors
/// As [`generate`]; also when `options` do not fit the prompts or the configuration, the tokenizer
/// cannot decode, or a constraint cannot be followed.
pub fn generate_with_options<M: GenerationModel + ?Sized>(
    model: &M,
    prompts: &[Vec<i64>],
    config: &GenerationConfig,
    options: &GenerateOptions<'_>,
    mut on_token: impl FnMut(GeneratedToken<'_>) -> ControlFlow<()>,
) -> Result<GenerateOutput> {
    config.validate()?;
    let beginnings = model.beginnings(prompts, config)?;
    check_ids(config, model.num_logits())?;
    check_options(prompts.len(), config, options)?;
    // Caches refuse tensors that require a gradient, and a graph over all steps would fill the memory.
    let _no_grad = tch::no_grad_guard();
    let has_images = options.images.iter().any(|images| !images.is_empty());
    let speculates = options.assistant_model.is_some() || config.prompt_lookup_num_tokens.is_some();
    if config.num_beams > 1 {
        beams::search(
            model,
            (prompts, &beginnings),
            config,
            options,
            &mut on_token,
        )
    } else if !speculates {
        token_by_token(
            model,
            (prompts, &beginnings),
            config,
            options,
            &mut on_token,
        )
    } else if has_images {
        Err(Error::Incompatible {
            first: "assistant_model or prompt_lookup_num_tokens",
            second: "images",
            why: "proposals are verified at positions without images; an engine speculates with images, too",
        })
    } else if let Some(model) = model.as_causal_lm() {
        speculation::generate(model, prompts, config, options, &mut on_token)
    } else {
        Err(Error::Incompatible {
            first: "assistant_model or prompt_lookup_num_tokens",
            second: "an encoder-decoder model",
            why: "proposals are verified by a decoder alone",
        })
    }
}

fn token_by_token<M: GenerationModel + ?Sized>(
    model: &M,
    (prompts, beginnings): (&[Vec<i64>], &[Vec<i64>]),
    config: &GenerationConfig,
    options: &GenerateOptions<'_>,
    on_token: &mut OnToken<'_>,
) -> Result<GenerateOutput> {
    let start = Instant::now();
    let mut rows = Rows::new(model, beginnings, config, options)?;
    let mut prefill = start.elapsed();
    let mut first_tokens = 0;
    if !rows.all_finished() {
        let images = options.images;
        let copies = config.num_return_sequences;
        let mut decoder = model.row_decoder(prompts, images, config, copies)?;
        let mut logits = decoder.prefill()?;
        if config.num_return_sequences > 1 {
            // A prompt is read once, regardless of the number of its samples.
            let copies: Vec<usize> = (0..prompts.len())
                .flat_map(|prompt| std::iter::repeat_n(prompt, config.num_return_sequences))
                .collect();
            decoder.reorder(&copies)?;
            logits = repeated(&logits, config.num_return_sequences)?;
        }
        rows.choose(&logits, on_token)?;
        prefill = start.elapsed();
        first_tokens = rows.generated();
        rows.check_time();
        while !rows.all_finished() {
            if let Some(kept) = rows.drop_finished(decoder.drops_rows_for_free()) {
                decoder.reorder(&kept)?;
            }
            let logits = decoder.step(&rows.last_tokens())?;
            let looks_ahead = decoder.looks_ahead();
            let mut ahead = |tokens: &Tensor| decoder.look_ahead(tokens);
            let ahead: Option<Ahead<'_>> = looks_ahead.then_some(&mut ahead);
            if !rows.choose_ahead(&logits, on_token, ahead)? {
                // The step that has begun has other tokens.
                decoder.reorder(&rows.in_order())?;
            }
            rows.check_time();
        }
    }
    let timings = GenerateTimings {
        prefill,
        prefill_tokens: prompts.iter().map(Vec::len).sum(),
        decode: start.elapsed() - prefill,
        decode_tokens: rows.generated() - first_tokens,
    };
    Ok(rows.into_output(timings))
}

/// Repeats each row `copies` times, side by side.
pub(crate) fn repeated(logits: &Tensor, copies: usize) -> Result<Tensor> {
    Ok(logits.f_repeat_interleave_self_int(copies as i64, 0, None)?)
}
