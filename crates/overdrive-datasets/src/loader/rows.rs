//! Rows of sequences, by a plan of which lies where, and batches of them.

use std::sync::Arc;

use crate::{
    BatchState, Dataset, Error, IGNORE_INDEX, InstructionBatch, PackPlan, Result, TokenizedExample,
};

/// The rows of a [`PackPlan`] over a dataset of tokenized sequences: one sequence each, or as many as
/// were packed. What [`collate_rows`] makes batches of, for a [`crate::DataLoader`].
#[derive(Debug, Clone)]
pub struct SequenceRows<D> {
    sequences: D,
    plan: Arc<PackPlan>,
}

impl<D> SequenceRows<D> {
    /// Rows of `sequences`, whose lengths `plan` was made of.
    pub fn new(sequences: D, plan: Arc<PackPlan>) -> Self {
        Self { sequences, plan }
    }

    /// Which sequences lie in which row.
    pub fn plan(&self) -> &Arc<PackPlan> {
        &self.plan
    }
}

impl<D: Dataset<Item = TokenizedExample>> Dataset for SequenceRows<D> {
    /// The pieces of sequences that lie in the row.
    type Item = Vec<TokenizedExample>;

    fn len(&self) -> usize {
        self.plan.len()
    }

    fn get(&self, index: usize) -> Result<Vec<TokenizedExample>> {
        if index >= self.plan.len() {
            return Err(Error::NoSuchRecord {
                index,
                len: self.plan.len(),
            });
        }
        let pieces = self.plan.row(index).iter().map(|piece| {
            let whole = self.sequences.get(piece.sequence as usize)?;
            let range = piece.start as usize..(piece.start + piece.len) as usize;
            if range == (0..whole.input_ids.len()) && range.len() == whole.labels.len() {
                return Ok(whole);
            }
            let tokens = whole.input_ids.len();
            let cut = |numbers: &[i64]| numbers.get(range.clone()).map(<[i64]>::to_vec);
            // A file that changed has no such piece any more.
            match (cut(&whole.input_ids), cut(&whole.labels)) {
                (Some(input_ids), Some(labels)) => Ok(TokenizedExample {
                    input_ids,
                    labels,
                    truncated: true,
                }),
                _ => Err(Error::OutOfRange {
                    start: range.start,
                    end: range.end,
                    tokens,
                }),
            }
        });
        pieces.collect()
    }
}

/// How rows lie in a batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RowLayout {
    /// Row by row, filled up on the right to the longest. Each row must be one sequence.
    Padded {
        /// What fills rows up; never learned, never seen.
        pad_token: u32,
        /// The width is a multiple of it; at least 1.
        multiple_of: usize,
    },
    /// One behind the other as a single row, without padding.
    EndToEnd,
}

/// A batch of rows: tokens, labels at the tokens' own places (a sequence's first is nobody's),
/// positions from 0 in each sequence, and what pads or parts them.
///
/// # Errors
/// [`Error::InvalidOption`] where rows of several sequences are to be padded, or `multiple_of` is 0.
pub fn collate_rows(rows: &[Vec<TokenizedExample>], layout: RowLayout) -> Result<InstructionBatch> {
    let length = |row: &Vec<TokenizedExample>| row.iter().map(|s| s.input_ids.len()).sum::<usize>();
    let lengths = rows.iter().map(length);
    let (count, width) = match layout {
        RowLayout::EndToEnd => (1, lengths.sum()),
        RowLayout::Padded { multiple_of: 0, .. } => {
            return Err(Error::InvalidOption {
                option: "pad_to_multiple_of",
                value: "0".to_owned(),
                expected: "at least 1, which rounds to nothing",
            });
        }
        RowLayout::Padded { multiple_of, .. } => {
            let longest = lengths.max().unwrap_or(0);
            (rows.len(), longest.next_multiple_of(multiple_of))
        }
    };
    let mut batch = InstructionBatch {
        input_ids: Vec::with_capacity(count * width),
        labels: Vec::with_capacity(count * width),
        attention_mask: Vec::new(),
        position_ids: Vec::with_capacity(count * width),
        sequence_lengths: Vec::new(),
        rows: count,
        width,
        tokens: 0,
        sequences: 0,
        label_count: 0,
        state: BatchState::default(),
    };
    for (number, row) in rows.iter().enumerate() {
        for sequence in row.iter().filter(|sequence| !sequence.input_ids.is_empty()) {
            append(&mut batch, sequence);
        }
        if let RowLayout::Padded { pad_token, .. } = layout {
            if row.len() > 1 {
                return Err(Error::InvalidOption {
                    option: "layout",
                    value: "Padded".to_owned(),
                    expected: "RowLayout::EndToEnd for rows of several sequences, which padding cannot part",
                });
            }
            let end = (number + 1) * width;
            batch.attention_mask.resize(batch.input_ids.len(), 1);
            batch.attention_mask.resize(end, 0);
            batch.input_ids.resize(end, i64::from(pad_token));
            batch.labels.resize(end, IGNORE_INDEX);
            // Of no meaning; 0 is inside every model's context.
            batch.position_ids.resize(end, 0);
        }
    }
    if matches!(layout, RowLayout::Padded { .. }) {
        batch.sequence_lengths.clear();
    }
    Ok(batch)
}

fn append(batch: &mut InstructionBatch, sequence: &TokenizedExample) {
    let len = sequence.input_ids.len();
    batch.input_ids.extend_from_slice(&sequence.input_ids);
    // A sequence's first token has nothing to be predicted from.
    batch.labels.push(IGNORE_INDEX);
    let learned = sequence.labels.get(1..).unwrap_or_default();
    batch.labels.extend_from_slice(learned);
    let counted = learned.iter().filter(|&&label| label != IGNORE_INDEX);
    batch.label_count += counted.count();
    batch.position_ids.extend(0..len as i64);
    batch.sequence_lengths.push(len as i64);
    batch.tokens += len;
    batch.sequences += 1;
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::PackingStrategy;

    struct Counting(Vec<usize>);

    impl Dataset for Counting {
        type Item = TokenizedExample;

        fn len(&self) -> usize {
            self.0.len()
        }

        fn get(&self, index: usize) -> Result<TokenizedExample> {
            let input_ids: Vec<i64> = (0..self.0[index] as i64)
                .map(|place| 100 * index as i64 + place)
                .collect();
            Ok(TokenizedExample {
                labels: input_ids.clone(),
                input_ids,
                truncated: false,
            })
        }
    }

    fn rows(strategy: Option<PackingStrategy>) -> Vec<Vec<TokenizedExample>> {
        let lengths = [3, 5, 1];
        let plan = match strategy {
            Some(strategy) => PackPlan::new(&lengths, 4, strategy).unwrap(),
            None => PackPlan::one_each(&lengths, 4).unwrap(),
        };
        let rows = SequenceRows::new(Counting(vec![3, 5, 1]), Arc::new(plan));
        (0..rows.len()).map(|row| rows.get(row).unwrap()).collect()
    }

    #[test]
    fn padded_rows_are_cut_filled_up_and_masked() {
        let layout = RowLayout::Padded {
            pad_token: 7,
            multiple_of: 3,
        };
        let batch = collate_rows(&rows(None), layout).unwrap();
        assert_eq!((batch.rows, batch.width), (3, 6));
        assert_eq!(batch.input_ids[..6], [0, 1, 2, 7, 7, 7]);
        assert_eq!(batch.input_ids[6..12], [100, 101, 102, 103, 7, 7]);
        assert_eq!(batch.labels[6..12], [-100, 101, 102, 103, -100, -100]);
        assert_eq!(batch.attention_mask[6..12], [1, 1, 1, 1, 0, 0]);
        assert_eq!(
            (batch.tokens, batch.sequences, batch.label_count),
            (8, 3, 5)
        );
        assert!(batch.sequence_lengths.is_empty());
    }

    #[test]
    fn packed_rows_lie_end_to_end_and_positions_begin_anew() {
        let packed = rows(Some(PackingStrategy::BfdSplit));
        let batch = collate_rows(&packed, RowLayout::EndToEnd).unwrap();
        // Longest first: the first four of the second, the first beside its last one, the third.
        assert_eq!(batch.input_ids, [100, 101, 102, 103, 0, 1, 2, 104, 200]);
        assert_eq!(batch.position_ids, [0, 1, 2, 3, 0, 1, 2, 0, 0]);
        assert_eq!(batch.sequence_lengths, [4, 3, 1, 1]);
        assert_eq!(batch.labels, [-100, 101, 102, 103, -100, 1, 2, -100, -100]);
        assert_eq!((batch.rows, batch.width, batch.label_count), (1, 9, 5));
        let layout = RowLayout::Padded {
            pad_token: 0,
            multiple_of: 1,
        };
        let error = collate_rows(&packed, layout).unwrap_err().to_string();
        assert!(error.contains("EndToEnd"), "{error}");
    }
}
