//! Construction of batch loaders from the arguments.

use std::fmt;

use overdrive_datasets::{
    Batch, BatchSampler, DataLoader, DataLoaderOptions, Dataset, DeviceLoader, LastShare,
    LengthGroupedBatches, MixtureSampler, OnDevice, PackPlan, RowLayout, SampledBatches, Shard,
    ShardedBatches, TokenizedExample, collate,
};

use super::shard::DataShard;
use crate::Result;
use crate::arguments::TrainingArguments;
use crate::error::invalid;

/// The order in which the rows of a loader become batches.
#[derive(Debug)]
pub(crate) enum RowOrder {
    /// In training a random order in each epoch, else the order of the data.
    Epochs,
    /// Rows of similar lengths form a batch; one length for each row.
    ByLength(Vec<u32>),
    /// The order of a mixture.
    Mixed(MixtureSampler),
}

impl From<Option<Vec<u32>>> for RowOrder {
    fn from(lengths: Option<Vec<u32>>) -> Self {
        lengths.map_or(Self::Epochs, Self::ByLength)
    }
}

/// The options of a batch loader: `dataloader_num_workers` threads prepare `dataloader_prefetch_factor`
/// batches ahead each. The batches and their order do not depend on the number of threads.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Loading<'a> {
    pub(crate) arguments: &'a TrainingArguments,
    pub(crate) shard: DataShard,
    /// If `true`, epochs repeat, each in its own order (training); else there is one epoch, in the order of the data.
    pub(crate) endless: bool,
}

impl<'a> Loading<'a> {
    /// Returns the options of a process with `shard`; a device stands for a shard with all of the data.
    pub(crate) fn new(
        arguments: &'a TrainingArguments,
        shard: impl Into<DataShard>,
        endless: bool,
    ) -> Self {
        Self {
            arguments,
            shard: shard.into(),
            endless,
        }
    }

    /// Returns batches of rows.
    pub(crate) fn of_rows<D>(
        self,
        rows: D,
        layout: RowLayout,
        order: impl Into<RowOrder>,
    ) -> Result<DeviceLoader<Batch>>
    where
        D: Dataset + 'static,
        D::Item: AsRef<[TokenizedExample]>,
    {
        self.collated(rows, order, move |rows: Vec<D::Item>| {
            collate(&rows, layout)
        })
    }

    /// Returns batches that `collate` makes of rows.
    pub(crate) fn collated<D, B>(
        self,
        rows: D,
        order: impl Into<RowOrder>,
        collate: impl Fn(Vec<D::Item>) -> overdrive_datasets::Result<B> + Send + Sync + 'static,
    ) -> Result<DeviceLoader<B>>
    where
        D: Dataset + 'static,
        B: OnDevice,
    {
        let order = order.into();
        let mixture = match &order {
            RowOrder::Mixed(sampler) => Some(sampler.clone()),
            RowOrder::Epochs | RowOrder::ByLength(_) => None,
        };
        let batches = self.batches_of_rows(rows.len(), order)?;
        let options = self.options();
        // An endless loader without batches would never return.
        if self.endless && batches.is_empty(0) {
            let expected = format!(
                "false for {} training rows, fewer than the {} of a batch; drop it, or give a smaller \
                 `per_device_train_batch_size`",
                rows.len(),
                options.batch_size
            );
            return invalid("dataloader_drop_last", options.drop_last, expected);
        }
        let pin_memory = self.arguments.dataloader_pin_memory;
        let device = self.shard.device();
        // Pinned by the worker threads; a batch that is already pinned is not copied again.
        // On a CPU pinning would fail without a driver and gain nothing.
        let pins = pin_memory && device.is_cuda();
        let collate = move |rows: Vec<D::Item>| match collate(rows) {
            Ok(batch) if pins => batch.pinned(),
            batch => batch,
        };
        let batches = ShardedBatches::new(batches, self.shard(&options)?);
        let loader = DataLoader::with(rows, batches, collate, options.workers())?;
        // Copies a batch to the device while the model computes on the previous batch.
        let mut loader = DeviceLoader::new(loader, device).with_pin_memory(pin_memory);
        if let Some(mixture) = mixture {
            loader = loader.with_mixture(mixture);
        }
        Ok(match self.endless {
            true => loader.endless(),
            false => loader,
        })
    }

    fn options(&self) -> DataLoaderOptions {
        let arguments = self.arguments;
        let options = arguments.loader_options(match self.endless {
            true => arguments.per_device_train_batch_size,
            false => arguments.per_device_eval_batch_size,
        });
        DataLoaderOptions {
            shuffle: self.endless,
            // In an evaluation every held-out record counts.
            drop_last: options.drop_last && self.endless,
            ..options
        }
    }

    /// Returns the shard of this process, in whole batches: the joint batch of all processes is that of one
    /// process with `world_size` times the rows.
    fn shard(&self, options: &DataLoaderOptions) -> Result<Shard> {
        self.shard.shard(match (self.endless, options.drop_last) {
            (false, _) => LastShare::Uneven,
            (true, true) => LastShare::Drop,
            (true, false) => LastShare::Repeat,
        })
    }

    fn batches_of_rows(&self, rows: usize, order: RowOrder) -> Result<Box<dyn BatchSampler>> {
        let options = self.options();
        Ok(match order {
            RowOrder::ByLength(lengths) => Box::new(LengthGroupedBatches::new(
                lengths,
                options.batch_size,
                options.drop_last,
                options.seed,
            )?),
            RowOrder::Mixed(sampler) => Box::new(SampledBatches::new(
                sampler,
                options.batch_size,
                options.drop_last,
                // Sharded in `collated`, in the same way for all samplers.
                Shard::default(),
            )?),
            RowOrder::Epochs => Box::new(options.batches(rows)?),
        })
    }

    /// Returns the shares of tokens in the batches of the first epoch and in its rows.
    pub(crate) fn fill(
        &self,
        plan: &PackPlan,
        layout: RowLayout,
        lengths: Option<Vec<u32>>,
    ) -> Result<BatchFill> {
        let rows = self.arguments.packing.then(|| plan.fill());
        let RowLayout::Padded { multiple_of, .. } = layout else {
            return Ok(BatchFill { batches: 1.0, rows });
        };
        let row_tokens = |row| [plan.row_tokens(row)];
        let batches = self.padded_fill(plan.len(), multiple_of, lengths, row_tokens)?;
        Ok(BatchFill { batches, rows })
    }

    /// Returns the share of tokens in the padded batches of the first epoch. A record has the sequences of the lengths that
    /// `sequences` returns.
    pub(crate) fn padded_fill<const N: usize>(
        &self,
        records: usize,
        multiple_of: usize,
        lengths: Option<Vec<u32>>,
        sequences: impl Fn(usize) -> [usize; N],
    ) -> Result<f64> {
        // The first epoch represents all epochs: lengths and batch size are the same in each.
        let batches = self.batches_of_rows(records, lengths.into())?;
        let (mut tokens, mut positions) = (0, 0);
        for number in 0..batches.len(0) {
            let records = batches.batch(0, number);
            let lengths = records.iter().flat_map(|&record| sequences(record));
            let longest = lengths.clone().max().unwrap_or(0);
            tokens += lengths.sum::<usize>();
            positions += N * records.len() * longest.next_multiple_of(multiple_of.max(1));
        }
        Ok(tokens as f64 / positions.max(1) as f64)
    }
}

/// The shares of tokens in batches and in packed rows. Displayed as a sentence about padding.
#[derive(Debug, Clone, Copy, PartialEq)]
#[non_exhaustive]
pub struct BatchFill {
    /// The fraction of the positions of the batches that hold tokens, 0 to 1; the others are padding. Packed rows are
    /// concatenated without padding, so it is 1 for them.
    pub batches: f64,
    /// The tokens of packed rows as a fraction of `context_length` tokens a row, 0 to 1; `None` without packing.
    pub rows: Option<f64>,
}

impl fmt::Display for BatchFill {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.batches < 1.0 {
            true => write!(
                f,
                "{:.1}% of the positions are padding",
                100.0 * (1.0 - self.batches)
            )?,
            false => f.write_str("no padding")?,
        }
        match self.rows {
            Some(rows) => write!(f, ", packed rows {:.1}% full", 100.0 * rows),
            None => Ok(()),
        }
    }
}
