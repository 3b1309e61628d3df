use std::sync::Arc;

use tokenizers::Tokenizer;

use super::{ReasoningParser, State, harmony};
use crate::{Constraint, Result, TextStream, TokenMask};

impl ReasoningParser {
    /// Returns a constraint on the content of the answer alone: reasoning before it is free, as in vLLM's structured outputs.
    /// The reasoning cannot be the end of the answer. If the answer does not certainly begin with reasoning, `constraint` begins
    /// with it, and the parser returns content only.
    pub fn constrain_content(
        &mut self,
        constraint: Box<dyn Constraint>,
        tokenizer: &Arc<Tokenizer>,
        end_of_text: &[i64],
    ) -> Box<dyn Constraint> {
        let place = match &self.state {
            State::Reasoning { end, .. } => {
                tokenizer.token_to_id(end).map(|end| Place::Reasoning {
                    end: i64::from(end),
                })
            }
            State::Harmony(place) if !place.is_content() => {
                let tokens = harmony::Tokens::of(tokenizer);
                tokens.map(|tokens| Place::Harmony {
                    tokens,
                    header: (!place.is_reasoning()).then(Vec::new),
                    is_call: false,
                })
            }
            _ => None,
        };
        let Some(place) = place else {
            self.state = State::Content;
            return constraint;
        };
        Box::new(AfterReasoning {
            constraint,
            place,
            tokenizer: Arc::clone(tokenizer),
            end_of_text: end_of_text.into(),
        })
    }
}

/// A constraint that begins after the reasoning of an answer.
#[derive(Debug)]
struct AfterReasoning {
    constraint: Box<dyn Constraint>,
    place: Place,
    tokenizer: Arc<Tokenizer>,
    end_of_text: Arc<[i64]>,
}

#[derive(Debug, Clone)]
enum Place {
    /// In reasoning up to a token.
    Reasoning { end: i64 },
    /// In a message of the harmony format that is not the final one.
    Harmony {
        tokens: harmony::Tokens,
        /// The tokens of the header so far; `None` in the body.
        header: Option<Vec<u32>>,
        /// `true` in the body of a call, which ends the answer.
        is_call: bool,
    },
    /// In the content.
    Content,
}

impl Constraint for AfterReasoning {
    fn allowed(&mut self, mask: &mut TokenMask) -> Result<()> {
        let may_end = match &self.place {
            Place::Content => return self.constraint.allowed(mask),
            Place::Harmony { is_call, .. } => *is_call,
            Place::Reasoning { .. } => false,
        };
        let mut words = vec![u32::MAX; mask.vocabulary().div_ceil(32)];
        let ends = self.end_of_text.iter().filter(|_| !may_end);
        for id in ends.filter_map(|&id| usize::try_from(id).ok()) {
            if let Some(word) = words.get_mut(id / 32) {
                *word &= !(1 << (id % 32));
            }
        }
        mask.allow_words(&words);
        Ok(())
    }

    fn advance(&mut self, token: i64) -> Result<()> {
        match &mut self.place {
            Place::Content => return self.constraint.advance(token),
            Place::Reasoning { end } => {
                if token == *end {
                    self.place = Place::Content;
                }
            }
            Place::Harmony {
                tokens,
                header,
                is_call,
            } => {
                if token == tokens.message {
                    let ids = header.take().unwrap_or_default();
                    let text = TextStream::decode(&self.tokenizer, &ids, false)?;
                    *is_call = harmony::is_call(&text);
                    if harmony::is_final(&text) {
                        self.place = Place::Content;
                    }
                } else if let Some(header) = header {
                    header.extend(u32::try_from(token));
                } else if token == tokens.start || token == tokens.channel {
                    *header = Some(u32::try_from(token).into_iter().collect());
                }
            }
        }
        Ok(())
    }

    fn is_finished(&self) -> bool {
        matches!(self.place, Place::Content) && self.constraint.is_finished()
    }

    fn fork(&self) -> Box<dyn Constraint> {
        Box::new(AfterReasoning {
            constraint: self.constraint.fork(),
            place: self.place.clone(),
            tokenizer: Arc::clone(&self.tokenizer),
            end_of_text: Arc::clone(&self.end_of_text),
        })
    }
}
