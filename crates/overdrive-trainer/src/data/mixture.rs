//! Training text from several sources by weights.

use overdrive_datasets::{
    Batch, Dataset, DeviceLoader, LastWindow, Mixture, MixtureSampler, RowLayout, SequenceRows,
    SequentialWindows, TokenView,
};

use super::document_rows::DocumentRows;
use super::loading::{Loading, RowOrder};
use crate::Result;
use crate::arguments::{MixtureWeights, TrainingArguments};

/// The sources of a mixture.
#[derive(Debug)]
pub(crate) struct TextMixture {
    pub(crate) sources: Vec<MixedText>,
}

/// One source of a mixture.
#[derive(Debug)]
pub(crate) struct MixedText {
    pub(crate) name: String,
    pub(crate) weight: f64,
    /// The documents to train on.
    pub(crate) train: TokenView,
    /// The rows of documents, if a sequence is a document.
    pub(crate) rows: Option<DocumentRows>,
}

impl MixedText {
    fn windows(&self, arguments: &TrainingArguments) -> Result<SequentialWindows> {
        let context = arguments.context();
        Ok(SequentialWindows::new(
            self.train.clone(),
            context,
            LastWindow::Drop,
        )?)
    }

    fn rows(&self, arguments: &TrainingArguments) -> usize {
        match &self.rows {
            Some(rows) => rows.len(),
            // Text without a window has no loader either.
            None => self.windows(arguments).map_or(0, |windows| windows.len()),
        }
    }

    /// Returns the share of the rows for a share of `weight`.
    fn row_weight(&self, weight: f64, arguments: &TrainingArguments) -> f64 {
        match (&self.rows, arguments.mixture_weights) {
            (Some(rows), MixtureWeights::Tokens) => weight / rows.mean_tokens(),
            // All windows have the same number of tokens.
            _ => weight,
        }
    }
}

impl TextMixture {
    /// Logs the sources with their weights.
    pub(crate) fn describe(&self, say: &mut dyn FnMut(&str)) {
        let sum: f64 = self.sources.iter().map(|source| source.weight).sum();
        let mut title = "mixture";
        for source in &self.sources {
            say(&format!(
                "{title:<12}{:.1}% {}, {:.2}M tokens",
                100.0 * source.weight / sum,
                source.name,
                source.train.len() as f64 / 1e6,
            ));
            title = "";
        }
    }

    /// Returns the number of micro-batches of all processes in an epoch, which has as many rows as all sources.
    pub(crate) fn micro_batches(&self, arguments: &TrainingArguments) -> u64 {
        let rows = self.sources.iter().map(|source| source.rows(arguments));
        arguments.micro_batches_of(rows.sum())
    }

    /// Returns a loader of the rows of all sources.
    pub(crate) fn load(&self, how: Loading<'_>) -> Result<DeviceLoader<Batch>> {
        let named = |source: &MixedText| source.name.clone();
        let rows: Option<Vec<&DocumentRows>> = self
            .sources
            .iter()
            .map(|source| source.rows.as_ref())
            .collect();
        match rows {
            Some(rows) => {
                let layout = rows
                    .first()
                    .map_or(RowLayout::default(), |rows| rows.layout());
                let sources = self.sources.iter().map(named);
                let sources: Vec<(String, SequenceRows<_>)> = sources
                    .zip(rows.iter().map(|rows| rows.sequences()))
                    .collect();
                self.loader(Mixture::new(sources)?, layout, how)
            }
            None => {
                let windows =
                    |source: &MixedText| Ok((named(source), source.windows(how.arguments)?));
                let sources = self.sources.iter().map(windows).collect::<Result<_>>()?;
                // All windows have the same length, so the layout pads nothing.
                self.loader(Mixture::new(sources)?, RowLayout::default(), how)
            }
        }
    }

    fn loader<D>(
        &self,
        mixture: Mixture<D>,
        layout: RowLayout,
        how: Loading<'_>,
    ) -> Result<DeviceLoader<Batch>>
    where
        D: Dataset + 'static,
        D::Item: AsRef<[overdrive_datasets::TokenizedExample]>,
    {
        let order = RowOrder::Mixed(self.order(&mixture, how)?);
        how.of_rows(mixture, layout, order)
    }

    fn order<D: Dataset>(&self, mixture: &Mixture<D>, how: Loading<'_>) -> Result<MixtureSampler> {
        let arguments = how.arguments;
        let of_rows = |weights: &[f64]| -> Vec<f64> {
            let sources = self.sources.iter().zip(weights);
            sources
                .map(|(source, &weight)| source.row_weight(weight, arguments))
                .collect()
        };
        let weights: Vec<f64> = self.sources.iter().map(|source| source.weight).collect();
        let mut order = mixture.sampler(&of_rows(&weights), arguments.seed)?;
        for stage in arguments.mixture_schedule()? {
            let start = rows_of(stage.steps, arguments, how.shard.world_size());
            order = order.with_stage(start, &of_rows(&stage.weights))?;
        }
        Ok(order)
    }

    /// Returns the weights as snapshots store them: a run resumes at the same records only with the same ones.
    pub(crate) fn fingerprint(
        &self,
        arguments: &TrainingArguments,
        world_size: usize,
    ) -> Result<String> {
        let weights = |weights: &[f64]| -> String {
            let weights: Vec<String> = weights.iter().map(f64::to_string).collect();
            weights.join(" ")
        };
        let first: Vec<f64> = self.sources.iter().map(|source| source.weight).collect();
        let mut text = format!("{} of {}", weights(&first), arguments.mixture_weights);
        for stage in arguments.mixture_schedule()? {
            let rows = rows_of(stage.steps, arguments, world_size);
            text += &format!(", after {rows} rows {}", weights(&stage.weights));
        }
        Ok(text)
    }
}

/// Returns the number of rows of all processes in this many steps.
fn rows_of(steps: u64, arguments: &TrainingArguments, world_size: usize) -> usize {
    let rows = steps
        .saturating_mul(arguments.per_device_train_batch_size)
        .saturating_mul(arguments.gradient_accumulation_steps)
        .saturating_mul(world_size as u64);
    usize::try_from(rows).unwrap_or(usize::MAX)
}
