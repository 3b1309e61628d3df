//! Beam search with transformers' semantics.

use std::time::Instant;

use overdrive_core::random::{Generator, entropy};

use crate::decoder::to_host;
use crate::finish_reason::{is_late, limit};
use crate::generate::repeated;
use crate::row_text::RowText;
use crate::rows::{OnToken, room};
use crate::{
    FinishReason, GenerateOptions, GenerateOutput, GenerateTimings, GeneratedToken,
    GenerationConfig, GenerationModel, Result, TokenMask,
};

mod search;
mod token_scores;

use search::{BeamSearch, FinishedBeam};

/// Returns the best `num_return_sequences` of `num_beams` continuations of each prompt, with the beginnings of their
/// sequences.
pub(crate) fn search<M: GenerationModel + ?Sized>(
    model: &M,
    (prompts, beginnings): (&[Vec<i64>], &[Vec<i64>]),
    config: &GenerationConfig,
    options: &GenerateOptions<'_>,
    on_token: &mut OnToken<'_>,
) -> Result<GenerateOutput> {
    let start = Instant::now();
    let beams = config.num_beams;
    let vocabulary = model.num_logits().unsigned_abs() as usize;
    let seed = config.seed.unwrap_or_else(entropy);
    let mut searches: Vec<BeamSearch<'_>> = beginnings
        .iter()
        .enumerate()
        .map(|(number, prompt)| {
            let random = match options.seeds.get(number) {
                // A prompt with a seed of its own draws the same numbers in any batch.
                Some(&own) => Generator::new(own, 0),
                None => Generator::new(seed, number as u32),
            };
            let constraint = options.constraints.get(number);
            let constraint = constraint.map(|c| (c.fork(), TokenMask::new(vocabulary)));
            let limit = limit(config, prompt.len(), room(model, config));
            BeamSearch::new(config, prompt, limit, constraint, random, number)
        })
        .collect();
    let mut timings = GenerateTimings {
        prefill_tokens: prompts.iter().map(Vec::len).sum(),
        ..GenerateTimings::default()
    };
    if searches.iter().any(|search| !search.is_done()) {
        let images = options.images;
        let mut decoder = model.row_decoder(prompts, images, config, beams)?;
        // A prompt is read once, and its row of the cache then copied for each beam.
        let copies: Vec<usize> = (0..prompts.len() * beams).map(|row| row / beams).collect();
        let mut logits = repeated(&decoder.prefill()?, beams)?;
        decoder.reorder(&copies)?;
        let mut host = Vec::new();
        loop {
            let vocabulary = to_host(&logits, &mut host)?;
            let rows = host.chunks_exact_mut(vocabulary * beams);
            for (search, rows) in searches.iter_mut().zip(rows) {
                search.advance(rows)?;
            }
            if timings.decode_tokens == 0 {
                timings.prefill = start.elapsed();
            }
            timings.decode_tokens += beams * searches.iter().filter(|s| !s.is_done()).count();
            if is_late(config, start) {
                searches.iter_mut().for_each(BeamSearch::end);
            }
            if searches.iter().all(BeamSearch::is_done) {
                break;
            }
            let parents: Vec<usize> = searches
                .iter()
                .enumerate()
                .flat_map(|(number, search)| search.parents(number * beams))
                .collect();
            // Most steps of a confident model keep every beam in its row, and need no copy.
            if parents
                .iter()
                .enumerate()
                .any(|(row, &parent)| row != parent)
            {
                decoder.reorder(&parents)?;
            }
            let tokens: Vec<i64> = searches.iter().flat_map(BeamSearch::last_tokens).collect();
            logits = decoder.step(&tokens)?;
        }
        timings.decode = start.elapsed() - timings.prefill;
    }
    let mut output = GenerateOutput::empty(timings);
    let mut all_scores = Vec::new();
    for search in searches {
        let prompt = search.prompt();
        for found in search.into_best(config.num_return_sequences) {
            all_scores.push(found.score);
            emit(&found, prompt, (config, options), &mut output, on_token)?;
            output.sequences.push(found.ids);
            output.prompt_lengths.push(prompt);
            output.finish_reasons.push(found.reason);
        }
    }
    output.sequence_scores = Some(all_scores);
    Ok(output)
}

/// Calls `on_token` with the tokens of a continuation until it breaks, and keeps its text.
fn emit(
    found: &FinishedBeam,
    prompt: usize,
    (config, options): (&GenerationConfig, &GenerateOptions<'_>),
    output: &mut GenerateOutput,
    on_token: &mut OnToken<'_>,
) -> Result<()> {
    let (before, new) = found.ids.split_at(prompt);
    let mut text = options
        .tokenizer
        .map(|tokenizer| RowText::new(tokenizer, before, config));
    let mut listening = true;
    for (index, &id) in new.iter().enumerate() {
        let finished: Option<FinishReason> = (index + 1 == new.len()).then_some(found.reason);
        let piece = match &mut text {
            Some(text) => text.push(id, finished)?.0,
            None => String::new(),
        };
        if listening {
            let token = GeneratedToken {
                row: output.sequences.len(),
                id,
                text: &piece,
                logprobs: None,
                finished,
            };
            listening = on_token(token).is_continue();
        }
    }
    output.texts.extend(text.map(RowText::into_text));
    Ok(())
}
