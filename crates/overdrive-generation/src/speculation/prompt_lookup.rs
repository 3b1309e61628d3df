use super::{Proposal, Proposer};
use crate::{GenerationConfig, Result};

/// Proposes the tokens that followed an earlier occurrence of the last tokens (Saxena 2023, prompt
/// lookup decoding): the longest run of last tokens that occurs, at its first occurrence.
#[derive(Debug)]
pub(crate) struct PromptLookup {
    tokens: usize,
    longest: usize,
    end_of_text: Vec<i64>,
}

impl PromptLookup {
    pub(crate) fn new(config: &GenerationConfig) -> PromptLookup {
        PromptLookup {
            tokens: config.prompt_lookup_num_tokens.unwrap_or(0),
            longest: config.max_matching_ngram_size,
            end_of_text: config.eos_token_id.clone(),
        }
    }

    /// Returns at most `most` tokens to follow `ids`, of which there is at least one.
    pub(crate) fn find<'t>(&self, ids: &'t [i64], most: usize) -> &'t [i64] {
        let most = self.tokens.min(most);
        for size in (1..=self.longest.min(ids.len() - 1)).rev() {
            let (before, last) = (&ids[..ids.len() - 1], &ids[ids.len() - size..]);
            if let Some(index) = before.windows(size).position(|window| window == last) {
                let found = &ids[index + size..];
                let found = &found[..found.len().min(most)];
                // Tokens after an end of text are never accepted.
                let end = found.iter().position(|id| self.end_of_text.contains(id));
                return &found[..end.unwrap_or(found.len())];
            }
        }
        &[]
    }
}

impl Proposer for PromptLookup {
    fn propose(&mut self, ids: &[i64], _new: usize, most: usize) -> Result<Proposal> {
        Ok(Proposal {
            tokens: self.find(ids, most).to_vec(),
            distributions: Vec::new(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_tokens_after_the_longest_earlier_match_are_proposed() {
        let lookup = PromptLookup {
            tokens: 3,
            longest: 2,
            end_of_text: vec![99],
        };
        assert_eq!(lookup.find(&[1, 2, 3, 4, 5, 1, 2], 9), [3, 4, 5]);
        assert_eq!(lookup.find(&[1, 2, 3, 4, 5, 1, 2], 2), [3, 4]);
        assert_eq!(
            lookup.find(&[7, 2, 3, 4, 1, 2, 5, 1, 2], 9),
            [5, 1, 2],
            "two before one"
        );
        assert_eq!(lookup.find(&[7, 2, 3, 8, 2], 9), [3, 8, 2]);
        assert_eq!(lookup.find(&[1, 2, 3], 9), [] as [i64; 0]);
        assert_eq!(lookup.find(&[1, 99, 3, 1], 9), [] as [i64; 0]);
        assert_eq!(lookup.find(&[4, 4, 4], 9), [4], "a repetition continues");
        assert_eq!(lookup.find(&[4], 9), [] as [i64; 0]);
    }
}
