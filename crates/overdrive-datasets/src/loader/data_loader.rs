//! The loader.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::DataLoaderOptions;
use super::workers::{Next, Source, Workers};
use crate::sampling::BatchSampler;
use crate::{Dataset, Error, ErrorLog, Result};

/// Batches of a dataset, prepared ahead by threads: PyTorch's `DataLoader`.
///
/// The batches, and their order, are the same for any number of workers, and the same in every run
/// with the same options. A batch that fails is an error in its place; the ones behind it follow.
/// Workers go on into the next epoch while the last batches of this one are used, so that no epoch
/// begins with a wait. Dropping the loader ends its threads.
///
/// ```
/// use overdrive_datasets::{DataLoader, DataLoaderOptions, TextLines, TextOptions};
/// # let dir = tempfile::tempdir().unwrap();
/// # let path = dir.path().join("lines.txt");
/// # std::fs::write(&path, (0..10).map(|i| format!("{i}\n")).collect::<String>()).unwrap();
/// let lines = TextLines::open([&path], &TextOptions::default())?;
/// let options = DataLoaderOptions { batch_size: 4, shuffle: true, num_workers: 2, ..Default::default() };
/// let mut loader = DataLoader::new(lines, options)?;
/// for _epoch in 0..2 {
///     for batch in loader.epoch() {
///         let batch: Vec<String> = batch?;
///         assert!(batch.len() == 4 || batch.len() == 2);
///     }
/// }
/// // Stop anywhere, and go on there: with any number of workers.
/// loader.epoch().next();
/// let state = loader.state_dict();
/// let next = loader.epoch().next().unwrap()?;
/// loader.load_state_dict(state)?;
/// assert_eq!(loader.epoch().next().unwrap()?, next);
/// # Ok::<(), overdrive_datasets::Error>(())
/// ```
pub struct DataLoader<T> {
    // Dropped first, so that the threads are gone when the rest goes.
    workers: Option<Workers<T>>,
    source: Arc<Source<T>>,
    options: DataLoaderOptions,
    state: LoaderState,
    stats: LoaderStats,
    log: Arc<ErrorLog>,
}

/// How far a loader has come: all that there is to save.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LoaderState {
    /// The epoch, counted from 0.
    pub epoch: u64,
    /// The first batch of it that has not been handed out.
    pub next_batch: usize,
}

impl LoaderState {
    pub(crate) fn after(self, epoch_ends: bool) -> Self {
        match epoch_ends {
            true => Self {
                epoch: self.epoch + 1,
                next_batch: 0,
            },
            false => Self {
                next_batch: self.next_batch + 1,
                ..self
            },
        }
    }
}

/// What a loader has done so far.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct LoaderStats {
    /// Batches handed out, errors among them.
    pub batches: u64,
    /// How long the program waited for them in all. Without workers: how long making them took.
    pub wait: Duration,
    /// The longest of these waits.
    pub longest_wait: Duration,
    /// How many batches were ready when one was asked for, in all; see
    /// [`LoaderStats::mean_queue_depth`].
    pub ready: u64,
    /// Records that could not be read and were left out or replaced.
    pub failed_records: u64,
}

impl LoaderStats {
    /// How many batches were ready on average when one was asked for: near 0 says that the workers
    /// are too slow, near `num_workers * prefetch_factor` that they wait for the program.
    pub fn mean_queue_depth(&self) -> f64 {
        self.ready as f64 / (self.batches as f64).max(1.0)
    }
}

impl<I: Send + 'static> DataLoader<Vec<I>> {
    /// Batches of `options.batch_size` records, as they come out of the dataset.
    ///
    /// # Errors
    /// When an option is outside its range.
    pub fn new<D>(dataset: D, options: DataLoaderOptions) -> Result<Self>
    where
        D: Dataset<Item = I> + 'static,
    {
        let batches = options.batches(dataset.len())?;
        Self::with(dataset, batches, Ok, options)
    }
}

impl<T: Send + 'static> DataLoader<T> {
    /// Batches of the records that `batches` says, put together by `collate`.
    ///
    /// Of the options, those that say which records make a batch (`batch_size`, `shuffle`, `seed`,
    /// `drop_last`, `rank`, `world_size`) are those of `batches` then. `collate` runs on the workers, and on
    /// the thread that asks for batches where they are made in microseconds and none is ready; it is handed
    /// the records in their order, never none.
    ///
    /// # Errors
    /// When `prefetch_factor` is 0 and there are workers.
    pub fn with<D, B, C>(
        dataset: D,
        batches: B,
        collate: C,
        options: DataLoaderOptions,
    ) -> Result<Self>
    where
        D: Dataset + 'static,
        B: BatchSampler + 'static,
        C: Fn(Vec<D::Item>) -> Result<T> + Send + Sync + 'static,
    {
        if options.num_workers > 0 && options.prefetch_factor == 0 {
            return Err(Error::InvalidOption {
                option: "prefetch_factor",
                value: "0".to_owned(),
                expected: "a worker is at least one batch ahead; the default is 2",
            });
        }
        let log = Arc::new(ErrorLog::default());
        let errors = Arc::clone(&log);
        let make = move |records: &[usize]| {
            let mut items = Vec::with_capacity(records.len());
            for &record in records {
                items.extend(options.on_error.get(&dataset, record, &errors)?);
            }
            match items.is_empty() {
                true => Ok(None),
                false => collate(items).map(Some),
            }
        };
        let source = Source {
            batches: Box::new(batches),
            make: Box::new(make),
        };
        Ok(Self {
            workers: None,
            source: Arc::new(source),
            options,
            state: LoaderState::default(),
            stats: LoaderStats::default(),
            log,
        })
    }

    /// The batches of this epoch that have not been handed out: all of them, or after
    /// [`DataLoader::load_state_dict`] and after an iterator that was dropped early the rest. When it
    /// ends, the next epoch begins.
    pub fn epoch(&mut self) -> Epoch<'_, T> {
        Epoch {
            loader: self,
            ended: false,
        }
    }

    /// The next batch of this epoch; `None` at its end, and then the first one of the next epoch.
    pub fn next_batch(&mut self) -> Option<Result<T>> {
        let started = Instant::now();
        loop {
            let (next, ready) = match self.next() {
                Ok(next) => next,
                Err(error) => return Some(Err(error)),
            };
            let ends = matches!(next, Next::EndOfEpoch);
            self.state = self.state.after(ends);
            let batch = match next {
                Next::Batch(batch) => batch,
                Next::Nothing => continue,
                Next::EndOfEpoch => return None,
            };
            let wait = started.elapsed();
            self.stats.batches += 1;
            self.stats.wait += wait;
            self.stats.longest_wait = self.stats.longest_wait.max(wait);
            self.stats.ready += ready as u64;
            return Some(batch);
        }
    }

    fn next(&mut self) -> Result<(Next<T>, usize)> {
        if self.options.num_workers == 0 {
            return Ok((self.source.next(self.state), 0));
        }
        let workers = match &self.workers {
            Some(workers) => workers,
            None => {
                let count = self.options.num_workers;
                let ahead = count.saturating_mul(self.options.prefetch_factor);
                let workers = Workers::start(&self.source, self.state, count, ahead)?;
                self.workers.insert(workers)
            }
        };
        Ok(workers.next())
    }

    /// How many batches the current epoch has in all.
    pub fn len(&self) -> usize {
        self.source.batches.len(self.state.epoch)
    }

    /// Whether the current epoch has no batch.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// How far it has come: what has been handed out counts, what is prepared ahead does not.
    pub fn state_dict(&self) -> LoaderState {
        self.state
    }

    /// Goes on at `state`, with exactly the batches that came after it.
    ///
    /// # Errors
    /// When the epoch has fewer batches: then the data or the options are other ones.
    pub fn load_state_dict(&mut self, state: LoaderState) -> Result<()> {
        let len = self.source.batches.len(state.epoch);
        if state.next_batch > len {
            return Err(Error::InvalidOption {
                option: "state.next_batch",
                value: format!("{} of {len} batches", state.next_batch),
                expected: "a state of a loader over the same data with the same batch size",
            });
        }
        // What they prepared is of another place; the next batch starts them anew.
        self.workers = None;
        self.state = state;
        Ok(())
    }

    /// What it has done so far.
    pub fn stats(&self) -> LoaderStats {
        LoaderStats {
            failed_records: self.log.count(),
            ..self.stats
        }
    }

    /// The records that could not be read, where the policy left them out or replaced them.
    pub fn errors(&self) -> &ErrorLog {
        &self.log
    }

    /// The options.
    pub fn options(&self) -> &DataLoaderOptions {
        &self.options
    }
}

impl<T> std::fmt::Debug for DataLoader<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("DataLoader")
            .field("options", &self.options)
            .field("state", &self.state)
            .field("stats", &self.stats)
            .finish_non_exhaustive()
    }
}

/// The batches of an epoch, or the rest of them.
#[derive(Debug)]
pub struct Epoch<'a, T> {
    loader: &'a mut DataLoader<T>,
    ended: bool,
}

impl<T: Send + 'static> Iterator for Epoch<'_, T> {
    type Item = Result<T>;

    fn next(&mut self) -> Option<Result<T>> {
        if self.ended {
            return None;
        }
        let batch = self.loader.next_batch();
        self.ended = batch.is_none();
        batch
    }
}
