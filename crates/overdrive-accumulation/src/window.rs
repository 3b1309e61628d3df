//! The micro-batches of one optimizer step.

use std::iter::Fuse;
use std::num::NonZeroUsize;

use tch::Tensor;

use crate::Result;
use crate::accumulator::sum_of_counts;

/// The counts by which the losses of one optimizer step are divided. They are known before its first
/// micro-batch runs.
///
/// For a language model a count is the number of tokens that contribute to the loss; see
/// [`count_tokens`]. A loss of several terms has a count for each term.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Window {
    counts: Vec<Vec<u64>>,
}

impl Window {
    /// Returns a window of micro-batches with these token counts.
    pub fn new(token_counts: impl IntoIterator<Item = u64>) -> Self {
        Self::of_terms(token_counts.into_iter().map(|count| [count]))
    }

    /// Returns a window of micro-batches whose losses are means, all with the same weight.
    pub fn of_means(micro_batches: usize) -> Self {
        Self::new(std::iter::repeat_n(1, micro_batches))
    }

    /// Returns a window of micro-batches whose losses have several terms. `counts` holds, for each
    /// micro-batch, the count of each term, in the order of
    /// [`backward_terms`](crate::GradientAccumulator::backward_terms).
    pub fn of_terms<C: Into<Vec<u64>>>(counts: impl IntoIterator<Item = C>) -> Self {
        Self {
            counts: counts.into_iter().map(Into::into).collect(),
        }
    }

    /// Returns the counts of each micro-batch, term by term.
    #[must_use]
    pub fn counts(&self) -> &[Vec<u64>] {
        &self.counts
    }

    /// Returns the number of terms of the losses.
    pub(crate) fn terms(&self) -> usize {
        // `GradientAccumulator::open` has checked that all micro-batches have as many.
        self.counts.first().map_or(1, Vec::len)
    }

    /// Returns the count of each term over all micro-batches.
    pub(crate) fn totals(&self) -> Result<Vec<u64>> {
        let counts = |term: usize| self.counts.iter().filter_map(move |c| c.get(term).copied());
        let totals = (0..self.terms()).map(|term| sum_of_counts(counts(term)));
        totals.collect()
    }
}

/// Groups micro-batches into windows of `gradient_accumulation_steps`. The last window contains the remaining
/// micro-batches and may be shorter; it is stepped too (Accelerate's `sync_with_dataloader`).
///
/// ```
/// use overdrive_accumulation::windows;
///
/// let two = std::num::NonZeroUsize::new(2).unwrap();
/// let grouped: Vec<Vec<i32>> = windows(1..=5, two).collect();
/// assert_eq!(grouped, [vec![1, 2], vec![3, 4], vec![5]]);
/// ```
pub fn windows<I: IntoIterator>(
    micro_batches: I,
    gradient_accumulation_steps: NonZeroUsize,
) -> Windows<I::IntoIter> {
    Windows {
        // Fused, because `next` is called again after the last, short window.
        micro_batches: micro_batches.into_iter().fuse(),
        steps: gradient_accumulation_steps,
    }
}

/// The iterator of [`windows`].
#[derive(Debug, Clone)]
pub struct Windows<I> {
    micro_batches: Fuse<I>,
    steps: NonZeroUsize,
}

impl<I: Iterator> Iterator for Windows<I> {
    type Item = Vec<I::Item>;

    fn next(&mut self) -> Option<Self::Item> {
        let window: Vec<_> = self.micro_batches.by_ref().take(self.steps.get()).collect();
        (!window.is_empty()).then_some(window)
    }
}

/// Returns the number of targets that contribute to the loss: the elements of `labels` other than
/// `ignore_index` ([`overdrive_core::IGNORE_INDEX`], -100, in libtorch's cross entropy). Synchronizes
/// with the device of the labels.
///
/// If the model shifts the labels by one, count the shifted labels.
///
/// # Errors
/// [`crate::Error::Tch`] with libtorch's error.
///
/// ```
/// use overdrive_accumulation::count_tokens;
///
/// let labels = tch::Tensor::from_slice(&[5i64, -100, 7]);
/// assert_eq!(count_tokens(&labels, -100)?, 2);
/// # Ok::<(), overdrive_accumulation::Error>(())
/// ```
pub fn count_tokens(labels: &Tensor, ignore_index: i64) -> Result<u64> {
    let count = labels
        .f_ne(ignore_index)?
        .f_sum(tch::Kind::Int64)?
        .f_int64_value(&[])?;
    // A count is never negative.
    Ok(u64::try_from(count).unwrap_or_default())
}
