//! The rows of a packing plan as a dataset.

use std::collections::BTreeSet;
use std::sync::Arc;

use crate::{Dataset, Error, PackPlan, Result, TokenizedExample};

/// A dataset of the rows of a [`PackPlan`] over tokenized sequences. A row has one sequence, or all that are packed
/// into it. `collate` makes batches of them in a [`crate::DataLoader`].
#[derive(Debug, Clone)]
pub struct SequenceRows<D> {
    sequences: D,
    plan: Arc<PackPlan>,
}

impl<D> SequenceRows<D> {
    /// Returns the rows of `sequences`, from whose lengths `plan` was made.
    pub fn new(sequences: D, plan: Arc<PackPlan>) -> Self {
        Self { sequences, plan }
    }

    /// Returns the plan of the rows.
    pub fn plan(&self) -> &Arc<PackPlan> {
        &self.plan
    }
}

impl<D: Dataset<Item = TokenizedExample>> Dataset for SequenceRows<D> {
    /// The segments of sequences that lie in the row.
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
        let segments = self.plan.row(index).iter().map(|segment| {
            let whole = self.sequences.get(segment.sequence as usize)?;
            let range = segment.start as usize..(segment.start + segment.len) as usize;
            if range == (0..whole.input_ids.len()) && range.len() == whole.labels.len() {
                return Ok(whole);
            }
            let tokens = whole.input_ids.len();
            let cut = |numbers: &[i64]| numbers.get(range.clone()).map(<[i64]>::to_vec);
            // The segment may not exist if the file has changed since the plan was made.
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
        segments.collect()
    }

    fn prefetch(&self, indices: &[usize]) {
        let rows = indices.iter().filter(|&&row| row < self.plan.len());
        let sequences: BTreeSet<usize> = rows
            .flat_map(|&row| self.plan.row(row))
            .map(|segment| segment.sequence as usize)
            .collect();
        self.sequences
            .prefetch(&sequences.into_iter().collect::<Vec<_>>());
    }

    fn check_unchanged(&self) -> Result<()> {
        self.sequences.check_unchanged()
    }
}

#[cfg(test)]
#[cfg(feature = "tch")]
mod tests {
    use tch::Tensor;

    use super::*;
    use crate::{PackingStrategy, RowLayout, collate};

    struct Counting(Vec<usize>);

    impl Dataset for Counting {
        type Item = TokenizedExample;

        fn len(&self) -> usize {
            self.0.len()
        }

        fn get(&self, index: usize) -> Result<TokenizedExample> {
            let first = 100 * index as i64;
            let input_ids: Vec<i64> = (first..first + self.0[index] as i64).collect();
            Ok(TokenizedExample::from(input_ids))
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

    fn numbers(tensor: &Tensor) -> Vec<i64> {
        Vec::try_from(tensor.view([-1])).unwrap()
    }

    #[test]
    fn padded_rows_are_cut_filled_up_and_masked() {
        let layout = RowLayout::Padded {
            pad_token: 7,
            multiple_of: 3,
        };
        let batch = collate(&rows(None), layout).unwrap();
        assert_eq!(batch.input_ids.size(), [3, 6]);
        let (input_ids, labels) = (numbers(&batch.input_ids), numbers(&batch.labels));
        assert_eq!(input_ids[..6], [0, 1, 2, 7, 7, 7]);
        assert_eq!(input_ids[6..12], [100, 101, 102, 103, 7, 7]);
        assert_eq!(labels[6..12], [-100, 101, 102, 103, -100, -100]);
        let mask = numbers(batch.attention_mask.as_ref().unwrap());
        assert_eq!(mask[6..12], [1, 1, 1, 1, 0, 0]);
        assert_eq!(
            (batch.tokens, batch.sequences, batch.label_count),
            (8, 3, 5)
        );
        assert!(batch.sequence_lengths.is_empty());
    }

    #[test]
    fn packed_rows_are_concatenated_and_positions_start_again() {
        let packed = rows(Some(PackingStrategy::BfdSplit));
        let batch = collate(&packed, RowLayout::EndToEnd).unwrap();
        // Longest first: four tokens of the second sequence, its last token with the first
        // sequence, then the third.
        assert_eq!(
            numbers(&batch.input_ids),
            [100, 101, 102, 103, 0, 1, 2, 104, 200]
        );
        let positions = numbers(batch.position_ids.as_ref().unwrap());
        assert_eq!(positions, [0, 1, 2, 3, 0, 1, 2, 0, 0]);
        assert_eq!(batch.sequence_lengths, [4, 3, 1, 1]);
        assert_eq!(
            numbers(&batch.labels),
            [-100, 101, 102, 103, -100, 1, 2, -100, -100]
        );
        assert_eq!(batch.input_ids.size(), [1, 9]);
        assert_eq!(batch.label_count, 5);
        let error = collate(&packed, RowLayout::default())
            .unwrap_err()
            .to_string();
        assert!(error.contains("EndToEnd"), "{error}");
    }
}
