//! The arguments about data: sequences, loading, packing.

use std::path::Path;

use overdrive_datasets::{DataLoaderOptions, PackPlan, RowLayout};

use super::choices::SequenceMode;
use super::training::TrainingArguments;
use crate::Result;
use crate::error::{invalid, refuse};

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
        #[rustfmt::skip]
        let keys = [
            (self.packing, "packing", "true".to_owned(), "false", "are always full"),
            (self.padding_free, "padding_free", "true".to_owned(), "false", "have no padding"),
            (self.group_by_length, "group_by_length", "true".to_owned(), "false", "have the same length"),
            (multiple != 1, "pad_to_multiple_of", multiple.to_string(), "1", "have no padding"),
        ];
        let set = keys.into_iter().find(|(is_set, ..)| *is_set);
        set.map(|(_, key, value, neutral, why)| (key, value, neutral, why))
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
        let prefetch = self.dataloader_prefetch_factor;
        #[rustfmt::skip]
        refuse(&[
            (self.packing && self.group_by_length, "group_by_length", &true,
                "false with `packing`, whose rows are full anyway; drop one of the two"),
            (self.dataset_text_field.is_empty(), "dataset_text_field", &"empty",
                "the name of the column that holds the text; give it with `--text-column NAME`"),
            (prefetch.is_some() && self.dataloader_num_workers == 0, "dataloader_prefetch_factor", &prefetch.unwrap_or(0),
                "left out with `dataloader_num_workers: 0`, because no worker prepares batches ahead; drop it, or give `dataloader_num_workers` 1 or more"),
        ])?;
        Ok(())
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
