//! Documents as training sequences.

use std::sync::Arc;

use overdrive_datasets::{
    Batch, Dataset, DeviceLoader, PackPlan, RowLayout, SequenceRows, TokenDocuments, TokenView,
};

use crate::loading::Loading;
use crate::{Result, TrainingArguments};

/// Documents in rows.
#[derive(Debug)]
pub(crate) struct DocumentRows {
    documents: TokenDocuments,
    plan: Arc<PackPlan>,
    /// One a row, where rows of about one length belong together.
    lengths: Option<Vec<u32>>,
    layout: RowLayout,
}

impl DocumentRows {
    /// Rows to learn from. `column_lengths`: what to group by instead of the tokens, one for each
    /// document of the store.
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

    /// Rows to evaluate on, one a document, without padding; as many as `max_eval_batches` allows, from
    /// all over the documents.
    pub(crate) fn to_evaluate(view: &TokenView, arguments: &TrainingArguments) -> Result<Self> {
        let most = arguments.max_eval_batches.map_or(usize::MAX, |batches| {
            usize::try_from(batches * arguments.per_device_eval_batch_size).unwrap_or(usize::MAX)
        });
        let documents = TokenDocuments::new(view).at_most(most);
        let capacity = usize::try_from(arguments.context_length).unwrap_or(usize::MAX);
        let plan = PackPlan::one_each(&documents.lengths(), capacity)?;
        Ok(Self {
            documents,
            plan: Arc::new(plan),
            lengths: None,
            layout: RowLayout::EndToEnd,
        })
    }

    /// Batches of the rows.
    pub(crate) fn load(&self, how: Loading<'_>) -> Result<DeviceLoader<Batch>> {
        let rows = SequenceRows::new(self.documents.clone(), Arc::clone(&self.plan));
        how.of_rows(rows, self.layout, self.lengths.clone())
    }

    /// Batches of a pass.
    pub(crate) fn micro_batches(&self, arguments: &TrainingArguments) -> u64 {
        let (rows, size) = (
            self.plan.len() as u64,
            arguments.per_device_train_batch_size,
        );
        match arguments.dataloader_drop_last {
            true => rows / size.max(1),
            false => rows.div_ceil(size.max(1)),
        }
    }

    /// Lines about the rows.
    pub(crate) fn describe(&self, how: Loading<'_>, say: &mut dyn FnMut(&str)) -> Result<()> {
        let fill = how.fill(&self.plan, self.layout, self.lengths.clone())?;
        say(&format!(
            "sequences   {} rows of {} documents, {:.1}% of their places hold tokens",
            self.plan.len(),
            self.documents.len(),
            100.0 * fill
        ));
        let lengths = self.documents.lengths();
        let all: u64 = lengths.iter().copied().map(u64::from).sum();
        let context = how.arguments.context_length;
        let long = lengths
            .iter()
            .filter(|&&length| u64::from(length) > context);
        let (lost, long) = (all - self.plan.tokens(), long.count());
        if lost > 0 {
            say(&format!(
                "            {long} documents are cut off at {context} tokens, which loses {:.1}% of all; \
                 `packing` with `packing_strategy: bfd_split` keeps them, and so do windows",
                100.0 * lost as f64 / all.max(1) as f64
            ));
        }
        Ok(())
    }
}
