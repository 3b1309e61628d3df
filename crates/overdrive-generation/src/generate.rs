use std::ops::ControlFlow;
use std::time::Instant;

use overdrive_transformer::CausalLm;
use tch::Tensor;
use tokenizers::Tokenizer;

use crate::cache;
use crate::decoder::Decoder;
use crate::prompts::{check, check_ids};
use crate::rows::{OnToken, Rows, check_options};
use crate::{
    Constraint, GenerateOutput, GenerateTimings, GeneratedToken, GenerationConfig, Result, beams,
    speculation,
};

/// What a generation uses besides its configuration: things that no file holds.
#[derive(Debug, Default)]
pub struct GenerateOptions<'a> {
    /// Makes texts of tokens; `stop_strings` need it. Default `None`.
    pub tokenizer: Option<&'a Tokenizer>,
    /// A smaller model with the same vocabulary, whose proposals the model checks, several in one pass:
    /// speculative decoding (Leviathan et al. 2023, arXiv:2211.17192). Default `None`.
    pub assistant_model: Option<&'a CausalLm>,
    /// What each prompt's continuation may be, one for each prompt or none; default none.
    pub constraints: Vec<Box<dyn Constraint>>,
    /// A seed for each prompt, in place of `seed`, or none: its samples then do not depend on what else is
    /// in the batch, up to the rounding of a wider one. Default none.
    pub seeds: Vec<u64>,
}

/// Continues `prompts`, a batch of token ids of any lengths, as `config` says.
///
/// Rows of different lengths are padded on the left; each row is what it would be alone, up to the
/// rounding of a wider batch, with a random stream of its own. No gradient is recorded.
///
/// # Errors
/// Before anything is computed: when there is no prompt, or one is empty, longer than the model's
/// context or has an id outside the vocabulary, or when a value of `config` is out of its range. Later:
/// when the model fails, or its logits are no numbers.
pub fn generate(
    model: &CausalLm,
    prompts: &[Vec<i64>],
    config: &GenerationConfig,
) -> Result<GenerateOutput> {
    generate_with(model, prompts, config, |_| ControlFlow::Continue(()))
}

/// As [`generate`], and calls `on_token` with each new token, end of text included. Where it breaks,
/// the token's row ends; the others go on. A beam search hands out its tokens at the end.
///
/// # Errors
/// As [`generate`].
pub fn generate_with(
    model: &CausalLm,
    prompts: &[Vec<i64>],
    config: &GenerationConfig,
    on_token: impl FnMut(GeneratedToken<'_>) -> ControlFlow<()>,
) -> Result<GenerateOutput> {
    let options = GenerateOptions::default();
    generate_with_options(model, prompts, config, &options, on_token)
}

/// As [`generate_with`], with a tokenizer, a draft model, constraints or seeds.
///
/// # Errors
/// As [`generate`]; and when `options` do not fit the prompts or the configuration, the tokenizer cannot
/// decode, or a constraint cannot be followed.
pub fn generate_with_options(
    model: &CausalLm,
    prompts: &[Vec<i64>],
    config: &GenerationConfig,
    options: &GenerateOptions<'_>,
    mut on_token: impl FnMut(GeneratedToken<'_>) -> ControlFlow<()>,
) -> Result<GenerateOutput> {
    config.validate()?;
    check(
        prompts,
        cache::context(model, config),
        model.config().vocab_size(),
    )?;
    check_ids(config, model.config().vocab_size())?;
    check_options(prompts.len(), config, options)?;
    let _no_grad = tch::no_grad_guard();
    if config.num_beams > 1 {
        beams::search(model, prompts, config, options, &mut on_token)
    } else if options.assistant_model.is_some() || config.prompt_lookup_num_tokens.is_some() {
        speculation::generate(model, prompts, config, options, &mut on_token)
    } else {
        token_by_token(model, prompts, config, options, &mut on_token)
    }
}

fn token_by_token(
    model: &CausalLm,
    prompts: &[Vec<i64>],
    config: &GenerationConfig,
    options: &GenerateOptions<'_>,
    on_token: &mut OnToken<'_>,
) -> Result<GenerateOutput> {
    let start = Instant::now();
    let mut rows = Rows::new(model, prompts, config, options)?;
    let mut prefill = start.elapsed();
    let mut first_tokens = 0;
    if !rows.all_finished() {
        let mut decoder = Decoder::new(model, prompts, config, config.num_return_sequences)?;
        let mut logits = decoder.prefill()?;
        if config.num_return_sequences > 1 {
            // A prompt is read once, however often it is continued.
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
            if let Some(places) = rows.leave(decoder.leaves_freely()) {
                decoder.reorder(&places)?;
            }
            let logits = decoder.step(&rows.last_tokens())?;
            rows.choose(&logits, on_token)?;
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

/// Each row `copies` times, side by side.
pub(crate) fn repeated(logits: &Tensor, copies: usize) -> Result<Tensor> {
    Ok(logits.f_repeat_interleave_self_int(copies as i64, 0, None)?)
}
