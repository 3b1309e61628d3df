//! The mixture of several datasets by weights.

use crate::sampling::{MIN_SHARE, WeightPattern};
use crate::{Dataset, Error, Result};
use overdrive_core::check_option;

/// The end of a mixture: `stopping_strategy` of `datasets`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Exhausted {
    /// The mixture ends when the first dataset is exhausted: no record is repeated. The default.
    #[default]
    First,
    /// The mixture ends when all datasets are exhausted; the others start again until then.
    All,
}

/// A random mixture of the records of several datasets, in which the share of each dataset is its weight, in every
/// section of the mixture.
///
/// Each 16,384 consecutive positions have the same number of records of each dataset, in an order that is drawn once
/// under the seed. So weights are rounded to 1/16,384, and the record at a position is computed without those before
/// it. The records of each dataset come in their order, and start again when the dataset is exhausted; shuffle the
/// datasets first ([`crate::DatasetExt::shuffle`]) for a random order.
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
    pattern: WeightPattern,
    len: usize,
}

impl<D: Dataset> Interleave<D> {
    /// Returns a mixture of `datasets` by weights, which need not sum to 1.
    ///
    /// # Errors
    /// Returns an error if there is no dataset or an empty one, if the number of weights is not that of the datasets,
    /// or if a weight is not finite or is less than 1/16,384 of their sum.
    pub fn new(datasets: Vec<D>, weights: &[f64], seed: u64, until: Exhausted) -> Result<Self> {
        let empty = datasets.iter().position(|dataset| dataset.is_empty());
        let value = match empty {
            Some(number) => format!("a list whose dataset {number} is empty"),
            None => format!("a list of {}", datasets.len()),
        };
        check_option(
            !datasets.is_empty() && empty.is_none(),
            "datasets",
            value,
            "at least one dataset, each with records",
        )?;
        let sum: f64 = weights.iter().sum();
        let is_weight = |weight: &f64| sum.is_finite() && *weight >= sum * MIN_SHARE;
        check_option(
            weights.len() == datasets.len() && sum > 0.0 && weights.iter().all(is_weight),
            "weights",
            format!("{weights:?}"),
            "one finite weight for each dataset, at least 1/16384 of their sum",
        )?;
        let pattern = WeightPattern::new(weights, seed);
        let ends = datasets
            .iter()
            .enumerate()
            // The end of a dataset is one past the position of its last record.
            .map(|(number, dataset)| pattern.position(number, dataset.len() - 1) + 1);
        let len = match until {
            Exhausted::First => ends.min(),
            Exhausted::All => ends.max(),
        };
        Ok(Self {
            len: len.unwrap_or(0),
            datasets,
            pattern,
        })
    }

    /// Returns the index of the dataset at `position`, counted from 0, and the index of its record.
    pub fn source(&self, position: usize) -> (usize, usize) {
        let (number, record) = self.pattern.source(position);
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

    fn prefetch(&self, indices: &[usize]) {
        let mut of_each = vec![Vec::new(); self.datasets.len()];
        for &index in indices.iter().filter(|&&index| index < self.len) {
            let (number, record) = self.source(index);
            of_each[number].push(record);
        }
        for (dataset, records) in self.datasets.iter().zip(of_each) {
            dataset.prefetch(&records);
        }
    }

    fn check_unchanged(&self) -> Result<()> {
        self.datasets.iter().try_for_each(Dataset::check_unchanged)
    }
}
