//! A sequence of tokens with its labels.

/// The label that losses skip: PyTorch's default `ignore_index`.
pub const IGNORE_INDEX: i64 = -100;

/// A sequence of tokens and what is learned of it: a window of a token store, a document, an
/// instruction example, or a piece of one in a packed row.
///
/// Labels are not shifted, as in Hugging Face: the label of a token is the token itself. The first
/// one never counts, since there is nothing to predict it from.
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
    /// One label for each token: the token where it is learned, [`IGNORE_INDEX`] where it is not.
    pub labels: Vec<i64>,
    /// True where tokens were cut off.
    pub truncated: bool,
}

impl TokenizedExample {
    /// Returns how many tokens a loss counts: learned ones that have a token before them.
    pub fn learned_tokens(&self) -> usize {
        let counted = self.labels.iter().skip(1);
        counted.filter(|&&label| label != IGNORE_INDEX).count()
    }
}

/// Every token is learned.
impl From<Vec<i64>> for TokenizedExample {
    fn from(input_ids: Vec<i64>) -> Self {
        Self {
            labels: input_ids.clone(),
            input_ids,
            truncated: false,
        }
    }
}

/// Every token is learned.
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
