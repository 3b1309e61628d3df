//! What the keys about data come to.

use overdrive_datasets::{DataLoaderOptions, PackPlan, RowLayout};
use serde::{Deserialize, Serialize};

use crate::{Error, Result, TrainingArguments};

/// What a training sequence is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SequenceMode {
    /// `context_length` tokens from anywhere in the documents laid end to end: nanoGPT's way, which
    /// needs no padding.
    Windows,
    /// A document, cut off at `context_length`.
    Documents,
}

/// What a document of a text file is: `sample_by` of Hugging Face's `datasets`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SampleBy {
    /// The whole file.
    #[default]
    Document,
    /// Each line that is not blank.
    Line,
}

impl TrainingArguments {
    /// What a training sequence is: what `sequences` says, else documents where a key asks for what only
    /// they can have.
    pub fn sequence_mode(&self) -> SequenceMode {
        self.sequences.unwrap_or(match self.asks_for_documents() {
            Some(_) => SequenceMode::Documents,
            None => SequenceMode::Windows,
        })
    }

    /// The first key that means nothing to windows, with its value and what it would do.
    fn asks_for_documents(&self) -> Option<(&'static str, String, &'static str)> {
        let is_true = "true".to_owned();
        if self.packing {
            Some(("packing", is_true, "they are full already"))
        } else if self.padding_free {
            Some(("padding_free", is_true, "they have no padding"))
        } else if self.group_by_length {
            Some(("group_by_length", is_true, "they are equally long"))
        } else if self.pad_to_multiple_of != 1 {
            let value = self.pad_to_multiple_of.to_string();
            Some(("pad_to_multiple_of", value, "they have no padding"))
        } else {
            None
        }
    }

    pub(crate) fn validate_loading(&self) -> Result<()> {
        let invalid = |key, given: String, problem: &str, way_out: &str| {
            Err(Error::Invalid {
                key,
                given,
                problem: problem.to_owned(),
                way_out: way_out.to_owned(),
            })
        };
        if self.sequences == Some(SequenceMode::Windows)
            && let Some((key, given, why)) = self.asks_for_documents()
        {
            return invalid(
                key,
                given,
                &format!("`sequences` is `windows`, and {why}"),
                "drop it, or write `sequences: documents`",
            );
        }
        if self.packing && self.group_by_length {
            let problem = "packed rows are full whatever is in them";
            return invalid(
                "group_by_length",
                "true".to_owned(),
                problem,
                "drop it, or `packing`",
            );
        }
        if self.pad_to_multiple_of == 0 {
            return invalid(
                "pad_to_multiple_of",
                "0".to_owned(),
                "it must be at least 1",
                "give 1 for no rounding",
            );
        }
        if self.dataset_text_field.is_empty() {
            return invalid(
                "dataset_text_field",
                "empty".to_owned(),
                "it is the name of the column that holds the text",
                "name one, with `--text-column NAME`",
            );
        }
        match self.dataloader_prefetch_factor {
            Some(0) => invalid(
                "dataloader_prefetch_factor",
                "0".to_owned(),
                "a worker is at least one batch ahead",
                "give 1 or more, or leave it out for 2",
            ),
            Some(factor) if self.dataloader_num_workers == 0 => invalid(
                "dataloader_prefetch_factor",
                factor.to_string(),
                "`dataloader_num_workers` is 0, and nobody prepares batches ahead",
                "drop it, or give `dataloader_num_workers` 1 or more",
            ),
            _ => Ok(()),
        }
    }

    /// How a loader of batches of `batch_size` rows works.
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

    /// How rows lie in a batch to learn from.
    pub(crate) fn row_layout(&self, pad_token: u32) -> RowLayout {
        if self.packing || self.padding_free {
            return RowLayout::EndToEnd;
        }
        RowLayout::Padded {
            pad_token,
            multiple_of: self.pad_to_multiple_of,
        }
    }

    /// The rows to learn from that sequences of these lengths make.
    pub(crate) fn pack_plan(&self, lengths: &[u32]) -> Result<PackPlan> {
        let capacity = usize::try_from(self.context_length).unwrap_or(usize::MAX);
        Ok(match self.packing {
            true => PackPlan::new(lengths, capacity, self.packing_strategy)?,
            false => PackPlan::one_each(lengths, capacity)?,
        })
    }
}
