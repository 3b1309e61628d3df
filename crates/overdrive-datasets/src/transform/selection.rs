//! Selections of a dataset's records.

use std::ops::Range;

use rayon::prelude::*;

use crate::index::{OffsetTable, OffsetsWriter};
use crate::sampling::Permutation;
use crate::{Dataset, Error, Result};
use overdrive_core::{check_at_least, check_option};

/// A selection of the records of a dataset in some order. It takes at most two bytes per record.
#[derive(Debug, Clone)]
pub struct Selection<D> {
    dataset: D,
    indices: Indices,
    len: usize,
}

/// The two selections of a split.
#[derive(Debug, Clone)]
pub struct Split<D> {
    /// The records that are not in the test selection.
    pub train: Selection<D>,
    /// The share of the records that was requested.
    pub test: Selection<D>,
}

/// The indices of a selection's records.
#[derive(Debug, Clone)]
enum Indices {
    /// Every `step`-th record from `start` on.
    Every { start: usize, step: usize },
    /// The positions from `start` on of a permutation of all records.
    Shuffled { order: Permutation, start: usize },
    /// A sorted list.
    Listed(SortedIndices),
}

/// A list of sorted indices, compressed as offsets are.
#[derive(Debug, Clone)]
pub(crate) struct SortedIndices {
    blocks: Vec<u8>,
    directory: Vec<u8>,
    len: usize,
}

/// A writer of [`SortedIndices`].
pub(crate) struct SortedIndicesWriter(OffsetsWriter<Vec<u8>>);

impl Default for SortedIndicesWriter {
    fn default() -> Self {
        Self(OffsetsWriter::new(Vec::new()))
    }
}

impl SortedIndicesWriter {
    /// Appends an index, which must not be smaller than the previous one.
    pub(crate) fn push(&mut self, index: usize) {
        self.0.push(index as u64).expect(VECTOR_WRITE);
    }

    pub(crate) fn finish(self) -> SortedIndices {
        let (mut bytes, finished) = self.0.finish().expect(VECTOR_WRITE);
        let directory = bytes.split_off(finished.blocks_bytes as usize);
        bytes.shrink_to_fit();
        SortedIndices {
            blocks: bytes,
            directory,
            len: finished.count as usize,
        }
    }
}

const VECTOR_WRITE: &str = "writing to a vector does not fail";

impl SortedIndices {
    pub(crate) fn new(numbers: impl IntoIterator<Item = usize>) -> Self {
        let mut writer = SortedIndicesWriter::default();
        for number in numbers {
            writer.push(number);
        }
        writer.finish()
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    pub(crate) fn get(&self, index: usize) -> Option<usize> {
        let table = OffsetTable::new(&self.blocks, &self.directory, self.len);
        table.get(index).map(|number| number as usize)
    }

    #[cfg(test)]
    pub(crate) fn bytes(&self) -> usize {
        self.blocks.len() + self.directory.len()
    }
}

impl<D: Dataset> Selection<D> {
    pub(crate) fn range(dataset: D, range: Range<usize>) -> Self {
        Self {
            dataset,
            indices: Indices::Every {
                start: range.start,
                step: 1,
            },
            len: range.len(),
        }
    }

    pub(crate) fn shard(dataset: D, index: usize, count: usize) -> Result<Self> {
        check_at_least("count", count, 1)?;
        check_option(
            index < count,
            "index",
            index,
            format!("below the number of shards, {count}"),
        )?;
        let len = dataset.len().saturating_sub(index).div_ceil(count);
        Ok(Self {
            dataset,
            indices: Indices::Every {
                start: index,
                step: count,
            },
            len,
        })
    }

    pub(crate) fn shuffle(dataset: D, seed: u64) -> Self {
        let len = dataset.len();
        let order = Permutation::new(len, seed, SHUFFLE);
        Self {
            dataset,
            indices: Indices::Shuffled { order, start: 0 },
            len,
        }
    }

    pub(crate) fn split(dataset: D, test_share: f64, seed: u64) -> Result<Split<D>>
    where
        D: Clone,
    {
        let valid = (0.0..=1.0).contains(&test_share);
        check_option(valid, "test_share", test_share, "from 0 to 1")?;
        let len = dataset.len();
        let test = test_len(len, test_share);
        let order = Permutation::new(len, seed, SPLIT);
        let part = |dataset, start, len| Self {
            dataset,
            indices: Indices::Shuffled { order, start },
            len,
        };
        Ok(Split {
            test: part(dataset.clone(), 0, test),
            train: part(dataset, test, len - test),
        })
    }

    /// Returns the records with these indices.
    pub(crate) fn listed(dataset: D, indices: SortedIndices) -> Self {
        Self {
            dataset,
            len: indices.len(),
            indices: Indices::Listed(indices),
        }
    }

    pub(crate) fn filter(dataset: D, keep: impl Fn(&D::Item) -> bool + Sync) -> Result<Self>
    where
        D::Item: Send,
    {
        // Blocks bound the memory besides the result, one byte per record.
        const BLOCK_RECORDS: usize = 1 << 20;
        let mut error = None;
        let blocks = (0..dataset.len()).step_by(BLOCK_RECORDS);
        let numbers = blocks.flat_map(|start| {
            let block = start..dataset.len().min(start.saturating_add(BLOCK_RECORDS));
            let kept: Result<Vec<bool>> = match error {
                // After an error no further records are read.
                Some(_) => Ok(Vec::new()),
                None => block
                    .into_par_iter()
                    .map(|index| dataset.get(index).map(|record| keep(&record)))
                    .collect(),
            };
            let kept = kept.unwrap_or_else(|failed| {
                error = Some(failed);
                Vec::new()
            });
            let kept = kept.into_iter().enumerate();
            kept.filter_map(move |(at, kept)| kept.then_some(start + at))
        });
        let indices = SortedIndices::new(numbers);
        match error {
            Some(error) => Err(error),
            None => Ok(Self::listed(dataset, indices)),
        }
    }
}

// Shuffles and splits under the same seed use different permutations, and neither uses that of an epoch.
const SHUFFLE: u64 = 1 << 62;
const SPLIT: u64 = 1 << 63;

/// Returns the number of test records for a share of `len` records, rounded to the nearest.
pub(crate) fn test_len(len: usize, share: f64) -> usize {
    ((len as f64 * share).round() as usize).min(len)
}

/// Returns the training records and the `test` test records of a split, each in ascending order: those of
/// [`crate::DatasetExt::split`].
pub(crate) fn split_indices(len: usize, test: usize, seed: u64) -> (Vec<usize>, Vec<usize>) {
    let order = Permutation::new(len, seed, SPLIT);
    let sorted = |positions: std::ops::Range<usize>| {
        let mut records: Vec<usize> = positions.map(|position| order.apply(position)).collect();
        records.sort_unstable();
        records
    };
    (sorted(test..len), sorted(0..test))
}

impl<D> Selection<D> {
    /// Returns the dataset that the records are selected from.
    pub fn dataset(&self) -> &D {
        &self.dataset
    }

    /// Returns the index in the dataset of the selection's record `index`; `None` if there is no such record.
    pub fn source_index(&self, index: usize) -> Option<usize> {
        if index >= self.len {
            return None;
        }
        match &self.indices {
            Indices::Every { start, step } => Some(start + index * step),
            Indices::Shuffled { order, start } => Some(order.apply(start + index)),
            Indices::Listed(indices) => indices.get(index),
        }
    }
}

impl<D: Dataset> Dataset for Selection<D> {
    type Item = D::Item;

    fn len(&self) -> usize {
        self.len
    }

    fn get(&self, index: usize) -> Result<D::Item> {
        let source = self.source_index(index).ok_or(Error::NoSuchRecord {
            index,
            len: self.len,
        })?;
        self.dataset.get(source)
    }

    fn prefetch(&self, indices: &[usize]) {
        let sources = indices.iter().filter_map(|&index| self.source_index(index));
        self.dataset.prefetch(&sources.collect::<Vec<_>>());
    }

    fn check_unchanged(&self) -> Result<()> {
        self.dataset.check_unchanged()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_filtered_record_takes_at_most_two_bytes() {
        for keep in [1, 2, 5, 100, 1000] {
            let sorted = SortedIndices::new((0..1_000_000).filter(|i| i % keep == 0));
            let bytes = sorted.bytes() as f64 / sorted.len() as f64;
            assert!(bytes <= 2.0, "{bytes} bytes for one in {keep}");
            assert_eq!(
                sorted.get(sorted.len() - 1),
                Some((sorted.len() - 1) * keep)
            );
        }
    }
}
