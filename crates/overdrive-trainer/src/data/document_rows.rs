//! Rows of documents.

use std::sync::Arc;

use overdrive_datasets::{
    Batch, Dataset, DeviceLoader, PackPlan, RowLayout, SequenceRows, TokenDocuments, TokenView,
};

use super::loading::Loading;
use crate::Result;
use crate::arguments::TrainingArguments;

/// Documents that are assigned to rows.
#[derive(Debug)]
pub(crate) struct DocumentRows {
    documents: TokenDocuments,
    plan: Arc<PackPlan>,
    /// The length of each row, if rows of similar lengths are grouped into batches.
    lengths: Option<Vec<u32>>,
    layout: RowLayout,
}

impl DocumentRows {
    /// Returns the training rows. `column_lengths` replaces the token counts in `group_by_length`; it has one
    /// length for each document of the store.
    pub(crate) fn to_train(
        view: &TokenView,
        column_lengths: Option<&[u32]>,
        pad_token: u32,
        arguments: &TrainingArguments,
    ) -> Result<Self> {
        let documents = TokenDocuments::new(view);
        let plan = arguments.pack_plan(&documents.lengths())?;
        let length = |row| {
            let tokens = || u32::try_from(plan.row_tokens(row)).unwrap_or(u32::MAX);
            // A packed row has no single document; `group_by_length` is refused with `packing`, so the first is the only one.
            let in_column = || {
                let sequence = plan.row(row).first()?.sequence;
                let number = documents.number(sequence as usize)?;
                column_lengths?.get(number).copied()
            };
            in_column().unwrap_or_else(tokens)
        };
        let lengths = arguments
            .group_by_length
            .then(|| (0..plan.len()).map(length).collect());
        Ok(Self {
            documents,
            plan: Arc::new(plan),
            lengths,
            layout: arguments.row_layout(pad_token),
        })
    }

    /// Returns the evaluation rows, one document each, without padding. At most `max_eval_batches` batches
    /// are taken, spread evenly over the documents.
    pub(crate) fn to_evaluate(view: &TokenView, arguments: &TrainingArguments) -> Result<Self> {
        let documents = TokenDocuments::new(view).at_most(arguments.max_eval_rows());
        let plan = PackPlan::one_each(&documents.lengths(), arguments.context())?;
        Ok(Self {
            documents,
            plan: Arc::new(plan),
            lengths: None,
            // Concatenated, so that evaluation spends no time on padding.
            layout: RowLayout::EndToEnd,
        })
    }

    /// Returns a loader of the rows.
    pub(crate) fn load(&self, how: Loading<'_>) -> Result<DeviceLoader<Batch>> {
        how.of_rows(self.sequences(), self.layout, self.lengths.clone())
    }

    /// Returns the rows as a dataset.
    pub(crate) fn sequences(&self) -> SequenceRows<TokenDocuments> {
        SequenceRows::new(self.documents.clone(), Arc::clone(&self.plan))
    }

    /// Returns the layout of a batch.
    pub(crate) fn layout(&self) -> RowLayout {
        self.layout
    }

    /// Returns the number of rows.
    pub(crate) fn len(&self) -> usize {
        self.plan.len()
    }

    /// Returns the mean number of tokens of a row; 1 without rows.
    pub(crate) fn mean_tokens(&self) -> f64 {
        (self.plan.tokens() as f64 / self.plan.len().max(1) as f64).max(1.0)
    }

    /// Returns the number of training batches in an epoch.
    pub(crate) fn micro_batches(&self, arguments: &TrainingArguments) -> u64 {
        arguments.micro_batches_of(self.plan.len())
    }

    /// Logs the number of rows, their padding and the truncated documents.
    pub(crate) fn describe(&self, how: Loading<'_>, say: &mut dyn FnMut(&str)) -> Result<()> {
        let fill = how.fill(&self.plan, self.layout, self.lengths.clone())?;
        say(&format!(
            "sequences   {} rows of {} documents, {fill}",
            self.plan.len(),
            self.documents.len(),
        ));
        let lengths = self.documents.lengths();
        let all: u64 = lengths.iter().copied().map(u64::from).sum();
        let context = how.arguments.context_length;
        let long = lengths
            .iter()
            .filter(|&&length| u64::from(length) > context);
        // `bfd_split` splits long documents without losing tokens, so the number of lost tokens follows from the
        // plan and not from the lengths.
        let (lost, long) = (all - self.plan.tokens(), long.count());
        if lost > 0 {
            say(&format!(
                "            {long} documents are truncated to {context} tokens, which drops {:.1}% of all \
                 tokens; `packing` with `packing_strategy: bfd_split` keeps them, and so do windows",
                100.0 * lost as f64 / all.max(1) as f64
            ));
        }
        Ok(())
    }
}
