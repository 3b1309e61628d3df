//! The micro-batches of one optimizer step.

use std::iter::Fuse;
use std::num::NonZeroUsize;

use tch::Tensor;

use crate::Result;

/// The token counts of the micro-batches of one optimizer step, known before the first of them is
/// run.
///
/// A token is a target that enters the loss; see [`count_tokens`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Window {
    token_counts: Vec<u64>,
}

impl Window {
    /// A window of micro-batches with these token counts.
    pub fn new(token_counts: impl IntoIterator<Item = u64>) -> Self {
        Self {
            token_counts: token_counts.into_iter().collect(),
        }
    }

    /// The tokens of all its micro-batches.
    #[must_use]
    pub fn total_tokens(&self) -> u64 {
        self.token_counts.iter().sum()
    }

    /// The tokens of each micro-batch.
    #[must_use]
    pub fn token_counts(&self) -> &[u64] {
        &self.token_counts
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
