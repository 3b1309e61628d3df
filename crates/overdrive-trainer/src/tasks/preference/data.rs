use std::path::Path;
use std::sync::Arc;

use overdrive_datasets::{
    AnswerKey, Dataset, DeviceLoader, InstructionDataset, RowLayout, cache_dir,
};

use super::{PreferenceBatch, PreferenceExample, collate_preferences};
use crate::Result;
use crate::arguments::FinetuneArguments;
use crate::data::{BatchFill, DataShard, Loading};
use crate::error::invalid;
use crate::tasks::finetune::{InstructionData, RecordReader, without_duplicates};

/// The preference records of a run, encoded with the model's tokenizer and chat template, and split. A record has a `prompt`
/// and the answers `chosen` and `rejected`, each a text or a list of messages
/// ([`InstructionRecord::from_preference_json`](overdrive_datasets::InstructionRecord::from_preference_json)). The tokens of
/// the prompt have no label.
#[derive(Debug)]
pub struct PreferenceData {
    /// The prompts and the chosen answers.
    pub chosen: InstructionData,
    /// The same prompts and the rejected answers, in the same order.
    pub rejected: InstructionData,
}

impl PreferenceData {
    /// Reads the files that `data` names, as [`InstructionData::prepare`] does. A record whose prompt leaves no room for one
    /// of the answers is left out.
    ///
    /// # Errors
    /// As [`InstructionData::prepare`], and [`Error::Common`](crate::Error::Common) for `packing` and `padding_free`, and
    /// without `completion_only_loss`.
    pub fn prepare(
        arguments: &FinetuneArguments,
        eos_token_ids: &[i64],
        say: impl FnMut(&str),
    ) -> Result<Self> {
        Self::prepare_in(&cache_dir("tokens")?, arguments, eos_token_ids, say)
    }

    /// As [`prepare`](Self::prepare), with a cache folder of the caller's choice.
    ///
    /// # Errors
    /// As [`prepare`](Self::prepare).
    pub fn prepare_in(
        cache: &Path,
        arguments: &FinetuneArguments,
        eos_token_ids: &[i64],
        mut say: impl FnMut(&str),
    ) -> Result<Self> {
        check(arguments)?;
        let say: &mut dyn FnMut(&str) = &mut say;
        let reader = RecordReader::open(cache, arguments, eos_token_ids, say)?;
        let chosen = reader.read(arguments, AnswerKey::Chosen, say)?;
        let rejected = reader.read(arguments, AnswerKey::Rejected, say)?;
        let mut answers = of_the_same_records(&chosen, &rejected)?;
        if arguments.training.remove_duplicates {
            answers = without_duplicates(answers, say)?;
        }
        let [chosen, rejected] = answers;
        Ok(Self {
            chosen: reader.split(arguments, &chosen, say)?,
            // The split depends only on the seed and the number of examples, so it equals that of
            // the chosen answers.
            rejected: reader.split(arguments, &rejected, &mut |_| {})?,
        })
    }

    /// Returns an endless loader of the training batches, of `per_device_train_batch_size` pairs each.
    ///
    /// # Errors
    /// As [`InstructionData::train_loader`].
    pub fn train_loader(
        &self,
        arguments: &FinetuneArguments,
        shard: impl Into<DataShard>,
    ) -> Result<DeviceLoader<PreferenceBatch>> {
        let pairs = self.train();
        let lengths = lengths(arguments, &pairs);
        self.loader(arguments, shard, pairs, lengths, true)
    }

    /// Returns a loader of the held-out pairs, of at most `max_eval_batches` batches over all processes. `None` without
    /// evaluation.
    ///
    /// # Errors
    /// As [`train_loader`](Self::train_loader).
    pub fn validation_loader(
        &self,
        arguments: &FinetuneArguments,
        shard: impl Into<DataShard>,
    ) -> Result<Option<DeviceLoader<PreferenceBatch>>> {
        let (Some(chosen), Some(rejected)) = (&self.chosen.validation, &self.rejected.validation)
        else {
            return Ok(None);
        };
        let pairs = Pairs {
            chosen: Arc::clone(chosen),
            rejected: Arc::clone(rejected),
            len: chosen.len().min(arguments.training.max_eval_rows()),
        };
        self.loader(arguments, shard, pairs, None, false).map(Some)
    }

    /// Returns the share of tokens in the batches of an epoch, and the number of tokens in the longest row.
    pub(super) fn fill(&self, arguments: &FinetuneArguments) -> Result<(BatchFill, u64)> {
        let pairs = self.train();
        let how = Loading::new(&arguments.training, tch::Device::Cpu, true);
        let sequences = |pair| pairs.lengths(pair);
        let grouped = lengths(arguments, &pairs);
        let batches = how.padded_fill(pairs.len, multiple_of(arguments), grouped, sequences)?;
        let longest = (0..pairs.len).flat_map(sequences).max();
        let fill = BatchFill {
            batches,
            rows: None,
        };
        Ok((fill, longest.unwrap_or(1).max(1) as u64))
    }

    fn train(&self) -> Pairs {
        Pairs {
            chosen: Arc::clone(&self.chosen.train),
            rejected: Arc::clone(&self.rejected.train),
            len: self.chosen.train.len(),
        }
    }

    fn loader(
        &self,
        arguments: &FinetuneArguments,
        shard: impl Into<DataShard>,
        pairs: Pairs,
        lengths: Option<Vec<u32>>,
        endless: bool,
    ) -> Result<DeviceLoader<PreferenceBatch>> {
        let (pad_token, multiple_of) = (self.chosen.pad_token, multiple_of(arguments));
        let collate = move |pairs: Vec<_>| collate_preferences(&pairs, pad_token, multiple_of);
        Loading::new(&arguments.training, shard, endless).collated(pairs, lengths, collate)
    }
}

/// The pairs of a split.
#[derive(Debug)]
struct Pairs {
    chosen: Arc<InstructionDataset>,
    rejected: Arc<InstructionDataset>,
    len: usize,
}

impl Pairs {
    /// Returns the numbers of tokens of both rows of a pair.
    fn lengths(&self, pair: usize) -> [usize; 2] {
        [&self.chosen, &self.rejected].map(|answers| answers.lengths()[pair] as usize)
    }
}

impl Dataset for Pairs {
    type Item = PreferenceExample;

    fn len(&self) -> usize {
        self.len
    }

    fn get(&self, index: usize) -> overdrive_datasets::Result<PreferenceExample> {
        Ok(PreferenceExample {
            chosen: self.chosen.get(index)?,
            rejected: self.rejected.get(index)?,
        })
    }

    fn prefetch(&self, indices: &[usize]) {
        self.chosen.prefetch(indices);
        self.rejected.prefetch(indices);
    }

    fn check_unchanged(&self) -> overdrive_datasets::Result<()> {
        self.chosen.check_unchanged()?;
        self.rejected.check_unchanged()
    }
}

/// Returns the lengths by which pairs are grouped: those of the longer rows, which determine the width of a batch.
fn lengths(arguments: &FinetuneArguments, pairs: &Pairs) -> Option<Vec<u32>> {
    let longer = |pair| {
        let [chosen, rejected] = pairs.lengths(pair);
        u32::try_from(chosen.max(rejected)).unwrap_or(u32::MAX)
    };
    let grouped = arguments.training.group_by_length;
    grouped.then(|| (0..pairs.len).map(longer).collect())
}

fn multiple_of(arguments: &FinetuneArguments) -> usize {
    match arguments.training.row_layout(0) {
        RowLayout::Padded { multiple_of, .. } => multiple_of,
        RowLayout::EndToEnd => 1,
    }
}

/// Refuses the options of instruction data that would change the loss of pairs or their rows.
fn check(arguments: &FinetuneArguments) -> Result<()> {
    let training = &arguments.training;
    let padded = "false for preferences, whose rows are padded; drop it, or set `group_by_length`";
    for (key, value) in [
        ("packing", training.packing),
        ("padding_free", training.padding_free),
    ] {
        if value {
            return invalid(key, value, padded);
        }
    }
    match arguments.completion_only_loss {
        true => Ok(()),
        false => invalid(
            "completion_only_loss",
            false,
            "true in preference training, which compares answers; leave the key out",
        ),
    }
}

/// Returns the examples of the records that both datasets contain: a dataset leaves out a record whose answer has
/// no tokens.
fn of_the_same_records(
    chosen: &InstructionDataset,
    rejected: &InstructionDataset,
) -> Result<[InstructionDataset; 2]> {
    let numbers = |answers: &InstructionDataset| {
        let examples = 0..answers.len();
        let numbers = examples.map(|index| answers.record_number(index));
        numbers.collect::<overdrive_datasets::Result<Vec<usize>>>()
    };
    let (of_chosen, of_rejected) = (numbers(chosen)?, numbers(rejected)?);
    // Both lists are in the order of the files.
    let kept = |own: &[usize], other: &[usize]| -> Vec<usize> {
        let is_shared = |index: &usize| other.binary_search(&own[*index]).is_ok();
        (0..own.len()).filter(is_shared).collect()
    };
    Ok([
        chosen.subset(&kept(&of_chosen, &of_rejected))?,
        rejected.subset(&kept(&of_rejected, &of_chosen))?,
    ])
}
