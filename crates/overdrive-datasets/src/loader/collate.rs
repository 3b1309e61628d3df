//! The collation of rows of tokens into a batch.

use tch::Tensor;

use crate::{Batch, IGNORE_INDEX, Result, TokenMasking, TokenizedExample};
use overdrive_core::{check_option, check_positive};

/// The layout of rows in a batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RowLayout {
    /// Each row is one sequence, padded on the right to the longest.
    Padded {
        /// The padding token; it never enters the loss.
        pad_token: u32,
        /// The width is rounded up to a multiple of it; at least 1.
        multiple_of: usize,
    },
    /// All sequences are concatenated as a single row, without padding.
    EndToEnd,
}

impl Default for RowLayout {
    /// Returns a layout that pads with token 0 to the longest row. Rows of equal length, such as windows, get no
    /// padding.
    fn default() -> Self {
        Self::Padded {
            pad_token: 0,
            multiple_of: 1,
        }
    }
}

/// Collates rows of tokens into a batch: windows, documents, instruction examples (one [`TokenizedExample`] per
/// row) or packed rows (a `Vec` of them per row).
///
/// Each row is copied once into each tensor. The first label of every sequence becomes [`IGNORE_INDEX`], since no
/// token precedes it.
///
/// ```
/// use overdrive_datasets::{RowLayout, TokenizedExample, collate};
///
/// let rows = [vec![5_u32, 6, 7], vec![8, 9]].map(TokenizedExample::from);
/// let padded = collate(&rows, RowLayout::default())?;
/// assert_eq!(padded.input_ids, tch::Tensor::from_slice2(&[[5_i64, 6, 7], [8, 9, 0]]));
/// assert_eq!(padded.labels, tch::Tensor::from_slice2(&[[-100_i64, 6, 7], [-100, 9, -100]]));
/// assert_eq!((padded.tokens, padded.padded_tokens(), padded.label_count), (5, 6, 3));
///
/// let packed = collate(&rows, RowLayout::EndToEnd)?;
/// assert_eq!(packed.input_ids.size(), [1, 5]);
/// assert_eq!(packed.sequence_lengths, [3, 2]);
/// # Ok::<(), overdrive_datasets::Error>(())
/// ```
///
/// # Errors
/// [`Error::Common`](crate::Error::Common) if a row of several sequences is to be padded, a sequence does not
/// have one label for each token, or `multiple_of` is 0; an error of libtorch if there is no memory for the
/// tensors.
pub fn collate<R: AsRef<[TokenizedExample]>>(rows: &[R], layout: RowLayout) -> Result<Batch> {
    collate_rows(rows, layout, FirstLabel::Ignored)
}

/// Masks the tokens of records with their indices, and collates them as [`collate`] does. The first label of a
/// sequence counts like every other: an encoder sees the tokens after it.
///
/// [`DataLoader::with_indices`](crate::DataLoader::with_indices) passes the epoch and the indices:
///
/// ```
/// use overdrive_datasets::{RowLayout, TokenMasking, TokenMaskingOptions, collate_masked};
///
/// let all = TokenMaskingOptions { mlm_probability: 1.0, mask_replace_prob: 1.0, random_replace_prob: 0.0, seed: 0 };
/// let masking = TokenMasking::new(4, 100, [1, 2], all)?;
/// let rows = [(0, vec![8_i64, 9]), (1, vec![1, 7, 2])];
/// let batch = collate_masked(&masking, 0, &rows, RowLayout::default())?;
/// assert_eq!(batch.input_ids, tch::Tensor::from_slice2(&[[4_i64, 4, 0], [1, 4, 2]]));
/// assert_eq!(batch.labels, tch::Tensor::from_slice2(&[[8_i64, 9, -100], [-100, 7, -100]]));
/// assert_eq!(batch.label_count, 3);
/// # Ok::<(), overdrive_datasets::Error>(())
/// ```
///
/// # Errors
/// As [`collate`].
pub fn collate_masked<T: AsRef<[i64]>>(
    masking: &TokenMasking,
    epoch: u64,
    records: &[(usize, T)],
    layout: RowLayout,
) -> Result<Batch> {
    let rows: Vec<TokenizedExample> = records
        .iter()
        .map(|(index, tokens)| masking.mask(epoch, *index as u64, tokens.as_ref()))
        .collect();
    collate_rows(&rows, layout, FirstLabel::Counted)
}

/// The use of the first label of a sequence.
#[derive(Clone, Copy, PartialEq, Eq)]
enum FirstLabel {
    /// No token precedes it, so a causal model cannot predict it.
    Ignored,
    Counted,
}

fn collate_rows<R: AsRef<[TokenizedExample]>>(
    rows: &[R],
    layout: RowLayout,
    first: FirstLabel,
) -> Result<Batch> {
    let tokens = |row: &R| {
        row.as_ref()
            .iter()
            .map(|s| s.input_ids.len())
            .sum::<usize>()
    };
    let row_tokens: Vec<usize> = rows.iter().map(tokens).collect();
    let (count, width) = match layout {
        RowLayout::EndToEnd => (1, row_tokens.iter().sum()),
        RowLayout::Padded { multiple_of, .. } => {
            check_positive("pad_to_multiple_of", multiple_of)?;
            let longest = row_tokens.iter().copied().max().unwrap_or(0);
            (rows.len(), longest.next_multiple_of(multiple_of))
        }
    };
    // Each vector is allocated once, because the padded size is known.
    let mut host = HostBatch::with_capacity(count * width);
    for (number, row) in rows.iter().enumerate() {
        let row = row.as_ref();
        row.iter()
            .try_for_each(|sequence| host.append(sequence, first))?;
        if let RowLayout::Padded { pad_token, .. } = layout {
            check_option(
                row.len() <= 1,
                "layout",
                "Padded",
                "RowLayout::EndToEnd for rows of several sequences, which padding cannot separate",
            )?;
            let end = (number + 1) * width;
            if host.input_ids.len() < end {
                host.see(i64::from(pad_token));
            }
            host.input_ids.resize(end, i64::from(pad_token));
            host.labels.resize(end, IGNORE_INDEX);
        }
    }
    host.into_batch(&row_tokens, count, width, layout)
}

/// A batch in host memory, row by row.
struct HostBatch {
    input_ids: Vec<i64>,
    labels: Vec<i64>,
    label_count: usize,
    /// The lengths of the sequences that have a token.
    sequence_lengths: Vec<i64>,
    id_range: (i64, i64),
}

impl HostBatch {
    fn with_capacity(tokens: usize) -> Self {
        Self {
            input_ids: Vec::with_capacity(tokens),
            labels: Vec::with_capacity(tokens),
            label_count: 0,
            sequence_lengths: Vec::new(),
            // 0 is an id of every vocabulary.
            id_range: (0, 0),
        }
    }

    fn see(&mut self, id: i64) {
        let (least, largest) = self.id_range;
        self.id_range = (least.min(id), largest.max(id));
    }

    fn append(&mut self, sequence: &TokenizedExample, first: FirstLabel) -> Result<()> {
        let (tokens, labels) = (&sequence.input_ids, &sequence.labels);
        check_option(
            tokens.len() == labels.len(),
            "labels",
            format!("{} labels for {} tokens", labels.len(), tokens.len()),
            "one label for each token, IGNORE_INDEX for tokens that do not enter the loss",
        )?;
        // An empty sequence has no first label to ignore.
        let learned = match (labels.split_first(), first) {
            (None, _) => return Ok(()),
            (Some((_, learned)), FirstLabel::Ignored) => learned,
            (Some(_), FirstLabel::Counted) => labels,
        };
        self.input_ids.extend_from_slice(tokens);
        if first == FirstLabel::Ignored {
            self.labels.push(IGNORE_INDEX);
        }
        self.labels.extend_from_slice(learned);
        for &label in learned.iter().filter(|&&label| label != IGNORE_INDEX) {
            self.label_count += 1;
            self.see(label);
        }
        tokens.iter().for_each(|&token| self.see(token));
        self.sequence_lengths.push(tokens.len() as i64);
        Ok(())
    }

    fn into_batch(
        self,
        row_tokens: &[usize],
        count: usize,
        width: usize,
        layout: RowLayout,
    ) -> Result<Batch> {
        let tensor = |values: &[i64]| -> Result<Tensor> {
            Ok(Tensor::f_from_slice(values)?.f_view([count as i64, width as i64])?)
        };
        let is_one_row = layout == RowLayout::EndToEnd;
        let positions = || -> Vec<i64> {
            let lengths = self.sequence_lengths.iter();
            lengths.flat_map(|&length| 0..length).collect()
        };
        let tokens = row_tokens.iter().sum();
        let mask = || {
            let mut mask = vec![0; count * width];
            for (row, &tokens) in mask.chunks_mut(width).zip(row_tokens) {
                row[..tokens].fill(1);
            }
            mask
        };
        Ok(Batch {
            input_ids: tensor(&self.input_ids)?,
            labels: tensor(&self.labels)?,
            attention_mask: (tokens < count * width)
                .then(|| tensor(&mask()))
                .transpose()?,
            position_ids: is_one_row.then(|| tensor(&positions())).transpose()?,
            tokens,
            sequences: self.sequence_lengths.len(),
            label_count: self.label_count,
            id_range: self.id_range,
            sequence_lengths: match is_one_row {
                true => self.sequence_lengths,
                false => Vec::new(),
            },
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rows(lengths: &[usize]) -> Vec<TokenizedExample> {
        let row = |(row, &length): (i64, &usize)| {
            TokenizedExample::from((100 * row..).take(length).collect::<Vec<i64>>())
        };
        (0..).zip(lengths).map(row).collect()
    }

    fn numbers(tensor: &Tensor) -> Vec<i64> {
        Vec::try_from(tensor.view([-1])).unwrap()
    }

    #[test]
    fn ids_outside_of_the_vocabulary_are_found_without_reading_the_batch() {
        let row = |tokens: [i64; 3], labels: [i64; 3]| {
            let mut row = TokenizedExample::from(tokens.to_vec());
            row.labels = labels.to_vec();
            [row]
        };
        let pad = |pad_token| RowLayout::Padded {
            pad_token,
            multiple_of: 4,
        };
        // The first label and ignored ones are not used.
        for (tokens, labels, layout, expected) in [
            ([1, 2, 9], [99, -100, 9], pad(9), None),
            ([1, 2, 10], [1, 2, 3], pad(0), Some("10")),
            ([1, 2, 3], [1, 2, 11], pad(0), Some("11")),
            ([1, 2, 3], [1, -1, 3], pad(0), Some("-1")),
            ([1, 2, 3], [1, 2, 3], pad(12), Some("12")),
            ([1, 2, 3], [1, 2, 3], RowLayout::EndToEnd, None),
        ] {
            let checked = collate(&[row(tokens, labels)], layout)
                .unwrap()
                .check_ids(10);
            match expected {
                None => checked.unwrap(),
                Some(id) => {
                    let error = checked.unwrap_err().to_string();
                    assert!(error.contains(&format!("is {id}")), "{error}");
                }
            }
        }
    }

    #[test]
    fn padding_is_rounded_up_masked_and_has_no_labels() {
        let layout = RowLayout::Padded {
            pad_token: 7,
            multiple_of: 3,
        };
        let batch = collate(&rows(&[3, 4, 0]), layout).unwrap();
        assert_eq!(batch.input_ids.size(), [3, 6]);
        let mask = numbers(batch.attention_mask.as_ref().unwrap());
        assert_eq!(mask[..12], [1, 1, 1, 0, 0, 0, 1, 1, 1, 1, 0, 0]);
        assert_eq!(numbers(&batch.input_ids)[12..], [7; 6]);
        assert_eq!(numbers(&batch.labels)[12..], [IGNORE_INDEX; 6]);
        assert_eq!(
            (batch.tokens, batch.sequences, batch.label_count),
            (7, 2, 5)
        );
        assert_eq!(batch.padded_tokens(), 18);
        assert!(batch.sequence_lengths.is_empty() && batch.position_ids.is_none());
        // Rows that are all full have neither padding nor a mask.
        let full = collate(&rows(&[3, 3]), layout).unwrap();
        assert!(full.attention_mask.is_none());
    }

    #[test]
    fn a_label_that_is_ignored_and_the_first_one_do_not_count() {
        let mut rows = rows(&[4, 1]);
        rows[0].labels[2] = IGNORE_INDEX;
        for layout in [RowLayout::default(), RowLayout::EndToEnd] {
            let batch = collate(&rows, layout).unwrap();
            assert_eq!(numbers(&batch.labels)[..4], [-100, 1, -100, 3]);
            let counted = numbers(&batch.labels);
            let counted = counted.iter().filter(|&&label| label != IGNORE_INDEX);
            assert_eq!((batch.label_count, counted.count()), (2, 2));
        }
    }

    #[test]
    fn no_rows_are_an_empty_batch() {
        let none: [TokenizedExample; 0] = [];
        let padded = collate(&none, RowLayout::default()).unwrap();
        assert_eq!((padded.input_ids.size(), padded.tokens), (vec![0, 0], 0));
        let packed = collate(&none, RowLayout::EndToEnd).unwrap();
        assert_eq!((packed.input_ids.size(), packed.tokens), (vec![1, 0], 0));
    }

    #[test]
    fn invalid_rows_and_layouts_are_refused_by_name() {
        let refused = |outcome: Result<Batch>| outcome.unwrap_err().to_string();
        let layout = RowLayout::Padded {
            pad_token: 0,
            multiple_of: 0,
        };
        assert!(refused(collate(&rows(&[1]), layout)).starts_with("`pad_to_multiple_of` is 0"));
        let mut short = rows(&[3]);
        short[0].labels.pop();
        let error = refused(collate(&short, RowLayout::EndToEnd));
        assert!(
            error.starts_with("`labels` is 2 labels for 3 tokens"),
            "{error}"
        );
        let error = refused(collate(&[rows(&[1, 2])], RowLayout::default()));
        assert!(error.contains("RowLayout::EndToEnd"), "{error}");
    }
}
