//! Batches that threads prepare.

use overdrive_datasets::{
    Batch, BatchSampler, DataLoader, DataLoaderOptions, Dataset, DeviceLoader, IGNORE_INDEX,
    InstructionTensors, LastShare, LengthGroupedBatches, LoaderState, LoaderStats, OnDevice,
    PackPlan, RowLayout, SequenceRows, Shard, ShardedBatches, TokenizedExample, Window,
    WindowBatch, Windows, collate_rows,
};

use crate::{Error, Part, Result, TextBatch, TrainingArguments};

/// Batches as a training loop takes them: an iterator that may know how long it was waited for.
pub trait TrainBatches<B>: Iterator<Item = overdrive_datasets::Result<B>> {
    /// What the loader behind it has done so far; `None` where there is none.
    fn loader_stats(&self) -> Option<LoaderStats> {
        None
    }

    /// How far the loader behind it has come; `None` where there is none.
    fn state_dict(&self) -> Option<LoaderState> {
        None
    }

    /// Goes on where a run stopped that had taken `taken` batches and whose loader was at `state`. Without
    /// a loader the batches are taken again, and left.
    ///
    /// # Errors
    /// When the state is of other data, or a batch cannot be made.
    fn resume(&mut self, state: Option<LoaderState>, taken: u64) -> overdrive_datasets::Result<()> {
        let _ = state;
        for _ in 0..taken {
            self.next().transpose()?;
        }
        Ok(())
    }
}

impl TrainBatches<Batch> for overdrive_datasets::TokenBatches {}
impl TrainBatches<InstructionTensors> for overdrive_datasets::InstructionTensorBatches {}
impl<B> TrainBatches<B> for std::vec::IntoIter<overdrive_datasets::Result<B>> {}
impl<B> TrainBatches<B> for Box<dyn Iterator<Item = overdrive_datasets::Result<B>> + '_> {}

/// Batches on a device, prepared by `dataloader_num_workers` threads, `dataloader_prefetch_factor`
/// ahead each. They and their order are the same for any number of threads.
#[derive(Debug)]
pub struct BatchLoader<B> {
    loader: DeviceLoader<B>,
    endless: bool,
    ended: bool,
}

impl<B: OnDevice> BatchLoader<B> {
    /// Batches in one pass that each begin with the records that `batches` says, made by `collate`.
    fn new<D, S, C>(
        dataset: D,
        batches: S,
        collate: C,
        how: Loading<'_>,
        options: DataLoaderOptions,
    ) -> Result<Self>
    where
        D: Dataset + 'static,
        S: BatchSampler + 'static,
        C: Fn(Vec<D::Item>) -> overdrive_datasets::Result<B> + Send + Sync + 'static,
    {
        if how.endless && batches.is_empty(0) {
            return Err(Error::Invalid {
                key: "dataloader_drop_last",
                given: options.drop_last.to_string(),
                problem: format!(
                    "there are {} rows to learn from, fewer than the {} of a batch",
                    dataset.len(),
                    options.batch_size
                ),
                way_out: "drop it, or give a smaller `per_device_train_batch_size`".to_owned(),
            });
        }
        let pin_memory = how.arguments.dataloader_pin_memory;
        // On the worker's time; what is pinned already is not copied again.
        let device = how.part.device();
        let pins = pin_memory && device.is_cuda();
        let collate = move |items| match collate(items) {
            Ok(batch) if pins => batch.pinned(),
            batch => batch,
        };
        let batches = ShardedBatches::new(batches, how.shard(&options)?);
        let loader = DataLoader::with(dataset, batches, collate, options)?;
        Ok(Self {
            loader: DeviceLoader::new(loader, device).with_pin_memory(pin_memory),
            endless: how.endless,
            ended: false,
        })
    }

    /// Batches of a pass, on this process.
    pub fn batches_per_epoch(&self) -> usize {
        self.loader.loader().len()
    }
}

/// For what, and how, batches are loaded.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Loading<'a> {
    pub(crate) arguments: &'a TrainingArguments,
    pub(crate) part: Part,
    /// Pass after pass in orders of their own, or one in the order of the data.
    pub(crate) endless: bool,
}

impl Loading<'_> {
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
}

impl Loading<'_> {
    /// Of whole batches: the joint batch of all processes is that of one with as many times the rows.
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

impl BatchLoader<TextBatch> {
    /// Windows in the order of their numbers, of which a pass takes `micro_batches` batches.
    pub(crate) fn of_windows<W: Windows + 'static>(
        windows: W,
        micro_batches: u64,
        how: Loading<'_>,
    ) -> Result<Self> {
        let options = how.options();
        let windows = Numbered(windows);
        let batches = InOrder {
            records: windows.len(),
            batch_size: options.batch_size,
            batches: usize::try_from(micro_batches).unwrap_or(usize::MAX),
        };
        Self::new(windows, batches, batch_of_windows, how, options)
    }
}

impl<B: OnDevice> BatchLoader<B> {
    /// Rows of sequences, each batch handed through `made`. `lengths`, one a row: puts rows of about one
    /// length into a batch.
    pub(crate) fn of_rows<D>(
        rows: SequenceRows<D>,
        layout: RowLayout,
        lengths: Option<Vec<u32>>,
        made: fn(InstructionTensors) -> B,
        how: Loading<'_>,
    ) -> Result<Self>
    where
        D: Dataset<Item = TokenizedExample> + 'static,
    {
        let options = how.options();
        let batches = how.batches_of_rows(rows.len(), lengths)?;
        let collate = move |rows: Vec<Vec<TokenizedExample>>| {
            InstructionTensors::new(&collate_rows(&rows, layout)?).map(made)
        };
        Self::new(rows, batches, collate, how, options)
    }
}

impl<B: OnDevice> Iterator for BatchLoader<B> {
    type Item = overdrive_datasets::Result<B>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.ended {
            return None;
        }
        match self.loader.next_batch() {
            // The first batch of the next pass: none of them is empty.
            None if self.endless => self.loader.next_batch(),
            batch => {
                self.ended = batch.is_none();
                batch
            }
        }
    }
}

impl<B: OnDevice> TrainBatches<B> for BatchLoader<B> {
    fn loader_stats(&self) -> Option<LoaderStats> {
        Some(self.loader.stats())
    }

    fn state_dict(&self) -> Option<LoaderState> {
        Some(self.loader.state_dict())
    }

    fn resume(&mut self, state: Option<LoaderState>, taken: u64) -> overdrive_datasets::Result<()> {
        match state {
            Some(state) => self.loader.load_state_dict(state),
            None => {
                for _ in 0..taken {
                    self.next().transpose()?;
                }
                Ok(())
            }
        }
    }
}

/// Windows as records.
struct Numbered<W>(W);

impl<W: Windows> Dataset for Numbered<W> {
    type Item = Window;

    fn len(&self) -> usize {
        let count = self.0.count().unwrap_or(u64::MAX);
        usize::try_from(count).unwrap_or(usize::MAX)
    }

    fn get(&self, index: usize) -> overdrive_datasets::Result<Window> {
        self.0.window(index as u64)
    }
}

/// Records that never come again, in the order of their numbers.
struct InOrder {
    records: usize,
    batch_size: usize,
    batches: usize,
}

impl BatchSampler for InOrder {
    fn len(&self, _epoch: u64) -> usize {
        self.batches
    }

    fn batch(&self, epoch: u64, number: usize) -> Vec<usize> {
        let epoch = usize::try_from(epoch).unwrap_or(usize::MAX);
        let batch = epoch.saturating_mul(self.batches).saturating_add(number);
        let start = batch.saturating_mul(self.batch_size);
        let end = start.saturating_add(self.batch_size).min(self.records);
        (start..end).collect()
    }
}

fn batch_of_windows(windows: Vec<Window>) -> overdrive_datasets::Result<TextBatch> {
    let context = windows.first().map_or(0, |window| window.input_ids.len());
    let mut batch = WindowBatch {
        input_ids: Vec::with_capacity(windows.len() * context),
        labels: Vec::with_capacity(windows.len() * context),
        rows: windows.len(),
        context,
        label_count: 0,
        state: overdrive_datasets::BatchState::default(),
    };
    for window in windows {
        let counted = window.labels.iter().filter(|&&label| label != IGNORE_INDEX);
        batch.label_count += counted.count();
        batch.input_ids.extend(window.input_ids);
        batch.labels.extend(window.labels);
    }
    Batch::from_windows(&batch).map(TextBatch::Windows)
}
