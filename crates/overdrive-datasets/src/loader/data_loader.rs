//! The data loader.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::workers::{Next, Source, Workers};
use super::{DataLoaderOptions, WorkerOptions};
use crate::sampling::BatchSampler;
use crate::{Dataset, ErrorLog, Result};
use overdrive_core::{check_option, check_positive};

/// A loader of a dataset's batches, which are prepared ahead by threads: PyTorch's `DataLoader`.
///
/// The batches and their order are the same for any number of workers, and in every run with the same options. A
/// batch that fails is an error at its position, and the next batches follow. Workers continue with the next
/// epoch while the last batches of this one are used, so that no epoch begins with a wait. Dropping the loader
/// ends its threads.
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
/// // A run can stop anywhere and resume there, with any number of workers.
/// loader.epoch().next();
/// let state = loader.state_dict();
/// let next = loader.epoch().next().unwrap()?;
/// loader.load_state_dict(state)?;
/// assert_eq!(loader.epoch().next().unwrap()?, next);
/// # Ok::<(), overdrive_datasets::Error>(())
/// ```
pub struct DataLoader<T> {
    // This field comes first, so that the threads have ended before the other fields are dropped.
    workers: Option<Workers<T>>,
    source: Arc<Source<T>>,
    options: WorkerOptions,
    state: LoaderState,
    stats: LoaderStats,
    log: Arc<ErrorLog>,
}

/// The position of a loader: all of its state.
///
/// All processes that train together have the same position. A loader with another number of processes, or another
/// batch size, resumes from it at the same record ([`DataLoader::load_state_dict`]).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct LoaderState {
    /// The epoch, counted from 0.
    pub epoch: u64,
    /// The first batch of the epoch that has not been returned.
    pub next_batch: usize,
    /// The number of batches of the epoch, on each process; 0 if the state does not store it.
    pub batches: usize,
    /// The number of records of a batch, over all processes ([`BatchSampler::joint_batch_size`]); 0 if it is unknown.
    pub joint_batch_size: usize,
    /// The number of batches of all processes in one step ([`BatchSampler::joint_batches`]), if `joint_batch_size` is
    /// unknown; else 0.
    #[serde(skip_serializing_if = "is_zero")]
    pub joint_batches: usize,
    /// The number of records in a group of similar lengths ([`BatchSampler::group_len`]), which stays the same over
    /// the whole run; 0 without groups, or if the state does not store it.
    #[serde(skip_serializing_if = "is_zero")]
    pub group_len: usize,
}

fn is_zero(number: &usize) -> bool {
    *number == 0
}

impl LoaderState {
    /// Returns the number of passes over the data so far, with the fraction of the current one.
    pub fn epochs(&self) -> f64 {
        let batches = self.batches.max(1) as f64;
        // A single division gives 41 / 25 = 1.64; the sum 1 + 0.64 would round differently.
        (self.epoch as f64 * batches + self.next_batch as f64) / batches
    }

    pub(crate) fn after(self, epoch_ends: bool) -> Self {
        match epoch_ends {
            true => Self {
                epoch: self.epoch.saturating_add(1),
                next_batch: 0,
                ..self
            },
            false => Self {
                next_batch: self.next_batch + 1,
                ..self
            },
        }
    }
}

/// The statistics of a loader.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
#[non_exhaustive]
pub struct LoaderStats {
    /// The number of batches returned, including errors.
    pub batches: u64,
    /// The total time that the program waited for batches; without workers, the time that making them took.
    pub wait: Duration,
    /// The longest of these waits.
    pub longest_wait: Duration,
    /// The sum over all requests of the number of batches that were ready; see
    /// [`LoaderStats::mean_queue_depth`].
    pub ready: u64,
    /// The number of records that could not be read and were skipped or replaced.
    pub failed_records: u64,
}

impl LoaderStats {
    /// Returns the mean number of batches that were ready at a request. Near 0 the workers are too slow; near
    /// `num_workers * prefetch_factor` they wait for the program.
    pub fn mean_queue_depth(&self) -> f64 {
        self.ready as f64 / (self.batches as f64).max(1.0)
    }
}

impl<I: Send + 'static> DataLoader<Vec<I>> {
    /// Returns a loader of batches of `options.batch_size` records.
    ///
    /// # Errors
    /// Returns an error if an option is outside its range.
    pub fn new<D>(dataset: D, options: DataLoaderOptions) -> Result<Self>
    where
        D: Dataset<Item = I> + 'static,
    {
        Self::with_collate(dataset, Ok, options)
    }
}

impl<T: Send + 'static> DataLoader<T> {
    /// Returns a loader of batches of `options.batch_size` records, converted by `collate` (PyTorch's `collate_fn`).
    ///
    /// `collate` runs on the workers, and on the requesting thread if batches take microseconds and none is ready. It
    /// receives the records in their order, at least one.
    ///
    /// # Errors
    /// Returns an error if an option is outside its range.
    pub fn with_collate<D, C>(dataset: D, collate: C, options: DataLoaderOptions) -> Result<Self>
    where
        D: Dataset + 'static,
        C: Fn(Vec<D::Item>) -> Result<T> + Send + Sync + 'static,
    {
        let batches = options.batches(dataset.len())?;
        Self::with(dataset, batches, collate, options.workers())
    }

    /// Returns a loader of the batches that `batches` lists, converted by `collate`.
    ///
    /// `collate` is called as in [`with_collate`](Self::with_collate).
    ///
    /// # Errors
    /// Returns an error if `prefetch_factor` is 0 and there are workers.
    pub fn with<D, B, C>(dataset: D, batches: B, collate: C, options: WorkerOptions) -> Result<Self>
    where
        D: Dataset + 'static,
        B: BatchSampler + 'static,
        C: Fn(Vec<D::Item>) -> Result<T> + Send + Sync + 'static,
    {
        let items =
            |records: Vec<(usize, D::Item)>| records.into_iter().map(|(_, item)| item).collect();
        Self::with_indices(
            dataset,
            batches,
            move |_, records| collate(items(records)),
            options,
        )
    }

    /// Returns the loader of [`DataLoader::with`] whose `collate` receives the epoch, counted from 0, and each
    /// record with its index in the dataset: for random changes that are a function of both, such as
    /// [`collate_masked`](crate::collate_masked).
    ///
    /// # Errors
    /// As [`DataLoader::with`].
    pub fn with_indices<D, B, C>(
        dataset: D,
        batches: B,
        collate: C,
        options: WorkerOptions,
    ) -> Result<Self>
    where
        D: Dataset + 'static,
        B: BatchSampler + 'static,
        C: Fn(u64, Vec<(usize, D::Item)>) -> Result<T> + Send + Sync + 'static,
    {
        if options.num_workers > 0 {
            check_positive("prefetch_factor", options.prefetch_factor)?;
        }
        let log = Arc::new(ErrorLog::default());
        let errors = Arc::clone(&log);
        let make = move |epoch: u64, records: &[usize]| {
            dataset.prefetch(records);
            let mut items = Vec::with_capacity(records.len());
            for &record in records {
                let item = options.on_error.get(&dataset, record, &errors)?;
                items.extend(item.map(|item| (record, item)));
            }
            match items.is_empty() {
                true => Ok(None),
                false => collate(epoch, items).map(Some),
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

    /// Returns an iterator over the remaining batches of this epoch: all of them, or fewer after
    /// [`DataLoader::load_state_dict`] or after an iterator that was dropped early. When it ends, the next epoch
    /// begins.
    pub fn epoch(&mut self) -> Epoch<'_, T> {
        Epoch {
            loader: self,
            ended: false,
        }
    }

    /// Returns the next batch of this epoch; `None` at its end, and then the first batch of the next epoch.
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
                // A batch whose records were all skipped is not returned, but the position moves past it.
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
        // Threads start with the first request, so that a loader that is only configured costs nothing.
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

    /// Returns the number of batches of the current epoch.
    pub fn len(&self) -> usize {
        self.source.batches.len(self.state.epoch)
    }

    /// Returns `true` if the current epoch has no batches.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the position of the loader. Batches that were returned count, and those prepared ahead do not.
    pub fn state_dict(&self) -> LoaderState {
        let joint_batch_size = self.source.batches.joint_batch_size();
        LoaderState {
            batches: self.len(),
            joint_batch_size,
            joint_batches: match joint_batch_size {
                0 => self.source.batches.joint_batches(),
                _ => 0,
            },
            group_len: match self.state.group_len {
                0 => self.source.batches.group_len(),
                kept => kept,
            },
            ..self.state
        }
    }

    /// Resumes from `state`, with exactly the batches that followed it.
    ///
    /// If the state comes from a loader with another number of processes or another batch size, this loader resumes
    /// at the record where that one stopped. If the record is inside a batch of this loader, it resumes at the
    /// beginning of the batch, so that no record is left out of the epoch. The order of the records is that of the
    /// run that stored the state, even where it depends on the batch size ([`LoaderState::group_len`]). Batches
    /// without a fixed number of records, as of [`TokenBudgetBatches`](crate::TokenBudgetBatches), are counted
    /// themselves: with another number of processes, the loader resumes at the same batch; the options of the batches
    /// must then be the same.
    ///
    /// # Errors
    /// Returns an error if the epoch has fewer batches: the data or the options have changed.
    pub fn load_state_dict(&mut self, state: LoaderState) -> Result<()> {
        let len = self.source.batches.len(state.epoch);
        let batches = &self.source.batches;
        let counts = match (state.joint_batch_size, batches.joint_batch_size()) {
            // Neither counts records, so both count batches.
            (0, 0) => (state.joint_batches, batches.joint_batches()),
            records => records,
        };
        let next_batch = match counts {
            // Without both numbers, the positions cannot be compared.
            (before, now) if before == now || before == 0 || now == 0 => state.next_batch,
            // The last batches of an epoch may have fewer records, so its end is not found by counting them.
            _ if state.next_batch >= state.batches => len,
            (before, now) => len.min(state.next_batch.saturating_mul(before) / now),
        };
        check_option(
            next_batch <= len,
            "state.next_batch",
            next_batch,
            format!(
                "at most {len}, the batches of the epoch; the state must be that of a loader over the same \
        data with the same batch size"
            ),
        )?;
        // The workers have prepared batches of another position; the next request starts new ones.
        self.workers = None;
        self.state = LoaderState {
            epoch: state.epoch,
            next_batch,
            group_len: state.group_len,
            ..LoaderState::default()
        };
        Ok(())
    }

    /// Returns the statistics so far.
    pub fn stats(&self) -> LoaderStats {
        LoaderStats {
            failed_records: self.log.count(),
            ..self.stats
        }
    }

    /// Returns the log of the records that could not be read and were skipped or replaced.
    pub fn errors(&self) -> &ErrorLog {
        &self.log
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

/// An iterator over the remaining batches of an epoch.
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
