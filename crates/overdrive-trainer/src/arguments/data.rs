//! The arguments about data: sequences, loading, packing.

use std::path::Path;

use overdrive_datasets::{DataLoaderOptions, PackPlan, RowLayout};

use super::choices::SequenceMode;
use super::training::TrainingArguments;
use crate::Result;
use crate::error::invalid;

impl TrainingArguments {
    /// Returns the kind of a training sequence: `sequences` if it is set, else documents if another key needs
    /// them.
    pub fn sequence_mode(&self) -> SequenceMode {
        self.sequences.unwrap_or(match self.asks_for_documents() {
            Some(_) => SequenceMode::Documents,
            None => SequenceMode::Windows,
        })
    }

    /// Returns the first key that has no effect on windows, with its value, its neutral value and the reason.
    fn asks_for_documents(&self) -> Option<(&'static str, String, &'static str, &'static str)> {
        let multiple = self.pad_to_multiple_of;
        let key = |is_set: bool, key, why| is_set.then(|| (key, "true".to_owned(), "false", why));
        key(self.packing, "packing", "are always full")
            .or_else(|| key(self.padding_free, "padding_free", "have no padding"))
            .or_else(|| {
                key(
                    self.group_by_length,
                    "group_by_length",
                    "have the same length",
                )
            })
            .or((multiple != 1).then(|| {
                (
                    "pad_to_multiple_of",
                    multiple.to_string(),
                    "1",
                    "have no padding",
                )
            }))
    }

    /// Checks the keys about data against each other.
    pub(crate) fn validate_loading(&self) -> Result<()> {
        if self.sequences == Some(SequenceMode::Windows)
            && let Some((key, value, neutral, why)) = self.asks_for_documents()
        {
            let expected = format!(
                "{neutral} with `sequences: windows`, which {why}; drop it, or write `sequences: documents`"
            );
            return invalid(key, value, expected);
        }
        if self.packing && self.group_by_length {
            let expected = "false with `packing`, whose rows are full anyway; drop one of the two";
            return invalid("group_by_length", true, expected);
        }
        if self.dataset_text_field.is_empty() {
            let expected =
                "the name of the column that holds the text; give it with `--text-column NAME`";
            return invalid("dataset_text_field", "empty", expected);
        }
        match self.dataloader_prefetch_factor {
            Some(factor) if self.dataloader_num_workers == 0 => invalid(
                "dataloader_prefetch_factor",
                factor,
                "left out with `dataloader_num_workers: 0`, because no worker prepares batches ahead; drop \
                 it, or give `dataloader_num_workers` 1 or more",
            ),
            _ => Ok(()),
        }
    }

    /// Returns the loader options for batches of `batch_size` rows.
    pub(crate) fn loader_options(&self, batch_size: u64) -> DataLoaderOptions {
        let defaults = DataLoaderOptions::default();
        DataLoaderOptions {
            batch_size: usize::try_from(batch_size).unwrap_or(usize::MAX),
            seed: self.seed,
            num_workers: self.dataloader_num_workers,
            prefetch_factor: self
                .dataloader_prefetch_factor
                .unwrap_or(defaults.prefetch_factor),
            drop_last: self.dataloader_drop_last,
            ..defaults
        }
    }

    /// Returns the number of tokens of the longest row.
    pub(crate) fn context(&self) -> usize {
        usize::try_from(self.context_length).unwrap_or(usize::MAX)
    }

    /// Returns the number of rows of `max_eval_batches` batches.
    pub(crate) fn max_eval_rows(&self) -> usize {
        self.max_eval_batches.map_or(usize::MAX, |batches| {
            let rows = batches.saturating_mul(self.per_device_eval_batch_size);
            usize::try_from(rows).unwrap_or(usize::MAX)
        })
    }

    /// Returns the number of micro-batches of all processes in an epoch of this many rows.
    pub(crate) fn micro_batches_of(&self, rows: usize) -> u64 {
        let (rows, size) = (rows as u64, self.per_device_train_batch_size.max(1));
        match self.dataloader_drop_last {
            true => rows / size,
            false => rows.div_ceil(size),
        }
    }

    /// Returns the layout of the rows of a training batch.
    pub(crate) fn row_layout(&self, pad_token: u32) -> RowLayout {
        if self.packing || self.padding_free {
            return RowLayout::EndToEnd;
        }
        RowLayout::Padded {
            pad_token,
            multiple_of: self.pad_to_multiple_of,
        }
    }

    /// Returns the plan that assigns sequences of these lengths to training rows.
    pub(crate) fn pack_plan(&self, lengths: &[u32]) -> Result<PackPlan> {
        let capacity = self.context();
        Ok(match self.packing {
            true => PackPlan::new(lengths, capacity, self.packing_strategy)?,
            false => PackPlan::one_each(lengths, capacity)?,
        })
    }
}

/// Returns `true` if the name of `path` is that of a file of tokens.
pub(crate) fn is_token_file(path: &Path) -> bool {
    let extension = path.extension().and_then(|extension| extension.to_str());
    extension.is_some_and(|extension| ["bin", "tokens"].contains(&extension))
}
