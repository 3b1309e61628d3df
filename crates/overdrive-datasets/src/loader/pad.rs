//! Sequences of different lengths as one block.

use crate::{Error, Result};

/// At which end of a sequence padding is put.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum PadSide {
    /// Behind it: for training.
    #[default]
    Right,
    /// In front of it: for generation.
    Left,
}

/// How sequences are padded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PadOptions {
    /// The token that stands where no token is. Default: 0.
    pub pad_token: u32,
    /// At which end. Default: right.
    pub side: PadSide,
    /// The length of the block is a multiple of this, as tensor cores like it. Default: 1.
    pub pad_to_multiple_of: usize,
    /// Cuts longer sequences at the end. Default: no bound.
    pub max_length: Option<usize>,
}

impl Default for PadOptions {
    fn default() -> Self {
        Self {
            pad_token: 0,
            side: PadSide::Right,
            pad_to_multiple_of: 1,
            max_length: None,
        }
    }
}

/// Sequences padded to one length, row by row, as transformers' `DataCollatorWithPadding` gives them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PaddedBatch {
    /// (rows, columns): the tokens, `pad_token` where there is none.
    pub input_ids: Vec<i64>,
    /// (rows, columns): 1 where a token is, 0 where there is none.
    pub attention_mask: Vec<i64>,
    /// The number of sequences.
    pub rows: usize,
    /// The length of the longest, rounded up.
    pub columns: usize,
    /// How many tokens are no padding.
    pub tokens: usize,
}

impl PaddedBatch {
    /// The labels of causal language modelling, row by row: the tokens themselves, with
    /// [`crate::IGNORE_INDEX`] where there is none.
    pub fn labels(&self) -> Vec<i64> {
        let masked = self.input_ids.iter().zip(&self.attention_mask);
        masked
            .map(|(&id, &mask)| if mask == 1 { id } else { crate::IGNORE_INDEX })
            .collect()
    }

    /// The share of the block that is padding; 0 of an empty one.
    pub fn padding(&self) -> f64 {
        let padded = self.input_ids.len() - self.tokens;
        padded as f64 / (self.input_ids.len() as f64).max(1.0)
    }
}

/// Pads sequences to the length of the longest.
///
/// ```
/// use overdrive_datasets::{PadOptions, pad_sequences};
/// let batch = pad_sequences(&[vec![5, 6, 7], vec![8]], &PadOptions::default())?;
/// assert_eq!(batch.input_ids, [5, 6, 7, 8, 0, 0]);
/// assert_eq!(batch.attention_mask, [1, 1, 1, 1, 0, 0]);
/// # Ok::<(), overdrive_datasets::Error>(())
/// ```
///
/// # Errors
/// When `pad_to_multiple_of` is 0.
pub fn pad_sequences<S: AsRef<[u32]>>(
    sequences: &[S],
    options: &PadOptions,
) -> Result<PaddedBatch> {
    if options.pad_to_multiple_of == 0 {
        return Err(Error::InvalidOption {
            option: "pad_to_multiple_of",
            value: "0".to_owned(),
            expected: "at least 1, which rounds to nothing",
        });
    }
    let bound = options.max_length.unwrap_or(usize::MAX);
    let cut = |sequence: &S| sequence.as_ref().len().min(bound);
    let longest = sequences.iter().map(cut).max().unwrap_or(0);
    let columns = longest.next_multiple_of(options.pad_to_multiple_of);
    let mut input_ids = vec![i64::from(options.pad_token); sequences.len() * columns];
    let mut attention_mask = vec![0; input_ids.len()];
    let mut tokens = 0;
    for (row, sequence) in sequences.iter().enumerate() {
        let sequence = &sequence.as_ref()[..cut(sequence)];
        let start = row * columns
            + match options.side {
                PadSide::Right => 0,
                PadSide::Left => columns - sequence.len(),
            };
        let place = start..start + sequence.len();
        attention_mask[place.clone()].fill(1);
        for (id, &token) in input_ids[place].iter_mut().zip(sequence) {
            *id = i64::from(token);
        }
        tokens += sequence.len();
    }
    Ok(PaddedBatch {
        input_ids,
        attention_mask,
        rows: sequences.len(),
        columns,
        tokens,
    })
}
