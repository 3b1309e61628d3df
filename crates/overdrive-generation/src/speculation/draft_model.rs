use overdrive_transformer::CausalLm;
use tch::Tensor;

use super::{MOST_PROPOSED, Proposal, Proposer};
use crate::decoder::{Decoder, to_host};
use crate::generation_model::RowDecoder;
use crate::{GenerationConfig, NumAssistantTokensSchedule, Result, Sampler};

/// A smaller model that proposes tokens, with the configuration of the model that verifies them.
pub(super) struct DraftModel<'a> {
    model: &'a CausalLm,
    config: GenerationConfig,
    sampler: Sampler,
    /// The size of the vocabulary of the model that verifies, whose padding may differ.
    vocabulary: usize,
    /// The decoder, once it has read anything.
    decoder: Option<Decoder<'a>>,
    read: Vec<i64>,
    /// The number of tokens to propose at once.
    tokens: usize,
    scores: Vec<f32>,
}

impl<'a> DraftModel<'a> {
    pub(super) fn new(
        model: &'a CausalLm,
        config: &GenerationConfig,
        sampler: Sampler,
        vocabulary: usize,
    ) -> Self {
        DraftModel {
            model,
            config: GenerationConfig {
                // The option names the cache of the large model; the draft's own must be able to
                // truncate anywhere.
                cache_implementation: None,
                ..config.clone()
            },
            sampler,
            vocabulary,
            decoder: None,
            read: Vec::new(),
            tokens: config.num_assistant_tokens,
            scores: Vec::new(),
        }
    }

    /// Reads the tokens of `ids` that it has not read; its logits after the last are then in `scores`.
    fn catch_up(&mut self, ids: &[i64]) -> Result<()> {
        let logits = match &mut self.decoder {
            None => {
                let prompt = [ids.to_vec()];
                let decoder =
                    Decoder::with_slack(self.model, &prompt, &self.config, 1, MOST_PROPOSED + 1)?;
                self.decoder.insert(decoder).prefill()?
            }
            Some(decoder) => {
                let common = self.read.iter().zip(ids).take_while(|(a, b)| a == b);
                // If all tokens were read, the last one is read again, because its logits are needed.
                let common = common.count().min(ids.len() - 1);
                decoder.truncate(common)?;
                let logits = decoder.extend(&ids[common..])?;
                logits.f_narrow(1, logits.size()[1] - 1, 1)?
            }
        };
        self.read = ids.to_vec();
        self.take_scores(&logits)
    }

    /// Takes the scores of the next token, one for each id of the model that verifies: ids that only the draft
    /// has are cut off, and those that it does not have are excluded.
    fn take_scores(&mut self, logits: &Tensor) -> Result<()> {
        to_host(logits, &mut self.scores)?;
        self.scores.resize(self.vocabulary, f32::NEG_INFINITY);
        Ok(())
    }
}

impl Proposer for DraftModel<'_> {
    fn propose(&mut self, ids: &[i64], new: usize, most: usize) -> Result<Proposal> {
        let context = self.model.config().max_position_embeddings().unsigned_abs() as usize;
        let most = most
            .min(self.tokens)
            .min(context.saturating_add(1).saturating_sub(ids.len()));
        let mut proposal = Proposal::default();
        // Its embedding has no row for ids beyond its own vocabulary.
        let known = 0..self.model.config().vocab_size();
        if most == 0 || !ids.iter().all(|id| known.contains(id)) {
            return Ok(proposal);
        }
        self.catch_up(ids)?;
        let mut ids_with_proposal = ids.to_vec();
        loop {
            let count = new + proposal.tokens.len();
            let (id, distribution, confidence) =
                self.sampler
                    .propose(&mut self.scores, &ids_with_proposal, count)?;
            ids_with_proposal.push(id);
            proposal.tokens.push(id);
            proposal.distributions.extend(distribution);
            if proposal.tokens.len() == most
                || confidence < self.config.assistant_confidence_threshold
                || self.config.eos_token_id.contains(&id)
            {
                return Ok(proposal);
            }
            if let Some(decoder) = &mut self.decoder {
                let logits = decoder.step(&[id])?;
                self.read.push(id);
                self.take_scores(&logits)?;
            }
        }
    }

    fn update(&mut self, proposed: usize, accepted: usize) {
        if self.config.num_assistant_tokens_schedule == NumAssistantTokensSchedule::Heuristic {
            self.tokens = if accepted == proposed {
                self.tokens.saturating_add(2)
            } else {
                // The heuristic of transformers' assisted generation.
                (self.tokens - 1).max(1)
            };
        }
    }
}
