/// A set of token ids, one bit each.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TokenMask {
    words: Vec<u32>,
    vocabulary: usize,
}

impl TokenMask {
    /// Returns the empty set of ids in `0..vocabulary`.
    pub fn new(vocabulary: usize) -> TokenMask {
        TokenMask {
            words: vec![0; vocabulary.div_ceil(32)],
            vocabulary,
        }
    }

    /// Returns the size of the vocabulary.
    pub fn vocabulary(&self) -> usize {
        self.vocabulary
    }

    /// Empties the set.
    pub fn clear(&mut self) {
        self.words.fill(0);
    }

    /// Adds `id`; ids outside the vocabulary are ignored.
    pub fn allow(&mut self, id: i64) {
        if let Ok(id) = usize::try_from(id)
            && id < self.vocabulary
        {
            self.words[id / 32] |= 1 << (id % 32);
        }
    }

    /// Adds every id whose bit is set, 32 a word, lowest bit first.
    pub fn allow_words(&mut self, words: &[u32]) {
        for (to, from) in self.words.iter_mut().zip(words) {
            *to |= from;
        }
        // Masks of a grammar are whole words, whose last bits may be set beyond the vocabulary.
        let beyond = self.vocabulary % 32;
        if beyond != 0
            && let Some(last) = self.words.last_mut()
        {
            *last &= (1 << beyond) - 1;
        }
    }

    /// Returns `true` if `id` is in the set.
    pub fn is_allowed(&self, id: i64) -> bool {
        usize::try_from(id)
            .ok()
            .filter(|id| *id < self.vocabulary)
            .is_some_and(|id| self.words[id / 32] >> (id % 32) & 1 == 1)
    }

    /// Returns the bits, 32 a word, lowest first.
    pub(crate) fn words(&self) -> &[u32] {
        &self.words
    }

    /// Returns the number of ids in the set.
    pub fn count(&self) -> usize {
        self.words.iter().map(|w| w.count_ones() as usize).sum()
    }

    /// Sets the scores of all other ids to -∞.
    pub(crate) fn exclude_others(&self, scores: &mut [f32]) {
        let beyond = self.vocabulary.min(scores.len());
        scores[beyond..].fill(f32::NEG_INFINITY);
        for (word, scores) in self.words.iter().zip(scores.chunks_mut(32)) {
            // A grammar allows few tokens, or excludes few: most words are all 0 or all 1, and take no
            // loop.
            match *word {
                0 => scores.fill(f32::NEG_INFINITY),
                u32::MAX => {}
                word => {
                    for (bit, score) in scores.iter_mut().enumerate() {
                        if word >> bit & 1 == 0 {
                            *score = f32::NEG_INFINITY;
                        }
                    }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_allowed_ids_keep_their_scores() {
        let mut mask = TokenMask::new(70);
        for id in [0, 33, 69, 70, -1] {
            mask.allow(id);
        }
        assert_eq!(mask.count(), 3);
        let mut scores = vec![1.0; 72];
        mask.exclude_others(&mut scores);
        let left: Vec<usize> = (0..72).filter(|&id| scores[id] == 1.0).collect();
        assert_eq!(left, [0, 33, 69]);
        mask.allow_words(&[u32::MAX; 3]);
        assert_eq!(mask.count(), 70, "bits beyond the vocabulary stay unset");
        assert!(mask.is_allowed(69) && !mask.is_allowed(70));
    }
}
