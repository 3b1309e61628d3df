use super::{Place, exclude};
use crate::GenerationConfig;

pub(super) fn change(config: &GenerationConfig) -> bool {
    config.repetition_penalty != 1.0
        || config.presence_penalty != 0.0
        || config.frequency_penalty != 0.0
        || config.no_repeat_ngram_size > 0
}

pub(super) fn penalize(
    scores: &mut [f32],
    place: Place<'_>,
    config: &GenerationConfig,
    marks: &mut Marks,
) {
    let vocabulary = scores.len();
    if config.repetition_penalty != 1.0 {
        let penalty = config.repetition_penalty as f32;
        for (id, _) in marks.counted(place.present, vocabulary) {
            let score = &mut scores[*id];
            *score = if *score < 0.0 {
                *score * penalty
            } else {
                *score / penalty
            };
        }
    }
    if config.presence_penalty != 0.0 || config.frequency_penalty != 0.0 {
        let (presence, frequency) = (
            config.presence_penalty as f32,
            config.frequency_penalty as f32,
        );
        let generated = &place.present[place.prompt()..];
        for (id, count) in marks.counted(generated, vocabulary) {
            scores[*id] -= frequency * *count as f32;
            scores[*id] -= presence;
        }
    }
    if config.no_repeat_ngram_size > 0 {
        no_repeated_ngram(scores, place.present, config.no_repeat_ngram_size);
    }
}

/// Excludes every token that would complete an n-gram for the second time.
fn no_repeated_ngram(scores: &mut [f32], present: &[i64], size: usize) {
    if present.len() < size {
        return;
    }
    let prefix = &present[present.len() + 1 - size..];
    for ngram in present.windows(size) {
        if ngram[..size - 1] == *prefix {
            exclude(scores, &ngram[size - 1..]);
        }
    }
}

/// How often each token occurs in a text, counted without sorting it and without clearing a table of
/// the whole vocabulary: a mark is valid if it is of this round.
#[derive(Debug, Clone, Default)]
pub(crate) struct Marks {
    round: u32,
    /// For each token the last round in which it occurred, and its place in `counted`.
    places: Vec<(u32, u32)>,
    counted: Vec<(usize, u32)>,
}

impl Marks {
    /// Each token of `ids` inside the vocabulary, once, with its number of occurrences.
    fn counted(&mut self, ids: &[i64], vocabulary: usize) -> &[(usize, u32)] {
        if self.places.len() != vocabulary || self.round == u32::MAX {
            self.places = vec![(0, 0); vocabulary];
            self.round = 0;
        }
        self.round += 1;
        self.counted.clear();
        for &id in ids {
            let Some((id, mark)) = usize::try_from(id)
                .ok()
                .and_then(|id| Some((id, self.places.get_mut(id)?)))
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
        let mut marks = Marks::default();
        assert_eq!(
            marks.counted(&[3, 1, 3, -1, 9, 3], 5),
            [(3, 3), (1, 1)],
            "ids outside the vocabulary do not count"
        );
        assert_eq!(marks.counted(&[1, 1], 5), [(1, 2)]);
        assert_eq!(marks.counted(&[], 5), []);
    }
}
