//! Pairs of a source and a target as batches for an encoder-decoder model.

use overdrive_core::{check_option, check_positive};
use tch::Tensor;

use super::device_loader::on_device_by_map;
use crate::{IGNORE_INDEX, Result};

/// A source and its target.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Seq2SeqExample {
    /// The tokens that the encoder reads, end of sequence included.
    pub input_ids: Vec<i64>,
    /// The labels of the decoder, end of sequence included; [`IGNORE_INDEX`] for tokens that do not enter the loss.
    /// The first token enters it too, because the decoder begins with a start token.
    pub labels: Vec<i64>,
}

/// The padding of a [`Seq2SeqBatch`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Seq2SeqPadding {
    /// The token that pads sources; default 0.
    pub pad_token: i64,
    /// The widths of sources and of labels are rounded up to a multiple of it (`pad_to_multiple_of`); default 1.
    pub multiple_of: usize,
}

impl Default for Seq2SeqPadding {
    fn default() -> Self {
        Self {
            pad_token: 0,
            multiple_of: 1,
        }
    }
}

/// Pairs as tensors, made by [`collate_seq2seq`]. B is the number of pairs, S and T are the widths.
#[derive(Debug)]
#[non_exhaustive]
pub struct Seq2SeqBatch {
    /// The sources, (B, S), Int64; padding is on the right.
    pub input_ids: Tensor,
    /// The attention mask of the sources, (B, S), Int64: 1 for a token, 0 for padding. `None` if no source is padded.
    pub attention_mask: Option<Tensor>,
    /// The labels, (B, T), Int64, padded on the right with [`IGNORE_INDEX`].
    pub labels: Tensor,
    /// The number of labels that enter the loss.
    pub label_count: usize,
    /// The smallest and the largest id among the tokens, the labels that enter the loss and the padding token.
    id_range: (i64, i64),
}

impl Seq2SeqBatch {
    /// Checks that all tokens and labels are ids of a vocabulary of `vocab_size` tokens, as
    /// [`Batch::check_ids`](crate::Batch::check_ids) does.
    ///
    /// # Errors
    /// [`crate::Error::Common`] with the id and the remedy.
    pub fn check_ids(&self, vocab_size: i64) -> Result<()> {
        super::batch::check_id_range(self.id_range, vocab_size)
    }

    fn map_tensors(self, change: impl Fn(Tensor) -> Result<Tensor>) -> Result<Self> {
        Ok(Self {
            input_ids: change(self.input_ids)?,
            attention_mask: self.attention_mask.map(&change).transpose()?,
            labels: change(self.labels)?,
            ..self
        })
    }
}

on_device_by_map!(Seq2SeqBatch);

/// Collates pairs into a batch by the rules of transformers' `DataCollatorForSeq2Seq`: sources are padded to the
/// longest with the padding token, labels to the longest with [`IGNORE_INDEX`].
///
/// ```
/// use overdrive_datasets::{Seq2SeqExample, Seq2SeqPadding, collate_seq2seq};
/// use tch::Tensor;
///
/// let pair = |input_ids: &[i64], labels: &[i64]| Seq2SeqExample {
///     input_ids: input_ids.to_vec(),
///     labels: labels.to_vec(),
/// };
/// let rows = [pair(&[5, 6, 1], &[7, 1]), pair(&[8, 1], &[9, 4, 3, 1])];
/// let batch = collate_seq2seq(&rows, Seq2SeqPadding::default())?;
/// assert_eq!(batch.input_ids, Tensor::from_slice2(&[[5_i64, 6, 1], [8, 1, 0]]));
/// assert_eq!(batch.labels, Tensor::from_slice2(&[[7_i64, 1, -100, -100], [9, 4, 3, 1]]));
/// assert_eq!(batch.label_count, 6);
/// # Ok::<(), overdrive_datasets::Error>(())
/// ```
///
/// # Errors
/// [`Error::Common`](crate::Error::Common) if there is no pair, a source or its labels are empty, or `multiple_of` is
/// 0; an error of libtorch if there is no memory for the tensors.
pub fn collate_seq2seq(rows: &[Seq2SeqExample], padding: Seq2SeqPadding) -> Result<Seq2SeqBatch> {
    check_positive("pad_to_multiple_of", padding.multiple_of)?;
    check_option(!rows.is_empty(), "rows", "empty", "at least one pair")?;
    for (number, row) in rows.iter().enumerate() {
        let empty = row.input_ids.is_empty() || row.labels.is_empty();
        let expected = "a source and labels of at least one token; add the end-of-sequence token";
        check_option(
            !empty,
            "a pair of a batch",
            format!("empty (row {number})"),
            expected,
        )?;
    }
    let sources: Vec<&[i64]> = rows.iter().map(|row| row.input_ids.as_slice()).collect();
    let labels: Vec<&[i64]> = rows.iter().map(|row| row.labels.as_slice()).collect();
    let counted = || {
        labels
            .iter()
            .copied()
            .flatten()
            .filter(|&&label| label != IGNORE_INDEX)
    };
    let ids = sources.iter().copied().flatten().chain(counted());
    let mut id_range = ids.fold((0, 0), |(least, largest), &id| {
        (id.min(least), id.max(largest))
    });
    let lengths = sources.iter().map(|source| source.len());
    let attention_mask = mask_of(lengths, padding.multiple_of)?;
    if attention_mask.is_some() {
        let (least, largest) = id_range;
        id_range = (least.min(padding.pad_token), largest.max(padding.pad_token));
    }
    Ok(Seq2SeqBatch {
        input_ids: padded_rows(&sources, padding.pad_token, padding.multiple_of)?,
        attention_mask,
        labels: padded_rows(&labels, IGNORE_INDEX, padding.multiple_of)?,
        label_count: counted().count(),
        id_range,
    })
}

fn width(rows: &[&[i64]], multiple_of: usize) -> usize {
    let longest = rows.iter().map(|row| row.len()).max().unwrap_or(0);
    longest.next_multiple_of(multiple_of)
}

/// Returns the rows as a tensor, padded on the right.
pub(super) fn padded_rows(rows: &[&[i64]], pad: i64, multiple_of: usize) -> Result<Tensor> {
    let width = width(rows, multiple_of);
    let mut values = Vec::with_capacity(rows.len() * width);
    for (number, row) in rows.iter().enumerate() {
        values.extend_from_slice(row);
        values.resize((number + 1) * width, pad);
    }
    Ok(Tensor::f_from_slice(&values)?.f_view([rows.len() as i64, width as i64])?)
}

/// Returns the attention mask of rows of these lengths: 1 for an element, 0 for padding on the right. `None` if no
/// row is padded.
pub(super) fn mask_of(
    lengths: impl Iterator<Item = usize>,
    multiple_of: usize,
) -> Result<Option<Tensor>> {
    let ones: Vec<Vec<i64>> = lengths.map(|length| vec![1; length]).collect();
    let ones: Vec<&[i64]> = ones.iter().map(Vec::as_slice).collect();
    let width = width(&ones, multiple_of);
    let is_padded = ones.iter().any(|row| row.len() < width);
    is_padded
        .then(|| padded_rows(&ones, 0, multiple_of))
        .transpose()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pair(source: usize, target: usize) -> Seq2SeqExample {
        Seq2SeqExample {
            input_ids: vec![5; source],
            labels: vec![6; target],
        }
    }

    #[test]
    fn widths_are_rounded_up_apart_and_full_rows_have_no_mask() {
        let padding = Seq2SeqPadding {
            pad_token: 3,
            multiple_of: 4,
        };
        let batch = collate_seq2seq(&[pair(5, 2), pair(1, 3)], padding).unwrap();
        assert_eq!(
            (batch.input_ids.size(), batch.labels.size()),
            (vec![2, 8], vec![2, 4])
        );
        let mask = batch.attention_mask.unwrap();
        assert_eq!(
            Vec::<i64>::try_from(mask.get(1)).unwrap(),
            [1, 0, 0, 0, 0, 0, 0, 0]
        );
        assert_eq!(
            Vec::<i64>::try_from(batch.input_ids.get(1)).unwrap(),
            [5, 3, 3, 3, 3, 3, 3, 3]
        );
        let full = collate_seq2seq(&[pair(4, 1), pair(4, 4)], padding).unwrap();
        assert!(full.attention_mask.is_none());
    }

    #[test]
    fn ignored_labels_do_not_count_and_ids_outside_of_the_vocabulary_are_found() {
        let mut row = pair(2, 3);
        row.labels[1] = IGNORE_INDEX;
        let batch = collate_seq2seq(std::slice::from_ref(&row), Seq2SeqPadding::default()).unwrap();
        assert_eq!(batch.label_count, 2);
        batch.check_ids(7).unwrap();
        assert!(batch.check_ids(6).unwrap_err().to_string().contains("is 6"));
        row.labels[0] = -1;
        let batch = collate_seq2seq(std::slice::from_ref(&row), Seq2SeqPadding::default()).unwrap();
        assert!(
            batch
                .check_ids(7)
                .unwrap_err()
                .to_string()
                .contains("is -1")
        );
    }

    #[test]
    fn empty_pairs_are_refused() {
        let refused = |rows: &[Seq2SeqExample]| {
            let error = collate_seq2seq(rows, Seq2SeqPadding::default());
            error.unwrap_err().to_string()
        };
        assert!(refused(&[]).contains("at least one pair"));
        assert!(refused(&[pair(1, 1), pair(2, 0)]).contains("empty (row 1)"));
        let padding = Seq2SeqPadding {
            multiple_of: 0,
            ..Seq2SeqPadding::default()
        };
        let error = collate_seq2seq(&[pair(1, 1)], padding)
            .unwrap_err()
            .to_string();
        assert!(error.starts_with("`pad_to_multiple_of` is 0"), "{error}");
    }
}
