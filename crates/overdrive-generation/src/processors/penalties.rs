use super::{History, Scores};
use crate::GenerationConfig;

pub(super) fn applies(config: &GenerationConfig) -> bool {
    config.repetition_penalty != 1.0
        || config.presence_penalty != 0.0
        || config.frequency_penalty != 0.0
        || config.no_repeat_ngram_size > 0
}

pub(super) fn penalize<S: Scores + ?Sized>(
    scores: &mut S,
    history: History<'_>,
    config: &GenerationConfig,
    counts: &mut TokenCounts,
) {
    let vocabulary = scores.vocabulary();
    if config.repetition_penalty != 1.0 {
        let penalty = config.repetition_penalty as f32;
        for (id, _) in counts.counted(history.ids, vocabulary) {
            scores.penalize_repetition(*id, penalty);
        }
    }
    if config.presence_penalty != 0.0 || config.frequency_penalty != 0.0 {
        let (presence, frequency) = (
            config.presence_penalty as f32,
            config.frequency_penalty as f32,
        );
        let generated = &history.ids[history.prompt()..];
        for (id, count) in counts.counted(generated, vocabulary) {
            scores.subtract(*id, frequency * *count as f32, presence);
        }
    }
}

/// Excludes every token that would complete an n-gram of `no_repeat_ngram_size` for the second time.
pub(super) fn no_repeated_ngram<S: Scores + ?Sized>(
    scores: &mut S,
    history: History<'_>,
    config: &GenerationConfig,
) {
    let (ids, size) = (history.ids, config.no_repeat_ngram_size);
    if size == 0 || ids.len() < size {
        return;
    }
    let prefix = &ids[ids.len() + 1 - size..];
    for ngram in ids.windows(size) {
        if ngram[..size - 1] == *prefix {
            scores.exclude(&ngram[size - 1..]);
        }
    }
}

/// The number of occurrences of each token in a sequence. Counting needs neither a sort nor
/// clearing a table of the whole vocabulary: an entry is valid only if it belongs to the current round.
#[derive(Debug, Clone, Default)]
pub(crate) struct TokenCounts {
    round: u32,
    /// The last round in which each token occurred, and its index in `counted`.
    indices: Vec<(u32, u32)>,
    counted: Vec<(usize, u32)>,
}

impl TokenCounts {
    /// Returns each token of `ids` inside the vocabulary, once, with its number of occurrences.
    fn counted(&mut self, ids: &[i64], vocabulary: usize) -> &[(usize, u32)] {
        if self.indices.len() != vocabulary || self.round == u32::MAX {
            self.indices = vec![(0, 0); vocabulary];
            self.round = 0;
        }
        self.round += 1;
        self.counted.clear();
        for &id in ids {
            let Some((id, mark)) = usize::try_from(id)
                .ok()
                .and_then(|id| Some((id, self.indices.get_mut(id)?)))
            else {
                continue;
            };
            if mark.0 == self.round {
                self.counted[mark.1 as usize].1 += 1;
            } else {
                *mark = (self.round, self.counted.len() as u32);
                self.counted.push((id, 1));
            }
        }
        &self.counted
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_are_counted_once_each_in_every_round() {
        let mut counts = TokenCounts::default();
        assert_eq!(
            counts.counted(&[3, 1, 3, -1, 9, 3], 5),
            [(3, 3), (1, 1)],
            "ids outside the vocabulary do not count"
        );
        assert_eq!(counts.counted(&[1, 1], 5), [(1, 2)]);
        assert_eq!(counts.counted(&[], 5), []);
    }
}
