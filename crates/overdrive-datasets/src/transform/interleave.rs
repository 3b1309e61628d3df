//! Records of several datasets, mixed by weights.

use crate::sampling::Permutation;
use crate::{Dataset, Error, Result};

/// When a mixture ends: `stopping_strategy` of `datasets`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Exhausted {
    /// When the first of its datasets would have to give a record again: no record comes twice.
    #[default]
    First,
    /// When each of its datasets has given all its records; the others begin anew until then.
    All,
}

/// Records of several datasets in a random mixture: the share of each is its weight, in every part of
/// the mixture.
///
/// Each 16,384 places in a row have the same number of records of each dataset, in an order that is
/// drawn once under the seed; so weights are rounded to 1/16,384, and which record is at a place is
/// computed without those before it. The records of each dataset come in their order, again from the
/// first one where they are used up; shuffle them first ([`crate::DatasetExt::shuffle`]) for another.
///
/// ```
/// use overdrive_datasets::{Dataset, Exhausted, Interleave, TextLines, TextOptions};
/// # let dir = tempfile::tempdir().unwrap();
/// # let open = |name: &str, count: usize| {
/// #     std::fs::write(dir.path().join(name), format!("{name}\n").repeat(count)).unwrap();
/// #     TextLines::open([dir.path().join(name)], &TextOptions::default())
/// # };
/// let (code, prose) = (open("code", 5000)?, open("prose", 5000)?);
/// let mixture = Interleave::new(vec![code, prose], &[0.8, 0.2], 42, Exhausted::First)?;
/// let code = (0..1000).filter(|&i| mixture.get(i).unwrap() == "code").count();
/// assert!((700..900).contains(&code));
/// # Ok::<(), overdrive_datasets::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct Interleave<D> {
    datasets: Vec<D>,
    /// The dataset at each place of the pattern, and how many records of it come before in it.
    pattern: Vec<(u32, u32)>,
    /// How many places of the pattern each dataset has.
    counts: Vec<usize>,
    len: usize,
}

const PATTERN: usize = 1 << 14;

impl<D: Dataset> Interleave<D> {
    /// A mixture of `datasets`, each with its weight; weights need not add up to 1.
    ///
    /// # Errors
    /// When there is no dataset or an empty one; when weights are not as many as datasets, or one is
    /// not finite or is less than 1/16,384 of their sum.
    pub fn new(datasets: Vec<D>, weights: &[f64], seed: u64, until: Exhausted) -> Result<Self> {
        let invalid = |option, value: String, expected| {
            Err(Error::InvalidOption {
                option,
                value,
                expected,
            })
        };
        let empty = datasets.iter().position(|dataset| dataset.is_empty());
        if datasets.is_empty() || empty.is_some() {
            let value = empty.map_or("none".to_owned(), |at| {
                format!("number {at}, which is empty")
            });
            return invalid("datasets", value, "at least one dataset, each with records");
        }
        let sum: f64 = weights.iter().sum();
        let is_weight = |weight: &f64| sum.is_finite() && *weight >= sum / PATTERN as f64;
        if weights.len() != datasets.len() || sum <= 0.0 || !weights.iter().all(is_weight) {
            let expected = "one finite weight for each dataset, at least 1/16384 of their sum";
            return invalid("weights", format!("{weights:?}"), expected);
        }
        let counts = counts(weights, sum);
        let pattern = pattern(&counts, seed);
        let ends = datasets.iter().enumerate().map(|(number, dataset)| {
            // The place of its last record, and one more.
            let last = dataset.len() - 1;
            let (block, rank) = (last / counts[number], last % counts[number]);
            let slot = (number as u32, rank as u32);
            let at = pattern.iter().position(|&other| other == slot);
            block * PATTERN + at.unwrap_or(0) + 1
        });
        let len = match until {
            Exhausted::First => ends.min(),
            Exhausted::All => ends.max(),
        };
        Ok(Self {
            len: len.unwrap_or(0),
            datasets,
            pattern,
            counts,
        })
    }

    /// The dataset at `place`, counted from 0, and which of its records is there.
    pub fn source(&self, place: usize) -> (usize, usize) {
        let (number, before) = self.pattern[place % PATTERN];
        let number = number as usize;
        let record = place / PATTERN * self.counts[number] + before as usize;
        (number, record % self.datasets[number].len())
    }
}

impl<D: Dataset> Dataset for Interleave<D> {
    type Item = D::Item;

    fn len(&self) -> usize {
        self.len
    }

    fn get(&self, index: usize) -> Result<D::Item> {
        if index >= self.len {
            return Err(Error::NoSuchRecord {
                index,
                len: self.len,
            });
        }
        let (number, record) = self.source(index);
        self.datasets[number].get(record)
    }
}

/// How many places of the pattern each weight gets: its share rounded down, and what is left over one
/// by one to the largest remainders.
fn counts(weights: &[f64], sum: f64) -> Vec<usize> {
    let shares: Vec<f64> = weights
        .iter()
        .map(|weight| weight / sum * PATTERN as f64)
        .collect();
    let mut counts: Vec<usize> = shares
        .iter()
        .map(|share| (*share as usize).max(1))
        .collect();
    let mut by_remainder: Vec<usize> = (0..shares.len()).collect();
    by_remainder.sort_by(|&a, &b| shares[b].fract().total_cmp(&shares[a].fract()));
    let total: usize = counts.iter().sum();
    for number in by_remainder
        .iter()
        .cycle()
        .take(PATTERN.saturating_sub(total))
    {
        counts[*number] += 1;
    }
    // Shares of exactly one that were computed a little smaller make one too many.
    for _ in PATTERN..total {
        if let Some(largest) = counts.iter_mut().max() {
            *largest -= 1;
        }
    }
    counts
}

fn pattern(counts: &[usize], seed: u64) -> Vec<(u32, u32)> {
    let numbers: Vec<u32> = (0..)
        .zip(counts)
        .flat_map(|(number, &count)| std::iter::repeat_n(number, count))
        .collect();
    let order = Permutation::new(PATTERN, seed, 0);
    let mut given = vec![0; counts.len()];
    (0..PATTERN)
        .map(|place| {
            let number = numbers[order.apply(place)];
            let before = given[number as usize];
            given[number as usize] += 1;
            (number, before)
        })
        .collect()
}
