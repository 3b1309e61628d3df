//! Sequences of tokens with their labels.

use overdrive_core::IGNORE_INDEX;

/// A sequence of tokens and its labels: a window of a token store, a document, an instruction example, or a
/// segment of one in a packed row.
///
/// Labels are not shifted, as in Hugging Face: the label of a token is the token itself. The first one never
/// enters the loss, since no token precedes it.
///
/// ```
/// use overdrive_datasets::TokenizedExample;
///
/// let text = TokenizedExample::from(vec![5_u32, 6, 7]);
/// assert_eq!(text.labels, [5, 6, 7]);
/// assert_eq!(text.learned_tokens(), 2);
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TokenizedExample {
    /// The tokens.
    pub input_ids: Vec<i64>,
    /// The labels: each token itself, or [`IGNORE_INDEX`] if it does not enter the loss.
    pub labels: Vec<i64>,
    /// If `true`, tokens were cut off.
    pub truncated: bool,
}

impl TokenizedExample {
    /// Returns the number of tokens that enter the loss: those that have a label and a token before them.
    pub fn learned_tokens(&self) -> usize {
        let counted = self.labels.iter().skip(1);
        counted.filter(|&&label| label != IGNORE_INDEX).count()
    }
}

/// Every token is its own label.
impl From<Vec<i64>> for TokenizedExample {
    fn from(input_ids: Vec<i64>) -> Self {
        Self {
            labels: input_ids.clone(),
            input_ids,
            truncated: false,
        }
    }
}

/// Every token is its own label.
impl From<Vec<u32>> for TokenizedExample {
    fn from(tokens: Vec<u32>) -> Self {
        Self::from(tokens.into_iter().map(i64::from).collect::<Vec<_>>())
    }
}

/// A row of one sequence.
impl AsRef<[TokenizedExample]> for TokenizedExample {
    fn as_ref(&self) -> &[TokenizedExample] {
        std::slice::from_ref(self)
    }
}
