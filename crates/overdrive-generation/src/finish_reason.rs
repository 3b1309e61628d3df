use std::time::Instant;

use crate::rows::{MaskedConstraint, advance};
use crate::{GenerationConfig, Result};

/// The reason why a sequence ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum FinishReason {
    /// The last token of the sequence is one of `eos_token_id`.
    EndOfText,
    /// The last token of the sequence is one of `stop_token_ids`.
    StopToken,
    /// The text contains one of `stop_strings`, or its last token is a special token that is one of them.
    StopString {
        /// The index of the string.
        number: usize,
    },
    /// The constraint allows no further token.
    Constraint,
    /// The length limit is reached.
    Length,
    /// The model's context is full, or the cache of an engine that holds less.
    ContextFull,
    /// `max_time` has passed.
    TimeLimit,
    /// The caller stopped it.
    Stopped,
}

/// Returns the length at which a row ends whose prompt has `prompt` tokens, and the reason; the model has `room` for
/// that number of tokens.
pub(crate) fn limit(
    config: &GenerationConfig,
    prompt: usize,
    room: usize,
) -> (usize, FinishReason) {
    let length = prompt.saturating_add(config.new_tokens(prompt));
    if length > room {
        (room, FinishReason::ContextFull)
    } else {
        (length, FinishReason::Length)
    }
}

/// Returns `true` if `max_time` has passed since `start`.
pub(crate) fn is_late(config: &GenerationConfig, start: Instant) -> bool {
    config
        .max_time
        .is_some_and(|limit| start.elapsed().as_secs_f64() > limit)
}

/// Advances a constraint by the token `id`, and returns the reason if a row of `length` tokens ends with
/// it. `limit` is the length at which the row ends, and the reason.
pub(crate) fn end_after(
    id: i64,
    length: usize,
    limit: (usize, FinishReason),
    config: &GenerationConfig,
    constraint: &mut Option<MaskedConstraint>,
) -> Result<Option<FinishReason>> {
    let mut finished = None;
    let mut follows = true;
    if let Some(constraint) = constraint {
        follows = advance(constraint, id, config)?;
        finished = constraint
            .0
            .is_finished()
            .then_some(FinishReason::Constraint);
    }
    // An end-of-text token of the configuration is reported as such, even if the constraint ends too. If the token
    // was forced although the text is incomplete, the length is the reported reason.
    if follows && config.eos_token_id.contains(&id) {
        finished = Some(FinishReason::EndOfText);
    } else if follows && config.stop_token_ids.contains(&id) {
        finished = Some(FinishReason::StopToken);
    }
    if length >= limit.0 {
        finished.get_or_insert(limit.1);
    }
    Ok(finished)
}
