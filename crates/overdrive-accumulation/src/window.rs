//! The micro-batches of one optimizer step.

use std::iter::Fuse;
use std::num::NonZeroUsize;

use tch::Tensor;

use crate::Result;

/// The counts by which the losses of one optimizer step are divided, known before its first micro-batch is
/// run.
///
/// For a language model a count is the number of tokens that enter the loss; see [`count_tokens`]. A loss of
/// several terms has a count for each term.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Window {
    counts: Vec<Vec<u64>>,
}

impl Window {
    /// A window of micro-batches with these token counts.
    pub fn new(token_counts: impl IntoIterator<Item = u64>) -> Self {
        Self::of_terms(token_counts.into_iter().map(|count| [count]))
    }

    /// A window of so many micro-batches that hand over means, each with the same weight.
    pub fn of_means(micro_batches: usize) -> Self {
        Self::new(std::iter::repeat_n(1, micro_batches))
    }

    /// A window of micro-batches whose losses have several terms: for each micro-batch the count of each
    /// term, in the order in which [`backward_terms`](crate::GradientAccumulator::backward_terms) gets them.
    pub fn of_terms<C: Into<Vec<u64>>>(counts: impl IntoIterator<Item = C>) -> Self {
        Self {
            counts: counts.into_iter().map(Into::into).collect(),
        }
    }

    /// The counts of each micro-batch, term by term.
    #[must_use]
    pub fn counts(&self) -> &[Vec<u64>] {
        &self.counts
    }

    /// The number of terms of its losses.
    pub(crate) fn terms(&self) -> usize {
        self.counts.first().map_or(1, Vec::len)
    }

    /// The count of each term over all micro-batches.
    pub(crate) fn totals(&self) -> Vec<u64> {
        let total = |term: usize| self.counts.iter().filter_map(|c| c.get(term)).sum();
        (0..self.terms()).map(total).collect()
    }
}

/// One term of the loss of a micro-batch.
#[derive(Debug, Clone, Copy)]
pub struct LossTerm<'a> {
    /// The sum of the term over the micro-batch, one number.
    pub sum: &'a Tensor,
    /// The count that the sums of the window are divided by, all together: tokens, pairs, experts.
    pub count: u64,
}

impl<'a> LossTerm<'a> {
    /// A sum over `count` things.
    pub fn sum(sum: &'a Tensor, count: u64) -> Self {
        Self { sum, count }
    }

    /// A mean: each micro-batch of the window has the same weight.
    pub fn mean(mean: &'a Tensor) -> Self {
        Self::sum(mean, 1)
    }
}

/// Groups micro-batches into windows of `gradient_accumulation_steps`. The last window is as short
/// as the data leaves it, and is stepped all the same (Accelerate's `sync_with_dataloader`).
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

/// How many targets enter the loss: elements of `labels` other than `ignore_index` (-100 in
/// libtorch's cross entropy). Waits for the device that the labels are on.
///
/// Count what the loss sees: where the model shifts labels by one, the shifted ones.
///
/// # Errors
/// When libtorch refuses.
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
    Ok(u64::try_from(count).unwrap_or_default())
}
