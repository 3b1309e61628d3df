//! Speculative decoding: proposals of several tokens that the model verifies in one pass.

use std::time::Instant;

use overdrive_transformer::CausalLm;
use tokenizers::Tokenizer;

use crate::cache;
use crate::decoder::{Decoder, to_host};
use crate::device_sampling::RowLogits;
use crate::finish_reason::is_late;
use crate::generation_model::RowDecoder;
use crate::rows::{OnToken, Row, Rows};
use crate::sampler::cuts::Candidates;
use crate::{
    Error, FinishReason, GenerateOptions, GenerateOutput, GenerateTimings, GenerationConfig,
    Result, SpeculationStatistics,
};

mod draft_model;
mod prompt_lookup;

use draft_model::DraftModel;
pub(crate) use prompt_lookup::PromptLookup;

/// The tokens of a proposal, one after another.
#[derive(Debug, Default)]
struct Proposal {
    tokens: Vec<i64>,
    /// The distribution from which each was drawn; empty if they were not drawn.
    distributions: Vec<Candidates>,
}

/// A source of proposals for one row.
trait Proposer {
    /// Proposes at most `most` tokens to follow `ids`, of which the last `new` are generated.
    fn propose(&mut self, ids: &[i64], new: usize, most: usize) -> Result<Proposal>;

    /// Adapts to the number of accepted tokens of the last proposal.
    fn update(&mut self, _proposed: usize, _accepted: usize) {}
}

/// Continues the prompts one after another.
pub(crate) fn generate(
    model: &CausalLm,
    prompts: &[Vec<i64>],
    config: &GenerationConfig,
    options: &GenerateOptions<'_>,
    on_token: &mut OnToken<'_>,
) -> Result<GenerateOutput> {
    if let Some(assistant) = options.assistant_model {
        let refuse = |first, second, why| Err(Error::Incompatible { first, second, why });
        if config.prompt_lookup_num_tokens.is_some() {
            let why = "choose one source of proposals";
            return refuse("assistant_model", "prompt_lookup_num_tokens", why);
        }
        if !config.use_cache {
            let why = "a round of proposals keeps the tokens that it has read";
            return refuse("assistant_model", "use_cache false", why);
        }
        let tokenizers = options.tokenizer.zip(options.assistant_tokenizer);
        let sizes = [model, assistant].map(|model| model.config().vocab_size());
        check_vocabularies(sizes, tokenizers)?;
    }
    let vocabulary = model.config().vocab_size().unsigned_abs() as usize;
    let mut rows = Rows::new(model, prompts, config, options)?;
    let start = rows.start();
    let mut statistics = SpeculationStatistics::default();
    let mut timings = GenerateTimings::default();
    for row in &mut rows.rows {
        if row.finished.is_some() {
            continue;
        }
        // A draft model draws from a separate stream: with the row's stream, its draws would influence
        // their own acceptance.
        let mut proposer: Box<dyn Proposer> = match options.assistant_model {
            Some(assistant) => {
                let sampler = row.state.sampler.split(1);
                Box::new(DraftModel::new(assistant, config, sampler, vocabulary))
            }
            None => Box::new(PromptLookup::new(config)),
        };
        let mut decoding = SpeculativeDecoding {
            config,
            // One decoder per row: rows accept different numbers of tokens, and would have to be
            // truncated separately.
            decoder: Decoder::new(model, std::slice::from_ref(&row.ids), config, 1)?,
            context: cache::context(model, config),
            scores: Vec::new(),
            statistics: &mut statistics,
        };
        let begin = Instant::now();
        decoding.prefill(row, on_token)?;
        let prefilled = begin.elapsed();
        while row.finished.is_none() {
            if is_late(config, start) {
                row.finished = Some(FinishReason::TimeLimit);
                break;
            }
            decoding.round(row, proposer.as_mut(), on_token)?;
        }
        timings.prefill += prefilled;
        timings.prefill_tokens += row.state.prompt;
        timings.decode += begin.elapsed() - prefilled;
        timings.decode_tokens += row.new_tokens().saturating_sub(1);
    }
    let mut output = rows.into_output(timings);
    output.speculation = Some(statistics);
    Ok(output)
}

/// The most tokens that are proposed at once: a cache with recurrent layers undoes steps of 64 tokens at most.
pub(crate) const MOST_PROPOSED: usize = 63;

/// The largest difference of vocabulary sizes that is treated as padding without comparing the tokens, as
/// in llama.cpp. Qwen2.5 pads to 151936 or 152064.
const PADDING: u64 = 128;

/// Checks that the ids of a model and of its assistant, whose vocabularies have these sizes, are the same tokens.
pub(crate) fn check_vocabularies(
    [ours, theirs]: [i64; 2],
    tokenizers: Option<(&Tokenizer, &Tokenizer)>,
) -> Result<()> {
    let Some((own, other)) = tokenizers else {
        if ours.abs_diff(theirs) > PADDING {
            return Err(Error::AssistantVocabulary {
                assistant: theirs,
                model: ours,
            });
        }
        return Ok(());
    };
    // An id that only one of the models has is padding, or a special token that the other model never proposes.
    let shared = u32::try_from(ours.min(theirs)).unwrap_or(u32::MAX);
    for id in 0..shared {
        if let (Some(model), Some(assistant)) = (own.id_to_token(id), other.id_to_token(id))
            && model != assistant
        {
            return Err(Error::AssistantToken {
                id,
                assistant,
                model,
            });
        }
    }
    Ok(())
}

/// The speculative decoding of one row.
struct SpeculativeDecoding<'a> {
    config: &'a GenerationConfig,
    decoder: Decoder<'a>,
    context: usize,
    scores: Vec<f32>,
    statistics: &'a mut SpeculationStatistics,
}

impl SpeculativeDecoding<'_> {
    fn prefill(&mut self, row: &mut Row<'_>, on_token: &mut OnToken<'_>) -> Result<()> {
        let logits = self.decoder.prefill()?;
        to_host(&logits, &mut self.scores)?;
        let choice = row
            .state
            .choose(RowLogits::Host(&mut self.scores), &row.ids)?;
        row.push(choice, on_token)
    }

    /// Reads the last token and a proposal, and accepts the tokens that the model would have generated.
    fn round(
        &mut self,
        row: &mut Row<'_>,
        proposer: &mut dyn Proposer,
        on_token: &mut OnToken<'_>,
    ) -> Result<()> {
        let have = row.ids.len();
        // The model yields one token more than is proposed.
        let mut most = (row.state.limit.0 - have - 1)
            .min(self.context.saturating_sub(have))
            .min(MOST_PROPOSED);
        if cache::slides(self.config) {
            most = most.min(cache::most_proposed(self.config));
        }
        let proposal = proposer.propose(&row.ids, row.new_tokens(), most)?;
        // The last token has been chosen but not read yet.
        let mut read = vec![row.ids[have - 1]];
        read.extend(&proposal.tokens);
        let logits = self.decoder.extend(&read)?;
        let vocabulary = to_host(&logits, &mut self.scores)?;
        let mut accepted = 0;
        for (index, scores) in self.scores.chunks_exact_mut(vocabulary).enumerate() {
            let (state, ids) = (&mut row.state, &row.ids);
            let (choice, accept_next) = match proposal.tokens.get(index) {
                None => (state.choose(RowLogits::Host(scores), ids)?, false),
                Some(&token) => {
                    state.verify(scores, ids, token, proposal.distributions.get(index))?
                }
            };
            row.push(choice, on_token)?;
            accepted += usize::from(accept_next);
            if !accept_next || row.finished.is_some() {
                break;
            }
        }
        // All accepted tokens have been read, except for the last one.
        self.decoder.truncate(row.ids.len() - 1)?;
        proposer.update(proposal.tokens.len(), accepted);
        self.statistics.rounds += 1;
        self.statistics.proposed += proposal.tokens.len();
        self.statistics.accepted += accepted;
        Ok(())
    }
}
