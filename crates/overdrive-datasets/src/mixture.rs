//! Mixtures: several datasets in one training run, each with a share of its own.

use std::fmt;
use std::sync::Arc;

use overdrive_core::random::random_u64;
use overdrive_core::{check_option, check_positive};

use crate::sampling::{MIN_SHARE, Permutation, Sampler, WeightPattern};
use crate::{Dataset, Error, LoaderState, Result};

/// The stream of random numbers that gives each source its seed (see [`overdrive_core::random::random_u64`]).
const SOURCE_STREAM: u32 = 0x4D49_5854;

/// Several datasets (sources) from which a [`MixtureSampler`] draws by weights.
///
/// As a dataset it holds the records of all sources, one source after the other. [`Mixture::sampler`] gives the order in
/// which a run reads them. Unlike [`crate::Interleave`], which is a list with an end, a mixture is for training over many
/// epochs: it shuffles each source anew in each of its epochs, counts them, and can change the weights during the run.
///
/// ```
/// use overdrive_datasets::{DataLoader, Mixture, SampledBatches, Shard, TextLines, TextOptions, WorkerOptions};
/// # let dir = tempfile::tempdir().unwrap();
/// # let open = |name: &str, count: usize| {
/// #     std::fs::write(dir.path().join(name), format!("{name}\n").repeat(count)).unwrap();
/// #     TextLines::open([dir.path().join(name)], &TextOptions::default())
/// # };
/// let (code, prose) = (open("code", 900)?, open("prose", 100)?);
/// let mixture = Mixture::new(vec![("code".to_owned(), code), ("prose".to_owned(), prose)])?;
/// let sampler = mixture.sampler(&[0.5, 0.5], 42)?;
/// let batches = SampledBatches::new(sampler.clone(), 10, false, Shard::default())?;
/// let mut loader = DataLoader::with(mixture, batches, Ok, WorkerOptions::default())?;
/// let first: Vec<String> = loader.epoch().take(50).collect::<Result<Vec<_>, _>>()?.concat();
/// let code = first.iter().filter(|text| *text == "code").count();
/// assert!((200..300).contains(&code));
/// // Half of 500 records are prose, of which there are 100.
/// let epochs = sampler.source_epochs(&loader.state_dict());
/// assert_eq!(epochs[1].0, "prose");
/// assert!((2.0..3.0).contains(&epochs[1].1));
/// # Ok::<(), overdrive_datasets::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct Mixture<D> {
    sources: Vec<D>,
    places: Arc<[Place]>,
}

/// The records of a source among those of a mixture.
#[derive(Debug, Clone)]
struct Place {
    name: String,
    first: usize,
    len: usize,
}

impl<D: Dataset> Mixture<D> {
    /// Returns the mixture of these sources, each with a name for logs.
    ///
    /// # Errors
    /// Returns an error if there is no source, if one has no records, or if all of them together have more than
    /// `usize::MAX` records.
    pub fn new(sources: Vec<(String, D)>) -> Result<Self> {
        check_positive("sources", sources.len())?;
        let mut places = Vec::with_capacity(sources.len());
        let mut first = 0_usize;
        for (name, source) in &sources {
            let len = source.len();
            let end = first.checked_add(len).filter(|_| len > 0);
            check_option(
                end.is_some(),
                "sources",
                format!("a list with {len} records of {name:?}"),
                "sources with at least one record each, and a finite number of records together",
            )?;
            let name = name.clone();
            places.push(Place { name, first, len });
            first = end.unwrap_or(first);
        }
        Ok(Self {
            sources: sources.into_iter().map(|(_, source)| source).collect(),
            places: places.into(),
        })
    }

    /// Returns the order in which a run with this seed reads the records: each source has the share of its weight. The
    /// weights need not sum to 1; a weight of 0 leaves a source out.
    ///
    /// # Errors
    /// Returns an error if the number of weights is not that of the sources, if a weight is negative or not finite, if
    /// all are 0, or if one is below 1/16,384 of their sum and not 0.
    pub fn sampler(&self, weights: &[f64], seed: u64) -> Result<MixtureSampler> {
        let none = vec![0; self.sources.len()];
        let first = Stage::new(0, weights, seed, none)?;
        Ok(MixtureSampler {
            places: self.places.clone(),
            seed,
            stages: vec![Arc::new(first)],
        })
    }
}

impl<D: Dataset> Dataset for Mixture<D> {
    type Item = D::Item;

    fn len(&self) -> usize {
        all_records(&self.places)
    }

    fn get(&self, index: usize) -> Result<D::Item> {
        let number = self.places.partition_point(|place| place.first <= index);
        let place = number.checked_sub(1).map(|number| &self.places[number]);
        match place.map(|place| index - place.first) {
            Some(record) if index < self.len() => self.sources[number - 1].get(record),
            _ => Err(Error::NoSuchRecord {
                index,
                len: self.len(),
            }),
        }
    }

    fn prefetch(&self, indices: &[usize]) {
        let mut of_each = vec![Vec::new(); self.sources.len()];
        for &index in indices.iter().filter(|&&index| index < self.len()) {
            let number = self.places.partition_point(|place| place.first <= index);
            if let Some(number) = number.checked_sub(1) {
                of_each[number].push(index - self.places[number].first);
            }
        }
        for (source, records) in self.sources.iter().zip(of_each) {
            source.prefetch(&records);
        }
    }

    fn check_unchanged(&self) -> Result<()> {
        self.sources.iter().try_for_each(Dataset::check_unchanged)
    }
}

fn all_records(places: &[Place]) -> usize {
    places.last().map_or(0, |last| last.first + last.len)
}

/// The order in which a run reads the records of a [`Mixture`]: a pure function of the position in the run.
///
/// Each 16,384 consecutive records hold each source in its share, in an order that is drawn once under the seed. Each
/// source has epochs of its own: all of its records once, in an order that its number and that of the epoch determine,
/// before the first one comes again. So a run resumes at any position, with any number of workers and processes.
///
/// An epoch of the sampler has as many records as all sources together.
#[derive(Debug, Clone)]
pub struct MixtureSampler {
    places: Arc<[Place]>,
    seed: u64,
    /// In the order of their starts; the first starts at 0.
    stages: Vec<Arc<Stage>>,
}

/// A section of a run with constant weights.
struct Stage {
    /// The first record of the run that belongs to the stage.
    start: usize,
    pattern: WeightPattern,
    /// The number of records of each source that were read before the stage.
    read: Vec<usize>,
}

impl Stage {
    fn new(start: usize, weights: &[f64], seed: u64, read: Vec<usize>) -> Result<Self> {
        let sum: f64 = weights.iter().sum();
        let is_weight = |&weight: &f64| weight == 0.0 || weight >= sum * MIN_SHARE;
        check_option(
            weights.len() == read.len()
                && sum.is_finite()
                && sum > 0.0
                && weights.iter().all(is_weight),
            "weights",
            format!("{weights:?}"),
            format!(
                "{} finite weights, one for each source, each 0 or at least 1/16384 of their sum, which is positive",
                read.len()
            ),
        )?;
        Ok(Self {
            start,
            pattern: WeightPattern::new(weights, seed),
            read,
        })
    }

    /// Returns the number of records of each source before `position` of the run.
    fn read_before(&self, position: usize) -> Vec<usize> {
        let since = self.pattern.before(position - self.start);
        let read = self.read.iter().zip(since);
        read.map(|(before, since)| before.saturating_add(since))
            .collect()
    }
}

impl MixtureSampler {
    /// Changes the weights from record `start` of the run on, counted over all epochs and processes: a curriculum.
    ///
    /// # Errors
    /// Returns an error if `start` is not after that of the stage before, or for weights that [`Mixture::sampler`]
    /// refuses.
    pub fn with_stage(mut self, start: usize, weights: &[f64]) -> Result<Self> {
        let last = self.stage(usize::MAX);
        check_option(
            start > last.start,
            "start",
            start,
            format!("above {}, where the stage before it starts", last.start),
        )?;
        let read = last.read_before(start);
        let stage = Stage::new(start, weights, self.seed, read)?;
        self.stages.push(Arc::new(stage));
        Ok(self)
    }

    /// Returns the passes over each source before the position of a loader, over all processes, with the name of the
    /// source.
    pub fn source_epochs(&self, state: &LoaderState) -> Vec<(String, f64)> {
        let records = state.next_batch.saturating_mul(state.joint_batch_size);
        let position = self.position(state.epoch, records.min(self.len()));
        let read = self.stage(position).read_before(position);
        let sources = self.places.iter().zip(read);
        sources
            .map(|(place, read)| (place.name.clone(), read as f64 / place.len as f64))
            .collect()
    }

    /// Returns the stage of a position of the run.
    fn stage(&self, position: usize) -> &Stage {
        let after = self.stages.partition_point(|stage| stage.start <= position);
        // The first stage starts at 0, so `after` is at least 1.
        &self.stages[after - 1]
    }

    /// Returns the position in the run of a position of an epoch.
    fn position(&self, epoch: u64, position: usize) -> usize {
        let epoch = usize::try_from(epoch).unwrap_or(usize::MAX);
        self.len().saturating_mul(epoch).saturating_add(position)
    }
}

impl Sampler for MixtureSampler {
    fn len(&self) -> usize {
        all_records(&self.places)
    }

    fn index(&self, epoch: u64, position: usize) -> usize {
        let position = self.position(epoch, position);
        let stage = self.stage(position);
        let (number, since) = stage.pattern.source(position - stage.start);
        let read = stage.read[number].saturating_add(since);
        let place = &self.places[number];
        let seed = random_u64(self.seed, SOURCE_STREAM, number as u64);
        let order = Permutation::new(place.len, seed, (read / place.len) as u64);
        place.first + order.apply(read % place.len)
    }
}

impl fmt::Debug for Stage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The pattern has 16,384 entries.
        f.debug_struct("Stage")
            .field("start", &self.start)
            .field("read", &self.read)
            .finish_non_exhaustive()
    }
}
