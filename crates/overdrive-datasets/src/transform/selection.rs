//! Some of the records of a dataset, in some order.

use std::ops::Range;

use rayon::prelude::*;

use crate::index::{OffsetTable, OffsetsWriter};
use crate::sampling::Permutation;
use crate::{Dataset, Error, Result};

/// Some of the records of a dataset, in some order, of which no list is kept that is longer than two
/// bytes a record.
#[derive(Debug, Clone)]
pub struct Selection<D> {
    dataset: D,
    which: Which,
    len: usize,
}

/// Two parts of a dataset.
#[derive(Debug, Clone)]
pub struct Split<D> {
    /// What is left.
    pub train: Selection<D>,
    /// The share that was asked for.
    pub test: Selection<D>,
}

#[derive(Debug, Clone)]
enum Which {
    /// Every `step`-th record from `start` on.
    Every { start: usize, step: usize },
    /// Places from `start` on of a permutation of all records.
    Shuffled { order: Permutation, start: usize },
    /// Rising numbers.
    Listed(Rising),
}

/// A list of rising numbers, compressed as offsets are.
#[derive(Debug, Clone)]
pub(crate) struct Rising {
    pieces: Vec<u8>,
    directory: Vec<u8>,
    len: usize,
}

/// Makes a [`Rising`] of numbers one by one.
pub(crate) struct RisingWriter(OffsetsWriter<Vec<u8>>);

impl Default for RisingWriter {
    fn default() -> Self {
        Self(OffsetsWriter::new(Vec::new()))
    }
}

impl RisingWriter {
    /// Adds a number, which must not be smaller than the one before.
    pub(crate) fn push(&mut self, number: usize) {
        self.0.push(number as u64).expect(VECTORS_TAKE_ALL);
    }

    pub(crate) fn finish(self) -> Rising {
        let (mut bytes, finished) = self.0.finish().expect(VECTORS_TAKE_ALL);
        let directory = bytes.split_off(finished.pieces_bytes as usize);
        bytes.shrink_to_fit();
        Rising {
            pieces: bytes,
            directory,
            len: finished.count as usize,
        }
    }
}

const VECTORS_TAKE_ALL: &str = "writing to a vector does not fail";

impl Rising {
    pub(crate) fn new(numbers: impl IntoIterator<Item = usize>) -> Self {
        let mut writer = RisingWriter::default();
        for number in numbers {
            writer.push(number);
        }
        writer.finish()
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    pub(crate) fn get(&self, index: usize) -> Option<usize> {
        let table = OffsetTable::new(&self.pieces, &self.directory, self.len);
        table.get(index).map(|number| number as usize)
    }

    #[cfg(test)]
    pub(crate) fn bytes(&self) -> usize {
        self.pieces.len() + self.directory.len()
    }
}

impl<D: Dataset> Selection<D> {
    pub(crate) fn range(dataset: D, range: Range<usize>) -> Self {
        Self {
            dataset,
            which: Which::Every {
                start: range.start,
                step: 1,
            },
            len: range.len(),
        }
    }

    pub(crate) fn shard(dataset: D, index: usize, count: usize) -> Result<Self> {
        if index >= count {
            return Err(Error::InvalidOption {
                option: "index",
                value: format!("{index} of {count} parts"),
                expected: "parts are counted from 0, and there is at least one",
            });
        }
        let len = dataset.len().saturating_sub(index).div_ceil(count);
        Ok(Self {
            dataset,
            which: Which::Every {
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
            which: Which::Shuffled { order, start: 0 },
            len,
        }
    }

    pub(crate) fn split(dataset: D, test_share: f64, seed: u64) -> Result<Split<D>>
    where
        D: Clone,
    {
        if !(0.0..=1.0).contains(&test_share) {
            return Err(Error::InvalidOption {
                option: "test_share",
                value: test_share.to_string(),
                expected: "between 0 and 1",
            });
        }
        let len = dataset.len();
        let test = ((len as f64 * test_share).round() as usize).min(len);
        let order = Permutation::new(len, seed, SPLIT);
        let part = |dataset, start, len| Self {
            dataset,
            which: Which::Shuffled { order, start },
            len,
        };
        Ok(Split {
            test: part(dataset.clone(), 0, test),
            train: part(dataset, test, len - test),
        })
    }

    /// The records at rising places.
    pub(crate) fn listed(dataset: D, places: Rising) -> Self {
        Self {
            dataset,
            len: places.len(),
            which: Which::Listed(places),
        }
    }

    pub(crate) fn filter(dataset: D, keep: impl Fn(&D::Item) -> bool + Sync) -> Result<Self>
    where
        D::Item: Send,
    {
        // Blocks bound what is in memory besides the result, one byte a record of a block.
        const BLOCK: usize = 1 << 20;
        let mut error = None;
        let blocks = (0..dataset.len()).step_by(BLOCK);
        let numbers = blocks.flat_map(|start| {
            let block = start..dataset.len().min(start.saturating_add(BLOCK));
            let kept: Result<Vec<bool>> = match error {
                // The first block that failed was the last one.
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
        let places = Rising::new(numbers);
        match error {
            Some(error) => Err(error),
            None => Ok(Self::listed(dataset, places)),
        }
    }
}

// Permutations of one seed for different ends are different ones.
const SHUFFLE: u64 = 1 << 62;
const SPLIT: u64 = 1 << 63;

impl<D> Selection<D> {
    /// What it is a selection of.
    pub fn dataset(&self) -> &D {
        &self.dataset
    }

    /// Which record of the dataset its record `index` is.
    pub fn place(&self, index: usize) -> Option<usize> {
        if index >= self.len {
            return None;
        }
        match &self.which {
            Which::Every { start, step } => Some(start + index * step),
            Which::Shuffled { order, start } => Some(order.apply(start + index)),
            Which::Listed(places) => places.get(index),
        }
    }
}

impl<D: Dataset> Dataset for Selection<D> {
    type Item = D::Item;

    fn len(&self) -> usize {
        self.len
    }

    fn get(&self, index: usize) -> Result<D::Item> {
        let place = self.place(index).ok_or(Error::NoSuchRecord {
            index,
            len: self.len,
        })?;
        self.dataset.get(place)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_filter_keeps_takes_at_most_two_bytes_a_record() {
        for keep in [1, 2, 5, 100, 1000] {
            let rising = Rising::new((0..1_000_000).filter(|i| i % keep == 0));
            let bytes = rising.bytes() as f64 / rising.len() as f64;
            assert!(bytes <= 2.0, "{bytes} bytes for one in {keep}");
            assert_eq!(
                rising.get(rising.len() - 1),
                Some((rising.len() - 1) * keep)
            );
        }
    }
}
