use std::fmt;
use std::path::PathBuf;

use overdrive_datasets::Dataset;
use overdrive_distributed::ProcessGroup;
use overdrive_generation::{GenerationConfig, generate};
use overdrive_profiling::{Machine, MemoryUsage, Report, Sample, Trackers, read_metrics};
use tch::Tensor;

use super::memory::TrainingMemory;
use super::{FinetuneArguments, FinetuneModel, InstructionData};
use crate::parallel::made_on_main;
use crate::{
    Error, Evaluation, Part, Result, RunFolder, Saving, TrainingLoop, TrainingSummary, evaluate_in,
};

/// Tokens of an answer that is shown at the end.
const ANSWER_TOKENS: usize = 64;

/// What a fine-tuning came to. Displayed: answers, loss, memory and speed.
#[derive(Debug)]
#[non_exhaustive]
pub struct FinetuneResults {
    /// The run's folder.
    pub folder: RunFolder,
    /// Where the model is that has the adapter merged into it, if that was asked for.
    pub merged: Option<PathBuf>,
    /// The losses, and how fast it was.
    pub summary: TrainingSummary,
    /// Where memory went.
    pub memory: TrainingMemory,
    /// The part of the batches' places that held tokens.
    pub fill: f64,
    /// Answers of the trained model to questions that were held back, or learned where none were.
    pub samples: Vec<Sample>,
}

/// A run before its results are written.
pub(super) struct Trained {
    pub(super) model: FinetuneModel,
    pub(super) data: InstructionData,
    pub(super) summary: TrainingSummary,
    pub(super) memory: TrainingMemory,
    pub(super) fill: f64,
}

/// Fine-tunes as `arguments` say, tells `say` what it does a line at a time, and writes the adapter (or
/// the model), the tokenizer, metrics and a report into the run's folder.
///
/// # Errors
/// What is wrong with the model, the data or a value; nothing is written then.
pub fn finetune(arguments: &FinetuneArguments, say: impl FnMut(&str)) -> Result<FinetuneResults> {
    let results = finetune_in(&ProcessGroup::single(), arguments, say)?;
    let Some(results) = results else {
        unreachable!("a world of one has a rank 0")
    };
    Ok(results)
}

/// As [`finetune`], by all processes of `group` together; what it came to is told and written on rank 0,
/// and the others get `None`.
///
/// # Errors
/// As [`finetune`], and when the processes differ or one is lost.
pub fn finetune_in(
    group: &ProcessGroup,
    arguments: &FinetuneArguments,
    mut say: impl FnMut(&str),
) -> Result<Option<FinetuneResults>> {
    let mut say = |line: &str| {
        if group.is_main() {
            say(line);
        }
    };
    let mut folder = None;
    let mut make = |arguments: &FinetuneArguments, weights, say: &mut dyn FnMut(&str)| {
        let opened = || arguments.open_or_create_folder();
        let run = folder.insert(made_on_main(group, "open the run's folder", opened)?);
        say(&format!("run folder  {}", run.root().display()));
        let saving = Saving::open(&arguments.training, group, run, weights)?;
        say(&saving.goes_on());
        let trackers = run.trackers_in(group, &arguments.training, saving.resumed_step())?;
        Ok((trackers, Some(saving)))
    };
    let mut trained = train(group, arguments, true, &mut say, &mut make)?;
    let Some(folder) = folder else {
        unreachable!("training asks for trackers before its first step")
    };
    if !group.is_main() {
        return Ok(None);
    }
    trained.model.save(&folder)?;
    let beside = match arguments.use_peft {
        true => folder.root().to_owned(),
        false => folder.model(),
    };
    trained.data.copy_tokenizer(arguments, &beside)?;
    let samples = answers(arguments, &trained)?;
    write_report(arguments, &folder, &trained, &samples)?;
    let merged = arguments.merge.then(|| folder.root().join("merged"));
    if let Some(path) = &merged {
        FinetuneModel::save_merged(arguments, &folder, path)?;
        trained.data.copy_tokenizer(arguments, path)?;
    }
    Ok(Some(FinetuneResults {
        folder,
        merged,
        summary: trained.summary,
        memory: trained.memory,
        fill: trained.fill,
        samples,
    }))
}

/// Makes the trackers and snapshots of a run, once its arguments and what learns are known.
pub(super) type MakeTrackers<'m> = &'m mut dyn FnMut(
    &FinetuneArguments,
    Vec<(String, Tensor)>,
    &mut dyn FnMut(&str),
) -> Result<(Trackers, Option<Saving>)>;

/// Loads, trains and measures.
pub(super) fn train(
    group: &ProcessGroup,
    arguments: &FinetuneArguments,
    shows_progress: bool,
    say: &mut dyn FnMut(&str),
    trackers: MakeTrackers<'_>,
) -> Result<Trained> {
    arguments.validate()?;
    arguments.training.apply()?;
    let (device, precision) = (arguments.training.device_in(group), arguments.precision());
    let mut arguments = arguments.clone();
    let arguments = &mut arguments;

    // The statistics count what is there already; a fresh peak begins below what follows.
    overdrive_sys::memory::reset_peak(device).or_else(|error| match device {
        // A GPU that nothing was put on yet has no statistics.
        tch::Device::Cuda(_) => Ok(()),
        _ => Err(error),
    })?;
    let before = MemoryUsage::of(device).allocated_bytes.unwrap_or(0);
    let mut model = FinetuneModel::load(arguments, device)?;
    let config = model.model.config();
    let context = u64::try_from(config.max_position_embeddings()).unwrap_or(u64::MAX);
    if arguments.training.context_length > context {
        say(&format!(
            "max_seq_length is {context}, the model's context (asked for: {})",
            arguments.training.context_length
        ));
        arguments.training.context_length = context;
    }
    let data = InstructionData::prepare(arguments, config.eos_token_ids(), &mut *say)?;
    let part = Part::of(group, device);
    let mut batches = data.train_loader(arguments, part)?;
    let (fill, width) = data.fill(arguments)?;
    say(&format!(
        "batches     {} of {} rows a pass, {:.1}% of their places hold tokens",
        batches.batches_per_epoch(),
        arguments.training.per_device_train_batch_size,
        100.0 * fill
    ));
    let kept = match arguments.quantization() {
        Some(options) => format!(", kept in {}", options.scheme),
        None => String::new(),
    };
    say(&format!(
        "model       {:.2}M weights{kept} on {device:?}, {precision}",
        model.model.num_parameters() as f64 / 1e6
    ));
    say(&format!(
        "trainable   {:.3}M, {:.2}%",
        model.trainable_parameters() as f64 / 1e6,
        100.0 * model.trainable_parameters() as f64 / model.all_parameters().max(1) as f64
    ));

    let plan = arguments
        .training
        .plan(batches.batches_per_epoch() as u64)?;
    // About how many tokens a row of a micro-batch has, for the estimate of memory.
    let width = width.min(arguments.training.context_length);
    let weights = || {
        let trainable = model.trainable.iter();
        let shared = trainable.map(|(name, tensor)| (name.clone(), tensor.shallow_clone()));
        shared.collect::<Vec<_>>()
    };
    let (trackers, saving) = trackers(arguments, weights(), &mut *say)?;
    let training = TrainingLoop {
        arguments: &arguments.training,
        plan,
        precision,
        optimizer: arguments.training.optimizer_over(weights())?,
        data_parallel: arguments.training.data_parallel(group, weights())?,
        trackers,
        saving,
        shows_progress: shows_progress && group.is_main(),
    };
    let summary = training.run(&mut model.model, &mut batches, &mut |model| {
        let batches = data.validation_loader(arguments, part)?;
        let batches = batches.into_iter().flatten();
        Ok(Evaluation {
            loss: evaluate_in(group, model, batches, precision)?,
            bits_per_byte: None,
        })
    })?;
    let peak = MemoryUsage::of(device).peak_allocated_bytes;
    let peak = peak.map(|peak| peak.saturating_sub(before));
    let memory = TrainingMemory::of(arguments, &model, &summary, width, peak)?;
    Ok(Trained {
        model,
        data,
        summary,
        memory,
        fill,
    })
}

/// What the model answers now.
fn answers(arguments: &FinetuneArguments, trained: &Trained) -> Result<Vec<Sample>> {
    let data = trained
        .data
        .validation
        .as_ref()
        .unwrap_or(&trained.data.train);
    let encoder = data.encoder();
    let model = &trained.model.model;
    let context = usize::try_from(model.config().max_position_embeddings()).unwrap_or(usize::MAX);
    let mut samples = Vec::new();
    let wanted = usize::try_from(arguments.training.samples).unwrap_or(usize::MAX);
    let every = (data.len() / wanted.max(1)).max(1);
    for index in (0..data.len()).step_by(every) {
        if samples.len() == wanted {
            break;
        }
        let asked = encoder.prompt(&data.record(index)?);
        let Some((prompt, ids)) = asked.map_err(|message| Error::Undecodable { message })? else {
            continue;
        };
        if ids.is_empty() || ids.len() >= context {
            continue;
        }
        let end = data.get(index)?.labels.last().copied();
        let config = GenerationConfig {
            max_new_tokens: Some(ANSWER_TOKENS.min(context - ids.len())),
            do_sample: false,
            eos_token_id: end.filter(|&id| id >= 0).into_iter().collect(),
            ..GenerationConfig::default()
        };
        let output = generate(model, std::slice::from_ref(&ids), &config)?;
        let answer: Vec<u32> = output
            .new_tokens(0)
            .iter()
            .filter_map(|&id| u32::try_from(id).ok())
            .collect();
        let completion = trained.data.tokenizer().decode(&answer, true);
        samples.push(Sample {
            prompt,
            completion: completion.map_err(|error| Error::Undecodable {
                message: error.to_string(),
            })?,
        });
    }
    Ok(samples)
}

fn write_report(
    arguments: &FinetuneArguments,
    folder: &RunFolder,
    trained: &Trained,
    samples: &[Sample],
) -> Result<()> {
    let name = arguments.model_name_or_path.file_name();
    let name = name.map(|name| name.to_string_lossy().into_owned());
    let report = Report {
        title: format!("Fine-tuning of {}", name.unwrap_or_default()),
        metrics: read_metrics(folder.metrics())?.records,
        parameters: Some(trained.model.all_parameters()),
        configuration: arguments.to_values()?,
        samples: samples.to_vec(),
        machine: Some(Machine::detect()),
        ..Report::default()
    };
    report.write_html(folder.report())?;
    report.write_loss_svg(folder.loss())?;
    Ok(())
}

impl fmt::Display for FinetuneResults {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for sample in &self.samples {
            writeln!(f, "\n---\n{}│{}", sample.prompt, sample.completion)?;
        }
        let losses = &self.summary.losses;
        if let (Some(first), Some(last)) = (losses.first(), losses.last()) {
            write!(
                f,
                "\nloss        {first:.3} → {last:.3} in {} steps",
                losses.len()
            )?;
        }
        if let Some(found) = self.summary.evaluation {
            write!(f, ", {:.3} on what was held back", found.loss)?;
        }
        writeln!(
            f,
            "\nspeed       {:.0} real tokens/s, {:.1}% of the places were padding",
            self.summary.tokens_per_second(),
            100.0 * self.summary.padding()
        )?;
        if let Some(loading) = self.summary.data_loading {
            writeln!(f, "            {loading}")?;
        }
        write!(f, "{}", self.memory)
    }
}
