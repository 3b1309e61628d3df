//! Loaders of batches, as the arguments say.

use overdrive_datasets::{
    Batch, BatchSampler, ConsecutiveBatches, DataLoader, DataLoaderOptions, Dataset, DeviceLoader,
    LastShare, LengthGroupedBatches, OnDevice, PackPlan, RandomWindows, RowLayout, Shard,
    ShardedBatches, TokenizedExample, collate,
};

use crate::{Error, Part, Result, TrainingArguments};

/// For what, and how, batches are loaded: by `dataloader_num_workers` threads,
/// `dataloader_prefetch_factor` ahead each. The batches and their order are the same for any number of
/// threads.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Loading<'a> {
    pub(crate) arguments: &'a TrainingArguments,
    pub(crate) part: Part,
    /// Pass after pass in orders of their own, or one in the order of the data.
    pub(crate) endless: bool,
}

impl Loading<'_> {
    /// Batches of rows. `lengths`, one a row: puts rows of about one length into a batch.
    pub(crate) fn of_rows<D>(
        self,
        rows: D,
        layout: RowLayout,
        lengths: Option<Vec<u32>>,
    ) -> Result<DeviceLoader<Batch>>
    where
        D: Dataset + 'static,
        D::Item: AsRef<[TokenizedExample]>,
    {
        let batches = self.batches_of_rows(rows.len(), lengths)?;
        self.load(rows, batches, layout)
    }

    /// Windows in the order of their numbers, of which a pass takes `batches_per_epoch` batches.
    pub(crate) fn of_windows(
        self,
        windows: RandomWindows,
        batches_per_epoch: u64,
    ) -> Result<DeviceLoader<Batch>> {
        let batches = usize::try_from(batches_per_epoch).unwrap_or(usize::MAX);
        let batches = ConsecutiveBatches::new(self.options().batch_size, batches)?;
        self.load(windows, Box::new(batches), RowLayout::default())
    }

    fn load<D>(
        self,
        rows: D,
        batches: Box<dyn BatchSampler>,
        layout: RowLayout,
    ) -> Result<DeviceLoader<Batch>>
    where
        D: Dataset + 'static,
        D::Item: AsRef<[TokenizedExample]>,
    {
        let options = self.options();
        if self.endless && batches.is_empty(0) {
            return Err(Error::Invalid {
                key: "dataloader_drop_last",
                given: options.drop_last.to_string(),
                problem: format!(
                    "there are {} rows to learn from, fewer than the {} of a batch",
                    rows.len(),
                    options.batch_size
                ),
                way_out: "drop it, or give a smaller `per_device_train_batch_size`".to_owned(),
            });
        }
        let pin_memory = self.arguments.dataloader_pin_memory;
        let device = self.part.device();
        // On the worker's time; what is pinned already is not copied again.
        let pins = pin_memory && device.is_cuda();
        let collate = move |rows: Vec<D::Item>| match collate(&rows, layout) {
            Ok(batch) if pins => batch.pinned(),
            batch => batch,
        };
        let batches = ShardedBatches::new(batches, self.shard(&options)?);
        let loader = DataLoader::with(rows, batches, collate, options)?;
        let loader = DeviceLoader::new(loader, device).with_pin_memory(pin_memory);
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
            // Every record that is held back counts.
            drop_last: options.drop_last && self.endless,
            ..options
        }
    }

    /// The part of this process, of whole batches: the joint batch of all processes is that of one with as many times the rows.
    fn shard(&self, options: &DataLoaderOptions) -> Result<Shard> {
        self.part.shard(match (self.endless, options.drop_last) {
            (false, _) => LastShare::Uneven,
            (true, true) => LastShare::Drop,
            (true, false) => LastShare::Repeat,
        })
    }

    fn batches_of_rows(
        &self,
        rows: usize,
        lengths: Option<Vec<u32>>,
    ) -> Result<Box<dyn BatchSampler>> {
        let options = self.options();
        Ok(match lengths {
            Some(lengths) => Box::new(LengthGroupedBatches::new(
                lengths,
                options.batch_size,
                options.drop_last,
                options.seed,
                Shard::default(),
            )?),
            None => Box::new(options.batches(rows)?),
        })
    }

    /// The part of a first pass's places that holds tokens, 0 to 1; of packed rows, how full they are.
    pub(crate) fn fill(
        &self,
        plan: &PackPlan,
        layout: RowLayout,
        lengths: Option<Vec<u32>>,
    ) -> Result<f64> {
        let RowLayout::Padded { multiple_of, .. } = layout else {
            return Ok(match self.arguments.packing {
                true => plan.fill(),
                false => 1.0,
            });
        };
        let batches = self.batches_of_rows(plan.len(), lengths)?;
        let (mut tokens, mut places) = (0, 0);
        for number in 0..batches.len(0) {
            let rows = batches.batch(0, number);
            let lengths = rows.iter().map(|&row| plan.row_tokens(row));
            let longest = lengths.clone().max().unwrap_or(0);
            tokens += lengths.sum::<usize>();
            places += rows.len() * longest.next_multiple_of(multiple_of.max(1));
        }
        Ok(tokens as f64 / places.max(1) as f64)
    }
}
