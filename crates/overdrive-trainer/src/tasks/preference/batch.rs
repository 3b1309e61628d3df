use overdrive_datasets::{
    Batch, IGNORE_INDEX, OnDevice, Result, RowLayout, TokenizedExample, collate,
};
use tch::{Device, Tensor};

use crate::run::MicroBatch;

/// A prompt with its chosen and its rejected answer. The labels of the prompt are [`IGNORE_INDEX`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PreferenceExample {
    /// The prompt and the chosen answer.
    pub chosen: TokenizedExample,
    /// The prompt and the rejected answer.
    pub rejected: TokenizedExample,
}

/// B preference pairs as one batch of 2 B rows, so that one forward pass computes both answers (TRL's
/// `DataCollatorForPreference`). T is the width, N the number of labels.
#[derive(Debug)]
#[non_exhaustive]
pub struct PreferenceBatch {
    /// The rows (2 B, T): the chosen answers, and then the rejected ones in the same order.
    pub rows: Batch,
    /// The positions that predict a label, (N), Int64: indices into the rows as one sequence of 2 B · T positions. They are
    /// made on the host, so that nothing is read from the device.
    pub positions: Tensor,
    /// The labels that they predict, (N), Int64.
    pub targets: Tensor,
    /// The number of labels of each row, (2 B), Float.
    pub label_counts: Tensor,
    /// The number of pairs, B.
    pub pairs: usize,
}

impl PreferenceBatch {
    fn map(
        self,
        rows: impl Fn(Batch) -> Result<Batch>,
        tensor: impl Fn(Tensor) -> Result<Tensor>,
    ) -> Result<Self> {
        Ok(Self {
            rows: rows(self.rows)?,
            positions: tensor(self.positions)?,
            targets: tensor(self.targets)?,
            label_counts: tensor(self.label_counts)?,
            pairs: self.pairs,
        })
    }
}

impl OnDevice for PreferenceBatch {
    fn pinned(self) -> Result<Self> {
        self.map(OnDevice::pinned, OnDevice::pinned)
    }

    fn on_device(self, device: Device, non_blocking: bool) -> Result<Self> {
        self.map(
            |rows| rows.on_device(device, non_blocking),
            |tensor| tensor.on_device(device, non_blocking),
        )
    }
}

/// An example is a pair, and the loss is a mean over pairs.
impl MicroBatch for PreferenceBatch {
    fn examples(&self) -> usize {
        self.pairs
    }

    fn tokens(&self) -> usize {
        self.rows.tokens
    }

    fn padded_tokens(&self) -> usize {
        self.rows.padded_tokens()
    }
}

/// Collates pairs into a batch, padded on the right to the longest row and to a multiple of `multiple_of`.
///
/// ```
/// use overdrive_datasets::TokenizedExample;
/// use overdrive_trainer::{PreferenceExample, collate_preferences};
/// use tch::Tensor;
///
/// let row = |input_ids: &[i64], labels: &[i64]| TokenizedExample {
///     input_ids: input_ids.to_vec(),
///     labels: labels.to_vec(),
///     truncated: false,
/// };
/// let pair = PreferenceExample {
///     chosen: row(&[1, 2, 3, 4], &[-100, -100, 3, 4]),
///     rejected: row(&[1, 2, 5], &[-100, -100, 5]),
/// };
/// let batch = collate_preferences(&[pair], 0, 1)?;
/// assert_eq!(batch.rows.input_ids, Tensor::from_slice2(&[[1_i64, 2, 3, 4], [1, 2, 5, 0]]));
/// assert_eq!(batch.positions, Tensor::from_slice(&[1_i64, 2, 5]));
/// assert_eq!(batch.targets, Tensor::from_slice(&[3_i64, 4, 5]));
/// # Ok::<(), overdrive_datasets::Error>(())
/// ```
///
/// # Errors
/// As [`collate`].
pub fn collate_preferences(
    pairs: &[PreferenceExample],
    pad_token: u32,
    multiple_of: usize,
) -> Result<PreferenceBatch> {
    let chosen = pairs.iter().map(|pair| &pair.chosen);
    let rejected = pairs.iter().map(|pair| &pair.rejected);
    let rows: Vec<&TokenizedExample> = chosen.chain(rejected).collect();
    let slices: Vec<&[TokenizedExample]> = rows.iter().map(|row| (*row).as_ref()).collect();
    let layout = RowLayout::Padded {
        pad_token,
        multiple_of,
    };
    let batch = collate(&slices, layout)?;
    let width = batch.input_ids.size().last().copied().unwrap_or(0);
    let mut positions = Vec::with_capacity(batch.label_count);
    let mut targets = Vec::with_capacity(batch.label_count);
    let mut label_counts = Vec::with_capacity(rows.len());
    for (number, row) in (0..).zip(rows) {
        let before = targets.len();
        // A label is predicted by the position before it; no position predicts the first label.
        for (position, &label) in (number * width..).zip(row.labels.iter().skip(1)) {
            if label != IGNORE_INDEX {
                positions.push(position);
                targets.push(label);
            }
        }
        label_counts.push((targets.len() - before) as f32);
    }
    Ok(PreferenceBatch {
        rows: batch,
        positions: Tensor::f_from_slice(&positions)?,
        targets: Tensor::f_from_slice(&targets)?,
        label_counts: Tensor::f_from_slice(&label_counts)?,
        pairs: pairs.len(),
    })
}
